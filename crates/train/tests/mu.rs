//! Whole runs of MU: its tokenizer is trained on the data and kept with the run, the model writes a
//! text after each pass over the data, and a run that was stopped ends like one that was not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use cinch_config::{Config, Settings, Source};
use cinch_data::{NoProgress, Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::checkpoint::{MODEL_FILE, OPTIMIZER_FILE, Store};
use cinch_train::{Ending, Event, Resume, Run, TOKENIZER_FILE, TrainError, TrainingOutcome, train};

/// The run in `folder`, on the text beside it, in two passes of four steps or so.
fn config(folder: &Path, run: &str) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        let line = |n: usize| format!("line {n}: {} and {}\n", n * n % 17, n * 7 % 23);
        fs::write(&text, (0..60).map(line).collect::<String>()).unwrap();
    }
    let mut settings = Settings::new();
    for (key, value) in [
        ("model.type", "mu"),
        ("model.n_layers", "1"),
        ("model.vocab_size", "300"),
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "2"),
        ("vram.max_seq_len", "16"),
        ("training.epochs", "2"),
        ("training.warmup_steps", "2"),
        ("training.eval_interval", "3"),
        ("training.sample_tokens", "5"),
        ("training.sample_prompt", "line"),
        ("data.source", text.to_str().unwrap()),
        ("data.cache_dir", folder.join("cache").to_str().unwrap()),
        ("output.output_dir", folder.join(run).to_str().unwrap()),
    ] {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// Runs until the end or, where it is given, until after this step; the texts with their steps.
fn run(
    config: &Config,
    resume: Resume,
    last: Option<u64>,
) -> Result<(TrainingOutcome, Vec<(u64, String)>), TrainError> {
    let stop = AtomicBool::new(false);
    let run = Run {
        plan: StepPlan::new(config, Target::Cpu, 0).unwrap(),
        settings: BTreeMap::new(),
        resume,
        options: EngineOptions {
            threads: Some(1),
            ..EngineOptions::default()
        },
        stop: &stop,
        progress: &NoProgress,
        world: None,
    };
    let mut texts = Vec::new();
    let outcome = train(run, &mut |event: Event<'_>| match event {
        Event::Step { report, .. } if Some(report.step) == last => {
            stop.store(true, Ordering::Relaxed);
        }
        Event::Sample { step, text } => texts.push((step, text.to_owned())),
        _ => {}
    })?;
    Ok((outcome, texts))
}

#[test]
fn a_stopped_run_ends_like_one_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let whole = config(folder.path(), "whole");
    let (outcome, texts) = run(&whole, Resume::Fresh, None).unwrap();
    assert_eq!(outcome.ending, Ending::Finished);
    let steps = outcome.step;
    assert!(steps > 4, "{steps}");

    let cut = config(folder.path(), "cut");
    let (outcome, before) = run(&cut, Resume::Fresh, Some(3)).unwrap();
    assert_eq!((outcome.ending, outcome.step), (Ending::Interrupted, 3));
    // What the cache held is made again from the text.
    fs::remove_dir_all(folder.path().join("cache")).unwrap();
    let (outcome, after) = run(&cut, Resume::From(outcome.checkpoint.unwrap()), None).unwrap();
    assert_eq!((outcome.ending, outcome.step), (Ending::Finished, steps));

    let stores = [&whole, &cut].map(|config| Store::open(&config.output.output_dir).unwrap());
    for file in [MODEL_FILE, OPTIMIZER_FILE] {
        let [a, b] = [&stores[0], &stores[1]]
            .map(|store| fs::read(store.path_of(steps).join(file)).unwrap());
        assert!(a == b, "{file} differs");
    }
    assert_eq!([before, after].concat(), texts);
}

#[test]
fn a_text_is_written_after_each_pass() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), "run");
    let (outcome, texts) = run(&config, Resume::Fresh, None).unwrap();
    // Twice: in the middle, where a step may belong to both passes, and at the end.
    let steps: Vec<u64> = texts.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [outcome.step.div_ceil(2), outcome.step]);
    for (_, text) in &texts {
        assert!(text.starts_with("line") && text.len() > 4, "{text:?}");
    }
    let path = config.output.output_dir.join(TOKENIZER_FILE);
    let tokenizer = Tokenizer::load(&TokenizerSpec::File(path)).unwrap();
    assert!((261..=300).contains(&tokenizer.vocab_size()));
    assert!(tokenizer.encode("line").unwrap().len() < 4);
}

#[test]
fn no_tokenizer_is_trained_on_samples() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), "run");
    let path = folder.path().join("pairs.jsonl");
    fs::write(&path, "{\"prompt\": \"a\", \"completion\": \"b\"}\n").unwrap();
    config.data.source = Some(path);
    let error = run(&config, Resume::Fresh, None).unwrap_err();
    assert!(
        matches!(error, TrainError::TokenizerOfSamples { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("--tokenizer"), "{error}");
}
