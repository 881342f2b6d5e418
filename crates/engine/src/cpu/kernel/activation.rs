//! Pointwise functions and the sum of two tensors.

use cinch_graph::op::ActivationKind;

use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Elements of one task.
pub(super) const TASK: usize = 16 * 1024;

/// Elements that are copied to where nothing is written, so that one loop serves wherever the
/// inputs are.
pub(super) const PIECE: usize = 128;

/// `y = f(x)`; without `x`, of what `y` holds.
pub fn forward<F: Real>(kind: ActivationKind, x: Option<&[F]>, y: &mut [F]) {
    check_len("activation input", x, y);
    for_each_task(y, |start, y| {
        forward_block(kind, x.map(|x| &x[start..start + y.len()]), y);
    });
}

/// `dx = dy · f′(x)`; without `dy`, of what `dx` holds.
pub fn backward<F: Real>(kind: ActivationKind, dy: Option<&[F]>, x: &[F], dx: &mut [F]) {
    check_len("activation output gradient", dy, dx);
    check_len("activation input", Some(x), dx);
    for_each_task(dx, |start, dx| {
        let part = start..start + dx.len();
        backward_block(kind, dy.map(|dy| &dy[part.clone()]), &x[part], dx);
    });
}

/// `dx = dy · f′(x)` and `y = f(x)`. What is absent is in the outputs' memory: x in `dx`, dy in `y`.
pub fn backward_with_value<F: Real>(
    kind: ActivationKind,
    dy: Option<&[F]>,
    x: Option<&[F]>,
    dx: &mut [F],
    y: &mut [F],
) {
    check_len("activation output gradient", dy, dx);
    check_len("activation input", x, dx);
    check_len("activation", Some(y), dx);
    let y = Shared::new(y);
    for_each_task(dx, |start, dx| {
        // SAFETY: each task takes its own block.
        let y = unsafe { y.part(start, dx.len()) };
        let [dy, x] = [dy, x].map(|given| given.map(|given| &given[start..start + dx.len()]));
        let starts = (0..dx.len()).step_by(PIECE);
        for (start, (dx, y)) in starts.zip(dx.chunks_mut(PIECE).zip(y.chunks_mut(PIECE))) {
            let part = start..start + dx.len();
            let mut pieces = [[F::ZERO; PIECE]; 2];
            let [d, v] = pieces.each_mut().map(|piece| &mut piece[..part.len()]);
            d.copy_from_slice(dy.map_or(&*y, |dy| &dy[part.clone()]));
            v.copy_from_slice(x.map_or(&*dx, |x| &x[part]));
            forward_block(kind, Some(v), y);
            backward_block(kind, Some(d), v, dx);
        }
    });
}

/// `y = a + b`; without `a`, added to what `y` holds.
pub fn add<F: Real>(a: Option<&[F]>, b: &[F], y: &mut [F]) {
    check_len("first summand", a, y);
    check_len("second summand", Some(b), y);
    for_each_task(y, |start, y| {
        let part = start..start + y.len();
        add_block(a.map(|a| &a[part.clone()]), &b[part], y);
    });
}

pub(super) fn check_len<F>(name: &str, given: Option<&[F]>, target: &[F]) {
    if let Some(given) = given {
        assert_eq!(given.len(), target.len(), "{name}");
    }
}

pub(super) fn for_each_task<F: Real>(
    target: &mut [F],
    work: impl Fn(usize, &mut [F]) + Sync + Send,
) {
    let target = Shared::new(target);
    for_each(target.len().div_ceil(TASK), |task| {
        let start = task * TASK;
        // SAFETY: each task takes its own block.
        let part = unsafe { target.part(start, TASK.min(target.len() - start)) };
        work(start, part);
    });
}

simd! {
    fn forward_block<F: Real>(kind: ActivationKind, x: Option<&[F]>, y: &mut [F]) {
        match kind {
            ActivationKind::GeluTanh => map(x, y, gelu_tanh),
            ActivationKind::Gelu => map(x, y, gelu),
            ActivationKind::Silu => map(x, y, silu),
            ActivationKind::Relu => map(x, y, relu),
        }
    }
}

