//! Plans of every model size: close to the lower bound, quick, well formed and without overlap.

use cinch_architecture::{Architecture, Describe, Family, Gpt2, Mamba};
use cinch_config::{Settings, Source};
use cinch_graph::op::{GradientFormat, MomentFormat};
use cinch_graph::{
    DType, Graph, Optimizer, Recompute, Target, TrainingGraph, differentiate, verify,
};
use cinch_model::{Build, Purpose, build};
use cinch_plan::{Options, Plan};

fn model_config(kind: &Family, size: &str) -> Architecture {
    let mut settings = Settings::new();
    let flag = || Source::Flag("test".to_owned());
    settings.set("model.type", kind.name, flag()).unwrap();
    settings.set("model.size", size, flag()).unwrap();
    settings.resolve().unwrap().model
}

fn forward(kind: &Family, size: &str, batch: usize, seq_len: usize, compute: DType) -> Graph {
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    let options = Build::plain(batch, seq_len, compute, purpose);
    build(&model_config(kind, size), &options).unwrap()
}

fn training(graph: Graph) -> TrainingGraph {
    let optimizer = Optimizer {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_norm: Some(1.0),
        moments: MomentFormat::Full,
        gradients: GradientFormat::Full,
    };
    differentiate(graph, &optimizer).unwrap()
}

fn choices(graph: &TrainingGraph) -> [Recompute; 3] {
    [
        Recompute::None,
        Recompute::Blocks(graph.blocks.len() / 2),
        Recompute::Full,
    ]
}

#[test]
fn parameters_are_those_of_the_published_models() {
    let expected = [
        ("small", 40_306_176),
        ("medium-lite", 60_097_920),
        ("medium-plus", 72_690_112),
        ("medium-x", 81_462_688),
        ("medium", 87_118_080),
        ("medium-extra", 107_699_904),
        ("large-lite", 142_441_600),
        ("large-plus", 178_069_440),
        ("large", 219_646_976),
        ("xlarge", 411_918_080),
        ("xxlarge", 700_027_392),
    ];
    for (size, parameters) in expected {
        let graph = forward(Mamba::FAMILY, size, 1, 8, DType::F32);
        assert_eq!(graph.num_parameters(), parameters, "{size}");
    }
    let graph = forward(Gpt2::FAMILY, "gpt2", 1, 8, DType::F32);
    assert_eq!(graph.num_parameters(), 124_439_808);
}

#[test]
fn arenas_stay_within_three_percent_of_the_lower_bound() {
    for kind in [Mamba::FAMILY, Gpt2::FAMILY] {
        for size in kind.sizes {
            for (batch, seq_len) in [
                (1, 256),
                (4, 256),
                (16, 256),
                (1, 1024),
                (4, 1024),
                (16, 1024),
            ] {
                if seq_len as u64
                    > model_config(kind, size.name)
                        .positions()
                        .unwrap_or(u64::MAX)
                {
                    continue;
                }
                let base = training(forward(kind, size.name, batch, seq_len, DType::F32));
                for choice in choices(&base) {
                    let graph = base.recompute(choice).unwrap();
                    let plan = Plan::new(&graph, Options::new(Target::Cpu));
                    let ratio = plan.arena_bytes as f64 / plan.lower_bound_bytes as f64;
                    assert!(
                        ratio <= 1.03,
                        "{} {} B={batch} T={seq_len} {choice:?}: {ratio}",
                        kind.name,
                        size.name
                    );
                }
            }
        }
    }
}

#[test]
fn training_graphs_pass_the_verifier_at_every_recompute_level() {
    for kind in [Mamba::FAMILY, Gpt2::FAMILY] {
        for compute in [DType::F32, DType::Bf16, DType::F16] {
            let base = training(forward(kind, "tiny", 2, 64, compute));
            verify(&base).unwrap();
            for blocks in 0..=base.blocks.len() {
                let graph = base.recompute(Recompute::Blocks(blocks)).unwrap();
                verify(&graph).unwrap();
            }
        }
    }
}

#[test]
fn recomputing_more_blocks_never_needs_more_memory() {
    for kind in [Mamba::FAMILY, Gpt2::FAMILY] {
        let base = training(forward(kind, "small", 4, 512, DType::F32));
        let peaks: Vec<u64> = (0..=base.blocks.len())
            .map(|blocks| {
                let graph = base.recompute(Recompute::Blocks(blocks)).unwrap();
                Plan::new(&graph, Options::new(Target::Cpu)).peak_bytes
            })
            .collect();
        assert!(
            peaks.is_sorted_by(|a, b| a >= b),
            "{}: {peaks:?}",
            kind.name
        );
        assert!(peaks[peaks.len() - 1] < peaks[0]);
    }
}

#[test]
fn recomputing_repeats_only_what_the_backward_needs() {
    // Mamba: all of a block's forward but the last projection.
    let base = training(forward(Mamba::FAMILY, "small", 1, 256, DType::F32));
    let none = base.recompute(Recompute::None).unwrap();
    let full = base.recompute(Recompute::Full).unwrap();
    assert_eq!(none.useful_flops(), full.useful_flops());
    let repeated = |graph: &TrainingGraph, op: &str| {
        let again = graph.nodes.iter().filter(|n| n.name.starts_with("again."));
        again.filter(|n| n.op.name() == op).count()
    };
    assert_eq!(repeated(&none, "linear"), 0);
    assert_eq!(repeated(&full, "linear"), 3 * 8);
    assert_eq!(repeated(&full, "scan"), 8);
    assert_eq!(repeated(&full, "cross_entropy"), 0);
}

#[test]
fn the_largest_size_is_planned_tightly() {
    let base = training(forward(Mamba::FAMILY, "xxlarge", 8, 2048, DType::F32));
    let graph = base.recompute(Recompute::Full).unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    assert!(plan.lower_bound_bytes <= plan.arena_bytes);
    let above = plan.arena_bytes - plan.lower_bound_bytes;
    assert!(
        above < plan.arena_bytes / 100,
        "{above} of {}",
        plan.arena_bytes
    );
}

#[test]
fn the_breakdown_adds_up_to_the_arena_and_the_overhead() {
    for kind in [Mamba::FAMILY, Gpt2::FAMILY] {
        for target in [Target::Cpu, Target::Cuda] {
            let base = training(forward(kind, "tiny", 4, 128, DType::Bf16));
            let graph = base.recompute(Recompute::None).unwrap();
            let plan = Plan::new(&graph, Options::new(target));
            let breakdown = plan.breakdown(&graph);
            assert_eq!(
                breakdown.total(),
                plan.arena_bytes + cinch_plan::overhead_bytes(target)
            );
            assert!(plan.peak_bytes <= plan.arena_bytes);
            assert!(plan.lower_bound_bytes <= plan.peak_bytes);
        }
    }
}
