//! A disk that fails: at every single operation, and for good.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cinch_config::{Application, ConfigError, Disk, LocalDisk, undo_on};

use super::{guide_004, guide_004_changes, snapshot, unsigned};

/// A disk whose operation number `left` does not work.
struct FailingDisk {
    left: Cell<usize>,
}

impl FailingDisk {
    fn step(&self) -> io::Result<()> {
        let left = self.left.get();
        self.left.set(left.wrapping_sub(1));
        if left == 0 {
            return Err(io::Error::other("injected"));
        }
        Ok(())
    }
}

impl Disk for FailingDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.step()?;
        LocalDisk.read(path)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        if let Err(error) = self.step() {
            // A disk that fills up leaves half a file.
            LocalDisk.create(path, &contents[..contents.len() / 2], like)?;
            return Err(error);
        }
        LocalDisk.create(path, contents, like)
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        LocalDisk.sync(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        LocalDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        LocalDisk.remove(path)
    }
}

/// Runs an operation with a fault at every step, until none is reached. After
/// an error the folder must be as before; after success, as after success
/// without faults but for what is reported as left behind.
fn with_every_fault(
    folder: &Path,
    prepare: impl Fn(),
    operation: impl Fn(&dyn Disk) -> Result<Vec<PathBuf>, ConfigError>,
) -> usize {
    let mut failures = 0;
    for step in 0.. {
        prepare();
        let before = snapshot(folder);
        let disk = FailingDisk {
            left: Cell::new(step),
        };
        match operation(&disk) {
            Err(error) => {
                failures += 1;
                assert_eq!(snapshot(folder), before, "fault {step}: {error}");
            }
            Ok(left_behind) => {
                let hidden = snapshot(folder)
                    .into_keys()
                    .filter(|name| {
                        name.to_string_lossy().contains(".cinch-")
                            && !name.ends_with(".cinch-applied.json")
                    })
                    .count();
                assert_eq!(hidden, left_behind.len(), "fault {step}");
            }
        }
        let reached = disk.left.get() > step;
        if !reached {
            return failures;
        }
    }
    failures
}

fn restore(folder: &Path, files: &BTreeMap<PathBuf, (Vec<u8>, bool)>) {
    for name in snapshot(folder).into_keys() {
        fs::remove_file(folder.join(name)).unwrap();
    }
    for (name, (content, _)) in files {
        fs::write(folder.join(name), content).unwrap();
    }
}

#[test]
fn no_fault_leaves_a_half_made_application() {
    let (folder, files) = guide_004();
    let original = snapshot(folder.path());
    let failures = with_every_fault(
        folder.path(),
        || restore(folder.path(), &original),
        |disk| {
            let application = Application::prepare(&files, &guide_004_changes()).unwrap();
            application.commit_on(disk).map(|report| report.left_behind)
        },
    );
    // Three files and two manifests: created and synced twice or once, read,
    // renamed; two folders synced.
    assert!(failures >= 25, "{failures}");
}

#[test]
fn no_fault_leaves_a_half_made_undo_or_second_application() {
    let (folder, files) = guide_004();
    let first = Application::prepare(&files, &guide_004_changes()).unwrap();
    first.commit().unwrap();
    let applied = snapshot(folder.path());
    let failures = with_every_fault(
        folder.path(),
        || restore(folder.path(), &applied),
        |disk| undo_on(disk, &files, false).map(|report| report.left_behind),
    );
    assert!(failures >= 25, "{failures}");
    let second = [
        unsigned("vram.batch_size", 11),
        unsigned("n_negatives", 4).in_file("02_stage.yaml"),
    ];
    with_every_fault(
        folder.path(),
        || restore(folder.path(), &applied),
        |disk| {
            let application = Application::prepare(&files, &second).unwrap();
            application.commit_on(disk).map(|report| report.left_behind)
        },
    );
}

/// A disk on which renames work `left` times, and then none.
struct DyingDisk {
    left: Cell<usize>,
}

impl Disk for DyingDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        LocalDisk.read(path)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        LocalDisk.create(path, contents, like)
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        LocalDisk.sync(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.left.get() == 0 {
            return Err(io::Error::other("gone"));
        }
        self.left.set(self.left.get() - 1);
        LocalDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        LocalDisk.remove(path)
    }
}

#[test]
fn what_cannot_be_taken_back_is_named_with_its_backup() {
    let (folder, files) = guide_004();
    let before = fs::read(&files[0]).unwrap();
    let application = Application::prepare(&files, &guide_004_changes()).unwrap();
    // Two manifests, and the first of the files.
    let disk = DyingDisk { left: Cell::new(3) };
    let message = application.commit_on(&disk).unwrap_err().to_string();
    assert!(
        message.contains("config.yaml (its former content is "),
        "{message}"
    );
    assert!(message.contains("config.yaml.backup)"), "{message}");
    assert_eq!(
        fs::read(folder.path().join("config.yaml.backup")).unwrap(),
        before
    );
}
