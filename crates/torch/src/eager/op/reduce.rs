//! Sums and means, with the buffers that PyTorch's reduction kernel takes when a result is put
//! together by several blocks.

use std::borrow::Borrow;

use smallvec::SmallVec;

use super::super::autocast;
use super::super::context::Context;
use super::super::dtype::DType;
use super::super::node::grads;
use super::super::shape::{Dims, MAX_DIMS};
use super::super::tensor::Tensor;
use super::view;
use crate::chip::Chip;

const WARP: u64 = 32;
const MAX_THREADS: u64 = 512;

/// What one reduction takes besides its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// Partial results of the blocks.
    pub buffer: u64,
    /// Counters by which the last block knows that it is the last.
    pub semaphores: u64,
}

/// A reduction of a layout, and what it takes.
#[derive(Clone, Copy)]
pub struct Reduction {
    over: [bool; MAX_DIMS],
    staging: Option<Staging>,
}

fn last_power_of_two(n: u64) -> u64 {
    if n == 0 { 1 } else { 1 << n.ilog2() }
}

/// The launch that PyTorch chooses on a card for a reduction of `sizes` with `strides` over the dimensions
/// where `reduced` is true, and from it the staging buffers: none unless the reduction is split
/// over blocks. How far depends on how many threads the card can run at once.
pub fn staging(
    chip: Chip,
    sizes: &[u64],
    strides: &[u64],
    reduced: &[bool],
    itemsize: u64,
) -> Option<Staging> {
    // TensorIterator's order: reduced dimensions first, each group by stride; neighbours that
    // continue each other become one.
    let mut dims: SmallVec<[(bool, u64, u64); MAX_DIMS]> = (0..sizes.len())
        .filter(|&i| sizes[i] != 1)
        .map(|i| (!reduced[i], strides[i], sizes[i]))
        .collect();
    dims.sort_by_key(|&(kept, stride, _)| (kept, stride));
    let mut merged: SmallVec<[(bool, u64, u64); MAX_DIMS]> = SmallVec::new();
    for (kept, stride, size) in dims {
        match merged.last_mut() {
            Some((k, s, n)) if *k == kept && *s * *n == stride => *n *= size,
            _ => merged.push((kept, stride, size)),
        }
    }
    let inputs: u64 = merged.iter().filter(|d| !d.0).map(|d| d.2).product();
    let outputs: u64 = merged.iter().filter(|d| d.0).map(|d| d.2).product();
    if inputs == 0 || outputs == 0 {
        return None;
    }
    let num_reduced = merged.iter().filter(|d| !d.0).count();
    let reduces_fastest =
        num_reduced == merged.len() || (num_reduced > 0 && merged[0].1 < merged[num_reduced].1);

    let (mut dim0, dim1) = if reduces_fastest {
        (inputs, outputs)
    } else {
        (outputs, inputs)
    };
    let fastest = if reduces_fastest {
        merged.first()
    } else {
        merged.get(num_reduced)
    };
    let mut output_vector = 1;
    if fastest.is_none_or(|d| d.1 == 1) {
        if reduces_fastest && dim0 > 128 && merged.len() == 1 {
            dim0 /= 4;
        } else if !reduces_fastest {
            output_vector = 4;
            let mut shrink = |n: u64| {
                while !n.is_multiple_of(output_vector) {
                    output_vector /= 2;
                }
            };
            shrink(merged[num_reduced].2);
            for (i, d) in merged.iter().enumerate() {
                if i != num_reduced {
                    shrink(d.1);
                }
            }
            dim0 /= output_vector;
        }
    }

    let max_threads = MAX_THREADS / output_vector;
    let power = |n: u64| {
        if n < max_threads {
            last_power_of_two(n)
        } else {
            max_threads
        }
    };
    let (power0, power1) = (power(dim0), power(dim1));
    let width = power0.min(WARP);
    let height = power1.min(max_threads / width);
    let width = power0.min(max_threads / height);

    let (mut step_input, mut step_output) = if reduces_fastest {
        (width, 1)
    } else {
        (1, width)
    };
    let values = |step: u64| inputs.div_ceil(step);
    let splits_height = values(step_input) >= height * 16 || values(step_input) >= 256;
    if splits_height {
        step_input *= height;
    } else {
        step_output *= height;
    }

    let target = chip.multiprocessors * (chip.threads_per_multiprocessor() / (width * height));
    let grid = (outputs / output_vector).div_ceil(step_output);
    if !(splits_height && values(step_input) >= 256 && grid <= target) {
        return None;
    }
    let per_thread = values(step_input);
    let blocks = target
        .div_ceil(grid)
        .min(per_thread.div_ceil(16))
        .max(per_thread.div_ceil(256));
    if blocks <= 1 {
        return None;
    }
    let mut buffer = itemsize * outputs * blocks;
    if !reduces_fastest {
        buffer *= width * output_vector;
    }
    Some(Staging {
        buffer,
        semaphores: 4 * grid,
    })
}

