//! One model with every op a model can be built from, small enough to break by hand.

use cinch_graph::op::{ActivationKind, NormKind, ScanInputs};
use cinch_graph::{DType, Graph, GraphError, Init, Node, TensorId, differentiate, verify};

use crate::random_model::optimizer;

const INIT: Init = Init::Normal { std: 0.02 };
const NORM: (NormKind, f64) = (NormKind::Layer, 1e-5);

/// Batch 2, length 3, width 4: one block of attention, one of a gated scan.
pub fn forward() -> Graph {
    build().expect("the small model is well formed")
}

/// The forward's training step, as a plain graph that a test may break.
pub fn training() -> Graph {
    let step = differentiate(forward(), &optimizer()).expect("the small model has a derivative");
    (*step).clone()
}

fn build() -> Result<Graph, GraphError> {
    let mut g = Graph::new(DType::F32);
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [11, 4], INIT);
    let positions = g.weight("positions", [5, 4], INIT);
    let dropout = g.dropout(0.1);
    let stream = g.embedding("embedding", tokens, table, Some(positions), dropout)?;
    let (gamma, beta) = norm_weights(&mut g, "first");
    let x = g.norm("first", stream, NORM, gamma, Some(beta))?;

    g.enter_block("attention");
    let weight = g.weight("qkv.weight", [12, 4], INIT);
    let bias = g.small_weight("qkv.bias", [12], Init::Zeros);
    let qkv = g.linear("qkv", x, weight, Some(bias))?;
    let o = g.attention("attend", qkv, 2, true, None)?;
    let active = g.activation("gelu", o, ActivationKind::Gelu)?;
    let (gamma, beta) = norm_weights(&mut g, "second");
    let dropout = g.dropout(0.1);
    let out = g.residual_norm("second", (stream, active), dropout, NORM, gamma, Some(beta))?;
    g.leave_block();

    g.enter_block("mixer");
    let weight = g.weight("in.weight", [8, 4], INIT);
    let zu = g.linear("in", out.normed, weight, None)?;
    let weight = g.small_weight("conv.weight", [4, 2], INIT);
    let bias = g.small_weight("conv.bias", [4], Init::Zeros);
    let u = g.convolution("conv", zu, 4, weight, bias)?;
    let weight = g.weight("p.weight", [5, 4], INIT);
    let p = g.linear("p", u, weight, None)?;
    let weight = g.weight("dt.weight", [4, 1], INIT);
    let dt = g.linear_columns("dt", p, 0, weight, None)?;
    let inputs = ScanInputs {
        x: u,
        x_column: 0,
        z: zu,
        z_column: 0,
        p,
        dt,
        a_log: g.small_weight("A_log", [4, 2], Init::LogRange),
        d: g.small_weight("D", [4], Init::Ones),
    };
    let y = g.scan("scan", inputs, 1, 2)?;
    let (gamma, beta) = norm_weights(&mut g, "last");
    let out = g.residual_norm("last", (out.stream, y), None, NORM, gamma, Some(beta))?;
    g.leave_block();

    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", out.normed, table, targets, 0.1, Some(4))?;
    Ok(g)
}

fn norm_weights(g: &mut Graph, name: &str) -> (TensorId, TensorId) {
    let gamma = g.small_weight(&format!("{name}.gamma"), [4], Init::Ones);
    let beta = g.small_weight(&format!("{name}.beta"), [4], Init::Zeros);
    (gamma, beta)
}

/// The position of the node with this name.
pub fn position(graph: &Graph, node: &str) -> usize {
    let found = graph.nodes.iter().position(|n| n.name == node);
    found.unwrap_or_else(|| panic!("no node `{node}`"))
}

pub fn node<'g>(graph: &'g mut Graph, name: &str) -> &'g mut Node {
    let index = position(graph, name);
    &mut graph.nodes[index]
}

/// The tensor with this name that some node or parameter uses.
pub fn tensor(graph: &Graph, name: &str) -> TensorId {
    let used = graph
        .nodes
        .iter()
        .flat_map(|n| n.inputs.iter().chain(&n.outputs));
    let mut used = used.copied();
    used.find(|&id| graph.tensor(id).name == name)
        .unwrap_or_else(|| panic!("no tensor `{name}`"))
}

#[test]
fn the_small_model_is_well_formed() {
    verify(&forward()).unwrap();
    verify(&training()).unwrap();
}
