//! Sizes beyond all machines: figures stop at the largest number instead of wrapping around
//! to one that looks reasonable, and a graph that has such a figure is refused.

use cinch_graph::op::{ActivationKind, NormKind};
use cinch_graph::{
    DType, Graph, Init, Recompute, Shape, Target, TensorType, TrainingGraph, differentiate, verify,
};

use crate::random_model::optimizer;

fn step(batch: usize, length: usize, width: usize, vocabulary: usize) -> TrainingGraph {
    let init = Init::Zeros;
    let mut g = Graph::new(DType::F32);
    let tokens = g.batch("tokens", [batch, length], DType::I32);
    let table = g.weight("table", [vocabulary, width], init);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    g.enter_block("block");
    let weight = g.weight("qkv.weight", [3 * width, width], init);
    let qkv = g.linear("qkv", x, weight, None).unwrap();
    let o = g.attention("attend", qkv, 2, true, None).unwrap();
    let active = g.activation("gelu", o, ActivationKind::Gelu).unwrap();
    let gamma = g.small_weight("gamma", [width], Init::Ones);
    let norm = (NormKind::Rms, 1e-5);
    let out = g
        .residual_norm("norm", (x, active), None, norm, gamma, None)
        .unwrap();
    g.leave_block();
    let targets = g.batch("targets", [batch, length], DType::I32);
    g.cross_entropy("loss", out.normed, table, targets, 0.0, Some(usize::MAX))
        .unwrap();
    differentiate(g, &optimizer()).unwrap()
}

#[test]
fn elements_and_bytes_stop_at_the_largest_number() {
    let huge = Shape::new(&[1 << 40, 1 << 40, 3]);
    assert_eq!(huge.elements(), usize::MAX);
    assert_eq!(huge.rows(), usize::MAX);
    assert_eq!(TensorType::new(huge, DType::F32).bytes(), u64::MAX);
    // 2^61 elements are countable, their bytes are not.
    let large = TensorType::new([1 << 31, 1 << 30], DType::F64);
    assert_eq!(large.shape.elements(), 1 << 61);
    assert_eq!(large.bytes(), u64::MAX);
    assert_eq!(Shape::new(&[usize::MAX, usize::MAX, 0]).elements(), 0);
    assert_eq!(Shape::new(&[]).elements(), 1);
}

#[test]
fn a_million_by_a_million_is_counted_exactly_while_it_can_be() {
    let (batch, length, width) = (1_000_000, 1_000_000, 768);
    let step = step(batch, length, width, 50_257);
    let rows = 1_000_000_000_000_u128;
    for node in &step.nodes {
        match node.name.as_str() {
            "qkv" => {
                let exact = 2 * rows * 768 * 3 * 768;
                assert_eq!(u128::from(step.flops(node)), exact);
            }
            // 10^6 · 2 · 10^12/2 · 4 · 384 is 1.5·10^21, more than 64 bits hold.
            "attend" => assert_eq!(step.flops(node), u64::MAX),
            "loss" => {
                let inputs = step.types(&node.inputs);
                let workspace = node.op.declaration().workspace(&inputs, &[], Target::Cpu);
                let exact = (rows * 50_257 + rows) * 4;
                assert_eq!(u128::from(workspace), exact);
            }
            _ => {}
        }
    }
    let error = step.check_sizes().unwrap_err().to_string();
    let what = "attention `attend` takes more than 2^64 operations, which no plan counts";
    assert!(error.starts_with(what), "{error}");
    assert_eq!(verify(&step).unwrap_err().to_string(), error);
    // The sum over the nodes is wider than they are.
    assert!(step.useful_flops() > u128::from(u64::MAX));
}

/// 2^61 numbers of four bytes are 2^63 bytes; of eight, one more than the largest figure.
#[test]
fn the_last_size_that_can_be_counted_is_taken_and_the_next_is_not() {
    let graph = |elements: usize, dtype: DType| {
        let mut graph = Graph::new(DType::F32);
        graph.batch("x", [elements], dtype);
        graph
    };
    graph(1 << 61, DType::F32).check_sizes().unwrap();
    graph((1 << 62) - 1, DType::F32).check_sizes().unwrap();
    graph(usize::MAX - 1, DType::U8).check_sizes().unwrap();
    for (elements, dtype) in [(1 << 61, DType::F64), (1 << 62, DType::F32)] {
        let error = graph(elements, dtype).check_sizes().unwrap_err();
        let expected = format!(
            "the tensor `x` {dtype}[{elements}] has more than 2^64 bytes, which no plan counts\n\
             hint: a smaller batch, shorter sequences or a smaller model"
        );
        assert_eq!(error.to_string(), expected);
    }
}

/// A product's operations, with all tensors well within bounds: 2·2^31·2^15·2^k.
#[test]
fn operations_are_counted_up_to_the_border() {
    let step = |width: usize| {
        let mut g = Graph::new(DType::F32);
        let x = g.batch("x", [1 << 31, width], DType::F32);
        let weight = g.weight("w", [1 << 15, width], Init::Zeros);
        g.linear("y", x, weight, None).unwrap();
        g
    };
    let below = step((1 << 17) - 1);
    below.check_sizes().unwrap();
    assert_eq!(below.flops(&below.nodes[0]), u64::MAX - ((1 << 47) - 1));
    let beyond = step(1 << 17);
    let error = beyond.check_sizes().unwrap_err().to_string();
    assert!(
        error.starts_with("linear `y` takes more than 2^64 operations"),
        "{error}"
    );
}

#[test]
fn nothing_wraps_at_any_level() {
    for size in [1 << 20, 1 << 40, 1 << 60] {
        let base = step(size, size, 64, size);
        for choice in [Recompute::None, Recompute::Full] {
            let step = base.recompute(choice).unwrap();
            assert!(verify(&step).is_err(), "{size}");
            for node in &step.nodes {
                let (inputs, outputs) = (step.types(&node.inputs), step.types(&node.outputs));
                for target in [Target::Cpu, Target::Cuda] {
                    node.op.declaration().workspace(&inputs, &outputs, target);
                }
                // A product over the batch cannot cost less than the batch has elements.
                let elements = (size as u64).saturating_mul(size as u64);
                if ["qkv", "d.qkv.weight", "gelu", "attend", "norm"].contains(&&*node.name) {
                    assert!(step.flops(node) >= elements, "{}", node.name);
                    assert!(step.bytes(node) >= elements, "{}", node.name);
                }
            }
            assert!(step.micro_flops() > u128::from(u64::MAX));
        }
    }
}
