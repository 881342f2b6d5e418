//! Products of which one matrix is dropped in part. What is dropped is multiplied by its factors
//! where it is in the cache anyway: rows of A before they are packed, panels of B after that, the
//! result tile by tile before it is stored.

use crate::cpu::dropout::Dropout;
use crate::cpu::simd::simd;

use super::pack::Strided;

/// The matrix that is dropped in part; rows and columns of the mask are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    A,
    B,
    C,
}

/// A matrix and its mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dropped {
    pub side: Side,
    pub dropout: Dropout,
}

impl Dropped {
    /// The mask, where it is that of `side`.
    pub(super) fn of(self, side: Side) -> Option<Dropout> {
        (self.side == side).then_some(self.dropout)
    }
}

simd! {
    /// Rows of A, of what is read of it: `strip [lanes, depth]` from `row` and `column` on.
    pub(super) fn drop_strip<F: Real>(
        dropout: Dropout,
        row: usize,
        column: usize,
        depth: usize,
        source: Strided<'_, F>,
        strip: &mut [F],
    ) {
        for (lane, line) in strip.chunks_exact_mut(depth).enumerate() {
            let from = source.start + lane * source.lane_stride;
            if source.depth_stride == 1 {
                line.copy_from_slice(&source.data[from..][..depth]);
            } else {
                for (p, x) in line.iter_mut().enumerate() {
                    *x = source.data[from + p * source.depth_stride];
                }
            }
            dropout.multiply(dropout.row(row + lane), column, line);
        }
    }
}

simd! {
    /// Lines of `width`, one for each row from `row` on, columns counting from `column`: a panel of
    /// B, or a tile of the result.
    pub(super) fn drop_lines<F: Real>(
        dropout: Dropout,
        row: usize,
        column: usize,
        width: usize,
        lines: &mut [F],
    ) {
        for (i, line) in lines.chunks_exact_mut(width).enumerate() {
            dropout.multiply(dropout.row(row + i), column, line);
        }
    }
}
