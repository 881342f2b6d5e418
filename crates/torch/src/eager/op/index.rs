//! Ops that gather, scatter and choose.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::cast;
use super::pointwise::like;
use crate::chip::Chip;

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
    radix_select(x);
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

/// Many long rows are searched by several blocks each, which need memory for their counts: a digit of eight bits at a time.
fn radix_select(x: &Tensor) {
    const DIGITS: u64 = 256;
    let context = x.context();
    let length = x.sizes().last();
    let rows = x.numel() / length.max(1);
    if !searched_by_many(rows, length) {
        return;
    }
    let blocks = rows * length.div_ceil(items_of_a_block(context.chip(), rows * length));
    let keep = [
        rows * x.dtype().size(),
        2 * rows * 4,
        2 * rows * 4,
        blocks * DIGITS * 2,
        rows * DIGITS * 4,
        blocks * 4,
        blocks * 4,
    ]
    .map(|bytes| context.workspace("topk", bytes));
    for _ in 0..2 {
        drop(context.workspace("topk", scan_by_key(blocks)));
    }
    for buffer in keep.into_iter().rev() {
        drop(buffer);
    }
}

/// The sizes above which PyTorch found several blocks a row to be faster.
fn searched_by_many(rows: u64, length: u64) -> bool {
    let longest = match rows {
        0..=20 => 20_000,
        21..=40 => 10_000,
        41..=79 => 8_000,
        80..=199 => 5_000,
        200..=799 => 3_000,
        800..=4000 => 800,
        _ => 400,
    };
    length >= longest
}

/// Items that one block of 256 threads searches: the whole over all blocks that the card runs at once, four to 64 a thread.
fn items_of_a_block(chip: Chip, items: u64) -> u64 {
    const THREADS: u64 = 256;
    const BLOCKS_PER_MULTIPROCESSOR: u64 = 6;
    let blocks = chip.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    THREADS * items.div_ceil(THREADS * blocks).clamp(4, 64)
}

/// What a scan by key over this many items takes: a word for each tile and for a warp before it, and the tiles' first keys.
fn scan_by_key(items: u64) -> u64 {
    const TILE: u64 = 2304;
    const ALIGNMENT: u64 = 256;
    let tiles = items.div_ceil(TILE);
    let words = (16 * (tiles + 32)).next_multiple_of(ALIGNMENT);
    let keys = (8 * tiles).next_multiple_of(ALIGNMENT);
    words + keys + ALIGNMENT - 1
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
        let zeros = step
            .context
            .empty("index_backward", before, step.grad().dtype());
        add_sorted(step.saved(0));
        grads![Some(zeros)]
    });
    drop(x);
    out
}

/// `index_put_(…, accumulate=True)`: the indices are made linear, and sorted together with their places.
fn add_sorted(indices: &Tensor) {
    const SORT: u64 = 1;
    let context = indices.context();
    let list = || context.workspace("index_put_", 8 * indices.numel());
    let wrapped = list();
    let linear = list();
    drop(wrapped);
    let [places, sorted, sorted_places] = [list(), list(), list()];
    drop(context.workspace("index_put_", SORT));
    drop(sorted_places);
    drop(sorted);
    drop(places);
    drop(linear);
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

/// What the kernels that count and select take while they run, as long as the flags fill one tile.
const NONZERO_COUNT: u64 = 1;
const NONZERO_SELECT: u64 = 1023;

/// `flags.nonzero()` with the number of true ones: a counter, then the indices.
pub fn nonzero(flags: impl Borrow<Tensor>, count: u64) -> Tensor {
    let context = flags.borrow().context().clone();
    context.uses(|libraries| libraries.nonzero = true);
    let counter = context.empty("nonzero", [1], DType::Int32);
    drop(context.workspace("nonzero", NONZERO_COUNT));
    let out = context.empty("nonzero", [count, 1], DType::Int64);
    drop(context.workspace("nonzero", NONZERO_SELECT));
    drop(counter);
    drop(flags);
    out
}
