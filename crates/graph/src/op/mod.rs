//! Kernel-sized ops. Each file declares one op and its backward: shapes, what the backward
//! keeps, workspace, floating-point operations, bytes, what a CPU and a GPU take for them, and the builder
//! method that models call.
//!
//! Memory follows from these declarations: a backward node keeps exactly the tensors it
//! names as inputs, so an op that names less makes every plan smaller.

mod activation;
mod add;
mod attention;
mod attention_entropy;
mod cached_attention;
mod cached_convolution;
mod cached_scan;
mod collective;
mod concat;
mod convolution;
mod cross_entropy;
mod dequantise;
mod embedding;
mod fetch;
mod gated;
mod indexer;
mod linear;
mod logits;
mod loss_scale;
mod map;
mod norm;
mod optimizer;
mod reduce;
mod rotary;
mod scan;
mod store;
mod view;

pub use activation::{Activation, ActivationBackward, ActivationKind};
pub use add::Add;
pub use attention::{
    Attention, AttentionBackward, AttentionInputs, HopperBackward, HopperDealt, HopperDealtParts,
    HopperParts, HopperShort,
};
pub use attention_entropy::{AttentionEntropy, AttentionEntropyBackward, CachedAttentionEntropy};
pub use cached_attention::CachedAttention;
pub use cached_convolution::CachedConvolution;
pub use cached_scan::CachedScan;
pub use collective::{AllGather, AllReduce, Await, GatherRows, ReduceScatter};
pub use concat::{Concat, Joined, Split};
pub use convolution::{Convolution, ConvolutionBackward};
pub use cross_entropy::{CrossEntropy, Head, IGNORE_INDEX};
pub use dequantise::{Dequantise, Quantisation, QuantisedTensors};
pub use embedding::{Embedding, EmbeddingBackward};
pub use fetch::Fetch;
pub use gated::{Gated, GatedBackward};
pub use indexer::{
    CachedSelection, CachedSelectionParts, Indexer, IndexerLoss, IndexerLossBackward,
    IndexerLossParts, IndexerSelection, KeyCount, SelectionParts,
};
pub use linear::{Linear, LinearAdd, LinearGradInput, LinearGradWeight, RowParts};
pub use logits::Logits;
pub use loss_scale::LossScale;
pub use map::{Domain, Map, Pointwise, Read};
pub use norm::{Norm, NormApply, NormBackward, NormKind, Normed, cuda_quads_of_row};
pub use optimizer::{
    AdamW, AdamWLayout, GradientFormat, GradientNorm, GradientSquares, MomentFormat,
};
pub use reduce::{CudaReduction, Meets, Over, Reduce, ReduceKind};
pub use rotary::Rotary;
pub use scan::{Scan, ScanBackward, ScanInputs, ScanPartition};
pub use store::Store;
pub use view::View;

use crate::align::aligned;
use crate::cost::{Cost, Joins, KernelCost, Wire};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Dropout, Node, Target};
use crate::types::{DType, TensorType};

/// Device memory that cuBLASLt wants for one matrix product on current cards.
pub const CUDA_GEMM_WORKSPACE: u64 = 32 << 20;

/// How an output is computed again, cheaply, from other tensors of its node.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    pub op: Op,
    /// The recipe's inputs among the node's own tensors.
    pub inputs: Vec<Operand>,
    /// Which of the recipe's outputs is the wanted one.
    pub output: usize,
}

/// How a backward op gives again what its forward made.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueAgain {
    /// The op with one more output.
    pub op: Op,
    /// Which of its outputs the value is.
    pub output: usize,
    /// What gives the value otherwise.
    pub recipe: Op,
    /// Where the op has the recipe's inputs; those that it lacks follow its own.
    pub inputs: Vec<Option<usize>>,
}

/// A tensor of a node, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    Input(usize),
    Output(usize),
}

/// What an op says of itself, in one place.
pub trait Declare {
    fn name(&self) -> &'static str;

