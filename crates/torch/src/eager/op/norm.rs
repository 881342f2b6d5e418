//! Normalisation.

use std::borrow::Borrow;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::pointwise::like;
use super::reduce;

/// `F.layer_norm`: the result, then mean and 1/σ of each row in fp32; keeps the input and both. Under
/// autocast in fp32. The gradients of input, weight and bias come from one op.
pub fn layer_norm(x: impl Borrow<Tensor>, weight: &Tensor, bias: &Tensor) -> Tensor {
    let shift = autocast::raise(bias);
    let scale = autocast::raise(weight);
    let input = autocast::raise(x.borrow());
    let context = input.context().clone();
    let mut recorder = context.record(&[&input, &scale, &shift]);
    recorder.save(&shift);
    recorder.save(&input);
    recorder.save(&scale);
    let rows = input.numel() / input.sizes().last();
    let out = context.empty("native_layer_norm", input.sizes(), input.dtype());
    let mut statistics = input.sizes();
    let last = statistics.len() - 1;
    statistics.as_mut_slice()[last] = 1;
    let mean = context.empty("native_layer_norm", statistics, DType::Float32);
    let deviation = context.empty("native_layer_norm", statistics, DType::Float32);
    recorder.save_output(&mean);
    recorder.save_output(&deviation);
    drop(mean);
    drop(deviation);
    let (columns, sizes) = (input.sizes().last(), scale.sizes());
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        let input = step
            .needs(0)
            .then(|| like(grad, grad.dtype(), "native_layer_norm_backward"));
        let mut of_weights = [1, 2].map(|index| {
            step.needs(index).then(|| {
                step.context
                    .empty("native_layer_norm_backward", sizes, grad.dtype())
            })
        });
        sum_in_two_steps(grad, rows, columns, &mut of_weights);
        let [scale, shift] = of_weights;
        grads![input, scale, shift]
    });
    drop(input);
    drop(scale);
    drop(shift);
    drop(x);
    out
}

/// With many short rows the gradients of weight and bias are summed in two steps: a row of partial sums for every 32 rows first, of
/// which a sum is made that takes the gradient's place.
fn sum_in_two_steps(grad: &Tensor, rows: u64, columns: u64, gradients: &mut [Option<Tensor>; 2]) {
    const ROWS_PER_BLOCK: u64 = 32;
    const MAX_BLOCKS: u64 = 32 * 1024;
    let context = grad.context();
    if rows <= 64 * 1024 || columns / 32 >= context.chip().multiprocessors / 2 {
        return;
    }
    let blocks = rows
        .div_ceil(ROWS_PER_BLOCK)
        .min(MAX_BLOCKS / columns.div_ceil(32));
    let partial = || context.empty("layer norm partial sums", [blocks, columns], grad.dtype());
    let mut parts: Vec<Option<Tensor>> = gradients
        .iter()
        .map(|gradient| gradient.is_some().then(partial))
        .collect();
    for (gradient, part) in gradients.iter_mut().zip(&parts) {
        if let Some(part) = part {
            *gradient = Some(reduce::plain(part, &[0], false, grad.dtype()));
        }
    }
    while let Some(last) = parts.pop() {
        drop(last);
    }
}

/// `x.norm(dim=-1, keepdim=True)`: a number a row; keeps input and result. The gradient is x · (grad / norm), zero where
/// the norm is.
pub fn row_norm(x: impl Borrow<Tensor>) -> Tensor {
    let input = autocast::raise(x.borrow());
    let context = input.context().clone();
    let mut recorder = context.record(&[&input]);
    recorder.save(&input);
    let last = input.dim() - 1;
    let out = reduce::plain(&input, &[last], true, input.dtype());
    recorder.save_output(&out);
    recorder.finish(&[&out], |step| {
        let (input, grad) = (step.saved(0), step.grad());
        // grad · (x / norm), zeros put in place where the norm is zero.
        let quotient = like(input, grad.dtype(), "div");
        let zero = like(grad, DType::Bool, "eq");
        let product = like(input, grad.dtype(), "mul");
        drop(zero);
        drop(quotient);
        grads![Some(product)]
    });
    drop(input);
    drop(x);
    out
}
