//! Two applications in one folder at the same time.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use cinch_config::{Application, Disk, LocalDisk, undo};

use super::{folder_with, snapshot, unsigned};

/// A disk that tells when its first rename is due, when everything has been
/// compared, and then takes its time.
struct SlowDisk {
    due: Cell<Option<Sender<()>>>,
}

impl Disk for SlowDisk {
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
        if let Some(due) = self.due.take() {
            due.send(()).map_err(io::Error::other)?;
            thread::sleep(Duration::from_millis(300));
        }
        LocalDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        LocalDisk.remove(path)
    }
}

/// Begins one application, and does something else when it is about to write.
fn during_an_application(files: &[PathBuf], other: impl FnOnce()) {
    let application = Application::prepare(files, &[unsigned("vram.batch_size", 2)]).unwrap();
    let (due, is_due) = channel();
    thread::scope(|scope| {
        let slow = scope.spawn(move || {
            let disk = SlowDisk {
                due: Cell::new(Some(due)),
            };
            application.commit_on(&disk)
        });
        is_due.recv().unwrap();
        other();
        slow.join().unwrap().unwrap();
    });
}

#[test]
fn two_applications_at_once_can_both_be_undone() {
    let (folder, files) = folder_with(&[
        ("a.yaml", "vram: {batch_size: 1}\n"),
        ("b.yaml", "training: {max_steps: 5}\n"),
    ]);
    let original = snapshot(folder.path());
    during_an_application(&files[..1], || {
        let changes = [unsigned("training.max_steps", 6)];
        let application = Application::prepare(&files[1..], &changes).unwrap();
        application.commit().unwrap();
    });
    undo(&files[..1], false).unwrap();
    undo(&files[1..], false).unwrap();
    assert_eq!(snapshot(folder.path()), original);
}

#[test]
fn an_undo_waits_for_an_application() {
    let (folder, files) = folder_with(&[
        ("a.yaml", "vram: {batch_size: 1}\n"),
        ("b.yaml", "training: {max_steps: 5}\n"),
    ]);
    let original = snapshot(folder.path());
    let changes = [unsigned("training.max_steps", 6)];
    let application = Application::prepare(&files[1..], &changes).unwrap();
    application.commit().unwrap();
    during_an_application(&files[..1], || {
        undo(&files[1..], false).unwrap();
    });
    assert_eq!(
        fs::read_to_string(&files[0]).unwrap(),
        "vram: {batch_size: 2}\n"
    );
    undo(&files[..1], false).unwrap();
    assert_eq!(snapshot(folder.path()), original);
}
