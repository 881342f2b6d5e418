//! The masks of transformers: what they cost to make, and whether there is one at all.

use cinch_architecture::Windows;

use crate::eager::op::{cast, creation, loss, pointwise, reduce, scan, view};
use crate::eager::{DType, Line, Tensor};

/// Which attention a model was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    Sdpa,
    Eager,
}

/// The masks of one forward, freed in this order.
pub struct Masks {
    full: Option<Tensor>,
    sliding: Option<Tensor>,
}

impl Masks {
    /// Makes the masks that the layers need, each at its line.
    pub fn make(
        windows: Windows,
        embeddings: &Tensor,
        position_ids: &Tensor,
        attention: Attention,
        [full, sliding]: [&'static Line; 2],
    ) -> Masks {
        let context = embeddings.context();
        let causal = || {
            context.at(full);
            causal(embeddings, position_ids, attention)
        };
        let windowed = |window| {
            context.at(sliding);
            sliding_window(embeddings, position_ids, attention, window)
        };
        match windows {
            Windows::Shared { window: None } => Masks {
                full: causal(),
                sliding: None,
            },
            Windows::Shared {
                window: Some(window),
            } => Masks {
                full: None,
                sliding: windowed(window),
            },
            Windows::ByKind { sliding } => Masks {
                full: causal(),
                sliding: sliding.and_then(|layers| windowed(layers.window)),
            },
        }
    }

    /// The mask that a layer is given.
    pub fn of_layer(&self, windows: Windows, layer: u64) -> Option<&Tensor> {
        self.of_kind(match windows {
            Windows::Shared { window } => window.is_some(),
            Windows::ByKind { sliding } => sliding.is_some_and(|sliding| layer >= sliding.first),
        })
    }

    pub fn of_kind(&self, slides: bool) -> Option<&Tensor> {
        if slides { &self.sliding } else { &self.full }.as_ref()
    }
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
    let packed = scan::cumsum(context.empty("ne", [batch, length], DType::Bool), 1);
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
    find_packed_sequences(position_ids, embeddings.size(0));
    causal_without_positions(embeddings, attention)
}

/// The same of a model that gives no position ids: several sequences in one row are not looked for.
pub fn causal_without_positions(embeddings: &Tensor, attention: Attention) -> Option<Tensor> {
    match attention {
        Attention::Sdpa => None,
        Attention::Eager => Some(additive(embeddings, allowed(embeddings, before))),
    }
}

/// `create_sliding_window_causal_mask`: SDPA has no flag for a window, and is given booleans as soon as the sequence fills
/// one; eager attention always has its mask.
fn sliding_window(
    embeddings: &Tensor,
    position_ids: &Tensor,
    attention: Attention,
    window: u64,
) -> Option<Tensor> {
    find_packed_sequences(position_ids, embeddings.size(0));
    match attention {
        Attention::Sdpa if embeddings.size(1) < window => None,
        Attention::Sdpa => Some(allowed(embeddings, before_and_within)),
        Attention::Eager => Some(additive(embeddings, allowed(embeddings, before_and_within))),
    }
}

/// `create_causal_mask` with a padding mask that hides nothing. It is read as booleans; SDPA's flag serves once their sum says
/// that all are true, which is read; eager attention gets a mask for each row of the batch.
pub fn causal_with_padding(
    embeddings: &Tensor,
    padding: &Tensor,
    attention: Attention,
) -> Option<Tensor> {
    let flags = cast::to(padding, DType::Bool);
    match attention {
        Attention::Sdpa => {
            let sum = flags.context().empty("sum", [], DType::Int64);
            drop(cast::to(&flags, DType::Int64));
            let all = pointwise::apply(&sum, "eq", DType::Bool);
            drop(sum);
            drop(all);
            None
        }
        Attention::Eager => {
            let allowed = allowed_of_rows(embeddings, &flags);
            Some(additive(embeddings, allowed))
        }
    }
}

/// `sdpa_mask` of the causal rule and the padding.
fn allowed_of_rows(embeddings: &Tensor, flags: &Tensor) -> Tensor {
    let (context, batch, length) = (embeddings.context(), embeddings.size(0), embeddings.size(1));
    let batches = creation::arange(context, batch, DType::Int64);
    let heads = creation::arange(context, 1, DType::Int64);
    let queries = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let keys = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let mut allowed = creation::filled(context, [], DType::Bool);
    let earlier = before(
        &view::view(&queries, [1, 1, length, 1]),
        &view::view(&keys, [1, 1, 1, length]),
    );
    allowed = joined(&allowed, earlier);
    // Indices of rows and of keys are spread over each other before the flags are looked up.
    let looked_up = {
        let row = context.empty("index", [batch, 1, 1, length], DType::Int64);
        let key = context.empty("index", [batch, 1, 1, length], DType::Int64);
        let found = context.empty("index", [batch, 1, 1, length], flags.dtype());
        drop(key);
        drop(row);
        found
    };
    allowed = joined(&allowed, looked_up);
    drop(batches);
    drop(heads);
    drop(queries);
    drop(keys);
    allowed
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

/// `sdpa_mask`: which key a query may see, from their positions. One matrix of booleans, seen by every row of the batch.
fn allowed(embeddings: &Tensor, rule: fn(&Tensor, &Tensor) -> Tensor) -> Tensor {
    let (context, batch, length) = (embeddings.context(), embeddings.size(0), embeddings.size(1));
    let batches = creation::arange(context, batch, DType::Int64);
    let heads = creation::arange(context, 1, DType::Int64);
    let queries = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let keys = pointwise::add_number(creation::arange(context, length, DType::Int64));
    let allowed = rule(
        &view::view(&queries, [1, 1, length, 1]),
        &view::view(&keys, [1, 1, 1, length]),
    );
    let allowed = view::expand(allowed, [batch, 1, length, length]);
    drop(batches);
    drop(heads);
    drop(queries);
    drop(keys);
    allowed
}

/// Keys up to the query.
fn before(query: &Tensor, key: &Tensor) -> Tensor {
    pointwise::compare(key, query, DType::Bool)
}

/// `and_masks` of the window and the causal rule: starts from a single true, to which each rule is joined.
fn before_and_within(query: &Tensor, key: &Tensor) -> Tensor {
    let mut result = creation::filled(query.context(), [], DType::Bool);
    let within = pointwise::compare(key, pointwise::add_number(query), DType::Bool);
    result = joined(&result, within);
    result = joined(&result, before(query, key));
    result
}

/// `a & b`.
fn joined(a: &Tensor, b: Tensor) -> Tensor {
    pointwise::compare(a, b, DType::Bool)
}

/// `eager_mask`: the booleans as numbers of the model's type.
fn additive(embeddings: &Tensor, allowed: Tensor) -> Tensor {
    let (context, dtype) = (embeddings.context(), embeddings.dtype());
    let zero = context.empty("tensor", [], dtype);
    let smallest = context.empty("tensor", [], dtype);
    let mask = context.empty("where", allowed.sizes(), dtype);
    drop((smallest, zero, allowed));
    mask
}
