//! What an application or an undoing leaves when it is killed, and how the next one
//! in the folder clears it.
//!
//! Temporary files are known by their names. A backup is not: it may be the user's.
//! But the manifest is staged before the backups it lists, so that a manifest which
//! never got its name tells which backups were made for nothing. All this holds only
//! while nobody else is at work in the folder, that is, under its lock.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use crate::disk::Disk;
use crate::lock::FolderLocks;
use crate::manifest::{MANIFEST, Manifest, RecordedFile};

/// What a temporary file holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Role {
    New,
    Old,
}

impl Role {
    fn ending(self) -> &'static str {
        match self {
            Role::New => "-new",
            Role::Old => "-old",
        }
    }
}

const MARK: &str = ".cinch-";

/// A name in the target's folder, where a rename is possible and at once. It is one
/// that nobody has: in a container every process has the same number.
pub(crate) fn beside(target: &Path, role: Role) -> PathBuf {
    let process = std::process::id();
    let named = |which: String| {
        let mut name = OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!("{MARK}{which}{}", role.ending()));
        target.with_file_name(name)
    };
    let first = named(process.to_string());
    let numbered = (1_u64..).map(|number| named(format!("{process}.{number}")));
    std::iter::once(first.clone())
        .chain(numbered)
        .find(|path| fs::symlink_metadata(path).is_err())
        .unwrap_or(first)
}

/// Clears the locked folders. What cannot be cleared stays: it is in nobody's way.
pub(crate) fn clear(disk: &dyn Disk, locks: &FolderLocks) {
    for folder in locks.held() {
        // A damaged manifest is told by those who need it.
        if let Ok(manifest) = Manifest::read(disk, folder) {
            clear_folder(disk, folder, &manifest);
        }
    }
}

fn clear_folder(disk: &dyn Disk, folder: &Path, manifest: &Manifest) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((target, role)) = target_of(&name) else {
            continue;
        };
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        if role == Role::New && target == MANIFEST {
            clear_backups(disk, &path, manifest);
        }
        let target = folder.join(target);
        let is_needed = manifest.files().any(|file| file.backup == target);
        // A backup is set aside before its record goes: an undoing that was killed
        // in between is finished by the next one, which needs it.
        let _ = if role == Role::Old && is_needed && fs::symlink_metadata(&target).is_err() {
            disk.rename(&path, &target)
        } else {
            disk.remove(&path)
        };
    }
}

/// The name that a temporary file stands beside.
fn target_of(name: &OsStr) -> Option<(&OsStr, Role)> {
    let name = name.as_encoded_bytes();
    let (stem, role) = [Role::New, Role::Old]
        .into_iter()
        .find_map(|role| Some((name.strip_suffix(role.ending().as_bytes())?, role)))?;
    let stem = stem.strip_prefix(b".")?;
    let mark = MARK.as_bytes();
    let at = stem.windows(mark.len()).rposition(|part| part == mark)?;
    let (target, which) = (&stem[..at], &stem[at + mark.len()..]);
    let is_number = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    let is_ours = !target.is_empty() && which.split(|byte| *byte == b'.').all(is_number);
    Some((name_of(target).filter(|_| is_ours)?, role))
}

#[cfg(unix)]
fn name_of(bytes: &[u8]) -> Option<&OsStr> {
    Some(std::os::unix::ffi::OsStrExt::from_bytes(bytes))
}

/// Elsewhere a name that is no text cannot be cut, and is left alone.
#[cfg(not(unix))]
fn name_of(bytes: &[u8]) -> Option<&OsStr> {
    std::str::from_utf8(bytes).ok().map(OsStr::new)
}

/// Removes the backups, whole or half written, that a manifest without its name lists
/// and the manifest does not, where their file still has all they hold.
fn clear_backups(disk: &dyn Disk, staged: &Path, manifest: &Manifest) {
    let Ok(staged) = Manifest::read_from(disk, staged.to_owned()) else {
        return;
    };
    let is_stray = |file: &&RecordedFile| {
        file.path.parent() == Some(manifest.folder())
            && manifest.files().all(|known| known.backup != file.backup)
            && fs::symlink_metadata(&file.backup).is_ok_and(|metadata| metadata.is_file())
    };
    for file in staged.files().filter(is_stray) {
        if let (Ok(current), Ok(kept)) = (disk.read(&file.path), disk.read(&file.backup))
            && current.starts_with(&kept)
        {
            let _ = disk.remove(&file.backup);
        }
    }
}
