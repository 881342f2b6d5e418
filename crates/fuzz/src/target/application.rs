//! `fit --apply` and `--undo` on a disk: a file of any dialect, and any record of what was
//! applied.
//!
//! An input for [`DIALECTS`] is a letter for the language and then the file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cinch_config::{Application, Disk, FileChange, Format, LocalDisk, Settings, undo_on};

use super::config::{answer, keys};
use super::{Target, files, no_words};

pub const DIALECTS: Target = Target {
    name: "dialects",
    about: "a file of any dialect, applied to and undone",
    seeds: dialects,
    words: keys,
    run: apply_and_undo,
};

pub const UNDO: Target = Target {
    name: "undo",
    about: ".cinch-applied.json, the record of what was applied",
    seeds: records,
    words: no_words,
    run: undo_by_record,
};

const RECORD: &str = ".cinch-applied.json";

/// The machine's disk, without waiting for the medium: no power is cut here.
struct Unsynced;

impl Disk for Unsynced {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        LocalDisk.read(path)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        LocalDisk.create(path, contents, like)
    }

    fn sync(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        LocalDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        LocalDisk.remove(path)
    }
}

fn dialects() -> Vec<Vec<u8>> {
    let endings = ["json", "jsonc", "yaml", "yml", "toml", "py", "sh"];
    let folders = [
        "crates/config/tests/dialects",
        "crates/config/tests/fixtures/edit",
    ];
    let seeds = files(&folders, &endings).into_iter();
    seeds
        .map(|(path, text)| {
            let format = Format::of(&path, &String::from_utf8_lossy(&text));
            let letter = Format::ALL.iter().position(|known| *known == format);
            let mut seed = vec![b'a' + letter.unwrap_or_default() as u8];
            seed.extend(text);
            seed
        })
        .collect()
}

fn apply_and_undo(input: &[u8], folder: &Path) {
    let Some((letter, text)) = input.split_first() else {
        return;
    };
    let endings = ["json", "yaml", "toml", "py", "sh"];
    let ending = endings[usize::from(letter.wrapping_sub(b'a')) % endings.len()];
    let path = folder.join(format!("run.{ending}"));
    fs::write(&path, text).expect("the folder can be written");
    let mut settings = Settings::new();
    match settings.load_file(&path) {
        Ok(()) => answer(&settings),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    apply(&path, text);
}

/// Applies what `fit` may choose; then undoes it.
fn apply(path: &Path, text: &[u8]) {
    let changes = [
        ("vram.batch_size", "3"),
        ("vram.gradient_accumulation_steps", "5"),
        ("vram.max_seq_len", "96"),
        ("vram.checkpointing", "full"),
    ];
    let changes: Vec<FileChange> = changes
        .iter()
        .map(|(key, value)| FileChange::parse(key, value).expect("a setting of ours"))
        .collect();
    for add_keys in [false, true] {
        let paths = [path.to_owned()];
        let application = match Application::prepare_with(&paths, &changes, add_keys) {
            Ok(application) => application,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        let shown = application.diff();
        let report = application
            .commit_on(&Unsynced)
            .expect("the folder can be written");
        assert_eq!(
            report.files.is_empty(),
            shown.is_empty(),
            "what is shown is written"
        );
        if !report.files.is_empty() {
            assert_ne!(read(path), text, "a change that changes nothing");
            undo_on(&Unsynced, &paths, false).expect("what was applied can be undone");
        }
        assert!(read(path) == text, "undoing gives other bytes");
        let folder = path.parent().unwrap_or(Path::new("."));
        assert_eq!(names(folder), [path.to_owned()], "something is left");
    }
}

/// A record of one application, as it is written, and of two.
fn records() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.yaml");
    fs::write(&path, BEFORE).expect("the folder can be written");
    let mut records = Vec::new();
    for batch in ["3", "4"] {
        let change = FileChange::parse("vram.batch_size", batch).expect("a setting of ours");
        Application::prepare(std::slice::from_ref(&path), &[change])
            .and_then(|application| application.commit_on(&Unsynced))
            .expect("a config of ours can be changed");
        records.push(read(&folder.path().join(RECORD)));
    }
    records
}

const BEFORE: &str = "vram:\n  batch_size: 2\n";
const AFTER: &str = "vram:\n  batch_size: 3\n";
const KEPT: &str = "not a config\n";

/// Undoes with a record of the input beside files that are not its own: what is no config or
/// backup of one stays as it is.
fn undo_by_record(input: &[u8], folder: &Path) {
    let run = folder.join("run");
    let other = folder.join("other");
    for folder in [&run, &other] {
        fs::create_dir_all(folder).expect("the folder can be written");
        let files = [
            ("run.yaml", AFTER),
            ("run.yaml.backup", BEFORE),
            ("kept", KEPT),
            ("kept.txt", KEPT),
        ];
        for (name, text) in files {
            fs::write(folder.join(name), text).expect("the folder can be written");
        }
    }
    let path = run.join("run.yaml");
    let paths = [path.clone()];
    for force in [false, true] {
        fs::write(run.join(RECORD), input).expect("the folder can be written");
        let before = read(&path);
        if let Err(error) = undo_on(&Unsynced, &paths, force) {
            assert!(!error.to_string().is_empty());
            assert!(read(&path) == before, "a refusal changes the config");
        }
        let now = read(&path);
        assert!(
            [AFTER, BEFORE].iter().any(|text| now == text.as_bytes()),
            "a third content"
        );
        for folder in [&run, &other] {
            assert_eq!(read(&folder.join("kept")), KEPT.as_bytes());
            assert_eq!(read(&folder.join("kept.txt")), KEPT.as_bytes());
        }
        // A folder that knows nothing of an application is none of its business.
        assert_eq!(read(&other.join("run.yaml")), AFTER.as_bytes());
        assert_eq!(read(&other.join("run.yaml.backup")), BEFORE.as_bytes());
    }
    let change = FileChange::parse("vram.batch_size", "7").expect("a setting of ours");
    let applied = Application::prepare(&paths, &[change])
        .and_then(|application| application.commit_on(&Unsynced));
    if let Err(error) = applied {
        assert!(!error.to_string().is_empty());
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).expect("the file is there")
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
