//! Permissions, links, names that are no text, and what is read-only.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use cinch_config::{Application, undo};

use super::{folder_with, snapshot, unsigned};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn permissions_and_links_stay() {
    let (folder, files) = folder_with(&[("shared/base.yaml", "vram: {batch_size: 1}\n")]);
    set_mode(&files[0], 0o640);
    let link = folder.path().join("config.yaml");
    symlink("shared/base.yaml", &link).unwrap();
    let changes = [unsigned("vram.batch_size", 2)];
    let linked = [link.clone()];
    Application::prepare(&linked, &changes)
        .unwrap()
        .commit()
        .unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(
        fs::read_to_string(&files[0]).unwrap(),
        "vram: {batch_size: 2}\n"
    );
    assert_eq!(mode(&files[0]), 0o640);
    assert_eq!(mode(&folder.path().join("shared/base.yaml.backup")), 0o640);
    undo(&linked, false).unwrap();
    assert_eq!(
        fs::read_to_string(&link).unwrap(),
        "vram: {batch_size: 1}\n"
    );
    assert_eq!((mode(&files[0]), snapshot(folder.path()).len()), (0o640, 2));
}

#[test]
fn read_only_files_and_folders_are_told_before_anything_is_written() {
    let (folder, files) = folder_with(&[
        ("a.yaml", "vram: {batch_size: 1}\n"),
        ("sub/b.yaml", "training: {max_steps: 5}\n"),
    ]);
    let changes = [
        unsigned("vram.batch_size", 2),
        unsigned("training.max_steps", 6),
    ];
    for (place, readonly, writable) in [
        (files[1].clone(), 0o444, 0o644),
        (folder.path().join("sub"), 0o555, 0o755),
    ] {
        set_mode(&place, readonly);
        let before = snapshot(folder.path());
        let application = Application::prepare(&files, &changes).unwrap();
        let message = application.commit().unwrap_err().to_string();
        assert!(
            message.contains("is read-only; nothing was written"),
            "{message}"
        );
        assert!(
            message.contains(&format!(
                "chmod u+w {}",
                fs::canonicalize(&place).unwrap().display()
            )),
            "{message}"
        );
        assert_eq!(snapshot(folder.path()), before);
        set_mode(&place, writable);
    }
}

#[test]
fn names_that_are_no_text_are_applied_and_undone_like_others() {
    let (folder, mut files) = folder_with(&[("a.yaml", "vram: {batch_size: 1}\n")]);
    // A file system that takes only text has no such names.
    let sub = folder.path().join(OsStr::from_bytes(b"stage\xfe"));
    if fs::create_dir(&sub).is_err() {
        return;
    }
    for (path, text) in [
        (
            folder.path().join(OsStr::from_bytes(b"b\xff.yaml")),
            "training: {max_steps: 5}\n",
        ),
        // Both names look the same where they are shown.
        (
            folder.path().join(OsStr::from_bytes(b"b\xfe.yaml")),
            "training: {seed: 5}\n",
        ),
        (sub.join("c.yaml"), "optimizer: {learning_rate: 0.1}\n"),
    ] {
        fs::write(&path, text).unwrap();
        files.push(path);
    }
    let original = snapshot(folder.path());
    let first = [unsigned("vram.batch_size", 2)];
    Application::prepare(&files[..1], &first)
        .unwrap()
        .commit()
        .unwrap();
    let once = snapshot(folder.path());
    let second = [
        unsigned("training.max_steps", 6),
        unsigned("training.seed", 7),
        unsigned("optimizer.learning_rate", 1),
    ];
    let report = Application::prepare(&files[1..], &second)
        .unwrap()
        .commit()
        .unwrap();
    let backup = report.files[0].backup.as_ref().unwrap();
    assert!(backup.ends_with(OsStr::from_bytes(b"b\xff.yaml.backup")));
    assert_eq!(report.files.len(), 3);
    undo(&files[1..2], false).unwrap();
    assert_eq!(snapshot(folder.path()), once);
    undo(&files[..1], false).unwrap();
    assert_eq!(snapshot(folder.path()), original);
}

#[test]
fn a_hard_link_that_is_cut_is_told() {
    let (folder, files) = folder_with(&[
        ("a.yaml", "vram: {batch_size: 1}\n"),
        ("b.yaml", "training: {max_steps: 5}\n"),
    ]);
    let other = folder.path().join("other.yaml");
    fs::hard_link(&files[0], &other).unwrap();
    let unconcerned = [unsigned("training.max_steps", 6)];
    let application = Application::prepare(&files, &unconcerned).unwrap();
    assert!(application.remarks().is_empty());
    let changes = [unsigned("vram.batch_size", 2)];
    let application = Application::prepare(&files, &changes).unwrap();
    let [remark] = application.remarks() else {
        panic!("{:?}", application.remarks());
    };
    assert!(
        remark.contains("a.yaml is a hard link: the other names of the file (1) keep"),
        "{remark}"
    );
    application.commit().unwrap();
    assert_eq!(
        fs::read_to_string(other).unwrap(),
        "vram: {batch_size: 1}\n"
    );
}
