//! The timeline by category: it adds up to the timeline, and each part is the one that the
//! breakdown and the placements show.

use cinch_graph::{ALIGNMENT, Graph, Recompute, Target};
use cinch_plan::{Category, Options, Plan};
use proptest::prelude::*;

use crate::random_model::{ModelSpec, cases, models};

fn check(graph: &Graph, plan: &Plan) {
    let by_category = plan.timeline_by_category(graph);
    assert_eq!(by_category.len(), graph.nodes.len());
    let breakdown = plan.breakdown(graph);
    for (index, parts) in by_category.iter().enumerate() {
        let at = |category: Category| parts[category.index()];
        assert_eq!(parts.iter().sum::<u64>(), plan.timeline()[index]);
        let weights = at(Category::Weights) + at(Category::ComputeCopies);
        assert_eq!(weights, breakdown.weights);
        assert_eq!(at(Category::Gradients), breakdown.gradients);
        assert_eq!(at(Category::Optimizer), breakdown.optimizer);
        assert_eq!(at(Category::Batch), breakdown.batch);
        let scratch = plan.workspace(index).map_or(0, |place| place.bytes);
        let scratch = scratch.next_multiple_of(ALIGNMENT);
        assert_eq!(at(Category::Workspace), scratch, "node {index}");
    }
    if let Some(peak) = by_category.get(plan.peak_node) {
        // The breakdown counts what placement could not use among the activations.
        let unused = plan.arena_bytes - plan.peak_bytes;
        let activations = peak[Category::Activations.index()];
        let other = peak[Category::Other.index()];
        let scratch = peak[Category::Workspace.index()];
        let rest = breakdown.activations + breakdown.workspace;
        assert_eq!(activations + unused + other + scratch, rest);
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn categories_add_up_to_the_timeline(model in models(), offload_states in any::<bool>()) {
        let base = model.training();
        for target in [Target::Cpu, Target::Cuda] {
            let options = Options { offload_states, ..Options::new(target) };
            for count in 0..=base.blocks.len() {
                let step = base.recompute(Recompute::Blocks(count)).unwrap();
                let plan = Plan::new(&step, options);
                check(&step, &plan);
            }
        }
    }

    #[test]
    fn a_shared_arena_keeps_what_is_not_its_own(model in models()) {
        let step = model.training();
        let evaluation = ModelSpec { dropout: 0.0, ..model.clone() }.forward();
        let plans = Plan::several(&[&step, &evaluation], Options::new(Target::Cpu)).unwrap();
        let [plan, shared] = &plans[..] else { panic!("a plan for each graph") };
        let parts = shared.timeline_by_category(&evaluation);
        for (parts, &bytes) in parts.iter().zip(shared.timeline()) {
            prop_assert_eq!(parts.iter().sum::<u64>(), bytes);
            // An evaluation has no gradients of its own, but the step's lie in the arena.
            prop_assert_eq!(parts[Category::Gradients.index()], 0);
            let kept = plan.breakdown(&step).gradients + plan.breakdown(&step).optimizer;
            prop_assert!(parts[Category::Other.index()] >= kept);
        }
    }
}

#[test]
fn the_order_of_the_arrays_is_that_of_the_names() {
    for (index, category) in Category::ALL.into_iter().enumerate() {
        assert_eq!(category.index(), index);
    }
}

#[test]
fn a_graph_without_nodes_has_no_moments() {
    let graph = Graph::new(cinch_graph::DType::F32);
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    assert!(plan.timeline_by_category(&graph).is_empty());
}
