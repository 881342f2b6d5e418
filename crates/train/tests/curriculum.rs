//! Whole runs of a small embedder: stages in order, negatives left out by clusters, early stops,
//! the lowest checkpoints, a resumed run that equals an uninterrupted one, and embeddings that
//! find more after training than before.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use cinch_config::{Config, Settings, Source};
use cinch_data::NoProgress;
use cinch_data::synth::{self, TaxonomyShape};
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_step::StepPlan;
use cinch_train::checkpoint::{self, Store};
use cinch_train::{
    Embedder, EmbedderFiles, EmbedderOptions, Event, Resume, Run, State, TrainError,
    TrainingOutcome, evaluate_retrieval, train,
};

const STAGES: &str = r#"[
    {"name": "01_stage", "n_positives": 4, "n_negatives": 5, "anchor_level": ["2", "3"]},
    {"name": "02_stage", "n_positives": 2, "n_negatives": 3},
    {"name": "03_stage", "n_positives": 3, "n_negatives": 3, "positive_relation": ["sibling"]}
]"#;

fn settings(folder: &Path, own: &[(&str, &str)]) -> Config {
    let codes = folder.join("codes.jsonl");
    if !codes.exists() {
        let shape = TaxonomyShape {
            sectors: 6,
            children: 2,
            digits: 4,
        };
        std::fs::write(&codes, synth::taxonomy(shape, 3)).unwrap();
    }
    let mut settings = Settings::new();
    let shared = [
        ("model.type", "naics"),
        ("model.vocab_size", "257"),
        ("model.max_seq_len", "16"),
        ("model.d_model", "16"),
        ("model.d_ffn", "24"),
        ("model.n_layers", "1"),
        ("model.n_heads", "2"),
        ("model.adapter_rank", "2"),
        ("model.d_expert", "16"),
        ("model.title_length", "12"),
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "2"),
        ("vram.max_seq_len", "16"),
        ("training.learning_rate", "3e-3"),
        ("training.warmup_steps", "2"),
        ("training.logging_steps", "1"),
        ("data.val_split", "0.2"),
    ];
    for (key, value) in shared.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    let source = || Source::Flag("test".to_owned());
    settings.set_path("data.source", &codes, source()).unwrap();
    let run = folder.join("run");
    settings
        .set_path("output.output_dir", &run, source())
        .unwrap();
    settings.resolve().unwrap()
}

/// Trains; after `stop_after` steps somebody presses Ctrl-C. Returns what was told, and the loss of
/// each step.
fn run(
    config: &Config,
    resume: Resume,
    stop_after: u64,
) -> Result<(TrainingOutcome, Vec<String>, Vec<f64>), TrainError> {
    run_on(Target::Cpu, config, resume, stop_after)
}

fn run_on(
    target: Target,
    config: &Config,
    resume: Resume,
    stop_after: u64,
) -> Result<(TrainingOutcome, Vec<String>, Vec<f64>), TrainError> {
    let plan = StepPlan::new(config, target, 0).unwrap();
    let stop = AtomicBool::new(false);
    let (mut notes, mut losses) = (Vec::new(), Vec::new());
    let run = Run {
        plan,
        settings: Default::default(),
        resume,
        options: EngineOptions {
            threads: Some(2),
            ..EngineOptions::default()
        },
        stop: &stop,
        progress: &NoProgress,
        world: None,
    };
    let outcome = train(run, &mut |event: Event<'_>| match event {
        Event::Note(note) => notes.push(note.to_owned()),
        Event::Step { report, .. } => {
            losses.push(report.loss);
            stop.store(report.step >= stop_after, Ordering::Relaxed);
        }
        _ => {}
    })?;
    Ok((outcome, notes, losses))
}

fn state(config: &Config) -> State {
    let store = Store::open(&config.output.output_dir).unwrap();
    let newest = store.newest().unwrap().unwrap();
    State::from_json(&newest.path, checkpoint::load_state(&newest.path).unwrap()).unwrap()
}

fn weights(config: &Config) -> Vec<u8> {
    let store = Store::open(&config.output.output_dir).unwrap();
    let newest = store.newest().unwrap().unwrap();
    std::fs::read(newest.path.join("model.safetensors")).unwrap()
}

