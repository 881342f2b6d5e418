//! A config in one of the five languages: read, resolved, explained, and edited in memory.

use std::path::Path;

use cinch_config::{Config, Document, Entry, Format, KeyPath, SETTINGS, Scalar, Settings, edit};

use super::{Target, contents};

const FOLDERS: [&str; 4] = [
    "crates/config/tests/fixtures",
    "crates/config/tests/dialects",
    "crates/config/tests/corpus",
    "examples",
];

macro_rules! target {
    ($name:literal, $about:literal, $file:literal, $endings:expr) => {
        Target {
            name: $name,
            about: $about,
            seeds: || contents(&FOLDERS, &$endings),
            words: keys,
            run: |input, _| read(Path::new($file), &String::from_utf8_lossy(input)),
        }
    };
}

pub const JSON: Target = target!(
    "json",
    "a config in JSON with comments",
    "run.json",
    ["json", "jsonc"]
);
pub const YAML: Target = target!("yaml", "a config in YAML", "run.yaml", ["yaml", "yml"]);
pub const TOML: Target = target!("toml", "a config in TOML", "run.toml", ["toml"]);
pub const PYTHON: Target = target!("python", "a config in Python", "run.py", ["py"]);
pub const SHELL: Target = target!(
    "shell",
    "a config in a shell script",
    "run.sh",
    ["sh", "bash"]
);

/// Every name that a setting has.
pub fn keys() -> Vec<String> {
    let settings = SETTINGS.iter();
    let names = settings.flat_map(|setting| {
        let aliases = setting.aliases.iter().map(|alias| alias.key);
        std::iter::once(setting.key).chain(aliases)
    });
    names.map(str::to_owned).collect()
}

fn read(path: &Path, text: &str) {
    resolve(path, text);
    let Ok(document) = Document::read(path, text) else {
        return;
    };
    // Which of its values is changed follows from the text, so that an input is all there is.
    let sum = text.bytes().fold(0_usize, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    let entry = document
        .entries
        .get(sum.checked_rem(document.entries.len()).unwrap_or_default());
    if let Some(entry) = entry {
        change(path, text, &document, entry);
    }
    insert(path, text);
}

/// All that a command does before it looks at a device.
pub fn resolve(path: &Path, text: &str) {
    let mut settings = Settings::new();
    match settings.load_text(path, text) {
        Ok(()) => answer(&settings),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// What was accepted can be explained, and a config reads back.
pub fn answer(settings: &Settings) {
    assert!(!settings.explain().is_empty());
    settings.notes();
    match settings.resolve() {
        Ok(config) => {
            let json = config.to_json().expect("a config can be written");
            let again = Config::from_json(&json).expect("what was written can be read");
            assert!(again == config, "a config reads back as another");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Changes a value and changes it back: then every key is read as it was. The order may be
/// another, as a value that came from a merge is now written out.
fn change(path: &Path, text: &str, document: &Document, entry: &Entry) {
    let other = match &entry.scalar {
        Scalar::Bool(value) => Scalar::Bool(!value),
        Scalar::Text(_) => Scalar::Text("cinch \"'\\ #1".to_owned()),
        _ => Scalar::Number("77".to_owned()),
    };
    let Some(changed) = set(path, document.format, text, &entry.path, other) else {
        return;
    };
    let back = set(
        path,
        document.format,
        &changed,
        &entry.path,
        entry.scalar.clone(),
    );
    if let Some(back) = back {
        let again = Document::read(path, &back).expect("an edited file can be read");
        let values = |document: &Document| {
            let entries = document.entries.iter();
            let value = |entry: &Entry| (entry.path.clone(), meaning(&entry.scalar));
            let mut values: Vec<(KeyPath, String)> = entries.map(value).collect();
            values.sort();
            values
        };
        assert_eq!(values(&again), values(document), "changed and changed back");
    }
}

/// A value without the manner it is written in: 3e-4 is 3.0e-4.
fn meaning(scalar: &Scalar) -> String {
    match scalar {
        Scalar::Number(text) => text
            .parse::<f64>()
            .map_or_else(|_| text.clone(), |number| format!("{number:e}")),
        other => other.to_string(),
    }
}

/// Puts a key where there may be none.
fn insert(path: &Path, text: &str) {
    let key = vec!["training".to_owned(), "max_steps".to_owned()];
    let format = Format::of(path, text);
    set(path, format, text, &key, Scalar::Number("77".to_owned()));
}

/// The edited text, where the edit is not refused; a second edit finds nothing to do.
fn set(path: &Path, format: Format, text: &str, key: &KeyPath, value: Scalar) -> Option<String> {
    let changes = [(key.clone(), value)];
    match edit(path, format, text, &changes) {
        Ok(edited) => {
            let again = edit(path, format, &edited, &changes);
            let again = again.expect("an edit can be repeated");
            assert!(again == edited, "an edit that is repeated changes the file");
            Some(edited)
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}