simd! {
    fn backward_block<F: Real>(kind: ActivationKind, dy: Option<&[F]>, x: &[F], dx: &mut [F]) {
        match kind {
            ActivationKind::GeluTanh => map_with(dy, x, dx, |dy, x| dy * gelu_tanh_slope(x)),
            ActivationKind::Gelu => map_with(dy, x, dx, |dy, x| dy * gelu_slope(x)),
            ActivationKind::Silu => map_with(dy, x, dx, |dy, x| dy * silu_slope(x)),
            ActivationKind::Relu => map_with(dy, x, dx, |dy, x| {
                if x > F::ZERO { dy } else { F::ZERO }
            }),
        }
    }
}

simd! {
    fn add_block<F: Real>(a: Option<&[F]>, b: &[F], y: &mut [F]) {
        map_with(a, b, y, |a, b| a + b);
    }
}

#[inline(always)]
fn map<F: Real>(x: Option<&[F]>, y: &mut [F], f: impl Fn(F) -> F) {
    match x {
        Some(x) => {
            for (y, x) in y.iter_mut().zip(x) {
                *y = f(*x);
            }
        }
        None => {
            for y in y {
                *y = f(*y);
            }
        }
    }
}

/// `target = f(a, b)`; without `a`, of what `target` holds.
#[inline(always)]
pub(super) fn map_with<F: Real>(a: Option<&[F]>, b: &[F], target: &mut [F], f: impl Fn(F, F) -> F) {
    match a {
        Some(a) => {
            for ((target, a), b) in target.iter_mut().zip(a).zip(b) {
                *target = f(*a, *b);
            }
        }
        None => {
            for (target, b) in target.iter_mut().zip(b) {
                *target = f(*target, *b);
            }
        }
    }
}

/// √(2/π), and the weight of the cube inside GELU's tanh.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

#[inline(always)]
fn half<F: Real>() -> F {
    F::from_f64(0.5)
}

#[inline(always)]
pub(super) fn gelu_tanh<F: Real>(x: F) -> F {
    let inside = F::from_f64(SQRT_2_OVER_PI) * (x + F::from_f64(CUBE) * x * x * x);
    half::<F>() * x * (F::ONE + inside.tanh())
}

/// With `t = tanh(u)`: `(1 + t)/2 + x/2 · (1 − t²) · u′`.
#[inline(always)]
pub(super) fn gelu_tanh_slope<F: Real>(x: F) -> F {
    let square = x * x;
    let inside = F::from_f64(SQRT_2_OVER_PI) * (x + F::from_f64(CUBE) * square * x);
    let inside_slope = F::from_f64(SQRT_2_OVER_PI) * (F::ONE + F::from_f64(3.0 * CUBE) * square);
    let t = inside.tanh();
    half::<F>() * ((F::ONE + t) + x * (F::ONE - t * t) * inside_slope)
}

