//! Matrix products. One result each; the first product of a thread brings cuBLAS's workspace.

use std::borrow::Borrow;

use super::super::autocast;
use super::super::node::grads;
use super::super::shape::{self, Dims};
use super::super::tensor::Tensor;
use super::view;

/// Whether a matrix lies column after column: its gradient is then made in that order, as the
/// transpose of a product, and is a view.
fn is_column_major(matrix: &Tensor) -> bool {
    let strides = matrix.strides();
    strides[0] == 1 && strides[1] == matrix.size(0)
}

/// `torch.mm`: each factor is kept for the other's gradient; the second factor's gradient is made
/// first.
pub fn mm(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let (x, y) = (a.borrow(), b.borrow());
    let context = x.context();
    let mut recorder = context.record(&[x, y]);
    recorder.save_if(recorder.needs(0), y);
    recorder.save_if(recorder.needs(1), x);
    let out = context.empty("mm", [x.size(0), y.size(1)], x.dtype());
    context.use_cublas();
    let orders = (Order::of(x), Order::of(y));
    recorder.finish(&[&out], move |step| {
        let second = step.needs(1).then(|| orders.1.gradient(step.grad(), "mm"));
        let first = step.needs(0).then(|| orders.0.gradient(step.grad(), "mm"));
        grads![first, second]
    });
    drop(a);
    drop(b);
    out
}

/// What the gradient of a factor looks like, without keeping the factor.
#[derive(Clone, Copy)]
struct Order {
    sizes: [u64; 2],
    column_major: bool,
}

impl Order {
    fn of(matrix: &Tensor) -> Order {
        Order {
            sizes: [matrix.size(0), matrix.size(1)],
            column_major: is_column_major(matrix),
        }
    }

    fn gradient(self, grad: &Tensor, op: &'static str) -> Tensor {
        let context = grad.context();
        let [rows, columns] = self.sizes;
        if self.column_major {
            let fresh = context.empty(op, [columns, rows], grad.dtype());
            context.use_cublas();
            return view::transpose(fresh, 0, 1);
        }
        let fresh = context.empty(op, [rows, columns], grad.dtype());
        context.use_cublas();
        fresh
    }
}

/// `torch.addmm(bias, a, b)`: through cuBLASLt, which adds the bias. Gradients in the order a, b,
/// bias; the bias's is the result's, summed over rows.
pub fn addmm(bias: impl Borrow<Tensor>, a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    // C++ evaluates the casts of the arguments from the last to the first.
    let y = autocast::lower(b.borrow());
    let x = autocast::lower(a.borrow());
    let c = autocast::lower(bias.borrow());
    let context = x.context().clone();
    let mut recorder = context.record(&[&c, &x, &y]);
    recorder.save_if(recorder.needs(2), &x);
    recorder.save_if(recorder.needs(1), &y);
    let out = context.empty("addmm", [x.size(0), y.size(1)], x.dtype());
    context.use_cublas_lt();
    let orders = (Order::of(&x), Order::of(&y));
    recorder.finish(&[&out], move |step| {
        let first = step.needs(1).then(|| orders.0.gradient(step.grad(), "mm"));
        let second = step.needs(2).then(|| orders.1.gradient(step.grad(), "mm"));
        grads![step.needs(0).then(|| step.grad().clone()), first, second]
    });
    drop(c);
    drop(x);
    drop(y);
    drop(bias);
    drop(a);
    drop(b);
    out
}

/// `torch.bmm`, over tensors of three dimensions.
pub fn bmm(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let y = autocast::lower(b.borrow());
    let x = autocast::lower(a.borrow());
    let context = x.context().clone();
    let mut recorder = context.record(&[&x, &y]);
    recorder.save_if(recorder.needs(0), &y);
    recorder.save_if(recorder.needs(1), &x);
    let out = context.empty("bmm", [x.size(0), x.size(1), y.size(2)], x.dtype());
    context.use_cublas();
    let sizes = (x.sizes(), y.sizes());
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        let product = |sizes: Dims| {
            let fresh = step.context.empty("bmm", sizes, grad.dtype());
            step.context.use_cublas();
            fresh
        };
        let second = step.needs(1).then(|| product(sizes.1));
        let first = step.needs(0).then(|| product(sizes.0));
        grads![first, second]
    });
    drop(x);
    drop(y);
    drop(a);
    drop(b);
    out
}

