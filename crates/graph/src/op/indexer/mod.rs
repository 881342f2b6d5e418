//! The indexer of gated sparse attention: cheap scores of every pair of a query and a key, the
//! selection of keys by them, and the loss that fits them to the attention.
//!
//! ```text
//! I[t,s] = Σ_j w[t,j]·σ(q[t,j]·k[s]/√width + b_j),   w = σ(c + b_w),   s ≤ t
//! ```
//!
//! Scores exist for a bounded number of rows at a time, in a workspace; a selection is a bit for
//! each pair.

mod cached;
mod loss;
mod selection;

pub use cached::{CachedSelection, CachedSelectionParts};
pub use loss::{IndexerLoss, IndexerLossBackward, IndexerLossParts};
pub use selection::{IndexerSelection, KeyCount, SelectionParts};

use super::{expect, expect_float, expect_same, expect_small, product, sum};
use crate::types::TensorType;

/// What an indexer's scores are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    pub heads: usize,
    /// Columns of a head of the queries, and of the keys, which all heads share.
    pub width: usize,
}

impl Indexer {
    /// The inputs that scores are computed from: queries [B, T, heads·width], keys
    /// [B, T, width], weights before their bias and sigmoid [B, T, heads], then the two biases
    /// `[heads]` in the precision of sums: of the weights, of the scores.
    pub const NUM_INPUTS: usize = 5;
    /// Side of a GPU's tile of scores.
    pub const CUDA_TILE: usize = 64;
    /// The most heads: their exponentials must stay below the largest number.
    pub const MOST_HEADS: usize = 64;
    /// Rows of scores that a CPU has at once.
    const CPU_ROWS: usize = 128;

    /// Batch and length, or what is wrong with the inputs.
    fn check(&self, inputs: &[TensorType]) -> Result<(usize, usize), String> {
        expect((1..=Self::MOST_HEADS).contains(&self.heads), || {
            format!(
                "an indexer of {} heads, expected 1 to {}",
                self.heads,
                Self::MOST_HEADS
            )
        })?;
        expect(self.width > 0, || {
            "an indexer whose heads have no columns".to_owned()
        })?;
        let q = &inputs[0];
        expect_float("the indexer's queries", q)?;
        expect(q.shape.rank() == 3, || {
            format!(
                "the indexer's queries are {}, expected [batch,length,width]",
                q.shape
            )
        })?;
        let wide = |width| TensorType::new(q.shape.with_width(width), q.dtype);
        expect_same(
            "the indexer's queries",
            q,
            &wide(self.heads.saturating_mul(self.width)),
        )?;
        expect_same("the indexer's keys", &inputs[1], &wide(self.width))?;
        expect_same("the indexer's weights", &inputs[2], &wide(self.heads))?;
        expect_small("the bias of the weights", &inputs[3], &[self.heads], q)?;
        expect_small("the bias of the scores", &inputs[4], &[self.heads], q)?;
        Ok((q.shape.dims()[0], q.shape.dims()[1]))
    }

    /// Rows whose scores a CPU has at once.
    pub fn cpu_rows(length: usize) -> usize {
        Self::CPU_ROWS.min(length)
    }

    /// Pairs of a query and a key that it sees.
    fn pairs(queries: &TensorType) -> u64 {
        let (batch, length) = (
            queries.shape.dims()[0] as u64,
            queries.shape.dims()[1] as u64,
        );
        product([batch, length, length.saturating_add(1)]) / 2
    }

    /// Operations of one score: a product in each head, and its sigmoid.
    fn pair_flops(&self) -> u64 {
        const SIGMOID: u64 = 10;
        let head = sum([product([2, self.width as u64]), SIGMOID]);
        product([self.heads as u64, head])
    }
}

/// Tiles of a GPU that cover a sequence.
fn cuda_tiles(length: usize) -> usize {
    length.div_ceil(Indexer::CUDA_TILE)
}

/// The share of the matrix rate that a GPU's tiles reach: they are as deep as a head is wide, and
/// wait for their operands.
const CUDA_SHARE: f64 = 0.085;
/// Blocks of tiles that a multiprocessor holds.
const CUDA_RESIDENT: usize = 4;
/// Of an operation on a CPU.
const CPU_SIGMOIDS: f64 = 0.106;
