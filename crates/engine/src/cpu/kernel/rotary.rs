//! Rotary position embedding: of each head, the columns i and i + head_dim/2 at position t turn
//! by t·frequency[i].
//!
//! Angles and their sines are computed in double precision whatever the element type: in single
//! precision an angle of 10⁵ would be off by a hundredth. A position's sines serve every head,
//! and every sequence where all have the same positions.

use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::scratch::{self, Owner};

/// Positions of one task.
const POSITIONS: usize = 8;

/// What a task needs in single precision with heads of 128 columns.
pub(super) const SCRATCH_BYTES: usize = POSITIONS * 128 * size_of::<f32>();

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryShape<'a> {
    pub batch: usize,
    pub seq: usize,
    /// Columns of a row, and how many of them turn: a whole number of heads.
    pub width: usize,
    pub columns: usize,
    /// What each pair of a head turns by from one position to the next.
    pub frequencies: &'a [f64],
    /// Of what has turned.
    pub scale: f64,
    /// Turns the other way, which undoes the rotation and, but for the scale, is its gradient.
    pub inverse: bool,
}

impl RotaryShape<'_> {
    fn head_dim(&self) -> usize {
        2 * self.frequencies.len()
    }
}

/// Turns `x [batch, seq, width]` into `y`; without `x`, what `y` holds. Positions are those given
/// (`[batch, seq]`), or count from zero in each sequence.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn rotate<F: Real>(
    shape: &RotaryShape<'_>,
    positions: Option<&[i32]>,
    x: Option<&[F]>,
    y: &mut [F],
) {
    let &RotaryShape {
        batch, seq, width, ..
    } = shape;
    let head_dim = shape.head_dim();
    assert!(shape.columns <= width && shape.columns.is_multiple_of(head_dim));
    assert_eq!(y.len(), batch * seq * width, "y");
    if let Some(x) = x {
        assert_eq!(x.len(), y.len(), "x");
    }
    if let Some(positions) = positions {
        assert_eq!(positions.len(), batch * seq, "positions");
    }
    let y = Shared::new(y);
    parallel::for_each(seq.div_ceil(POSITIONS), |task| {
        let first = task * POSITIONS;
        let own = first..seq.min(first + POSITIONS);
        scratch::with(Owner::Rotary, POSITIONS * head_dim, |table: &mut [F]| {
            if positions.is_none() {
                for (t, turn) in own.clone().zip(table.chunks_exact_mut(head_dim)) {
                    fill(shape, t as f64, turn);
                }
            }
            for b in 0..batch {
                for (t, turn) in own.clone().zip(table.chunks_exact_mut(head_dim)) {
                    if let Some(positions) = positions {
                        fill(shape, f64::from(positions[b * seq + t]), turn);
                    }
                    let start = (b * seq + t) * width;
                    // SAFETY: each task has its own positions.
                    let row = unsafe { y.part(start, width) };
                    if let Some(x) = x {
                        row.copy_from_slice(&x[start..start + width]);
                    }
                    let (cosines, sines) = turn.split_at(head_dim / 2);
                    turn_row(cosines, sines, &mut row[..shape.columns]);
                }
            }
        });
    });
}

