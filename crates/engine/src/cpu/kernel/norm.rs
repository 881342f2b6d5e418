//! Layer and RMS norm, fused with the residual stream around them.
//!
//! ```text
//! x_new = x + dropout(branch)        x̂ = (x_new − mean) · rstd        y = x̂ ⊙ γ + β
//! ```
//!
//! RMS norm has no mean and no β. Mean and `rstd` are kept per row; y can be made again from
//! them with the same bits, so it need not be.

mod backward;
#[cfg(test)]
mod tests;

use cinch_graph::op::NormKind;

use super::lanes::sum;
use crate::cpu::dropout::Dropout;
use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;
pub use backward::{Backward, Residual, backward, branch};

/// Elements of one task, as whole rows.
const TASK: usize = 8192;

/// The kind and the sizes of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    pub kind: NormKind,
    pub rows: usize,
    pub width: usize,
}

impl NormShape {
    fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Runs `work(row)` for all rows, several rows per task.
    fn for_each_row(&self, work: impl Fn(usize) + Sync + Send) {
        assert!(self.width > 0, "norm of an empty row");
        let rows_per_task = (TASK / self.width).max(1);
        for_each(self.rows.div_ceil(rows_per_task), |task| {
            let start = task * rows_per_task;
            for row in start..self.rows.min(start + rows_per_task) {
                work(row);
            }
        });
    }

    #[inline(always)]
    fn row<'a, F>(&self, data: &'a [F], row: usize) -> &'a [F] {
        &data[row * self.width..][..self.width]
    }

    /// The mean of a row: zero for RMS norm, which has none.
    #[inline(always)]
    fn mean<F: Real>(&self, mean: Option<&[F]>, row: usize) -> F {
        match self.kind {
            NormKind::Layer => mean.expect("layer norm keeps its means")[row],
            NormKind::Rms => F::ZERO,
        }
    }
}

/// What [`forward`] reads and writes.
pub struct Forward<'a, F> {
    /// The residual stream, [rows, width]; `None` where it is already in `x_new`.
    pub x: Option<&'a [F]>,
    /// What is added to it, [rows, width], after dropout.
    pub branch: Option<(&'a [F], Option<Dropout>)>,
    /// `[width]`.
    pub gamma: &'a [F],
    /// `[width]`.
    pub beta: Option<&'a [F]>,
    /// The new residual stream, [rows, width]; needed where there is a branch or no `x`.
    pub x_new: Option<&'a mut [F]>,
    /// [rows, width].
    pub y: &'a mut [F],
    /// `[rows]`; needed by layer norm.
    pub mean: Option<&'a mut [F]>,
    /// `[rows]`.
    pub rstd: &'a mut [F],
}

/// Adds the branch to the residual stream and norms the sum.
pub fn forward<F: Real>(shape: NormShape, epsilon: f64, args: Forward<'_, F>) {
    assert_eq!(args.y.len(), shape.len(), "norm output");
    assert!(
        args.x_new.is_some() || (args.x.is_some() && args.branch.is_none()),
        "a norm with a branch writes the new residual stream"
    );
    assert_eq!(
        args.mean.is_some(),
        shape.kind == NormKind::Layer,
        "layer norm keeps means, RMS norm has none"
    );
    let (x, branch, gamma, beta) = (args.x, args.branch, args.gamma, args.beta);
    let x_new = args.x_new.map(Shared::new);
    let mean = args.mean.map(Shared::new);
    let (y, rstd) = (Shared::new(args.y), Shared::new(args.rstd));
    let epsilon = F::from_f64(epsilon);
    shape.for_each_row(|row| {
        let start = row * shape.width;
        let given = x.map(|x| shape.row(x, row));
        // SAFETY: each row is visited once.
        let stream = x_new.map(|x_new| unsafe { x_new.part(start, shape.width) });
        let input: &[F] = match (given, stream) {
            (Some(x), None) => x,
            (x, Some(stream)) => {
                let branch = branch.map(|(branch, dropout)| (shape.row(branch, row), dropout));
                add_branch(row, x, branch, stream);
                stream
            }
            (None, None) => unreachable!("checked above"),
        };
        let (row_mean, row_rstd) = statistics(shape.kind, epsilon, input);
        // SAFETY: as above.
        unsafe {
            if let Some(mean) = mean {
                mean.part(row, 1)[0] = row_mean;
            }
            rstd.part(row, 1)[0] = row_rstd;
            normalize(
                input,
                row_mean,
                row_rstd,
                gamma,
                beta,
                y.part(start, shape.width),
            );
        }
    });
}

/// y again from kept statistics, with the bits [`forward`] gave it.
pub fn apply<F: Real>(
    shape: NormShape,
    x_new: &[F],
    mean: Option<&[F]>,
    rstd: &[F],
    gamma: &[F],
    beta: Option<&[F]>,
    y: &mut [F],
) {
    assert_eq!(y.len(), shape.len(), "norm output");
    let y = Shared::new(y);
    shape.for_each_row(|row| {
        // SAFETY: each row is visited once.
        let y = unsafe { y.part(row * shape.width, shape.width) };
        let x = shape.row(x_new, row);
        normalize(x, shape.mean(mean, row), rstd[row], gamma, beta, y);
    });
}

simd! {
    /// `stream = x + dropout(branch)`; without `x`, added to what `stream` holds.
    fn add_branch<F: Real>(
        row: usize,
        x: Option<&[F]>,
        branch: Option<(&[F], Option<Dropout>)>,
        stream: &mut [F],
    ) {
        if let Some(x) = x {
            stream.copy_from_slice(x);
        }
        match branch {
            None => {}
            Some((branch, None)) => {
                for (stream, branch) in stream.iter_mut().zip(branch) {
                    *stream += *branch;
                }
            }
            Some((branch, Some(dropout))) => {
                let base = dropout.row(row);
                for (column, (stream, branch)) in stream.iter_mut().zip(branch).enumerate() {
                    *stream += *branch * dropout.factor(base, column);
                }
            }
        }
    }
}

simd! {
    /// Mean and reciprocal standard deviation, in two passes: the mean first, then the mean
    /// square distance from it.
    fn statistics<F: Real>(kind: NormKind, epsilon: F, x: &[F]) -> (F, F) {
        let scale = F::ONE / F::from_f64(x.len() as f64);
        let mean = match kind {
            NormKind::Layer => sum(x, |v| v) * scale,
            NormKind::Rms => F::ZERO,
        };
        let variance = sum(x, |v| (v - mean) * (v - mean)) * scale;
        (mean, F::ONE / (variance + epsilon).sqrt())
    }
}

simd! {
    /// One row of y.
    fn normalize<F: Real>(
        x: &[F],
        mean: F,
        rstd: F,
        gamma: &[F],
        beta: Option<&[F]>,
        y: &mut [F],
    ) {
        let len = y.len();
        let (x, gamma) = (&x[..len], &gamma[..len]);
        match beta {
            Some(beta) => {
                let beta = &beta[..len];
                for i in 0..len {
                    y[i] = ((x[i] - mean) * rstd).fma(gamma[i], beta[i]);
                }
            }
            None => {
                for i in 0..len {
                    y[i] = (x[i] - mean) * rstd * gamma[i];
                }
            }
        }
    }
}
