//! Prefix sums.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::tensor::Tensor;

/// What a device-wide scan takes while it runs, as measured: the same for 1024 numbers and for thousands.
pub(super) const WORKSPACE: u64 = 1279;

/// `x.cumsum(dim)` of what has no gradient: whole numbers, of a copy as whole numbers where x has another type. Many rows are
/// scanned a block each; a single one by the whole device, which needs memory for the blocks' sums.
pub fn cumsum(x: impl Borrow<Tensor>, dim: usize) -> Tensor {
    const OP: &str = "cumsum";
    let tensor = x.borrow();
    let context = tensor.context().clone();
    let sums = context.empty(OP, tensor.sizes(), DType::Int64);
    let numbers =
        (tensor.dtype() != DType::Int64).then(|| context.empty(OP, tensor.sizes(), DType::Int64));
    if tensor.numel() == tensor.size(dim) {
        drop(context.workspace(OP, WORKSPACE));
    }
    drop(numbers);
    drop(x);
    sums
}
