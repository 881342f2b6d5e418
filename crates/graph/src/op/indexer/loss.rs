//! The loss that fits an indexer's scores to the attention: for each query, with p the mean over
//! heads of its probabilities (a target that gets no gradient) and π the softmax of its scores
//! over the same keys,
//!
//! ```text
//! KL_t = Σ_s p·(ln p − ln π),    dKL_t/dI[t,s] = π − p
//! ```
//!
//! The term is the mean over queries and over the layers that add to it.
//!
//! Both are computed from what is kept anyway, tile by tile: the queries and keys of the
//! attention with its log-sum-exp, those of the indexer with theirs.

use super::{CUDA_RESIDENT, CUDA_SHARE, Indexer, cuda_tiles};
use crate::align::aligned;
use crate::cost::{Arithmetic, BlockWork, Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Role, Target, TensorId};
use crate::loss::{Count, LossTerm, TermInputs};
use crate::op::{
    Attention, AttentionInputs, CUDA_GEMM_WORKSPACE, Declare, LossScale, expect, expect_inputs,
    expect_same, expect_small, product, sum,
};
use crate::types::{DType, TensorType};

/// Inputs: those of the indexer, the log-sum-exp of its scores [B, T]; of the attention its
/// queries and keys (the packed tensor, or two), its log-sum-exp, and its selection where it has
/// one; the term's inverse count and weight. Output: the sum of KL over all queries, by the
/// inverse count, added to.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerLoss {
    pub indexer: Indexer,
    /// Causal, without padding, window, documents or dropout.
    pub attention: Attention,
}

/// Inputs: those of the forward and, with `scaled`, the loss scale. Outputs: the gradients of the indexer's
/// queries, keys and weights; added to, those of the biases of the weights and of the scores.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerLossBackward {
    pub forward: IndexerLoss,
    pub scaled: bool,
}

/// Bytes of the parts of a GPU's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerLossParts {
    /// Sums of the gradients of the two biases, of each block of rows.
    pub biases: u64,
    /// For every tile of keys and every row: KL or, of the backward, the gradients of the
    /// weights and the sums of those of the scores.
    pub partials: u64,
    /// Sequences whose gradients of scores exist at once, and rows of each.
    pub sequences: usize,
    pub rows: usize,
    /// Those gradients.
    pub scores: u64,
    /// The gradient of the keys of a sequence, where it is added up of several parts.
    pub keys: u64,
}

impl IndexerLoss {
    /// What the gradients of scores of a GPU may take.
    const CUDA_SCORE_BYTES: u64 = 32 << 20;
    /// Rows of a block that sums partial results.
    pub const CUDA_ROWS: usize = 64;

    /// Tensors that hold the queries and keys of the attention.
    pub fn num_sources(&self) -> usize {
        match self.attention.inputs {
            AttentionInputs::Packed => 1,
            AttentionInputs::Separate => 2,
        }
    }

    fn num_inputs(&self) -> usize {
        Indexer::NUM_INPUTS + 4 + self.num_sources() + usize::from(self.attention.selection)
    }

    /// Which of the inputs are the term's inverse count and weight.
    pub fn term_inputs(&self) -> [usize; 2] {
        let count = self.num_inputs();
        [count - 2, count - 1]
    }

    /// Which of the inputs is the first source; the log-sum-exp and the selection
    /// follow the sources.
    pub const FIRST_SOURCE: usize = Indexer::NUM_INPUTS + 1;

    /// Which of the inputs holds the selection.
    pub fn selection(&self) -> Option<usize> {
        let before_the_term = self.num_inputs() - 3;
        self.attention.selection.then_some(before_the_term)
    }

    fn check(&self, inputs: &[TensorType]) -> Result<(), String> {
        let attention = &self.attention;
        let (batch, length) = self.indexer.check(inputs)?;
        let sums = TensorType::new([batch, length], inputs[0].dtype.accumulator());
        expect_same(
            "the log-sum-exp of the scores",
            &inputs[Indexer::NUM_INPUTS],
            &sums,
        )?;
        let plain = attention.causal
            && attention.dropout.is_none()
            && attention.window.is_none()
            && !attention.padding
            && !attention.documents;
        expect(plain, || {
            "fits an indexer to attention that is not plainly causal".to_owned()
        })?;
        let first = &inputs[Self::FIRST_SOURCE];
        let mut sources = inputs[Self::FIRST_SOURCE..][..self.num_sources()].to_vec();
        // Values are not read; they are as wide as the keys.
        if attention.inputs == AttentionInputs::Separate {
            sources.push(sources[1]);
        }
        let found = attention.check_sources(&sources)?;
        expect(
            found == (batch, length) && first.dtype == inputs[0].dtype,
            || format!("attention over {first} and an indexer over {}", inputs[0]),
        )?;
        let rows = [batch, attention.heads, length];
        let lse = Self::FIRST_SOURCE + self.num_sources();
        expect_small("the log-sum-exp", &inputs[lse], &rows, first)?;
        if let Some(selection) = self.selection() {
            let expected = Attention::selection_type(batch, length);
            expect_same("the selection", &inputs[selection], &expected)?;
        }
        let [inverse_count, weight] = self.term_inputs().map(|input| &inputs[input]);
        expect_same("the term's inverse count", inverse_count, &TermInputs::ty())?;
        expect_same("the term's weight", weight, &TermInputs::ty())
    }

