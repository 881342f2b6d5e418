//! Views, and the copies made where no view is possible.

use std::borrow::Borrow;

use super::super::node::{Step, grads};
use super::super::shape::{self, Dims};
use super::super::tensor::Tensor;
use super::pointwise::like;
use super::reduce;

/// A view whose gradient is a view too.
fn aliased(
    tensor: &Tensor,
    sizes: Dims,
    strides: Dims,
    back: impl Fn(&Tensor, &Step<'_>) -> Tensor + 'static,
) -> Tensor {
    let recorder = tensor.context().record(&[tensor]);
    let out = tensor.alias(sizes, strides);
    recorder.finish(&[&out], move |step| grads![Some(back(step.grad(), step))]);
    out
}

/// `x.view(sizes)`; the model's code gives sizes that fit.
pub fn view(x: impl Borrow<Tensor>, sizes: impl Into<Dims>) -> Tensor {
    reshape(x, sizes)
}

/// `x.reshape(sizes)`: a view where strides allow one, else a contiguous copy seen under the new
/// sizes.
pub fn reshape(x: impl Borrow<Tensor>, sizes: impl Into<Dims>) -> Tensor {
    let (tensor, sizes) = (x.borrow(), sizes.into());
    let before = tensor.sizes();
    match shape::view_strides(&before, &tensor.strides(), &sizes) {
        Some(strides) => aliased(tensor, sizes, strides, |grad, step| {
            reshape(grad, step.input_sizes())
        }),
        None => unsafe_view(contiguous(tensor), sizes),
    }
}

/// `_unsafe_view`: other sizes over storage that only this result will own.
pub fn unsafe_view(x: impl Borrow<Tensor>, sizes: impl Into<Dims>) -> Tensor {
    let (tensor, sizes) = (x.borrow(), sizes.into());
    let recorder = tensor.context().record(&[tensor]);
    let out = tensor.shallow(sizes, sizes.contiguous_strides());
    recorder.finish(&[&out], |step| {
        grads![Some(reshape(step.grad(), step.input_sizes()))]
    });
    out
}

/// `x.transpose(a, b)`, `x.t()`.
pub fn transpose(x: impl Borrow<Tensor>, a: usize, b: usize) -> Tensor {
    let tensor = x.borrow();
    let (mut sizes, mut strides) = (tensor.sizes(), tensor.strides());
    sizes.as_mut_slice().swap(a, b);
    strides.as_mut_slice().swap(a, b);
    aliased(tensor, sizes, strides, move |grad, _| transpose(grad, a, b))
}

/// `x.permute(order)`.
pub fn permute(x: impl Borrow<Tensor>, order: &[usize]) -> Tensor {
    let tensor = x.borrow();
    let sizes: Vec<u64> = order.iter().map(|&dim| tensor.size(dim)).collect();
    let strides: Vec<u64> = order.iter().map(|&dim| tensor.strides()[dim]).collect();
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse[from] = to;
    }
    aliased(
        tensor,
        Dims::new(&sizes),
        Dims::new(&strides),
        move |grad, _| permute(grad, &inverse),
    )
}

/// `x.unsqueeze(dim)`.
pub fn unsqueeze(x: impl Borrow<Tensor>, dim: usize) -> Tensor {
    let tensor = x.borrow();
    let (mut sizes, mut strides) = (tensor.sizes(), tensor.strides());
    let stride = if dim < sizes.len() {
        sizes[dim] * strides[dim]
    } else {
        1
    };
    sizes.insert(dim, 1);
    strides.insert(dim, stride);
    aliased(tensor, sizes, strides, move |grad, _| squeeze(grad, dim))
}

/// `x.squeeze(dim)` of a dimension of size 1.
pub fn squeeze(x: impl Borrow<Tensor>, dim: usize) -> Tensor {
    let tensor = x.borrow();
    let (mut sizes, mut strides) = (tensor.sizes(), tensor.strides());
    sizes.remove(dim);
    strides.remove(dim);
    aliased(tensor, sizes, strides, move |grad, _| unsqueeze(grad, dim))
}

