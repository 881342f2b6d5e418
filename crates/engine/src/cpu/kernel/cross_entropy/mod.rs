//! Cross entropy straight from the hidden state. The logits `h·Wᵀ` are made for a chunk of rows
//! at a time, turned into their own gradient in place and used up, so that `[rows, V]` never
//! exists.
//!
//! For a row with target t and label smoothing ε:
//!
//! ```text
//! loss     = (1 − ε)·(lse − z_t) + ε·(lse − mean z),   lse = ln Σ_j e^{z_j}
//! dloss/dz = softmax(z) − (1 − ε)·onehot(t) − ε/V
//! dh = dz·W,   dW = dzᵀ·h,   db = Σ_rows dz
//! ```

use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::columns::Columns;
use super::gemm::{Matrix, gemm};
use super::lanes::{self, LANES};
use super::linear;
use super::matvec::matvec;

/// The target that takes a row out of the loss.
pub const IGNORE: i32 = -100;

/// Logits a task works on at least; with a small vocabulary it takes several rows.
const TASK_LOGITS: usize = 16_384;

/// h is `[rows, width]`, W `[vocab, width]`; logits exist for `chunk_rows` rows at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropyShape {
    pub rows: usize,
    pub width: usize,
    pub vocab: usize,
    pub chunk_rows: usize,
}

/// How the loss of the micro batch is made from the rows' losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weighting {
    /// One over the number of counted targets in the effective batch.
    pub inverse_count: f64,
    /// Of the loss among other terms; multiplies its gradient only.
    pub weight: f64,
    /// ε in [0, 1).
    pub label_smoothing: f64,
}

/// A target that is neither a token nor [`IGNORE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "target {value} in row {row} is not a token of the vocabulary of {vocab}\n\
     hint: targets are 0..{vocab}, or -100 for a position that does not count"
)]
pub struct TargetOutOfRange {
    pub row: usize,
    pub value: i32,
    pub vocab: usize,
}

/// Elements of workspace: the logits of a chunk, then the losses of its rows.
pub fn workspace(shape: CrossEntropyShape) -> usize {
    shape.chunk_rows.min(shape.rows) * (shape.vocab + 1)
}

/// What makes logits of a hidden state: W `[vocab, width]` and, where there is one, a bias `[vocab]`.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a, F> {
    pub weight: &'a [F],
    pub bias: Option<&'a [F]>,
}

/// Where the gradients of a head go, of the parts that are trained.
#[derive(Debug)]
pub struct HeadGradients<'a, F> {
    pub weight: Option<(&'a mut [F], Accumulate)>,
    pub bias: Option<(&'a mut [F], Accumulate)>,
}

/// The loss, and the gradients of h (overwritten) and of what is trained of the head. Without `h`,
/// it is what `dh` holds.
///
/// # Errors
/// Where a target is not in the vocabulary; nothing is written then.
///
/// # Panics
/// Where a slice is too short for its shape.
#[expect(
    clippy::too_many_arguments,
    reason = "the operands and their gradients"
)]
pub fn forward_backward<F: Real>(
    shape: CrossEntropyShape,
    h: Option<&[F]>,
    head: Head<'_, F>,
    targets: &[i32],
    weighting: Weighting,
    workspace: &mut [F],
    loss: (&mut F, Accumulate),
    dh: &mut [F],
    gradients: HeadGradients<'_, F>,
) -> Result<(), TargetOutOfRange> {
    check_targets(shape, targets)?;
    let CrossEntropyShape { width, vocab, .. } = shape;
    let HeadGradients {
        weight: mut dw,
        bias: mut db,
    } = gradients;
    let mut total = 0.0;
    for_each_chunk(shape, |start, rows| {
        let chunk = start * width..(start + rows) * width;
        let dh = &mut dh[chunk.clone()];
        let h = h.map_or(&*dh, |h| &h[chunk]);
        let targets = &targets[start..][..rows];
        let z = logits_of(rows, shape, h, head, workspace);
        total += rows_in_parallel(rows, vocab, z, |row, z| {
            row_gradient(
                z,
                targets[row],
                weighting.label_smoothing,
                weighting.inverse_count * weighting.weight,
            )
        });
        let dz = Matrix::row_major(&workspace[..rows * vocab], vocab);
        let w = Matrix::row_major(head.weight, width);
        if let Some((dw, mode)) = &mut dw {
            let (dz, h) = (dz.transposed(), Matrix::row_major(h, width));
            gemm(vocab, width, rows, dz, h, dw, width, *mode, None);
            *mode = Accumulate::Add;
        }
        // Last, because h may be in its memory.
        let overwrite = Accumulate::Overwrite;
        gemm(rows, width, vocab, dz, w, dh, width, overwrite, None);
        if let Some((db, mode)) = &mut db {
            let dz = Columns::whole(&workspace[..rows * vocab], vocab);
            linear::grad_bias(rows, dz, db, *mode);
            *mode = Accumulate::Add;
        }
    });
    if shape.rows == 0 {
        for (gradient, mode) in [dw, db].into_iter().flatten() {
            if mode == Accumulate::Overwrite {
                gradient.fill(F::ZERO);
            }
        }
    }
    add_loss(loss, total * weighting.inverse_count);
    Ok(())
}

/// The loss alone, for evaluation.
///
/// # Errors
/// Where a target is not in the vocabulary; nothing is written then.
///
/// # Panics
/// Where a slice is too short for its shape.
pub fn forward_only<F: Real>(
    shape: CrossEntropyShape,
    h: &[F],
    head: Head<'_, F>,
    targets: &[i32],
    weighting: Weighting,
    workspace: &mut [F],
    loss: (&mut F, Accumulate),
) -> Result<(), TargetOutOfRange> {
    check_targets(shape, targets)?;
    let mut total = 0.0;
    for_each_chunk(shape, |start, rows| {
        let h = &h[start * shape.width..][..rows * shape.width];
        let targets = &targets[start..][..rows];
        let z = logits_of(rows, shape, h, head, workspace);
        total += rows_in_parallel(rows, shape.vocab, z, |row, z| {
            row_loss(z, targets[row], weighting.label_smoothing)
        });
    });
    add_loss(loss, total * weighting.inverse_count);
    Ok(())
}

