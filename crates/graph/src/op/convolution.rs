//! Mamba's optional short convolution: depthwise over time, causal, followed by SiLU.

use super::{
    Declare, expect, expect_columns, expect_float, expect_inputs, expect_same, expect_small,
    product, sum,
};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Target, TensorId};
use crate::types::TensorType;

/// Inputs: x [B, T, C or more], weight [C, width], bias `[C]`. Output: [B, T, C],
/// `silu(b + Σ_j w[j]·x[t − width + 1 + j])`.
#[derive(Clone, Debug, PartialEq)]
pub struct Convolution {
    pub first_column: usize,
}

/// Inputs: dy [B, T, C], x, weight, bias, and when `accumulate` the gradient so far of x.
/// Output: dx, as wide as x; added to: dweight and dbias when `parameters`.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionBackward {
    pub first_column: usize,
    pub accumulate: bool,
    pub parameters: bool,
}

impl Graph {
    pub fn convolution(
        &mut self,
        name: &str,
        x: TensorId,
        first_column: usize,
        weight: TensorId,
        bias: TensorId,
    ) -> Result<TensorId, GraphError> {
        let op = Convolution { first_column };
        Ok(self.emit(name, op, vec![x, weight, bias])?[0])
    }
}

pub(super) fn check(
    first_column: usize,
    x: &TensorType,
    w: &TensorType,
    b: &TensorType,
) -> Result<(), String> {
    expect(x.shape.rank() == 3 && w.shape.rank() == 2, || {
        format!("x {} with weight {}", x.shape, w.shape)
    })?;
    expect_float("x", x)?;
    let (channels, width) = (w.shape.dims()[0], w.shape.dims()[1]);
    expect(width > 0, || "a convolution of no steps".to_owned())?;
    expect(width <= Convolution::MAX_WIDTH, || {
        let most = Convolution::MAX_WIDTH;
        format!("a convolution over {width} steps, at most {most}")
    })?;
    expect_small("the weight", w, &[channels, width], x)?;
    expect_small("the bias", b, &[channels], x)?;
    expect_columns("x", x, first_column, channels)
}

impl Convolution {
    /// The widest window that the kernels have registers for.
    pub const MAX_WIDTH: usize = 16;
}

impl ConvolutionBackward {
    /// Steps of time that a thread of a GPU runs through.
    pub const CUDA_RUN: usize = 32;

    /// Runs of the whole batch, each with its share of the parameters' gradients.
    pub fn cuda_runs(x: &TensorType) -> usize {
        let (batch, length) = (x.shape.dims()[0], x.shape.dims()[1]);
        batch.saturating_mul(length.div_ceil(Self::CUDA_RUN))
    }
}

impl Declare for Convolution {
    fn name(&self) -> &'static str {
        "convolution"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        let (x, w) = (&inputs[0], &inputs[1]);
        check(self.first_column, x, w, &inputs[2])?;
        Ok(vec![TensorType::new(
            x.shape.with_width(w.shape.dims()[0]),
            x.dtype,
        )])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let (x, weight, bias) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let partial = backward.take_partial(x);
        let dweight = backward.parameter_gradient(node, weight)?;
        let dbias = backward.parameter_gradient(node, bias)?;
        let parameters = dweight.is_some() || dbias.is_some();
        let op = ConvolutionBackward {
            first_column: self.first_column,
            accumulate: partial.is_some(),
            parameters,
        };
        let inputs = [dy, x, weight, bias].into_iter().chain(partial).collect();
        let into = if parameters {
            vec![dweight, dbias]
        } else {
            Vec::new()
        };
        let dx = backward.accumulate(node, "input", op, inputs, into)?[0];
        backward.contribute(node, x, dx)
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let per_element = product([2, inputs[1].width() as u64]).saturating_add(12);
        product([outputs[0].shape.elements() as u64, per_element])
    }
}

impl Declare for ConvolutionBackward {
    fn name(&self) -> &'static str {
        "convolution_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "weight", "bias"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 4 + usize::from(self.accumulate))?;
        let (dy, x, w, b) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
        check(self.first_column, x, w, b)?;
        let y = TensorType::new(x.shape.with_width(w.shape.dims()[0]), x.dtype);
        expect_same("dy", dy, &y)?;
        if self.accumulate {
            expect_same("the gradient so far", &inputs[4], x)?;
        }
        let mut outputs = vec![*x];
        if self.parameters {
            let dtype = x.dtype.accumulator();
            outputs.push(TensorType { dtype, ..*w });
            outputs.push(TensorType { dtype, ..*b });
        }
        Ok(outputs)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.accumulate { &[(4, 0)] } else { &[] }
    }

    /// On a GPU, the gradients of weight and bias from each run of time.
    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        if target == Target::Cpu || !self.parameters {
            return 0;
        }
        let parameters = sum([&inputs[2], &inputs[3]].map(|ty| ty.shape.elements() as u64));
        product([Self::cuda_runs(&inputs[1]) as u64, parameters, 4])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        let per_element = product([6, inputs[2].width() as u64]).saturating_add(16);
        product([inputs[0].shape.elements() as u64, per_element])
    }

    /// The second launch adds up what the runs give the parameters.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(2, self.bytes(inputs, outputs))])
    }
}
