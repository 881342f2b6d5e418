//! The update of parameters, in one pass over memory, and the gradient norm that clipping
//! needs.

use super::lanes::sum;
use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Elements of one task.
pub(super) const TASK: usize = 64 * 1024;

/// Elements summed in the kernel's own precision before the sum moves to `f64`.
const RUN: usize = 4096;

/// The settings of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    pub learning_rate: f64,
    /// `1 − beta1^step`, steps counting from 1.
    pub bias_correction1: f64,
    /// `1 − beta2^step`.
    pub bias_correction2: f64,
    /// What the gradient is multiplied with first: clipping, loss scaling.
    pub gradient_scale: f64,
}

/// One number's step, as `torch.optim.AdamW` defines it:
///
/// ```text
/// g = gradient_scale · grad                     p ← p · (1 − lr · weight_decay)
/// m ← m + (1 − β₁)(g − m)                       v ← β₂ v + (1 − β₂) g²
/// p ← p − lr/c₁ · m / (√v/√c₂ + ε)              c₁, c₂ the bias corrections
/// ```
#[derive(Clone, Copy)]
pub(super) struct Update<F> {
    scale: F,
    keep: F,
    weight1: F,
    beta2: F,
    weight2: F,
    step: F,
    root2: F,
    epsilon: F,
}

impl<F: Real> Update<F> {
    #[inline(always)]
    pub fn new(settings: &AdamW) -> Self {
        let keep = 1.0 - settings.learning_rate * settings.weight_decay;
        Self {
            scale: F::from_f64(settings.gradient_scale),
            keep: F::from_f64(keep),
            weight1: F::from_f64(1.0 - settings.beta1),
            beta2: F::from_f64(settings.beta2),
            weight2: F::from_f64(1.0 - settings.beta2),
            step: F::from_f64(settings.learning_rate / settings.bias_correction1),
            root2: F::from_f64(1.0 / settings.bias_correction2.sqrt()),
            epsilon: F::from_f64(settings.epsilon),
        }
    }

    #[inline(always)]
    pub fn apply(&self, parameter: &mut F, gradient: F, m: &mut F, v: &mut F) {
        let g = gradient * self.scale;
        *m = self.weight1.fma(g - *m, *m);
        *v = self.beta2.fma(*v, self.weight2 * g * g);
        let root = v.sqrt().fma(self.root2, self.epsilon);
        *parameter = *parameter * self.keep - self.step * *m / root;
    }
}

/// `Update` of every number of a parameter.
pub fn adamw<F: Real>(
    parameter: &mut [F],
    gradient: &[F],
    m: &mut [F],
    v: &mut [F],
    settings: &AdamW,
) {
    let len = parameter.len();
    assert_eq!(
        (gradient.len(), m.len(), v.len()),
        (len, len, len),
        "AdamW operands"
    );
    let (parameter, m, v) = (Shared::new(parameter), Shared::new(m), Shared::new(v));
    for_each(len.div_ceil(TASK), |task| {
        let start = task * TASK;
        let count = TASK.min(len - start);
        // SAFETY: each task takes its own block.
        let (parameter, m, v) = unsafe {
            (
                parameter.part(start, count),
                m.part(start, count),
                v.part(start, count),
            )
        };
        adamw_block(parameter, &gradient[start..start + count], m, v, settings);
    });
}

simd! {
    fn adamw_block<F: Real>(
        parameter: &mut [F],
        gradient: &[F],
        m: &mut [F],
        v: &mut [F],
        settings: &AdamW,
    ) {
        let update = Update::<F>::new(settings);
        let len = parameter.len();
        let (gradient, m, v) = (&gradient[..len], &mut m[..len], &mut v[..len]);
        for i in 0..len {
            update.apply(&mut parameter[i], gradient[i], &mut m[i], &mut v[i]);
        }
    }
}

/// Elements of the partial sums of `sum_of_squares`.
pub fn partials_len(len: usize) -> usize {
    len.div_ceil(TASK)
}

