//! Which keys tokens attend to that follow others: the indexer's keys of those are in a cache.
//!
//! A query selects what it would select as the last of a text that ends with it. Where the number
//! of keys follows the variances of the rows before it as well, these are cached as two sums, from
//! which the mean over a text of any length follows: of a row with n columns, mean μ and squares
//! M = Σ(x − μ)², the variance over T columns, of which the others are 0, is
//!
//! ```text
//! (M + n·μ² − (n·μ)²/T) / (T − 1)
//! ```
//!
//! so the sums over rows of M + n·μ² and of (n·μ)² are enough.

use super::{CPU_SIGMOIDS, Indexer, KeyCount};
use crate::align::aligned;
use crate::cost::{Cost, KernelCost};
use crate::error::GraphError;
use crate::graph::{Graph, Target, TensorId};
use crate::op::{Declare, expect, expect_inputs, expect_positions, product, sum};
use crate::types::{DType, TensorType};

/// Inputs: those of [`Indexer::NUM_INPUTS`]; positions i32 [B, T], of which the first of each row
/// counts and the others follow it. Outputs: the selection, a bit for each slot
/// [B, T, ⌈slots/32⌉]; the cache of the indexer's keys [B, slots, width]; with an adaptive count,
/// the cache of the sums of all rows up to each [B, slots, 2], in the precision of sums. The token
/// at position p has slot p.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedSelection {
    pub indexer: Indexer,
    pub count: KeyCount,
    pub slots: usize,
}

/// Bytes of a GPU's workspace: scores of all rows, then for each row its variance and its share of
/// the two sums, and its number of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedSelectionParts {
    pub scores: u64,
    pub rows: u64,
    pub counts: u64,
}

impl CachedSelection {
    /// Numbers of a row between the kernels of a GPU.
    pub const CUDA_ROW_NUMBERS: usize = 3;

    pub fn selection(&self, batch: usize, length: usize) -> TensorType {
        TensorType::new([batch, length, self.slots.div_ceil(32)], DType::I32)
    }

    fn keys(&self, batch: usize, dtype: DType) -> TensorType {
        TensorType::new([batch, self.slots, self.indexer.width], dtype)
    }

    fn sums(&self, batch: usize, dtype: DType) -> TensorType {
        TensorType::new([batch, self.slots, 2], dtype.accumulator())
    }

    /// Whether rows before decide how many keys are selected.
    pub fn is_adaptive(&self) -> bool {
        matches!(self.count, KeyCount::Adaptive { .. })
    }

    pub fn cuda_parts(&self, queries: &TensorType) -> CachedSelectionParts {
        let rows = queries.rows() as u64;
        CachedSelectionParts {
            scores: aligned(product([rows, self.slots as u64, 4])),
            rows: aligned(product([rows, Self::CUDA_ROW_NUMBERS as u64, 4])),
            counts: aligned(product([rows, 4])),
        }
    }

    /// Pairs of a query and a key of a full cache: how many tokens it holds, no plan knows.
    fn pairs(&self, queries: &TensorType) -> u64 {
        product([queries.rows() as u64, self.slots as u64])
    }
}

impl Graph {
    /// The selection of tokens that follow those in the cache.
    pub fn select_cached(
        &mut self,
        name: &str,
        op: CachedSelection,
        sources: [TensorId; Indexer::NUM_INPUTS],
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        let source = self.ty(sources[0]);
        let batch = source.shape.dims().first().copied().unwrap_or(0);
        let mut caches = vec![self.cache(&format!("{name}.keys"), op.keys(batch, source.dtype))];
        if op.is_adaptive() {
            caches.push(self.cache(&format!("{name}.sums"), op.sums(batch, source.dtype)));
        }
        let inputs = sources.into_iter().chain([positions]).collect();
        Ok(self.emit_into(name, op, inputs, &caches)?[0])
    }
}

impl Declare for CachedSelection {
    fn name(&self) -> &'static str {
        "cached_selection"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "keys", "sums"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, Indexer::NUM_INPUTS + 1)?;
        let (batch, length) = self.indexer.check(inputs)?;
        self.count.check()?;
        expect(self.slots >= length, || {
            format!("{length} tokens at once do not fit {} slots", self.slots)
        })?;
        expect_positions(&inputs[Indexer::NUM_INPUTS], &inputs[0])?;
        let dtype = inputs[0].dtype;
        let mut outputs = vec![self.selection(batch, length), self.keys(batch, dtype)];
        if self.is_adaptive() {
            outputs.push(self.sums(batch, dtype));
        }
        Ok(outputs)
    }

    fn passes_gradient(&self) -> bool {
        false
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let queries = &inputs[0];
        match target {
            // Two tables of scores of some rows, and the variance of each.
            Target::Cpu => {
                let rows = Indexer::cpu_rows(queries.shape.dims()[1]) as u64;
                let tables = product([2, rows, self.slots as u64]);
                product([sum([tables, rows]), queries.dtype.size()])
            }
            Target::Cuda => {
                let parts = self.cuda_parts(queries);
                sum([parts.scores, parts.rows, parts.counts])
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([self.pairs(&inputs[0]), self.indexer.pair_flops()])
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }

    /// The keys go into the cache, are scored, summed by rows, and selected from.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        /// How often a row of scores is read.
        const PASSES: u64 = 6;
        let launches = if self.is_adaptive() { 5 } else { 3 };
        let scores = product([PASSES, 4, self.pairs(&inputs[0])]);
        let bytes = sum([self.bytes(inputs, outputs), scores]);
        Cost::of([KernelCost::streamed(launches, bytes)])
    }
}
