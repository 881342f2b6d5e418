//! Softmax attention that never holds the T×T scores: forward keeps one number per row and
//! head (the log-sum-exp), backward computes the probabilities again, block by block. A query may
//! see a selection of the keys only: a bit for each, read beside the keys where they lie.

mod hopper;

pub use hopper::{HopperBackward, HopperDealt, HopperDealtParts, HopperParts, HopperShort};

use super::{
    Declare, aligned, expect, expect_dropout, expect_dtype, expect_float, expect_inputs,
    expect_same, expect_shape, expect_small, product, sum,
};
use crate::cost::{Arithmetic, BlockWork, Cost, KernelCost};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Dropout, Graph, Node, Target, TensorId};
use crate::types::{DType, TensorType};

/// Where queries, keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionInputs {
    /// One tensor [B, T, (heads + 2·kv_heads)·head_dim]: queries, keys, values side by side.
    Packed,
    /// Three tensors, as wide as their heads.
    Separate,
}

/// Inputs: qkv, or q, k and v; random state with dropout; lengths i32 `[B]` with padding; starts
/// i32 `[B, T]` with documents; the selection, i32 `[B, T, ⌈T/32⌉]`. Outputs: o [B, T, heads·head_dim], lse [B, heads, T].
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub inputs: AttentionInputs,
    pub heads: usize,
    /// Each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    pub head_dim: usize,
    pub causal: bool,
    pub scale: f64,
    /// On the probabilities.
    pub dropout: Option<Dropout>,
    /// Whether sequences end before T: positions from a sequence's length on are nobody's keys,
    /// and as queries give zeroes (o and lse) and pass no gradient on. Lengths below 0 count as 0,
    /// those beyond T as T.
    pub padding: bool,
    /// How many keys a causal query sees at most: its own position and those just before it.
    pub window: Option<usize>,
    /// Whether several documents follow one another in a sequence: a causal query sees no key
    /// before its entry of the starts, the position where its document begins. Along a sequence
    /// starts never fall. Those below 0 count as 0, those beyond their own position as that.
    pub documents: bool,
    /// Whether a query sees only the keys whose bits are set in its row of the selection: key s is
    /// bit s % 32 of word s / 32. Every query must have one that it sees.
    pub selection: bool,
}

/// Inputs: do, qkv or q, k and v, o, lse, random state with dropout, lengths with padding, starts
/// with documents, selection.
/// Outputs: dqkv, or dq, dk and dv.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionBackward(pub Attention);

impl Graph {
    /// Attention over a packed projection.
    pub fn attention(
        &mut self,
        name: &str,
        qkv: TensorId,
        heads: usize,
        causal: bool,
        dropout: Option<Dropout>,
    ) -> Result<TensorId, GraphError> {
        // Of no heads, nothing: the op refuses them.
        let head_dim = self
            .ty(qkv)
            .width()
            .checked_div(heads.saturating_mul(3))
            .unwrap_or(0);
        let op = Attention {
            inputs: AttentionInputs::Packed,
            heads,
            kv_heads: heads,
            head_dim,
            causal,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        self.attend(name, op, &[qkv], None, None)
    }

    /// Attention of any form over its sources; with lengths, `op` gets padding, with starts
    /// documents.
    pub fn attend(
        &mut self,
        name: &str,
        op: Attention,
        sources: &[TensorId],
        lengths: Option<TensorId>,
        starts: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let random = op.dropout.map(|_| self.random_state());
        let op = Attention {
            padding: lengths.is_some(),
            documents: starts.is_some(),
            selection: false,
            ..op
        };
        let extras = [random, lengths, starts].into_iter().flatten();
        let inputs = sources.iter().copied().chain(extras);
        Ok(self.emit(name, op, inputs.collect())?[0])
    }

    /// Attention to the keys that a selection has; the output and its log-sum-exp.
    pub fn attend_selected(
        &mut self,
        name: &str,
        op: Attention,
        sources: &[TensorId],
        selection: Option<TensorId>,
    ) -> Result<[TensorId; 2], GraphError> {
        let random = op.dropout.map(|_| self.random_state());
        let op = Attention {
            selection: selection.is_some(),
            ..op
        };
        let inputs = sources.iter().copied().chain(random).chain(selection);
        let outputs = self.emit(name, op, inputs.collect())?;
        Ok([outputs[0], outputs[1]])
    }
}

impl Attention {
    /// How many tensors hold queries, keys and values.
    pub fn num_sources(&self) -> usize {
        match self.inputs {
            AttentionInputs::Packed => 1,
            AttentionInputs::Separate => 3,
        }
    }

