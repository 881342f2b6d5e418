//! Names and durability of checkpoint folders.
//!
//! The name alone says what a folder is: `step-…` is complete, `.partial-…` is being written (or
//! its writer died), `.trash-…` is being removed, `aside-step-…` was moved out of the way and is
//! the user's to delete. Everything here keeps that reading true across kills and power cuts.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};

use cinch_files::{PARTIAL_PREFIX, parent_of, sync_folder};

use super::error::{CheckpointError, IoContext};

const STEP_PREFIX: &str = "step-";
const TRASH_PREFIX: &str = ".trash-";

/// What this process is writing at the moment. Needed because process ids come back: in a
/// container every run may be process 1, and then a leftover of the killed run carries our own id.
static IN_FLIGHT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// `step-00000123`: what a checkpoint's folder is called.
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The step of a folder name, if the name is exactly what [`step_name`] gives.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP_PREFIX)?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// All `step-…` folders inside `folder`, oldest first, whatever their contents.
/// A folder that is not there holds none.
pub(super) fn steps_in(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut steps = Vec::new();
    for entry in children(folder)? {
        let name = entry.file_name();
        if let Some(step) = name.to_str().and_then(step_of)
            && entry.path().is_dir()
        {
            steps.push((step, entry.path()));
        }
    }
    steps.sort();
    Ok(steps)
}

fn children(folder: &Path) -> io::Result<Vec<fs::DirEntry>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// A `.partial-…` folder under construction. Dropped without [`Partial::publish`], it removes
/// itself: a failed save leaves nothing behind and gives its bytes back.
pub(super) struct Partial {
    path: PathBuf,
    key: PathBuf,
}

impl Partial {
    pub(super) fn create(parent: &Path, step: u64) -> Result<Self, CheckpointError> {
        let name = format!("{PARTIAL_PREFIX}{}-{}", step_name(step), process::id());
        let path = parent.join(&name);
        let key = parent.canonicalize().at("resolve", parent)?.join(name);
        if !in_flight().insert(key.clone()) {
            let busy = io::Error::new(
                io::ErrorKind::ResourceBusy,
                "another thread of this process is saving the same step",
            );
            return Err(busy).at("create", &path);
        }
        // From here on the guard cleans up, also when creating fails.
        let partial = Self { path, key };
        remove(&partial.path).at("remove the leftover", &partial.path)?;
        fs::create_dir(&partial.path).at("create", &partial.path)?;
        Ok(partial)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the finished folder its name. Its files must have been synced already.
    pub(super) fn publish(self, target: &Path) -> Result<(), CheckpointError> {
        sync_folder(&self.path).at("sync", &self.path)?;
        fs::rename(&self.path, target).at("give the finished checkpoint its name", target)?;
        sync_folder(parent_of(target)).at("sync", parent_of(target))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a rename there is nothing left under this name. A removal that fails here is
        // caught up by the next sweep, once this process is gone.
        let _ = remove(&self.path);
        in_flight().remove(&self.key);
    }
}

fn in_flight() -> std::sync::MutexGuard<'static, BTreeSet<PathBuf>> {
    IN_FLIGHT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces a small file whole.
pub(super) fn replace_file(path: &Path, contents: &[u8]) -> Result<(), CheckpointError> {
    cinch_files::replace(path, contents).at("write", path)
}

/// Removes a complete checkpoint. The rename comes first, so that a removal killed halfway leaves
/// `.trash-…` and never a `step-…` folder with files missing.
pub(super) fn discard(path: &Path) -> Result<(), CheckpointError> {
    let parent = parent_of(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let trash = parent.join(format!("{TRASH_PREFIX}{name}-{}", process::id()));
    remove(&trash).at("remove", &trash)?;
    fs::rename(path, &trash).at("remove", path)?;
    sync_folder(parent).at("sync", parent)?;
    remove(&trash).at("remove", &trash)
}

/// Moves a folder or a file to the first free `aside-…` name beside it and returns that name.
pub(super) fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    let parent = parent_of(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut number = 1_u32;
    let aside = loop {
        let candidate = parent.join(format!("aside-{name}-{number}"));
        if fs::symlink_metadata(&candidate).is_err() {
            break candidate;
        }
        number += 1;
    };
    fs::rename(path, &aside).at("move aside", path)?;
    sync_folder(parent).at("sync", parent)?;
    Ok(aside)
}

/// Removes what dead processes left in `folder`. Best effort: a read-only folder must still open,
/// and a save that cannot write says so itself.
pub(super) fn sweep(folder: &Path) {
    let (Ok(entries), Ok(canonical)) = (children(folder), folder.canonicalize()) else {
        return;
    };
    for entry in entries {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let left_over = if name.starts_with(TRASH_PREFIX) {
            true
        } else if name.starts_with(PARTIAL_PREFIX) {
            !writer_is_alive(name, &canonical.join(name))
        } else {
            false
        };
        if left_over {
            let _ = remove(&entry.path());
        }
    }
}

/// Whether the process named at the end of `.partial-…-<pid>` still runs. A process id taken over
/// by a stranger reads as alive; then the leftover waits for a later sweep, which costs only space.
fn writer_is_alive(name: &str, path: &Path) -> bool {
    let Some(pid) = name
        .rsplit('-')
        .next()
        .and_then(|pid| pid.parse::<u32>().ok())
    else {
        return is_recent(path);
    };
    if pid == process::id() {
        // Small files are not registered: they live for one call, so age decides.
        return in_flight().contains(path) || (path.is_file() && is_recent(path));
    }
    if cfg!(target_os = "linux") {
        Path::new("/proc").join(pid.to_string()).exists()
    } else {
        is_recent(path)
    }
}

/// Where process ids cannot be looked up, a day without a change counts as dead.
fn is_recent(path: &Path) -> bool {
    const DAY: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);
    fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age < DAY))
}