/// `F.linear(x, weight, bias)` as at::linear takes it apart: with a bias one `addmm` over the
/// flattened rows; without, `matmul`, which folds the batch into rows and multiplies.
pub fn linear(x: impl Borrow<Tensor>, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let bias = bias.map(autocast::lower);
    let weight = autocast::lower(weight);
    let input = autocast::lower(x.borrow());
    let out = flat_linear(&input, &weight, bias.as_ref());
    drop(input);
    drop(weight);
    drop(bias);
    drop(x);
    out
}

fn flat_linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let transposed = || view::transpose(weight, 0, 1);
    let rows = input.numel() / input.sizes().last();
    let flat = Dims::from([rows, input.sizes().last()]);
    let mut sizes = input.sizes();
    let last = sizes.len() - 1;
    sizes.as_mut_slice()[last] = weight.size(0);
    match bias {
        Some(bias) if input.dim() == 2 => addmm(bias, input, transposed()),
        Some(bias) if input.dim() == 3 && input.is_contiguous() => {
            // The rows are seen before the weight is turned, so that backward comes to the weight first.
            let seen = view::reshape(input, flat);
            view::view(addmm(bias, seen, transposed()), sizes)
        }
        Some(bias) => add_in_place(folded(input, transposed(), flat, sizes), bias),
        None => folded(input, transposed(), flat, sizes),
    }
}

fn folded(input: &Tensor, transposed: Tensor, flat: Dims, sizes: Dims) -> Tensor {
    if input.dim() == 2 {
        return mm(input, transposed);
    }
    view::unsafe_view(mm(view::reshape(input, flat), transposed), sizes)
}

/// `out.add_(other)`: no memory; the gradient goes on to both.
pub fn add_in_place(out: Tensor, bias: &Tensor) -> Tensor {
    let recorder = out.context().record(&[&out, bias]);
    recorder.finish(&[&out], |step| {
        grads![
            step.needs(0).then(|| step.grad().clone()),
            step.needs(1).then(|| step.grad().clone())
        ]
    });
    out
}

/// `torch.matmul` of tensors with batch dimensions: both broadcast and brought to three
/// dimensions (a copy where their strides do not allow it), multiplied, and seen under the result's
/// sizes.
pub fn matmul(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let y = autocast::lower(b.borrow());
    let x = autocast::lower(a.borrow());
    let (rows, inner, columns) = (x.size(x.dim() - 2), x.sizes().last(), y.sizes().last());
    let mut batch = shape::broadcast(&x.sizes()[..x.dim() - 2], &y.sizes()[..y.dim() - 2]);
    let count = batch.numel();
    let spread = |tensor: &Tensor, rows: u64, columns: u64| {
        let mut sizes = batch;
        sizes.push(rows);
        sizes.push(columns);
        view::reshape(view::expand(tensor, sizes), [count, rows, columns])
    };
    let first = spread(&x, rows, inner);
    let second = spread(&y, inner, columns);
    let product = bmm(&first, &second);
    batch.push(rows);
    batch.push(columns);
    let out = view::unsafe_view(&product, batch);
    drop(product);
    drop(second);
    drop(first);
    drop(x);
    drop(y);
    drop(a);
    drop(b);
    out
}

/// `weight @ x` of a matrix [rows, inner] and a batch [batch, inner, columns]. Where the weight is trained the product is
/// that of the transposes, with the batch folded into rows, and is turned back by a copy: a weight's gradient for each of
/// the batch would be larger. A frozen weight is broadcast.
pub fn matrix_by_batch(weight: &Tensor, x: impl Borrow<Tensor>) -> Tensor {
    let y = autocast::lower(x.borrow());
    let matrix = autocast::lower(weight);
    if !matrix.requires_grad() {
        return matmul(&matrix, &y);
    }
    let (batch, inner, columns) = (y.size(0), y.size(1), y.size(2));
    let folded = view::reshape(view::transpose(&y, 1, 2), [batch * columns, inner]);
    let product = mm(folded, view::transpose(&matrix, 0, 1));
    let seen = view::unsafe_view(&product, [batch, columns, matrix.size(0)]);
    drop(product);
    let out = view::contiguous(view::transpose(&seen, 1, 2));
    drop(seen);
    drop(matrix);
    drop(y);
    drop(x);
    out
}