    /// How many inputs there are after the sources (and, of the backward, o and lse).
    fn num_extras(&self) -> usize {
        usize::from(self.dropout.is_some())
            + usize::from(self.padding)
            + usize::from(self.documents)
            + usize::from(self.selection)
    }

    /// Which of the extra inputs holds the lengths.
    pub fn lengths(&self) -> Option<usize> {
        self.padding.then_some(usize::from(self.dropout.is_some()))
    }

    /// Which of the extra inputs holds the starts.
    pub fn starts(&self) -> Option<usize> {
        self.documents
            .then(|| self.num_extras() - 1 - usize::from(self.selection))
    }

    /// Which of the extra inputs holds the selection.
    pub fn selected(&self) -> Option<usize> {
        self.selection.then(|| self.num_extras() - 1)
    }

    /// The type of a selection for sequences of `length`.
    pub fn selection_type(batch: usize, length: usize) -> TensorType {
        TensorType::new([batch, length, length.div_ceil(32)], DType::I32)
    }

    /// Columns of the queries, and of the keys or values.
    pub(super) fn widths(&self) -> (usize, usize) {
        (
            self.heads.saturating_mul(self.head_dim),
            self.kv_heads.saturating_mul(self.head_dim),
        )
    }

    /// For queries, keys and values: which of the sources, and from which column on.
    pub fn places(&self) -> [(usize, usize); 3] {
        let (q, kv) = self.widths();
        match self.inputs {
            AttentionInputs::Packed => [(0, 0), (0, q), (0, q + kv)],
            AttentionInputs::Separate => [(0, 0), (1, 0), (2, 0)],
        }
    }

    pub(super) fn check_sources(&self, sources: &[TensorType]) -> Result<(usize, usize), String> {
        let first = &sources[0];
        expect(first.shape.rank() == 3, || {
            format!("{} is not [batch,length,width]", first.shape)
        })?;
        expect_float("a source", first)?;
        expect(
            self.heads > 0 && self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            || format!("{} heads over {} key heads", self.heads, self.kv_heads),
        )?;
        expect(
            self.causal || !(self.window.is_some() || self.documents || self.selection),
            || "a window, documents or a selection without a causal order".to_owned(),
        )?;
        expect(self.window != Some(0), || {
            "a window of 0 positions, in which a query does not even see itself".to_owned()
        })?;
        expect(self.head_dim > 0, || {
            format!(
                "{} columns leave nothing for {} heads",
                first.width(),
                self.heads
            )
        })?;
        let (batch, length) = (first.shape.dims()[0], first.shape.dims()[1]);
        let (q, kv) = self.widths();
        let widths = match self.inputs {
            AttentionInputs::Packed => vec![q.saturating_add(kv.saturating_mul(2))],
            AttentionInputs::Separate => vec![q, kv, kv],
        };
        for (source, width) in sources.iter().zip(widths) {
            expect_shape("a source", source, &[batch, length, width])?;
            expect(source.dtype == first.dtype, || {
                format!("sources of {} and {}", first.dtype, source.dtype)
            })?;
        }
        Ok((batch, length))
    }

