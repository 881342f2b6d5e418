//! Elementwise ops: one result each; what differs is what they keep and how many temporaries
//! their gradient takes.

use std::borrow::Borrow;
use std::rc::Rc;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::Step;
use super::super::node::grads;
use super::super::shape;
use super::super::tensor::Tensor;

/// A tensor of another's sizes, in its order of elements and without gaps.
pub fn like(tensor: &Tensor, dtype: DType, op: &'static str) -> Tensor {
    let (context, layout) = (tensor.context(), tensor.layout());
    if layout.is_own_likeness {
        return context.empty_laid_out(op, layout.clone(), dtype);
    }
    let strides = shape::dense_strides(&layout.sizes, &layout.strides);
    context.empty_strided(op, layout.sizes, strides, dtype)
}

/// The type of a binary op's result: operands with dimensions decide before those without.
fn result_type(a: &Tensor, b: &Tensor) -> DType {
    let same_kind = a.dtype().is_floating() == b.dtype().is_floating();
    match (a.dim() == 0, b.dim() == 0) {
        (true, false) if same_kind || b.dtype().is_floating() => b.dtype(),
        (false, true) if same_kind || a.dtype().is_floating() => a.dtype(),
        _ => a.dtype().promote(b.dtype()),
    }
}

/// The result of a binary op: broadcast sizes, in the order of the first operand that has them already.
fn binary(a: &Tensor, b: &Tensor, dtype: DType, op: &'static str) -> Tensor {
    if Rc::ptr_eq(a.layout(), b.layout()) || a.layout().sizes == b.layout().sizes {
        return like(a, dtype, op);
    }
    let sizes = shape::broadcast(&a.layout().sizes, &b.layout().sizes);
    match [a, b].into_iter().find(|t| t.layout().sizes == sizes) {
        Some(whole) => like(whole, dtype, op),
        None => a.context().empty(op, sizes, dtype),
    }
}

/// `a + b` and `a - b`: keeps nothing; the gradient goes on to both as it is.
pub fn add(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    sum_of(a, b, |grad| grad.clone())
}

pub fn sub(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    sum_of(a, b, |grad| like(grad, grad.dtype(), "neg"))
}

fn sum_of(
    a: impl Borrow<Tensor>,
    b: impl Borrow<Tensor>,
    second: impl Fn(&Tensor) -> Tensor + 'static,
) -> Tensor {
    let (x, y) = (a.borrow(), b.borrow());
    let recorder = x.context().record(&[x, y]);
    let out = binary(x, y, result_type(x, y), "add");
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        let other = step.needs(1).then(|| second(grad));
        grads![step.needs(0).then(|| grad.clone()), other]
    });
    drop(a);
    drop(b);
    out
}

/// `a * b`: keeps each operand that the other's gradient needs.
pub fn mul(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let (x, y) = (a.borrow(), b.borrow());
    let mut recorder = x.context().record(&[x, y]);
    recorder.save_if(recorder.needs(0), y);
    recorder.save_if(recorder.needs(1), x);
    let out = binary(x, y, result_type(x, y), "mul");
    recorder.finish(&[&out], |step| {
        let grad = step.grad();
        let other = step
            .needs(1)
            .then(|| binary(grad, step.saved(1), result_type(grad, step.saved(1)), "mul"));
        let this = step
            .needs(0)
            .then(|| binary(grad, step.saved(0), result_type(grad, step.saved(0)), "mul"));
        grads![this, other]
    });
    drop(a);
    drop(b);
    out
}

/// `a / b`: keeps the divisor, and the dividend where the divisor is trained.
pub fn div(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let (x, y) = (a.borrow(), b.borrow());
    let mut recorder = x.context().record(&[x, y]);
    recorder.save(y);
    recorder.save_if(recorder.needs(1), x);
    let out = binary(x, y, result_type(x, y), "div");
    recorder.finish(&[&out], |step| {
        let grad = step.grad();
        let other = step.needs(1).then(|| {
            // −grad · (a / b) / b
            let negated = like(grad, grad.dtype(), "neg");
            let quotient = binary(step.saved(1), step.saved(0), grad.dtype(), "div");
            let again = binary(&quotient, step.saved(0), grad.dtype(), "div");
            let product = binary(&negated, &again, grad.dtype(), "mul");
            drop(again);
            drop(quotient);
            drop(negated);
            product
        });
        let this = step
            .needs(0)
            .then(|| binary(grad, step.saved(0), grad.dtype(), "div"));
        grads![this, other]
    });
    drop(a);
    drop(b);
    out
}