/// `Σ x²` of each `TASK` elements, as many as [`partials_len`]. Their sum in order is that of
/// all.
pub fn squares<F: Real>(x: &[F], partials: &mut [f64]) {
    let count = partials_len(x.len());
    let shared = Shared::new(&mut partials[..count]);
    for_each(count, |task| {
        let block = &x[task * TASK..x.len().min((task + 1) * TASK)];
        // SAFETY: each task writes its own sum.
        let partial = unsafe { shared.part(task, 1) };
        partial[0] = squares_of_block(block);
    });
}

simd! {
    fn squares_of_block<F: Real>(x: &[F]) -> f64 {
        let mut total = 0.0;
        for run in x.chunks(RUN) {
            total += sum(run, |v| v * v).to_f64();
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::*;

    fn settings(step: i32) -> AdamW {
        AdamW {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            learning_rate: 3e-3,
            bias_correction1: 1.0 - 0.9_f64.powi(step),
            bias_correction2: 1.0 - 0.95_f64.powi(step),
            gradient_scale: 0.5,
        }
    }

    /// Three steps of the textbook update: decoupled decay, then m̂/(√v̂ + ε).
    #[test]
    fn three_steps_are_the_textbook_update() {
        let start = random(1037, 1);
        let (mut p, mut m, mut v) = (start.clone(), vec![0.0; 1037], vec![0.0; 1037]);
        let (mut p32, mut m32, mut v32) = (single(&p), vec![0.0_f32; 1037], vec![0.0_f32; 1037]);
        let (mut rp, mut rm, mut rv) = (p.clone(), m.clone(), v.clone());
        for step in 1..=3 {
            let gradient = random(1037, 10 + step as u64);
            let s = settings(step);
            adamw(&mut p, &gradient, &mut m, &mut v, &s);
            adamw(&mut p32, &single(&gradient), &mut m32, &mut v32, &s);
            for i in 0..rp.len() {
                let g = gradient[i] * 0.5;
                rp[i] -= 3e-3 * 0.1 * rp[i];
                rm[i] = 0.9 * rm[i] + 0.1 * g;
                rv[i] = 0.95 * rv[i] + 0.05 * g * g;
                let m_hat = rm[i] / (1.0 - 0.9_f64.powi(step));
                let v_hat = rv[i] / (1.0 - 0.95_f64.powi(step));
                rp[i] -= 3e-3 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        assert_close("parameter", &p, &rp, 1e-14);
        assert_close("m", &m, &rm, 1e-14);
        assert_close("v", &v, &rv, 1e-14);
        assert_single_close("parameter in f32", &p32, &rp, 1e-6);
    }

    /// On the first step every parameter moves by the learning rate against its gradient,
    /// whatever the gradient's size, and a zero gradient leaves only the decay.
    #[test]
    fn the_first_step_has_the_length_of_the_learning_rate() {
        let (mut p, mut m, mut v) = ([1.0, 1.0, 1.0], [0.0; 3], [0.0; 3]);
        adamw(&mut p, &[1e-3, -50.0, 0.0], &mut m, &mut v, &settings(1));
        let decayed = 1.0 - 3e-4;
        assert_close(
            "parameter",
            &p,
            &[decayed - 3e-3, decayed + 3e-3, decayed],
            1e-6,
        );
    }

    #[test]
    fn squares_are_summed_accurately_at_any_length() {
        for len in [0, 1, 31, TASK, TASK + 1, 3 * TASK + 77] {
            let x = random(len, 4);
            let expected: f64 = x.iter().map(|v| v * v).sum();
            let mut partials = vec![0.0; partials_len(len)];
            squares(&x, &mut partials);
            let ours: f64 = partials.iter().sum();
            assert!((ours - expected).abs() <= 1e-12 * expected, "{len}");
            squares(&single(&x), &mut partials);
            let ours: f64 = partials.iter().sum();
            assert!((ours - expected).abs() <= 1e-6 * expected, "{len} in f32");
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let len = 3 * TASK + 77;
        let gradient = single(&random(len, 1));
        let run = |threads| {
            with_threads(threads, || {
                let mut p = single(&random(len, 2));
                let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
                adamw(&mut p, &gradient, &mut m, &mut v, &settings(1));
                let mut partials = vec![0.0; partials_len(len)];
                squares(&p, &mut partials);
                (p, m, v, partials)
            })
        };
        assert_eq!(run(1), run(2));
    }
}
