//! Settings written into the user's files: where they go, all files or none,
//! backups, links, permissions, and back again.

#[cfg(unix)]
mod at_once;
mod faults;
#[cfg(unix)]
mod killed;
#[cfg(unix)]
mod permissions;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cinch_config::{Application, FileChange, Value, config_files, undo};
use tempfile::TempDir;

fn unsigned(key: &str, value: u64) -> FileChange {
    FileChange::new(key, Value::Unsigned(value))
}

fn text(key: &str, value: &str) -> FileChange {
    FileChange::new(key, Value::Text(value.to_owned()))
}

fn folder_with(files: &[(&str, &str)]) -> (TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let paths = files.iter().map(|(name, text)| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    });
    let paths = paths.collect();
    (folder, paths)
}

/// The text of one file after the changes.
fn applied(name: &str, before: &str, changes: &[FileChange]) -> String {
    let (_folder, files) = folder_with(&[(name, before)]);
    let application = Application::prepare(&files, changes).unwrap();
    assert_eq!(application.unplaced(), []);
    application.commit().unwrap();
    fs::read_to_string(&files[0]).unwrap()
}

/// Everything in a folder: relative path, content, and whether it can be written.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, bool)> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let readonly = fs::metadata(&path).unwrap().permissions().readonly();
            let name = path.strip_prefix(folder).unwrap().to_owned();
            found.insert(name, (fs::read(&path).unwrap(), readonly));
        }
    }
    found
}

#[test]
fn settings_are_found_under_any_name() {
    let changes = [
        unsigned("vram.batch_size", 2),
        unsigned("vram.gradient_accumulation_steps", 8),
        text("vram.precision", "bf16"),
        text("vram.checkpointing", "full"),
    ];
    for (name, before, after) in [
        (
            "own.yaml",
            "vram:\n  micro_batch_size: 4 # four\n",
            "vram:\n  micro_batch_size: 2 # four\n  gradient_accumulation_steps: 8\n  precision: bf16\n  checkpointing: full\n",
        ),
        // A switch that cannot say it makes way for the key that can.
        (
            "own.json",
            "{\"vram\": {\"batch_size\": 4, \"use_fp16\": true, \"accumulation\": 4, \"use_gradient_checkpointing\": false}}",
            "{\"vram\": {\"batch_size\": 2, \"precision\": \"bf16\", \"accumulation\": 8, \"use_gradient_checkpointing\": true}}",
        ),
        (
            "hf.json",
            "{\n  \"per_device_train_batch_size\": 1,\n  \"fp16\": true\n}\n",
            "{\n  \"per_device_train_batch_size\": 2,\n  \"gradient_checkpointing\": true,\n  \"gradient_accumulation_steps\": 8,\n  \"fp16\": true\n}\n",
        ),
        (
            "pair.yaml",
            "per_device_train_batch_size: 4\ngradient_accumulation_steps: 4\nbf16: false\nfp16: true\ngradient_checkpointing: false\n",
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nbf16: false\nfp16: true\ngradient_checkpointing: true\n",
        ),
        (
            "trainer.yaml",
            "data_loader:\n  batch_size: 45\ntraining:\n  trainer:\n    precision: 16-mixed\n",
            "data_loader:\n  batch_size: 2\ntraining:\n  trainer:\n    precision: 16-mixed\n    accumulate_grad_batches: 8\n",
        ),
        (
            "config.py",
            "BATCH_SIZE = 4\nSTEPS = 5\n\ndef f():\n    pass\n",
            "BATCH_SIZE = 2\nUSE_GRADIENT_CHECKPOINTING = True\nPRECISION = \"bf16\"\nGRADIENT_ACCUMULATION_STEPS = 8\nSTEPS = 5\n\ndef f():\n    pass\n",
        ),
        (
            "run.toml",
            "[training]\nmax_steps = 5\n",
            "[training]\nmax_steps = 5\n\n[vram]\nbatch_size = 2\ngradient_accumulation_steps = 8\nprecision = \"bf16\"\ncheckpointing = \"full\"\n",
        ),
    ] {
        let (_folder, files) = folder_with(&[(name, before)]);
        let application = Application::prepare_with(&files, &changes, true).unwrap();
        let unplaced: Vec<&str> = application
            .unplaced()
            .iter()
            .map(|one| one.key.as_str())
            .collect();
        // What another program computes in is a setting of its own.
        let expected: &[&str] = match name {
            "trainer.yaml" => &["vram.precision", "vram.checkpointing"],
            "hf.json" | "pair.yaml" => &["vram.precision"],
            _ => &[],
        };
        assert_eq!(unplaced, expected, "{name}");
        application.commit().unwrap();
        assert_eq!(fs::read_to_string(&files[0]).unwrap(), after, "{name}");
        let again = Application::prepare_with(&files, &changes, true).unwrap();
        assert!(again.is_empty() && again.diff().is_empty(), "{name}");
        assert_eq!(again.commit().unwrap().files, []);
    }
}