/// `a + 1.0`, `1.0 + a`, `a - 1.0`.
pub fn add_number(a: impl Borrow<Tensor>) -> Tensor {
    let x = a.borrow();
    let recorder = x.context().record(&[x]);
    let out = like(x, x.dtype(), "add");
    recorder.finish(&[&out], |step| grads![Some(step.grad().clone())]);
    drop(a);
    out
}

/// `0.5 * a`, `a / 2.0`. The number is kept in host memory, and not through the hooks of checkpointing: backward needs no
/// recomputation for it.
pub fn mul_number(a: impl Borrow<Tensor>) -> Tensor {
    let x = a.borrow();
    let recorder = x.context().record(&[x]);
    let out = like(x, x.dtype(), "mul");
    recorder.finish(&[&out], |step| {
        grads![Some(like(step.grad(), step.grad().dtype(), "mul"))]
    });
    drop(a);
    out
}

/// `a *= 2.0`: no memory in the forward.
pub fn mul_number_in_place(a: &Tensor) {
    let recorder = a.context().record(&[a]);
    recorder.finish(&[a], |step| {
        grads![Some(like(step.grad(), step.grad().dtype(), "mul"))]
    });
}

/// `1.0 / a`: `a.reciprocal() * 1.0`.
pub fn reciprocal(a: impl Borrow<Tensor>) -> Tensor {
    let x = a.borrow();
    let mut recorder = x.context().record(&[x]);
    let inverse = like(x, x.dtype(), "reciprocal");
    recorder.save_output(&inverse);
    recorder.finish(&[&inverse], |step| {
        // −grad · (result · result)
        let grad = step.grad();
        let negated = like(grad, grad.dtype(), "neg");
        let square = like(step.saved(0), grad.dtype(), "mul");
        let product = like(grad, grad.dtype(), "mul");
        drop(square);
        drop(negated);
        grads![Some(product)]
    });
    let out = mul_number(inverse);
    drop(a);
    out
}

/// What an elementwise function of one operand keeps.
enum Keep {
    Nothing,
    Input,
    Result,
}

fn unary(
    a: impl Borrow<Tensor>,
    op: &'static str,
    keep: Keep,
    gradient: impl Fn(&Step<'_>) -> Tensor + 'static,
) -> Tensor {
    let x = a.borrow();
    let mut recorder = x.context().record(&[x]);
    if matches!(keep, Keep::Input) {
        recorder.save(x);
    }
    let out = like(x, x.dtype(), op);
    if matches!(keep, Keep::Result) {
        recorder.save_output(&out);
    }
    recorder.finish(&[&out], move |step| grads![Some(gradient(step))]);
    drop(a);
    out
}

/// A gradient in one kernel.
fn fused(step: &Step<'_>) -> Tensor {
    like(step.grad(), step.grad().dtype(), "backward")
}

pub fn neg(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "neg", Keep::Nothing, fused)
}

pub fn relu(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "relu", Keep::Result, fused)
}

pub fn gelu(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "gelu", Keep::Input, fused)
}

pub fn silu(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "silu", Keep::Input, fused)
}

pub fn sigmoid(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "sigmoid", Keep::Result, fused)
}

pub fn tanh(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "tanh", Keep::Result, fused)
}

/// Under autocast in fp32, as all of the following.
pub fn exp(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "exp", Keep::Result, fused);
    drop(a);
    out
}

pub fn log(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "log", Keep::Input, fused);
    drop(a);
    out
}

pub fn softplus(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "softplus", Keep::Input, fused);
    drop(a);
    out
}

/// grad = −½ · grad · result³.
pub fn rsqrt(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "rsqrt", Keep::Result, |step| {
        let grad = step.grad();
        let cube = like(step.saved(0), grad.dtype(), "pow");
        let scaled = like(grad, grad.dtype(), "mul");
        let product = like(grad, grad.dtype(), "mul");
        drop(scaled);
        drop(cube);
        product
    });
    drop(a);
    out
}

/// `a ** n` for a number n: grad = grad · (n · aⁿ⁻¹).
pub fn pow_number(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "pow", Keep::Input, |step| {
        let grad = step.grad();
        let power = like(step.saved(0), grad.dtype(), "pow");
        let scaled = like(&power, grad.dtype(), "mul");
        let product = like(grad, grad.dtype(), "mul");
        drop(scaled);
        drop(power);
        product
    });
    drop(a);
    out
}

/// `10000.0 ** a`, without a gradient: the number is brought to the device as a double.
pub fn number_pow(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = like(&x, x.dtype(), "pow");
    drop(x.context().empty("number", [], DType::Int64));
    drop(x);
    drop(a);
    out
}

