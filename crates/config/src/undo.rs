//! Takes an application back: every file byte for byte as it was, and nothing
//! left of what was created beside it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::apply::{ChangedFile, Report, check_writable, free_backup};
use crate::disk::{Disk, LocalDisk};
use crate::error::ConfigError;
use crate::leftover;
use crate::lock::FolderLocks;
use crate::manifest::{Manifest, Record, fingerprint, folders};
use crate::transaction::{self, Step};

/// Takes back the last application of the files at `paths`, in all the files it
/// changed, or in none. A file that was edited since is only restored with
/// `force`, and then the edited content is kept as a backup.
pub fn undo(paths: &[PathBuf], force: bool) -> Result<Report, ConfigError> {
    undo_on(&LocalDisk, paths, force)
}

/// As [`undo`], on a disk of the caller's choice.
pub fn undo_on(disk: &dyn Disk, paths: &[PathBuf], force: bool) -> Result<Report, ConfigError> {
    // The records say which folders to lock, and are read again once these are.
    let locks = FolderLocks::of(files_of(&last_records(disk, paths)?))?;
    leftover::clear(disk, &locks);
    let records = last_records(disk, paths)?;
    if let Some(path) = files_of(&records).find(|path| !locks.cover(path)) {
        return Err(ConfigError::ChangedMeanwhile {
            path: path.to_owned(),
        });
    }
    let mut steps = Vec::new();
    let mut files = Vec::new();
    for file in records.iter().flat_map(|record| &record.files) {
        let backup = restorable(disk, &file.backup, &file.before, force)?;
        let current = disk.read(&file.path).ok();
        // An application or an undoing that was killed left some files as they were
        // before it.
        let untouched = current
            .as_ref()
            .map(|bytes| fingerprint(bytes))
            .is_some_and(|now| now == file.after || now == file.before);
        if !untouched && !force {
            return Err(ConfigError::EditedSince {
                path: file.path.clone(),
                backup: file.backup.clone(),
            });
        }
        if current.is_some() {
            check_writable(&file.path)?;
        }
        let kept = (!untouched && current.is_some()).then(|| free_backup(&file.path));
        files.push(ChangedFile {
            path: given(paths, &file.path),
            backup: kept.clone(),
        });
        steps.push(Step {
            target: file.path.clone(),
            before: current,
            after: Some(backup.clone()),
            backup: kept,
        });
        steps.push(Step {
            target: file.backup.clone(),
            before: Some(backup),
            after: None,
            backup: None,
        });
    }
    // The records of the files that were named go last: while one is there, the same command
    // finishes an undoing that was killed.
    let named: Vec<PathBuf> = paths
        .iter()
        .filter_map(|path| Some(fs::canonicalize(path).ok()?.parent()?.to_owned()))
        .collect();
    let mut touched: Vec<PathBuf> = records.iter().flat_map(folders).collect();
    touched.sort();
    touched.dedup();
    touched.sort_by_key(|folder| named.contains(folder));
    for folder in touched {
        let mut manifest = Manifest::read(disk, &folder)?;
        manifest
            .records
            .retain(|record| records.iter().all(|undone| undone.id != record.id));
        steps.push(manifest.step()?);
    }
    let left_behind = transaction::perform(disk, &steps)?;
    Ok(Report { files, left_behind })
}

fn files_of(records: &[Record]) -> impl Iterator<Item = &Path> {
    let files = records.iter().flat_map(|record| &record.files);
    files.map(|file| file.path.as_path())
}

/// The applications to take back: the last one of each path, where it is also
/// the last one of every other file it changed.
fn last_records(disk: &dyn Disk, paths: &[PathBuf]) -> Result<Vec<Record>, ConfigError> {
    let mut records: Vec<Record> = Vec::new();
    for given in paths {
        let path = fs::canonicalize(given).or_else(|_| absolute(given));
        let path = path.map_err(|source| ConfigError::Unreadable {
            path: given.clone(),
            source,
        })?;
        let Some(folder) = path.parent() else {
            continue;
        };
        let manifest = Manifest::read(disk, folder)?;
        let Some(record) = manifest.last_of(&path) else {
            continue;
        };
        let known = records.iter().any(|known| known.id == record.id);
        if !known && let Some(record) = last_everywhere(disk, record)? {
            records.push(record);
        }
    }
    if records.is_empty() {
        let names: Vec<String> = paths
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        return Err(ConfigError::NothingToUndo {
            paths: names.join(", "),
        });
    }
    Ok(records)
}

/// The record, where it is the last one of each of its files by the manifests of
/// their own folders: another folder's files are touched only where that folder says
/// the same to the letter. A folder that does not know the application was not
/// reached before it was killed, or was left already when its undoing was: its files
/// are left out, if they are as they were before.
fn last_everywhere(disk: &dyn Disk, record: &Record) -> Result<Option<Record>, ConfigError> {
    let mut concerned = record.clone();
    concerned.files.clear();
    for file in &record.files {
        let folder = file.path.parent().unwrap_or(Path::new("/"));
        let manifest = Manifest::read(disk, folder)?;
        if manifest.last_of(&file.path) == Some(record) {
            concerned.files.push(file.clone());
            continue;
        }
        let is_known = manifest.records.iter().any(|known| known.id == record.id);
        let current = disk.read(&file.path);
        let is_as_before = current.is_ok_and(|bytes| fingerprint(&bytes) == file.before);
        if is_known || !is_as_before {
            return Ok(None);
        }
    }
    Ok(Some(concerned))
}

/// For a file that is gone: its folder must still be there.
fn absolute(path: &Path) -> std::io::Result<PathBuf> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = fs::canonicalize(folder.unwrap_or(Path::new(".")))?;
    Ok(folder.join(path.file_name().unwrap_or_default()))
}

fn restorable(
    disk: &dyn Disk,
    backup: &Path,
    before: &str,
    force: bool,
) -> Result<Vec<u8>, ConfigError> {
    let bytes = disk
        .read(backup)
        .map_err(|source| ConfigError::BackupGone {
            backup: backup.to_owned(),
            source,
        })?;
    if fingerprint(&bytes) != before && !force {
        return Err(ConfigError::BackupChanged {
            backup: backup.to_owned(),
        });
    }
    Ok(bytes)
}

/// The name by which the user knows a file.
fn given(paths: &[PathBuf], path: &Path) -> PathBuf {
    paths
        .iter()
        .find(|given| fs::canonicalize(given).is_ok_and(|real| real == path))
        .map_or_else(|| path.to_owned(), PathBuf::clone)
}
