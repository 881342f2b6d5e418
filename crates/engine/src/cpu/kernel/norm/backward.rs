//! The gradient of a norm and of the residual stream it reads.
//!
//! With `g = dy ⊙ γ`, means over the row, and x̂ from the kept statistics:
//!
//! ```text
//! layer:  dx = dx_new + rstd · (g − mean(g) − x̂ · mean(g ⊙ x̂))
//! RMS:    dx = dx_new + rstd · (g − x̂ · mean(g ⊙ x̂))
//! dγ = Σ_rows dy ⊙ x̂        dβ = Σ_rows dy        dbranch = mask ⊙ dx
//! ```

use super::{NormKind, NormShape};
use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::lanes::two_sums;
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Columns of one task in the sums over rows.
const COLUMNS: usize = 64;

/// The gradient that reaches x_new past the norm, along the residual stream.
#[derive(Clone, Copy)]
pub enum Residual<'a, F> {
    /// Nothing else reads x_new.
    Absent,
    /// [rows, width].
    At(&'a [F]),
    /// Already in `dx`.
    InPlace,
}

/// What [`backward`] reads and writes. At most one of `dy` and `residual` is in `dx`.
pub struct Backward<'a, F> {
    /// [rows, width]; `None` where it is already in `dx`.
    pub dy: Option<&'a [F]>,
    pub residual: Residual<'a, F>,
    /// [rows, width].
    pub x_new: &'a [F],
    /// `[rows]`, of layer norm.
    pub mean: Option<&'a [F]>,
    /// `[rows]`.
    pub rstd: &'a [F],
    /// `[width]`.
    pub gamma: &'a [F],
    /// [rows, width].
    pub dx: &'a mut [F],
    /// [rows, width], with the dropout that the branch had.
    pub dbranch: Option<(&'a mut [F], Option<Dropout>)>,
    /// `[width]`.
    pub dgamma: Option<(&'a mut [F], Accumulate)>,
    /// `[width]`.
    pub dbeta: Option<(&'a mut [F], Accumulate)>,
}

/// Writes all gradients.
pub fn backward<F: Real>(shape: NormShape, args: Backward<'_, F>) {
    assert_eq!(args.dx.len(), shape.len(), "norm input gradient");
    assert!(
        args.dy.is_some() || !matches!(args.residual, Residual::InPlace),
        "only one gradient can be in place"
    );
    let Backward {
        dy,
        residual,
        x_new,
        mean,
        rstd,
        gamma,
        dx,
        dbranch,
        dgamma,
        dbeta,
    } = args;
    // First, because dx may be about to replace dy.
    let norm = Kept {
        shape,
        x: x_new,
        mean,
        rstd,
    };
    parameter_gradients(&norm, dy.unwrap_or(dx), dgamma, dbeta);

    let dx = Shared::new(dx);
    let dbranch = dbranch.map(|(dbranch, dropout)| (Shared::new(dbranch), dropout));
    shape.for_each_row(|row| {
        let start = row * shape.width;
        // SAFETY: each row is visited once.
        let dx = unsafe { dx.part(start, shape.width) };
        let dy = dy.map(|dy| shape.row(dy, row));
        let residual = match residual {
            Residual::At(residual) => Residual::At(shape.row(residual, row)),
            other => other,
        };
        input_gradient(&norm, row, dy, residual, gamma, dx);
        if let Some((dbranch, dropout)) = dbranch {
            // SAFETY: as above.
            let dbranch = unsafe { dbranch.part(start, shape.width) };
            branch_gradient(row, dx, dropout, dbranch);
        }
    });
}

/// The branch's gradient from dx, by itself: where it replaces x_new, all that is made of that
/// comes first.
pub fn branch<F: Real>(shape: NormShape, dx: &[F], dropout: Option<Dropout>, dbranch: &mut [F]) {
    let dbranch = Shared::new(dbranch);
    shape.for_each_row(|row| {
        // SAFETY: each row is visited once.
        let dbranch = unsafe { dbranch.part(row * shape.width, shape.width) };
        branch_gradient(row, shape.row(dx, row), dropout, dbranch);
    });
}

/// What the forward pass left behind.
struct Kept<'a, F> {
    shape: NormShape,
    x: &'a [F],
    mean: Option<&'a [F]>,
    rstd: &'a [F],
}

simd! {
    /// One row of dx.
    fn input_gradient<F: Real>(
        norm: &Kept<'_, F>,
        row: usize,
        dy: Option<&[F]>,
        residual: Residual<'_, F>,
        gamma: &[F],
        dx: &mut [F],
    ) {
        let shape = norm.shape;
        let x = shape.row(norm.x, row);
        let (mean, rstd) = (shape.mean(norm.mean, row), norm.rstd[row]);
        let (sum_g, sum_gx) = two_sums(dy.unwrap_or(dx), x, gamma, |dy, x, gamma| {
            let g = dy * gamma;
            (g, g * ((x - mean) * rstd))
        });
        let scale = F::ONE / F::from_f64(shape.width as f64);
        let mean_g = match shape.kind {
            NormKind::Layer => sum_g * scale,
            NormKind::Rms => F::ZERO,
        };
        let mean_gx = sum_gx * scale;
        let term = |dy: F, x: F, gamma: F| {
            let x_hat = (x - mean) * rstd;
            rstd * (dy * gamma - mean_g - x_hat * mean_gx)
        };
        let len = dx.len();
        let (x, gamma) = (&x[..len], &gamma[..len]);
        match (dy, residual) {
            (Some(dy), Residual::Absent) => {
                let dy = &dy[..len];
                for i in 0..len {
                    dx[i] = term(dy[i], x[i], gamma[i]);
                }
            }
            (Some(dy), Residual::InPlace) => {
                let dy = &dy[..len];
                for i in 0..len {
                    dx[i] += term(dy[i], x[i], gamma[i]);
                }
            }
            (Some(dy), Residual::At(residual)) => {
                let (dy, residual) = (&dy[..len], &residual[..len]);
                for i in 0..len {
                    dx[i] = residual[i] + term(dy[i], x[i], gamma[i]);
                }
            }
            (None, Residual::At(residual)) => {
                let residual = &residual[..len];
                for i in 0..len {
                    dx[i] = residual[i] + term(dx[i], x[i], gamma[i]);
                }
            }
            (None, _) => {
                for i in 0..len {
                    dx[i] = term(dx[i], x[i], gamma[i]);
                }
            }
        }
    }
}

simd! {
    /// One row of `dbranch = mask ⊙ dx`.
    fn branch_gradient<F: Real>(
        row: usize,
        dx: &[F],
        dropout: Option<Dropout>,
        dbranch: &mut [F],
    ) {
        match dropout {
            None => dbranch.copy_from_slice(dx),
            Some(dropout) => {
                let base = dropout.row(row);
                for (column, (dbranch, dx)) in dbranch.iter_mut().zip(dx).enumerate() {
                    *dbranch = *dx * dropout.factor(base, column);
                }
            }
        }
    }
}

/// dγ and dβ: every task sums its own columns over all rows in order.
fn parameter_gradients<F: Real>(
    norm: &Kept<'_, F>,
    dy: &[F],
    dgamma: Option<(&mut [F], Accumulate)>,
    dbeta: Option<(&mut [F], Accumulate)>,
) {
    if dgamma.is_none() && dbeta.is_none() {
        return;
    }
    let dgamma = dgamma.map(|(data, mode)| (Shared::new(data), mode));
    let dbeta = dbeta.map(|(data, mode)| (Shared::new(data), mode));
    let width = norm.shape.width;
    for_each(width.div_ceil(COLUMNS), |task| {
        let start = task * COLUMNS;
        let len = COLUMNS.min(width - start);
        let (gamma_sums, beta_sums) = column_sums(norm, dy, start, len);
        for (target, sums) in [(dgamma, &gamma_sums), (dbeta, &beta_sums)] {
            if let Some((target, mode)) = target {
                // SAFETY: each task takes its own columns.
                let target = unsafe { target.part(start, len) };
                for (target, sum) in target.iter_mut().zip(sums) {
                    mode.put(target, *sum);
                }
            }
        }
    });
}

simd! {
    /// `Σ_rows dy ⊙ x̂` and `Σ_rows dy` of columns `start..start + len`.
    fn column_sums<F: Real>(
        norm: &Kept<'_, F>,
        dy: &[F],
        start: usize,
        len: usize,
    ) -> ([F; COLUMNS], [F; COLUMNS]) {
        let mut gamma_sums = [F::ZERO; COLUMNS];
        let mut beta_sums = [F::ZERO; COLUMNS];
        let shape = norm.shape;
        for row in 0..shape.rows {
            let (mean, rstd) = (shape.mean(norm.mean, row), norm.rstd[row]);
            let dy = &shape.row(dy, row)[start..start + len];
            let x = &shape.row(norm.x, row)[start..start + len];
            if len == COLUMNS {
                for i in 0..COLUMNS {
                    gamma_sums[i] = dy[i].fma((x[i] - mean) * rstd, gamma_sums[i]);
                    beta_sums[i] += dy[i];
                }
            } else {
                for i in 0..len {
                    gamma_sums[i] = dy[i].fma((x[i] - mean) * rstd, gamma_sums[i]);
                    beta_sums[i] += dy[i];
                }
            }
        }
        (gamma_sums, beta_sums)
    }
}