/// grad · sinh(a).
pub fn cosh(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "cosh", Keep::Input, through_one_function);
    drop(a);
    out
}

/// grad · cosh(a).
pub fn sinh(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "sinh", Keep::Input, through_one_function);
    drop(a);
    out
}

fn through_one_function(step: &Step<'_>) -> Tensor {
    let function = like(step.saved(0), step.grad().dtype(), "sinh");
    let product = like(step.grad(), step.grad().dtype(), "mul");
    drop(function);
    product
}

/// grad · (a² − 1)^−½.
pub fn acosh(a: impl Borrow<Tensor>) -> Tensor {
    let x = autocast::raise(a.borrow());
    let out = unary(x, "acosh", Keep::Input, |step| {
        let grad = step.grad();
        let square = like(step.saved(0), grad.dtype(), "pow");
        let shifted = like(&square, grad.dtype(), "sub");
        let root = like(&shifted, grad.dtype(), "rsqrt");
        let product = like(grad, grad.dtype(), "mul");
        drop(root);
        drop(shifted);
        drop(square);
        product
    });
    drop(a);
    out
}

/// `a.clamp(min=…)`: the gradient through a mask and a zero on the device.
pub fn clamp(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "clamp", Keep::Input, |step| {
        let grad = step.grad();
        let zero = step.context.empty("scalar_tensor", [], grad.dtype());
        let mask = like(step.saved(0), DType::Bool, "ge");
        let chosen = like(grad, grad.dtype(), "where");
        drop(mask);
        drop(zero);
        chosen
    })
}

/// `a.masked_fill(mask, number)`: keeps the mask; the gradient is a masked copy.
pub fn masked_fill(a: impl Borrow<Tensor>, mask: impl Borrow<Tensor>) -> Tensor {
    let x = a.borrow();
    let mut recorder = x.context().record(&[x]);
    recorder.save(mask.borrow());
    let out = like(x, x.dtype(), "masked_fill");
    recorder.finish(&[&out], |step| {
        grads![Some(like(step.grad(), step.grad().dtype(), "masked_fill"))]
    });
    drop(a);
    drop(mask);
    out
}

/// `torch.where(mask, a, number)`: the number is brought to the device as a tensor without dimensions; keeps the mask. The gradient
/// is chosen against a zero in the same way.
pub fn where_else_number(mask: &Tensor, a: &Tensor) -> Tensor {
    let mut recorder = a.context().record(&[a]);
    recorder.save(mask);
    let number = a.context().empty("scalar_tensor", [], a.dtype());
    let out = binary(a, mask, a.dtype(), "where");
    drop(number);
    recorder.finish(&[&out], |step| {
        let grad = step.grad();
        let zero = step.context.empty("scalar_tensor", [], grad.dtype());
        let chosen = like(grad, grad.dtype(), "where");
        drop(zero);
        grads![Some(chosen)]
    });
    out
}

/// `torch.minimum(a, b)`: both are kept; the gradients go through masks.
pub fn minimum(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Tensor {
    let (x, y) = (a.borrow(), b.borrow());
    let mut recorder = x.context().record(&[x, y]);
    recorder.save(y);
    recorder.save(x);
    let out = binary(x, y, result_type(x, y), "minimum");
    recorder.finish(&[&out], |step| {
        let grad = step.grad();
        let masked = |wanted: bool| {
            wanted.then(|| {
                let mask = like(grad, DType::Bool, "ge");
                let part = like(grad, grad.dtype(), "masked_fill");
                drop(mask);
                part
            })
        };
        let other = masked(step.needs(1));
        grads![masked(step.needs(0)), other]
    });
    drop(a);
    drop(b);
    out
}

/// `a.abs()`: keeps its input; the gradient through its sign.
pub fn abs(a: impl Borrow<Tensor>) -> Tensor {
    unary(a, "abs", Keep::Input, |step| {
        let sign = like(step.saved(0), step.grad().dtype(), "sgn");
        let product = like(step.grad(), step.grad().dtype(), "mul");
        drop(sign);
        product
    })
}

/// A comparison, or another op of two operands without a gradient.
pub fn compare(a: impl Borrow<Tensor>, b: impl Borrow<Tensor>, dtype: DType) -> Tensor {
    let out = binary(a.borrow(), b.borrow(), dtype, "compare");
    drop(a);
    drop(b);
    out
}

/// An op of one operand without a gradient: `isinf`, `~`, comparisons with a number.
pub fn apply(a: impl Borrow<Tensor>, op: &'static str, dtype: DType) -> Tensor {
    let out = like(a.borrow(), dtype, op);
    drop(a);
    out
}
