//! Weights that are trained without fp32 masters: what that saves, and where it is refused.

use cinch_config::{Config, Settings, Source};
use cinch_graph::{DType, Storage, Target};
use cinch_step::{StepError, StepPlan};

const GIB: u64 = 1 << 30;

/// Qwen2.5-7B with adapters of rank 128 on all layers, one sequence of 1536 tokens in bf16.
const ADAPTERS: &[(&str, &str)] = &[
    ("model.type", "qwen2.5-7b"),
    ("lora.rank", "128"),
    ("vram.precision", "bf16"),
    ("vram.batch_size", "1"),
    ("vram.gradient_accumulation_steps", "1"),
    ("vram.max_seq_len", "1536"),
];
const AS_READ: (&str, &str) = ("lora.dtype", "weights");

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in own {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn plan(own: &[(&str, &str)], blocks: usize) -> StepPlan {
    let config = config(&[ADAPTERS, own].concat());
    StepPlan::new(&config, Target::Cuda, blocks).unwrap()
}

#[test]
fn adapters_without_masters_meet_their_budgets() {
    let as_pytorch = [AS_READ, ("vram.optimizer_states", "weights")];
    let bytes = plan(&as_pytorch, 0).arena_bytes();
    assert!(bytes <= 22 * GIB, "{bytes}");
    let smallest = [AS_READ, ("vram.optimizer_states", "8bit")];
    let bytes = plan(&smallest, 28).arena_bytes();
    assert!(bytes <= 17 * GIB, "{bytes}");
}

/// Weights, gradients and states by their sizes; norms and biases are frozen here.
#[test]
fn each_type_takes_its_bytes() {
    let trained = plan(&[], 0).training.num_trainable();
    for (own, bytes) in [
        // Master, copy, gradient, moments.
        (&[][..], 4 + 2 + 4 + 8),
        (&[AS_READ], 2 + 2 + 8),
        (&[AS_READ, ("vram.gradients", "fp32")], 2 + 4 + 8),
        (&[AS_READ, ("vram.optimizer_states", "weights")], 2 + 2 + 4),
        // Several micro batches are added up in fp32 unless told otherwise.
        (
            &[AS_READ, ("vram.gradient_accumulation_steps", "2")],
            2 + 4 + 8,
        ),
    ] {
        let step = plan(own, 0);
        let graph = &step.training;
        let trainable = graph.parameters.iter().filter(|p| p.is_trained());
        let belongs = trainable.flat_map(|p| {
            let copy = (p.compute != p.master).then_some(p.compute);
            let kept = [Some(p.master), copy, p.gradient].into_iter().flatten();
            kept.chain(p.states())
        });
        let total: u64 = belongs.map(|id| graph.ty(id).bytes()).sum();
        assert_eq!(total, trained * bytes, "{own:?}");
    }
}

#[test]
fn full_training_without_masters_is_a_setting() {
    let own = [
        ("model.type", "gpt2"),
        ("vram.precision", "bf16"),
        ("training.master_weights", "false"),
    ];
    let with = StepPlan::new(&config(&own[..2]), Target::Cuda, 0).unwrap();
    let without = StepPlan::new(&config(&own), Target::Cuda, 0).unwrap();
    assert!(without.arena_bytes() < with.arena_bytes());
    let matrices = without.training.parameters.iter().filter(|p| p.decay);
    assert!(matrices.clone().count() > 0);
    for parameter in matrices {
        assert_eq!(parameter.storage, Storage::TrainedAsRead);
        assert_eq!(without.training.ty(parameter.master).dtype, DType::Bf16);
    }
}

/// The CPU computes in fp32: there the type of the weights is that of masters.
#[test]
fn in_single_precision_the_setting_changes_nothing() {
    let plain = [("model.type", "gpt2")];
    let without = [plain[0], ("training.master_weights", "false")];
    let [with, without] =
        [&plain[..], &without].map(|own| StepPlan::new(&config(own), Target::Cpu, 0).unwrap());
    assert_eq!(with.training.parameters, without.training.parameters);
    assert_eq!(with.training.nodes, without.training.nodes);
    assert_eq!(with.arena_bytes(), without.arena_bytes());
}

#[test]
fn states_in_fp16_are_refused() {
    let own = [
        ("model.type", "gpt2"),
        ("vram.precision", "fp16"),
        ("training.master_weights", "false"),
        ("vram.optimizer_states", "weights"),
    ];
    let refused = StepPlan::new(&config(&own), Target::Cuda, 0);
    assert!(matches!(refused, Err(StepError::StatesInHalf)));
    // Eight bits have a scale.
    let own = [own[0], own[1], own[2], ("vram.optimizer_states", "8bit")];
    StepPlan::new(&config(&own), Target::Cuda, 0).unwrap();
}
