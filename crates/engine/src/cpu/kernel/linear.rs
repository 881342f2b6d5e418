//! Linear layers: `y = x·Wᵀ + b` with W `[N, K]`, and their gradients
//! `dx = dy·W`, `dW = dyᵀ·x`, `db = Σ_rows dy`.

use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::columns::Columns;
use super::gemm::{Matrix, gemm};

/// Columns a task of [`grad_bias`] sums: whole cache lines, and sums that fit in registers.
const BIAS_BLOCK: usize = 64;

/// `y [rows, N] = x·Wᵀ + bias`, where x has `K = x.width` columns.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn forward<F: Real>(rows: usize, x: Columns<'_, F>, w: &[F], bias: Option<&[F]>, y: &mut [F]) {
    x.check("x", rows);
    let (k, n) = (x.width, w.len() / x.width.max(1));
    let weight = Matrix::row_major(w, k).transposed();
    if rows > 0 {
        gemm(
            rows,
            n,
            k,
            x.matrix_at(0, 0),
            weight,
            y,
            n,
            Accumulate::Overwrite,
            bias,
        );
    }
}

/// `dx[:, offset..offset + K] (+)= dy·W` with dy `[rows, N]`; the other columns of dx, whose
/// rows are `dx_row_stride` apart, keep their values.
///
/// # Panics
/// Where a slice is too short for its shape.
#[expect(
    clippy::too_many_arguments,
    reason = "the operands and the place of dx"
)]
pub fn grad_input<F: Real>(
    rows: usize,
    width: usize,
    dy: &[F],
    w: &[F],
    dx: &mut [F],
    dx_row_stride: usize,
    dx_offset: usize,
    mode: Accumulate,
) {
    assert!(
        dx_offset + width <= dx_row_stride,
        "dx reaches past its rows"
    );
    let n = w.len() / width.max(1);
    let (dy, w) = (Matrix::row_major(dy, n), Matrix::row_major(w, width));
    if rows > 0 {
        let dx = &mut dx[dx_offset..];
        gemm(rows, width, n, dy, w, dx, dx_row_stride, mode, None);
    }
}

/// `dW [N, K] (+)= dyᵀ·x` with dy `[rows, N]`.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn grad_weight<F: Real>(
    rows: usize,
    dy: &[F],
    x: Columns<'_, F>,
    dw: &mut [F],
    mode: Accumulate,
) {
    x.check("x", rows);
    let (k, n) = (x.width, dw.len() / x.width.max(1));
    let dy = Matrix::row_major(dy, n).transposed();
    let x = Matrix::row_major(x.data.get(x.offset..).unwrap_or(&[]), x.row_stride);
    gemm(n, k, rows, dy, x, dw, k, mode, None);
}

/// `db [N] (+)= Σ_rows dy [rows, N]`, summed in the order of the rows.
///
/// # Panics
/// Where dy is not `[rows, N]`.
pub fn grad_bias<F: Real>(rows: usize, dy: &[F], db: &mut [F], mode: Accumulate) {
    let n = db.len();
    assert!(dy.len() >= rows * n, "dy is shorter than [{rows}, {n}]");
    let db = Shared::new(db);
    parallel::for_each(n.div_ceil(BIAS_BLOCK), |block| {
        let start = block * BIAS_BLOCK;
        let width = BIAS_BLOCK.min(n - start);
        // SAFETY: each task has its own columns.
        let out = unsafe { db.part(start, width) };
        let mut sums = [F::ZERO; BIAS_BLOCK];
        sum_rows(&dy[..rows * n], n, start, width, &mut sums);
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = match mode {
                Accumulate::Overwrite => sum,
                Accumulate::Add => *out + sum,
            };
        }
    });
}