    /// Operations of one pair: its probabilities and its score.
    fn pair_flops(&self) -> u64 {
        const EXPONENTIAL: u64 = 8;
        let head = sum([product([2, self.attention.head_dim as u64]), EXPONENTIAL]);
        let probabilities = product([self.attention.heads as u64, head]);
        sum([probabilities, self.indexer.pair_flops()])
    }

    /// Probabilities, scores and the product of one head for some rows; then, for every row, KL or
    /// the gradients of the bias of the scores.
    fn cpu_workspace(&self, queries: &TensorType, each_row: usize) -> u64 {
        let length = queries.shape.dims()[1];
        let rows = Indexer::cpu_rows(length) as u64;
        let tables = product([3, rows, length as u64]);
        let each = product([each_row as u64, queries.rows() as u64]);
        product([sum([tables, each]), queries.dtype.size()])
    }

    /// Bytes of KL of every row, and of its parts, one for each tile of keys.
    pub fn cuda_row_parts(&self, queries: &TensorType) -> [u64; 2] {
        let tiles = cuda_tiles(queries.shape.dims()[1]) as u64;
        let rows = queries.rows() as u64;
        [
            aligned(product([rows, 4])),
            aligned(product([tiles, rows, 4])),
        ]
    }

    /// Blocks of rows that sum the partial results of the backward.
    pub fn cuda_row_blocks(queries: &TensorType) -> usize {
        queries.rows().div_ceil(Self::CUDA_ROWS)
    }

    pub fn cuda_parts(&self, queries: &TensorType) -> IndexerLossParts {
        let (batch, length) = (queries.shape.dims()[0], queries.shape.dims()[1]);
        let heads = self.indexer.heads as u64;
        let tiles = cuda_tiles(length);
        let tile = Indexer::CUDA_TILE;
        let row = product([heads, tiles as u64, tile as u64, queries.dtype.size()]);
        let sequence = product([row, length as u64]);
        let most = Self::CUDA_SCORE_BYTES;
        let whole = (most / sequence.max(1)).min(batch as u64) as usize;
        let (sequences, rows) = if whole > 0 {
            (whole, length)
        } else {
            let tiles = (most / product([row, tile as u64]).max(1)).max(1) as usize;
            (1, tiles.saturating_mul(tile).min(length))
        };
        let blocks = Self::cuda_row_blocks(queries) as u64;
        let in_parts = rows < length && queries.dtype != DType::F32;
        let keys = product([length as u64, self.indexer.width as u64, 4]);
        IndexerLossParts {
            biases: aligned(product([2, blocks, heads, 4])),
            partials: aligned(product([2, heads, tiles as u64, queries.rows() as u64, 4])),
            sequences,
            rows,
            scores: aligned(product([sequences as u64, rows as u64, row])),
            keys: if in_parts { aligned(keys) } else { 0 },
        }
    }

    fn cuda_tiles_cost(&self, queries: &TensorType, pair_flops: u64, bytes: u64) -> KernelCost {
        let tiles = cuda_tiles(queries.shape.dims()[1]);
        let blocks = queries.shape.dims()[0].saturating_mul(tiles.saturating_mul(tiles + 1) / 2);
        let arithmetic = Arithmetic::Blocks {
            flops: product([Indexer::pairs(queries), pair_flops]),
            any: BlockWork {
                share: CUDA_SHARE,
                blocks,
                resident: CUDA_RESIDENT,
            },
            hopper: None,
        };
        KernelCost::computing(1, bytes, arithmetic)
    }
}

impl Graph {
    /// A term of the loss to which [`Self::indexer_loss`] adds, `rows` times in all.
    pub fn indexer_term(&mut self, name: &str, rows: usize, weight: f64) -> LossTerm {
        let ty = TensorType::new([1], self.compute.accumulator());
        let term = LossTerm {
            name: name.to_owned(),
            value: self.add_tensor(name, ty, Role::Result),
            inputs: self.term_inputs(name),
            count: Count::Rows(rows),
            weight,
        };
        self.add_term(term.clone());
        term
    }

