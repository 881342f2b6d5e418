//! `scaled_dot_product_attention`. Which kernel runs depends on the card, the type, the width of the heads and the mask
//! ([`backend`]); what is kept and what is taken meanwhile depends on the kernel. Kernels take a mask as numbers of the queries'
//! type, which they add to the scores and keep for backward.

mod backend;
mod cudnn;
mod efficient;
mod flash;
mod math;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::{Grads, Step};
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::view;
use backend::{Asked, Backend};

/// How queries see keys.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// Each those before it alone, where no mask says more.
    pub is_causal: bool,
    /// The probability with which a weight is left out.
    pub dropout: f64,
}

/// Attention of `query` over `key` and `value`, each [batch, heads, length, width]; fewer heads of keys
/// are shared by groups of query heads.
pub fn scaled_dot_product(query: &Tensor, key: &Tensor, value: &Tensor, how: Attend) -> Tensor {
    let value = autocast::lower(value);
    let key = autocast::lower(key);
    let query = autocast::lower(query);
    let out = match Asked::of(&query, &key, &value, None, how.dropout).backend() {
        Backend::Cudnn => cudnn::attend(&query, &key, &value, None, how.dropout),
        Backend::Flash => flash::attend(&query, &key, &value, how.dropout),
        Backend::Efficient => efficient::attend(&query, &key, &value, None, how.dropout),
        Backend::Math => math::attend(&query, &key, &value, None, how),
    };
    drop(query);
    drop(key);
    drop(value);
    out
}

/// The same under a mask of booleans, [batch, 1, queries, keys], with as many heads of keys as of queries.
pub fn masked_scaled_dot_product(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Tensor,
    dropout: f64,
) -> Tensor {
    let value = autocast::lower(value);
    let key = autocast::lower(key);
    let query = autocast::lower(query);
    let bias = additive(mask, query.dtype());
    let out = with_bias(&query, &key, &value, bias, dropout);
    drop(query);
    drop(key);
    drop(value);
    out
}

/// The same with a bias, [1, heads, queries, keys], that is added to the scores.
pub fn biased_scaled_dot_product(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: &Tensor,
    dropout: f64,
) -> Tensor {
    let bias = autocast::lower(bias);
    let value = autocast::lower(value);
    let key = autocast::lower(key);
    let query = autocast::lower(query);
    let out = with_bias(&query, &key, &value, bias.clone(), dropout);
    drop(query);
    drop(key);
    drop(value);
    drop(bias);
    out
}

/// Attention with numbers for the scores, which are given away.
fn with_bias(query: &Tensor, key: &Tensor, value: &Tensor, bias: Tensor, dropout: f64) -> Tensor {
    match Asked::of(query, key, value, Some(&bias), dropout).backend() {
        Backend::Cudnn => cudnn::attend(query, key, value, Some(&bias), dropout),
        Backend::Efficient => {
            let (batch, heads, queries) = (query.size(0), query.size(1), query.size(2));
            let spread = [batch, heads, queries, key.size(2)];
            let bias = view::expand(efficient::aligned(bias), spread);
            efficient::attend(query, key, value, Some(&bias), dropout)
        }
        Backend::Flash | Backend::Math => {
            let how = Attend {
                is_causal: false,
                dropout,
            };
            math::attend(query, key, value, Some(&bias), how)
        }
    }
}

/// The mask as numbers to add to the scores, of every row of the batch: 0 and −∞.
fn additive(mask: &Tensor, dtype: DType) -> Tensor {
    let context = mask.context();
    let zero = context.empty("scalar_tensor", [], dtype);
    let infinity = context.empty("scalar_tensor", [], dtype);
    let bias = context.empty("where", mask.sizes(), dtype);
    drop(infinity);
    drop(zero);
    bias
}

/// A result laid out [batch, length, heads, width] and seen as [batch, heads, length, width].
fn token_major(tensor: &Tensor, op: &'static str) -> Tensor {
    let sizes = tensor.sizes();
    let strides = Dims::from([
        sizes[1] * sizes[2] * sizes[3],
        sizes[3],
        sizes[1] * sizes[3],
        1,
    ]);
    tensor
        .context()
        .empty_strided(op, sizes, strides, tensor.dtype())
}

/// The kernels make all three gradients; those that nobody wants go first.
fn wanted(step: &Step<'_>, gradients: [Tensor; 3]) -> Grads {
    let numbered = gradients.into_iter().enumerate();
    numbered
        .map(|(input, gradient)| step.needs(input).then_some(gradient))
        .collect()
}

/// Keys for every query head: `repeat_kv` of transformers, a copy.
pub fn repeat_heads(tensor: &Tensor, groups: u64) -> Tensor {
    if groups == 1 {
        return tensor.clone();
    }
    let (batch, heads, length, width) = (
        tensor.size(0),
        tensor.size(1),
        tensor.size(2),
        tensor.size(3),
    );
    let spread = view::expand(
        view::unsqueeze(tensor, 2),
        [batch, heads, groups, length, width],
    );
    view::reshape(spread, [batch, heads * groups, length, width])
}