simd! {
    /// Sums columns `start..start + width`; a full block takes the loop of known length.
    fn sum_rows<F: Real>(
        dy: &[F],
        n: usize,
        start: usize,
        width: usize,
        out: &mut [F; BIAS_BLOCK],
    ) {
        let mut sums = [F::ZERO; BIAS_BLOCK];
        for row in dy.chunks_exact(n) {
            if width == BIAS_BLOCK {
                let row = &row[start..start + BIAS_BLOCK];
                for j in 0..BIAS_BLOCK {
                    sums[j] += row[j];
                }
            } else {
                for (sum, &x) in sums.iter_mut().zip(&row[start..start + width]) {
                    *sum += x;
                }
            }
        }
        *out = sums;
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{assert_gradient, inner_product, random, single, with_threads};
    use super::*;

    struct Layer {
        rows: usize,
        k: usize,
        n: usize,
        stride: usize,
        offset: usize,
        x: Vec<f64>,
        w: Vec<f64>,
        bias: Vec<f64>,
        /// The loss is `Σ y ∘ weights`, so that `dy = weights`.
        weights: Vec<f64>,
    }

    impl Layer {
        fn new(rows: usize, k: usize, n: usize) -> Self {
            let (stride, offset) = (k + 7, 4);
            Self {
                rows,
                k,
                n,
                stride,
                offset,
                x: random(rows * stride, 1),
                w: random(n * k, 2),
                bias: random(n, 3),
                weights: random(rows * n, 4),
            }
        }

        fn columns<'a, F>(&self, x: &'a [F]) -> Columns<'a, F> {
            Columns {
                data: x,
                row_stride: self.stride,
                offset: self.offset,
                width: self.k,
            }
        }

        fn loss(&self, x: &[f64], w: &[f64], bias: &[f64]) -> f64 {
            let mut y = vec![0.0; self.rows * self.n];
            forward(self.rows, self.columns(x), w, Some(bias), &mut y);
            inner_product(&y, &self.weights)
        }
    }

    fn close(ours: f64, exact: f64) {
        assert!(
            (ours - exact).abs() < 1e-6 * exact.abs().max(1.0),
            "{ours} {exact}"
        );
    }

    #[test]
    fn forward_is_the_definition() {
        for (rows, k, n) in [(1, 5, 3), (7, 37, 19), (37, 16, 70)] {
            let layer = Layer::new(rows, k, n);
            let mut y = vec![0.0; rows * n];
            forward(rows, layer.columns(&layer.x), &layer.w, None, &mut y);
            let mut y32 = vec![0.0_f32; rows * n];
            let (x32, w32) = (single(&layer.x), single(&layer.w));
            forward(rows, layer.columns(&x32), &w32, None, &mut y32);
            for i in 0..rows {
                for j in 0..n {
                    let x = &layer.x[i * layer.stride + layer.offset..][..k];
                    let exact: f64 = (0..k).map(|p| x[p] * layer.w[j * k + p]).sum();
                    close(y[i * n + j], exact);
                    assert!((f64::from(y32[i * n + j]) - exact).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn gradients_are_finite_differences() {
        for (rows, k, n) in [(1, 3, 5), (7, 17, 9), (5, 4, 66)] {
            let layer = Layer::new(rows, k, n);
            let (x, w, bias, dy) = (&layer.x, &layer.w, &layer.bias, &layer.weights);
            let (stride, offset) = (layer.stride, layer.offset);
            for mode in [Accumulate::Overwrite, Accumulate::Add] {
                let before = if mode == Accumulate::Add { 3.0 } else { 0.0 };
                let change = |after: &[f64]| after.iter().map(|x| x - before).collect::<Vec<_>>();

                let mut dx = vec![3.0; x.len()];
                grad_input(rows, k, dy, w, &mut dx, stride, offset, mode);
                for (place, dx) in dx.iter_mut().enumerate() {
                    if !(offset..offset + k).contains(&(place % stride)) {
                        assert_eq!(*dx, 3.0, "a column outside the block was written");
                        *dx = before;
                    }
                }
                assert_gradient("x", x, &change(&dx), |x| layer.loss(x, w, bias));

                let mut dw = vec![3.0; w.len()];
                grad_weight(rows, dy, layer.columns(x), &mut dw, mode);
                assert_gradient("w", w, &change(&dw), |w| layer.loss(x, w, bias));

                let mut db = vec![3.0; n];
                grad_bias(rows, dy, &mut db, mode);
                assert_gradient("bias", bias, &change(&db), |b| layer.loss(x, w, b));
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let (rows, k, n) = (130, 90, 150);
        let (x, dy) = (single(&random(rows * k, 1)), single(&random(rows * n, 2)));
        let run = |threads| {
            with_threads(threads, || {
                let (mut dw, mut db) = (vec![0.0; n * k], vec![0.0; n]);
                grad_weight(
                    rows,
                    &dy,
                    Columns::whole(&x, k),
                    &mut dw,
                    Accumulate::Overwrite,
                );
                grad_bias(rows, &dy, &mut db, Accumulate::Overwrite);
                (dw, db)
            })
        };
        assert_eq!(run(1), run(2));
    }
}