/// The reduction kernel: the result exists, the buffers come and go. Partial sums are fp32, partial answers of truth values a
/// byte.
fn run(context: &Context, input: &Tensor, over: [bool; MAX_DIMS]) {
    let layout = input.layout();
    let mut reductions = layout.reductions.borrow_mut();
    let known = reductions.iter().find(|known| known.over == over);
    let staging = match known {
        Some(known) => known.staging,
        None => {
            let staging = staging(context.chip(), &layout.sizes, &layout.strides, &over, 1);
            reductions.push(Reduction { over, staging });
            staging
        }
    };
    drop(reductions);
    if let Some(staging) = staging {
        let item = if input.dtype() == DType::Bool {
            1
        } else {
            DType::Float32.size()
        };
        let buffer = context.workspace("reduction buffer", item * staging.buffer);
        let semaphores = context.workspace("reduction semaphores", staging.semaphores);
        drop(semaphores);
        drop(buffer);
    }
}

/// Sums over dimensions, without recording.
fn reduced(input: &Tensor, over: [bool; MAX_DIMS], keep: bool, dtype: DType) -> Tensor {
    let mut sizes = Dims::new(&[]);
    for (i, &size) in input.sizes().iter().enumerate() {
        if !over[i] {
            sizes.push(size);
        } else if keep {
            sizes.push(1);
        }
    }
    let context = input.context();
    let out = context.empty("sum", sizes, dtype);
    run(context, input, over);
    out
}

/// Brings a gradient to the sizes that were broadcast: summed over the new and the stretched
/// dimensions.
pub fn sum_to(grad: &Tensor, sizes: Dims) -> Tensor {
    if grad.sizes() == sizes {
        return grad.clone();
    }
    let leading = grad.dim() - sizes.len();
    let over: [bool; MAX_DIMS] = std::array::from_fn(|i| {
        i < leading || (i < grad.dim() && sizes[i - leading] == 1 && grad.size(i) != 1)
    });
    let out = if over.iter().any(|&o| o) {
        reduced(grad, over, true, grad.dtype())
    } else {
        grad.clone()
    };
    if leading > 0 {
        out.alias(sizes, sizes.contiguous_strides())
    } else {
        out
    }
}

/// Which dimensions are summed over.
fn chosen(dims: &[usize]) -> [bool; MAX_DIMS] {
    std::array::from_fn(|i| dims.contains(&i))
}

/// `x.sum(dims)`: under autocast a half tensor gives fp32. Keeps nothing; the gradient is a
/// broadcast view.
pub fn sum(x: impl Borrow<Tensor>, dims: &[usize], keep: bool) -> Tensor {
    let raised = autocast::wants_float(x.borrow());
    let tensor = x.borrow();
    let dtype = if raised {
        DType::Float32
    } else {
        tensor.dtype()
    };
    let dtype = if dtype.is_floating() {
        dtype
    } else {
        DType::Int64
    };
    let over = chosen(dims);
    let recorder = tensor.context().record(&[tensor]);
    let out = reduced(tensor, over, keep, dtype);
    recorder.finish(&[&out], move |step| {
        grads![Some(spread(step.grad(), step.input_sizes(), &over, keep))]
    });
    drop(x);
    out
}