/// Φ, the normal distribution function.
#[inline(always)]
pub(super) fn normal_distribution<F: Real>(x: F) -> F {
    half::<F>() * (F::ONE + (x * F::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

#[inline(always)]
pub(super) fn gelu<F: Real>(x: F) -> F {
    x * normal_distribution(x)
}

/// `Φ(x) + x·φ(x)`, φ being the normal density.
#[inline(always)]
pub(super) fn gelu_slope<F: Real>(x: F) -> F {
    let density = (-half::<F>() * x * x).exp() * F::from_f64(0.5 * SQRT_2_OVER_PI);
    normal_distribution(x) + x * density
}

/// `x · σ(x)`.
#[inline(always)]
pub(super) fn silu<F: Real>(x: F) -> F {
    x * x.sigmoid()
}

/// `σ(x) · (1 + x · (1 − σ(x)))`.
#[inline(always)]
pub(super) fn silu_slope<F: Real>(x: F) -> F {
    let sigmoid = x.sigmoid();
    sigmoid * (F::ONE + x * (F::ONE - sigmoid))
}

#[inline(always)]
pub(super) fn relu<F: Real>(x: F) -> F {
    x.larger(F::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::*;

    const KINDS: [ActivationKind; 4] = [
        ActivationKind::GeluTanh,
        ActivationKind::Gelu,
        ActivationKind::Silu,
        ActivationKind::Relu,
    ];

    fn points(len: usize) -> Vec<f64> {
        random(len, 1).iter().map(|v| v * 8.0).collect()
    }

    /// The definitions; Φ by integrating the density with Simpson's rule.
    fn reference(kind: ActivationKind, x: f64) -> f64 {
        match kind {
            ActivationKind::GeluTanh => {
                let k = (2.0 / std::f64::consts::PI).sqrt();
                0.5 * x * (1.0 + (k * (x + 0.044715 * x.powi(3))).tanh())
            }
            ActivationKind::Gelu => {
                let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt();
                let steps = 2000;
                let width = x / f64::from(steps);
                let mut area = density(0.0) + density(x);
                for i in 1..steps {
                    let weight = if i % 2 == 1 { 4.0 } else { 2.0 };
                    area += weight * density(f64::from(i) * width);
                }
                x * (0.5 + area * width / 3.0)
            }
            ActivationKind::Silu => x / (1.0 + (-x).exp()),
            ActivationKind::Relu => x.max(0.0),
        }
    }

    #[test]
    fn forward_is_the_definition_in_place_or_not() {
        let x = points(1037);
        for kind in KINDS {
            let expected: Vec<f64> = x.iter().map(|x| reference(kind, *x)).collect();
            let mut y = vec![0.0; x.len()];
            forward(kind, Some(&x), &mut y);
            assert_close("y", &y, &expected, 1e-12);
            let mut in_place = x.clone();
            forward(kind, None, &mut in_place);
            assert_eq!(in_place, y);
            let mut y = single(&x);
            forward(kind, None, &mut y);
            assert_single_close("y in f32", &y, &expected, 1e-6);
        }
    }

    /// With the value besides: the same bits as one after the other, wherever they are written.
    #[test]
    fn backward_with_value_is_both() {
        let x = points(TASK + 237);
        let (dy, nothing) = (random(x.len(), 2), vec![7.0; x.len()]);
        for kind in KINDS {
            let (mut dx, mut y) = (nothing.clone(), nothing.clone());
            forward(kind, Some(&x), &mut y);
            backward(kind, Some(&dy), &x, &mut dx);
            for (over_x, over_dy) in [(true, true), (true, false), (false, true), (false, false)] {
                let held =
                    |held: bool, by: &[f64]| if held { by.to_vec() } else { nothing.clone() };
                let (mut dx_at, mut y_at) = (held(over_x, &x), held(over_dy, &dy));
                let given = ((!over_dy).then_some(&dy[..]), (!over_x).then_some(&x[..]));
                backward_with_value(kind, given.0, given.1, &mut dx_at, &mut y_at);
                assert_eq!((&dx_at, &y_at), (&dx, &y), "{over_x} {over_dy}");
            }
        }
    }

    #[test]
    fn backward_is_the_slope_in_place_or_not() {
        let x = points(237);
        let dy = random(x.len(), 2);
        for kind in KINDS {
            let mut dx = vec![0.0; x.len()];
            backward(kind, Some(&dy), &x, &mut dx);
            for i in 0..x.len() {
                assert_gradient("x", &x[i..=i], &dx[i..=i], |x| {
                    let mut y = [0.0];
                    forward(kind, Some(x), &mut y);
                    y[0] * dy[i]
                });
            }
            let mut in_place = dy.clone();
            backward(kind, None, &x, &mut in_place);
            assert_eq!(in_place, dx);
            let mut in_single = single(&dy);
            backward(kind, None, &single(&x), &mut in_single);
            assert_single_close("dx in f32", &in_single, &dx, 2e-6);
        }
    }

    #[test]
    fn adds_in_place_or_not() {
        let (a, b) = (random(37, 1), random(37, 2));
        let expected: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let mut y = vec![0.0; 37];
        add(Some(&a), &b, &mut y);
        assert_eq!(y, expected);
        let mut y = a.clone();
        add(None, &b, &mut y);
        assert_eq!(y, expected);
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let x = single(&points(3 * TASK + 5));
        let run = |threads| {
            with_threads(threads, || {
                let mut y = vec![0.0; x.len()];
                forward(ActivationKind::Gelu, Some(&x), &mut y);
                backward(ActivationKind::GeluTanh, None, &x, &mut y);
                y
            })
        };
        assert_eq!(run(1), run(2));
    }
}
