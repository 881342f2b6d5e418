//! Models small enough to train in milliseconds, with everything on that could go wrong:
//! dropout, label smoothing, clipping, accumulation, sizes that are no multiple of a vector.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use cinch_config::{Config, Settings, Source};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_graph::op::IGNORE_INDEX;
use cinch_step::StepPlan;
use cinch_train::{Batch, Session};

const SHARED: &[(&str, &str)] = &[
    ("model.n_layers", "3"),
    ("model.max_seq_len", "40"),
    ("model.vocab_size", "61"),
    ("model.dropout", "0.1"),
    ("vram.batch_size", "2"),
    ("vram.gradient_accumulation_steps", "2"),
    ("vram.max_seq_len", "37"),
    ("training.learning_rate", "3e-3"),
    ("training.schedule", "constant"),
    ("training.warmup_steps", "2"),
    ("training.label_smoothing", "0.1"),
    ("training.max_grad_norm", "0.5"),
];

/// The kinds of model that every promise is checked on.
pub const MODELS: [&[(&str, &str)]; 3] = [MAMBA, MAMBA_WITH_CONVOLUTION, GPT2];

pub const MAMBA: &[(&str, &str)] = &[
    ("model.type", "mamba"),
    ("model.d_model", "20"),
    ("model.d_state", "6"),
    ("model.d_conv", "0"),
    ("model.scan_chunk", "16"),
];

pub const MAMBA_WITH_CONVOLUTION: &[(&str, &str)] = &[
    ("model.type", "mamba"),
    ("model.d_model", "20"),
    ("model.d_state", "6"),
    ("model.d_conv", "4"),
    ("model.scan_chunk", "16"),
];

pub const GPT2: &[(&str, &str)] = &[
    ("model.type", "gpt2"),
    ("model.d_model", "36"),
    ("model.n_heads", "3"),
];

/// The ways to run the optimizer: as it is by default, and each that saves memory.
pub const VARIANTS: [&[(&str, &str)]; 5] = [
    &[],
    &[("vram.optimizer_states", "8bit"), LARGER],
    &[("vram.use_cpu_offload", "true")],
    &[
        ("vram.update_in_backward", "true"),
        ("vram.gradient_accumulation_steps", "1"),
    ],
    &[
        ("vram.update_in_backward", "true"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.optimizer_states", "8bit"),
        ("vram.use_cpu_offload", "true"),
        ("training.max_grad_norm", "0"),
        LARGER,
    ],
];

/// A vocabulary whose embedding is large enough for states of eight bits.
const LARGER: (&str, &str) = ("model.vocab_size", "311");

/// A tiny model; `own` settings come last and win.
pub fn config(model: &[(&str, &str)], own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in SHARED.iter().chain(model).chain(own) {
        let source = Source::Flag("test".to_owned());
        settings
            .set(key, value, source)
            .unwrap_or_else(|error| panic!("{key} = {value}: {error}"));
    }
    settings.resolve().unwrap()
}

/// The effective batch of a step: random tokens, about one target in seven ignored.
pub fn batch(config: &Config, step: u64) -> Batch {
    let vocabulary = config.model.vocab_size() as u64;
    let mut batch = Batch::new(config.batch.effective_batch(), config.batch.seq_len);
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 20
    };
    let [tokens, targets] = batch.get_disjoint_mut(["tokens", "targets"]);
    for (token, target) in tokens.iter_mut().zip(targets) {
        *token = (next() % vocabulary) as i32;
        *target = match next() % 7 {
            0 => IGNORE_INDEX,
            _ => (next() % vocabulary) as i32,
        };
    }
    batch
}

/// A session on the CPU with its first weights.
pub fn session(config: &Config, recomputed_blocks: usize, threads: usize) -> Session {
    let options = EngineOptions {
        threads: Some(threads),
        ..EngineOptions::default()
    };
    session_on(Target::Cpu, config, recomputed_blocks, options)
}

/// A session with its first weights.
pub fn session_on(
    target: Target,
    config: &Config,
    recomputed_blocks: usize,
    options: EngineOptions,
) -> Session {
    let plan = StepPlan::new(config, target, recomputed_blocks).unwrap();
    let mut session = Session::new(plan, options).unwrap();
    session.initialize(config.training.seed).unwrap();
    session
}

/// All weights as they are in memory, to be compared bit by bit.
pub fn weights(session: &Session) -> Vec<(String, Vec<u8>)> {
    let weights = session.weights();
    let views = weights.views().into_iter();
    views
        .map(|weight| (weight.name.to_owned(), weight.bytes.to_vec().unwrap()))
        .collect()
}
