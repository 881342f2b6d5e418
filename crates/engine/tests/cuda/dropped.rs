//! Adapters of low rank whose input is dropped, each rank a kernel of its own.

use cinch_graph::op::{Linear, LinearGradInput, LinearGradWeight, Op};
use cinch_graph::{DType, Graph, GraphError, Init, TensorId, differentiate};

use crate::on_both;
use crate::shared::OPTIMIZER;

const WEIGHT: Init = Init::Normal { std: 0.05 };
/// Rows that are no multiple of what a warp has, few and so many that warps have rows of their own.
const ROWS: [usize; 2] = [2, 75];
const MANY: [usize; 2] = [5, 1749];

/// Frozen layers with adapters on them; the gradient of the second layer's input is added to.
fn graph(rank: usize, width: usize, rows: [usize; 2], compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, width], WEIGHT);
    let mut x: TensorId = g.embedding("embedding", tokens, table, None, None)?;
    for layer in ["first", "second"] {
        let part = |part: &str| format!("{layer}.{part}");
        let weight = g.frozen_weight(&part("weight"), [width, width], WEIGHT);
        let mut y = g.linear(&part("base"), x, weight, None)?;
        let down = g.weight(&part("down"), [rank, width], WEIGHT);
        let drop = g.dropout(0.2);
        let low = g.linear_of_dropped(&part("low"), x, down, drop)?;
        let up = g.weight(&part("up"), [width, rank], WEIGHT);
        y = g.linear_add(&part("adapted"), (y, 0), (low, 0), up, 1.5)?;
        x = y;
    }
    let head = g.weight("head", [50, width], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    Ok(g)
}

/// Nodes that drop inside their product, of those that read, add and sum.
fn inside(rank: usize, width: usize, compute: DType) -> [usize; 3] {
    let graph = differentiate(graph(rank, width, ROWS, compute).unwrap(), &OPTIMIZER).unwrap();
    let mut found = [0; 3];
    for node in &graph.nodes {
        let of = |input: usize| graph.ty(node.inputs[input]);
        let kind = match &node.op {
            Op::Linear(op) => Linear::is_dropped_inside(op, &of(0), &of(1)).then_some(0),
            Op::LinearGradInput(op) => {
                LinearGradInput::is_dropped_inside(op, &of(0), &of(1)).then_some(1)
            }
            Op::LinearGradWeight(op) => {
                LinearGradWeight::is_dropped_inside(op, &of(0), &of(1)).then_some(2)
            }
            _ => None,
        };
        if let Some(kind) = kind {
            found[kind] += 1;
        }
    }
    found
}

#[test]
fn low_ranks_are_dropped_inside_the_product() {
    assert_eq!(inside(8, 96, DType::F16), [2, 2, 2]);
    assert_eq!(inside(32, 416, DType::Bf16), [2, 2, 2]);
    // Another rank, width or precision has copies.
    for (rank, width, compute) in [
        (40, 96, DType::Bf16),
        (4, 96, DType::Bf16),
        (8, 100, DType::Bf16),
        (8, 96, DType::F32),
    ] {
        assert_eq!(inside(rank, width, compute), [0, 0, 0]);
    }
}

macro_rules! ranks {
    ($($(#[$long:meta])? $test:ident: $rank:literal in $width:literal, $rows:expr;)*) => {
        on_both! {
            emulated: $($(#[$long])? $test: |compute| graph($rank, $width, $rows, compute).unwrap();)*
        }
    };
}

ranks! {
    dropped_rank_8: 8 in 416, ROWS;
    dropped_rank_16: 16 in 96, ROWS;
    #[ignore = "takes minutes without a card"]
    dropped_rank_24: 24 in 1536, ROWS;
    dropped_rank_32: 32 in 160, ROWS;
    #[ignore = "takes minutes without a card"]
    dropped_rank_8_of_many_rows: 8 in 224, MANY;
    #[ignore = "takes minutes without a card"]
    dropped_rank_24_of_many_rows: 24 in 288, MANY;
    #[ignore = "takes minutes without a card"]
    dropped_rank_8_of_many_rows_and_columns: 8 in 1024, MANY;
    #[ignore = "takes minutes without a card"]
    dropped_rank_24_of_many_rows_and_columns: 24 in 1024, MANY;
}
