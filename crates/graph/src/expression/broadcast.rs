//! Which element of a tensor belongs to a place (row, column) of an expression.

use crate::types::Shape;

/// The element `((row / row_group) mod rows)·columns + (column / column_group) mod columns`.
///
/// Whole tensors, row vectors, column vectors, groups, tables of positions and single numbers are
/// all of this kind; and so is where a sum goes, because the gradient of what is read at many
/// places is the sum over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Broadcast {
    pub row_group: usize,
    /// Rows of the tensor.
    pub rows: usize,
    pub column_group: usize,
    /// Columns of the tensor.
    pub columns: usize,
}

impl Broadcast {
    /// An element for each place.
    pub fn full(shape: &Shape) -> Self {
        Self {
            row_group: 1,
            rows: shape.rows(),
            column_group: 1,
            columns: shape.width(),
        }
    }

    /// The way in which a tensor of this shape is read over `domain`, if there is one:
    ///
    /// - the same shape: an element for each place;
    /// - a single element: the same everywhere;
    /// - `[width]`: a number for each column;
    /// - the leading dimensions, with or without a last one of 1: a number for each row;
    /// - a last dimension that divides the width: a number for each group of columns;
    /// - trailing dimensions: repeated over the leading ones (`[T, C]` over `[B, T, C]`);
    /// - 1 in place of trailing rows: repeated over those (`[B, 1, C]`).
    pub fn infer(tensor: &Shape, domain: &Shape) -> Option<Self> {
        let (dims, over) = (tensor.dims(), domain.dims());
        if tensor.elements() == 1 {
            return Some(Self {
                row_group: domain.rows(),
                rows: 1,
                column_group: domain.width(),
                columns: 1,
            });
        }
        if dims.len() == over.len() {
            return Self::of_same_rank(dims, over);
        }
        if over.ends_with(dims) {
            return Some(Self {
                row_group: 1,
                rows: tensor.rows(),
                column_group: 1,
                columns: domain.width(),
            })
            .map(|full| full.canonical(domain));
        }
        (dims == &over[..over.len() - 1]).then(|| Self {
            row_group: 1,
            rows: domain.rows(),
            column_group: domain.width(),
            columns: 1,
        })
    }

    fn of_same_rank(dims: &[usize], over: &[usize]) -> Option<Self> {
        let (&columns, rows) = dims.split_last()?;
        let (&width, domain_rows) = over.split_last()?;
        if columns == 0 || !width.is_multiple_of(columns) {
            return None;
        }
        // The dimensions that are as in the domain, then those of 1.
        let same = rows.iter().zip(domain_rows).take_while(|(a, b)| a == b);
        let same = same.count();
        let ones = rows[same..].iter().all(|&dim| dim == 1);
        let count = |dims: &[usize]| dims.iter().copied().fold(1, usize::saturating_mul);
        ones.then(|| Self {
            row_group: count(&domain_rows[same..]),
            rows: count(&rows[..same]),
            column_group: width / columns,
            columns,
        })
    }

    /// A single row is one group of all rows, so that equal reads are equal values.
    fn canonical(self, domain: &Shape) -> Self {
        match self.rows {
            1 => Self {
                row_group: domain.rows(),
                ..self
            },
            _ => self,
        }
    }

    pub fn is_full(&self, domain: &Shape) -> bool {
        self.rows == domain.rows() && self.columns == domain.width()
    }

    pub fn is_single(&self) -> bool {
        self.rows == 1 && self.columns == 1
    }

    pub fn elements(&self) -> usize {
        self.rows.saturating_mul(self.columns)
    }

    /// Whether every element belongs to equally many places, and each place to one.
    pub fn divides(&self, domain: &Shape) -> bool {
        let fits = |group: usize, count: usize, all: usize| {
            let span = group.checked_mul(count);
            span.is_some_and(|span| span > 0 && all.is_multiple_of(span))
        };
        fits(self.row_group, self.rows, domain.rows())
            && fits(self.column_group, self.columns, domain.width())
    }

    /// The number of the row that belongs to a row of the domain.
    #[inline(always)]
    pub fn row(&self, row: usize) -> usize {
        row / self.row_group % self.rows
    }

    #[inline(always)]
    pub fn column(&self, column: usize) -> usize {
        column / self.column_group % self.columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_say_how_they_are_read() {
        let domain = Shape::new(&[2, 3, 8]);
        let read = |dims: &[usize]| {
            let read = Broadcast::infer(&Shape::new(dims), &domain)?;
            assert!(read.divides(&domain), "{dims:?}");
            Some([read.row_group, read.rows, read.column_group, read.columns])
        };
        assert_eq!(read(&[2, 3, 8]), Some([1, 6, 1, 8]));
        assert_eq!(read(&[]), Some([6, 1, 8, 1]));
        assert_eq!(read(&[1]), Some([6, 1, 8, 1]));
        assert_eq!(read(&[8]), Some([6, 1, 1, 8]));
        assert_eq!(read(&[2, 3]), Some([1, 6, 8, 1]));
        assert_eq!(read(&[2, 3, 1]), Some([1, 6, 8, 1]));
        assert_eq!(read(&[2, 3, 2]), Some([1, 6, 4, 2]));
        assert_eq!(read(&[3, 8]), Some([1, 3, 1, 8]));
        assert_eq!(read(&[2, 1, 8]), Some([3, 2, 1, 8]));
        assert_eq!(read(&[1, 1, 2]), Some([6, 1, 4, 2]));
        assert_eq!(read(&[2, 3, 3]), None);
        assert_eq!(read(&[3, 3, 8]), None);
        assert_eq!(read(&[2]), None);
    }
}
