//! Selected keys and the loss that trains their selection.

use cinch_graph::op;

use super::{columns, failed, first_positions};
use crate::arena::Element;
use crate::cpu::kernel::{attention, indexer};
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

/// The shape and inputs of an indexer, the first of the node.
fn indexer_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: op::Indexer,
) -> (indexer::IndexerShape, indexer::Inputs<'a, F>) {
    let dims = x.input_type(0).shape;
    let seq = dims.dims()[1];
    let shape = indexer::IndexerShape {
        batch: dims.dims()[0],
        seq,
        heads: op.heads,
        width: op.width,
        keys: seq,
        rows: op::Indexer::cpu_rows(seq),
    };
    let inputs = indexer::Inputs {
        queries: x.input(0),
        keys: x.input(1),
        weights: x.input(2),
        weight_bias: x.input(3),
        score_bias: x.input(4),
    };
    (shape, inputs)
}

fn key_count(count: op::KeyCount) -> indexer::Count {
    match count {
        op::KeyCount::Fixed(count) => indexer::Count::Fixed(count),
        op::KeyCount::Adaptive {
            base,
            least,
            most,
            temperature,
        } => indexer::Count::Adaptive {
            base,
            least,
            most,
            temperature,
        },
    }
}

pub fn select_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::CachedSelection,
) -> Result<(), EngineError> {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let first = first_positions(x, op::Indexer::NUM_INPUTS)?;
    let last = first.iter().copied().max().unwrap_or(0);
    if last.saturating_add(shape.seq) > op.slots {
        return Err(failed(x, format!("position {last} of {} slots", op.slots)));
    }
    let cache = indexer::Cache {
        keys: x.output(1),
        sums: op.is_adaptive().then(|| x.output(2)),
        slots: op.slots,
    };
    let count = key_count(op.count);
    indexer::select_cached(
        &shape,
        &inputs,
        (&first, count),
        cache,
        x.workspace(),
        x.output(0),
    );
    Ok(())
}

pub fn select_keys<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerSelection) {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let count = op.count.map_or(indexer::Count::All, key_count);
    let bits = op.count.map(|_| x.output(1));
    indexer::select(&shape, &inputs, count, x.workspace(), x.output(0), bits);
}

/// What the loss of an indexer reads.
fn indexer_loss_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::IndexerLoss,
) -> (indexer::IndexerShape, indexer::LossInputs<'a, F>) {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let of = &op.attention;
    let source = op::IndexerLoss::FIRST_SOURCE;
    let (query_width, key_width) = (of.heads * of.head_dim, of.kv_heads * of.head_dim);
    let [q, k, _] = of.places();
    let keys = columns(x, source + k.0, k.1, key_width);
    let sources = attention::Inputs {
        q: columns(x, source + q.0, q.1, query_width),
        k: keys,
        // They are not read.
        v: keys,
        lengths: None,
        starts: None,
        selection: op.selection().map(|selection| x.input(selection)),
    };
    let attention = attention::AttentionShape {
        batch: shape.batch,
        seq: shape.seq,
        heads: of.heads,
        kv_heads: of.kv_heads,
        head_dim: of.head_dim,
        causal: of.causal,
        scale: of.scale,
        window: None,
    };
    let inputs = indexer::LossInputs {
        indexer: inputs,
        indexer_lse: x.input(op::Indexer::NUM_INPUTS),
        attention,
        sources,
        lse: x.input(source + op.num_sources()),
    };
    (shape, inputs)
}

pub fn indexer_loss<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerLoss) {
    let (shape, inputs) = indexer_loss_inputs::<F>(x, op);
    let kl = indexer::loss(&shape, &inputs, x.workspace());
    let total: f64 = kl.iter().map(|kl| kl.to_f64()).sum();
    let [inverse_count, _] = op.term_inputs();
    let inverse_count = f64::from(x.input::<f32>(inverse_count)[0]);
    let (value, mode) = x.accumulator::<F>(0);
    mode.put(&mut value[0], F::from_f64(total * inverse_count));
}

pub fn indexer_loss_backward<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerLoss) {
    let (shape, inputs) = indexer_loss_inputs::<F>(x, op);
    let [inverse_count, weight] = op
        .term_inputs()
        .map(|input| f64::from(x.input::<f32>(input)[0]));
    let gradient = F::from_f64(inverse_count * weight);
    let gradients = indexer::Gradients {
        queries: x.output(0),
        keys: x.output(1),
        weights: x.output(2),
        weight_bias: x.accumulator(3),
        score_bias: x.accumulator(4),
    };
    indexer::loss_backward(&shape, gradient, &inputs, x.workspace(), gradients);
}
