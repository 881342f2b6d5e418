//! `clip_grad_norm_` as it runs on a GPU.

use super::dtype::DType;
use super::op::pointwise::{add_number, apply, reciprocal};
use super::op::reduce;
use super::optimizer::{drop_list, groups};
use super::tensor::Tensor;

/// Elements that one block of a foreach kernel works on.
const CHUNK: u64 = 65536;

/// A norm of each gradient through one buffer of partial sums per type, the norm of the norms, and the factor;
/// gradients are scaled in place. The total is given back.
pub fn clip_grad_norm(parameters: &[Tensor]) -> Option<Tensor> {
    let first = parameters.iter().find_map(Tensor::grad)?;
    let context = first.context().clone();
    drop(first);
    context.no_grad(|| {
        let mut norms = Vec::new();
        for group in groups(parameters) {
            let group: Vec<Tensor> = group.iter().filter_map(|&i| parameters[i].grad()).collect();
            let dtype = group[0].dtype();
            let largest = group.iter().map(|grad| grad.numel()).max().unwrap_or(0);
            let partial = [group.len() as u64 * largest.div_ceil(CHUNK)];
            let partial = context.empty("_foreach_norm", partial, DType::Float32);
            norms.extend(
                group
                    .iter()
                    .map(|_| context.empty("_foreach_norm", [], dtype)),
            );
            drop(partial);
        }
        let dtype = norms
            .iter()
            .map(Tensor::dtype)
            .reduce(DType::promote)
            .unwrap_or(DType::Float32);
        let stacked = context.empty("stack", [norms.len() as u64], dtype);
        let total = reduce::plain(stacked, &[0], false, dtype);
        drop_list(norms);
        let coefficient = reciprocal(add_number(&total));
        let clamped = apply(&coefficient, "clamp", dtype);
        drop(coefficient);
        drop(clamped);
        Some(total)
    })
}
