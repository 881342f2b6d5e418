//! Convolutions along a sequence, each channel by itself.

use std::borrow::Borrow;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::{reduce, view};

/// `F.conv1d(x, weight, bias, padding=padding, groups=channels)` of x [batch, channels, length] with a weight
/// [channels, 1, width]: a result of length + 2 · padding − width + 1. Keeps input and weight as they came; the kernel
/// reads a contiguous copy of the input, forward and backward. Gradients in the order weight, input, bias.
///
/// fp16 goes to cuDNN, the other types to PyTorch's own kernel.
pub fn depthwise(
    x: impl Borrow<Tensor>,
    weight: impl Borrow<Tensor>,
    bias: Option<&Tensor>,
    padding: u64,
) -> Tensor {
    let bias = bias.map(autocast::lower);
    let kernel = autocast::lower(weight.borrow());
    let input = autocast::lower(x.borrow());
    let context = input.context().clone();
    if input.dtype() == DType::Float16 {
        context.uses(|libraries| libraries.cudnn = true);
    }
    let mut inputs = vec![&input, &kernel];
    inputs.extend(&bias);
    let mut recorder = context.record(&inputs);
    recorder.save(&input);
    recorder.save(&kernel);
    let mut sizes = input.sizes();
    sizes.as_mut_slice()[2] += 2 * padding + 1 - kernel.size(2);
    let copy = context.no_grad(|| view::contiguous(&input));
    let out = context.empty("convolution", sizes, input.dtype());
    drop(copy);
    let has_bias = bias.is_some();
    recorder.finish(&[&out], move |step| {
        let (input, kernel) = (step.saved(0), step.saved(1));
        let copy = view::contiguous(input);
        let grad = view::contiguous(step.grad());
        let fresh = |like: &Tensor| {
            step.context
                .empty("convolution_backward", like.sizes(), grad.dtype())
        };
        let second = step.needs(1).then(|| fresh(kernel));
        let first = step.needs(0).then(|| fresh(input));
        let mut list = grads![first, second];
        if has_bias {
            let third = step
                .needs(2)
                .then(|| reduce::plain(&grad, &[0, 2], false, grad.dtype()));
            list.push(third);
        }
        drop(copy);
        list
    });
    drop(bias);
    drop(kernel);
    drop(input);
    drop(weight);
    drop(x);
    out
}
