//! Next-token cross entropy straight from the hidden state: logits exist for a chunk of rows
//! at a time, and turn into their own gradient in place. Loss and gradient are one pass, so
//! nothing is kept for a backward.

use super::{
    CUDA_GEMM_WORKSPACE, Declare, LossScale, Op, aligned, expect, expect_dtype, expect_inputs,
    expect_matrix, expect_rows, expect_same, expect_shape, expect_small, product, sum,
};
use crate::cost::{ChunkedCost, Cost, KernelCost};
use crate::cpu::{CpuCost, CpuProducts};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Target, TensorId};
use crate::loss::{Count, LossTerm, TermInputs};
use crate::types::{DType, TensorType};

/// A target that counts for nothing: padding, and a position that has no next token.
pub const IGNORE_INDEX: i32 = -100;

/// Inputs: h [.., d], W [V, d], targets i32 [..], the term's inverse count and weight; with `bias`
/// a bias [V] of the logits, with `scaled` the loss scale, by which gradients (not the loss) are
/// multiplied.
/// Outputs: the loss (added to), without the weight; with `gradient` also dh [.., d], and, added
/// to, dW [V, d] when `weight` and the bias's gradient [V] when `bias_gradient`.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossEntropy {
    pub label_smoothing: f64,
    /// Rows whose logits exist at once.
    pub chunk_rows: usize,
    pub gradient: bool,
    pub weight: bool,
    pub bias: bool,
    pub bias_gradient: bool,
    pub scaled: bool,
}

/// The last layer of a model that predicts tokens.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// [V, d].
    pub weight: TensorId,
    /// [V], in the precision of sums.
    pub bias: Option<TensorId>,
}

impl From<TensorId> for Head {
    fn from(weight: TensorId) -> Self {
        Self { weight, bias: None }
    }
}

impl CrossEntropy {
    /// What a chunk of logits may take when nobody chose: enough rows that the products are
    /// efficient, little beside the weights of a model with such a vocabulary.
    pub const CHUNK_BYTES: u64 = 64 << 20;

    /// On a GPU rows of logits are this many elements apart, so that each starts at a multiple
    /// of 128 bytes.
    pub fn cuda_row_stride(vocabulary: usize) -> usize {
        vocabulary
            .checked_next_multiple_of(64)
            .unwrap_or(usize::MAX)
    }

    /// Bytes of a chunk's logits, and of the losses of all rows.
    pub fn cuda_parts(&self, h: &TensorType, vocabulary: usize) -> [u64; 2] {
        let chunk = self.chunk_rows.min(h.rows()) as u64;
        let stride = Self::cuda_row_stride(vocabulary) as u64;
        [
            aligned(product([chunk, stride, h.dtype.size()])),
            aligned(product([h.rows() as u64, h.dtype.accumulator().size()])),
        ]
    }

    /// Which input is the bias of the logits.
    pub fn bias_input(&self) -> Option<usize> {
        self.bias.then_some(5)
    }

    /// Which input is the loss scale.
    pub fn scale_input(&self) -> Option<usize> {
        self.scaled.then_some(5 + usize::from(self.bias))
    }

    /// Which output is the bias's gradient.
    pub fn bias_output(&self) -> Option<usize> {
        self.bias_gradient.then_some(2 + usize::from(self.weight))
    }

    fn default_chunk(h: &TensorType, vocabulary: usize) -> usize {
        let row = product([vocabulary as u64, h.dtype.size()]);
        (Self::CHUNK_BYTES / row.max(1)).clamp(1, h.rows().max(1) as u64) as usize
    }
}

