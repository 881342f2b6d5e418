//! Replaces several files, all or none.
//!
//! Everything that can fail for want of space or permission happens first,
//! beside the files: the new contents under temporary names, the old ones as
//! backups, all brought onto the medium. Then each file is checked to be still
//! what it was, and only then the new ones are renamed over the old, one by one.
//! When a rename fails, those before it are taken back from the backups. A crash
//! between two renames leaves every file whole and every old content beside it.
//! What it leaves beside them, `leftover` clears.

use std::io;
use std::path::{Path, PathBuf};

use crate::disk::Disk;
use crate::error::ConfigError;
use crate::leftover::{self, Role};

/// What becomes of one file.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub target: PathBuf,
    /// What must be there now; `None`: nothing.
    pub before: Option<Vec<u8>>,
    /// What shall be there; `None`: nothing.
    pub after: Option<Vec<u8>>,
    /// Where the old content stays for good, under a name nobody has yet.
    pub backup: Option<PathBuf>,
}

/// What a step has put beside its target.
#[derive(Debug, Default)]
struct Staged {
    /// The new content.
    fresh: Option<PathBuf>,
    /// The old content.
    kept: Option<PathBuf>,
}

/// Performs all steps. On success, names temporary files that could not be
/// removed; on an error, every file is as it was.
pub(crate) fn perform(disk: &dyn Disk, steps: &[Step]) -> Result<Vec<PathBuf>, ConfigError> {
    let mut staged: Vec<Staged> = Vec::new();
    if let Err(error) = stage_all(disk, steps, &mut staged).and_then(|()| check(disk, steps)) {
        discard(disk, staged.iter().flat_map(paths));
        return Err(error);
    }
    for (index, (step, beside)) in steps.iter().zip(&mut staged).enumerate() {
        if let Err(source) = swap(disk, step, beside) {
            let error = failed(&step.target, "be replaced", source);
            return Err(roll_back(disk, steps, &staged, index, error));
        }
    }
    let mut folders: Vec<&Path> = steps
        .iter()
        .filter_map(|step| step.target.parent())
        .collect();
    folders.sort_unstable();
    folders.dedup();
    for folder in folders {
        if let Err(source) = disk.sync(folder) {
            let error = failed(folder, "be written", source);
            return Err(roll_back(disk, steps, &staged, steps.len(), error));
        }
    }
    let temporary = steps
        .iter()
        .zip(&staged)
        .filter(|(step, _)| step.backup.is_none())
        .filter_map(|(_, beside)| beside.kept.as_deref());
    Ok(discard(disk, temporary))
}

fn paths(staged: &Staged) -> impl Iterator<Item = &Path> {
    staged
        .fresh
        .iter()
        .chain(&staged.kept)
        .map(PathBuf::as_path)
}

fn stage_all(disk: &dyn Disk, steps: &[Step], staged: &mut Vec<Staged>) -> Result<(), ConfigError> {
    for step in steps {
        staged.push(Staged::default());
        let Some(beside) = staged.last_mut() else {
            break;
        };
        if let Some(before) = &step.before
            && step.after.is_some()
        {
            let kept = step
                .backup
                .clone()
                .unwrap_or_else(|| leftover::beside(&step.target, Role::Old));
            create(disk, &kept, before, Some(&step.target), &mut beside.kept)?;
        }
        if let Some(after) = &step.after {
            let fresh = leftover::beside(&step.target, Role::New);
            let like = step.before.is_some().then_some(step.target.as_path());
            create(disk, &fresh, after, like, &mut beside.fresh)?;
        }
    }
    Ok(())
}

/// Writes a file beside a target. It is noted as soon as it may exist, so that
/// half a file is cleared away like a whole one.
fn create(
    disk: &dyn Disk,
    path: &Path,
    contents: &[u8],
    like: Option<&Path>,
    noted: &mut Option<PathBuf>,
) -> Result<(), ConfigError> {
    let written = disk.create(path, contents, like);
    if !matches!(&written, Err(error) if error.kind() == io::ErrorKind::AlreadyExists) {
        *noted = Some(path.to_owned());
    }
    written
        .and_then(|()| disk.sync(path))
        .map_err(|source| failed(path, "be written", source))
}

fn check(disk: &dyn Disk, steps: &[Step]) -> Result<(), ConfigError> {
    for step in steps {
        let now = match disk.read(&step.target) {
            Ok(contents) => Some(contents),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(failed(&step.target, "be read", source)),
        };
        if now != step.before {
            return Err(ConfigError::ChangedMeanwhile {
                path: step.target.clone(),
            });
        }
    }
    Ok(())
}

fn swap(disk: &dyn Disk, step: &Step, beside: &mut Staged) -> io::Result<()> {
    match &beside.fresh {
        Some(fresh) => disk.rename(fresh, &step.target),
        None if step.before.is_some() => {
            let aside = leftover::beside(&step.target, Role::Old);
            disk.rename(&step.target, &aside)?;
            beside.kept = Some(aside);
            Ok(())
        }
        None => Ok(()),
    }
}

/// Takes back the first `done` steps and clears the rest away.
fn roll_back(
    disk: &dyn Disk,
    steps: &[Step],
    staged: &[Staged],
    done: usize,
    error: ConfigError,
) -> ConfigError {
    let mut stuck = Vec::new();
    for (step, beside) in steps.iter().zip(staged).take(done).rev() {
        let restored = match &beside.kept {
            Some(kept) => disk.rename(kept, &step.target),
            None if step.after.is_some() => disk.remove(&step.target),
            None => Ok(()),
        };
        if restored.is_err() {
            stuck.push((step.target.clone(), beside.kept.clone()));
        }
    }
    discard(disk, staged.iter().skip(done).flat_map(paths));
    if stuck.is_empty() {
        return error;
    }
    ConfigError::RollbackFailed {
        cause: Box::new(error),
        stuck,
    }
}

/// Removes files; gives those that stay.
fn discard<'a>(disk: &dyn Disk, paths: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    paths
        .filter(|path| disk.remove(path).is_err())
        .map(Path::to_owned)
        .collect()
}

fn failed(path: &Path, what: &'static str, source: io::Error) -> ConfigError {
    ConfigError::NotWritten {
        path: path.to_owned(),
        what,
        source,
    }
}
