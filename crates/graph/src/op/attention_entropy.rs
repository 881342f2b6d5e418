//! How widely a query looks: the entropy of its attention, averaged over heads.
//!
//! Of the probabilities `p_hs = exp(scale·⟨q_h, k_hs⟩ − lse_h)` of a query and their mean
//! `a_s = Σ_h p_hs / H` it is `−Σ_s a_s·ln(a_s + ε)`. Nothing of size T×T is stored: forward keeps
//! one number per row and head, `D_h = Σ_s p_hs·w_s` with `w_s = ln(a_s + ε) + a_s/(a_s + ε)`, and
//! backward makes the probabilities again. There, of the gradient g of a row's entropy,
//! `ds_hs = −g/H·p_hs·(w_s − D_h)`.

use super::{
    Declare, Op, expect, expect_dtype, expect_float, expect_inputs, expect_positions, expect_same,
    expect_shape, expect_small, product,
};
use crate::cost::{Arithmetic, BlockWork, Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: the packed queries, keys and values of an attention [B, T, 3·heads·head_dim], its
/// log-sum-exp [B, heads, T]. Outputs: the entropy [B, T, 1]; with `keep_means` D [B, heads, T].
///
/// The probabilities are those before dropout: how widely a query looks does not depend on which
/// of its keys a step leaves out.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionEntropy {
    pub heads: usize,
    pub head_dim: usize,
    pub causal: bool,
    pub scale: f64,
    /// For a backward.
    pub keep_means: bool,
}

/// Inputs: the entropy's gradient [B, T, 1], qkv, the log-sum-exp, D. Output: dqkv, of which the
/// values' columns are zero.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionEntropyBackward(pub AttentionEntropy);

/// Inputs: qkv [B, T, 3·heads·head_dim] of tokens that follow others, the cache of keys
/// [B, heads, slots, head_dim] into which theirs have been put, positions i32 [B, T], of which the
/// first of each row counts. Output: the entropy [B, T, 1]. Positions stay below the slots.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttentionEntropy(pub AttentionEntropy);

impl AttentionEntropy {
    /// ε of the logarithm.
    pub const EPSILON: f64 = 1e-9;
    /// What a GPU's kernels have registers and shared memory for.
    pub const MOST_HEADS: usize = 16;
    pub const MOST_COLUMNS: usize = 256;

    /// Whether a GPU's kernels on the tensor cores take it.
    pub fn suits_tensor_cores(&self, dtype: DType) -> bool {
        matches!(dtype, DType::Bf16 | DType::F16) && (self.heads, self.head_dim) == (8, 8)
    }

