//! The two models against PyTorch: loss, every gradient, and a few steps of AdamW. The expected
//! values are in `fixtures`, with the script that made them.

use std::path::Path;

use cinch_config::{Config, Settings, Source};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::checkpoint::{WeightFiles, load_weights};
use cinch_train::{Batch, Session};

const SHARED: &[(&str, &str)] = &[
    ("model.d_model", "16"),
    ("model.n_layers", "2"),
    ("model.max_seq_len", "23"),
    ("model.vocab_size", "61"),
    ("model.dropout", "0"),
    ("vram.batch_size", "2"),
    ("vram.gradient_accumulation_steps", "1"),
    ("training.learning_rate", "1e-3"),
    ("training.schedule", "constant"),
    ("training.warmup_steps", "0"),
    ("training.weight_decay", "0.1"),
    ("training.adam_beta2", "0.95"),
    ("training.max_grad_norm", "1.0"),
];

fn config(model: &str, own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    let set = [("model.type", model)];
    for (key, value) in set.iter().chain(SHARED).chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn fixture(model: &str) -> WeightFiles {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    load_weights(&folder.join(format!("{model}.safetensors"))).unwrap()
}

fn floats(file: &WeightFiles, name: &str) -> Vec<f32> {
    bytes(file, name, f32::from_le_bytes)
}

fn integers(file: &WeightFiles, name: &str) -> Vec<i32> {
    bytes(file, name, i32::from_le_bytes)
}

fn bytes<T>(file: &WeightFiles, name: &str, word: fn([u8; 4]) -> T) -> Vec<T> {
    let tensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    file.read(name, 0..tensor.rows(), &mut bytes).unwrap();
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| word(bytes))
        .collect()
}

/// The norm of the difference relative to the norm of what is expected.
fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&b| square(b)).sum();
    (difference / norm.max(1e-30)).sqrt()
}

fn matches_pytorch(model: &str, own: &[(&str, &str)], recomputed: usize) {
    let expected = fixture(model);
    let plan = StepPlan::new(&config(model, own), Target::Cpu, recomputed).unwrap();
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    session.load_by_name(&expected).unwrap();
    let mut batch = Batch::of(&session.plan().training, 2);
    for name in ["tokens", "targets"] {
        let values = integers(&expected, name);
        batch.get_mut(name).copy_from_slice(&values);
    }

    session.accumulate_gradients(&batch, 0).unwrap();
    let loss = f64::from(floats(&expected, "loss")[0]);
    let ours = session.loss().unwrap();
    assert!((ours - loss).abs() <= 1e-5 * loss, "{ours} for {loss}");
    let mut compared = 0;
    for (name, gradient) in session.gradients().unwrap() {
        let error = distance(&gradient, &floats(&expected, &format!("gradient.{name}")));
        assert!(error <= 1e-4, "gradient of {name}: {error:e}");
        compared += 1;
    }
    assert_eq!(compared, session.weights().views().len());

    for (step, &loss) in floats(&expected, "losses").iter().enumerate() {
        let ours = session.train_step(&batch, step as u64).unwrap().loss;
        assert!(
            (ours - f64::from(loss)).abs() <= 1e-5 * f64::from(loss),
            "step {step}: {ours} for {loss}"
        );
    }
    for weight in session.weights().views() {
        let bytes = weight.bytes.to_vec().unwrap();
        let words = bytes.as_chunks::<4>().0;
        let mut ours: Vec<f32> = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
        let mut theirs = floats(&expected, &format!("final.{}", weight.name));
        if weight.name.ends_with("qkv.bias") {
            // A bias on all keys shifts every score of a row alike: its gradient is zero, and
            // Adam turns what rounding leaves of it into steps of full size.
            let keys = ours.len() / 3..ours.len() / 3 * 2;
            ours.drain(keys.clone());
            theirs.drain(keys);
        }
        let error = distance(&ours, &theirs);
        assert!(error <= 1e-4, "{} after the steps: {error:e}", weight.name);
    }
}

#[test]
fn mamba_is_pytorchs() {
    let own = [("model.d_state", "4"), ("model.scan_chunk", "5")];
    for recomputed in 0..=2 {
        matches_pytorch("mamba", &own, recomputed);
    }
}

#[test]
fn gpt2_is_transformers() {
    for recomputed in 0..=2 {
        matches_pytorch("gpt2", &[("model.n_heads", "2")], recomputed);
    }
}