#[test]
fn every_name_a_file_has_for_a_setting_follows() {
    assert_eq!(
        applied(
            "config.py",
            "BATCH_SIZE = 4\nARGS = {'batch_size': 4, 'gradient_accumulation_steps': STEPS}\nSTEPS = 3\nGRADIENT_ACCUMULATION_STEPS = 4\n",
            &[
                unsigned("vram.batch_size", 1),
                unsigned("vram.gradient_accumulation_steps", 16)
            ],
        ),
        "BATCH_SIZE = 1\nARGS = {'batch_size': 1, 'gradient_accumulation_steps': STEPS}\nSTEPS = 3\nGRADIENT_ACCUMULATION_STEPS = 16\n"
    );
}

#[test]
fn keys_that_nobody_may_read_are_added_only_when_asked() {
    let (_folder, files) = folder_with(&[("config.py", "BATCH_SIZE = 4\n")]);
    let changes = [
        unsigned("vram.batch_size", 2),
        unsigned("vram.gradient_accumulation_steps", 2),
    ];
    let application = Application::prepare(&files, &changes).unwrap();
    let [unplaced] = application.unplaced() else {
        panic!("{:?}", application.unplaced());
    };
    assert_eq!(unplaced.key, "vram.gradient_accumulation_steps");
    assert!(unplaced.reason.contains("--add-keys"), "{unplaced:?}");
    assert_eq!(application.applied().len(), 1);
}

#[test]
fn what_was_done_is_told() {
    let before = "# run\nper_device_train_batch_size: 4\ngradient_checkpointing: false\n";
    let (_folder, files) = folder_with(&[("hf.yaml", before)]);
    let changes = [
        unsigned("vram.batch_size", 1),
        unsigned("vram.checkpointing", 3),
        unsigned("vram.loss_chunk", 64),
    ];
    let application = Application::prepare(&files, &changes).unwrap();
    let told: Vec<(&str, usize, Option<&str>, &str)> = application
        .applied()
        .iter()
        .map(|one| {
            (
                one.spelled.as_str(),
                one.line,
                one.before.as_deref(),
                one.after.as_str(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("per_device_train_batch_size", 2, Some("4"), "1"),
            ("gradient_checkpointing", 3, Some("false"), "true"),
        ]
    );
    assert!(
        application.remarks()[0]
            .starts_with("`gradient_checkpointing` knows only all blocks or none")
    );
    let unplaced: Vec<&str> = application
        .unplaced()
        .iter()
        .map(|one| one.key.as_str())
        .collect();
    assert_eq!(unplaced, ["vram.loss_chunk"]);
    let name = files[0].display();
    assert_eq!(
        application.diff(),
        format!(
            "--- {name}\n+++ {name}\n@@ -1,3 +1,3 @@\n # run\n-per_device_train_batch_size: 4\n-gradient_checkpointing: false\n+per_device_train_batch_size: 1\n+gradient_checkpointing: true\n"
        )
    );
}

/// Guide 004's folder, copied.
fn guide_004() -> (TempDir, Vec<PathBuf>) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/edit/guide004");
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("text_curriculum")).unwrap();
    for file in config_files(&corpus).unwrap() {
        let name = file.strip_prefix(&corpus).unwrap();
        fs::copy(&file, folder.path().join(name)).unwrap();
    }
    let files = config_files(folder.path()).unwrap();
    (folder, files)
}

fn guide_004_changes() -> Vec<FileChange> {
    vec![
        unsigned("vram.batch_size", 22),
        unsigned("vram.gradient_accumulation_steps", 10),
        unsigned("n_negatives", 16).in_file("text_curriculum/01_stage.yaml"),
        unsigned("n_positives", 8).in_file("text_curriculum/03_stage.yaml"),
    ]
}

