//! `y = x·Wᵀ + b`, where x may be a column block of a wider tensor: packed projections are
//! read where they lie, without a copy.

use super::{
    CUDA_GEMM_WORKSPACE, Declare, aligned, expect, expect_columns, expect_dropout, expect_dtype,
    expect_inputs, expect_matrix, expect_rows, expect_same, expect_small, product, sum,
};
use crate::cost::{Cost, JoinKind, Joins, KernelCost};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Dropout, Graph, Node, Target, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: x [.., K or more], W [N, K], bias `[N]` when `bias`, random state with dropout.
/// Output: y [.., N].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Linear {
    /// The first column of x that is read; K columns follow.
    pub first_column: usize,
    pub bias: bool,
    /// Of the columns that are read, before they are multiplied.
    pub dropout: Option<Dropout>,
    /// Whether x gets no gradient: what follows is trained by itself.
    pub detached: bool,
}

/// Inputs: y [.., N or more], x [.., K or more], W [N, K]. Output: y, where `scale·x·Wᵀ` has been
/// added to the N columns from `y_column` on: the second half of an adapter, added in the product.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAdd {
    pub first_column: usize,
    pub y_column: usize,
    pub scale: f64,
}

/// Inputs: dy [.., N or more], W [N, K], when `accumulate` the gradient so far [.., width], and
/// random state with dropout. Output: dx [.., width], of which K columns from `first_column` on
/// receive `scale·dy·W`; the others are what they were, or zero.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradInput {
    /// The first column of dy that is read; N columns follow.
    pub dy_column: usize,
    pub scale: f64,
    pub first_column: usize,
    /// Columns of x as a whole.
    pub width: usize,
    pub accumulate: bool,
    pub dropout: Option<Dropout>,
}

/// Inputs: dy [.., N or more], x [.., K or more], random state with dropout. Adds `scale·dyᵀ·x` to
/// dW [N, K] and, with `bias`, the column sums of dy to db `[N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradWeight {
    pub dy_column: usize,
    /// N.
    pub outputs: usize,
    pub scale: f64,
    pub first_column: usize,
    /// K.
    pub inputs: usize,
    /// What dW is kept in.
    pub gradient: DType,
    pub bias: bool,
    pub dropout: Option<Dropout>,
}

/// Bytes of the rows of x after dropout, which exist on a GPU while the product reads them. The CPU
/// drops elements of what it has packed, or of a tile of the result.
fn dropped_bytes(dropout: Option<Dropout>, rows: usize, columns: usize, dtype: DType) -> u64 {
    match dropout {
        Some(_) => aligned(product([rows as u64, columns as u64, dtype.size()])),
        None => 0,
    }
}

/// A CPU's product of which so many elements are dropped in part.
fn cpu_product(shape: [usize; 3], bytes: u64, dropout: Option<Dropout>, dropped: usize) -> CpuCost {
    let product = CpuCost::product(shape, bytes);
    match dropout {
        Some(_) => product.dropping(dropped),
        None => product,
    }
}

/// Ranks of adapters up to which a GPU drops elements inside the product.
const CUDA_DROPPED_INSIDE: usize = 32;
/// Columns that its kernels take at once.
const CUDA_DROPPED_COLUMNS: usize = 32;
/// Elements of two bytes that it loads as one.
const CUDA_VECTOR: usize = 8;

/// Whether a GPU drops elements of the wide side of a narrow product inside it. `vectors` are the
/// columns at which what is loaded begins, and strides.
fn is_dropped_inside(dtype: DType, narrow: usize, wide: usize, vectors: &[usize]) -> bool {
    dtype.size() == 2
        && (1..=CUDA_DROPPED_INSIDE).contains(&narrow)
        && wide.is_multiple_of(CUDA_DROPPED_COLUMNS)
        && [narrow]
            .iter()
            .chain(vectors)
            .all(|columns| columns.is_multiple_of(CUDA_VECTOR))
}

impl Linear {
    /// Whether a GPU drops elements of x inside the product.
    pub fn is_dropped_inside(&self, x: &TensorType, w: &TensorType) -> bool {
        let vectors = [x.width(), self.first_column];
        self.dropout.is_some()
            && !self.bias
            && is_dropped_inside(x.dtype, w.rows(), w.width(), &vectors)
    }

