//! Conversions of the element type.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::pointwise::like;

/// `x.to(dtype)`: itself where the type is right already, else one copy. Keeps nothing; the
/// gradient is cast back.
pub fn to(x: impl Borrow<Tensor>, dtype: DType) -> Tensor {
    let tensor = x.borrow();
    if tensor.dtype() == dtype {
        return tensor.clone();
    }
    let context = tensor.context();
    let recorder = context.record(&[tensor]);
    let out = like(tensor, dtype, "_to_copy");
    if dtype.is_floating() {
        recorder.finish(&[&out], |step| {
            grads![Some(to(step.grad(), step.input_dtype()))]
        });
    }
    out
}