#[test]
fn a_config_and_its_stages_change_together() {
    let (folder, files) = guide_004();
    let before = snapshot(folder.path());
    let application = Application::prepare(&files, &guide_004_changes()).unwrap();
    let report = application.commit().unwrap();
    assert_eq!(report.files.len(), 3);
    let changed: Vec<String> = snapshot(folder.path())
        .into_iter()
        .filter(|(name, content)| before.get(name) != Some(content))
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    assert_eq!(
        changed,
        [
            ".cinch-applied.json",
            "config.yaml",
            "config.yaml.backup",
            "text_curriculum/.cinch-applied.json",
            "text_curriculum/01_stage.yaml",
            "text_curriculum/01_stage.yaml.backup",
            "text_curriculum/03_stage.yaml",
            "text_curriculum/03_stage.yaml.backup",
        ]
    );
    // Any one of the files leads to all of them.
    undo(&files[3..4], false).unwrap();
    assert_eq!(snapshot(folder.path()), before);
    let ambiguous = Application::prepare(&files, &[unsigned("n_negatives", 1)]);
    let message = ambiguous.unwrap_err().to_string();
    assert!(
        message.contains("hint: name the file it is to be changed in"),
        "{message}"
    );
}

#[test]
fn backups_are_never_overwritten_and_undo_goes_step_by_step() {
    let (folder, files) = folder_with(&[
        ("c.yaml", "vram: {batch_size: 1}\n"),
        ("c.yaml.backup", "mine"),
    ]);
    let file = &files[..1];
    let states: Vec<Vec<u8>> = (2..5)
        .map(|batch| {
            let state = fs::read(&files[0]).unwrap();
            let changes = [unsigned("vram.batch_size", batch)];
            let report = Application::prepare(file, &changes)
                .unwrap()
                .commit()
                .unwrap();
            let backup = report.files[0].backup.as_ref().unwrap();
            assert!(backup.ends_with(format!("c.yaml.backup.{}", batch - 1)));
            assert_eq!(fs::read(backup).unwrap(), state);
            state
        })
        .collect();
    for state in states.iter().rev() {
        undo(file, false).unwrap();
        assert_eq!(fs::read(&files[0]).unwrap(), *state);
    }
    let left: Vec<PathBuf> = snapshot(folder.path()).into_keys().collect();
    assert_eq!(left, [Path::new("c.yaml"), Path::new("c.yaml.backup")]);
    assert_eq!(fs::read(&files[1]).unwrap(), b"mine");
    let message = undo(file, false).unwrap_err().to_string();
    assert!(
        message.starts_with("nothing was applied to ") && message.contains("hint:"),
        "{message}"
    );
}

#[test]
fn a_file_edited_since_is_not_overwritten_unless_asked() {
    let (folder, files) = folder_with(&[("c.toml", "[vram]\nbatch_size = 1\n")]);
    let changes = [unsigned("vram.batch_size", 2)];
    Application::prepare(&files, &changes)
        .unwrap()
        .commit()
        .unwrap();
    fs::write(&files[0], "[vram]\nbatch_size = 3\n").unwrap();
    let before = snapshot(folder.path());
    let message = undo(&files, false).unwrap_err().to_string();
    assert!(
        message.contains("was edited since") && message.contains("--force"),
        "{message}"
    );
    assert_eq!(snapshot(folder.path()), before);
    let report = undo(&files, true).unwrap();
    assert_eq!(
        fs::read_to_string(&files[0]).unwrap(),
        "[vram]\nbatch_size = 1\n"
    );
    let kept = report.files[0].backup.as_ref().unwrap();
    assert_eq!(
        fs::read_to_string(kept).unwrap(),
        "[vram]\nbatch_size = 3\n"
    );
}