#[test]
fn stages_follow_each_other_and_a_resumed_run_equals_an_uninterrupted_one() {
    let own = [
        ("data.curriculum", STAGES),
        ("training.epochs", "2.5"),
        ("training.eval_epochs", "1"),
        ("data.cluster_epoch", "1"),
        ("data.clusters", "6"),
        ("training.save_top", "2"),
    ];
    let whole_folder = tempfile::tempdir().unwrap();
    let whole = settings(whole_folder.path(), &own);
    assert_eq!(
        StepPlan::new(&whole, Target::Cpu, 0)
            .unwrap()
            .variants()
            .len(),
        2
    );
    let (outcome, notes, losses) = run(&whole, Resume::Fresh, u64::MAX).unwrap();
    assert_eq!(outcome.step, outcome.max_steps);
    for name in ["02_stage", "03_stage"] {
        let begins = notes
            .iter()
            .any(|note| note.starts_with(&format!("stage {name}: steps")));
        assert!(begins, "{notes:?}");
    }
    let last = state(&whole);
    assert_eq!(last.stage, 2);
    assert_eq!(last.stage_starts.len(), 3);
    let clusters = last.clusters.clone().expect("the last epoch has clusters");
    assert_eq!((clusters.stage, clusters.epoch), (2, 2));
    assert_eq!(clusters.of_texts.len(), 6 * (1 + 2 + 4));

    // Cut off in the second stage, after clusters were found.
    let cut_folder = tempfile::tempdir().unwrap();
    let cut = settings(cut_folder.path(), &own);
    let stop_after = last.stage_starts[2] - 1;
    let (_, _, mut seen) = run(&cut, Resume::Fresh, stop_after).unwrap();
    let store = Store::open(&cut.output.output_dir).unwrap();
    let from = store.newest().unwrap().unwrap().path;
    let (_, _, rest) = run(&cut, Resume::From(from), u64::MAX).unwrap();
    seen.extend(rest);
    assert_eq!(seen, losses);
    assert!(weights(&cut) == weights(&whole));
    let again = State {
        config: last.config.clone(),
        ..state(&cut)
    };
    assert_eq!(again, last);

    // The newest checkpoint, and the two of the last stage with the lowest losses.
    let kept: Vec<u64> = Store::open(&whole.output.output_dir)
        .unwrap()
        .list()
        .unwrap()
        .iter()
        .map(|entry| entry.step)
        .collect();
    assert!(last.top.len() == 2 && kept.len() <= 3, "{kept:?}");
    assert!(
        last.top.iter().all(|(step, _)| kept.contains(step)),
        "{kept:?}"
    );
}

#[test]
fn a_run_that_gets_no_better_stops_early() {
    let folder = tempfile::tempdir().unwrap();
    // With such a rate no weight changes.
    let own = [
        ("training.learning_rate", "1e-30"),
        ("training.warmup_steps", "0"),
        ("training.schedule", "constant"),
        ("training.max_steps", "60"),
        ("training.eval_interval", "2"),
        ("training.patience", "3"),
        ("model.negatives", "4"),
    ];
    let config = settings(folder.path(), &own);
    let (outcome, notes, _) = run(&config, Resume::Fresh, u64::MAX).unwrap();
    // The first evaluation is the best, and three more are no better.
    assert_eq!((outcome.step, outcome.max_steps), (8, 8));
    assert!(
        notes.iter().any(|note| note.contains("stopped early")),
        "{notes:?}"
    );
    assert_eq!(state(&config).evaluations_since_best, 3);
}

#[test]
fn training_finds_more_of_what_was_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let own = [
        ("training.max_steps", "120"),
        ("training.learning_rate", "1e-2"),
        ("model.negatives", "6"),
        ("model.text_chunk", "4"),
        ("model.dropout", "0"),
        ("training.eval_interval", "0"),
        ("data.val_split", "0.3"),
        ("model.max_seq_len", "48"),
        ("vram.max_seq_len", "48"),
        ("model.d_model", "32"),
        ("model.n_heads", "4"),
        ("model.d_ffn", "64"),
        ("model.d_expert", "64"),
        ("model.adapter_rank", "4"),
        ("model.title_length", "24"),
        ("vram.batch_size", "8"),
        ("vram.gradient_accumulation_steps", "1"),
    ];
    let config = settings(folder.path(), &own);
    let (outcome, ..) = run(&config, Resume::Fresh, u64::MAX).unwrap();
    let trained = checkpoint::load_weights(outcome.checkpoint.as_ref().unwrap()).unwrap();
    let options = EmbedderOptions {
        texts: 3,
        compute: DType::F32,
        target: Target::Cpu,
        engine: EngineOptions::default(),
    };
    let found = |trained| {
        let files = EmbedderFiles {
            trained,
            base: None,
            seed: config.training.seed,
        };
        let mut embedder = Embedder::of_points(&config, files, &options).unwrap();
        assert_eq!(embedder.width(), 34);
        evaluate_retrieval(&config, &mut embedder, &[1, 5]).unwrap()
    };
    let (before, after) = (found(None), found(Some(&trained)));
    assert!(
        after.mean_reciprocal_rank > before.mean_reciprocal_rank + 0.1,
        "{before:?} {after:?}"
    );
    assert!(after.recall[&5] > before.recall[&5], "{before:?} {after:?}");
}

