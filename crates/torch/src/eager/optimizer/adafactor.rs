//! Adafactor of transformers, without a first moment, as the Trainer makes it.

use super::super::dtype::DType;
use super::super::op::pointwise::{like, mul_number};
use super::super::op::{cast, reduce};
use super::super::shape::Dims;
use super::super::tensor::Tensor;

/// Names that Python keeps from one parameter to the next: each goes when it is bound again.
#[derive(Default)]
struct Names {
    grad: Option<Tensor>,
    parameter: Option<Tensor>,
    update: Option<Tensor>,
}

/// Second moments as a row and a column of a matrix, of a vector in full, and the root mean square of the parameter; all in
/// fp32. Parameter by parameter, with copies of gradient and parameter where they are in half precision.
pub fn step(parameters: &[Tensor], states: &mut [Vec<Tensor>]) {
    let mut names = Names::default();
    for (parameter, state) in parameters.iter().zip(states.iter_mut()) {
        let Some(grad) = parameter.grad() else {
            continue;
        };
        drop(names.grad.replace(grad.clone()));
        let grad = cast::to(grad, DType::Float32);
        drop(names.grad.replace(grad.clone()));
        let is_matrix = grad.dim() > 1;
        if state.is_empty() {
            make_moments(&grad, is_matrix, state);
        }
        // The name is bound to the parameter itself before it is bound to its copy.
        drop(names.parameter.replace(parameter.clone()));
        let in_float32 = cast::to(parameter, DType::Float32);
        drop(names.parameter.replace(in_float32.clone()));
        let moments = if is_matrix { 2 } else { 1 };
        let size = root_mean_square(&in_float32);
        drop(in_float32);
        match state.get_mut(moments) {
            Some(old) => *old = size,
            None => state.push(size),
        }
        let square = like(&grad, DType::Float32, "pow");
        let update = like(&square, DType::Float32, "add");
        drop(square);
        drop(names.update.replace(update.clone()));
        let scaled = match is_matrix {
            true => approximate(&update, &state[0], &state[1]),
            false => like(&state[0], DType::Float32, "rsqrt"),
        };
        drop(update);
        drop(names.update.replace(scaled.clone()));
        drop(grad);
        let size = root_mean_square(&scaled);
        drop(mul_number(size));
        drop(like(&scaled, DType::Float32, "neg"));
    }
    drop(names.grad);
    drop(names.parameter);
    drop(names.update);
}

fn make_moments(grad: &Tensor, is_matrix: bool, state: &mut Vec<Tensor>) {
    let context = grad.context();
    if !is_matrix {
        state.push(like(grad, DType::Float32, "exp_avg_sq"));
        return;
    }
    let (sizes, last) = (grad.sizes(), grad.dim() - 1);
    let without = |dim: usize| {
        let mut kept = Dims::new(&[]);
        for i in (0..=last).filter(|&i| i != dim) {
            kept.push(sizes[i]);
        }
        context.empty("exp_avg_sq", kept, DType::Float32)
    };
    let row = without(last);
    let column = without(last - 1);
    state.push(row);
    state.push(column);
}

/// `x.norm(2) / √n`.
fn root_mean_square(x: &Tensor) -> Tensor {
    let all: Vec<usize> = (0..x.dim()).collect();
    mul_number(reduce::plain(x, &all, false, DType::Float32))
}

/// Means of the squares over rows and columns go into the moments; 1/√(row · column / mean) is the update.
fn approximate(update: &Tensor, row: &Tensor, column: &Tensor) -> Tensor {
    let last = update.dim() - 1;
    drop(reduce::plain(update, &[last], false, DType::Float32));
    drop(reduce::plain(update, &[last - 1], false, DType::Float32));
    let mean = reduce::plain(row, &[row.dim() - 1], true, DType::Float32);
    let rows = like(row, DType::Float32, "div");
    drop(mean);
    let columns = like(column, DType::Float32, "rsqrt");
    let product = like(update, DType::Float32, "mul");
    drop(rows);
    drop(columns);
    product
}