#[test]
fn damaged_memory_of_an_application_is_an_error() {
    let (folder, files) = folder_with(&[("c.toml", "[vram]\nbatch_size = 1\n")]);
    let changes = [unsigned("vram.batch_size", 2)];
    Application::prepare(&files, &changes)
        .unwrap()
        .commit()
        .unwrap();
    let backup = folder.path().join("c.toml.backup");
    fs::write(&backup, "other").unwrap();
    let message = undo(&files, false).unwrap_err().to_string();
    assert!(message.contains("is not what was saved"), "{message}");
    fs::remove_file(&backup).unwrap();
    let message = undo(&files, true).unwrap_err().to_string();
    assert!(
        message.contains("c.toml.backup cannot be read"),
        "{message}"
    );
    fs::write(folder.path().join(".cinch-applied.json"), "{").unwrap();
    let message = undo(&files, false).unwrap_err().to_string();
    assert!(
        message.contains("is damaged") && message.contains("hint:"),
        "{message}"
    );
}

#[test]
fn a_record_that_names_another_file_as_backup_is_refused() {
    let (folder, files) = folder_with(&[
        ("project/c.yaml", "vram: {batch_size: 1}\n"),
        ("victim/known.txt", "known"),
        ("project/known.txt", "known"),
    ]);
    let changes = [unsigned("vram.batch_size", 2)];
    let file = &files[..1];
    Application::prepare(file, &changes)
        .unwrap()
        .commit()
        .unwrap();
    let manifest = folder.path().join("project/.cinch-applied.json");
    let sound = fs::read_to_string(&manifest).unwrap();
    let absolute = files[1].display().to_string();
    for planted in [
        "../victim/known.txt",
        absolute.as_str(),
        "known.txt",
        "c.yaml",
        "c.yaml.backup.x",
        "../c.yaml.backup",
        "..",
    ] {
        fs::write(&manifest, sound.replace("c.yaml.backup", planted)).unwrap();
        let before = snapshot(folder.path());
        for force in [false, true] {
            let message = undo(file, force).unwrap_err().to_string();
            assert!(message.contains("is damaged"), "{planted}: {message}");
            assert_eq!(snapshot(folder.path()), before, "{planted}");
        }
    }
    fs::write(&manifest, sound).unwrap();
    undo(file, false).unwrap();
}

#[test]
fn another_folder_is_undone_only_where_its_own_record_says_the_same() {
    let (folder, files) = folder_with(&[
        ("a/c.yaml", "vram: {batch_size: 1}\n"),
        ("b/d.yaml", "training: {max_steps: 5}\n"),
    ]);
    let changes = [
        unsigned("vram.batch_size", 2),
        unsigned("training.max_steps", 6),
    ];
    Application::prepare(&files, &changes)
        .unwrap()
        .commit()
        .unwrap();
    let manifest = folder.path().join("a/.cinch-applied.json");
    let sound = fs::read_to_string(&manifest).unwrap();
    let planted = sound.replace("d.yaml.backup", "d.yaml.backup.1");
    assert_ne!(planted, sound);
    fs::write(&manifest, planted).unwrap();
    fs::write(folder.path().join("b/d.yaml.backup.1"), "mine").unwrap();
    let before = snapshot(folder.path());
    undo(&files[..1], true).unwrap_err();
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn a_change_between_prepare_and_commit_is_noticed() {
    let (folder, files) = folder_with(&[
        ("a.yaml", "vram: {batch_size: 1}\n"),
        ("b.yaml", "training: {max_steps: 5}\n"),
    ]);
    let changes = [
        unsigned("vram.batch_size", 2),
        unsigned("training.max_steps", 6),
    ];
    let application = Application::prepare(&files, &changes).unwrap();
    fs::write(&files[1], "training: {max_steps: 7}\n").unwrap();
    let before = snapshot(folder.path());
    let message = application.commit().unwrap_err().to_string();
    assert!(
        message.contains("b.yaml was changed by someone else"),
        "{message}"
    );
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn bad_files_are_told() {
    let (folder, files) = folder_with(&[("a.yaml", "vram:\n batch_size: 1\n  precision: x\n")]);
    let message = Application::prepare(&files, &[]).unwrap_err().to_string();
    assert!(message.contains("a.yaml line 3 column 12"), "{message}");
    let missing = folder.path().join("missing.yaml");
    let message = Application::prepare(std::slice::from_ref(&missing), &[])
        .unwrap_err()
        .to_string();
    assert!(message.contains("does not exist"), "{message}");
    assert!(config_files(&missing).is_err());
    let empty = tempfile::tempdir().unwrap();
    let message = config_files(empty.path()).unwrap_err().to_string();
    assert!(message.contains("holds no config files"), "{message}");
}