    fn check_extras(
        &self,
        extras: &[TensorType],
        (batch, length): (usize, usize),
    ) -> Result<(), String> {
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &extras[0])?;
        }
        if let Some(lengths) = self.lengths() {
            expect_dtype("lengths", &extras[lengths], DType::I32)?;
            expect_shape("lengths", &extras[lengths], &[batch])?;
        }
        if let Some(starts) = self.starts() {
            expect_dtype("starts", &extras[starts], DType::I32)?;
            expect_shape("starts", &extras[starts], &[batch, length])?;
        }
        if let Some(selected) = self.selected() {
            let expected = Self::selection_type(batch, length);
            expect_same("the selection", &extras[selected], &expected)?;
        }
        Ok(())
    }

    /// Bytes of the gradients of keys and values of every query head, which a GPU adds up for
    /// each group; 0 where the blocks of key heads are enough for a card. Only attention to
    /// selected keys is done this way: Hopper cards, the widest, have a kernel of their own for
    /// the rest.
    pub fn cuda_head_parts(&self, source: &TensorType) -> u64 {
        let (batch, length) = (source.shape.dims()[0], source.shape.dims()[1]);
        let factors = [batch, self.kv_heads, length.div_ceil(Self::CUDA_ROWS)];
        let blocks = factors.into_iter().fold(1, usize::saturating_mul);
        let splits = self.selection
            && self.heads > self.kv_heads
            && !self.padding
            && blocks < hopper::MOST_MULTIPROCESSORS
            && self.suits_tensor_cores(source.dtype);
        let head = product([2, DType::F32.size(), source.rows() as u64]);
        match splits {
            true => aligned(product([head, self.widths().0 as u64])),
            false => 0,
        }
    }

    /// Rows of a block of a GPU's kernels on the tensor cores.
    pub const CUDA_ROWS: usize = 128;

    /// Whether those take it: 16 bits, heads of 32, 64 or 128 columns, and a positive scale,
    /// because the largest score is looked for before scaling.
    pub fn suits_tensor_cores(&self, dtype: DType) -> bool {
        matches!(dtype, DType::Bf16 | DType::F16)
            && matches!(self.head_dim, 32 | 64 | 128)
            && self.scale > 0.0
    }

    /// Pairs of positions that meet, padding and pairs of different documents included: how many
    /// there are, no plan knows.
    fn pairs(&self, source: &TensorType) -> u64 {
        let (batch, length) = (source.shape.dims()[0] as u64, source.shape.dims()[1] as u64);
        let per_sequence = if self.causal {
            // The first queries see all before them, the others a whole window.
            let window = self
                .window
                .map_or(length, |window| length.min(window as u64));
            let growing = product([window, window.saturating_add(1)]) / 2;
            growing.saturating_add(product([length - window, window]))
        } else {
            product([length, length])
        };
        product([batch, self.heads as u64, per_sequence])
    }

    /// The longest sequence of narrow heads that a block of a GPU's kernels on the tensor cores
    /// has room for.
    pub const CUDA_NARROW_LENGTH: usize = 512;

    /// Whether narrow heads are for the tensor cores: in 16 bits, and of sequences that a block has
    /// room for.
    pub fn suits_narrow_tensor_cores(&self, source: &TensorType) -> bool {
        matches!(source.dtype, DType::Bf16 | DType::F16)
            && self.is_narrow()
            && matches!(self.head_dim, 2 | 4 | 8)
            && self.scale > 0.0
            && source.shape.dims()[1] <= Self::CUDA_NARROW_LENGTH
    }

    /// Whether a head is so narrow, and so little hidden, that it has kernels of its own.
    fn is_narrow(&self) -> bool {
        let hides = self.padding || self.window.is_some() || self.documents || self.selection;
        self.head_dim <= NARROW && !hides
    }

    /// Queries, and keys, that a CPU takes at once.
    const CPU_BLOCK: usize = 64;

    /// Pairs that a CPU computes: blocks of queries with all keys that the last of them sees.
    fn cpu_pairs(&self, source: &TensorType) -> f64 {
        let dims = source.shape.dims();
        let (batch, length, block) = (dims[0] as f64, dims[1] as f64, Self::CPU_BLOCK as f64);
        let keys = match self.causal {
            false => length,
            true => {
                // On average, from the first blocks, which see few, to those that see a window.
                let window = self
                    .window
                    .map_or(length, |window| length.min(window as f64));
                let growing = window * (window.min(block) + window) / 2.0;
                (growing + (length - window) * (window + block)) / length.max(1.0)
            }
        };
        // Narrow heads have no shorter block.
        let queries = match self.is_narrow() {
            true => (length / block).ceil() * block,
            false => length,
        };
        batch * self.heads as f64 * queries * keys.min(length)
    }

    /// What a CPU does for attention or its backward, in so many tasks a head.
    fn cpu_work(&self, source: &TensorType, work: &CpuWork, tasks: usize, bytes: u64) -> CpuCost {
        let (pairs, columns) = (self.cpu_pairs(source), self.head_dim as f64);
        let heads = source.shape.dims()[0].saturating_mul(self.heads);
        let rows = source.rows() as f64 * self.heads as f64;
        let (operations, sigmoids) = if self.is_narrow() {
            let [pair, column, row] = work.narrow;
            (0.0, pairs * (pair + column * columns) + row * rows)
        } else {
            let pair = work.pair + self.dropout.map_or(0.0, |_| work.dropped);
            let sigmoids = pair * pairs + work.row * rows * columns;
            (work.operations * columns * pairs, sigmoids)
        };
        CpuCost {
            operations,
            sigmoids,
            tasks: heads.saturating_mul(tasks),
            bytes,
            ..CpuCost::default()
        }
    }

    /// Blocks of so many rows of all heads.
    fn cuda_blocks(&self, source: &TensorType, rows: usize) -> usize {
        let dims = source.shape.dims();
        let factors = [dims[0], self.heads, dims[1].div_ceil(rows)];
        factors.into_iter().fold(1, usize::saturating_mul)
    }

    /// The products of a GPU's kernels. Blocks of later rows have more keys to read.
    /// Of Hopper's own, where it has one, there are so many.
    fn cuda_arithmetic(
        &self,
        source: &TensorType,
        flops: u64,
        shares: &CudaShares,
        hopper_blocks: Option<usize>,
    ) -> Arithmetic {
        /// Rows of a block, and blocks that a multiprocessor holds.
        const ROWS: usize = 64;
        const RESIDENT: usize = 2;
        let share = |[plain, dropout]: [f64; 2]| match self.dropout {
            None => plain,
            Some(_) => dropout,
        };
        let single = source.dtype == source.dtype.accumulator();
        Arithmetic::Blocks {
            flops,
            any: BlockWork {
                share: if single {
                    SINGLE_SHARE
                } else if self.suits_narrow_tensor_cores(source) {
                    share(shares.narrow) * self.head_dim as f64
                } else if self.is_narrow() {
                    NARROW_SHARE * (self.head_dim as f64).sqrt()
                } else if self.suits_tensor_cores(source.dtype) {
                    share(shares.any)
                } else {
                    PLAIN_SHARE
                },
                blocks: self.cuda_blocks(source, ROWS),
                resident: RESIDENT,
            },
            hopper: hopper_blocks.map(|blocks| BlockWork {
                share: share(match self.head_dim {
                    32 if self.hopper_short(source).is_some() => shares.short,
                    32 => shares.hopper[0],
                    64 => shares.hopper[1],
                    _ => shares.hopper[2],
                }),
                blocks,
                resident: 1,
            }),
        }
    }
}

