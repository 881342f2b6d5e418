//! Real-looking config files: only the intended values change, the change can
//! be undone byte for byte, and making it again does nothing.
//!
//! What a file must become is stated in `cases` as a replacement of text, so no
//! reader of ours has a say in what is right.

mod cases;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cases::{CASES, Change as Case, Value as CaseValue};
use cinch_config::{Application, FileChange, Format, KeyPath, Scalar, Value, edit, undo};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/edit")
}

fn scalar(value: CaseValue) -> Scalar {
    match value {
        CaseValue::Number(digits) => Scalar::Number(digits.to_owned()),
        CaseValue::Text(text) => Scalar::Text(text.to_owned()),
        CaseValue::Bool(value) => Scalar::Bool(value),
        CaseValue::Null => Scalar::Null,
    }
}

fn path(key: &str) -> KeyPath {
    key.split('/').map(str::to_owned).collect()
}

/// The text with one fragment replaced, which must be there once.
fn replaced(file: &str, text: &str, (key, _, from, to): &Case) -> String {
    assert_eq!(text.matches(from).count(), 1, "{file}: {key}: {from:?}");
    text.replacen(from, to, 1)
}

fn edited(file: &str, text: &str, changes: &[(KeyPath, Scalar)]) -> String {
    let format = Format::of(Path::new(file), text);
    edit(Path::new(file), format, text, changes)
        .unwrap_or_else(|error| panic!("{file} {changes:?}: {error}"))
}

