//! Expressions, reductions, and tensors joined and cut apart: what their backward reads, what is
//! written over what, and what is refused.

use cinch_graph::op::{Domain, Joined, Map, Op, Operand, Over, ReduceKind};
use cinch_graph::{
    Count, DType, Graph, GraphError, Init, Recompute, Shape, TensorId, TrainingGraph,
    differentiate, verify,
};

use crate::random_model::optimizer;

/// A graph over an embedding of 12 columns.
fn start(compute: DType) -> (Graph, TensorId) {
    let mut graph = Graph::new(compute);
    let tokens = graph.batch("tokens", [2, 3], DType::I32);
    let table = graph.weight("table", [7, 12], Init::Zeros);
    let x = graph.embedding("x", tokens, table, None, None).unwrap();
    (graph, x)
}

fn linear(graph: &mut Graph, name: &str, x: TensorId, outputs: usize) -> TensorId {
    let width = graph.ty(x).width();
    let weight = graph.weight(&format!("{name}.weight"), [outputs, width], Init::Zeros);
    graph.linear(name, x, weight, None).unwrap()
}

fn finish(mut graph: Graph, h: TensorId) -> TrainingGraph {
    let width = graph.ty(h).width();
    let head = graph.weight("head", [7, width], Init::Zeros);
    let targets = graph.batch("targets", [2, 3], DType::I32);
    graph
        .cross_entropy("loss", h, head, targets, 0.0, None)
        .unwrap();
    step(graph)
}

fn step(graph: Graph) -> TrainingGraph {
    let step = differentiate(graph, &optimizer()).unwrap();
    verify(&step).unwrap();
    step
}

/// The names of what a node reads.
fn reads(step: &TrainingGraph, node: &str) -> Vec<String> {
    let node = step.nodes.iter().find(|n| n.name == node).unwrap();
    let names = node.inputs.iter().map(|&id| step.tensor(id).name.clone());
    names.collect()
}

#[test]
fn a_backward_reads_what_its_formula_mentions() {
    let (mut graph, x) = start(DType::F32);
    let a = linear(&mut graph, "a", x, 12);
    let b = linear(&mut graph, "b", x, 12);
    let c = linear(&mut graph, "c", x, 12);
    let scale = graph.small_weight("scale", [12], Init::Ones);
    let gate = graph
        .map("gate", &[a, b], |v| &v[0] * v[1].sigmoid())
        .unwrap();
    let sum = graph
        .map("sum", &[gate, c, scale], |v| &v[0] + &v[1] + &v[2])
        .unwrap();
    let y = graph.map("squash", &[sum], |v| v[0].sigmoid()).unwrap();
    let z = linear(&mut graph, "z", y, 12);
    let step = finish(graph, z);
    assert_eq!(reads(&step, "d.gate.input"), ["a", "b", "d.sum.input"]);
    assert_eq!(reads(&step, "d.sum.input"), ["d.squash.input"]);
    assert_eq!(reads(&step, "d.sum.scale"), ["d.squash.input"]);
    // The output, which the next product keeps anyway, and not the input.
    assert_eq!(reads(&step, "d.squash.input"), ["squash", "d.z.input"]);
}

#[test]
fn what_can_be_had_again_is_not_kept() {
    let (mut graph, x) = start(DType::F32);
    let a = linear(&mut graph, "a", x, 12);
    let b = linear(&mut graph, "b", x, 12);
    let y = graph
        .map("gate", &[a, b], |v| &v[0] * v[1].sigmoid())
        .unwrap();
    let z = linear(&mut graph, "z", y, 12);
    let step = finish(graph, z).recompute(Recompute::None).unwrap();
    verify(&step).unwrap();
    let again = step.nodes.iter().find(|n| n.name == "again.gate").unwrap();
    assert_eq!(reads(&step, "d.z.weight")[1], "again.gate");
    assert!(matches!(again.op, Op::Map(_)));
}