/// Removes a file or a folder; one that is gone already is no error.
fn remove(path: &Path) -> io::Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Bytes an ordinary user can still write to the file system of `folder`.
pub(super) fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let volume = rustix::fs::statvfs(folder).ok()?;
        volume.f_bavail.checked_mul(volume.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_sort_by_step_and_read_back() {
        assert_eq!(step_name(123), "step-00000123");
        assert_eq!(step_name(1_234_567_890), "step-1234567890");
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step_of(&step_name(step)), Some(step));
        }
        for name in [
            "step-",
            "step-12",
            "step-0000012x",
            ".partial-step-00000012-5",
            "aside-step-00000012-1",
        ] {
            assert_eq!(step_of(name), None, "{name}");
        }
    }

    #[test]
    fn listing_is_by_number_and_skips_everything_else() {
        let run = tempfile::tempdir().unwrap();
        for name in [
            "step-100000000",
            "step-00000009",
            "step-00000100",
            ".trash-step-00000001-1",
        ] {
            fs::create_dir(run.path().join(name)).unwrap();
        }
        fs::write(run.path().join("step-00000050"), "a file, not a folder").unwrap();
        let steps: Vec<u64> = steps_in(run.path())
            .unwrap()
            .into_iter()
            .map(|(step, _)| step)
            .collect();
        assert_eq!(steps, [9, 100, 100_000_000]);
        assert!(steps_in(&run.path().join("absent")).unwrap().is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_sweep_removes_what_dead_processes_left_and_nothing_else() {
        let run = tempfile::tempdir().unwrap();
        let mut child = process::Command::new("true").spawn().unwrap();
        let dead = child.id();
        child.wait().unwrap();
        let own_leftover = format!(".partial-step-00000004-{}", process::id());
        let gone = [
            format!(".partial-step-00000001-{dead}"),
            ".trash-step-00000002-1".to_owned(),
            own_leftover,
        ];
        // Process 1 always runs.
        let stays = [
            ".partial-step-00000003-1".to_owned(),
            "step-00000005".to_owned(),
            "aside-step-00000006-1".to_owned(),
            "notes".to_owned(),
        ];
        for name in gone.iter().chain(&stays) {
            fs::create_dir(run.path().join(name)).unwrap();
            fs::write(run.path().join(name).join("file"), "x").unwrap();
        }
        let writing = Partial::create(run.path(), 7).unwrap();
        sweep(run.path());
        for name in &gone {
            assert!(!run.path().join(name).exists(), "{name} should be gone");
        }
        for name in &stays {
            assert!(
                run.path().join(name).join("file").exists(),
                "{name} should stay"
            );
        }
        assert!(
            writing.path().exists(),
            "a save in flight must not be swept"
        );
        let path = writing.path().to_path_buf();
        drop(writing);
        assert!(!path.exists());
    }

    #[test]
    fn one_step_is_saved_by_one_thread_at_a_time() {
        let run = tempfile::tempdir().unwrap();
        let first = Partial::create(run.path(), 1).unwrap();
        assert!(Partial::create(run.path(), 1).is_err());
        assert!(
            first.path().exists(),
            "the refused save must not remove the other's folder"
        );
        drop(first);
        Partial::create(run.path(), 1).unwrap();
    }
}
