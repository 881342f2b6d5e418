//! Files of every dialect, each with what must be read of it, what it must become when settings
//! are written into it, and that this can be taken back byte for byte.
//!
//! What is expected stands in the `expected.json` of each folder. A new text is stated as
//! replacements, so that nothing of ours has a say in what is right; every other byte must stay.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cinch_config::{
    Application, Checkpointing, Config, FileChange, FrozenWeights, LoraTargets, Settings, Sharding,
    Source, StateFormat, Value, config_files, undo,
};
use serde::Deserialize;

/// What is expected of one file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// What is loaded together with it, in that order, where it is not loaded alone.
    files: Option<Vec<String>>,
    /// Settings that are said besides, as flags.
    #[serde(default)]
    flags: BTreeMap<String, String>,
    #[serde(default)]
    dialect: Option<String>,
    /// What the run is; see `facts`.
    #[serde(default)]
    facts: BTreeMap<String, String>,
    #[serde(default)]
    not_understood: Vec<String>,
    #[serde(default)]
    savings: Vec<String>,
    /// A part of the error, where the file is refused.
    refused: Option<String>,
    /// Settings to write.
    #[serde(default)]
    edit: BTreeMap<String, String>,
    /// Per file: what is replaced by what, each of which is there once.
    #[serde(default)]
    becomes: BTreeMap<String, Vec<(String, String)>>,
    /// Settings that have no place.
    #[serde(default)]
    unplaced: Vec<String>,
    /// Parts of what is told besides, in order.
    #[serde(default)]
    remarks: Vec<String>,
    /// A part of the error, where the edit is refused.
    edit_refused: Option<String>,
    #[serde(default)]
    add_keys: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dialects")
}

fn folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(root()).unwrap();
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders
}

fn cases(folder: &Path) -> BTreeMap<String, Case> {
    let path = folder.join("expected.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|_| panic!("{}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every file below a folder, by its path there.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).unwrap().to_string_lossy();
            let bytes = fs::read(&path).unwrap();
            found.insert(name.replace('\\', "/"), bytes);
        }
    }
    found
}

fn copy_of(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for (name, bytes) in contents(folder) {
        let path = copy.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    copy
}

fn paths(folder: &Path, name: &str, case: &Case) -> Vec<PathBuf> {
    match &case.files {
        Some(names) if names.as_slice() == ["…"] => config_files(&folder.join(name)).unwrap(),
        Some(names) => names.iter().map(|name| folder.join(name)).collect(),
        None => vec![folder.join(name)],
    }
}

fn load(folder: &Path, name: &str, case: &Case) -> Result<(Settings, Config), String> {
    let mut settings = Settings::new();
    settings
        .load_files(&paths(folder, name, case))
        .map_err(|error| error.to_string())?;
    for (key, value) in &case.flags {
        let source = Source::Flag("--flag".to_owned());
        settings.set(key, value, source).unwrap();
    }
    let config = settings.resolve().map_err(|error| error.to_string())?;
    settings
        .refuse_not_predicted()
        .map_err(|error| error.to_string())?;
    Ok((settings, config))
}

/// What decides the memory of a run, in words; what is off is left out.
fn facts(config: &Config) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut fact = |name: &str, value: String| facts.insert(name.to_owned(), value);
    let (batch, torch) = (&config.batch, &config.torch);
    fact("model", config.model_title());
    fact("batch", batch.batch_size.to_string());
    fact("accumulation", batch.accumulation.to_string());
    fact("length", batch.seq_len.to_string());
    fact("precision", torch.precision.name().to_owned());
    match batch.checkpointing {
        Checkpointing::None => {}
        Checkpointing::Full => drop(fact("checkpointing", "full".to_owned())),
        Checkpointing::Auto => drop(fact("checkpointing", "auto".to_owned())),
        Checkpointing::Blocks(blocks) => drop(fact("checkpointing", blocks.to_string())),
    }
    if let Some(optimizer) = torch.optimizer {
        fact("optimizer", optimizer.name().to_owned());
    }
    if batch.states != StateFormat::Fp32 {
        fact("states", batch.states.name().to_owned());
    }
    if let Some(lora) = &config.tuning.lora {
        let targets = match &lora.targets {
            LoraTargets::AllLinear => "all-linear".to_owned(),
            LoraTargets::Names(names) => names.join(","),
            LoraTargets::Pattern(pattern) => pattern.clone(),
        };
        fact("adapters", format!("{} on {targets}", lora.rank));
    }
    if config.tuning.frozen != FrozenWeights::InTheirType {
        let doubly = if config.tuning.double_quantization {
            " doubly"
        } else {
            ""
        };
        fact(
            "quantisation",
            format!("{}{doubly}", config.tuning.frozen.name()),
        );
    }
    if torch.sharding != Sharding::None {
        fact("sharding", torch.sharding.name().to_owned());
    }
    if let Some(ranks) = torch.ranks.filter(|ranks| *ranks > 1) {
        fact("ranks", ranks.to_string());
    }
    if torch.attention.name() != "sdpa" {
        fact("attention", torch.attention.name().to_owned());
    }
    if let Some(kernels) = &torch.liger {
        fact("liger", kernels.clone());
    }
    if torch.packing {
        fact("packing", "true".to_owned());
    }
    facts
}

