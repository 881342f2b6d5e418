//! The masks of transformers: what they cost to make, and whether there is one at all.

use crate::eager::op::{cast, creation, loss, pointwise, reduce, view};
use crate::eager::{Context, DType, Tensor};

/// Which attention a model was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    Sdpa,
    Eager,
}

/// Looks for several sequences in one row: differences of the position ids, compared and summed. Temporaries only,
/// since training batches have none.
fn find_packed_sequences(position_ids: &Tensor, batch: u64) {
    let context = position_ids.context();
    let length = position_ids.sizes().last();
    let expanded = view::expand(position_ids, [batch, length]);
    // The compare and the sum see the expanded ids: rows of their own.
    let first = context.empty("sub", [batch, 1], DType::Int64);
    let joined = loss::pad_one(&expanded);
    let difference = context.empty("diff", [batch, length], DType::Int64);
    drop(joined);
    let packed = {
        let changes = context.empty("ne", [batch, length], DType::Bool);
        let sums = context.empty("cumsum", [batch, length], DType::Int64);
        // cumsum works on a copy of the flags as integers.
        drop(context.empty("cumsum", [batch, length], DType::Int64));
        drop(changes);
        sums
    };
    let zeros = context.empty("eq", [batch], DType::Bool);
    let all = reduce::plain(&zeros, &[0], false, DType::Bool);
    drop(zeros);
    drop(all);
    drop(first);
    drop(difference);
    drop(packed);
}

/// `create_causal_mask`: none for SDPA, which has the flag for it; for eager attention a mask of the batch in the
/// model's type.
pub fn causal(embeddings: &Tensor, position_ids: &Tensor, attention: Attention) -> Option<Tensor> {
    let batch = embeddings.size(0);
    let length = embeddings.size(1);
    find_packed_sequences(position_ids, batch);
    match attention {
        Attention::Sdpa => None,
        Attention::Eager => Some(additive(
            embeddings.context(),
            batch,
            length,
            embeddings.dtype(),
        )),
    }
}

/// `create_bidirectional_mask` without padding, or with a padding mask that hides nothing: it is read as booleans, found
/// to be all true, and no mask is made.
pub fn bidirectional(padding: Option<&Tensor>) -> Option<Tensor> {
    if let Some(padding) = padding {
        let flags = cast::to(padding, DType::Bool);
        let dims: Vec<usize> = (0..flags.dim()).collect();
        drop(reduce::plain(&flags, &dims, false, DType::Bool));
        drop(flags);
    }
    None
}

/// `eager_mask`: booleans by broadcast comparison of positions, then numbers of the model's type.
fn additive(context: &Context, batch: u64, length: u64, dtype: DType) -> Tensor {
    let batches = creation::arange(context, batch, DType::Int64);
    let heads = creation::arange(context, 1, DType::Int64);
    let queries = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let keys = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let query = view::view(&queries, [1, 1, length, 1]);
    let key = view::view(&keys, [1, 1, 1, length]);
    let allowed = pointwise::compare(key, query, DType::Bool);
    let allowed = view::expand(allowed, [batch, 1, length, length]);
    drop((batches, heads, queries, keys));
    let zero = context.empty("tensor", [], dtype);
    let smallest = context.empty("tensor", [], dtype);
    let mask = context.empty("where", allowed.sizes(), dtype);
    drop((smallest, zero, allowed));
    mask
}
