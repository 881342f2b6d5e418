//! Four blocks of Qwen2 with adapters, and what some of its steps give.

use cinch_config::{Config, Settings, Source};

use crate::tiny;

pub const BLOCKS: usize = 4;

pub fn config(own: &[&[(&str, &str)]]) -> Config {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/decoder/qwen2");
    let shared = [
        ("model.type", model),
        ("model.weights", "initial"),
        ("lora.rank", "3"),
        ("lora.dropout", "0.1"),
        ("vram.batch_size", "2"),
        ("vram.gradient_accumulation_steps", "2"),
        ("vram.max_seq_len", "21"),
        ("vram.precision", "fp32"),
        ("training.learning_rate", "3e-3"),
        ("training.warmup_steps", "0"),
        ("data.tokenizer", "bytes"),
    ];
    let mut config = settings(&[&shared[..], &own.concat()].concat());
    config.model = config.model.with_layers(BLOCKS as u64);
    config
}

pub fn settings(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in own {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// What came out of some steps and an evaluation, in bits.
#[derive(PartialEq)]
pub struct Trace {
    /// Loss and norm.
    pub steps: Vec<[u64; 2]>,
    evaluation: u64,
    weights: Vec<(String, Vec<u8>)>,
}

pub fn trace(config: &Config, recomputed: usize) -> Trace {
    let mut session = tiny::session(config, recomputed, 2);
    let steps = (0..4).map(|step| {
        let result = session
            .train_step(&tiny::batch(config, step), step)
            .unwrap();
        [result.loss.to_bits(), result.gradient_norm.to_bits()]
    });
    let steps = steps.collect();
    let mut held_out = tiny::batch(config, 9);
    held_out.truncate(config.batch.batch_size);
    let loss = session.evaluate(&held_out).unwrap().loss();
    Trace {
        steps,
        evaluation: loss.to_bits(),
        weights: tiny::weights(&session),
    }
}
