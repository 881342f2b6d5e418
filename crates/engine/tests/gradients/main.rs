//! Gradients from graph, differentiation, recomputation, plan and executor together, against
//! differences of the loss in double precision; and single precision against double.

mod graphs;
mod numbers;
mod planned;
mod shared;

use std::collections::BTreeSet;

use cinch_graph::{DType, Graph, Recompute, Storage};
use numbers::random;
use planned::Planned;

/// How far a number is moved for a difference.
const STEP: f64 = 3e-5;
/// Of the parameter's largest gradient.
const TOLERANCE: f64 = 1e-6;
/// Numbers of each parameter that are moved, besides the one with the largest gradient.
const SAMPLES: usize = 7;

/// Compares every trained parameter's gradient with differences of the loss.
fn assert_gradients(what: &str, graph: Graph) {
    let blocks = graph.blocks.len();
    let mut planned = Planned::new(graph, Recompute::Blocks(blocks.div_ceil(2)));
    let gradients = planned.gradients();
    for (parameter, gradient) in planned.trained().iter().zip(gradients) {
        let name = planned.name(parameter);
        let size = |i: usize| gradient[i].abs();
        let largest = (0..gradient.len()).max_by(|&a, &b| size(a).total_cmp(&size(b)));
        let largest = largest.unwrap();
        let scale = size(largest);
        assert!(scale > 1e-6, "{what}, {name}: the gradient is all but zero");
        let places = random(SAMPLES, gradient.len() as u64 + 7);
        let places = places
            .iter()
            .map(|r| ((r + 1.0) / 2.0 * gradient.len() as f64) as usize);
        for index in places.chain([largest]) {
            let expected = difference(&mut planned, parameter.master, index);
            let error = (gradient[index] - expected).abs() / scale;
            assert!(
                error <= TOLERANCE,
                "{what}, {name}[{index}]: {} for {expected}, off by {error:e}",
                gradient[index]
            );
        }
    }
}

/// The loss's derivative by one number: `(8(f₁ − f₋₁) − (f₂ − f₋₂)) / 12h`, whose error is of
/// the order h⁴.
fn difference(planned: &mut Planned, id: cinch_graph::TensorId, index: usize) -> f64 {
    let value = planned.read(id)[index];
    let mut loss_at = |steps: f64| {
        planned.set(id, index, value + steps * STEP);
        planned.loss()
    };
    let near = loss_at(1.0) - loss_at(-1.0);
    let far = loss_at(2.0) - loss_at(-2.0);
    planned.set(id, index, value);
    (8.0 * near - far) / (12.0 * STEP)
}

#[test]
fn gradients_are_those_of_differences() {
    for (what, build) in graphs::ALL {
        assert_gradients(what, build(DType::F64));
    }
}

#[test]
fn recomputation_changes_no_bit_of_a_gradient() {
    for (what, build) in graphs::ALL {
        let expected = Planned::new(build(DType::F64), Recompute::None).gradients();
        for blocks in 1..=build(DType::F64).blocks.len() {
            let choice = Recompute::Blocks(blocks);
            let gradients = Planned::new(build(DType::F64), choice).gradients();
            assert!(gradients == expected, "{what} with {blocks} blocks");
        }
    }
}

/// Freezes the parameters that `frozen` picks by number and name.
fn freeze(graph: &mut Graph, frozen: impl Fn(usize, &str) -> bool) {
    for index in 0..graph.parameters.len() {
        let name = &graph.tensor(graph.parameters[index].master).name;
        if graph.parameters[index].is_trained() && frozen(index, name) {
            graph.parameters[index].storage = Storage::Frozen;
        }
    }
}