/// One of two results is needed again: only its own part of the expression is computed.
#[test]
fn one_of_several_results_is_had_again_by_itself() {
    let (mut graph, x) = start(DType::F32);
    let a = linear(&mut graph, "a", x, 12);
    let b = linear(&mut graph, "b", x, 12);
    let domain = Domain {
        shape: graph.ty(a).shape,
        dtype: DType::F32,
    };
    let both = graph
        .map_all("both", domain, &[a, b], |v| [v[0].square(), v[1].gelu()])
        .unwrap();
    let recipe = graph.nodes.last().unwrap().op.declaration().recipe(1);
    let recipe = recipe.unwrap();
    assert_eq!(recipe.inputs, [Operand::Input(1)]);
    let Op::Map(op) = &recipe.op else {
        panic!("not a map");
    };
    assert_eq!(op.pointwise.expression.outputs().len(), 1);
    let products = [
        linear(&mut graph, "c", both[0], 12),
        linear(&mut graph, "d", both[1], 12),
    ];
    let y = graph.map("y", &products, |v| &v[0] + &v[1]).unwrap();
    let step = finish(graph, y).recompute(Recompute::None).unwrap();
    verify(&step).unwrap();
}

#[test]
fn a_tensor_given_twice_is_one_input() {
    let (mut graph, x) = start(DType::F32);
    let whole = graph.small_weight("whole", [2, 3, 12], Init::Ones);
    let y = graph
        .map("twice", &[x, whole, x, whole], |v| {
            &v[0] * &v[1] + &v[2] * v[3].exp()
        })
        .unwrap();
    assert_eq!(graph.nodes.last().unwrap().inputs, [x, whole]);
    finish(graph, y);
}

#[test]
fn an_output_takes_over_what_is_read_at_its_own_place() {
    let mut graph = Graph::new(DType::Bf16);
    let x = graph.batch("x", [4, 12], DType::Bf16);
    let other = graph.batch("other", [4, 12], DType::F32);
    let row = graph.batch("row", [12], DType::Bf16);
    let y = graph.map("y", &[x, other, row], |v| &v[0] * &v[1] + &v[2]);
    assert_eq!(graph.ty(y.unwrap()).dtype, DType::Bf16);
    let op = graph.nodes[0].op.declaration();
    assert_eq!(op.in_place(), [(0, 0)]);
    verify(&graph).unwrap();
}

#[test]
fn shapes_of_reductions() {
    let mut graph = Graph::new(DType::Bf16);
    let x = graph.batch("x", [2, 3, 12], DType::Bf16);
    let cases = [
        (Over::Columns, "f32[2,3]"),
        (Over::Groups(4), "f32[2,3,3]"),
        (Over::Rows, "f32[12]"),
        (Over::Sequence, "f32[2,12]"),
        (Over::All, "f32[]"),
    ];
    for (over, expected) in cases {
        let sum = graph.sum("sum", over, &[x], |v| v[0].square()).unwrap();
        assert_eq!(graph.ty(sum).to_string(), expected);
        let kind = (ReduceKind::Max, over, DType::Bf16);
        let max = graph.reduce("max", kind, &[x], |v| v[0].clone()).unwrap();
        assert_eq!(graph.ty(max).dtype, DType::Bf16);
    }
    verify(&graph).unwrap();
    for over in [Over::Groups(5), Over::Groups(0)] {
        let error = graph.sum("sum", over, &[x], |v| v[0].clone()).unwrap_err();
        assert!(error.to_string().contains("[2,3,12]"), "{error}");
    }
    let row = graph.batch("row", [12], DType::Bf16);
    assert!(
        graph
            .sum("sum", Over::Sequence, &[row], |v| v[0].clone())
            .is_err()
    );
}

/// A graph whose loss is nothing but terms, in half precision scaled like any other.
#[test]
fn terms_of_a_loss_are_added_up() {
    for compute in [DType::F32, DType::F16] {
        let (mut graph, x) = start(compute);
        let loss = graph
            .loss_term("squares", Count::Rows(6), &[x], |v| v[0].square())
            .unwrap();
        let again = graph.loss_term("sizes", Count::Batch, &[x], |v| v[0].abs());
        assert_ne!(again.unwrap(), loss);
        assert!(graph.weigh_term("sizes", 0.1));
        let step = step(graph);
        let read = reads(&step, "d.squares.input");
        assert!(read.contains(&"squares.weight".to_owned()), "{read:?}");
        let scaled = read.contains(&"loss_scale".to_owned());
        assert_eq!(scaled, compute == DType::F16);
        let names: Vec<_> = step.terms.iter().map(|term| &term.name[..]).collect();
        assert_eq!(names, ["squares", "sizes"]);
    }
}