/// The gradient of a sum: the result's gradient seen under the input's sizes.
fn spread(grad: &Tensor, sizes: Dims, over: &[bool], kept: bool) -> Tensor {
    let mut seen = grad.clone();
    if !kept {
        for (dim, _) in over.iter().enumerate().filter(|(_, o)| **o) {
            seen = view::unsqueeze(seen, dim);
        }
    }
    view::expand(seen, sizes)
}

/// `x.mean(dims)`: keeps nothing; the gradient is the broadcast one divided, one tensor of the
/// input's size.
pub fn mean(x: impl Borrow<Tensor>, dims: &[usize], keep: bool) -> Tensor {
    let tensor = x.borrow();
    let over = chosen(dims);
    let recorder = tensor.context().record(&[tensor]);
    let out = reduced(tensor, over, keep, tensor.dtype());
    let before = tensor.sizes();
    recorder.finish(&[&out], move |step| {
        let seen = spread(step.grad(), before, &over, keep);
        let divided = step.context.empty("div", before, seen.dtype());
        drop(seen);
        grads![Some(divided)]
    });
    drop(x);
    out
}

/// `x.var(dim)`: keeps its input. The gradient is 2/(n−1) · grad · (x − mean).
pub fn var(x: impl Borrow<Tensor>, dims: &[usize]) -> Tensor {
    let tensor = x.borrow();
    let over = chosen(dims);
    let mut recorder = tensor.context().record(&[tensor]);
    recorder.save(tensor);
    let out = reduced(tensor, over, false, tensor.dtype());
    recorder.finish(&[&out], move |step| {
        let (input, grad) = (step.saved(0), step.grad());
        let seen = spread(grad, input.sizes(), &over, false);
        let scaled = step.context.empty("mul", grad.sizes(), grad.dtype());
        let mean = reduced(input, over, true, input.dtype());
        let centred = step.context.empty("sub", input.sizes(), grad.dtype());
        drop(mean);
        let product = step.context.empty("mul", input.sizes(), grad.dtype());
        drop((centred, scaled, seen));
        grads![Some(product)]
    });
    drop(x);
    out
}

/// The result of a reduction without a gradient (`any`, `all`, `var` of what is not trained).
pub fn plain(x: impl Borrow<Tensor>, dims: &[usize], keep: bool, dtype: DType) -> Tensor {
    let tensor = x.borrow();
    let out = reduced(tensor, chosen(dims), keep, dtype);
    drop(x);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers that an H200 was seen to take.
    #[test]
    fn staging_is_what_was_measured() {
        let column_sum = |rows: u64, columns: u64| {
            staging(
                Chip::H200,
                &[rows, columns],
                &[columns, 1],
                &[true, false],
                4,
            )
        };
        assert_eq!(
            column_sum(2048, 768),
            Some(Staging {
                buffer: 12_582_912,
                semaphores: 24
            })
        );
        assert_eq!(
            column_sum(2048, 3072),
            Some(Staging {
                buffer: 50_331_648,
                semaphores: 96
            })
        );
        assert_eq!(
            column_sum(2048, 2304),
            Some(Staging {
                buffer: 37_748_736,
                semaphores: 72
            })
        );
        assert_eq!(
            column_sum(1024, 896),
            Some(Staging {
                buffer: 7_340_032,
                semaphores: 28
            })
        );
        assert_eq!(
            column_sum(1024, 128),
            Some(Staging {
                buffer: 1_048_576,
                semaphores: 4
            })
        );
        // Sums along rows and over a few batches need none.
        assert_eq!(
            staging(
                Chip::H200,
                &[2, 512, 896],
                &[458752, 896, 1],
                &[false, false, true],
                4
            ),
            None
        );
        assert_eq!(
            staging(
                Chip::H200,
                &[4, 512, 768],
                &[393216, 768, 1],
                &[true, false, false],
                4
            ),
            None
        );
    }
}