    /// Labels of the outputs, for names in reports; the main one is empty.
    fn outputs(&self) -> &'static [&'static str] {
        &[""]
    }

    /// Output types, or what is wrong with the inputs.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String>;

    /// Emits the backward of `node` (whose op this is).
    fn backward(&self, _backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        Err(GraphError::NotDifferentiable {
            op: self.name(),
            node: node.name.clone(),
        })
    }

    /// Whether what the op reads can get a gradient from what it writes.
    fn passes_gradient(&self) -> bool {
        true
    }

    /// Whether the gradient of this input, a weight, comes in one piece, so that it can be rounded
    /// to the weight's own type.
    fn rounds_gradient(&self, _input: usize) -> bool {
        false
    }

    /// Why what the op makes of some rows depends on all rows of the batch, where it does: several
    /// micro batches would give another result than one.
    fn whole_batch(&self) -> Option<&'static str> {
        None
    }

    /// Whether ranks go on with the mean of what the op makes of the rows of each.
    fn is_mean_of_ranks(&self) -> bool {
        false
    }

    /// How `output` can be had again for much less than the op itself costs.
    fn recipe(&self, _output: usize) -> Option<Recipe> {
        None
    }

    /// For a backward op: how it can write again what its forward made.
    fn value_again(&self) -> Option<ValueAgain> {
        None
    }

    /// The op without the trailing outputs that nobody reads, if it can do without them.
    fn without_unread(&self, _read: &[bool]) -> Option<Op> {
        None
    }

    /// Pairs (input, output) that may share memory when the input is not needed later.
    fn in_place(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Bytes of scratch memory while the op runs.
    fn workspace(&self, _inputs: &[TensorType], _outputs: &[TensorType], _target: Target) -> u64 {
        0
    }

    /// How many bytes the op may read from the start of an input that keeps its place over the
    /// step: its own, or more, where a product is faster on rounded sizes. What lies beyond the
    /// tensor is reserved for it and zero.
    fn reach(&self, _input: usize, ty: &TensorType, _target: Target) -> u64 {
        ty.bytes()
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64;

    /// Bytes read and written at the least.
    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        sum(inputs.iter().chain(outputs).map(TensorType::bytes))
    }

    /// How many sigmoids an operation takes as long as on a CPU, in vector code.
    fn cpu_sigmoids(&self) -> f64 {
        0.15
    }

    /// What a CPU does: vector code over the largest tensor, unless the op says otherwise.
    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let tensors = inputs.iter().chain(outputs);
        let elements = tensors.map(|ty| ty.shape.elements()).max().unwrap_or(0);
        let sigmoids = self.cpu_sigmoids() * self.flops(inputs, outputs) as f64;
        CpuCost::vector(sigmoids, elements, self.bytes(inputs, outputs))
    }

    /// The kernels that a GPU runs.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(1, self.bytes(inputs, outputs))])
    }

    /// What the op is to a product before it.
    fn joins(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Joins> {
        None
    }

    /// Whether what the op makes is weights, which are dropped after their use.
    fn brings_weights(&self) -> bool {
        false
    }

    /// What crosses the bus between host memory and the arena, beside what is computed.
    fn bus_bytes(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    /// What crosses the network, for an op that needs other ranks.
    fn wire(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Wire> {
        None
    }

    /// For an op that reads nothing of its inputs but the sums of their squares: the op over
    /// those sums.
    fn over_squares(&self) -> Option<Op> {
        None
    }

    /// Whether an update reads a factor of this op's that can differ from 1.
    fn changes_updates(&self) -> bool {
        false
    }

    /// For an update by a factor, its last input: the op without it.
    fn without_factor(&self) -> Option<Op> {
        None
    }
}

macro_rules! ops {
    ($($op:ident),* $(,)?) => {
        /// Every op there is. Executors match on it, so a new op does not compile until
        /// each of them has it.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op { $($op($op)),* }

        impl Op {
            pub fn declaration(&self) -> &dyn Declare {
                match self { $(Self::$op(op) => op),* }
            }

            pub fn name(&self) -> &'static str {
                self.declaration().name()
            }
        }

        $(impl From<$op> for Op {
            fn from(op: $op) -> Self {
                Self::$op(op)
            }
        })*
    };
}

ops!(
    Embedding,
    EmbeddingBackward,
    Norm,
    NormApply,
    NormBackward,
    Linear,
    LinearAdd,
    LinearGradInput,
    LinearGradWeight,
    Activation,
    ActivationBackward,
    Gated,
    GatedBackward,
    Add,
    Rotary,
    View,
    Map,
    Reduce,
    Concat,
    Split,
    Dequantise,
    Fetch,
    Store,
    Attention,
    AttentionBackward,
    CachedAttention,
    AttentionEntropy,
    AttentionEntropyBackward,
    CachedAttentionEntropy,
    IndexerSelection,
    CachedSelection,
    IndexerLoss,
    IndexerLossBackward,
    Convolution,
    ConvolutionBackward,
    CachedConvolution,
    Scan,
    ScanBackward,
    CachedScan,
    CrossEntropy,
    Logits,
    GradientSquares,
    GradientNorm,
    AdamW,
    AllReduce,
    ReduceScatter,
    AllGather,
    GatherRows,
    Await,
);

/// Fails with a message unless the number of inputs is right.
fn expect_inputs(inputs: &[TensorType], expected: usize) -> Result<(), String> {
    if inputs.len() == expected {
        Ok(())
    } else {
        Err(format!("takes {expected} inputs, got {}", inputs.len()))
    }
}

fn expect(condition: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(problem()) }
}

