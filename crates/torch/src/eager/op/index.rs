//! Ops that gather, scatter and choose.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::cast;
use super::pointwise::like;

/// `x.gather(dim, index)`: a result of the index's sizes; keeps the index, and its input for the sizes. The gradient is a tensor of the
/// input's sizes, expanded dimensions included, into which gradients are added.
pub fn gather(x: impl Borrow<Tensor>, index: impl Borrow<Tensor>) -> Tensor {
    let (tensor, index) = (x.borrow(), index);
    let mut recorder = tensor.context().record(&[tensor]);
    recorder.save(index.borrow());
    recorder.save(tensor);
    let out = tensor
        .context()
        .empty("gather", index.borrow().sizes(), tensor.dtype());
    let before = tensor.sizes();
    recorder.finish(&[&out], move |step| {
        grads![Some(step.context.empty(
            "gather_backward",
            before,
            step.grad().dtype()
        ))]
    });
    drop(x);
    out
}

/// `x.topk(k)`: values and their indices; keeps the indices. The gradient is scattered into zeros.
pub fn topk(x: &Tensor, k: u64) -> (Tensor, Tensor) {
    let context = x.context();
    let mut recorder = context.record(&[x]);
    let mut sizes = x.sizes();
    let last = sizes.len() - 1;
    sizes.as_mut_slice()[last] = k;
    let values = context.empty("topk", sizes, x.dtype());
    let indices = context.empty("topk", sizes, DType::Int64);
    recorder.save_output(&indices);
    let before: Dims = x.sizes();
    recorder.finish(&[&values], move |step| {
        grads![Some(step.context.empty(
            "value_selecting_reduction_backward",
            before,
            step.grad().dtype()
        ))]
    });
    (values, indices)
}

/// `base[:, i] = value` where gradients flow: no memory now. In backward the gradient of the whole base is copied, the
/// slice of it is copied again for the value, and zeros take its place.
pub fn set_slice(base: &Tensor, value: impl Borrow<Tensor>) {
    let context = base.context();
    let recorder = context.record(&[base, value.borrow()]);
    let (slice, dtype) = (value.borrow().sizes(), value.borrow().dtype());
    recorder.finish(&[base], move |step| {
        let grad = step.grad();
        let whole = like(grad, grad.dtype(), "copy_slices");
        let part = step.context.empty("clone", slice, grad.dtype());
        let zeros = step
            .needs(0)
            .then(|| step.context.empty("zeros_like", slice, grad.dtype()));
        let value = step.needs(1).then(|| cast::to(&part, dtype));
        drop(part);
        drop(zeros);
        grads![step.needs(0).then_some(whole), value]
    });
    drop(value);
}

/// `x[rows]` with a list of rows: a copy; keeps the list. The gradient is scattered into zeros.
pub fn rows(x: impl Borrow<Tensor>, rows: &Tensor) -> Tensor {
    let tensor = x.borrow();
    let mut recorder = tensor.context().record(&[tensor]);
    recorder.save(rows);
    let mut sizes = tensor.sizes();
    sizes.as_mut_slice()[0] = rows.numel();
    let out = tensor.context().empty("index", sizes, tensor.dtype());
    let before = tensor.sizes();
    recorder.finish(&[&out], move |step| {
        grads![Some(step.context.empty(
            "index_backward",
            before,
            step.grad().dtype()
        ))]
    });
    drop(x);
    out
}

/// `y.index_add(0, rows, source)`: a copy of y with rows added; keeps the list of rows and the source.
pub fn index_add(y: &Tensor, rows: &Tensor, source: impl Borrow<Tensor>) -> Tensor {
    let context = y.context();
    let mut recorder = context.record(&[y, source.borrow()]);
    recorder.save(rows);
    recorder.save(source.borrow());
    let out = like(y, y.dtype(), "index_add");
    recorder.finish(&[&out], |step| {
        let source = step.needs(1).then(|| {
            step.context
                .empty("index_select", step.saved(1).sizes(), step.grad().dtype())
        });
        grads![step.needs(0).then(|| step.grad().clone()), source]
    });
    drop(source);
    out
}

/// `flags.nonzero()` with the number of true ones: a counter, then the indices.
pub fn nonzero(flags: impl Borrow<Tensor>, count: u64) -> Tensor {
    let context = flags.borrow().context().clone();
    context.uses(|libraries| libraries.nonzero = true);
    let counter = context.empty("nonzero", [1], DType::Int32);
    let out = context.empty("nonzero", [count, 1], DType::Int64);
    drop(counter);
    drop(flags);
    out
}