    /// Adds KL of every query to a term. `sources` are those of the attention, as it reads them.
    pub fn indexer_loss(
        &mut self,
        name: &str,
        term: &LossTerm,
        op: IndexerLoss,
        indexer: [TensorId; Indexer::NUM_INPUTS],
        indexer_lse: TensorId,
        (sources, lse, selection): (&[TensorId], TensorId, Option<TensorId>),
    ) -> Result<(), GraphError> {
        let op = IndexerLoss {
            attention: Attention {
                selection: selection.is_some(),
                ..op.attention
            },
            ..op
        };
        let sources = sources[..op.num_sources().min(sources.len())]
            .iter()
            .copied();
        let inputs = indexer
            .into_iter()
            .chain([indexer_lse])
            .chain(sources)
            .chain([lse])
            .chain(selection)
            .chain([term.inputs.inverse_count, term.inputs.weight]);
        self.emit_into(name, op, inputs.collect(), &[term.value])?;
        Ok(())
    }
}

impl Declare for IndexerLoss {
    fn name(&self) -> &'static str {
        "indexer_loss"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, self.num_inputs())?;
        self.check(inputs)?;
        Ok(vec![TensorType::new([1], inputs[0].dtype.accumulator())])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let biases = [3, 4].map(|input| backward.parameter_gradient(node, node.inputs[input]));
        let [weights, scores] = biases;
        let into = vec![weights?, scores?];
        let scale = backward.graph().loss_scale;
        let inputs = node.inputs.iter().copied().chain(scale);
        let op = IndexerLossBackward {
            forward: self.clone(),
            scaled: scale.is_some(),
        };
        let gradients = backward.accumulate(node, "indexer", op, inputs.collect(), into)?;
        for (&input, gradient) in node.inputs[..3].iter().zip(gradients) {
            backward.contribute(node, input, gradient)?;
        }
        Ok(())
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => self.cpu_workspace(&inputs[0], 1),
            Target::Cuda => sum(self.cuda_row_parts(&inputs[0])),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([Indexer::pairs(&inputs[0]), self.pair_flops()])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.118
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let bytes = self.bytes(inputs, outputs);
        let tiles = self.cuda_tiles_cost(&inputs[0], self.pair_flops(), bytes);
        let rows = KernelCost::streamed(2, sum(self.cuda_row_parts(&inputs[0])));
        Cost::of([tiles, rows])
    }
}

impl Declare for IndexerLossBackward {
    fn name(&self) -> &'static str {
        "indexer_loss_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["queries", "keys", "weights", "weight_bias", "score_bias"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let forward = self.forward.num_inputs();
        expect_inputs(inputs, forward + usize::from(self.scaled))?;
        self.forward.check(&inputs[..forward])?;
        if self.scaled {
            LossScale::expect(&inputs[forward])?;
        }
        Ok(inputs[..Indexer::NUM_INPUTS].to_vec())
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let queries = &inputs[0];
        let forward = &self.forward;
        match target {
            Target::Cpu => forward.cpu_workspace(queries, forward.indexer.heads),
            Target::Cuda => {
                let parts = forward.cuda_parts(queries);
                let own = [parts.biases, parts.partials, parts.scores, parts.keys];
                sum([sum(own), CUDA_GEMM_WORKSPACE])
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // What the forward does, the sigmoids once more, and two products of their gradients.
        let indexer = self.forward.indexer;
        let gradients = product([4, indexer.heads as u64, indexer.width as u64]);
        let pair = sum([self.forward.pair_flops(), indexer.pair_flops(), gradients]);
        product([Indexer::pairs(&inputs[0]), pair])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.095
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let queries = &inputs[0];
        let (batch, length) = (queries.shape.dims()[0], queries.shape.dims()[1]);
        let indexer = self.forward.indexer;
        let parts = self.forward.cuda_parts(queries);
        let pair = sum([self.forward.pair_flops(), indexer.pair_flops()]);
        let bytes = sum([self.bytes(inputs, outputs), parts.scores]);
        let tiles = self.forward.cuda_tiles_cost(queries, pair, bytes);
        let rows = KernelCost::streamed(2, parts.partials);
        let deep = length.saturating_mul(indexer.heads);
        let products = (0..batch).flat_map(|_| {
            [[deep, indexer.width, length], [length, indexer.width, deep]]
                .map(|shape| KernelCost::product(shape, queries.dtype, parts.scores))
        });
        Cost::of([tiles, rows].into_iter().chain(products))
    }
}
