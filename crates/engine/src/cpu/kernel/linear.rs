//! Linear layers: `y = x·Wᵀ + b` with W `[N, K]`, and their gradients
//! `dx = dy·W`, `dW = dyᵀ·x`, `db = Σ_rows dy`.

use crate::cpu::dropout::Dropout;
use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::columns::Columns;
use super::gemm::{Matrix, Side, gemm, gemm_dropped, gemm_scaled};
use super::matvec::matvec;

/// Columns a task of [`grad_bias`] sums: whole cache lines, and sums that fit in registers.
const BIAS_BLOCK: usize = 64;

/// `y [rows, N] = x·Wᵀ + bias`, where x has `K = x.width` columns, of which dropout takes some out
/// where there is one.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn forward<F: Real>(
    rows: usize,
    x: Columns<'_, F>,
    w: &[F],
    bias: Option<&[F]>,
    dropout: Option<Dropout>,
    y: &mut [F],
) {
    x.check("x", rows);
    let (k, n) = (x.width, w.len() / x.width.max(1));
    let (weight, mode) = (Matrix::row_major(w, k).transposed(), Accumulate::Overwrite);
    if let Some(dropout) = dropout {
        let dropped = (Side::A, dropout);
        gemm_dropped(
            rows,
            n,
            k,
            F::ONE,
            matrix(x),
            weight,
            y,
            n,
            mode,
            bias,
            dropped,
        );
    } else if rows == 1 {
        let x = &x.data[x.offset..][..k];
        matvec(x, w, F::ONE, bias, false, &mut y[..n]);
    } else {
        gemm(rows, n, k, matrix(x), weight, y, n, mode, bias);
    }
}

/// Adds `scale·x·Wᵀ` to the columns of y from `y_offset` on; rows of y are `y_row_stride` apart.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn forward_add<F: Real>(
    rows: usize,
    x: Columns<'_, F>,
    w: &[F],
    scale: F,
    y: &mut [F],
    (y_row_stride, y_offset): (usize, usize),
) {
    x.check("x", rows);
    let (k, n) = (x.width, w.len() / x.width.max(1));
    assert!(y_offset + n <= y_row_stride, "y reaches past its rows");
    let weight = Matrix::row_major(w, k).transposed();
    if rows == 1 {
        let x = &x.data[x.offset..][..k];
        matvec(x, w, scale, None, true, &mut y[y_offset..][..n]);
    } else if rows > 0 {
        let (x, y) = (x.matrix_at(0, 0), &mut y[y_offset..]);
        let mode = Accumulate::Add;
        gemm_scaled(rows, n, k, scale, x, weight, y, y_row_stride, mode);
    }
}

/// `dx[:, offset..offset + K] (+)= scale·dy·W` with dy `[rows, N]`, of what dropout has kept where
/// there is one; the other columns of dx, whose rows are `dx_row_stride` apart, keep their values.
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
    dy: Columns<'_, F>,
    w: &[F],
    scale: F,
    dx: &mut [F],
    (dx_row_stride, dx_offset): (usize, usize),
    mode: Accumulate,
    dropout: Option<Dropout>,
) {
    dy.check("dy", rows);
    assert!(
        dx_offset + width <= dx_row_stride,
        "dx reaches past its rows"
    );
    let w = Matrix::row_major(w, width);
    if rows > 0 {
        let (dx, n) = (&mut dx[dx_offset..], dy.width);
        let dy = dy.matrix_at(0, 0);
        match dropout.map(|dropout| (Side::C, dropout)) {
            None => gemm_scaled(rows, width, n, scale, dy, w, dx, dx_row_stride, mode),
            Some(dropped) => {
                gemm_dropped(
                    rows,
                    width,
                    n,
                    scale,
                    dy,
                    w,
                    dx,
                    dx_row_stride,
                    mode,
                    None,
                    dropped,
                );
            }
        }
    }
}

/// `dW [N, K] (+)= scale·dyᵀ·x` with dy `[rows, N]`, of x after dropout where there is one.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn grad_weight<F: Real>(
    rows: usize,
    dy: Columns<'_, F>,
    x: Columns<'_, F>,
    scale: F,
    dw: &mut [F],
    mode: Accumulate,
    dropout: Option<Dropout>,
) {
    x.check("x", rows);
    dy.check("dy", rows);
    let (k, n) = (x.width, dy.width);
    let (dy, x) = (matrix(dy).transposed(), matrix(x));
    match dropout.map(|dropout| (Side::B, dropout)) {
        None => gemm_scaled(n, k, rows, scale, dy, x, dw, k, mode),
        Some(dropped) => gemm_dropped(n, k, rows, scale, dy, x, dw, k, mode, None, dropped),
    }
}

/// The columns as a matrix, of no elements where there are no rows.
fn matrix<'a, F>(of: Columns<'a, F>) -> Matrix<'a, F> {
    Matrix::row_major(of.data.get(of.offset..).unwrap_or(&[]), of.row_stride)
}

/// `db [N] (+)= Σ_rows dy [rows, N]`, summed in the order of the rows.
///
/// # Panics
/// Where dy is not `[rows, N]`.
pub fn grad_bias<F: Real>(rows: usize, dy: Columns<'_, F>, db: &mut [F], mode: Accumulate) {
    dy.check("dy", rows);
    let n = db.len();
    assert!(dy.width >= n, "dy has fewer columns than the bias");
    let db = Shared::new(db);
    parallel::for_each(n.div_ceil(BIAS_BLOCK), |block| {
        let start = block * BIAS_BLOCK;
        let width = BIAS_BLOCK.min(n - start);
        // SAFETY: each task has its own columns.
        let out = unsafe { db.part(start, width) };
        let mut sums = [F::ZERO; BIAS_BLOCK];
        let data = &dy.data[..rows * dy.row_stride];
        sum_rows(data, dy.row_stride, dy.offset + start, width, &mut sums);
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
            forward(self.rows, self.columns(x), w, Some(bias), None, &mut y);
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
            forward(rows, layer.columns(&layer.x), &layer.w, None, None, &mut y);
            let mut y32 = vec![0.0_f32; rows * n];
            let (x32, w32) = (single(&layer.x), single(&layer.w));
            forward(rows, layer.columns(&x32), &w32, None, None, &mut y32);
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
                let dy_columns = Columns::whole(dy, n);
                grad_input(
                    rows,
                    k,
                    dy_columns,
                    w,
                    1.0,
                    &mut dx,
                    (stride, offset),
                    mode,
                    None,
                );
                for (place, dx) in dx.iter_mut().enumerate() {
                    if !(offset..offset + k).contains(&(place % stride)) {
                        assert_eq!(*dx, 3.0, "a column outside the block was written");
                        *dx = before;
                    }
                }
                assert_gradient("x", x, &change(&dx), |x| layer.loss(x, w, bias));

                let mut dw = vec![3.0; w.len()];
                grad_weight(rows, dy_columns, layer.columns(x), 1.0, &mut dw, mode, None);
                assert_gradient("w", w, &change(&dw), |w| layer.loss(x, w, bias));

                let mut db = vec![3.0; n];
                grad_bias(rows, dy_columns, &mut db, mode);
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
                let dy = Columns::whole(&dy, n);
                grad_weight(
                    rows,
                    dy,
                    Columns::whole(&x, k),
                    1.0,
                    &mut dw,
                    Accumulate::Overwrite,
                    None,
                );
                grad_bias(rows, dy, &mut db, Accumulate::Overwrite);
                (dw, db)
            })
        };
        assert_eq!(run(1), run(2));
    }
}
