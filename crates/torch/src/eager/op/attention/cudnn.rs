//! cuDNN's attention.

use super::super::super::dtype::DType;
use super::super::super::tensor::Tensor;
use super::super::pointwise::like;
use super::wanted;

/// Seed and offset of the random numbers, the result in the queries' order, and for backward the log-sum of each row; keeps the
/// inputs and all of these. Its backward asks for a workspace: the queries' gradient in fp32, a number for each row, and where
/// keys are shared their gradients for every query head.
pub(super) fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: Option<&Tensor>,
    dropout: f64,
) -> Tensor {
    const OP: &str = "_scaled_dot_product_cudnn_attention";
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
    let [forward, backward] = workspaces(query, key, value, dropout);
    let summed = if recorder.is_recording() { length } else { 0 };
    let log_sum = context.empty(OP, [batch, heads, summed, 1], DType::Float32);
    drop(context.workspace(OP, forward));
    recorder.save_output(&log_sum);
    recorder.save_output(&out);
    recorder.save_output(&offset);
    recorder.save_output(&seed);
    drop(log_sum);
    drop(seed);
    drop(offset);
    recorder.finish(&[&out], move |step| {
        const OP: &str = "_scaled_dot_product_cudnn_attention_backward";
        let (key, query, value) = (step.saved(1), step.saved(2), step.saved(3));
        let grad = match_order(step.grad(), step.saved(5));
        let query = like(query, query.dtype(), OP);
        let key = like(key, key.dtype(), OP);
        let value = like(value, value.dtype(), OP);
        drop(step.context.workspace(OP, backward));
        drop(grad);
        wanted(step, [query, key, value])
    });
    out
}

/// Of forward and backward. Blackwell's kernels write down which weights are left out, a bit each.
fn workspaces(query: &Tensor, key: &Tensor, value: &Tensor, dropout: f64) -> [u64; 2] {
    const ALIGNMENT: u64 = 256;
    const ALIGNMENT_ON_BLACKWELL: u64 = 128;
    /// Queries and keys of a block.
    const BLOCK: u64 = 128;
    let (heads, width) = (query.size(0) * query.size(1), query.size(3));
    let (queries, keys) = (query.size(2), key.size(2));
    let rows = heads * queries;
    let mut backward = rows * 4 + rows * width * 4;
    let is_shared = key.size(1) != query.size(1);
    if is_shared {
        backward += heads * keys * (width + value.size(3)) * query.dtype().size();
    }
    if !query.context().chip().writes_dropout() {
        return [ALIGNMENT, ALIGNMENT + backward];
    }
    let blocks = queries.div_ceil(BLOCK) * keys.div_ceil(BLOCK);
    let left_out = match dropout > 0.0 {
        true => heads * blocks * BLOCK * BLOCK / 8,
        false => 0,
    };
    let aligned = |bytes: u64, has_more: bool| match has_more {
        true => bytes + ALIGNMENT_ON_BLACKWELL,
        false => bytes,
    };
    [
        aligned(left_out, left_out > 0),
        aligned(backward + left_out, is_shared || left_out > 0),
    ]
}

/// cuDNN reads the gradient in any order, if only its last dimension lies in one piece; else it is copied to the result's.
fn match_order(grad: &Tensor, out: &Tensor) -> Tensor {
    if grad.strides().last() == 1 {
        return grad.clone();
    }
    out.context()
        .empty_strided("clone", out.sizes(), out.strides(), grad.dtype())
}
