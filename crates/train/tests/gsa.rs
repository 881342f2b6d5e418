//! Gated sparse attention against PyTorch: loss, divergence of the indexers and every gradient in
//! both phases, the selected positions, and steps of AdamW from one phase to the other. The
//! expected values are in `fixtures/gsa`, with the script that made them.

use std::path::Path;

use cinch_architecture::Architecture;
use cinch_config::{Config, Settings, Source};
use cinch_engine::{EngineOptions, Executor, MicroBatch};
use cinch_graph::op::Op;
use cinch_graph::{DType, Target};
use cinch_model::{Build, Purpose, build};
use cinch_plan::{Options, Plan};
use cinch_step::StepPlan;
use cinch_train::checkpoint::{WeightFiles, load_weights};
use cinch_train::{Batch, Session};

const SETTINGS: &[(&str, &str)] = &[
    ("model.type", "gsa"),
    ("model.d_model", "16"),
    ("model.n_layers", "2"),
    ("model.n_heads", "4"),
    ("model.n_kv_heads", "2"),
    ("model.d_ffn", "24"),
    ("model.vocab_size", "61"),
    ("model.d_indexer", "4"),
    ("model.n_indexer_heads", "2"),
    ("model.k_base", "12"),
    ("model.k_min", "4"),
    ("model.k_max", "16"),
    ("vram.batch_size", "2"),
    ("vram.gradient_accumulation_steps", "1"),
    ("vram.max_seq_len", "40"),
    ("training.learning_rate", "1e-3"),
    ("training.schedule", "constant"),
    ("training.warmup_steps", "0"),
    ("training.weight_decay", "0.1"),
    ("training.adam_beta2", "0.95"),
    ("training.max_grad_norm", "1.0"),
];

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in SETTINGS.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn fixture() -> WeightFiles {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gsa");
    load_weights(&folder.join("gsa.safetensors")).unwrap()
}

fn floats(file: &WeightFiles, name: &str) -> Vec<f32> {
    words(file, name, f32::from_le_bytes)
}

fn integers(file: &WeightFiles, name: &str) -> Vec<i32> {
    words(file, name, i32::from_le_bytes)
}

fn words<T>(file: &WeightFiles, name: &str, word: fn([u8; 4]) -> T) -> Vec<T> {
    let tensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    file.read(name, 0..tensor.rows(), &mut bytes).unwrap();
    let words = bytes.as_chunks().0.iter();
    words.map(|&bytes| word(bytes)).collect()
}

/// The norm of the difference relative to the norm of what is expected.
fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&b| square(b)).sum();
    (difference / norm.max(1e-30)).sqrt()
}

fn session(own: &[(&str, &str)], recomputed: usize) -> (Session, Batch) {
    let expected = fixture();
    let plan = StepPlan::new(&config(own), Target::Cpu, recomputed).unwrap();
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    session.load_by_name(&expected).unwrap();
    let micro = session.plan().config.batch.batch_size;
    let mut batch = Batch::of(&session.plan().training, micro, 2);
    for name in ["tokens", "targets"] {
        let values = integers(&expected, name);
        batch.get_mut(name).copy_from_slice(&values);
    }
    (session, batch)
}

/// Loss and gradients at one step of a run.
fn matches_pytorch(phase: &str, warmup: &str, recomputed: usize) {
    let expected = fixture();
    let own = [("model.indexer_warmup_steps", warmup)];
    let (mut session, batch) = session(&own, recomputed);
    session.accumulate_gradients(&batch, 0).unwrap();
    let loss = f64::from(floats(&expected, &format!("{phase}.loss"))[0]);
    let ours = session.loss().unwrap();
    assert!((ours - loss).abs() <= 1e-5 * loss, "{ours} for {loss}");
    let mut compared = 0;
    for (name, gradient) in session.gradients().unwrap() {
        let theirs = floats(&expected, &format!("{phase}.gradient.{name}"));
        let error = distance(&gradient, &theirs);
        assert!(error <= 1e-4, "{phase}: gradient of {name}: {error:e}");
        compared += 1;
    }
    assert_eq!(compared, session.weights().views().len());
}

#[test]
fn dense_attention_with_its_indexer_is_pytorchs() {
    for recomputed in 0..=2 {
        matches_pytorch("dense", "5", recomputed);
    }
}

#[test]
fn sparse_attention_with_its_indexer_is_pytorchs() {
    for recomputed in 0..=2 {
        matches_pytorch("sparse", "0", recomputed);
    }
}

/// Every position that PyTorch selects is selected, and no other.
#[test]
fn selected_positions_are_pytorchs() {
    let expected = fixture();
    let config = config(&[("model.indexer_warmup_steps", "0")]);
    let purpose = Purpose::Evaluate { loss_chunk: None };
    let form = Build::plain(2, 40, DType::F32, purpose);
    let graph = build(&config.model, &form).unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    let mut executor = Executor::new(plan.arena_bytes, Some(2)).unwrap();
    for parameter in &graph.parameters {
        let name = &graph.tensor(parameter.master).name;
        let place = plan.placement(parameter.master).unwrap();
        let values = floats(&expected, name);
        executor
            .arena_mut()
            .write::<f32>(place)
            .copy_from_slice(&values);
    }
    for name in ["tokens", "targets"] {
        let place = plan.placement(graph.find(name).unwrap()).unwrap();
        let values = integers(&expected, name);
        executor
            .arena_mut()
            .write::<i32>(place)
            .copy_from_slice(&values);
    }
    let mut layers = Vec::new();
    executor
        .run_observed(
            &graph,
            &plan,
            0..graph.nodes.len(),
            MicroBatch::of_one(true),
            &mut |arena, index| {
                let node = &graph.nodes[index];
                if let Op::IndexerSelection(_) = node.op {
                    let place = plan.placement(node.outputs[1]).unwrap();
                    layers.push(arena.read::<i32>(place).to_vec());
                }
            },
        )
        .unwrap();
    assert_eq!(layers.len(), 2);
    for (layer, ours) in layers.iter().enumerate() {
        assert!(
            *ours == integers(&expected, &format!("selection.{layer}")),
            "layer {layer}"
        );
    }
}

