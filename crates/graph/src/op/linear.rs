//! `y = x·Wᵀ + b`, where x may be a column block of a wider tensor: packed projections are
//! read where they lie, without a copy.

use super::{
    CPU_PRODUCT_SHARE, CUDA_GEMM_WORKSPACE, Declare, aligned, expect, expect_columns, expect_dtype,
    expect_inputs, expect_matrix, expect_rows, expect_same, expect_small, product, sum,
};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Target, TensorId};
use crate::types::TensorType;

/// Inputs: x [.., K or more], W [N, K], bias `[N]` when `bias`. Output: y [.., N].
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// The first column of x that is read; K columns follow.
    pub first_column: usize,
    pub bias: bool,
}

/// Inputs: dy [.., N], W [N, K], and when `accumulate` the gradient so far [.., width].
/// Output: dx [.., width], of which K columns from `first_column` on receive `dy·W`; the
/// others are what they were, or zero.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradInput {
    pub first_column: usize,
    /// Columns of x as a whole.
    pub width: usize,
    pub accumulate: bool,
}

/// Inputs: dy [.., N], x [.., K or more]. Adds `dyᵀ·x` to dW [N, K] and, with `bias`, the
/// column sums of dy to db `[N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradWeight {
    pub first_column: usize,
    /// K.
    pub inputs: usize,
    pub bias: bool,
}

impl Linear {
    /// Bytes of the bias in the type of y, in which cuBLASLt wants it, where that is not the
    /// type in which it is kept.
    pub fn cuda_bias_bytes(&self, y: &TensorType) -> u64 {
        if self.bias && y.dtype != y.dtype.accumulator() {
            aligned(product([y.width() as u64, y.dtype.size()]))
        } else {
            0
        }
    }
}

impl LinearGradWeight {
    /// Blocks of rows in which a GPU sums the columns of dy: enough to fill a large card
    /// together with `column_blocks` blocks of columns, and no more sums than fit in the memory
    /// that the product before has used.
    pub fn cuda_row_blocks(dy: &TensorType, column_blocks: usize) -> usize {
        const BLOCKS: usize = 1056;
        /// Rows that a block reads at once.
        const ROWS: usize = 8;
        let row = product([dy.width() as u64, dy.dtype.accumulator().size()]);
        let room = (CUDA_GEMM_WORKSPACE / row.max(1)) as usize;
        let useful = dy.rows().div_ceil(ROWS);
        (BLOCKS / column_blocks.max(1)).min(useful).min(room).max(1)
    }
}

impl Graph {
    /// `y = x·Wᵀ (+ bias)` over all columns of x.
    pub fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        self.linear_columns(name, x, 0, weight, bias)
    }

    /// As [`Self::linear`], reading x from `first_column` on.
    pub fn linear_columns(
        &mut self,
        name: &str,
        x: TensorId,
        first_column: usize,
        weight: TensorId,
        bias: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let op = Linear {
            first_column,
            bias: bias.is_some(),
        };
        let inputs = [x, weight].into_iter().chain(bias).collect();
        Ok(self.emit(name, op, inputs)?[0])
    }
}

/// Multiply-adds of a product count twice.
fn product_flops(rows: usize, weight: &TensorType) -> u64 {
    product([2, rows as u64, weight.shape.elements() as u64])
}

fn gemm_workspace(target: Target) -> u64 {
    match target {
        // The CPU's packing buffers belong to its threads, not to the step.
        Target::Cpu => 0,
        Target::Cuda => CUDA_GEMM_WORKSPACE,
    }
}