/// A product of counts that stops at the largest number: sizes are the user's, and those that
/// are out of all proportion must give figures that are too, not ones that have wrapped around.
fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// A sum that stops likewise.
fn sum(terms: impl IntoIterator<Item = u64>) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

fn expect_dtype(what: &str, ty: &TensorType, dtype: DType) -> Result<(), String> {
    expect(ty.dtype == dtype, || {
        format!("{what} is {}, expected {dtype}", ty.dtype)
    })
}

fn expect_float(what: &str, ty: &TensorType) -> Result<(), String> {
    expect(ty.dtype.is_float(), || {
        format!("{what} is {}, expected a floating-point type", ty.dtype)
    })
}

fn expect_shape(what: &str, ty: &TensorType, dims: &[usize]) -> Result<(), String> {
    expect(ty.shape.dims() == dims, || {
        format!(
            "{what} is {}, expected {}",
            ty.shape,
            crate::Shape::new(dims)
        )
    })
}

fn expect_same(what: &str, ty: &TensorType, other: &TensorType) -> Result<(), String> {
    expect(ty == other, || format!("{what} is {ty}, expected {other}"))
}

/// A tensor in the precision of sums: biases, norms, statistics.
fn expect_small(what: &str, ty: &TensorType, dims: &[usize], x: &TensorType) -> Result<(), String> {
    expect_dtype(what, ty, x.dtype.accumulator())?;
    expect_shape(what, ty, dims)
}

/// Rows of something: a scalar has no width to work on.
fn expect_rows(what: &str, ty: &TensorType) -> Result<(), String> {
    expect_float(what, ty)?;
    expect(ty.shape.rank() > 0, || {
        format!("{what} is a scalar, expected rows")
    })
}

fn expect_matrix(what: &str, ty: &TensorType) -> Result<(), String> {
    expect(ty.shape.rank() == 2, || {
        format!("{what} is {}, expected a matrix", ty.shape)
    })
}

/// Positions of the tokens of x [batch, length, width].
fn expect_positions(positions: &TensorType, x: &TensorType) -> Result<(), String> {
    expect_dtype("the positions", positions, DType::I32)?;
    expect_shape("the positions", positions, x.shape.without_width().dims())
}

/// Columns `first..first + count` of `ty`.
fn expect_columns(what: &str, ty: &TensorType, first: usize, count: usize) -> Result<(), String> {
    expect(first.saturating_add(count) <= ty.width(), || {
        format!(
            "reads {count} columns from {first} on of {what} {}",
            ty.shape
        )
    })
}

/// A rate that leaves something, and the random-state input.
fn expect_dropout(dropout: Dropout, random: &TensorType) -> Result<(), String> {
    expect((0.0..1.0).contains(&dropout.rate), || {
        format!("a dropout rate of {} is not in [0, 1)", dropout.rate)
    })?;
    expect_dtype("the random state", random, DType::I32)?;
    expect_shape("the random state", random, &[crate::Graph::RANDOM_WORDS])
}
