//! Softmax attention without the T×T matrix. Scores exist for one tile of queries × keys at a
//! time; the forward pass keeps each row's log-sum-exp, and the backward pass makes the
//! probabilities again from it.
//!
//! Queries have `heads` heads, keys and values `kv_heads`; each of the latter serves
//! `heads / kv_heads` consecutive query heads.

mod backward;
mod cached;
mod entropy;
mod forward;
mod narrow;

use std::ops::Range;

pub use backward::{backward, backward_workspace};
pub use cached::{Cache, forward_cached};
pub use entropy::{EntropyRows, EntropyShape, entropy, entropy_backward, entropy_cached};
pub use forward::forward;

use crate::cpu::dropout::Dropout;
use crate::cpu::real::Real;

use super::columns::Columns;
use super::gemm::Matrix;

/// Side of a score tile. Larger tiles would compute more of the masked triangle, smaller ones
/// would spend more on packing.
const BLOCK: usize = 64;

/// Keys in a word of a selection; a block has two words.
const WORD: usize = 32;

/// What a task needs in single precision with heads of 128 columns, as wide as they commonly
/// are: two tiles of scores and three of the head (the backward's; the forward needs less).
pub(super) const SCRATCH_BYTES: usize = BLOCK * (2 * BLOCK + 3 * 128) * size_of::<f32>();

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
    /// What scores are multiplied by, commonly `1/√head_dim`.
    pub scale: f64,
    /// How many keys up to its own a query sees, in a causal order.
    pub window: Option<usize>,
}

impl AttentionShape {
    fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Query heads per key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The mask of all heads. Narrow ones have kernels of their own, here and on a GPU, which draw a
    /// number for each probability.
    fn mask(&self, dropout: Dropout) -> Dropout {
        let scaled = dropout.scaled(self.heads);
        match self.head_dim <= narrow::WIDEST {
            true => scaled.single(),
            false => scaled.of_scores(),
        }
    }
}

/// Keys that the queries of a sequence see.
#[derive(Clone, Copy)]
struct Sight<'a> {
    causal: bool,
    window: Option<usize>,
    /// Of this sequence.
    starts: Option<&'a [i32]>,
    selection: Option<Selection<'a>>,
}

/// The keys that the queries of a sequence select: a bit for each, in rows of words.
#[derive(Clone, Copy)]
struct Selection<'a> {
    words: &'a [i32],
    row_words: usize,
    /// The position of the query that has the first row.
    first_query: usize,
}

impl Sight<'_> {
    /// The first key that the query at `t` sees, never one behind its own.
    #[inline(always)]
    fn first(&self, t: usize) -> usize {
        let start = self.starts.map_or(0, |starts| starts[t].max(0) as usize);
        let window = self
            .window
            .map_or(0, |window| (t + 1).saturating_sub(window));
        start.max(window).min(t)
    }

    /// The first block of keys that any of the queries sees.
    fn first_block(&self, queries: Range<usize>) -> usize {
        if self.window.is_none() && self.starts.is_none() {
            return 0;
        }
        let first = queries.map(|t| self.first(t)).min();
        first.map_or(0, |first| first / BLOCK * BLOCK)
    }

    /// Of the keys of the block at `k0`, those that the query at `t` has selected, a bit for each.
    #[inline(always)]
    fn selected(&self, t: usize, k0: usize) -> u64 {
        let Some(selection) = self.selection else {
            return u64::MAX;
        };
        let row = t - selection.first_query;
        let row = &selection.words[row * selection.row_words..][..selection.row_words];
        let word = |index: usize| match row.get(index) {
            Some(word) => u64::from(word.cast_unsigned()),
            None => 0,
        };
        word(k0 / WORD) | word(k0 / WORD + 1) << WORD
    }

    /// Of the `columns` keys from `k0` on, those that the query at `t` sees.
    #[inline(always)]
    fn visible(&self, t: usize, k0: usize, columns: usize) -> Range<usize> {
        if self.causal {
            let end = columns.min((t + 1).saturating_sub(k0));
            self.first(t).saturating_sub(k0).min(end)..end
        } else {
            0..columns
        }
    }
}