impl Graph {
    /// A term of the loss, of weight 1. `chunk_rows` is chosen from the vocabulary where it is
    /// not given.
    pub fn cross_entropy(
        &mut self,
        name: &str,
        h: TensorId,
        head: impl Into<Head>,
        targets: TensorId,
        label_smoothing: f64,
        chunk_rows: Option<usize>,
    ) -> Result<TensorId, GraphError> {
        let Head { weight, bias } = head.into();
        let term = self.term_inputs(name);
        let h_type = self.ty(h);
        let vocabulary = self.ty(weight).rows();
        let op = CrossEntropy {
            label_smoothing,
            chunk_rows: chunk_rows
                .unwrap_or_else(|| CrossEntropy::default_chunk(&h_type, vocabulary))
                .clamp(1, h_type.rows().max(1)),
            gradient: false,
            weight: false,
            bias: bias.is_some(),
            bias_gradient: false,
            scaled: false,
        };
        let inputs = [h, weight, targets, term.inverse_count, term.weight];
        let inputs = inputs.into_iter().chain(bias).collect();
        let value = self.emit(name, op, inputs)?[0];
        self.add_term(LossTerm {
            name: name.to_owned(),
            value,
            inputs: term,
            count: Count::Targets(targets),
            weight: 1.0,
        });
        Ok(value)
    }
}

/// The share of the copy bandwidth that a GPU's pass over rows of logits reaches: exponentials are
/// taken in both readings, and the second waits for the sum of the first.
const ROWS_BANDWIDTH_SHARE: f64 = 0.75;