impl Declare for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2 + usize::from(self.bias))?;
        let (x, w) = (&inputs[0], &inputs[1]);
        expect_rows("x", x)?;
        expect_matrix("the weight", w)?;
        expect_dtype("the weight", w, x.dtype)?;
        let (outputs, width) = (w.shape.dims()[0], w.shape.dims()[1]);
        expect_columns("x", x, self.first_column, width)?;
        if self.bias {
            expect_small("the bias", &inputs[2], &[outputs], x)?;
        }
        Ok(vec![TensorType::new(x.shape.with_width(outputs), x.dtype)])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        let bias = self.bias.then(|| node.inputs[2]);
        let x_type = backward.graph().ty(x);
        // The weight's gradient first: x is often dead after it, before dx exists.
        let dw = backward.parameter_gradient(node, weight)?;
        let db = match bias {
            Some(bias) => backward.parameter_gradient(node, bias)?,
            None => None,
        };
        if dw.is_some() || db.is_some() {
            let op = LinearGradWeight {
                first_column: self.first_column,
                inputs: backward.graph().ty(weight).width(),
                bias: db.is_some(),
            };
            let into = [dw].into_iter().chain(db.map(Some)).collect();
            backward.accumulate(node, "weight", op, vec![dy, x], into)?;
        }
        if backward.wants(x) {
            let partial = backward.take_partial(x);
            let op = LinearGradInput {
                first_column: self.first_column,
                width: x_type.width(),
                accumulate: partial.is_some(),
            };
            let inputs = [dy, weight].into_iter().chain(partial).collect();
            let dx = backward.emit(node, "input", op, inputs)?[0];
            backward.contribute(node, x, dx)?;
        }
        Ok(())
    }

    fn workspace(&self, _: &[TensorType], outputs: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => sum([self.cuda_bias_bytes(&outputs[0]), gemm_workspace(target)]),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &inputs[1])
    }

    fn cpu_share(&self) -> f64 {
        CPU_PRODUCT_SHARE
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (x, w) = (&inputs[0], &inputs[1]);
        let shape = [x.rows(), w.rows(), w.width()];
        let product = KernelCost::product(shape, outputs[0].dtype, self.bytes(inputs, outputs));
        if self.cuda_bias_bytes(&outputs[0]) > 0 {
            // The bias in the type of y: a launch, and next to no bytes.
            return Cost::of([KernelCost::streamed(1, 0), product]);
        }
        Cost::of([product])
    }
}

impl Declare for LinearGradInput {
    fn name(&self) -> &'static str {
        "linear_grad_input"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2 + usize::from(self.accumulate))?;
        let (dy, w) = (&inputs[0], &inputs[1]);
        expect_rows("dy", dy)?;
        expect_matrix("the weight", w)?;
        expect_dtype("the weight", w, dy.dtype)?;
        expect(dy.width() == w.shape.dims()[0], || {
            format!("dy {} does not meet the weight {}", dy.shape, w.shape)
        })?;
        let dx = TensorType::new(dy.shape.with_width(self.width), dy.dtype);
        expect_columns("dx", &dx, self.first_column, w.width())?;
        if self.accumulate {
            expect_same("the gradient so far", &inputs[2], &dx)?;
        }
        Ok(vec![dx])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.accumulate { &[(2, 0)] } else { &[] }
    }

    fn workspace(&self, _: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        gemm_workspace(target)
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &inputs[1])
    }

    fn cpu_share(&self) -> f64 {
        CPU_PRODUCT_SHARE
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (dy, w, dx) = (&inputs[0], &inputs[1], &outputs[0]);
        let shape = [dy.rows(), w.width(), dy.width()];
        let product = KernelCost::product(shape, dx.dtype, self.bytes(inputs, outputs));
        if !self.accumulate && w.width() < self.width {
            // Columns that get no gradient are zeroed first.
            return Cost::of([KernelCost::streamed(1, dx.bytes()), product]);
        }
        Cost::of([product])
    }
}

impl Declare for LinearGradWeight {
    fn name(&self) -> &'static str {
        "linear_grad_weight"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["weight", "bias"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2)?;
        let (dy, x) = (&inputs[0], &inputs[1]);
        expect_rows("dy", dy)?;
        let same_rows = TensorType::new(dy.shape.with_width(x.width()), dy.dtype);
        expect_same("x", x, &same_rows)?;
        expect_columns("x", x, self.first_column, self.inputs)?;
        let dtype = dy.dtype.accumulator();
        let mut outputs = vec![TensorType::new([dy.width(), self.inputs], dtype)];
        if self.bias {
            outputs.push(TensorType::new([dy.width()], dtype));
        }
        Ok(outputs)
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            // Sums of columns come after the product, in the same memory.
            Target::Cuda => {
                let row = product([
                    inputs[0].width() as u64,
                    inputs[0].dtype.accumulator().size(),
                ]);
                gemm_workspace(target).max(if self.bias { row } else { 0 })
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &outputs[0])
    }

    fn cpu_share(&self) -> f64 {
        CPU_PRODUCT_SHARE
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let dy = &inputs[0];
        let shape = [dy.width(), self.inputs, dy.rows()];
        let product = KernelCost::product(shape, outputs[0].dtype, self.bytes(inputs, outputs));
        if self.bias {
            // Sums of columns, block by block and then of the blocks.
            return Cost::of([KernelCost::streamed(2, dy.bytes()), product]);
        }
        Cost::of([product])
    }
}