/// The bits `start..end` of a block.
#[inline(always)]
fn bits(start: usize, end: usize) -> u64 {
    let below = |end: usize| match end {
        BLOCK.. => u64::MAX,
        _ => (1 << end) - 1,
    };
    below(end) & !below(start)
}

/// Queries `[rows, heads·head_dim]`, keys and values `[rows, kv_heads·head_dim]`, rows
/// batch-major: blocks of one packed buffer or three buffers. With `lengths [batch]` a sequence
/// ends before `seq`: what lies beyond is nobody's key, and as a query gives zeroes and passes no
/// gradient on. With `starts [batch, seq]` a causal query sees no key before its start.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, F> {
    pub q: Columns<'a, F>,
    pub k: Columns<'a, F>,
    pub v: Columns<'a, F>,
    pub lengths: Option<&'a [i32]>,
    pub starts: Option<&'a [i32]>,
    /// With `selection [batch, seq, ⌈seq/32⌉]` a causal query sees only keys whose bits are set.
    pub selection: Option<&'a [i32]>,
}

impl<'a, F> Inputs<'a, F> {
    fn sight(&self, shape: &AttentionShape, b: usize) -> Sight<'a> {
        Sight {
            causal: shape.causal,
            window: shape.window,
            starts: self
                .starts
                .map(|starts| &starts[b * shape.seq..][..shape.seq]),
            selection: self.selection_of(shape, b, (0, shape.seq)),
        }
    }

    /// What the queries of sequence `b`, the first of which is at `first_query`, select of `keys`.
    fn selection_of(
        &self,
        shape: &AttentionShape,
        b: usize,
        (first_query, keys): (usize, usize),
    ) -> Option<Selection<'a>> {
        let row_words = keys.div_ceil(WORD);
        let words = shape.seq * row_words;
        self.selection.map(|selection| Selection {
            words: &selection[b * words..][..words],
            row_words,
            first_query,
        })
    }

    /// Positions of sequence `b` that count, whatever number the lengths hold.
    fn length(&self, shape: &AttentionShape, b: usize) -> usize {
        let length = self.lengths.map(|lengths| lengths[b].max(0) as usize);
        length.map_or(shape.seq, |length| length.min(shape.seq))
    }

    /// `keys` is how many a row of the selection has a bit for.
    fn check(&self, shape: &AttentionShape, keys: usize) {
        assert!(
            shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
            "{} heads do not share {} key/value heads",
            shape.heads,
            shape.kv_heads
        );
        if let Some(lengths) = self.lengths {
            assert_eq!(lengths.len(), shape.batch, "lengths");
        }
        if let Some(starts) = self.starts {
            assert_eq!(starts.len(), shape.rows(), "starts");
        }
        if let Some(selection) = self.selection {
            let words = shape.rows() * keys.div_ceil(WORD);
            assert_eq!(selection.len(), words, "the selection");
        }
        let bounded = shape.window.is_some() || self.starts.is_some() || self.selection.is_some();
        assert!(
            shape.causal || !bounded,
            "a window, starts or a selection without a causal order"
        );
        let kv_width = shape.kv_heads * shape.head_dim;
        for (name, columns, width) in [
            ("q", &self.q, shape.heads * shape.head_dim),
            ("k", &self.k, kv_width),
            ("v", &self.v, kv_width),
        ] {
            assert!(
                columns.width == width,
                "{name} has {} columns, not {width}",
                columns.width
            );
            columns.check(name, shape.rows());
        }
    }
}

/// The mask of a tile: one row of the mask per (sequence, head, query), columns are keys.
#[derive(Clone, Copy)]
struct TileMask {
    dropout: Dropout,
    /// The mask's row of the tile's first query, counted within the micro batch.
    row: usize,
    /// The position of the tile's first key.
    key: usize,
}

impl TileMask {
    /// Multiplies a row of the tile by its factors.
    #[inline(always)]
    fn apply<F: Real>(&self, i: usize, line: &mut [F]) {
        let base = self.dropout.row(self.row + i);
        self.dropout.multiply(base, self.key, line);
    }
}

#[cfg(test)]
mod tests;
