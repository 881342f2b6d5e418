//! Convolutions: along a sequence, each channel by itself, and over the patches of an image.

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

/// `F.conv2d(x, kernel, bias, stride=…)` of x [batch, channels, height, width] with a kernel [outputs, channels, rows, columns] that
/// moves by its own sides: a result for every patch. Keeps input and kernel. Gradients in the order kernel, bias.
pub fn patches(x: &Tensor, kernel: &Tensor, bias: &Tensor) -> Tensor {
    const OP: &str = "cudnn_convolution";
    let bias = autocast::lower(bias);
    let kernel = autocast::lower(kernel);
    let input = autocast::lower(x);
    let context = input.context().clone();
    context.uses(|libraries| libraries.cudnn = true);
    let mut recorder = context.record(&[&input, &kernel, &bias]);
    recorder.save(&input);
    recorder.save(&kernel);
    let grid = [2, 3].map(|side| input.size(side) / kernel.size(side));
    let sizes = [input.size(0), kernel.size(0), grid[0], grid[1]];
    let out = context.empty(OP, sizes, input.dtype());
    let workspaces = PatchWorkspaces::of(&input, &kernel, &out);
    if let Some(bytes) = workspaces.forward {
        drop(context.workspace(OP, bytes));
    }
    recorder.finish(&[&out], move |step| {
        const OP: &str = "convolution_backward";
        let (grad, kernel) = (step.grad(), step.saved(1));
        let of_kernel = step.needs(1).then(|| {
            let copy = view::contiguous(grad);
            let fresh = step.context.empty(OP, kernel.sizes(), grad.dtype());
            if let Some(bytes) = workspaces.of_kernel {
                drop(step.context.workspace(OP, bytes));
            }
            drop(copy);
            fresh
        });
        let of_bias = step
            .needs(2)
            .then(|| reduce::plain(grad, &[0, 2, 3], false, grad.dtype()));
        grads![None, of_kernel, of_bias]
    });
    drop(bias);
    drop(kernel);
    drop(input);
    out
}

/// What cuDNN takes while it convolves patches. Its kernels for tensor cores want channels last and in whole vectors of sixteen
/// bytes, so that input, kernel and result are copied to such an order; where they are chosen was found by asking it (9.x, for an
/// H200) for images of 32 to 518 pixels, 192 to 1280 outputs and batches of 1 to 256.
#[derive(Clone, Copy)]
struct PatchWorkspaces {
    forward: Option<u64>,
    /// Of the kernel's gradient.
    of_kernel: Option<u64>,
}

impl PatchWorkspaces {
    fn of(input: &Tensor, kernel: &Tensor, out: &Tensor) -> PatchWorkspaces {
        const VECTOR: u64 = 16;
        /// Kernels with fewer weights are computed without copies, in half types.
        const LARGE_KERNEL: u64 = 400_000;
        /// Patches of a batch from which fp32 is copied, for the kernel's gradient and forward.
        const MANY_PATCHES: [u64; 2] = [500, 8192];
        /// From so many patches the gradient in half types is summed in parts, in fp32.
        const SUMMED_IN_PARTS: u64 = 3000;
        const PARTS: u64 = 3;
        /// Parts are aligned to this, with the copies.
        const ALIGNMENT: u64 = 128;
        let (channels, size) = (input.size(1), input.dtype().size());
        let padded = channels.next_multiple_of(VECTOR / size);
        let weights = kernel.numel() / channels * padded;
        let copies = input.bytes() / channels * padded + weights * size + out.bytes() + VECTOR;
        let patches = out.numel() / out.size(1);
        if !input.dtype().is_half() {
            return PatchWorkspaces {
                forward: (patches >= MANY_PATCHES[1]).then_some(copies),
                of_kernel: (patches >= MANY_PATCHES[0]).then_some(copies + ALIGNMENT),
            };
        }
        let in_parts = PARTS * weights * DType::Float32.size() + ALIGNMENT;
        PatchWorkspaces {
            forward: (kernel.numel() >= LARGE_KERNEL).then_some(copies),
            of_kernel: Some(match patches >= SUMMED_IN_PARTS {
                true => copies + in_parts,
                false => copies,
            }),
        }
    }
}
