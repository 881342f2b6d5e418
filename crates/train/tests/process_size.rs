//! The process is larger than the arena by no more than a little. Its peak is that of one step and
//! nothing else, so this test is a program of its own, without others beside it.

mod tiny;

use std::io::Write as _;

use cinch_config::{Settings, Source};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::{Session, peak_resident_bytes};

/// What a process may have in memory besides the arena: the program, the batch, stacks.
const BESIDE_ARENA: u64 = 200 << 20;

fn main() {
    if peak_resident_bytes().is_none() {
        let reason = "skipped: the peak of the resident size is read from Linux's /proc";
        let mut said = std::io::stderr();
        writeln!(said, "{reason}").unwrap();
        return;
    }
    let mut settings = Settings::new();
    for (key, value) in [
        ("model.type", "mamba"),
        ("model.size", "small"),
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "64"),
    ] {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    let config = settings.resolve().unwrap();
    let plan = StepPlan::new(&config, Target::Cpu, 0).unwrap();
    let (arena, persistent) = (plan.arena_bytes(), plan.plan.persistent_bytes);
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    session.initialize(config.training.seed).unwrap();
    session.train_step(&tiny::batch(&config, 0), 0).unwrap();
    let peak = peak_resident_bytes().unwrap();
    assert!(
        peak >= persistent,
        "{peak} bytes, less than the {persistent} of weights and states: not a measurement"
    );
    assert!(
        peak <= arena + BESIDE_ARENA,
        "{peak} bytes with an arena of {arena}"
    );
}
