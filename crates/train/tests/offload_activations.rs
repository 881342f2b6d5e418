//! Activations in host memory instead of recomputation: the same bits as with it and without, in
//! the memory that was planned.

mod account;
mod adapted;
mod tiny;

use account::Account;
use adapted::{BLOCKS, trace};
use cinch_config::{Config, Precision};
use cinch_engine::EngineOptions;
use cinch_graph::{Role, Target, verify};
use cinch_step::StepPlan;
use cinch_train::{Session, StepResult};

const KINDS: [&[(&str, &str)]; 5] = [
    &[],
    &[("lora.quantization", "4bit")],
    &[("vram.offload_frozen", "true")],
    &[("vram.use_cpu_offload", "true")],
    &[
        ("vram.update_in_backward", "true"),
        ("vram.gradient_accumulation_steps", "1"),
    ],
];

/// With activations of some blocks in host memory.
fn config(own: &[(&str, &str)], away: usize) -> Config {
    let mut config = adapted::config(&[own]);
    config.batch.offload_activations = away;
    config
}

#[test]
fn stored_activations_change_no_bit() {
    for kind in KINDS {
        let expected = trace(&config(kind, 0), 0);
        assert_ne!(expected.steps[0], expected.steps[3], "nothing was learned");
        assert!(trace(&config(kind, 0), BLOCKS) == expected, "{kind:?}");
        for (away, recomputed) in [(1, 4), (2, 4), (4, 4), (2, 3)] {
            let found = trace(&config(kind, away), recomputed);
            assert!(found == expected, "{kind:?}, {away} of {recomputed}");
        }
    }
}

/// Models without adapters, with other ops in their blocks.
#[test]
fn other_models_keep_their_bits_too() {
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        let expected = trace(&config, 0);
        for away in 1..=3 {
            config.batch.offload_activations = away;
            assert!(trace(&config, 3) == expected, "{model:?}, {away} blocks");
        }
    }
}

/// Rows of several lengths share places in host memory where they store the same. What takes longest to
/// make again for its bytes may be another tensor in short rows than in long ones, of which attention
/// is a larger part.
#[test]
fn rows_of_several_lengths_share_host_memory() {
    let mut several = config(&[], 2);
    several.batch.buckets = vec![7, 14];
    let plan = StepPlan::new(&several, Target::Cpu, BLOCKS).unwrap();
    assert_eq!(plan.variants().len(), 3);
    let alone = plan.variants().iter().map(|variant| {
        let mut alone = config(&[], 2);
        alone.batch.seq_len = variant.seq_len;
        let plan = StepPlan::new(&alone, Target::Cpu, BLOCKS).unwrap();
        plan.plan.host_bytes
    });
    let alone: Vec<u64> = alone.collect();
    let shared = plan.plan.host_bytes;
    assert!(alone.iter().all(|&bytes| bytes > 0 && bytes <= shared));
    assert!(shared < alone.iter().sum(), "{shared} of {alone:?}");
    assert_eq!(plan.host_memory().offloaded_activations, shared);
}

fn stored_bytes(plan: &StepPlan) -> u64 {
    let tensors = plan.training.tensors.iter();
    let stored = tensors.filter(|tensor| tensor.role == Role::HostActivation);
    let aligned = stored.map(|tensor| cinch_graph::aligned(tensor.ty.bytes()));
    aligned.sum()
}

#[test]
fn what_is_planned_is_allocated() {
    let session = tiny::session(&config(&[], 2), BLOCKS, 1);
    let plan = session.plan();
    verify(&plan.training).unwrap();
    let stored = stored_bytes(plan);
    assert!(stored > 0);
    assert_eq!(plan.plan.host_bytes, stored);
    assert_eq!(plan.host_memory().offloaded_activations, stored);
    assert_eq!(plan.host_memory().offloaded_states, 0);
    let executor = session.engine().cpu().unwrap();
    assert_eq!(executor.arena().len() as u64, plan.arena_bytes());
    assert_eq!(executor.host().len() as u64, stored);
}

/// A second set of books: nothing is overwritten while it is in use, and nothing dead is read.
#[test]
fn no_live_tensors_overlap() {
    for kind in KINDS {
        let config = config(kind, 2);
        let mut session: Session = tiny::session(&config, BLOCKS, 1);
        let mut account = Account::new(&session);
        let batch = tiny::batch(&config, 0);
        let mut after = |arena: &mut _, node| account.after(arena, node);
        session.train_step_observed(&batch, 0, &mut after).unwrap();
        account.close();
    }
}

/// On a GPU the copies run beside the computing, and change no bit either.
#[test]
#[ignore = "needs a GPU"]
fn stored_activations_change_no_bit_on_a_gpu() {
    let options = EngineOptions {
        deterministic: true,
        ..EngineOptions::default()
    };
    for kind in KINDS {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let [here, away] = [0, 3].map(|away| {
                let mut config = config(kind, away);
                config.batch.precision = precision;
                let mut session = tiny::session_on(Target::Cuda, &config, BLOCKS, options);
                let results = (0..6).map(|step| {
                    let batch = tiny::batch(&config, step);
                    session.train_step(&batch, step).unwrap()
                });
                let results: Vec<StepResult> = results.collect();
                (results, tiny::weights(&session))
            });
            assert_eq!(here.0, away.0, "{kind:?} in {precision:?}");
            assert!(here.1 == away.1, "{kind:?} in {precision:?}");
        }
    }
}