/// The logits `[V]` of one row of the hidden state, for generation.
///
/// # Panics
/// Where the weight is not `[out.len(), h.len()]`.
pub fn logits<F: Real>(h: &[F], head: Head<'_, F>, out: &mut [F]) {
    matvec(h, head.weight, F::ONE, head.bias, false, out);
}

fn check_targets(shape: CrossEntropyShape, targets: &[i32]) -> Result<(), TargetOutOfRange> {
    let wrong = targets[..shape.rows].iter().position(|&target| {
        target != IGNORE && !usize::try_from(target).is_ok_and(|target| target < shape.vocab)
    });
    wrong.map_or(Ok(()), |row| {
        Err(TargetOutOfRange {
            row,
            value: targets[row],
            vocab: shape.vocab,
        })
    })
}

fn for_each_chunk(shape: CrossEntropyShape, mut chunk: impl FnMut(usize, usize)) {
    let step = shape.chunk_rows.max(1);
    for start in (0..shape.rows).step_by(step) {
        chunk(start, step.min(shape.rows - start));
    }
}

/// Fills the front of the workspace with a chunk's logits; returns the workspace, cut to the
/// logits and the rows' losses.
fn logits_of<'a, F: Real>(
    rows: usize,
    shape: CrossEntropyShape,
    h: &[F],
    head: Head<'_, F>,
    workspace: &'a mut [F],
) -> &'a mut [F] {
    let CrossEntropyShape { width, vocab, .. } = shape;
    let workspace = &mut workspace[..rows * (vocab + 1)];
    let weight = Matrix::row_major(head.weight, width).transposed();
    let h = Matrix::row_major(h, width);
    gemm(
        rows,
        vocab,
        width,
        h,
        weight,
        workspace,
        vocab,
        Accumulate::Overwrite,
        head.bias,
    );
    workspace
}

/// Runs `row_loss(row, logits)` on the rows, on all cores; the sum of the losses in row order.
fn rows_in_parallel<F: Real>(
    rows: usize,
    vocab: usize,
    workspace: &mut [F],
    row_loss: impl Fn(usize, &mut [F]) -> F + Sync + Send,
) -> f64 {
    let (z, losses) = workspace.split_at_mut(rows * vocab);
    let per_task = TASK_LOGITS.div_ceil(vocab.max(1));
    let (shared_z, shared_losses) = (Shared::new(z), Shared::new(&mut *losses));
    parallel::for_each(rows.div_ceil(per_task), |task| {
        for row in task * per_task..rows.min((task + 1) * per_task) {
            // SAFETY: a row belongs to one task.
            let (z, loss) = unsafe {
                (
                    shared_z.part(row * vocab, vocab),
                    shared_losses.part(row, 1),
                )
            };
            loss[0] = row_loss(row, z);
        }
    });
    losses.iter().map(|loss| loss.to_f64()).sum()
}

fn add_loss<F: Real>((loss, mode): (&mut F, Accumulate), value: f64) {
    *loss = match mode {
        Accumulate::Overwrite => F::from_f64(value),
        Accumulate::Add => *loss + F::from_f64(value),
    };
}

/// The largest logit; one that is not a number is passed over, and shows in the sum.
#[inline(always)]
fn largest<F: Real>(z: &[F]) -> F {
    let mut lanes = [F::from_f64(f64::NEG_INFINITY); LANES];
    let chunks = z.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = chunk[l].larger(lanes[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = x.larger(*lane);
    }
    lanes.into_iter().fold(lanes[0], |best, x| x.larger(best))
}

/// The loss of a row from its log-sum-exp; the mean is needed only with smoothing.
#[inline(always)]
fn smoothed<F: Real>(z: &[F], target: usize, log_sum: F, smoothing: f64) -> F {
    let loss = log_sum - z[target];
    if smoothing == 0.0 {
        return loss;
    }
    let mean = lanes::sum(z, |x| x) / F::from_f64(z.len() as f64);
    F::from_f64(1.0 - smoothing) * loss + F::from_f64(smoothing) * (log_sum - mean)
}

simd! {
    fn row_loss<F: Real>(z: &mut [F], target: i32, smoothing: f64) -> F {
        if target == IGNORE {
            return F::ZERO;
        }
        let largest = largest(z);
        let sum = lanes::sum(z, |x| (x - largest).exp());
        smoothed(z, target as usize, largest + sum.ln(), smoothing)
    }
}

simd! {
    /// The row's loss; z becomes dloss/dz times `share`.
    fn row_gradient<F: Real>(
        z: &mut [F],
        target: i32,
        smoothing: f64,
        share: f64,
    ) -> F {
        if target == IGNORE {
            z.fill(F::ZERO);
            return F::ZERO;
        }
        let target = target as usize;
        let largest = largest(z);
        let sum = lanes::sum(z, |x| (x - largest).exp());
        let loss = smoothed(z, target, largest + sum.ln(), smoothing);
        let scale = F::from_f64(share) / sum;
        let uniform = F::from_f64(smoothing / z.len() as f64 * share);
        for x in z.iter_mut() {
            *x = (*x - largest).exp() * scale - uniform;
        }
        z[target] -= F::from_f64((1.0 - smoothing) * share);
        loss
    }
}

#[cfg(test)]
mod tests;