#[test]
fn every_file_is_expected_and_every_dialect_has_three() {
    let mut dialects: BTreeMap<String, usize> = BTreeMap::new();
    let mut count = 0;
    for folder in folders() {
        let cases = cases(&folder);
        let mut used: BTreeSet<String> = BTreeSet::from(["expected.json".to_owned()]);
        for (name, case) in &cases {
            used.insert(name.clone());
            used.extend(case.becomes.keys().cloned());
            for path in paths(&folder, name, case) {
                let name = path.strip_prefix(&folder).unwrap().to_string_lossy();
                used.insert(name.replace('\\', "/"));
            }
            count += 1;
            if let Some(dialect) = &case.dialect {
                *dialects.entry(dialect.clone()).or_default() += 1;
            }
        }
        let found: BTreeSet<String> = contents(&folder).into_keys().collect();
        let left: Vec<&String> = found.difference(&used).collect();
        // A file that another one names need not change.
        let linked = |name: &&&String| name.starts_with("ds/");
        assert!(left.iter().all(|name| linked(&name)), "{left:?}");
    }
    assert!(count >= 40, "{count}");
    for dialect in [
        "cinch",
        "torchtune",
        "DeepSpeed",
        "accelerate",
        "axolotl",
        "LLaMA-Factory",
        "LLaMA-Factory (v1)",
        "gated sparse attention",
        "text embedder (Lightning)",
        "Hugging Face TrainingArguments",
        "Lightning",
        "constants of a program",
    ] {
        let count = dialects.get(dialect).copied().unwrap_or(0);
        assert!(count >= 3, "{dialect}: {count}");
    }
}

#[test]
fn every_file_is_read_as_its_author_meant_it() {
    for folder in folders() {
        for (name, case) in cases(&folder) {
            let shown = format!("{}/{name}", folder.file_name().unwrap().to_string_lossy());
            let (settings, config) = match (load(&folder, &name, &case), &case.refused) {
                (Err(error), Some(reason)) => {
                    assert!(error.contains(reason.as_str()), "{shown}: {error}");
                    continue;
                }
                (Ok(_), Some(reason)) => panic!("{shown} is not refused: {reason}"),
                (Err(error), None) => panic!("{shown}: {error}"),
                (Ok(loaded), None) => loaded,
            };
            assert_eq!(facts(&config), case.facts, "{shown}");
            let readings = settings.readings();
            let first = readings.first().unwrap();
            assert_eq!(Some(first.dialect), case.dialect.as_deref(), "{shown}");
            let unread = readings.iter().flat_map(|reading| &reading.not_understood);
            let unread: Vec<&str> = unread.map(|one| one.key.as_str()).collect();
            assert_eq!(unread, case.not_understood, "{shown}");
            let savings = readings.iter().flat_map(|reading| &reading.savings);
            let savings: Vec<&str> = savings.map(|one| one.key.as_str()).collect();
            assert_eq!(savings, case.savings, "{shown}");
        }
    }
}

#[test]
fn every_file_is_changed_where_it_should_be_and_back() {
    for folder in folders() {
        for (name, case) in cases(&folder) {
            if case.edit.is_empty() {
                assert!(case.refused.is_some(), "{name}: nothing is written");
                continue;
            }
            let shown = format!("{}/{name}", folder.file_name().unwrap().to_string_lossy());
            change(&shown, &folder, &name, &case);
        }
    }
}