/// A position's cosines, then as many sines.
fn fill<F: Real>(shape: &RotaryShape<'_>, position: f64, turn: &mut [F]) {
    let half = shape.frequencies.len();
    let sign = if shape.inverse { -1.0 } else { 1.0 };
    for (i, frequency) in shape.frequencies.iter().enumerate() {
        let (sine, cosine) = (position * frequency).sin_cos();
        turn[i] = F::from_f64(shape.scale * cosine);
        turn[half + i] = F::from_f64(shape.scale * sign * sine);
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

    fn frequencies(head_dim: usize) -> Vec<f64> {
        let power = |i| 10_000_f64.powf(-2.0 * i as f64 / head_dim as f64);
        (0..head_dim / 2).map(power).collect()
    }

    /// Two columns of each row do not turn.
    fn shape(batch: usize, seq: usize, heads: usize, frequencies: &[f64]) -> RotaryShape<'_> {
        let columns = heads * 2 * frequencies.len();
        RotaryShape {
            batch,
            seq,
            width: columns + 2,
            columns,
            frequencies,
            scale: 1.5,
            inverse: false,
        }
    }

    fn len(shape: &RotaryShape<'_>) -> usize {
        shape.batch * shape.seq * shape.width
    }

    /// Complex multiplication by powers of `e^{iθ}`, no angle beyond θ ever formed.
    fn naive(shape: &RotaryShape<'_>, positions: Option<&[i32]>, x: &[f64]) -> Vec<f64> {
        let half = shape.frequencies.len();
        let mut y = x.to_vec();
        for row in 0..shape.batch * shape.seq {
            let position = positions.map_or((row % shape.seq) as i32, |p| p[row]);
            for (i, theta) in shape.frequencies.iter().enumerate() {
                let mut turn = (shape.scale, 0.0);
                for _ in 0..position {
                    let (re, im) = turn;
                    turn = (
                        re * theta.cos() - im * theta.sin(),
                        re * theta.sin() + im * theta.cos(),
                    );
                }
                for head in 0..shape.columns / (2 * half) {
                    let at = row * shape.width + head * 2 * half + i;
                    let (re, im) = (x[at], x[at + half]);
                    y[at] = re * turn.0 - im * turn.1;
                    y[at + half] = re * turn.1 + im * turn.0;
                }
            }
        }
        y
    }

    #[test]
    fn rotates_as_complex_numbers_do_in_place_or_not() {
        for (batch, seq, heads, head_dim) in [(1, 1, 1, 2), (2, 7, 3, 6), (3, 37, 1, 20)] {
            let frequencies = frequencies(head_dim);
            let shape = shape(batch, seq, heads, &frequencies);
            let x = random(len(&shape), 1);
            let count = batch * seq;
            let given: Vec<i32> = (0..count).map(|row| (row * 5 % 11) as i32).collect();
            for positions in [None, Some(&given[..])] {
                let expected = naive(&shape, positions, &x);
                let mut y = vec![7.0; x.len()];
                rotate(&shape, positions, Some(&x), &mut y);
                assert_close("y", &y, &expected, 1e-12);
                let mut in_place = x.clone();
                rotate(&shape, positions, None, &mut in_place);
                assert_eq!(in_place, y);
                let mut y = single(&x);
                rotate(&shape, positions, None, &mut y);
                assert_single_close("y in f32", &y, &expected, 2e-7);
            }
        }
    }

    #[test]
    fn single_precision_is_exact_at_large_positions() {
        let frequencies = frequencies(8);
        let shape = shape(1, 1, 1, &frequencies);
        let x = random(len(&shape), 2);
        let mut y = single(&x);
        rotate(&shape, Some(&[99_999]), None, &mut y);
        let expected = naive(&shape, Some(&[99_999]), &x);
        assert_single_close("y", &y, &expected, 2e-7);
    }

    #[test]
    fn the_inverse_undoes_it_and_is_its_gradient() {
        let frequencies = frequencies(6);
        let shape = shape(2, 7, 2, &frequencies);
        let inverse = RotaryShape {
            inverse: true,
            ..shape
        };
        let (x, dy) = (random(len(&shape), 1), random(len(&shape), 2));
        let mut back = x.clone();
        rotate(
            &RotaryShape {
                scale: 1.0,
                ..shape
            },
            None,
            None,
            &mut back,
        );
        rotate(
            &RotaryShape {
                scale: 1.0,
                ..inverse
            },
            None,
            None,
            &mut back,
        );
        assert_close("x", &back, &x, 1e-14);
        let mut dx = vec![0.0; dy.len()];
        rotate(&inverse, None, Some(&dy), &mut dx);
        assert_gradient("x", &x, &dx, |x| {
            let mut y = vec![0.0; x.len()];
            rotate(&shape, None, Some(x), &mut y);
            inner_product(&y, &dy)
        });
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let frequencies = frequencies(32);
        let shape = shape(2, 77, 2, &frequencies);
        let x = single(&random(len(&shape), 3));
        let run = |threads| {
            with_threads(threads, || {
                let mut y = vec![0.0; x.len()];
                rotate(&shape, None, Some(&x), &mut y);
                y
            })
        };
        assert_eq!(run(1), run(2));
    }
}
