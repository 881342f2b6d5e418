//! Expressions over tensors, tile by tile: each scalar is computed for a tile of elements before
//! the next one is, so that what is interpreted is the tile and what is computed is vector code.
//! Tiles are parts of a few rows in their order; what lies between two scalars is in the cache.

mod map;
mod reduce;
#[cfg(test)]
mod tests;
mod tile;

pub use map::map;
pub use reduce::{Reduction, reduce};

use cinch_graph::expression::{Broadcast, Expression};

use crate::cpu::dropout::RandomState;
use crate::cpu::parallel::Shared;
use crate::cpu::real::Real;

/// Elements that are computed together.
pub(super) const TILE: usize = 512;

/// What a thread needs at the most: a tile for every cell, in double precision.
pub(super) const SCRATCH_BYTES: usize = Expression::MOST_SLOTS * TILE * size_of::<f64>();

/// The numbers of an input.
#[derive(Clone, Copy)]
pub enum Numbers<'a, F> {
    Real(&'a [F]),
    /// Single precision in a graph of double precision.
    Single(&'a [f32]),
    Integer(&'a [i32]),
    /// What the output of this number held before it was written.
    InPlace(usize),
}

/// An input, and which of its elements belongs to a place.
#[derive(Clone, Copy)]
pub struct Source<'a, F> {
    pub numbers: Numbers<'a, F>,
    pub broadcast: Broadcast,
}

/// An expression over `rows` × `width` places.
#[derive(Clone, Copy)]
pub struct Places<'a, F> {
    pub expression: &'a Expression,
    pub sources: &'a [Source<'a, F>],
    pub random: Option<RandomState>,
    pub rows: usize,
    pub width: usize,
}

/// Outputs that inputs may have been in.
type Outputs<'a, F> = [Shared<'a, F>];

impl<F: Real> Places<'_, F> {
    fn elements(&self) -> usize {
        self.rows * self.width
    }

    /// Whether the elements of a source lie as the places do.
    fn is_full(&self, broadcast: &Broadcast) -> bool {
        broadcast.rows == self.rows && broadcast.columns == self.width
    }
}