/// The share of the matrix rate that a GPU's kernels reach on their products: these are as small
/// as a head is wide, and exponentials stand between them. Of each pair the second is with dropout:
/// every probability needs a random number, made again in the backward.
struct CudaShares {
    any: [f64; 2],
    /// Of narrow heads on the tensor cores, for each column: all else takes the same time whatever
    /// the width.
    narrow: [f64; 2],
    /// Of Hopper's own kernels, for heads of 32, of 64 and of 128 columns.
    hopper: [[f64; 2]; 3],
    /// Of those for heads of 32 columns over short sequences.
    short: [f64; 2],
}

const FORWARD_SHARES: CudaShares = CudaShares {
    any: [0.25, 0.158],
    narrow: [0.0102, 0.0060],
    hopper: [[0.29, 0.22], [0.39, 0.20], [0.80, 0.56]],
    short: [0.36, 0.28],
};
/// Of the five products that are counted (the kernels for any card compute seven).
const BACKWARD_SHARES: CudaShares = CudaShares {
    any: [0.228, 0.168],
    narrow: [0.0125, 0.0082],
    hopper: [[0.45, 0.37], [0.36, 0.21], [0.60, 0.47]],
    short: [0.45, 0.37],
};
/// Of heads of other widths, in 16 bits: nothing runs on the tensor cores.
const PLAIN_SHARE: f64 = 0.007;
/// Where few heads are dealt out evenly.
const DEALT_SHARES: CudaShares = CudaShares {
    hopper: [[0.45, 0.37], [0.33, 0.21], [0.48, 0.47]],
    ..BACKWARD_SHARES
};
/// Single precision, of the single-precision rate.
const SINGLE_SHARE: f64 = 0.15;
/// The widest heads that are narrow.
const NARROW: usize = 8;

/// What a CPU does for a pair of positions of one head: operations a column at the rate of large
/// products, and what vector code does, in sigmoids.
struct CpuWork {
    operations: f64,
    pair: f64,
    /// Where probabilities are dropped in part.
    dropped: f64,
    /// Of a column of a query.
    row: f64,
    /// Of a pair of narrow heads, of each of its columns, and of a query: nothing of it is a matrix
    /// product, and few columns are slow to gather.
    narrow: [f64; 3],
}

const CPU_FORWARD: CpuWork = CpuWork {
    operations: 4.0 * 1.25,
    pair: 3.9,
    dropped: 1.0,
    row: 3.5,
    narrow: [1.4, 0.37, 124.0],
};
const CPU_BACKWARD: CpuWork = CpuWork {
    operations: 10.0 * 1.35,
    pair: 2.8,
    dropped: 2.9,
    row: 6.5,
    narrow: [1.75, 0.94, 184.0],
};
/// On a GPU, of the matrix rate of 16 bits, times the root of the columns: nothing runs on the
/// tensor cores, and exponentials and random numbers count more, the fewer columns there are.
const NARROW_SHARE: f64 = 0.01;

