//! An application or an undoing that is killed at any point, and what comes after.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cinch_config::{Application, Disk, LocalDisk, undo, undo_on};

use super::{folder_with, snapshot, unsigned};

/// A disk of a process that is killed during operation number `left`: nothing
/// happens after it, no clearing away either.
struct KilledDisk {
    left: Cell<usize>,
    is_killed: Cell<bool>,
}

impl KilledDisk {
    fn after(num_operations: usize) -> KilledDisk {
        KilledDisk {
            left: Cell::new(num_operations),
            is_killed: Cell::new(false),
        }
    }

    fn step(&self) -> io::Result<()> {
        if self.left.get() == 0 {
            self.is_killed.set(true);
            return Err(io::Error::other("killed"));
        }
        self.left.set(self.left.get() - 1);
        Ok(())
    }
}

impl Disk for KilledDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.step()?;
        LocalDisk.read(path)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        let was_killed = self.is_killed.get();
        let step = self.step();
        if step.is_err() && !was_killed {
            LocalDisk.create(path, &contents[..contents.len() / 2], like)?;
        }
        step?;
        LocalDisk.create(path, contents, like)
    }

    /// Counts only: a killed process loses nothing that was written, and thousands
    /// of these take their time.
    fn sync(&self, _path: &Path) -> io::Result<()> {
        self.step()
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

fn application(files: &[PathBuf], value: u64) -> Application {
    let changes = [
        unsigned("vram.batch_size", value),
        unsigned("training.max_steps", value),
    ];
    Application::prepare(files, &changes).unwrap()
}

/// Kills an operation at each of its points, and each time applies once more and
/// undoes all there is: nothing may be in the way, and nothing be left.
fn killed_anywhere(num_applied: u64, second: &str, operation: impl Fn(&dyn Disk, &[PathBuf])) {
    let lasting = KilledDisk::after(usize::MAX);
    for num_operations in 0.. {
        let (folder, mut files) = folder_with(&[
            ("a.yaml", "vram: {batch_size: 1}\n"),
            (second, "training: {max_steps: 1}\n"),
            ("a.yaml.backup", "vram: {batch_size: 1}\n"),
            (".mine.cinch-new", "mine"),
        ]);
        files.truncate(2);
        let original = snapshot(folder.path());
        for value in 0..num_applied {
            application(&files, 10 + value).commit_on(&lasting).unwrap();
        }
        let disk = KilledDisk::after(num_operations);
        operation(&disk, &files);
        application(&files, 30).commit_on(&lasting).unwrap();
        let temporary = snapshot(folder.path()).into_keys().find(|name| {
            name.to_string_lossy().ends_with("-new") && !name.starts_with(".mine.cinch-new")
        });
        assert_eq!(temporary, None, "killed at {num_operations}");
        let mut num_undone = 0;
        while undo_on(&lasting, &files, false).is_ok() {
            num_undone += 1;
        }
        assert!(num_undone >= num_applied, "killed at {num_operations}");
        assert_eq!(
            snapshot(folder.path()),
            original,
            "killed at {num_operations}"
        );
        if !disk.is_killed.get() {
            // Four files at least: created, synced, compared, renamed.
            assert!(num_operations > 16, "{num_operations}");
            return;
        }
    }
}

#[test]
fn after_a_killed_application_all_can_be_applied_and_undone() {
    for (num_applied, second) in [(0, "stages/b.yaml"), (1, "b.yaml")] {
        killed_anywhere(num_applied, second, |disk, files| {
            let _ = application(files, 20).commit_on(disk);
        });
    }
}

#[test]
fn after_a_killed_undoing_all_can_be_applied_and_undone() {
    for (num_applied, second) in [(1, "stages/b.yaml"), (2, "b.yaml")] {
        killed_anywhere(num_applied, second, |disk, files| {
            let _ = undo_on(disk, files, false);
        });
    }
}

/// Nothing but an undoing after the kill, by either file: both files are as they were.
#[test]
fn an_undoing_takes_back_the_whole_of_a_killed_application() {
    let lasting = KilledDisk::after(usize::MAX);
    for second in ["b.yaml", "stages/b.yaml"] {
        for by in 0..2 {
            for num_operations in 0.. {
                let (folder, files) = folder_with(&[
                    ("a.yaml", "vram: {batch_size: 1}\n"),
                    (second, "training: {max_steps: 1}\n"),
                ]);
                let original = snapshot(folder.path());
                let disk = KilledDisk::after(num_operations);
                let applied = application(&files, 20).commit_on(&disk);
                assert_eq!(applied.is_err(), disk.is_killed.get());
                let texts = || [0, 1].map(|index| fs::read_to_string(&files[index]).unwrap());
                let was_begun =
                    texts() != ["vram: {batch_size: 1}\n", "training: {max_steps: 1}\n"];
                let undone = undo_on(&lasting, &files[by..=by], false);
                assert!(
                    undone.is_ok() || !was_begun,
                    "killed at {num_operations}: {undone:?}"
                );
                assert_eq!(
                    texts(),
                    ["vram: {batch_size: 1}\n", "training: {max_steps: 1}\n"],
                    "killed at {num_operations}"
                );
                if undone.is_ok() && second == "b.yaml" {
                    assert_eq!(
                        snapshot(folder.path()),
                        original,
                        "killed at {num_operations}"
                    );
                }
                if !disk.is_killed.get() {
                    assert!(num_operations > 16, "{num_operations}");
                    break;
                }
            }
        }
    }
}

/// The same for an undoing that was killed, and for names that are no text.
#[cfg(unix)]
#[test]
fn an_undoing_finishes_a_killed_one() {
    use std::os::unix::ffi::OsStrExt;
    let lasting = KilledDisk::after(usize::MAX);
    let odd = std::ffi::OsStr::from_bytes(b"b\xff.yaml");
    for num_operations in 0.. {
        let (folder, mut files) = folder_with(&[("a.yaml", "vram: {batch_size: 1}\n")]);
        files.push(folder.path().join(odd));
        fs::write(&files[1], "training: {max_steps: 1}\n").unwrap();
        let original = snapshot(folder.path());
        application(&files, 20).commit_on(&lasting).unwrap();
        let disk = KilledDisk::after(num_operations);
        let _ = undo_on(&disk, &files, false);
        let again = undo_on(&lasting, &files, false);
        let texts = [0, 1].map(|index| fs::read_to_string(&files[index]).unwrap());
        assert_eq!(
            texts,
            ["vram: {batch_size: 1}\n", "training: {max_steps: 1}\n"],
            "killed at {num_operations}: {again:?}"
        );
        if again.is_ok() {
            assert_eq!(
                snapshot(folder.path()),
                original,
                "killed at {num_operations}"
            );
        }
        if !disk.is_killed.get() {
            return;
        }
    }
}

#[test]
fn leftovers_of_the_same_process_number_are_in_nobodys_way() {
    let (folder, files) = folder_with(&[("a.yaml", "vram: {batch_size: 1}\n")]);
    let original = snapshot(folder.path());
    let process = std::process::id();
    for target in ["a.yaml", ".cinch-applied.json"] {
        for role in ["new", "old"] {
            let name = format!(".{target}.cinch-{process}-{role}");
            fs::write(folder.path().join(name), "half").unwrap();
        }
    }
    let changes = [unsigned("vram.batch_size", 2)];
    let application = Application::prepare(&files, &changes).unwrap();
    application.commit().unwrap();
    undo(&files, false).unwrap();
    assert_eq!(snapshot(folder.path()), original);
}

/// One of the files is named, and the other lies in another folder.
#[test]
fn a_killed_undoing_is_finished_by_the_same_command() {
    let lasting = KilledDisk::after(usize::MAX);
    for named in 0..2 {
        for num_operations in 0.. {
            let (folder, files) = folder_with(&[
                ("a.yaml", "vram: {batch_size: 1}\n"),
                ("stages/b.yaml", "training: {max_steps: 1}\n"),
            ]);
            application(&files, 10).commit_on(&lasting).unwrap();
            let disk = KilledDisk::after(num_operations);
            let path = &files[named..=named];
            let _ = undo_on(&disk, path, false);
            while undo_on(&lasting, path, false).is_ok() {}
            for (file, text) in [
                ("a.yaml", "vram: {batch_size: 1}\n"),
                ("stages/b.yaml", "training: {max_steps: 1}\n"),
            ] {
                let now = fs::read_to_string(folder.path().join(file)).unwrap();
                assert_eq!(now, text, "killed at {num_operations}");
            }
            let is_record = |name: &PathBuf| name.ends_with(".cinch-applied.json");
            let record = snapshot(folder.path()).into_keys().find(is_record);
            assert_eq!(record, None, "killed at {num_operations}, {named} named");
            if !disk.is_killed.get() {
                break;
            }
        }
    }
}