    /// Bytes of the columns of x that are read, after dropout.
    pub fn dropped_bytes(&self, x: &TensorType, w: &TensorType) -> u64 {
        if self.is_dropped_inside(x, w) {
            return 0;
        }
        dropped_bytes(self.dropout, x.rows(), w.width(), x.dtype)
    }

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

impl LinearGradInput {
    /// Whether a GPU drops elements of the result inside the product.
    pub fn is_dropped_inside(&self, dy: &TensorType, w: &TensorType) -> bool {
        let vectors = [dy.width(), self.dy_column, self.width, self.first_column];
        self.dropout.is_some() && is_dropped_inside(dy.dtype, w.rows(), w.width(), &vectors)
    }

    /// Bytes of `dy·W` before its dropout, where that cannot happen in dx itself.
    pub fn dropped_bytes(&self, dy: &TensorType, w: &TensorType) -> u64 {
        if self.is_dropped_inside(dy, w) {
            return 0;
        }
        let apart = self.accumulate || w.width() < self.width;
        let dropout = self.dropout.filter(|_| apart);
        dropped_bytes(dropout, dy.rows(), w.width(), dy.dtype)
    }
}

impl LinearGradWeight {
    /// Whether a GPU drops elements of x inside the product.
    pub fn is_dropped_inside(&self, dy: &TensorType, x: &TensorType) -> bool {
        let vectors = [dy.width(), self.dy_column, x.width(), self.first_column];
        self.dropout.is_some()
            && !self.bias
            && self.gradient == DType::F32
            && is_dropped_inside(x.dtype, self.outputs, self.inputs, &vectors)
    }

    /// Bytes of the columns of x that are read, after dropout.
    pub fn dropped_bytes(&self, dy: &TensorType, x: &TensorType) -> u64 {
        if self.is_dropped_inside(dy, x) {
            return 0;
        }
        dropped_bytes(self.dropout, x.rows(), self.inputs, x.dtype)
    }

    /// Rows that a block of a GPU sums where it drops elements inside the product: enough blocks
    /// to fill a large card, and no more sums than fit in the memory of products.
    pub fn cuda_rows_of_part(&self, rows: usize) -> usize {
        const BLOCKS: usize = 264;
        /// Columns of a block, and rows that its warps take at once.
        const COLUMNS: usize = 128;
        const ROWS: usize = 64;
        let sums = product([self.outputs as u64, self.inputs as u64, DType::F32.size()]);
        let room = (CUDA_GEMM_WORKSPACE / sums.max(1)) as usize;
        let parts = (BLOCKS / self.inputs.div_ceil(COLUMNS).max(1))
            .min(room)
            .max(1);
        rows.div_ceil(parts).next_multiple_of(ROWS)
    }

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

    /// How a GPU cuts the rows, where the matrix is so small that nothing else can be cut; `None`
    /// where it is left to a library's product.
    pub fn cuda_row_parts(&self, dy: &TensorType, x: &TensorType) -> Option<RowParts> {
        /// The largest side, or the most elements where the sums of dy come with them, which are
        /// two launches otherwise; what sides and columns are multiples of.
        const MOST: usize = 256;
        const MOST_WITH_BIAS: usize = 1 << 16;
        const VECTOR: usize = 8;
        /// The fewest rows that are worth it, in all and of a part; parts are of whole steps.
        const FEWEST: usize = 2048;
        const PART: usize = 128;
        /// Blocks that fill a large card.
        const BLOCKS: usize = 264;
        let sizes = [
            self.outputs,
            self.inputs,
            self.dy_column,
            self.first_column,
            dy.width(),
            x.width(),
        ];
        let suits = matches!(dy.dtype, DType::Bf16 | DType::F16)
            && self.gradient == DType::F32
            && self.dropout.is_none()
            && (self.outputs.max(self.inputs) <= MOST
                || self.bias && self.outputs.saturating_mul(self.inputs) <= MOST_WITH_BIAS)
            && sizes.iter().all(|size| size.is_multiple_of(VECTOR))
            && dy.rows() >= FEWEST;
        if !suits {
            return None;
        }
        let tiles = [self.outputs, self.inputs].map(|side| side.div_ceil(RowParts::SIDE).max(1));
        let parts = (BLOCKS / (tiles[0] * tiles[1])).min(dy.rows() / PART);
        let rows = dy.rows().div_ceil(parts.max(1));
        let rows = rows.next_multiple_of(RowParts::STEP);
        Some(RowParts {
            parts: dy.rows().div_ceil(rows),
            rows,
            tiles,
            sums: self.outputs * self.inputs + self.outputs,
        })
    }
}

/// How the rows of a sum over rows are cut: the sums of the parts are in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowParts {
    pub parts: usize,
    /// Rows of each but the last.
    pub rows: usize,
    /// Of the matrix: down and across.
    pub tiles: [usize; 2],
    /// Of each part: the matrix and the sums of dy.
    pub sums: usize,
}