impl Declare for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "lse"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let sources = self.num_sources();
        expect_inputs(inputs, sources + self.num_extras())?;
        let (batch, length) = self.check_sources(&inputs[..sources])?;
        self.check_extras(&inputs[sources..], (batch, length))?;
        let dtype = inputs[0].dtype;
        Ok(vec![
            TensorType::new([batch, length, self.widths().0], dtype),
            TensorType::new([batch, self.heads, length], dtype.accumulator()),
        ])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let sources = self.num_sources();
        let inputs = [dy]
            .into_iter()
            .chain(node.inputs[..sources].iter().copied())
            .chain(node.outputs.iter().copied())
            .chain(node.inputs[sources..].iter().copied())
            .collect();
        let gradients = backward.emit(node, "input", AttentionBackward(self.clone()), inputs)?;
        for (&source, gradient) in node.inputs[..sources].iter().zip(gradients) {
            backward.contribute(node, source, gradient)?;
        }
        Ok(())
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Scores and the weighted sum: two products, two operations a multiply-add.
        product([4, self.pairs(&inputs[0]), self.head_dim as u64])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let (length, bytes) = (inputs[0].shape.dims()[1], self.bytes(inputs, outputs));
        let tasks = length.div_ceil(Self::CPU_BLOCK);
        self.cpu_work(&inputs[0], &CPU_FORWARD, tasks, bytes)
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let flops = self.flops(inputs, outputs);
        let blocks = self
            .suits_hopper(&inputs[0])
            .then(|| self.cuda_blocks(&inputs[0], HopperBackward::KEYS));
        let arithmetic = self.cuda_arithmetic(&inputs[0], flops, &FORWARD_SHARES, blocks);
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(1, bytes, arithmetic)])
    }
}

impl Declare for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        match self.0.inputs {
            AttentionInputs::Packed => &[""],
            AttentionInputs::Separate => &["q", "k", "v"],
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let sources = self.0.num_sources();
        expect_inputs(inputs, 3 + sources + self.0.num_extras())?;
        let qkv = &inputs[1..=sources];
        let (batch, length) = self.0.check_sources(qkv)?;
        let o = TensorType::new([batch, length, self.0.widths().0], qkv[0].dtype);
        expect_same("do", &inputs[0], &o)?;
        expect_same("o", &inputs[sources + 1], &o)?;
        let (lse, rows) = (&inputs[sources + 2], [batch, self.0.heads, length]);
        expect_small("the log-sum-exp", lse, &rows, &o)?;
        self.0
            .check_extras(&inputs[sources + 3..], (batch, length))?;
        Ok(qkv.to_vec())
    }

    /// Per row and head the sum of do∘o; on a GPU, which may be a Hopper card, what its own
    /// kernel sums besides.
    fn workspace(&self, inputs: &[TensorType], _outputs: &[TensorType], target: Target) -> u64 {
        let delta = inputs[self.0.num_sources() + 2].bytes();
        match target {
            Target::Cpu => delta,
            Target::Cuda => {
                let parts = self.0.cuda_head_parts(&inputs[1]);
                sum([parts, delta]).max(self.0.hopper_workspace(&inputs[1]))
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Five products: scores, dP, dV, dQ, dK.
        product([10, self.0.pairs(&inputs[1]), self.0.head_dim as u64])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let bytes = self.bytes(inputs, outputs);
        self.0.cpu_work(&inputs[1], &CPU_BACKWARD, 1, bytes)
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let flops = self.flops(inputs, outputs);
        let op = &self.0;
        let suits = op.backward_suits_hopper(&inputs[1]);
        // Over short sequences a block has all rows of a head.
        let short = op.hopper_short(&inputs[1]).map(|short| short.padded);
        let rows = short.unwrap_or(HopperBackward::KEYS);
        let dealt = op.hopper_largest_dealt(&inputs[1]);
        let (shares, blocks) = match dealt {
            Some(dealt) => (&DEALT_SHARES, dealt.steps()),
            None => (&BACKWARD_SHARES, op.cuda_blocks(&inputs[1], rows)),
        };
        let blocks = suits.then_some(blocks);
        let arithmetic = op.cuda_arithmetic(&inputs[1], flops, shares, blocks);
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(3, bytes, arithmetic)])
    }
}
