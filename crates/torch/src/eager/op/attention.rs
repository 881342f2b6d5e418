//! `scaled_dot_product_attention` as it is dispatched on a Hopper card: half types go to cuDNN, fp32 to
//! the memory-efficient kernel, and to plain ops where query heads share keys. Kernels take a mask as numbers of the
//! queries' type, which they add to the scores and keep for backward.

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::{Grads, Step, grads};
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::pointwise::{self, like};
use super::{cast, dropout, matmul, softmax, view};

/// Attention of `query` over `key` and `value`, each [batch, heads, length, width]; fewer heads of keys
/// are shared by groups of query heads.
pub fn scaled_dot_product(query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
    let value = autocast::lower(value);
    let key = autocast::lower(key);
    let query = autocast::lower(query);
    let out = if query.dtype().is_half() {
        cudnn(&query, &key, &value, None)
    } else if key.size(1) == query.size(1) {
        efficient(&query, &key, &value, None)
    } else {
        math(&query, &key, &value)
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
) -> Tensor {
    let value = autocast::lower(value);
    let key = autocast::lower(key);
    let query = autocast::lower(query);
    let bias = additive(mask, query.dtype());
    let out = if query.dtype().is_half() {
        cudnn(&query, &key, &value, Some(&bias))
    } else {
        let bias = aligned(bias);
        efficient(&query, &key, &value, Some(&bias))
    };
    drop(query);
    drop(key);
    drop(value);
    out
}

/// The same with a bias, [1, heads, queries, keys], that is added to the scores. No kernel reads one whose last dimension does not lie
/// in one piece, and only the memory-efficient one gives it a gradient.
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
    let out = if bias.strides().last() != 1 {
        // Autocast has done its part: the ops inside see none.
        autocast::with(query.context(), None, || {
            math_with_bias(&query, &key, &value, &bias, dropout)
        })
    } else if query.dtype().is_half() && !bias.requires_grad() {
        cudnn(&query, &key, &value, Some(&bias))
    } else {
        let (batch, heads, queries) = (query.size(0), query.size(1), query.size(2));
        let spread = [batch, heads, queries, key.size(2)];
        let bias = view::expand(aligned(bias.clone()), spread);
        efficient(&query, &key, &value, Some(&bias))
    };
    drop(query);
    drop(key);
    drop(value);
    drop(bias);
    out
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

/// The memory-efficient kernel reads rows of the bias eight numbers at a time: others are padded in a copy.
fn aligned(bias: Tensor) -> Tensor {
    const NUMBERS: u64 = 8;
    let mut sizes = bias.sizes();
    let (last, keys) = (sizes.len() - 1, sizes.last());
    if keys.is_multiple_of(NUMBERS) {
        return bias;
    }
    sizes.as_mut_slice()[last] = keys.next_multiple_of(NUMBERS);
    let recorder = bias.context().record(&[&bias]);
    let padded = bias.context().empty("constant_pad_nd", sizes, bias.dtype());
    recorder.finish(&[&padded], |step| {
        let dtype = step.grad().dtype();
        let cut = step
            .context
            .empty("constant_pad_nd", step.input_sizes(), dtype);
        grads![Some(cut)]
    });
    view::slice(padded, last, keys)
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

/// cuDNN: seed and offset of the random numbers, the result in the queries' order, and for backward the log-sum of each row; keeps the
/// inputs and all of these. Its backward asks for a workspace: the queries' gradient in fp32, a number for
/// each row, and where keys are shared their gradients for every query head.
fn cudnn(query: &Tensor, key: &Tensor, value: &Tensor, bias: Option<&Tensor>) -> Tensor {
    const OP: &str = "_scaled_dot_product_cudnn_attention";
    const ALIGNMENT: u64 = 256;
    let context = query.context().clone();
    context.uses(|libraries| libraries.cudnn = true);
    let mut recorder = context.record(&[query, key, value]);
    recorder.save_if(bias.is_some(), bias.unwrap_or(query));
    recorder.save(key);
    recorder.save(query);
    recorder.save(value);
    let seed = context.empty(OP, [], DType::Int64);
    let offset = context.empty(OP, [], DType::Int64);
    let out = like(query, query.dtype(), OP);
    let (batch, heads, length) = (query.size(0), query.size(1), query.size(2));
    let summed = if recorder.is_recording() { length } else { 0 };
    let log_sum = context.empty(OP, [batch, heads, summed, 1], DType::Float32);
    drop(context.workspace(OP, ALIGNMENT));
    recorder.save_output(&log_sum);
    recorder.save_output(&out);
    recorder.save_output(&offset);
    recorder.save_output(&seed);
    drop(log_sum);
    drop(seed);
    drop(offset);
    let width = query.size(3);
    let rows = batch * heads * length;
    let mut workspace = ALIGNMENT + rows * 4 + rows * width * 4;
    if key.size(1) != heads {
        workspace += batch * heads * key.size(2) * (width + value.size(3)) * query.dtype().size();
    }
    recorder.finish(&[&out], move |step| {
        const OP: &str = "_scaled_dot_product_cudnn_attention_backward";
        let (key, query, value) = (step.saved(1), step.saved(2), step.saved(3));
        let grad = match_order(step.grad(), step.saved(5));
        let query = like(query, query.dtype(), OP);
        let key = like(key, key.dtype(), OP);
        let value = like(value, value.dtype(), OP);
        drop(step.context.workspace(OP, workspace));
        drop(grad);
        wanted(step, [query, key, value])
    });
    out
}

/// The kernels make all three gradients; those that nobody wants go first.
fn wanted(step: &Step<'_>, gradients: [Tensor; 3]) -> Grads {
    let numbered = gradients.into_iter().enumerate();
    numbered
        .map(|(input, gradient)| step.needs(input).then_some(gradient))
        .collect()
}

/// cuDNN reads the gradient in any order, if only its last dimension lies in one piece; else it is copied to the result's.
fn match_order(grad: &Tensor, out: &Tensor) -> Tensor {
    if grad.strides().last() == 1 {
        return grad.clone();
    }
    out.context()
        .empty_strided("clone", out.sizes(), out.strides(), grad.dtype())
}

/// The memory-efficient kernel: the result, and the log-sum of each row in tiles of 32. Keeps the inputs and
/// both. Its backward multiplies result and gradient first, sums the rows, and gathers the queries' gradient
/// in a workspace of tiles.
fn efficient(query: &Tensor, key: &Tensor, value: &Tensor, bias: Option<&Tensor>) -> Tensor {
    const OP: &str = "_scaled_dot_product_efficient_attention";
    let context = query.context().clone();
    // The kernel takes [batch, length, heads, width]: views.
    let mut inputs = vec![query, key, value];
    inputs.extend(bias);
    let mut recorder = context.record(&inputs);
    recorder.save_if(bias.is_some(), bias.unwrap_or(query));
    recorder.save(key);
    recorder.save(query);
    recorder.save(value);
    let out = token_major(query, OP);
    let (batch, heads, length, width) =
        (query.size(0), query.size(1), query.size(2), query.size(3));
    let summed = if recorder.is_recording() { length } else { 0 };
    let log_sum = context.empty(OP, [batch, heads, summed.div_ceil(32) * 32], DType::Float32);
    recorder.save_output(&log_sum);
    recorder.save_output(&out);
    drop(log_sum);
    let bias_sizes = bias.map(|_| [batch, heads, length, key.size(2)]);
    recorder.finish(&[&out], move |step| {
        const OP: &str = "_scaled_dot_product_efficient_attention_backward";
        /// Queries of a tile.
        const ROWS: u64 = 64;
        let (key, query, value) = (step.saved(1), step.saved(2), step.saved(3));
        let grad = step.grad();
        let query = token_major(query, OP);
        let key = token_major(key, OP);
        let value = token_major(value, OP);
        let wants_bias = bias_sizes.filter(|_| step.needs(3));
        let bias = wants_bias.map(|sizes| bias_gradient(step, sizes, grad.dtype()));
        let rows = [batch, heads, length];
        let ordered = if grad.dtype().is_half() {
            // The kernel multiplies by itself.
            step.context.empty(OP, rows, DType::Float32)
        } else {
            let product = like(grad, DType::Float32, OP);
            let by_tokens = [batch, length, heads];
            let delta = step.context.empty(OP, by_tokens, DType::Float32);
            let ordered = step.context.empty(OP, rows, DType::Float32);
            drop(delta);
            drop(product);
            ordered
        };
        // A tile's columns, and a lock and counters for each tile.
        let columns = if width <= 64 { 64 } else { 128 };
        let tile = ROWS * columns * 4 + 16;
        let workspace = batch * heads * length.div_ceil(ROWS) * width.div_ceil(columns) * tile;
        let workspace = step.context.workspace(OP, workspace);
        drop(ordered);
        drop(workspace);
        let mut gradients = wanted(step, [query, key, value]);
        if bias_sizes.is_some() {
            gradients.push(bias);
        }
        gradients
    });
    out
}

/// The gradient of a bias, for every row of the batch: rows are padded to whole vectors.
fn bias_gradient(step: &Step<'_>, sizes: [u64; 4], dtype: DType) -> Tensor {
    const NUMBERS: u64 = 16;
    const OP: &str = "_scaled_dot_product_efficient_attention_backward";
    let mut padded = sizes;
    padded[3] = padded[3].next_multiple_of(NUMBERS);
    let whole = step.context.empty(OP, padded, dtype);
    view::slice(whole, 3, sizes[3])
}

/// Plain ops, where no kernel serves: fp32 with shared keys. The causal mask is made in the model's type, and keys
/// and values are copied for every query head.
fn math(query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
    let context = query.context().clone();
    let query = pointwise::mul_number(query);
    let (length, keys) = (query.size(2), key.size(2));
    let mask = {
        let ones = context.empty("ones", [length, keys], DType::Bool);
        let allowed = like(&ones, DType::Bool, "tril");
        drop(ones);
        let mask = additive(&allowed, query.dtype());
        drop(allowed);
        mask
    };
    let groups = query.size(1) / key.size(1);
    let key = view::repeat_interleave(key, groups, 1);
    let value = view::repeat_interleave(value, groups, 1);
    let scaled = pointwise::mul_number(view::transpose(&key, 2, 3));
    let scores = matmul::matmul(&query, &scaled);
    drop(scaled);
    let scores = matmul::add_in_place(scores, &mask);
    let weights = softmax::safe_softmax(&scores);
    drop(scores);
    let out = matmul::matmul(&weights, &value);
    drop((key, value));
    drop(query);
    drop(mask);
    // The function returns them too: they go when its caller takes the result.
    drop(weights);
    out
}

/// Plain ops with a bias and dropout. Half types are computed in fp32.
fn math_with_bias(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: &Tensor,
    dropout: f64,
) -> Tensor {
    let dtype = query.dtype();
    let raised_query = cast::to(query, DType::Float32);
    let raised_key = cast::to(key, DType::Float32);
    let raised_value = cast::to(value, DType::Float32);
    let scaled_query = pointwise::mul_number(&raised_query);
    let scaled_key = pointwise::mul_number(view::transpose(&raised_key, 2, 3));
    let scores = matmul::matmul(&scaled_query, &scaled_key);
    drop(scaled_key);
    let scores = matmul::add_in_place(scores, bias);
    let mut weights = softmax::safe_softmax(&scores);
    drop(scores);
    weights = dropout::dropout(&weights, dropout);
    // The function gives both back: the last of them is made first, and goes when its caller takes the result.
    let returned = cast::to(&weights, dtype);
    let product = matmul::matmul(&weights, &raised_value);
    let out = cast::to(&product, dtype);
    drop(product);
    drop(weights);
    drop(scaled_query);
    drop(raised_value);
    drop(raised_key);
    drop(raised_query);
    drop(returned);
    out
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
