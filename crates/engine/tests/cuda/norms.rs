//! Norms over rows that are a warp's, each width a kernel of its own: behind the addition, as encoders
//! have them, in blocks of which one is recomputed; trained and not.

use cinch_graph::op::NormKind;
use cinch_graph::{DType, Graph, GraphError, Init};

use crate::{check, check_emulated, check_second_way};

const WEIGHT: Init = Init::Normal { std: 0.05 };
/// Rows that are no multiple of what a block has.
const ROWS: [usize; 2] = [3, 45];
/// So many that warps have several.
const MANY: [usize; 2] = [7, 331];

fn graph(width: usize, kind: NormKind, trained: bool, compute: DType) -> Result<Graph, GraphError> {
    graph_of(ROWS, width, kind, trained, compute)
}

fn graph_of(
    rows: [usize; 2],
    width: usize,
    kind: NormKind,
    trained: bool,
    compute: DType,
) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, width], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for block in ["first", "second"] {
        g.enter_block(block);
        let part = |part: &str| format!("{block}.{part}");
        let weight = g.frozen_weight(&part("weight"), [width, width], WEIGHT);
        let branch = g.linear(&part("linear"), x, weight, None)?;
        let mut parameter = |name: &str, init: Init| match trained {
            true => g.small_weight(&part(name), [width], init),
            false => g.frozen_small_weight(&part(name), [width], init),
        };
        let gamma = parameter("gamma", Init::Ones);
        let beta = (kind == NormKind::Layer).then(|| parameter("beta", WEIGHT));
        let dropout = g.dropout(0.2);
        let normed = g.residual_norm(
            &part("norm"),
            (x, branch),
            dropout,
            (kind, 1e-5),
            gamma,
            beta,
        )?;
        x = normed.normed;
        g.leave_block();
    }
    let head = g.weight("head", [50, width], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    Ok(g)
}

const KINDS: [NormKind; 2] = [NormKind::Layer, NormKind::Rms];
const WIDTHS: [usize; 4] = [128, 256, 384, 512];

#[test]
#[ignore = "needs a GPU"]
fn norms_of_narrow_rows() {
    for kind in KINDS {
        for width in WIDTHS {
            let what = format!("{kind:?} norm of {width}");
            check(&what, |compute| graph(width, kind, false, compute).unwrap());
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn trained_norms_of_narrow_rows() {
    for kind in KINDS {
        for width in WIDTHS {
            let what = format!("trained {kind:?} norm of {width}");
            check_second_way(&what, |compute| graph(width, kind, true, compute).unwrap());
        }
        let what = format!("trained {kind:?} norm of many rows");
        check_second_way(&what, |compute| {
            graph_of(MANY, 384, kind, true, compute).unwrap()
        });
    }
}

/// One width of each kind, trained and not.
#[test]
fn norms_of_narrow_rows_without_a_card() {
    for (kind, width) in [(NormKind::Layer, 384), (NormKind::Rms, 128)] {
        for trained in [false, true] {
            let what = format!("{kind:?} norm of {width}, trained: {trained}");
            check_emulated(&what, |compute| {
                graph(width, kind, trained, compute).unwrap()
            });
        }
    }
}

#[test]
#[ignore = "takes minutes without a card"]
fn norms_of_many_narrow_rows_without_a_card() {
    for kind in KINDS {
        let what = format!("{kind:?} norm of many rows");
        check_emulated(&what, |compute| {
            graph_of(MANY, 128, kind, true, compute).unwrap()
        });
    }
}
