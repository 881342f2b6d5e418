//! Prefix sums.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::tensor::Tensor;

/// Numbers that a block scans, of 64 bits.
const TILE: u64 = 896;

/// What a scan of the whole device takes while it runs.
pub(super) fn workspace(numbers: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    lookback(numbers.div_ceil(TILE)) + ALIGNMENT
}

/// What blocks tell each other that look back at those before them: two words for each, and for a warp before the first; with
/// room to align the whole.
pub(super) fn lookback(blocks: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    const WARP: u64 = 32;
    const WORDS: u64 = 16;
    (WORDS * (blocks + WARP)).next_multiple_of(ALIGNMENT) + ALIGNMENT - 1
}

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
        drop(context.workspace(OP, workspace(tensor.numel())));
    }
    drop(numbers);
    drop(x);
    sums
}