#[test]
fn the_corpus_is_all_used_and_large_enough() {
    let mut found = BTreeSet::new();
    let mut folders = vec![corpus()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().unwrap() != ".gitattributes" {
                let name = path.strip_prefix(corpus()).unwrap();
                found.insert(name.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    let used: BTreeSet<String> = CASES.iter().map(|(file, _)| (*file).to_owned()).collect();
    assert_eq!(found, used);
    let count = |ends: &[&str]| {
        let ends_so = |name: &&String| ends.iter().any(|end| name.ends_with(end));
        found.iter().filter(ends_so).count()
    };
    assert!(count(&["yaml", "yml"]) >= 12 && count(&["json", "jsonc"]) >= 12);
    assert!(count(&["toml"]) >= 8 && count(&["py"]) >= 12 && found.len() >= 44);
}

#[test]
fn one_change_replaces_its_bytes_and_no_others() {
    for (file, changes) in CASES {
        let text = fs::read_to_string(corpus().join(file)).unwrap();
        for case in *changes {
            let expected = replaced(file, &text, case);
            let change = [(path(case.0), scalar(case.1))];
            let new = edited(file, &text, &change);
            assert_eq!(new, expected, "{file}: {}", case.0);
            assert_eq!(edited(file, &new, &change), new, "{file}: {} again", case.0);
        }
    }
}

#[test]
fn all_changes_together_in_any_order() {
    for (file, changes) in CASES {
        let text = fs::read_to_string(corpus().join(file)).unwrap();
        // Changes of existing values do not touch each other's bytes; what is
        // inserted may share a line, so it is left to the test above.
        let in_place: Vec<&Case> = changes
            .iter()
            .filter(|(_, _, from, to)| from.lines().count() == to.lines().count())
            .filter(|(_, _, from, to)| {
                !to.starts_with(from) && !to.contains(from.trim_end_matches(['}', ')', '\n']))
            })
            .collect();
        let expected = in_place
            .iter()
            .fold(text.clone(), |text, case| text.replacen(case.2, case.3, 1));
        let mut requested: Vec<(KeyPath, Scalar)> = in_place
            .iter()
            .map(|case| (path(case.0), scalar(case.1)))
            .collect();
        let forwards = edited(file, &text, &requested);
        requested.reverse();
        let backwards = edited(file, &text, &requested);
        assert_eq!(forwards, expected, "{file}");
        assert_eq!(backwards, expected, "{file}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn every_file_is_applied_undone_and_applied_again() {
    let folder = tempfile::tempdir().unwrap();
    for (file, changes) in CASES {
        let original = fs::read(corpus().join(file)).unwrap();
        let name = Path::new(file).file_name().unwrap();
        let copy = folder.path().join(name);
        fs::write(&copy, &original).unwrap();
        let value = |value: CaseValue| match value {
            CaseValue::Number(digits) => digits
                .parse()
                .map(Value::Unsigned)
                .unwrap_or_else(|_| Value::Float(digits.parse().unwrap())),
            CaseValue::Text(text) => Value::Text(text.to_owned()),
            CaseValue::Bool(value) => Value::Bool(value),
            CaseValue::Null => Value::Text("null".to_owned()),
        };
        // Keys that are no settings are found by their path if they exist.
        let changes: Vec<FileChange> = changes
            .iter()
            .map(|case| FileChange::new(case.0.replace('/', "."), value(case.1)))
            .collect();
        let prepare = || Application::prepare(std::slice::from_ref(&copy), &changes);
        let application = prepare().unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(!application.is_empty(), "{file}");
        let diff = application.diff();
        let removed = diff.lines().filter(|line| line.starts_with('-')).count();
        assert!(removed <= application.applied().len() + 1, "{file}: {diff}");
        application.commit().unwrap();
        assert_ne!(fs::read(&copy).unwrap(), original, "{file}");
        assert!(prepare().unwrap().is_empty(), "{file}: not a no-op");
        undo(std::slice::from_ref(&copy), false).unwrap();
        assert_eq!(fs::read(&copy).unwrap(), original, "{file}");
        assert_eq!(names(folder.path()), [name.to_string_lossy()], "{file}");
        fs::remove_file(&copy).unwrap();
    }
}

#[test]
fn what_cannot_be_changed_alone_is_refused() {
    let refused = |file: &str, key: &str| {
        let text = fs::read_to_string(corpus().join(file)).unwrap();
        let change = [(path(key), Scalar::Number("3".to_owned()))];
        let format = Format::of(Path::new(file), &text);
        let error = edit(Path::new(file), format, &text, &change).unwrap_err();
        error.to_string()
    };
    for (file, key, part) in [
        (
            "yaml/anchors_and_merges.yaml",
            "defaults/batch_size",
            "line 2: `defaults.batch_size` cannot be changed: it belongs to the anchor on line 2",
        ),
        (
            "yaml/anchors_and_merges.yaml",
            "seq",
            "other places repeat that anchor",
        ),
        (
            "yaml/anchors_and_merges.yaml",
            "defaults/extra",
            "other places repeat that anchor",
        ),
        (
            "yaml/anchors_and_merges.yaml",
            "finetune/optimizer/name",
            "the alias on line 18 repeats it",
        ),
        (
            "yaml/anchors_and_merges.yaml",
            "train/workers/x",
            "no section that could take a key",
        ),
        (
            "yaml/multi_line_strings.yaml",
            "prompt",
            "a text of several lines",
        ),
        // Behind text that keeps its blank lines there is no room for a key;
        // that the text would change is found by reading the result.
        (
            "yaml/multi_line_strings.yaml",
            "fresh",
            "`tail` would have changed as well; nothing was written",
        ),
        (
            "yaml/tags_and_nulls.yaml",
            "path",
            "a value with a tag of its own",
        ),
        ("yaml/tags_and_nulls.yaml", "list", "it is a list"),
        (
            "yaml/guide001_low_memory.yaml",
            "training/precision/x",
            "no section that could take a key",
        ),
        ("toml/numbers.toml", "numbers/date", "it is a date"),
        ("toml/strings.toml", "text/multi", "a text of several lines"),
        (
            "python/conditional.py",
            "BATCH_SIZE",
            "it is set again on line 6",
        ),
        (
            "python/conditional.py",
            "ACCUMULATION",
            "it is set again on line 10",
        ),
        ("python/conditional.py", "A", "a chained assignment"),
        (
            "python/guide002_config.py",
            "OUTPUT_DIR",
            "it is an expression",
        ),
        ("python/constants.py", "RUN_NAME", "it is an expression"),
        (
            "python/constants.py",
            "TRAINING/batch_size",
            "no dictionary or class of that name",
        ),
        (
            "python/mixed_quotes.py",
            "SETTINGS/bytes",
            "it is an expression",
        ),
    ] {
        let message = refused(file, key);
        assert!(message.contains(part), "{file} {key}: {message}");
    }
    let twice = edit(
        Path::new("c.py"),
        Format::Python,
        "A = 1\nB = 2\nA = 3\n",
        &[(path("A"), Scalar::Number("4".to_owned()))],
    );
    assert_eq!(
        twice.unwrap_err().to_string(),
        "`A` stands twice in c.py, on lines 1 and 3\nhint: keep one of them"
    );
}
