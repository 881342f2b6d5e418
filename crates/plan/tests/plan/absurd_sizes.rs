//! Settings beyond all machines must not fit: no sum may wrap around to something small.

use cinch_graph::op::{ActivationKind, NormKind};
use cinch_graph::{DType, Graph, Init, Recompute, Target, TrainingGraph, differentiate};
use cinch_plan::{Buffer, Options, Plan, place};

use crate::random_model::optimizer;

fn step(batch: usize, length: usize, width: usize, vocabulary: usize) -> TrainingGraph {
    let mut g = Graph::new(DType::F32);
    let tokens = g.batch("tokens", [batch, length], DType::I32);
    let table = g.weight("table", [vocabulary, width], Init::Zeros);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    g.enter_block("block");
    let weight = g.weight("up", [width, width], Init::Zeros);
    let up = g.linear("up", x, weight, None).unwrap();
    let active = g.activation("gelu", up, ActivationKind::Gelu).unwrap();
    let gamma = g.small_weight("gamma", [width], Init::Ones);
    let norm = (NormKind::Rms, 1e-5);
    let out = g
        .residual_norm("norm", (x, active), None, norm, gamma, None)
        .unwrap();
    g.leave_block();
    let targets = g.batch("targets", [batch, length], DType::I32);
    g.cross_entropy("loss", out.normed, table, targets, 0.0, None)
        .unwrap();
    differentiate(g, &optimizer()).unwrap()
}

fn plans(step: &TrainingGraph) -> Vec<(Graph, Plan)> {
    let mut plans = Vec::new();
    for choice in [Recompute::None, Recompute::Full] {
        for target in [Target::Cpu, Target::Cuda] {
            for offload_states in [false, true] {
                let step = step.recompute(choice).unwrap();
                let options = Options {
                    offload_states,
                    ..Options::new(target)
                };
                let plan = Plan::new(&step, options);
                plans.push(((*step).clone(), plan));
            }
        }
    }
    plans
}

/// More than any machine has, and more than a sum that wrapped around would likely show.
const NO_MACHINE: u64 = 1 << 55;

#[test]
fn a_million_sequences_of_a_million_tokens_are_added_up_exactly() {
    let step = step(1_000_000, 1_000_000, 1024, 50_257);
    let hidden: u64 = 1_000_000_000_000 * 1024 * 4;
    for (_, plan) in plans(&step) {
        assert!(plan.lower_bound_bytes >= 2 * hidden);
        assert!(plan.peak_bytes < 10 * hidden);
        assert!(plan.arena_bytes < 10 * hidden);
    }
}

#[test]
fn what_cannot_be_counted_does_not_fit() {
    let sizes = [
        (1 << 40, 1 << 40, 64, 100),
        (1, 1 << 62, 64, 100),
        (1, 8, 1 << 31, 1 << 40),
        (1, 8, 1 << 40, 7),
        (usize::MAX, usize::MAX, 64, usize::MAX),
    ];
    for (batch, length, width, vocabulary) in sizes {
        let step = step(batch, length, width, vocabulary);
        for (graph, plan) in plans(&step) {
            let what = format!("{batch}×{length}, {width} wide: {:?}", plan.options);
            assert!(plan.arena_bytes >= NO_MACHINE, "{what}");
            assert!(plan.peak_bytes >= NO_MACHINE, "{what}");
            assert!(plan.lower_bound_bytes >= NO_MACHINE, "{what}");
            assert!(plan.arena_bytes >= plan.persistent_bytes, "{what}");
            assert!(plan.check_sizes(&graph).is_err(), "{what}");
            let breakdown = plan.breakdown(&graph);
            assert!(breakdown.total() >= NO_MACHINE, "{what}");
            plan.alive_at_peak(&graph);
            plan.moments(&graph);
            Plan::several(&[&graph, &graph], plan.options).unwrap();
        }
    }
}

/// Two halves of what can be counted: wrapping arithmetic would make nothing of them.
#[test]
fn two_halves_are_not_nothing() {
    let mut graph = Graph::new(DType::F32);
    let x = graph.batch("x", [1 << 61], DType::F32);
    let y = graph.activation("y", x, ActivationKind::Relu).unwrap();
    graph.result = Some(y);
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    let refused = plan.check_sizes(&graph).unwrap_err().to_string();
    assert!(refused.starts_with("what is alive at `y` takes more than 2^64 bytes"));
    assert_eq!(plan.persistent_bytes, 1 << 63);
    assert_eq!(plan.timeline(), [u64::MAX]);
    assert_eq!(plan.peak_bytes, u64::MAX);
    assert_eq!(plan.lower_bound_bytes, u64::MAX);
    assert_eq!(plan.arena_bytes, u64::MAX);
}

/// Up to the last multiple of the alignment below 2^64, overhead included.
#[test]
fn a_plan_is_counted_up_to_the_border() {
    let planned = |elements: usize| {
        let mut graph = Graph::new(DType::F32);
        graph.batch("x", [elements], DType::U8);
        let options = Options {
            overhead_bytes: 0,
            ..Options::new(Target::Cpu)
        };
        let plan = Plan::new(&graph, options);
        let counted = plan.check_sizes(&graph).is_ok();
        (plan.arena_bytes, counted)
    };
    let last = usize::MAX - 511;
    assert_eq!(planned(last), (last as u64, true));
    assert!(!planned(last + 1).1);
    assert!(!planned(usize::MAX - 1).1);
}

#[test]
fn buffers_too_large_to_add_are_placed_without_wrapping() {
    let buffers: Vec<Buffer> = (0..5)
        .map(|index| Buffer {
            bytes: u64::MAX - index,
            start: index as usize,
            end: 6,
            owners: Vec::new(),
        })
        .collect();
    let offsets = place(&buffers);
    let furthest = offsets.iter().max().copied();
    assert!(furthest.is_some_and(|offset| offset >= NO_MACHINE));
}