impl RowParts {
    /// Rows and columns of a tile of the matrix.
    pub const SIDE: usize = 64;
    /// Rows that are read at once.
    const STEP: usize = 32;

    fn bytes(&self) -> u64 {
        product([self.parts as u64, self.sums as u64, DType::F32.size()])
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
            ..Linear::default()
        };
        let inputs = [x, weight].into_iter().chain(bias).collect();
        Ok(self.emit(name, op, inputs)?[0])
    }

    /// As [`Self::linear`], passing no gradient on to x.
    pub fn linear_detached(
        &mut self,
        name: &str,
        x: TensorId,
        weight: TensorId,
    ) -> Result<TensorId, GraphError> {
        let op = Linear {
            detached: true,
            ..Linear::default()
        };
        Ok(self.emit(name, op, vec![x, weight])?[0])
    }

    /// `dropout(x)·Wᵀ`.
    pub fn linear_of_dropped(
        &mut self,
        name: &str,
        x: TensorId,
        weight: TensorId,
        dropout: Option<Dropout>,
    ) -> Result<TensorId, GraphError> {
        let random = dropout.map(|_| self.random_state());
        let op = Linear {
            dropout,
            ..Linear::default()
        };
        let inputs = [x, weight].into_iter().chain(random).collect();
        Ok(self.emit(name, op, inputs)?[0])
    }

    /// y with `scale·x·Wᵀ` added to its columns from `y_column` on; x is read from
    /// `first_column` on.
    pub fn linear_add(
        &mut self,
        name: &str,
        (y, y_column): (TensorId, usize),
        (x, first_column): (TensorId, usize),
        weight: TensorId,
        scale: f64,
    ) -> Result<TensorId, GraphError> {
        let op = LinearAdd {
            first_column,
            y_column,
            scale,
        };
        Ok(self.emit(name, op, vec![y, x, weight])?[0])
    }
}

/// Multiply-adds of a product count twice.
fn product_flops(rows: usize, weight: &TensorType) -> u64 {
    product([2, rows as u64, weight.shape.elements() as u64])
}

/// x [.., K or more] and W [N, K], of which N is returned.
fn expect_operands(x: &TensorType, w: &TensorType, first_column: usize) -> Result<usize, String> {
    expect_rows("x", x)?;
    expect_matrix("the weight", w)?;
    expect_dtype("the weight", w, x.dtype)?;
    expect_columns("x", x, first_column, w.width())?;
    Ok(w.rows())
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
        let random = 2 + usize::from(self.bias);
        expect_inputs(inputs, random + usize::from(self.dropout.is_some()))?;
        let (x, w) = (&inputs[0], &inputs[1]);
        let outputs = expect_operands(x, w, self.first_column)?;
        if self.bias {
            expect_small("the bias", &inputs[2], &[outputs], x)?;
        }
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &inputs[random])?;
        }
        Ok(vec![TensorType::new(x.shape.with_width(outputs), x.dtype)])
    }

    fn rounds_gradient(&self, input: usize) -> bool {
        input == 1
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let random = self.dropout.map(|_| node.inputs[node.inputs.len() - 1]);
        ProductBackward {
            node,
            dy,
            dy_column: 0,
            scale: 1.0,
            x: node.inputs[0],
            first_column: self.first_column,
            weight: node.inputs[1],
            bias: self.bias.then(|| node.inputs[2]),
            dropout: self.dropout.zip(random),
            detached: self.detached,
        }
        .emit(backward)
    }

    fn workspace(&self, inputs: &[TensorType], outputs: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => sum([
                self.dropped_bytes(&inputs[0], &inputs[1]),
                self.cuda_bias_bytes(&outputs[0]),
                gemm_workspace(target),
            ]),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &inputs[1])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let (x, w) = (&inputs[0], &inputs[1]);
        let shape = [x.rows(), w.rows(), w.width()];
        let bytes = self.bytes(inputs, outputs);
        cpu_product(shape, bytes, self.dropout, x.rows() * w.width())
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (x, w) = (&inputs[0], &inputs[1]);
        if self.is_dropped_inside(x, w) {
            return Cost::of([KernelCost::streamed(1, self.bytes(inputs, outputs))]);
        }
        let shape = [x.rows(), w.rows(), w.width()];
        let multiply = KernelCost::product(shape, outputs[0].dtype, self.bytes(inputs, outputs));
        let dropped = self.dropped_bytes(x, w);
        // The bias in the type of y is a launch, and next to no bytes.
        let bias = self.cuda_bias_bytes(&outputs[0]) > 0;
        Cost::of(
            (dropped > 0)
                .then(|| KernelCost::streamed(1, product([2, dropped])))
                .into_iter()
                .chain(bias.then(|| KernelCost::streamed(1, 0)))
                .chain([multiply]),
        )
    }
}

