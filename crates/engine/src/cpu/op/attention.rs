//! Attention, with its entropy and with a cache.

use cinch_graph::op;

use super::{columns, failed, first_positions};
use crate::arena::Element;
use crate::cpu::kernel::attention;
use crate::cpu::kernel::columns::{Columns, ColumnsMut};
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

/// The shape, and queries, keys and values, whose first source is input `first`; lengths and starts
/// are counted from input `extras` on.
fn attention_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::Attention,
    first: usize,
    extras: usize,
) -> (attention::AttentionShape, attention::Inputs<'a, F>) {
    let dims = x.input_type(first).shape;
    let shape = attention::AttentionShape {
        batch: dims.dims()[0],
        seq: dims.dims()[1],
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        causal: op.causal,
        scale: op.scale,
        window: op.window,
    };
    let [q, k, v] = op.places();
    let (query_width, key_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    let inputs = attention::Inputs {
        q: columns(x, first + q.0, q.1, query_width),
        k: columns(x, first + k.0, k.1, key_width),
        v: columns(x, first + v.0, v.1, key_width),
        lengths: op.lengths().map(|lengths| x.input(extras + lengths)),
        starts: op.starts().map(|starts| x.input(extras + starts)),
        selection: op.selected().map(|selected| x.input(extras + selected)),
    };
    (shape, inputs)
}

pub fn attend<F: Real + Element>(x: &Operands<'_>, op: &op::Attention) {
    let (shape, inputs) = attention_inputs::<F>(x, op, 0, op.num_sources());
    let dropout = x.dropout(op.dropout, Some(op.num_sources()));
    attention::forward(&shape, &inputs, dropout, x.output(0), x.output(1));
}

pub fn attend_backward<F: Real + Element>(x: &Operands<'_>, op: &op::Attention) {
    let sources = op.num_sources();
    let (shape, inputs) = attention_inputs::<F>(x, op, 1, sources + 3);
    let dropout = x.dropout(op.dropout, Some(sources + 3));
    let (query_width, key_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    let [dq, dk, dv] = match op.inputs {
        op::AttentionInputs::Packed => {
            let [q, k, v] = op.places();
            let blocks = [(q.1, query_width), (k.1, key_width), (v.1, key_width)];
            ColumnsMut::split(x.output(0), x.output_type(0).width(), blocks)
        }
        op::AttentionInputs::Separate => [
            ColumnsMut::whole(x.output(0), query_width),
            ColumnsMut::whole(x.output(1), key_width),
            ColumnsMut::whole(x.output(2), key_width),
        ],
    };
    let (o, lse) = (x.input(sources + 1), x.input(sources + 2));
    attention::backward(
        &shape,
        x.input(0),
        &inputs,
        o,
        lse,
        dropout,
        x.workspace(),
        &dq,
        &dk,
        &dv,
    );
}

/// The shape, and queries and keys, which are in the packed input `qkv`.
fn entropy_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::AttentionEntropy,
    qkv: usize,
) -> (attention::EntropyShape, [Columns<'a, F>; 2]) {
    let dims = x.input_type(qkv).shape;
    let shape = attention::EntropyShape {
        batch: dims.dims()[0],
        seq: dims.dims()[1],
        heads: op.heads,
        head_dim: op.head_dim,
        causal: op.causal,
        scale: op.scale,
        epsilon: op::AttentionEntropy::EPSILON,
    };
    let width = op.heads * op.head_dim;
    let parts = [0, width].map(|offset| columns(x, qkv, offset, width));
    (shape, parts)
}

pub fn entropy<F: Real + Element>(x: &Operands<'_>, op: &op::AttentionEntropy) {
    let (shape, [q, k]) = entropy_inputs::<F>(x, op, 0);
    let means = op.keep_means.then(|| x.output(1));
    attention::entropy(&shape, q, k, x.input(1), x.output(0), means);
}

pub fn entropy_backward<F: Real + Element>(x: &Operands<'_>, op: &op::AttentionEntropy) {
    let (shape, [q, k]) = entropy_inputs::<F>(x, op, 1);
    let width = op.heads * op.head_dim;
    let blocks = [(0, width), (width, width), (2 * width, width)];
    let gradients = ColumnsMut::split(x.output(0), x.output_type(0).width(), blocks);
    let kept = attention::EntropyRows {
        lse: x.input(2),
        means: x.input(3),
        gradient: x.input(0),
    };
    attention::entropy_backward(&shape, q, k, &kept, &gradients);
}

pub fn entropy_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::AttentionEntropy,
) -> Result<(), EngineError> {
    let (shape, [q, _]) = entropy_inputs::<F>(x, op, 0);
    let first = first_positions(x, 2)?;
    let slots = x.input_type(1).shape.dims()[2];
    let last = first.iter().copied().max().unwrap_or(0);
    if last.saturating_add(shape.seq) > slots {
        return Err(failed(x, format!("position {last} of {slots} slots")));
    }
    attention::entropy_cached(&shape, q, (x.input(1), slots), &first, x.output(0));
    Ok(())
}

pub fn attend_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::CachedAttention,
) -> Result<(), EngineError> {
    let sources = op.attention.num_sources();
    let (shape, inputs) = attention_inputs::<F>(x, &op.attention, 0, sources);
    let first = first_positions(x, op.positions())?;
    let overwritten = |&first: &usize| {
        let most = op.slots.saturating_sub(shape.seq);
        let window = op
            .attention
            .window
            .is_some_and(|window| window.saturating_add(shape.seq) <= op.slots.saturating_add(1));
        first > most && !window
    };
    if let Some(first) = first.iter().find(|first| overwritten(first)) {
        let problem = format!("position {first} and {} slots for keys", op.slots);
        return Err(failed(x, problem));
    }
    let cache = attention::Cache {
        keys: x.output(1),
        values: x.output(2),
        slots: op.slots,
    };
    attention::forward_cached(&shape, &inputs, &first, cache, x.output(0));
    Ok(())
}
