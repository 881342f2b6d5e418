//! Which keys each query attends to: as many as its row of scores asks for, the best ones.

use super::{CPU_SIGMOIDS, CUDA_RESIDENT, CUDA_SHARE, Indexer, cuda_tiles};
use crate::align::aligned;
use crate::cost::{Arithmetic, BlockWork, Cost, KernelCost};
use crate::error::GraphError;
use crate::graph::{Graph, Target, TensorId};
use crate::op::{Attention, Declare, expect, expect_inputs, product, sum};
use crate::types::TensorType;

/// How many keys a query selects: never more than it sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyCount {
    Fixed(usize),
    /// With the unbiased variance `v_t` of row t over all T columns, where those that are not
    /// seen count as 0, and `r_t = v_t / (mean of v over batch and t + 1e-8)`:
    /// `base·(0.5 + 1/(1 + r_t·temperature))`, kept between the least and the most, cut to a
    /// whole number.
    Adaptive {
        base: usize,
        least: usize,
        most: usize,
        temperature: f64,
    },
}

impl KeyCount {
    pub(super) fn check(&self) -> Result<(), String> {
        match *self {
            Self::Fixed(count) => expect(count > 0, || "a selection of 0 keys".to_owned()),
            Self::Adaptive {
                base,
                least,
                most,
                temperature,
            } => {
                expect(base > 0 && least > 0 && least <= most, || {
                    format!("a selection of {base} keys, at least {least} and at most {most}")
                })?;
                expect(temperature.is_finite() && temperature >= 0.0, || {
                    format!("a temperature of {temperature}")
                })
            }
        }
    }
}

/// Inputs: those of [`Indexer::NUM_INPUTS`]. Outputs: the logarithm of the sum of the
/// exponentials of the selected scores [B, T], in the precision of sums; and, with a count, the
/// selection, a bit for each pair ([`Attention::selection_type`]): the highest scores of the row,
/// of equal ones those at lower positions. Without a count everything visible counts as selected.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerSelection {
    pub indexer: Indexer,
    pub count: Option<KeyCount>,
}

/// Bytes of a GPU's workspace: scores of some tiles of rows, then the variance of every row and
/// their mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectionParts {
    /// Rows of tiles whose scores exist at once, of all sequences.
    pub tiles: usize,
    pub scores: u64,
    pub variances: u64,
}

impl IndexerSelection {
    /// What the scores of a GPU may take.
    const CUDA_SCORE_BYTES: u64 = 16 << 20;

    pub fn cuda_parts(&self, queries: &TensorType) -> SelectionParts {
        let (batch, length) = (queries.shape.dims()[0], queries.shape.dims()[1]);
        let tiles = cuda_tiles(length);
        let row = product([tiles as u64, Indexer::CUDA_TILE as u64, 4]);
        let tile = product([row, Indexer::CUDA_TILE as u64]);
        let at_once = (Self::CUDA_SCORE_BYTES / tile.max(1)).max(1) as usize;
        let at_once = at_once.min(batch.saturating_mul(tiles)).max(1);
        SelectionParts {
            tiles: at_once,
            scores: aligned(product([at_once as u64, tile])),
            variances: aligned(product([sum([queries.rows() as u64, 1]), 4])),
        }
    }

    /// Whether the mean over the batch decides.
    pub fn is_adaptive(&self) -> bool {
        matches!(self.count, Some(KeyCount::Adaptive { .. }))
    }
}

impl Graph {
    /// The log-sum-exp of the scores and, with a count, the selection.
    pub fn select_keys(
        &mut self,
        name: &str,
        indexer: Indexer,
        sources: [TensorId; Indexer::NUM_INPUTS],
        count: Option<KeyCount>,
    ) -> Result<(TensorId, Option<TensorId>), GraphError> {
        let op = IndexerSelection { indexer, count };
        let outputs = self.emit(name, op, sources.to_vec())?;
        Ok((outputs[0], outputs.get(1).copied()))
    }
}

impl Declare for IndexerSelection {
    fn name(&self) -> &'static str {
        "indexer_selection"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["lse", ""]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, Indexer::NUM_INPUTS)?;
        let (batch, length) = self.indexer.check(inputs)?;
        if let Some(count) = self.count {
            count.check()?;
        }
        let sums = TensorType::new([batch, length], inputs[0].dtype.accumulator());
        let selection = Attention::selection_type(batch, length);
        Ok([sums]
            .into_iter()
            .chain(self.count.map(|_| selection))
            .collect())
    }

    /// A selection does not change with small changes of the scores; the loss that trains them
    /// has its gradient itself.
    fn passes_gradient(&self) -> bool {
        false
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let queries = &inputs[0];
        match target {
            // Two tables of scores of some rows, and a variance for every row.
            Target::Cpu => {
                let length = queries.shape.dims()[1];
                let rows = Indexer::cpu_rows(length) as u64;
                let tables = product([2, rows, length as u64]);
                product([sum([tables, queries.rows() as u64]), queries.dtype.size()])
            }
            Target::Cuda => {
                let parts = self.cuda_parts(queries);
                sum([parts.scores, parts.variances])
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        /// Sums, and the passes of a selection, for each pair.
        const ROWS: u64 = 12;
        let pair = sum([self.indexer.pair_flops(), ROWS]);
        product([Indexer::pairs(&inputs[0]), pair])
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let queries = &inputs[0];
        let pairs = Indexer::pairs(queries);
        let tiles = cuda_tiles(queries.shape.dims()[1]);
        let blocks = queries.shape.dims()[0].saturating_mul(tiles.saturating_mul(tiles + 1) / 2);
        let scores = KernelCost::computing(
            1,
            sum([self.bytes(inputs, outputs), product([4, pairs])]),
            Arithmetic::Blocks {
                flops: product([pairs, self.indexer.pair_flops()]),
                any: BlockWork {
                    share: CUDA_SHARE,
                    blocks,
                    resident: CUDA_RESIDENT,
                },
                hopper: None,
            },
        );
        // Rows of scores are read again and again, from the cache.
        let rows = |launches, passes| KernelCost::streamed(launches, product([passes, 4, pairs]));
        let select = match self.count {
            None => rows(1, 2),
            Some(KeyCount::Fixed(_)) => rows(1, 6),
            Some(KeyCount::Adaptive { .. }) => rows(3, 8),
        };
        Cost::of([scores, select])
    }
}
