//! Updates inside the backward: the same values reach the same updates, gradients live from
//! their node to their update, and the extra work is one more backward where the norm is needed
//! first.

use cinch_graph::op::{GradientNorm, Op};
use cinch_graph::{
    Graph, Node, Optimizer, Phase, Recompute, Role, TensorId, TrainingGraph, differentiate, verify,
};
use proptest::prelude::*;

use crate::random_model::{ModelSpec, cases, models, optimizer};
use crate::small_model;
use crate::values::Values;

fn unclipped() -> Optimizer {
    Optimizer {
        max_norm: None,
        ..optimizer()
    }
}

/// The step of a model at every number of recomputed blocks, with clipping and without.
fn steps(model: &ModelSpec) -> Vec<TrainingGraph> {
    let mut steps = Vec::new();
    for optimizer in [optimizer(), unclipped()] {
        let base = differentiate(model.forward(), &optimizer).unwrap();
        for count in 0..=base.blocks.len() {
            steps.push(base.recompute(Recompute::Blocks(count)).unwrap());
        }
    }
    steps
}

fn updates(graph: &Graph) -> impl Iterator<Item = (usize, &Node)> {
    let nodes = graph.nodes.iter().enumerate();
    nodes.filter(|(_, node)| matches!(node.op, Op::AdamW(_)))
}

fn last_write(graph: &Graph, id: TensorId) -> usize {
    let nodes = &graph.nodes;
    nodes.iter().rposition(|n| n.outputs.contains(&id)).unwrap()
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn every_step_is_well_formed(model in models()) {
        for step in steps(&model) {
            let inside = step.update_in_backward();
            prop_assert_eq!(verify(&inside), Ok(()));
            let scaled = step.loss_scale.is_some();
            let clipped = step.nodes.iter().any(|n| {
                matches!(&n.op, Op::GradientNorm(op) if op.max_norm.is_some())
            });
            let passes = 1 + usize::from(scaled || clipped);
            prop_assert_eq!(inside.backward_passes, Some(passes));
        }
    }

    /// A gradient is written by the same computation of the same values, for the norm and for
    /// the update.
    #[test]
    fn updates_read_the_same_gradients(model in models()) {
        for step in steps(&model) {
            let inside = step.update_in_backward();
            let mut values = Values::default();
            let expected = values.written_by(&step, |node| matches!(node.op, Op::AdamW(_)));
            let read = values.written_by(&inside, |node| matches!(node.op, Op::AdamW(_)));
            prop_assert_eq!(&read, &expected);
            let summed = values.written_by(&inside, |n| matches!(n.op, Op::GradientSquares(_)));
            let gradients = |list: &[(String, Vec<usize>)]| -> Vec<Vec<usize>> {
                list.iter().map(|(_, made)| made.clone()).collect()
            };
            let (mut summed, mut all) = (gradients(&summed), gradients(&expected));
            summed.sort();
            all.sort();
            prop_assert_eq!(summed, all);
        }
    }

    /// Every parameter is updated once; nothing of it is read or written later. What is
    /// transient dies with its update, and what is not is updated at the end.
    #[test]
    fn updates_come_as_soon_as_they_can(model in models()) {
        for step in steps(&model) {
            let inside = step.update_in_backward();
            prop_assert_eq!(updates(&inside).count(), updates(&step).count());
            let backward = inside.nodes.iter().rposition(|n| n.phase != Phase::Update).unwrap();
            for (index, update) in updates(&inside) {
                let gradient = update.inputs[0];
                let written = last_write(&inside, gradient);
                if inside.tensor(gradient).role == Role::Gradient {
                    prop_assert!(index > backward, "`{}`", update.name);
                    continue;
                }
                // Right behind the last node that writes its gradient or reads its weight.
                let weights = [update.outputs[0]].into_iter().chain(
                    inside.parameters.iter()
                        .filter(|p| p.master == update.outputs[0])
                        .map(|p| p.compute),
                );
                let read = weights
                    .filter_map(|w| inside.nodes.iter().rposition(|n| n.inputs.contains(&w)))
                    .max();
                let ready = written.max(read.unwrap_or(0));
                let between = &inside.nodes[ready + 1..index];
                prop_assert!(between.iter().all(|n| n.phase == Phase::Update), "{}", update.name);
            }
        }
    }

    /// The blocks of the sums of squares are those of the gradients in the order in which they
    /// are added up without this pass.
    #[test]
    fn squares_are_in_the_order_of_the_norm(model in models()) {
        let step = model.training();
        let inside = step.update_in_backward();
        let norm = step.nodes.iter().find(|n| matches!(n.op, Op::GradientNorm(_))).unwrap();
        let names: Vec<String> = norm.inputs.iter()
            .map(|&id| format!("{}.squares", step.tensor(id).name))
            .collect();
        let mut next = 0;
        for (name, &gradient) in names.iter().zip(&norm.inputs) {
            let node = inside.nodes.iter().find(|n| n.name == *name).unwrap();
            let Op::GradientSquares(op) = &node.op else { panic!("{name}") };
            prop_assert_eq!(op.first, next);
            next += GradientNorm::num_blocks(&step.ty(gradient));
        }
    }

    /// Useful work is what it was; all that is repeated is counted as such.
    #[test]
    fn the_extra_work_is_at_most_one_backward(model in models()) {
        for step in steps(&model) {
            let inside = step.update_in_backward();
            prop_assert_eq!(inside.useful_flops(), step.useful_flops());
            let flops = |phase: Phase| -> u128 {
                let nodes = step.nodes.iter().filter(|n| n.phase == phase);
                nodes.map(|n| u128::from(step.flops(n))).sum()
            };
            let once = flops(Phase::Recompute) + flops(Phase::Backward);
            let more = inside.micro_flops() - step.micro_flops();
            match inside.backward_passes {
                Some(2) => prop_assert!(more <= once),
                _ => prop_assert_eq!(more, 0),
            }
        }
    }
}

/// The tied table is written with the loss, so it and what shares a node with it stay.
#[test]
fn what_the_forward_writes_is_kept() {
    let step = differentiate(small_model::forward(), &optimizer()).unwrap();
    let inside = step.recompute(Recompute::None).unwrap();
    let inside = inside.update_in_backward();
    let kept: Vec<&str> = inside
        .tensors
        .iter()
        .filter(|tensor| tensor.role == Role::Gradient)
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(kept, ["table.gradient", "positions.gradient"]);
    // They are made once: the second pass ends before the embedding.
    let embedding = |node: &&Node| node.op.name() == "embedding_backward";
    assert_eq!(inside.nodes.iter().filter(embedding).count(), 1);
    let parameters = inside.parameters.iter();
    assert_eq!(parameters.filter(|p| p.gradient.is_some()).count(), 2);
}
