//! Rotary position embedding: of each head, the columns i and i + head_dim/2 at position t turn
//! by t·base^(−2i/head_dim).
//!
//! Angles and their sines are computed in double precision whatever the element type: in single
//! precision an angle of 10⁵ would be off by a hundredth. A position's sines serve every head of
//! every sequence.

use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::scratch::{self, Owner};

/// Positions of one task: a frequency, which takes a power, serves them all.
const POSITIONS: usize = 8;

/// What a task needs in single precision with heads of 128 columns.
pub(super) const SCRATCH_BYTES: usize = POSITIONS * 128 * size_of::<f32>();

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryShape {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    /// Even.
    pub head_dim: usize,
    pub base: f64,
    /// Turns the other way, which undoes the rotation and is its gradient.
    pub inverse: bool,
}

/// Turns `x [batch, seq, heads·head_dim]` into `y`; without `x`, what `y` holds.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn rotate<F: Real>(shape: &RotaryShape, x: Option<&[F]>, y: &mut [F]) {
    let &RotaryShape {
        batch,
        seq,
        heads,
        head_dim,
        ..
    } = shape;
    assert!(head_dim.is_multiple_of(2), "{head_dim} columns do not pair");
    let width = heads * head_dim;
    assert_eq!(y.len(), batch * seq * width, "y");
    if let Some(x) = x {
        assert_eq!(x.len(), y.len(), "x");
    }
    let y = Shared::new(y);
    parallel::for_each(seq.div_ceil(POSITIONS), |task| {
        let first = task * POSITIONS;
        let positions = first..seq.min(first + POSITIONS);
        scratch::with(Owner::Rotary, POSITIONS * head_dim, |table: &mut [F]| {
            fill(shape, positions.clone(), table);
            for (t, turn) in positions.zip(table.chunks_exact(head_dim)) {
                let (cosines, sines) = turn.split_at(head_dim / 2);
                for b in 0..batch {
                    let start = (b * seq + t) * width;
                    // SAFETY: each task has its own positions.
                    let row = unsafe { y.part(start, width) };
                    if let Some(x) = x {
                        row.copy_from_slice(&x[start..start + width]);
                    }
                    turn_row(cosines, sines, row);
                }
            }
        });
    });
}

/// For each position, head_dim/2 cosines, then as many sines.
fn fill<F: Real>(shape: &RotaryShape, positions: std::ops::Range<usize>, table: &mut [F]) {
    let half = shape.head_dim / 2;
    let sign = if shape.inverse { -1.0 } else { 1.0 };
    for i in 0..half {
        let frequency = shape.base.powf(-(i as f64) / half as f64);
        for (t, turn) in positions.clone().zip(table.chunks_exact_mut(2 * half)) {
            let (sine, cosine) = (t as f64 * frequency).sin_cos();
            turn[i] = F::from_f64(cosine);
            turn[half + i] = F::from_f64(sign * sine);
        }
    }
}

simd! {
    /// `(a, b) → (a·cos − b·sin, b·cos + a·sin)` for each pair of each head of a row.
    fn turn_row<F: Real>(cosines: &[F], sines: &[F], row: &mut [F]) {
        let half = cosines.len();
        for head in row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), &cosine), &sine) in
                first.iter_mut().zip(second).zip(cosines).zip(sines)
            {
                (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::*;

    fn shape(batch: usize, seq: usize, heads: usize, head_dim: usize) -> RotaryShape {
        RotaryShape {
            batch,
            seq,
            heads,
            head_dim,
            base: 10_000.0,
            inverse: false,
        }
    }

    fn len(shape: &RotaryShape) -> usize {
        shape.batch * shape.seq * shape.heads * shape.head_dim
    }

    /// Complex multiplication by powers of `e^{iθ}`, no angle beyond θ ever formed.
    fn naive(shape: &RotaryShape, x: &[f64]) -> Vec<f64> {
        let (half, width) = (shape.head_dim / 2, shape.heads * shape.head_dim);
        let mut y = x.to_vec();
        for b in 0..shape.batch {
            for i in 0..half {
                let theta = 1.0 / shape.base.powf(2.0 * i as f64 / shape.head_dim as f64);
                let step = (theta.cos(), theta.sin());
                let mut turn = (1.0, 0.0);
                for t in 0..shape.seq {
                    for h in 0..shape.heads {
                        let at = (b * shape.seq + t) * width + h * shape.head_dim + i;
                        let (re, im) = (x[at], x[at + half]);
                        y[at] = re * turn.0 - im * turn.1;
                        y[at + half] = re * turn.1 + im * turn.0;
                    }
                    turn = (
                        turn.0 * step.0 - turn.1 * step.1,
                        turn.0 * step.1 + turn.1 * step.0,
                    );
                }
            }
        }
        y
    }

    #[test]
    fn rotates_as_complex_numbers_do_in_place_or_not() {
        for shape in [
            shape(1, 1, 1, 2),
            shape(2, 7, 3, 6),
            shape(3, 37, 1, 20),
            shape(1, 130, 2, 64),
        ] {
            let x = random(len(&shape), 1);
            let expected = naive(&shape, &x);
            let mut y = vec![7.0; x.len()];
            rotate(&shape, Some(&x), &mut y);
            assert_close("y", &y, &expected, 1e-12);
            let mut in_place = x.clone();
            rotate(&shape, None, &mut in_place);
            assert_eq!(in_place, y);
            let mut y = single(&x);
            rotate(&shape, None, &mut y);
            assert_single_close("y in f32", &y, &expected, 2e-7);
        }
    }

    #[test]
    fn single_precision_is_exact_at_large_positions() {
        let shape = shape(1, 100_000, 1, 8);
        let x = random(len(&shape), 2);
        let mut y = single(&x);
        rotate(&shape, None, &mut y);
        assert_single_close("y", &y, &naive(&shape, &x), 2e-7);
    }

    #[test]
    fn the_inverse_undoes_it_and_is_its_gradient() {
        let shape = shape(2, 7, 2, 6);
        let inverse = RotaryShape {
            inverse: true,
            ..shape
        };
        let (x, dy) = (random(len(&shape), 1), random(len(&shape), 2));
        let mut back = x.clone();
        rotate(&shape, None, &mut back);
        rotate(&inverse, None, &mut back);
        assert_close("x", &back, &x, 1e-14);
        let mut dx = vec![0.0; dy.len()];
        rotate(&inverse, Some(&dy), &mut dx);
        assert_gradient("x", &x, &dx, |x| {
            let mut y = vec![0.0; x.len()];
            rotate(&shape, Some(x), &mut y);
            inner_product(&y, &dy)
        });
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let shape = shape(2, 77, 2, 32);
        let x = single(&random(len(&shape), 3));
        let run = |threads| {
            with_threads(threads, || {
                let mut y = vec![0.0; x.len()];
                rotate(&shape, Some(&x), &mut y);
                y
            })
        };
        assert_eq!(run(1), run(2));
    }
}