impl Declare for LinearAdd {
    fn name(&self) -> &'static str {
        "linear_add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        let (y, x, w) = (&inputs[0], &inputs[1], &inputs[2]);
        let outputs = expect_operands(x, w, self.first_column)?;
        let same_rows = TensorType::new(x.shape.with_width(y.width()), x.dtype);
        expect_same("y", y, &same_rows)?;
        expect_columns("y", y, self.y_column, outputs)?;
        Ok(vec![*y])
    }

    fn rounds_gradient(&self, input: usize) -> bool {
        input == 2
    }

    /// The gradient reaches y as it is.
    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let parts = ProductBackward {
            node,
            dy,
            dy_column: self.y_column,
            scale: self.scale,
            x: node.inputs[1],
            first_column: self.first_column,
            weight: node.inputs[2],
            bias: None,
            dropout: None,
            detached: false,
        };
        parts.emit_input(backward)?;
        // With the gradient of the weight that made x, and those of others that read x.
        backward.hold_back(parts.x, |backward| parts.emit_weight(backward))?;
        backward.contribute(node, node.inputs[0], dy)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn workspace(&self, _: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        gemm_workspace(target)
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product_flops(inputs[1].rows(), &inputs[2])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let (x, w) = (&inputs[1], &inputs[2]);
        let shape = [x.rows(), w.rows(), w.width()];
        CpuCost::product(shape, self.bytes(inputs, outputs))
    }

    fn bytes(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        let (x, w) = (&inputs[1], &inputs[2]);
        let row = sum([w.width() as u64, product([2, w.rows() as u64])]);
        sum([product([x.rows() as u64, row, x.dtype.size()]), w.bytes()])
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (x, w) = (&inputs[1], &inputs[2]);
        let shape = [x.rows(), w.rows(), w.width()];
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::product(shape, outputs[0].dtype, bytes)])
    }

    fn joins(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Joins> {
        let (x, w) = (&inputs[1], &inputs[2]);
        let sides = [w.rows(), w.width()];
        Some(term(0, x.rows(), sides, w, false))
    }
}

/// A product of so many rows with a weight, of `[columns, inner]`, that adds to what an input holds.
fn term(
    input: usize,
    rows: usize,
    [columns, inner]: [usize; 2],
    w: &TensorType,
    dropped: bool,
) -> Joins {
    let read = product([rows as u64, inner as u64, w.dtype.size()]);
    Joins {
        input,
        bytes: sum([read, w.bytes()]),
        kind: JoinKind::Term {
            columns,
            inner,
            dropped,
        },
    }
}

/// The backward of a product, whatever becomes of its result: the gradients of its weight and
/// bias, then that of x.
struct ProductBackward<'a> {
    node: &'a Node,
    dy: TensorId,
    dy_column: usize,
    scale: f64,
    x: TensorId,
    first_column: usize,
    weight: TensorId,
    bias: Option<TensorId>,
    dropout: Option<(Dropout, TensorId)>,
    detached: bool,
}