/// Without its fit the indexer gets no gradient, and the rest gets what it has with it.
#[test]
fn an_indexer_that_is_not_trained_changes_nothing_else() {
    let sparse = ("model.indexer_warmup_steps", "0");
    let (mut trained, batch) = session(&[sparse], 0);
    // The warm-up is the indexer's.
    let (mut published, _) = session(&[("model.train_indexer", "false")], 0);
    trained.accumulate_gradients(&batch, 0).unwrap();
    published.accumulate_gradients(&batch, 0).unwrap();
    let ours = published.gradients().unwrap();
    assert!(ours.iter().all(|(name, _)| !name.contains("indexer")));
    let all = trained.gradients().unwrap();
    let others: Vec<_> = all
        .into_iter()
        .filter(|(name, _)| !name.contains("indexer"))
        .collect();
    assert!(ours == others);
}

#[test]
fn the_named_sizes_have_their_parameters() {
    for (size, parameters) in [("512m-low-memory", 183_662_144), ("1b", 405_227_312)] {
        let mut settings = Settings::new();
        for (key, value) in [("model.type", "gsa"), ("model.size", size)] {
            let source = Source::Flag("test".to_owned());
            settings.set(key, value, source).unwrap();
        }
        let model: Architecture = settings.resolve().unwrap().model;
        let purpose = Purpose::Evaluate { loss_chunk: None };
        let graph = build(&model, &Build::plain(1, 64, DType::Bf16, purpose)).unwrap();
        assert_eq!(graph.num_parameters(), parameters, "{size}");
        assert_eq!(model.parameters(), parameters, "{size}");
    }
}

/// A run from its first step on: two of dense attention, then sparse ones.
#[test]
fn steps_from_one_phase_to_the_other_are_pytorchs() {
    let expected = fixture();
    let own = [
        ("model.indexer_warmup_steps", "2"),
        ("model.indexer_lr_multiplier", "10"),
    ];
    let (mut session, batch) = session(&own, 1);
    for (step, &loss) in floats(&expected, "losses").iter().enumerate() {
        let ours = session.train_step(&batch, step as u64).unwrap().loss;
        let error = (ours - f64::from(loss)).abs() / f64::from(loss);
        assert!(error <= 1e-5, "step {step}: {ours} for {loss}");
    }
    for weight in session.weights().views() {
        let bytes = weight.bytes.to_vec().unwrap();
        let words = bytes.as_chunks::<4>().0;
        let ours: Vec<f32> = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
        let error = distance(&ours, &floats(&expected, &format!("final.{}", weight.name)));
        assert!(error <= 1e-4, "{} after the steps: {error:e}", weight.name);
    }
}

/// Losses and weights of a run over both phases.
fn run(own: &[(&str, &str)], recomputed: usize, threads: usize) -> (Vec<f64>, Vec<Vec<u8>>) {
    let expected = fixture();
    let warmup = ("model.indexer_warmup_steps", "2");
    let own: Vec<_> = [warmup].iter().chain(own).copied().collect();
    let plan = StepPlan::new(&config(&own), Target::Cpu, recomputed).unwrap();
    let options = EngineOptions {
        threads: Some(threads),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    session.load_by_name(&expected).unwrap();
    let sizes = &session.plan().config.batch;
    let (micro, sequences) = (sizes.batch_size, sizes.effective_batch());
    let mut batch = Batch::of(&session.plan().training, micro, sequences);
    for name in ["tokens", "targets"] {
        let values = integers(&expected, name).into_iter().cycle();
        for (to, from) in batch.get_mut(name).iter_mut().zip(values) {
            *to = from;
        }
    }
    let losses = (0..4).map(|step| session.train_step(&batch, step).unwrap().loss);
    let losses = losses.collect();
    let weights = session.weights();
    let views = weights.views().into_iter();
    let bytes = views.map(|weight| weight.bytes.to_vec().unwrap()).collect();
    (losses, bytes)
}

#[test]
fn neither_recomputation_nor_threads_change_a_bit() {
    let own = [("vram.gradient_accumulation_steps", "2")];
    let expected = run(&own, 0, 2);
    for (recomputed, threads) in [(1, 2), (2, 1)] {
        assert!(run(&own, recomputed, threads) == expected);
    }
}

/// With a number of keys that is the same for every query, sequences do not know of each other.
#[test]
fn the_cut_into_micro_batches_changes_rounding_only() {
    let fixed = ("model.use_adaptive_k", "false");
    let whole = run(&[fixed], 0, 2).0;
    let halves = [
        fixed,
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "2"),
    ];
    for (ours, expected) in run(&halves, 0, 2).0.iter().zip(whole) {
        assert!(
            (ours - expected).abs() <= 1e-5 * expected,
            "{ours} for {expected}"
        );
    }
}