#[test]
fn frozen_parameters_leave_the_others_their_gradients() {
    type Pattern = fn(usize, &str) -> bool;
    let patterns: [(&str, Pattern); 7] = [
        ("the even ones", |index, _| index % 2 == 0),
        ("the odd ones", |index, _| index % 2 == 1),
        ("two of three", |index, _| index % 3 != 1),
        ("the tables", |_, name| {
            name.contains("embedding") || name == "table" || name == "head"
        }),
        ("biases", |_, name| {
            name.ends_with("bias") || name.ends_with("beta")
        }),
        ("weights", |_, name| {
            name.ends_with("weight") || name.ends_with("gamma")
        }),
        ("all but the first", |index, _| index > 0),
    ];
    for (what, build) in graphs::ALL {
        let mut all = Planned::new(build(DType::F64), Recompute::None);
        let gradients = all.gradients();
        let expected: Vec<_> = all.trained().iter().map(|p| all.name(p)).collect();
        for (which, pattern) in patterns {
            let mut graph = build(DType::F64);
            freeze(&mut graph, pattern);
            if graph.num_trainable() == 0 {
                continue;
            }
            let what = format!("{what}, frozen: {which}");
            let mut planned = Planned::new(graph.clone(), Recompute::Full);
            let frozen = planned.graph.parameters.iter().filter(|p| !p.is_trained());
            for parameter in frozen {
                assert_eq!((parameter.gradient, parameter.moments), (None, None));
            }
            let ours = planned.gradients();
            for (parameter, gradient) in planned.trained().iter().zip(&ours) {
                let name = planned.name(parameter);
                let index = expected.iter().position(|other| *other == name).unwrap();
                assert!(gradient == &gradients[index], "{what}: {name}");
            }
            // A frozen parameter has no place in the update either.
            let updated = planned.update();
            let names = updated.iter().map(|(name, _)| name);
            let unknown = names.filter(|name| {
                let graph = &planned.graph;
                let frozen = graph.parameters.iter().filter(|p| !p.is_trained());
                frozen.into_iter().any(|p| **name == planned.name(p))
            });
            assert_eq!(unknown.count(), 0);
            if which.starts_with("the ") {
                assert_gradients(&what, graph);
            }
        }
    }
}

/// The norm of the difference over the norm of what is expected.
fn distance(ours: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let difference: f64 = ours
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    let norm: f64 = expected.iter().map(|b| b * b).sum();
    assert!(norm > 0.0);
    (difference / norm).sqrt()
}

/// Every op that a training step has; what is not in this list is only in other graphs.
const TRAINING_OPS: [&str; 37] = [
    "embedding",
    "embedding_backward",
    "layer_norm",
    "rms_norm",
    "norm_apply",
    "norm_backward",
    "linear",
    "linear_add",
    "view",
    "map",
    "reduce_sum",
    "reduce_max",
    "concat",
    "split",
    "dequantise",
    "linear_grad_input",
    "linear_grad_weight",
    "gelu_tanh",
    "gelu",
    "silu",
    "relu",
    "activation_backward",
    "swiglu",
    "geglu_tanh",
    "gated_backward",
    "add",
    "rotary",
    "rotary_inverse",
    "attention",
    "attention_backward",
    "attention_entropy",
    "attention_entropy_backward",
    "convolution",
    "convolution_backward",
    "scan",
    "scan_backward",
    "cross_entropy",
];
const UPDATE_OPS: [&str; 2] = ["gradient_norm", "adamw"];

#[test]
fn single_precision_agrees_with_double() {
    let mut seen = BTreeSet::new();
    for (what, build) in graphs::ALL {
        let mut single = Planned::new(build(DType::F32), Recompute::Blocks(1));
        let mut double = Planned::new(build(DType::F64), Recompute::Blocks(1));
        seen.extend(single.graph.nodes.iter().map(|node| node.op.name()));
        let (ours, expected) = (single.loss(), double.loss());
        assert!((ours - expected).abs() <= 1e-4 * expected, "{what}: loss");
        let gradients = single.gradients().into_iter().zip(double.gradients());
        for (parameter, (ours, expected)) in double.trained().iter().zip(gradients) {
            let error = distance(&ours, &expected);
            let name = double.name(parameter);
            assert!(error <= 1e-4, "{what}: gradient of {name} off by {error:e}");
        }
        let updated = single.update().into_iter().zip(double.update());
        for ((name, ours), (_, expected)) in updated {
            let error = distance(&ours, &expected);
            assert!(error <= 1e-4, "{what}: {name} off by {error:e}");
        }
    }
    for op in TRAINING_OPS.iter().chain(&UPDATE_OPS) {
        assert!(seen.contains(op), "no graph here has `{op}`: {seen:?}");
    }
}