    fn width(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    fn check(&self, qkv: &TensorType) -> Result<(usize, usize), String> {
        expect_float("qkv", qkv)?;
        expect(qkv.shape.rank() == 3, || {
            format!("{} is not [batch,length,width]", qkv.shape)
        })?;
        let heads = self.heads > 0 && self.head_dim > 0;
        let fits = self.heads <= Self::MOST_HEADS && self.width() <= Self::MOST_COLUMNS;
        expect(heads && fits, || {
            format!(
                "{} heads of {}, at most {} heads and {} columns",
                self.heads,
                self.head_dim,
                Self::MOST_HEADS,
                Self::MOST_COLUMNS
            )
        })?;
        let (batch, length) = (qkv.shape.dims()[0], qkv.shape.dims()[1]);
        expect_shape("qkv", qkv, &[batch, length, 3 * self.width()])?;
        Ok((batch, length))
    }

    /// Scores of a pass, all heads.
    fn scores(&self, qkv: &TensorType) -> u64 {
        let (batch, length) = (qkv.shape.dims()[0] as u64, qkv.shape.dims()[1] as u64);
        let pairs = match self.causal {
            true => product([length, length.saturating_add(1)]) / 2,
            false => product([length, length]),
        };
        product([batch, self.heads as u64, pairs])
    }

    /// `passes` over the scores, each with its products, an exponential and a few more operations.
    fn work(&self, qkv: &TensorType, passes: u64) -> u64 {
        product([
            passes,
            self.scores(qkv),
            2 * self.head_dim as u64 + EXPONENTIAL,
        ])
    }

    /// Plain arithmetic of a GPU, in blocks of rows.
    fn cuda_arithmetic(&self, qkv: &TensorType, flops: u64) -> Arithmetic {
        const ROWS: usize = 16;
        const RESIDENT: usize = 4;
        let dims = qkv.shape.dims();
        Arithmetic::Blocks {
            flops,
            any: BlockWork {
                share: match self.suits_tensor_cores(qkv.dtype) {
                    true => TENSOR_SHARE,
                    false => CUDA_SHARE,
                },
                blocks: dims[0].saturating_mul(dims[1].div_ceil(ROWS)),
                resident: RESIDENT,
            },
            hopper: None,
        }
    }
}

/// Operations that an exponential and its part of a logarithm stand for.
const EXPONENTIAL: u64 = 16;
/// Of an operation on a CPU.
const CPU_SIGMOIDS: f64 = 0.17;
const CPU_BACKWARD_SIGMOIDS: f64 = 0.22;
/// Of the matrix rate: nothing here runs on the tensor cores.
const CUDA_SHARE: f64 = 0.02;
/// Where the products are on the tensor cores; exponentials are left.
const TENSOR_SHARE: f64 = 0.097;

impl Graph {
    /// The entropy of an attention over packed projections, from its log-sum-exp.
    pub fn attention_entropy(
        &mut self,
        name: &str,
        op: AttentionEntropy,
        qkv: TensorId,
        lse: TensorId,
    ) -> Result<TensorId, GraphError> {
        Ok(self.emit(name, op, vec![qkv, lse])?[0])
    }
}

impl Declare for AttentionEntropy {
    fn name(&self) -> &'static str {
        "attention_entropy"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "means"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2)?;
        let (batch, length) = self.check(&inputs[0])?;
        let rows = [batch, self.heads, length];
        expect_small("the log-sum-exp", &inputs[1], &rows, &inputs[0])?;
        let dtype = inputs[0].dtype.accumulator();
        let entropy = TensorType::new([batch, length, 1], dtype);
        let means = self.keep_means.then(|| TensorType::new(rows, dtype));
        Ok([entropy].into_iter().chain(means).collect())
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(gradient) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        // What the log-sum-exp depends on is in the formula of the scores' gradients.
        let inputs = vec![gradient, node.inputs[0], node.inputs[1], node.outputs[1]];
        let op = AttentionEntropyBackward(self.clone());
        let gradient = backward.emit(node, "input", op, inputs)?[0];
        backward.contribute(node, node.inputs[0], gradient)
    }

    fn without_unread(&self, read: &[bool]) -> Option<Op> {
        (self.keep_means && !read[1]).then(|| {
            Op::from(Self {
                keep_means: false,
                ..self.clone()
            })
        })
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        self.work(&inputs[0], 1)
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let arithmetic = self.cuda_arithmetic(&inputs[0], self.flops(inputs, outputs));
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(1, bytes, arithmetic)])
    }
}

impl Declare for AttentionEntropyBackward {
    fn name(&self) -> &'static str {
        "attention_entropy_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 4)?;
        let (batch, length) = self.0.check(&inputs[1])?;
        let gradient = [batch, length, 1];
        expect_small("the gradient", &inputs[0], &gradient, &inputs[1])?;
        let rows = [batch, self.0.heads, length];
        expect_small("the log-sum-exp", &inputs[2], &rows, &inputs[1])?;
        expect_same("the means", &inputs[3], &inputs[2])?;
        Ok(vec![inputs[1]])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Queries and keys each make the probabilities again, and a product besides.
        self.0.work(&inputs[1], 3)
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_BACKWARD_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let arithmetic = self
            .0
            .cuda_arithmetic(&inputs[1], self.flops(inputs, outputs));
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(2, bytes, arithmetic)])
    }
}

impl Declare for CachedAttentionEntropy {
    fn name(&self) -> &'static str {
        "cached_attention_entropy"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        let (batch, length) = self.0.check(&inputs[0])?;
        expect(self.0.causal, || {
            "a cache without a causal order".to_owned()
        })?;
        let keys = &inputs[1];
        expect_dtype("the cache", keys, inputs[0].dtype)?;
        let slots = keys.shape.dims().get(2).copied().unwrap_or(0);
        let cache = [batch, self.0.heads, slots, self.0.head_dim];
        expect_shape("the cache", keys, &cache)?;
        expect_positions(&inputs[2], &inputs[0])?;
        Ok(vec![TensorType::new(
            [batch, length, 1],
            inputs[0].dtype.accumulator(),
        )])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Of a full cache, read twice: for the log-sum-exp, and for the entropy.
        let rows = inputs[0].rows() as u64;
        let slots = inputs[1].shape.dims()[2] as u64;
        let score = 2 * self.0.head_dim as u64 + EXPONENTIAL;
        product([2, rows, slots, self.0.heads as u64, score])
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }
}