/// `x.expand(sizes)`: strides of zero; the gradient is summed back.
pub fn expand(x: impl Borrow<Tensor>, sizes: impl Into<Dims>) -> Tensor {
    let (tensor, sizes) = (x.borrow(), sizes.into());
    let before = tensor.sizes();
    let offset = sizes.len() - before.len();
    let mut strides = Dims::new(&[0; shape::MAX_DIMS][..sizes.len()]);
    for (i, (&size, &stride)) in before.iter().zip(tensor.strides().iter()).enumerate() {
        strides.as_mut_slice()[offset + i] = if size == sizes[offset + i] { stride } else { 0 };
    }
    aliased(tensor, sizes, strides, |grad, step| {
        reduce::sum_to(grad, step.input_sizes())
    })
}

/// The whole tensor as a view: what indexing with full slices gives.
pub fn alias(x: impl Borrow<Tensor>) -> Tensor {
    let tensor = x.borrow();
    aliased(tensor, tensor.sizes(), tensor.strides(), |grad, _| {
        grad.alias(grad.sizes(), grad.strides())
    })
}

/// `x[..., start:start + length, ...]`: the gradient is a tensor of zeros of the whole size, with
/// the part copied in.
pub fn slice(x: impl Borrow<Tensor>, dim: usize, length: u64) -> Tensor {
    let tensor = x.borrow();
    if tensor.size(dim) == length {
        return tensor.clone();
    }
    let mut sizes = tensor.sizes();
    sizes.as_mut_slice()[dim] = length;
    aliased(tensor, sizes, tensor.strides(), |grad, step| {
        step.context
            .empty("slice_backward", step.input_sizes(), grad.dtype())
    })
}

/// `x[..., :at]` and `x[..., at:]`. Indexing that takes everything is a view of its own, and the rest may be empty.
pub fn cut_at(x: &Tensor, dim: usize, at: u64) -> (Tensor, Tensor) {
    let rest = x.size(dim) - at;
    let part = if rest == 0 {
        alias(x)
    } else {
        slice(x, dim, at)
    };
    (part, slice(x, dim, rest))
}

/// `x[:, i]`: as a slice, without the dimension.
pub fn select(x: impl Borrow<Tensor>, dim: usize) -> Tensor {
    let tensor = x.borrow();
    let (mut sizes, mut strides) = (tensor.sizes(), tensor.strides());
    sizes.remove(dim);
    strides.remove(dim);
    aliased(tensor, sizes, strides, |grad, step| {
        step.context
            .empty("select_backward", step.input_sizes(), grad.dtype())
    })
}

/// `x[:, i].unsqueeze(dim)`, as one view: what a loop over timesteps takes of a sequence. The gradient is that of the
/// selection.
pub fn timestep(x: &Tensor, dim: usize) -> Tensor {
    let (mut sizes, mut strides) = (x.sizes(), x.strides());
    sizes.remove(1);
    strides.remove(1);
    sizes.insert(dim, 1);
    strides.insert(dim, 1);
    aliased(x, sizes, strides, |grad, step| {
        step.context
            .empty("select_backward", step.input_sizes(), grad.dtype())
    })
}

/// `x.split(lengths, dim)`, `x.chunk`: views that share one node. Its gradient is one tensor, put
/// together from those of the parts; parts that nobody used are zeros first.
pub fn split(x: impl Borrow<Tensor>, lengths: &[u64], dim: usize) -> Vec<Tensor> {
    let tensor = x.borrow();
    let recorder = tensor.context().record(&[tensor]);
    let parts: Vec<Tensor> = lengths
        .iter()
        .map(|&length| {
            let mut sizes = tensor.sizes();
            sizes.as_mut_slice()[dim] = length;
            tensor.alias(sizes, tensor.strides())
        })
        .collect();
    let (whole, sizes): (Dims, Vec<Dims>) =
        (tensor.sizes(), parts.iter().map(Tensor::sizes).collect());
    let dtype = tensor.dtype();
    recorder.finish(&parts.iter().collect::<Vec<_>>(), move |step| {
        let zeros: Vec<Tensor> = sizes
            .iter()
            .enumerate()
            .filter(|(i, _)| step.grad_of(*i).is_none())
            .map(|(_, &sizes)| step.context.empty("zeros", sizes, dtype))
            .collect();
        let whole = step.context.empty("cat", whole, dtype);
        drop(zeros);
        grads![Some(whole)]
    });
    parts
}

