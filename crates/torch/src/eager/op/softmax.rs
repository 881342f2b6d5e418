//! Softmax and log-softmax: one result, which is kept. The gradient is one tensor; softmax's kernel takes the product of
//! gradient and result as its input, so there is another while it runs, and a third where the gradient's elements stand in
//! another order.

use std::borrow::Borrow;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::pointwise::like;
use super::{cast, reduce, view};

/// `softmax(x, dim, dtype)`. A half tensor to fp32 is one kernel; a bfloat16 one is cast first. Under
/// autocast the result is fp32.
pub fn softmax(x: impl Borrow<Tensor>, dtype: Option<DType>) -> Tensor {
    normalised(x, dtype, false)
}

pub fn log_softmax(x: impl Borrow<Tensor>, dtype: Option<DType>) -> Tensor {
    normalised(x, dtype, true)
}

fn softmax_gradient(grad: &Tensor, dtype: DType) -> Tensor {
    let context = grad.context();
    let out = context.empty("_softmax_backward_data", grad.sizes(), dtype);
    let product = like(grad, grad.dtype(), "mul");
    let contiguous = view::contiguous(&product);
    drop(contiguous);
    drop(product);
    out
}

fn normalised(x: impl Borrow<Tensor>, dtype: Option<DType>, logarithmic: bool) -> Tensor {
    let wanted = dtype.or_else(|| autocast::wants_float(x.borrow()).then_some(DType::Float32));
    let wanted = wanted.unwrap_or_else(|| x.borrow().dtype());
    let in_kernel = x.borrow().dtype() == DType::Float16 && wanted == DType::Float32;
    let input = if in_kernel {
        x.borrow().clone()
    } else {
        cast::to(x.borrow(), wanted)
    };
    let context = input.context().clone();
    let mut recorder = context.record(&[&input]);
    let op = if logarithmic {
        "_log_softmax"
    } else {
        "_softmax"
    };
    let out = context.empty(op, input.sizes(), wanted);
    recorder.save_output(&out);
    let back = input.dtype();
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        grads![Some(match logarithmic {
            true => step
                .context
                .empty("_log_softmax_backward_data", grad.sizes(), back),
            false => softmax_gradient(grad, back),
        })]
    });
    drop(input);
    drop(x);
    out
}

/// `_safe_softmax`: a softmax whose rows are filled with zeros where scores are all −∞: compared, reduced to rows, filled in
/// place.
pub fn safe_softmax(scores: &Tensor) -> Tensor {
    let context = scores.context().clone();
    let mut recorder = context.record(&[scores]);
    let (sizes, dtype) = (scores.sizes(), scores.dtype());
    let out = context.empty("_softmax", sizes, dtype);
    let masked = context.empty("isneginf", sizes, DType::Bool);
    let last = sizes.len() - 1;
    let rows = reduce::plain(&masked, &[last], true, DType::Bool);
    let zero = context.empty("scalar_tensor", [], dtype);
    drop(zero);
    drop(rows);
    drop(masked);
    recorder.save_output(&out);
    recorder.finish(&[&out], |step| {
        grads![Some(softmax_gradient(step.grad(), step.grad().dtype()))]
    });
    out
}