impl ProductBackward<'_> {
    /// The weight's gradient first: x is often dead after it, before dx exists.
    fn emit(&self, backward: &mut Backward<'_>) -> Result<(), GraphError> {
        self.emit_weight(backward)?;
        self.emit_input(backward)
    }

    fn emit_weight(&self, backward: &mut Backward<'_>) -> Result<(), GraphError> {
        let &Self { node, dy, x, .. } = self;
        let weight = backward.graph().ty(self.weight);
        let dropout = self.dropout.map(|(dropout, _)| dropout);
        let random = self.dropout.map(|(_, random)| random);
        let dw = backward.parameter_gradient(node, self.weight)?;
        let db = match self.bias {
            Some(bias) => backward.parameter_gradient(node, bias)?,
            None => None,
        };
        if dw.is_some() || db.is_some() {
            let dy_type = backward.graph().ty(dy);
            let op = LinearGradWeight {
                gradient: dw.map_or(dy_type.dtype.accumulator(), |id| {
                    backward.graph().ty(id).dtype
                }),
                dy_column: self.dy_column,
                outputs: weight.rows(),
                scale: self.scale,
                first_column: self.first_column,
                inputs: weight.width(),
                bias: db.is_some(),
                dropout,
            };
            let into = [dw].into_iter().chain(db.map(Some)).collect();
            let inputs = [dy, x].into_iter().chain(random).collect();
            backward.accumulate(node, "weight", op, inputs, into)?;
        }
        Ok(())
    }

    fn emit_input(&self, backward: &mut Backward<'_>) -> Result<(), GraphError> {
        let &Self { node, dy, x, .. } = self;
        let x_width = backward.graph().ty(x).width();
        let dropout = self.dropout.map(|(dropout, _)| dropout);
        let random = self.dropout.map(|(_, random)| random);
        if backward.wants(x) && !self.detached {
            let partial = backward.take_partial(x);
            let op = LinearGradInput {
                dy_column: self.dy_column,
                scale: self.scale,
                first_column: self.first_column,
                width: x_width,
                accumulate: partial.is_some(),
                dropout,
            };
            let inputs = [dy, self.weight].into_iter().chain(partial).chain(random);
            let dx = backward.emit(node, "input", op, inputs.collect())?[0];
            backward.contribute(node, x, dx)?;
        }
        Ok(())
    }
}

impl Declare for LinearGradInput {
    fn name(&self) -> &'static str {
        "linear_grad_input"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let random = 2 + usize::from(self.accumulate);
        expect_inputs(inputs, random + usize::from(self.dropout.is_some()))?;
        let (dy, w) = (&inputs[0], &inputs[1]);
        expect_rows("dy", dy)?;
        expect_matrix("the weight", w)?;
        expect_dtype("the weight", w, dy.dtype)?;
        expect_columns("dy", dy, self.dy_column, w.rows())?;
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &inputs[random])?;
        }
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

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => sum([
                self.dropped_bytes(&inputs[0], &inputs[1]),
                gemm_workspace(target),
            ]),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &inputs[1])
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let (dy, w) = (&inputs[0], &inputs[1]);
        let read = product([dy.rows() as u64, w.rows() as u64, dy.dtype.size()]);
        let so_far = if self.accumulate {
            inputs[2].bytes()
        } else {
            0
        };
        sum([read, w.bytes(), so_far, outputs[0].bytes()])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let (dy, w) = (&inputs[0], &inputs[1]);
        let shape = [dy.rows(), w.width(), w.rows()];
        let bytes = self.bytes(inputs, outputs);
        cpu_product(shape, bytes, self.dropout, dy.rows() * w.width())
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (dy, w, dx) = (&inputs[0], &inputs[1], &outputs[0]);
        let shape = [dy.rows(), w.width(), w.rows()];
        let bytes = self.bytes(inputs, outputs);
        let is_inside = self.is_dropped_inside(dy, w);
        let multiply = match is_inside {
            true => KernelCost::streamed(1, bytes),
            false => KernelCost::product(shape, dx.dtype, bytes),
        };
        let dropped = self.dropout.filter(|_| !is_inside);
        // Columns that get no gradient are zeroed first.
        let zeroed = !self.accumulate && w.width() < self.width;
        Cost::of(
            zeroed
                .then(|| KernelCost::streamed(1, dx.bytes()))
                .into_iter()
                .chain([multiply])
                .chain(dropped.map(|_| KernelCost::streamed(1, product([2, dx.bytes()])))),
        )
    }

    fn joins(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Joins> {
        let (dy, w) = (&inputs[0], &inputs[1]);
        let sides = [w.width(), w.rows()];
        let dropped = self.dropout.is_some();
        // What is dropped in memory adds to nothing before that.
        let adds = self.accumulate && (!dropped || self.is_dropped_inside(dy, w));
        adds.then(|| term(2, dy.rows(), sides, w, dropped))
    }
}