/// `torch.cat`: one result in the widest type of the parts, which are not cast before. Each part's gradient is a view of the
/// result's.
pub fn cat(parts: Vec<Tensor>, dim: usize) -> Tensor {
    let widest = parts.iter().map(Tensor::dtype).reduce(|a, b| a.promote(b));
    let Some(dtype) = widest else {
        unreachable!("the models concatenate something")
    };
    let context = parts[0].context().clone();
    let recorder = context.record(&parts.iter().collect::<Vec<_>>());
    let mut sizes = parts[0].sizes();
    sizes.as_mut_slice()[dim] = parts.iter().map(|part| part.size(dim)).sum();
    let out = context.empty("cat", sizes, dtype);
    let lengths: Vec<Dims> = parts.iter().map(Tensor::sizes).collect();
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        lengths
            .iter()
            .enumerate()
            .map(|(i, &sizes)| step.needs(i).then(|| grad.alias(sizes, grad.strides())))
            .collect()
    });
    for part in parts {
        drop(part);
    }
    out
}

/// `torch.stack`: one result with a dimension more. Each part's gradient is a view of the result's.
pub fn stack(parts: &[Tensor], dim: usize) -> Tensor {
    let Some(first) = parts.first() else {
        unreachable!("the models stack something")
    };
    let recorder = first.context().record(&parts.iter().collect::<Vec<_>>());
    let mut sizes = first.sizes();
    sizes.insert(dim, parts.len() as u64);
    let out = first.context().empty("stack", sizes, first.dtype());
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        let (mut sizes, mut strides) = (grad.sizes(), grad.strides());
        let count = sizes[dim] as usize;
        sizes.remove(dim);
        strides.remove(dim);
        (0..count)
            .map(|part| step.needs(part).then(|| grad.alias(sizes, strides)))
            .collect()
    });
    out
}

/// `x.contiguous()`: itself, or a copy.
pub fn contiguous(x: impl Borrow<Tensor>) -> Tensor {
    let tensor = x.borrow();
    if tensor.is_contiguous() {
        tensor.clone()
    } else {
        contiguous_copy(tensor)
    }
}

/// `x.clone(memory_format=contiguous)`.
pub fn contiguous_copy(x: impl Borrow<Tensor>) -> Tensor {
    let tensor = x.borrow();
    let recorder = tensor.context().record(&[tensor]);
    let out = tensor
        .context()
        .empty("clone", tensor.sizes(), tensor.dtype());
    recorder.finish(&[&out], |step| grads![Some(step.grad().clone())]);
    out
}

/// `x.repeat_interleave(repeats, dim)`: a copy of a broadcast view.
pub fn repeat_interleave(x: impl Borrow<Tensor>, repeats: u64, dim: usize) -> Tensor {
    let stretched = unsqueeze(x.borrow(), dim + 1);
    let mut sizes = stretched.sizes();
    sizes.as_mut_slice()[dim + 1] = repeats;
    let copy = contiguous_copy(expand(stretched, sizes));
    let mut sizes = x.borrow().sizes();
    sizes.as_mut_slice()[dim] *= repeats;
    reshape(copy, sizes)
}

/// `x.clone()`.
pub fn clone(x: impl Borrow<Tensor>) -> Tensor {
    let tensor = x.borrow();
    let recorder = tensor.context().record(&[tensor]);
    let out = like(tensor, tensor.dtype(), "clone");
    recorder.finish(&[&out], |step| grads![Some(step.grad().clone())]);
    out
}
