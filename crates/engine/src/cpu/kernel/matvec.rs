//! One row times a matrix: `y = x·Wᵀ + b` with W `[N, K]`. Every number of W is read once and
//! used once, so this runs as fast as memory gives them; the matrix product's packing would read
//! and write them twice more.
//!
//! An element of y is a sum over lanes whose order depends on K alone.

use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::lanes::{LANES, Lanes, prefetch, total};

/// Numbers of W that a task reads: what is read meanwhile outweighs waking a core.
const TASK: usize = 1 << 16;
/// Rows that run side by side, to hide the latency of additions.
const TOGETHER: usize = 4;
/// Numbers of W between asking for them and reading them.
const AHEAD: usize = 1 << 10;

/// `y[j] = scale·⟨x, W[j]⟩ (+ bias[j])`, or adds that to y where `add`.
///
/// # Panics
/// Where W or the bias does not fit y.
pub fn matvec<F: Real>(x: &[F], w: &[F], scale: F, bias: Option<&[F]>, add: bool, y: &mut [F]) {
    let (k, n) = (x.len(), y.len());
    assert!(w.len() >= n * k, "W is shorter than {n} rows of {k}");
    if let Some(bias) = bias {
        assert!(bias.len() >= n, "the bias is shorter than y");
    }
    let rows = (TASK / k.max(1)).next_multiple_of(TOGETHER).max(TOGETHER);
    let y = Shared::new(y);
    for_each(n.div_ceil(rows), |task| {
        let first = task * rows;
        let count = rows.min(n - first);
        // SAFETY: each task has its own rows.
        let y = unsafe { y.part(first, count) };
        let bias = bias.map(|bias| &bias[first..first + count]);
        multiply(x, &w[first * k..(first + count) * k], scale, bias, add, y);
    });
}

simd! {
    fn multiply<F: Real>(
        x: &[F],
        w: &[F],
        scale: F,
        bias: Option<&[F]>,
        add: bool,
        y: &mut [F],
    ) {
        let k = x.len();
        let mut row = 0;
        while row < y.len() {
            let left = y.len() - row;
            let mut sums = [F::ZERO; TOGETHER];
            if left >= TOGETHER {
                sums = rows::<F, TOGETHER>(x, w, row * k);
            } else {
                for (i, sum) in sums.iter_mut().enumerate().take(left) {
                    *sum = rows::<F, 1>(x, w, (row + i) * k)[0];
                }
            }
            for (i, &sum) in sums.iter().enumerate().take(left) {
                let mut value = sum * scale;
                if let Some(bias) = bias {
                    value += bias[row + i];
                }
                if add {
                    value += y[row + i];
                }
                y[row + i] = value;
            }
            row += TOGETHER.min(left);
        }
    }
}

/// The products of x and so many rows of W, the first of which begins at `start`.
#[inline(always)]
fn rows<F: Real, const COUNT: usize>(x: &[F], w: &[F], start: usize) -> [F; COUNT] {
    let k = x.len();
    let w_rows: [&[F]; COUNT] = std::array::from_fn(|i| &w[start + i * k..][..k]);
    let mut sums = [Lanes::ZERO; COUNT];
    let whole = k / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        let x = &x[at..at + LANES];
        for i in 0..COUNT {
            prefetch(w_rows[i], at + AHEAD);
            let w = &w_rows[i][at..at + LANES];
            for lane in 0..LANES {
                sums[i][lane] = w[lane].fma(x[lane], sums[i][lane]);
            }
        }
    }
    for i in 0..COUNT {
        for at in whole..k {
            let lane = at - whole;
            sums[i][lane] = w_rows[i][at].fma(x[at], sums[i][lane]);
        }
    }
    std::array::from_fn(|i| total(&sums[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::{assert_single_close, random, single, with_threads};

    #[test]
    fn is_the_product_at_any_size_and_number_of_threads() {
        for (n, k) in [(1, 1), (3, 5), (4, 16), (7, 33), (130, 100), (1030, 257)] {
            let (x, w, bias) = (random(k, 1), random(n * k, 2), random(n, 3));
            let expected: Vec<f64> = (0..n)
                .map(|j| {
                    let row = &w[j * k..][..k];
                    let sum: f64 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
                    0.5 * sum + 2.0 * bias[j]
                })
                .collect();
            let (x, w, bias) = (single(&x), single(&w), single(&bias));
            let run = |threads| {
                with_threads(threads, || {
                    let mut y = bias.clone();
                    matvec(&x, &w, 0.5, Some(&bias), true, &mut y);
                    y
                })
            };
            let y = run(1);
            assert_single_close("y", &y, &expected, 1e-5);
            assert_eq!(y, run(3));
            let mut plain = vec![7.0; n];
            matvec(&x, &w, 1.0, None, false, &mut plain);
            let doubled: Vec<f64> = (0..n)
                .map(|j| (expected[j] - 2.0 * f64::from(bias[j])) * 2.0)
                .collect();
            assert_single_close("plain", &plain, &doubled, 1e-5);
        }
    }
}
