//! What a parameter takes: with a master or without, its gradient and its moments in each format,
//! and its own learning rate.

use cinch_graph::op::{GradientFormat, MomentFormat, Op};
use cinch_graph::{
    DType, Graph, Init, Optimizer, Parameter, Storage, TrainingGraph, differentiate, verify,
};

use crate::random_model::optimizer;

const INIT: Init = Init::Normal { std: 0.02 };

/// A tied table, a layer with a bias, and an adapter beside it. All matrices are large enough for
/// moments in any format.
fn forward(compute: DType, masters: bool) -> Graph {
    let mut g = Graph::new(compute);
    g.masters = masters;
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [64, 64], INIT);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let weight = g.weight("layer.weight", [64, 64], INIT);
    let bias = g.small_weight("layer.bias", [64], Init::Zeros);
    let y = g.linear("layer", x, weight, Some(bias)).unwrap();
    let a = g.weight("a", [64, 64], INIT);
    let down = g.linear("down", x, a, None).unwrap();
    let b = g.weight("b", [64, 64], Init::Zeros);
    let y = g.linear_add("up", (y, 0), (down, 0), b, 2.0).unwrap();
    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", y, table, targets, 0.0, None)
        .unwrap();
    g
}

fn step(graph: Graph, moments: MomentFormat, gradients: GradientFormat) -> TrainingGraph {
    let optimizer = Optimizer {
        moments,
        gradients,
        ..optimizer()
    };
    let step = differentiate(graph, &optimizer).unwrap();
    verify(&step).unwrap();
    step
}

fn named<'g>(graph: &'g Graph, name: &str) -> &'g Parameter {
    let mut parameters = graph.parameters.iter();
    let found = parameters.find(|p| graph.tensor(p.master).name == name);
    found.unwrap_or_else(|| panic!("no parameter `{name}`"))
}

#[test]
fn without_a_master_a_weight_is_one_tensor() {
    for half in [DType::Bf16, DType::F16] {
        let graph = forward(half, false);
        for name in ["table", "layer.weight", "a", "b"] {
            let weight = named(&graph, name);
            assert_eq!(weight.storage, Storage::TrainedAsRead);
            assert!(weight.is_trained());
            assert_eq!(weight.master, weight.compute);
            assert_eq!(graph.ty(weight.master).dtype, half);
        }
        // What is small stays exact.
        let bias = named(&graph, "layer.bias");
        assert_eq!(bias.storage, Storage::Trained);
        assert_eq!(graph.ty(bias.master).dtype, DType::F32);
    }
}

#[test]
fn in_single_precision_there_is_nothing_to_leave_out() {
    for dtype in [DType::F32, DType::F64] {
        let (mut with, without) = (forward(dtype, true), forward(dtype, false));
        with.masters = false;
        assert_eq!(with, without);
    }
}

#[test]
fn a_gradient_is_rounded_only_where_one_node_makes_it() {
    use DType::{Bf16, F32};
    for (gradients, layer) in [(GradientFormat::Full, F32), (GradientFormat::AsKept, Bf16)] {
        let step = step(forward(Bf16, false), MomentFormat::Full, gradients);
        for (name, expected) in [
            ("layer.weight", layer),
            ("a", layer),
            ("b", layer),
            ("layer.bias", F32),
            // The embedding and the loss add to it.
            ("table", F32),
        ] {
            let gradient = named(&step, name).gradient.unwrap();
            assert_eq!(step.ty(gradient).dtype, expected, "{name}, {gradients:?}");
        }
    }
    // With masters, the format changes nothing.
    let [full, kept] = [GradientFormat::Full, GradientFormat::AsKept]
        .map(|gradients| step(forward(Bf16, true), MomentFormat::Full, gradients));
    assert_eq!(full, kept);
}

#[test]
fn moments_are_in_the_format_that_is_asked_for() {
    use DType::{Bf16, F32, U8};
    for (moments, masters, expected) in [
        (MomentFormat::Full, false, F32),
        (MomentFormat::Full, true, F32),
        (MomentFormat::AsKept, false, Bf16),
        (MomentFormat::AsKept, true, F32),
        (MomentFormat::EightBit, false, U8),
        (MomentFormat::EightBit, true, U8),
    ] {
        let step = step(forward(Bf16, masters), moments, GradientFormat::AsKept);
        for moment in named(&step, "layer.weight").moments.unwrap() {
            assert_eq!(step.ty(moment).dtype, expected, "{moments:?}, {masters}");
        }
        for moment in named(&step, "layer.bias").moments.unwrap() {
            assert_eq!(step.ty(moment).dtype, F32);
        }
    }
}

#[test]
fn an_update_has_the_learning_rate_of_its_parameter() {
    let mut graph = Graph::new(DType::F32);
    let tokens = graph.batch("tokens", [2, 3], DType::I32);
    let table = graph.weight("table", [7, 4], INIT);
    let x = graph.embedding("embedding", tokens, table, None, None);
    let weight = graph.weight("fast", [4, 4], INIT);
    graph.scale_learning_rate(10.0);
    let y = graph.linear("fast", x.unwrap(), weight, None).unwrap();
    let targets = graph.batch("targets", [2, 3], DType::I32);
    graph
        .cross_entropy("loss", y, table, targets, 0.0, None)
        .unwrap();
    let step = step(graph, MomentFormat::Full, GradientFormat::Full);
    let rates: Vec<(&str, f64)> = step
        .nodes
        .iter()
        .filter_map(|node| match &node.op {
            Op::AdamW(op) => Some((node.name.as_str(), op.learning_rate_scale)),
            _ => None,
        })
        .collect();
    assert_eq!(rates, [("table.update", 1.0), ("fast.update", 10.0)]);
}
