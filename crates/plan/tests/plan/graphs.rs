//! Plans of random models at every recompute level, and of graphs made for one rule each.

use cinch_graph::op::ActivationKind;
use cinch_graph::{DType, Graph, Recompute, Role, Target, TensorId, TrainingGraph};
use cinch_plan::{Options, Owner, Plan, Residence};
use proptest::prelude::*;

use crate::check::check;
use crate::random_model::{cases, models};

const TARGETS: [Target; 2] = [Target::Cpu, Target::Cuda];

/// Every number of recomputed blocks, with the updates after and inside the backward.
fn levels(base: &TrainingGraph) -> Vec<TrainingGraph> {
    let counts = 0..=base.blocks.len();
    counts
        .map(|count| base.recompute(Recompute::Blocks(count)).unwrap())
        .flat_map(|step| [step.update_in_backward(), step])
        .collect()
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn nothing_that_lives_together_overlaps(model in models()) {
        for target in TARGETS {
            let forward = model.forward();
            check(&forward, &Plan::new(&forward, Options::new(target)));
            for step in levels(&model.training()) {
                check(&step, &Plan::new(&step, Options::new(target)));
            }
        }
    }

    /// What is copied to the host keeps its place until that has been waited for, and what comes
    /// back has one from the moment it is asked for.
    #[test]
    fn activations_in_host_memory_overlap_nothing(model in models()) {
        let base = model.training();
        let blocks = base.blocks.len();
        for offloaded in 1..=blocks {
            let step = base.recompute_and_offload(Recompute::Full, offloaded).unwrap();
            for step in [step.update_in_backward(), step] {
                let plan = Plan::new(&step, Options::new(Target::Cuda));
                check(&step, &plan);
                let stored = step.tensors.iter().filter(|t| t.role == Role::HostActivation);
                let bytes: u64 = stored.map(|t| t.ty.bytes().next_multiple_of(256)).sum();
                prop_assert_eq!(plan.host_bytes, bytes);
                let overhead = cinch_plan::overhead_bytes(Target::Cuda);
                prop_assert_eq!(plan.breakdown(&step).total(), plan.arena_bytes + overhead);
                prop_assert_eq!(plan.breakdown(&step).staged, 0);
            }
        }
    }

    #[test]
    fn a_graph_has_one_plan(model in models()) {
        for step in levels(&model.training()) {
            let options = Options::new(Target::Cpu);
            prop_assert_eq!(Plan::new(&step, options), Plan::new(&step.clone(), options));
        }
    }

    #[test]
    fn states_that_are_offloaded_lie_in_host_memory(model in models()) {
        let step = model.training().recompute(Recompute::None).unwrap();
        let here = Plan::new(&step, Options::new(Target::Cuda));
        let options = Options { offload_states: true, ..Options::new(Target::Cuda) };
        let away = Plan::new(&step, options);
        check(&step, &away);
        let states = step.tensors.iter().filter(|t| t.role == Role::State);
        let bytes: u64 = states.map(|t| t.ty.bytes().next_multiple_of(256)).sum();
        prop_assert_eq!(away.host_bytes, bytes);
        prop_assert_eq!(here.host_bytes, 0);
        for (index, tensor) in step.tensors.iter().enumerate() {
            if tensor.role == Role::State {
                let place = away.placement(TensorId(index as u32)).unwrap();
                prop_assert_eq!(place.residence, Residence::Host);
                prop_assert!(place.end() <= bytes);
            }
        }
        prop_assert_eq!(away.breakdown(&step).optimizer, 0);
        // What they leave is what they took, and nothing is needed to reach them.
        prop_assert_eq!(away.persistent_bytes, here.persistent_bytes - bytes);
        prop_assert_eq!(away.arena_bytes, here.arena_bytes - bytes);
    }

    #[test]
    fn the_breakdown_is_the_arena(model in models()) {
        for target in TARGETS {
            for step in levels(&model.training()) {
                let plan = Plan::new(&step, Options::new(target));
                let breakdown = plan.breakdown(&step);
                let overhead = cinch_plan::overhead_bytes(target);
                prop_assert_eq!(breakdown.total(), plan.arena_bytes + overhead);
                let moments = plan.moments(&step);
                let highest = moments.iter().map(|m| m.bytes).max();
                prop_assert_eq!(highest, Some(plan.peak_bytes));
                // What is alive at the peak, and what is always there, is the peak.
                let alive = plan.alive_at_peak(&step);
                let alive: u64 = alive.iter().map(|t| t.bytes.next_multiple_of(256)).sum();
                prop_assert_eq!(alive + plan.persistent_bytes, plan.peak_bytes);
            }
        }
    }
}

/// x → relu → relu → …, of which `result` is asked for.
fn chain(length: usize, result: usize) -> (Graph, Vec<TensorId>) {
    let mut graph = Graph::new(DType::F32);
    let mut last = graph.batch("x", [100], DType::F32);
    let mut ids = Vec::new();
    for index in 0..length {
        let name = format!("relu{index}");
        last = graph.activation(&name, last, ActivationKind::Relu).unwrap();
        ids.push(last);
    }
    graph.result = Some(ids[result]);
    (graph, ids)
}

#[test]
fn a_chain_of_pointwise_ops_runs_in_one_buffer() {
    let (graph, ids) = chain(5, 4);
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    check(&graph, &plan);
    assert_eq!(plan.buffers().len(), 1);
    let owners: Vec<Owner> = ids.iter().map(|&id| Owner::Tensor(id)).collect();
    assert_eq!(plan.buffers()[0].owners, owners);
    // The input is the batch's, and stays: 400 bytes, aligned, and as much again.
    assert_eq!(plan.arena_bytes, 2 * 512);
    assert_eq!(plan.lower_bound_bytes, 2 * 400);
}

/// The result is read after the graph has run, so even the last node may not write over it.
#[test]
fn a_result_in_the_middle_survives() {
    for result in 0..4 {
        let (graph, ids) = chain(4, result);
        let plan = Plan::new(&graph, Options::new(Target::Cpu));
        check(&graph, &plan);
        let place = plan.placement(ids[result]).unwrap();
        for &later in &ids[result + 1..] {
            let other = plan.placement(later).unwrap();
            let apart = place.end() <= other.offset || other.end() <= place.offset;
            assert!(apart, "result {result} and {later:?}");
        }
    }
}

#[test]
fn an_empty_graph_has_an_empty_plan() {
    let graph = Graph::new(DType::F32);
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    check(&graph, &plan);
    assert_eq!(plan.arena_bytes, 0);
    assert!(plan.alive_at_peak(&graph).is_empty());
    let overhead = cinch_plan::overhead_bytes(Target::Cpu);
    assert_eq!(plan.breakdown(&graph).total(), overhead);
}
