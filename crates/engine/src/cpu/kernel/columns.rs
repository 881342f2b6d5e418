//! Column blocks of row-major buffers. A packed projection (queries, keys and values side by
//! side, or the two halves of a gated input) is one buffer; its parts are read and written
//! where they lie.

use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;

use super::gemm::Matrix;

/// Columns `offset..offset + width` of a buffer whose rows are `row_stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a, F> {
    pub data: &'a [F],
    pub row_stride: usize,
    pub offset: usize,
    pub width: usize,
}

impl<'a, F> Columns<'a, F> {
    /// All columns of a dense `[rows, width]` buffer.
    pub fn whole(data: &'a [F], width: usize) -> Self {
        Self {
            data,
            row_stride: width,
            offset: 0,
            width,
        }
    }

    /// The block as a matrix, from row `row` and column `column` on.
    pub(super) fn matrix_at(&self, row: usize, column: usize) -> Matrix<'a, F> {
        let start = row * self.row_stride + self.offset + column;
        Matrix::row_major(&self.data[start..], self.row_stride)
    }

    /// # Panics
    /// Where `rows` rows of the block do not fit the slice.
    pub(super) fn check(&self, name: &str, rows: usize) {
        check(
            name,
            self.data.len(),
            self.row_stride,
            self.offset + self.width,
            rows,
        );
    }
}

fn check(name: &str, len: usize, row_stride: usize, end: usize, rows: usize) {
    assert!(
        end <= row_stride && (rows == 0 || (rows - 1) * row_stride + end <= len),
        "{name}: columns up to {end} of {rows} rows {row_stride} apart, in {len} elements"
    );
}

/// A column block that the tasks of one kernel write at once, each its own parts.
pub struct ColumnsMut<'a, F> {
    data: Shared<'a, F>,
    row_stride: usize,
    offset: usize,
    width: usize,
}

impl<'a, F> ColumnsMut<'a, F> {
    /// All columns of a dense `[rows, width]` buffer.
    pub fn whole(data: &'a mut [F], width: usize) -> Self {
        let [all] = Self::split(data, width, [(0, width)]);
        all
    }

    /// Several blocks `(offset, width)` of one buffer.
    ///
    /// # Panics
    /// Where two blocks overlap or one reaches past the end of a row.
    pub fn split<const N: usize>(
        data: &'a mut [F],
        row_stride: usize,
        blocks: [(usize, usize); N],
    ) -> [Self; N] {
        for (i, &(offset, width)) in blocks.iter().enumerate() {
            assert!(
                offset + width <= row_stride,
                "block {i} reaches past the row"
            );
            for &(other, other_width) in &blocks[..i] {
                let apart = offset + width <= other || other + other_width <= offset;
                assert!(apart, "block {i} overlaps an earlier one");
            }
        }
        let data = Shared::new(data);
        blocks.map(|(offset, width)| Self {
            data,
            row_stride,
            offset,
            width,
        })
    }

    /// Elements `column..column + len` of a row of the block.
    ///
    /// # Safety
    /// No other part that overlaps this one may be in use at the same time.
    pub(super) unsafe fn part(&self, row: usize, column: usize, len: usize) -> &'a mut [F] {
        assert!(column + len <= self.width);
        let start = row * self.row_stride + self.offset + column;
        // SAFETY: blocks of one buffer do not overlap; within the block it is up to the caller.
        unsafe { self.data.part(start, len) }
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// # Panics
    /// Where `rows` rows of the block do not fit the slice.
    pub(super) fn check(&self, name: &str, rows: usize) {
        let end = self.offset + self.width;
        check(name, self.data.len(), self.row_stride, end, rows);
    }
}

/// Rows of a task that copies.
const COPY_ROWS: usize = 64;

/// Writes `part` [rows, count] to the columns from `offset` on of `whole` [rows, width].
pub fn put_columns<F: Real>(
    rows: usize,
    part: &[F],
    whole: &mut [F],
    (width, offset, count): (usize, usize, usize),
) {
    assert!(part.len() == rows * count && whole.len() == rows * width);
    let whole = Shared::new(whole);
    for_each(rows.div_ceil(COPY_ROWS), |task| {
        for row in task * COPY_ROWS..rows.min((task + 1) * COPY_ROWS) {
            // SAFETY: each task has its own rows.
            let to = unsafe { whole.part(row * width + offset, count) };
            to.copy_from_slice(&part[row * count..][..count]);
        }
    });
}

/// Zeroes the columns from `offset` on of `whole` [rows, width].
pub fn clear_columns<F: Real>(
    rows: usize,
    whole: &mut [F],
    (width, offset, count): (usize, usize, usize),
) {
    assert_eq!(whole.len(), rows * width);
    for row in whole.chunks_mut(width.max(1)) {
        row[offset..offset + count].fill(F::ZERO);
    }
}

/// Reads `part` [rows, count] from the columns from `offset` on of `whole` [rows, width].
pub fn take_columns<F: Real>(
    rows: usize,
    whole: &[F],
    part: &mut [F],
    (width, offset, count): (usize, usize, usize),
) {
    assert!(part.len() == rows * count && whole.len() == rows * width);
    let part = Shared::new(part);
    for_each(rows.div_ceil(COPY_ROWS), |task| {
        for row in task * COPY_ROWS..rows.min((task + 1) * COPY_ROWS) {
            // SAFETY: each task has its own rows.
            let to = unsafe { part.part(row * count, count) };
            to.copy_from_slice(&whole[row * width + offset..][..count]);
        }
    });
}