impl Declare for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "hidden", "weight", "bias"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let extras = usize::from(self.bias) + usize::from(self.scaled);
        expect_inputs(inputs, 5 + extras)?;
        let (h, w, targets) = (&inputs[0], &inputs[1], &inputs[2]);
        expect_rows("h", h)?;
        expect_matrix("the weight", w)?;
        expect_dtype("the weight", w, h.dtype)?;
        expect(w.width() == h.width(), || {
            format!("h {} does not meet the weight {}", h.shape, w.shape)
        })?;
        expect_dtype("the targets", targets, DType::I32)?;
        expect_shape("the targets", targets, h.shape.without_width().dims())?;
        expect_same("the inverse count", &inputs[3], &TermInputs::ty())?;
        expect_same("the term's weight", &inputs[4], &TermInputs::ty())?;
        expect((0.0..1.0).contains(&self.label_smoothing), || {
            format!("label smoothing {} is not in [0, 1)", self.label_smoothing)
        })?;
        expect(self.chunk_rows > 0, || "a chunk of zero rows".to_owned())?;
        expect(self.gradient || !self.weight, || {
            "makes the weight's gradient only along with that of h".to_owned()
        })?;
        expect((self.bias && self.gradient) || !self.bias_gradient, || {
            "makes the gradient of a bias that is there, along with that of h".to_owned()
        })?;
        if let Some(bias) = self.bias_input() {
            expect_small("the bias", &inputs[bias], &[w.rows()], h)?;
        }
        if let Some(scale) = self.scale_input() {
            LossScale::expect(&inputs[scale])?;
        }
        let accumulator = h.dtype.accumulator();
        let mut outputs = vec![TensorType::new([1], accumulator)];
        if self.gradient {
            outputs.push(*h);
            if self.weight {
                outputs.push(TensorType::new(w.shape, accumulator));
            }
            if self.bias_gradient {
                outputs.push(TensorType::new([w.rows()], accumulator));
            }
        }
        Ok(outputs)
    }

    /// The node itself computes the gradient, in the forward pass.
    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let dw = backward.parameter_gradient(node, node.inputs[1])?;
        let db = match self.bias_input() {
            Some(bias) => backward.parameter_gradient(node, node.inputs[bias])?,
            None => None,
        };
        let scale = backward.graph().loss_scale;
        let op = Self {
            gradient: true,
            weight: dw.is_some(),
            bias_gradient: db.is_some(),
            scaled: scale.is_some(),
            ..self.clone()
        };
        let into = dw.into_iter().chain(db).collect();
        let outputs = backward.upgrade_into(Op::from(op), scale, into)?;
        backward.contribute(node, node.inputs[0], outputs[1])
    }

    /// dh over h, chunk by chunk.
    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.gradient { &[(0, 1)] } else { &[] }
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let (h, w) = (&inputs[0], &inputs[1]);
        match target {
            // Logits, and each row's loss.
            Target::Cpu => {
                let rows = self.chunk_rows.min(h.rows()) as u64;
                let logits = product([rows, w.rows() as u64, h.dtype.size()]);
                sum([logits, product([rows, h.dtype.size()])])
            }
            Target::Cuda => {
                let [logits, losses] = self.cuda_parts(h, w.rows());
                sum([logits, losses, CUDA_GEMM_WORKSPACE])
            }
        }
    }

    /// On a GPU the products run over a rounded vocabulary: with 50,257 entries they would be
    /// seven times slower.
    fn reach(&self, input: usize, ty: &TensorType, target: Target) -> u64 {
        if input == 1 && target == Target::Cuda {
            let rows = Self::cuda_row_stride(ty.rows()) as u64;
            product([rows, ty.width() as u64, ty.dtype.size()])
        } else {
            ty.bytes()
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        let (h, w) = (&inputs[0], &inputs[1]);
        let (rows, vocabulary) = (h.rows() as u64, w.rows() as u64);
        let products = 1 + u64::from(self.gradient) + u64::from(self.weight);
        sum([
            product([2, rows, w.shape.elements() as u64, products]),
            product([12, rows, vocabulary]),
        ])
    }

    /// Chunk by chunk, as on a GPU; then what follows the logits, row by row.
    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        /// Of a logit: the largest, its exponential, and its gradient.
        const SIGMOIDS: f64 = 4.0;
        let (h, w) = (&inputs[0], &inputs[1]);
        let (rows, width, vocabulary) = (h.rows(), h.width(), w.rows());
        let chunk = self.chunk_rows.clamp(1, rows.max(1));
        let times = rows as f64 / chunk as f64;
        let logits = Some([chunk, vocabulary, width]);
        let hidden = self.gradient.then_some([chunk, width, vocabulary]);
        let weight = self.weight.then_some([vocabulary, width, chunk]);
        let shapes = [logits, hidden, weight].into_iter().flatten();
        CpuCost {
            products: shapes.map(|shape| CpuProducts { shape, times }).collect(),
            sigmoids: SIGMOIDS * rows as f64 * vocabulary as f64,
            tasks: rows,
            bytes: self.bytes(inputs, outputs),
            ..CpuCost::default()
        }
    }

    /// Chunk by chunk: logits, their gradient in place, and the products of that gradient.
    fn cuda_cost(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        let (h, w) = (&inputs[0], &inputs[1]);
        let (rows, width, vocabulary) = (h.rows(), h.width(), w.rows());
        let chunk = self.chunk_rows.clamp(1, rows.max(1));
        let size = h.dtype.size();
        let logits = product([chunk as u64, vocabulary as u64, size]);
        let hidden = product([chunk as u64, width as u64, size]);
        let operands = sum([hidden, w.bytes(), logits]);
        let mut kernels = vec![
            KernelCost::product([chunk, vocabulary, width], h.dtype, operands),
            // Read twice (the largest and the sum, then the gradient), written once.
            KernelCost::waiting(1, product([3, logits]), ROWS_BANDWIDTH_SHARE),
        ];
        if self.gradient {
            let shape = [chunk, width, vocabulary];
            kernels.push(KernelCost::product(shape, h.dtype, operands));
        }
        if self.weight {
            let accumulator = h.dtype.accumulator();
            // The first chunk writes them, the others read them as well.
            let chunks = rows.div_ceil(chunk).max(1) as u64;
            let sums = product([vocabulary as u64, width as u64, accumulator.size()]);
            let sums = product([2 * chunks - 1, sums]) / chunks;
            let shape = [vocabulary, width, chunk];
            let operands = sum([hidden, logits, sums]);
            kernels.push(KernelCost::product(shape, accumulator, operands));
        }
        if self.bias_gradient {
            kernels.push(KernelCost::streamed(1, logits));
        }
        Cost {
            // The losses of the rows, added up.
            kernels: vec![KernelCost::streamed(1, 0)],
            chunks: Some(ChunkedCost {
                kernels,
                rows,
                chunk_rows: chunk,
            }),
        }
    }
}
