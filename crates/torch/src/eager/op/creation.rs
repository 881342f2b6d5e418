//! Tensors from nothing.

use super::super::context::Context;
use super::super::dtype::DType;
use super::super::shape::Dims;
use super::super::tensor::Tensor;

/// `torch.zeros`, `ones`, `full`, `empty`, `randint`: one allocation, filled in place.
pub fn filled(context: &Context, sizes: impl Into<Dims>, dtype: DType) -> Tensor {
    context.empty("fill", sizes, dtype)
}

/// `torch.arange`.
pub fn arange(context: &Context, length: u64, dtype: DType) -> Tensor {
    context.empty("arange", [length], dtype)
}
