//! A folder of configs as it grows in a project: beside the files of the run lie those of other
//! programs, of another curriculum, and what stages begin with.

use std::fs;
use std::path::Path;

use cinch_config::{ConfigError, Settings, config_files};

const MAIN: &str = "\
data_loader: {batch_size: 8}
training:
  trainer: {accumulate_grad_batches: 2, precision: 16-mixed}
";

/// A folder with these files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn load(path: &Path) -> Result<Settings, ConfigError> {
    let mut settings = Settings::new();
    settings.load_files(&config_files(path)?)?;
    Ok(settings)
}

fn stages(settings: &Settings) -> Vec<(String, Option<u64>)> {
    let config = settings.resolve().unwrap();
    let stages = config.data.curriculum.into_iter();
    stages
        .map(|stage| (stage.name, stage.n_negatives))
        .collect()
}

#[test]
fn what_a_folder_holds_besides_is_told_and_not_read() {
    let conf = folder(&[
        ("config.yaml", MAIN),
        (
            "data_generation/distances.yaml",
            "input_parquet: ./a.parquet\n",
        ),
        ("graph_curriculum/01_graph.yaml", "n_negatives: 64\n"),
        (
            "text_curriculum/01_text.yaml",
            "name: 01_text\nn_negatives: 24\n",
        ),
        (
            "text_curriculum/02_text.yaml",
            "name: 02_text\nn_negatives: 8\n",
        ),
        ("text_curriculum/chain_text.yaml", "chain_name: text\n"),
        (
            "text_curriculum/default.yaml",
            "name: default\nn_negatives: 32\n",
        ),
    ]);
    let settings = load(conf.path()).unwrap();
    let expected = [
        ("01_text".to_owned(), Some(24)),
        ("02_text".to_owned(), Some(8)),
    ];
    assert_eq!(stages(&settings), expected);
    let notes = settings.notes();
    for name in [
        "distances.yaml",
        "01_graph.yaml",
        "chain_text.yaml",
        "default.yaml",
    ] {
        let told = |note: &&String| note.contains(name) && note.starts_with("not read, because");
        assert_eq!(notes.iter().filter(told).count(), 1, "{name}: {notes:#?}");
    }
    assert_eq!(notes.len(), 3, "{notes:#?}");
}

/// Where nothing else is there, the same files are what was meant.
#[test]
fn what_stands_alone_is_read() {
    let conf = folder(&[
        ("config.yaml", MAIN),
        (
            "curriculum/default.yaml",
            "name: default\nn_negatives: 32\n",
        ),
    ]);
    for path in [conf.path().to_owned(), conf.path().join("config.yaml")] {
        let settings = load(&path).unwrap();
        assert_eq!(stages(&settings), [("default".to_owned(), Some(32))]);
    }
    let graph = folder(&[
        ("config.yaml", MAIN),
        (
            "graph_curriculum/01_graph.yaml",
            "name: 01_graph\nn_negatives: 64\n",
        ),
    ]);
    let settings = load(graph.path()).unwrap();
    assert_eq!(stages(&settings), [("01_graph".to_owned(), Some(64))]);
}

#[test]
fn a_file_that_is_named_must_say_something() {
    let conf = folder(&[
        ("config.yaml", "input_parquet: ./a.parquet\n"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24\n"),
    ]);
    for path in [conf.path().to_owned(), conf.path().join("config.yaml")] {
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains("config.yaml is of no program"), "{error}");
    }
}

/// A loss with more terms is another run.
#[test]
fn terms_that_are_not_computed_are_refused() {
    for (term, is_refused) in [
        ("hierarchy_weight: 0.325", true),
        ("rank_order_weight: 0.275", true),
        ("radius_reg_weight: 0", false),
        ("temperature: 0.07", false),
    ] {
        let text = format!("{MAIN}loss:\n  {term}\n");
        let conf = folder(&[("config.yaml", &text)]);
        let told = load(conf.path()).map_err(|error| error.to_string());
        assert_eq!(told.is_err(), is_refused, "{term}: {told:?}");
        if let Err(error) = told {
            assert!(
                error.contains("config.yaml line 5") && error.contains(term),
                "{error}"
            );
        }
    }
}
