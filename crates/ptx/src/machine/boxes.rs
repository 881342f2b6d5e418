//! The copy engine: boxes of tensors and runs of bytes between global and shared memory.

use super::TensorMap;
use super::matrix::swizzled;

const ELEMENT_BYTES: usize = 2;

/// A row of a box: where it is in the tensor and in shared memory.
pub(crate) struct Row {
    /// In global memory, and how many of its elements there are; none where the row is beyond the end.
    pub address: u64,
    pub elements: usize,
    /// From the box's begin in shared memory, before it is permuted.
    pub offset: usize,
}

impl TensorMap {
    pub(crate) fn row_bytes(&self) -> usize {
        self.sides[0] * ELEMENT_BYTES
    }

    pub(crate) fn box_bytes(&self) -> usize {
        self.sides.iter().product::<usize>() * ELEMENT_BYTES
    }

    /// The rows of a box, its first element at some coordinates. Those that begin before the tensor
    /// have no elements either.
    pub(crate) fn rows(&self, start: &[i64]) -> Vec<Row> {
        let inner = &self.sides[1..];
        let count: usize = inner.iter().product();
        let rows = (0..count).map(|row| {
            let mut rest = row;
            let mut address = self.address;
            let mut is_inside = start[0] >= 0;
            for (dimension, &side) in inner.iter().enumerate() {
                let at = start[dimension + 1] + (rest % side) as i64;
                rest /= side;
                is_inside &= (0..self.sizes[dimension + 1] as i64).contains(&at);
                if is_inside {
                    address += at as u64 * self.strides[dimension] as u64;
                }
            }
            let left = (self.sizes[0] as i64 - start[0]).clamp(0, self.sides[0] as i64);
            let elements = if is_inside { left as usize } else { 0 };
            Row {
                address: address + start[0].max(0) as u64 * ELEMENT_BYTES as u64,
                elements,
                offset: row * self.row_bytes(),
            }
        });
        rows.collect()
    }

    /// Where each 16 bytes of a row lie in shared memory.
    pub(crate) fn pieces(&self, start: usize, row: &Row) -> Vec<usize> {
        let begin = start + row.offset;
        let pieces = (0..self.row_bytes()).step_by(16);
        pieces
            .map(|at| swizzled(begin + at, self.row_bytes()))
            .collect()
    }
}