#[test]
fn what_has_no_gradient_is_named() {
    let (mut graph, x) = start(DType::F32);
    let largest = graph.max("largest", Over::Columns, &[x], |v| v[0].clone());
    let largest = largest.unwrap();
    let detached = graph.clone();
    let y = graph.map("y", &[x, largest], |v| &v[0] - &v[1]).unwrap();
    graph
        .loss_term("loss", Count::Batch, &[y], |v| v[0].clone())
        .unwrap();
    let error = differentiate(graph, &optimizer()).unwrap_err();
    let expected = GraphError::NotDifferentiable {
        op: "reduce_max",
        node: "largest".to_owned(),
    };
    assert_eq!(error, expected);

    let mut graph = detached;
    let y = graph.map("y", &[x, largest], |v| &v[0] - v[1].detach());
    graph
        .loss_term("loss", Count::Batch, &[y.unwrap()], |v| v[0].clone())
        .unwrap();
    step(graph);
}

#[test]
fn parts_that_nobody_reads_have_no_gradient() {
    let (mut graph, x) = start(DType::F32);
    let parts = graph
        .split("parts", Joined::Columns, x, &[4, 6, 2])
        .unwrap();
    let sum = graph.concat("some", Joined::Columns, &[parts[2], parts[0]]);
    let step = finish(graph, sum.unwrap());
    let node = step.nodes.iter().find(|n| n.name == "d.parts.input");
    let Op::Concat(op) = &node.unwrap().op else {
        panic!("not a concat");
    };
    assert_eq!(op.parts, [(4, true), (6, false), (2, true)]);
}

#[test]
fn wrong_inputs_are_refused() {
    let mut graph = Graph::new(DType::F32);
    let x = graph.batch("x", [2, 3, 12], DType::F32);
    let y = graph.batch("odd", [2, 5], DType::F32);
    let bytes = graph.batch("bytes", [2, 3, 12], DType::U8);
    let error = graph.map("m", &[x, y], |v| &v[0] + &v[1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "map `m`: `odd` [2,5] cannot be read over [2,3,12]"
    );
    assert!(graph.map("m", &[x, bytes], |v| &v[0] + &v[1]).is_err());
    let domain = Domain {
        shape: Shape::new(&[2, 3, 12]),
        dtype: DType::I32,
    };
    assert!(graph.map_over("m", domain, &[x], |v| v[0].exp()).is_err());
    assert!(
        graph
            .concat("c", Joined::Columns, &[x, y])
            .unwrap_err()
            .to_string()
            .contains("part 1")
    );
    assert!(graph.concat("c", Joined::Columns, &[]).is_err());
    assert!(graph.split("s", Joined::Columns, x, &[4, 4]).is_err());
    assert!(graph.split("s", Joined::Rows, x, &[1, 2]).is_err());
    let long = graph.map("long", &[x], |v| {
        (0..600).fold(v[0].clone(), |sum, i| (sum + f64::from(i)).tanh())
    });
    assert!(long.unwrap_err().to_string().contains("too long"));

    // The ops themselves, on other tensors than they were made for.
    let domain = Domain {
        shape: Shape::new(&[2, 3, 12]),
        dtype: DType::F32,
    };
    let dropout = graph.dropout(0.1);
    graph
        .map_over("kept", domain, &[x], |v| v[0].dropout(dropout))
        .unwrap();
    let node = graph.nodes.last().unwrap();
    let good = graph.types(&node.inputs);
    let Op::Map(op) = &node.op else {
        panic!("not a map");
    };
    let infer = |op: &Map, inputs: &[_]| Op::from(op.clone()).declaration().infer(inputs);
    assert!(infer(op, &good).is_ok());
    assert!(infer(op, &good[..1]).is_err());
    assert!(infer(op, &[good[0], good[0]]).is_err());
    let mut wide = good.clone();
    wide[0].dtype = DType::F64;
    assert!(infer(op, &wide).is_err());
    let mut small = good.clone();
    small[0].shape = Shape::new(&[2, 3, 6]);
    assert!(infer(op, &small).is_err());
    let outputs = Map::new(op.pointwise.clone(), vec![DType::F32; 2], 0);
    assert!(infer(&outputs, &good).is_err());
}