/// The share of the copy bandwidth that a sum in parts of rows reaches: its blocks are few steps
/// long and wait for the first.
const PARTS_BANDWIDTH_SHARE: f64 = 0.6;

impl Declare for LinearGradWeight {
    fn name(&self) -> &'static str {
        "linear_grad_weight"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["weight", "bias"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2 + usize::from(self.dropout.is_some()))?;
        let (dy, x) = (&inputs[0], &inputs[1]);
        expect_rows("dy", dy)?;
        expect_columns("dy", dy, self.dy_column, self.outputs)?;
        expect(!self.bias || dy.width() == self.outputs, || {
            format!("a bias of {} columns for dy {}", self.outputs, dy.shape)
        })?;
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &inputs[2])?;
        }
        let same_rows = TensorType::new(dy.shape.with_width(x.width()), dy.dtype);
        expect_same("x", x, &same_rows)?;
        expect_columns("x", x, self.first_column, self.inputs)?;
        let sums = dy.dtype.accumulator();
        expect([dy.dtype, sums].contains(&self.gradient), || {
            format!("a gradient in {} for dy in {}", self.gradient, dy.dtype)
        })?;
        let weight = TensorType::new([self.outputs, self.inputs], self.gradient);
        let mut outputs = vec![weight];
        if self.bias {
            outputs.push(TensorType::new([self.outputs], sums));
        }
        Ok(outputs)
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            // Sums of columns come after the product, in the same memory.
            Target::Cuda => {
                let dropped = self.dropped_bytes(&inputs[0], &inputs[1]);
                let row = product([self.outputs as u64, inputs[0].dtype.accumulator().size()]);
                let sums = if self.bias { row } else { 0 };
                let parts = self.cuda_row_parts(&inputs[0], &inputs[1]);
                let parts = parts.map_or(0, |parts| parts.bytes());
                sum([dropped, gemm_workspace(target).max(sums).max(parts)])
            }
        }
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product_flops(inputs[0].rows(), &outputs[0])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let rows = inputs[0].rows();
        let shape = [self.outputs, self.inputs, rows];
        let bytes = self.bytes(inputs, outputs);
        cpu_product(shape, bytes, self.dropout, rows * self.inputs)
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (dy, x) = (&inputs[0], &inputs[1]);
        let bytes = self.bytes(inputs, outputs);
        if self.is_dropped_inside(dy, x) {
            // Parts of the sums, and then their sums.
            let parts = dy.rows().div_ceil(self.cuda_rows_of_part(dy.rows()));
            let sums = product([2, parts as u64, outputs[0].bytes()]);
            return Cost::of([KernelCost::streamed(2, sum([bytes, sums]))]);
        }
        if let Some(parts) = self.cuda_row_parts(dy, x) {
            let bytes = sum([bytes, product([2, parts.bytes()])]);
            return Cost::of([KernelCost::waiting(2, bytes, PARTS_BANDWIDTH_SHARE)]);
        }
        let shape = [self.outputs, self.inputs, dy.rows()];
        let multiply = KernelCost::product(shape, outputs[0].dtype, bytes);
        let dropped = self.dropped_bytes(dy, x);
        // Sums of columns, block by block and then of the blocks.
        let bias = self.bias.then(|| KernelCost::streamed(2, dy.bytes()));
        Cost::of(
            (dropped > 0)
                .then(|| KernelCost::streamed(1, product([2, dropped])))
                .into_iter()
                .chain(bias)
                .chain([multiply]),
        )
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let (dy, x) = (&inputs[0], &inputs[1]);
        let row = sum([self.outputs as u64, self.inputs as u64]);
        let read = product([dy.rows() as u64, row, x.dtype.size()]);
        sum([read, sum(outputs.iter().map(TensorType::bytes))])
    }
}
