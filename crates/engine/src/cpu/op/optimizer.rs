//! The norm of gradients and the update.

use cinch_graph::op;

use crate::arena::Element;
use crate::cpu::kernel::{eight_bit, optimizer};
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;

pub fn gradient_squares<F: Real + Element>(x: &Operands<'_>, op: &op::GradientSquares) {
    let gradient = x.input::<F>(0);
    let count = optimizer::partials_len(gradient.len());
    let sums = &mut x.output::<f64>(0)[op.first..op.first + count];
    optimizer::squares(gradient, sums);
}

/// The sums of squares of all gradients' blocks, added up in the order of the parameters whether
/// they were made here or one gradient at a time.
pub fn gradient_norm<F: Real + Element>(x: &Operands<'_>, op: &op::GradientNorm) {
    let sum: f64 = if op.from_squares {
        x.input::<f64>(0).iter().sum()
    } else {
        let partials = x.workspace::<f64>();
        let mut first = 0;
        for input in 0..x.node.inputs.len() {
            let gradient = x.input::<F>(input);
            optimizer::squares(gradient, &mut partials[first..]);
            first += optimizer::partials_len(gradient.len());
        }
        partials[..first].iter().sum()
    };
    let norm = sum.sqrt();
    // The small constant is PyTorch's, and keeps a zero norm from dividing.
    let factor = op
        .max_norm
        .map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
    let out = x.output::<f32>(0);
    out[0] = norm as f32;
    out[1] = factor as f32;
}

pub fn update<F: Real + Element>(x: &Operands<'_>, op: &op::AdamW) {
    let scalars = x.input::<f32>(1);
    let factor = if op.factor { x.input::<f32>(2)[1] } else { 1.0 };
    if factor == 0.0 {
        return;
    }
    let settings = optimizer::AdamW {
        beta1: op.beta1,
        beta2: op.beta2,
        epsilon: op.epsilon,
        weight_decay: op.weight_decay,
        learning_rate: f64::from(scalars[0]) * op.learning_rate_scale,
        bias_correction1: f64::from(scalars[1]),
        bias_correction2: f64::from(scalars[2]),
        gradient_scale: f64::from(factor),
    };
    let layout = op.layout();
    let (parameter, gradient) = (x.output::<F>(0), x.input(0));
    match layout.scales {
        None => {
            let (m, v) = (x.output(layout.m), x.output(layout.v));
            optimizer::adamw(parameter, gradient, m, v, &settings);
        }
        Some(scales) => {
            let moment = |codes, scales| eight_bit::Moment {
                codes: x.output(codes),
                scales: x.output(scales),
            };
            let (m, v) = (moment(layout.m, scales[0]), moment(layout.v, scales[1]));
            eight_bit::adamw(parameter, gradient, m, v, &settings);
        }
    }
}
