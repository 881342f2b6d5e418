//! Sizes beyond all machines: figures stop at the largest number instead of wrapping around
//! to one that looks reasonable.

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
    verify(&step).unwrap();
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
    assert_eq!(step.useful_flops(), u64::MAX);
}

#[test]
fn nothing_wraps_at_any_level() {
    for size in [1 << 20, 1 << 40, 1 << 60] {
        let base = step(size, size, 64, size);
        for choice in [Recompute::None, Recompute::Full] {
            let step = base.recompute(choice).unwrap();
            verify(&step).unwrap();
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
            assert_eq!(step.micro_flops(), u64::MAX);
        }
    }
}