#[test]
fn what_cannot_be_trained_is_told_with_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |own: &[(&str, &str)], parts: &[&str]| {
        let config = settings(folder.path(), own);
        let problem = run(&config, Resume::Fresh, u64::MAX)
            .unwrap_err()
            .to_string();
        for part in parts.iter().chain(&["hint:"]) {
            assert!(problem.contains(part), "{problem}");
        }
    };
    let many = STAGES.replace("\"n_negatives\": 3", "\"n_negatives\": 300");
    refused(
        &[("data.curriculum", &many)],
        &["300 negatives", "02_stage"],
    );
    let level = STAGES.replace("\"2\", \"3\"", "\"sector\"");
    refused(
        &[("data.curriculum", &level)],
        &["01_stage", "anchor_level", "`sector`"],
    );
    let codes = folder.path().join("codes.jsonl");
    let text = std::fs::read_to_string(&codes).unwrap();
    let empty: Vec<String> = text
        .lines()
        .map(|line| {
            let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
            value["excluded"] = "".into();
            value.to_string()
        })
        .collect();
    std::fs::write(&codes, empty.join("\n")).unwrap();
    refused(&[], &["codes.jsonl", "`excluded` is empty"]);
    std::fs::write(&codes, text).unwrap();

    // An encoder of another width.
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embedder");
    let file = weights.join("embedder.safetensors");
    let own = [
        ("model.weights", file.to_str().unwrap()),
        ("model.negatives", "4"),
    ];
    refused(&own, &["embeddings"]);
}

/// Phases of a run, their evaluations and the embeddings between epochs share one arena there too.
#[test]
#[ignore = "needs a GPU"]
fn stages_on_a_gpu_track_the_cpu() {
    let stages = [("data.curriculum", STAGES), ("training.epochs", "1")];
    let losses = |target, own: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        let config = settings(folder.path(), &[&stages[..], own].concat());
        let (outcome, _, losses) = run_on(target, &config, Resume::Fresh, u64::MAX).unwrap();
        assert_eq!(outcome.step, outcome.max_steps);
        losses
    };
    let plain = [("data.cluster_epoch", "0")];
    let [cpu, gpu] = [Target::Cpu, Target::Cuda].map(|target| losses(target, &plain));
    assert_eq!(cpu.len(), gpu.len());
    for (step, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        assert!(
            (gpu / cpu - 1.0).abs() < 2e-2,
            "step {step}: {gpu} for {cpu}"
        );
    }
    let clusters = [
        ("data.cluster_epoch", "1"),
        ("training.epochs", "2"),
        ("vram.precision", "fp16"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let own = [&[("data.curriculum", STAGES)][..], &clusters].concat();
    let config = settings(folder.path(), &own);
    let (outcome, ..) = run_on(Target::Cuda, &config, Resume::Fresh, u64::MAX).unwrap();
    assert!(state(&config).clusters.is_some());
    let trained = checkpoint::load_weights(outcome.checkpoint.as_ref().unwrap()).unwrap();
    let points = [Target::Cpu, Target::Cuda].map(|target| {
        let options = EmbedderOptions {
            texts: 5,
            compute: DType::F32,
            target,
            engine: EngineOptions::default(),
        };
        let files = EmbedderFiles {
            trained: Some(&trained),
            base: None,
            seed: config.training.seed,
        };
        let mut embedder = Embedder::of_points(&config, files, &options).unwrap();
        let texts = [[vec![3, 4], vec![5; 9], vec![1], Vec::new()]];
        embedder
            .embed(texts.iter().map(|text| &text[..]), &mut |_| {})
            .unwrap()
    });
    for (cpu, gpu) in points[0].iter().zip(&points[1]) {
        assert!(
            (cpu - gpu).abs() < 1e-3 * cpu.abs().max(1.0),
            "{gpu} for {cpu}"
        );
    }
}
