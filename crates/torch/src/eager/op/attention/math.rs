//! Plain ops, where no kernel serves.

use super::super::super::autocast;
use super::super::super::dtype::DType;
use super::super::super::tensor::Tensor;
use super::super::pointwise::{self, like};
use super::super::{cast, dropout, matmul, softmax, view};
use super::{Attend, additive};

/// Half types are computed in fp32. A causal mask is made in the type of the scores, and keys and values that are shared are
/// copied for every query head.
pub(super) fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: Option<&Tensor>,
    how: Attend,
) -> Tensor {
    // Autocast has done its part: the ops inside see none.
    autocast::with(query.context(), None, || ops(query, key, value, bias, how))
}

fn ops(query: &Tensor, key: &Tensor, value: &Tensor, bias: Option<&Tensor>, how: Attend) -> Tensor {
    let dtype = query.dtype();
    let raised_query = cast::to(query, DType::Float32);
    let raised_key = cast::to(key, DType::Float32);
    let raised_value = cast::to(value, DType::Float32);
    let scaled_query = pointwise::mul_number(&raised_query);
    let mask = match bias {
        Some(bias) => Some(bias.clone()),
        None => how
            .is_causal
            .then(|| causal_mask(&scaled_query, key.size(2))),
    };
    let groups = query.size(1) / key.size(1);
    let keys = for_every_head(&raised_key, groups);
    let values = for_every_head(&raised_value, groups);
    let scaled_key = pointwise::mul_number(view::transpose(&keys, 2, 3));
    let mut scores = matmul::matmul(&scaled_query, &scaled_key);
    drop(scaled_key);
    if let Some(mask) = &mask {
        scores = matmul::add_in_place(scores, mask);
    }
    let mut weights = softmax::safe_softmax(&scores);
    drop(scores);
    weights = dropout::dropout(&weights, how.dropout);
    // The function gives both back: the last of them is made first, and goes when its caller takes the result.
    let returned = cast::to(&weights, dtype);
    let product = matmul::matmul(&weights, &values);
    let out = cast::to(&product, dtype);
    drop(product);
    drop(weights);
    drop((keys, values));
    drop(scaled_query);
    drop(mask);
    drop(raised_value);
    drop(raised_key);
    drop(raised_query);
    drop(returned);
    out
}

fn causal_mask(query: &Tensor, keys: u64) -> Tensor {
    let context = query.context();
    let ones = context.empty("ones", [query.size(2), keys], DType::Bool);
    let allowed = like(&ones, DType::Bool, "tril");
    drop(ones);
    let mask = additive(&allowed, query.dtype());
    drop(allowed);
    mask
}

fn for_every_head(tensor: &Tensor, groups: u64) -> Tensor {
    match groups {
        1 => tensor.clone(),
        _ => view::repeat_interleave(tensor, groups, 1),
    }
}