fn change(shown: &str, folder: &Path, name: &str, case: &Case) {
    let copy = copy_of(folder);
    let before = contents(copy.path());
    let files = paths(copy.path(), name, case);
    let changes: Vec<FileChange> = case
        .edit
        .iter()
        .map(|(key, value)| match key.split_once(':') {
            // A key of one file that is no setting.
            Some((file, key)) => {
                FileChange::new(key, Value::Unsigned(value.parse().unwrap())).in_file(file)
            }
            None => FileChange::parse(key, value).unwrap(),
        })
        .collect();
    let prepared = Application::prepare_with(&files, &changes, case.add_keys);
    let application = match (prepared, &case.edit_refused) {
        (Err(error), Some(reason)) => {
            assert!(
                error.to_string().contains(reason.as_str()),
                "{shown}: {error}"
            );
            assert_eq!(contents(copy.path()), before, "{shown}");
            return;
        }
        (Ok(_), Some(reason)) => panic!("{shown} is changed: {reason}"),
        (Err(error), None) => panic!("{shown}: {error}"),
        (Ok(application), None) => application,
    };
    let unplaced = application.unplaced().iter();
    let unplaced: Vec<&str> = unplaced.map(|one| one.key.as_str()).collect();
    assert_eq!(unplaced, case.unplaced, "{shown}");
    let remarks = application.remarks();
    assert_eq!(remarks.len(), case.remarks.len(), "{shown}: {remarks:#?}");
    for (remark, part) in remarks.iter().zip(&case.remarks) {
        assert!(remark.contains(part.as_str()), "{shown}: {remark}");
    }
    application.commit().unwrap();
    let mut expected = before.clone();
    for (file, replacements) in &case.becomes {
        let mut text = String::from_utf8(before[file].clone()).unwrap();
        for (from, to) in replacements {
            assert_eq!(text.matches(from).count(), 1, "{shown}: {from:?} in {file}");
            text = text.replacen(from, to, 1);
        }
        expected.insert(file.clone(), text.into_bytes());
    }
    for (file, bytes) in &expected {
        let found = fs::read_to_string(copy.path().join(file)).unwrap();
        assert_eq!(found, String::from_utf8_lossy(bytes), "{shown}: {file}");
    }
    check_rest(shown, folder, copy.path(), name, case);
    if !case.becomes.is_empty() {
        undo(&files, false).unwrap();
    }
    assert_eq!(contents(copy.path()), before, "{shown}");
}

/// What was not asked for is as it was, the number of GPUs of a whole batch included.
fn check_rest(shown: &str, folder: &Path, copy: &Path, name: &str, case: &Case) {
    if case.refused.is_some() {
        return;
    }
    let mut expected = facts(&load(folder, name, case).unwrap().1);
    for (key, fact) in [
        ("vram.batch_size", "batch"),
        ("vram.gradient_accumulation_steps", "accumulation"),
        ("vram.max_seq_len", "length"),
        ("vram.checkpointing", "checkpointing"),
    ] {
        let value = case.edit.get(key);
        match value.filter(|_| !case.unplaced.iter().any(|one| one == key)) {
            Some(value) if value == "none" => drop(expected.remove(fact)),
            Some(value) => drop(expected.insert(fact.to_owned(), value.clone())),
            None => {}
        }
    }
    let found = facts(&load(copy, name, case).unwrap().1);
    assert_eq!(found, expected, "{shown}");
}

/// Whatever is left of a file, reading it gives settings or an error that names it.
#[test]
fn no_part_of_a_file_is_a_surprise() {
    let mut count = 0;
    for folder in folders() {
        for (name, bytes) in contents(&folder) {
            let text = String::from_utf8(bytes).unwrap();
            let cuts = (0..text.len()).filter(|at| text.is_char_boundary(*at));
            for at in cuts.step_by(5) {
                for part in [&text[..at], &text[at..]] {
                    let mut settings = Settings::new();
                    if let Err(error) = settings.load_text(Path::new(&name), part) {
                        let error = error.to_string();
                        assert!(error.contains(&name), "{name} at {at}: {error}");
                    }
                    settings.explain();
                    count += 1;
                }
            }
        }
    }
    assert!(count > 10_000, "{count}");
}
