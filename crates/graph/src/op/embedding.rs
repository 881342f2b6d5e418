//! Token embedding with optional learned positions and dropout.

use super::{
    Declare, aligned, expect, expect_dropout, expect_dtype, expect_float, expect_inputs,
    expect_matrix, expect_shape, product, sum,
};
use crate::cost::{Cost, KernelCost};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Dropout, Graph, Node, Target, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: tokens i32 [B, T], table [V, d], positions [P, d] when `positions`, random state
/// with dropout. Output: [B, T, d].
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    pub positions: bool,
    pub dropout: Option<Dropout>,
}

/// Inputs: dy [B, T, d], tokens, random state with dropout. Added to: the table's gradient
/// when `table` holds its rows, the positions' gradient when `positions` holds theirs.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingBackward {
    pub table: Option<usize>,
    pub positions: Option<usize>,
    pub dropout: Option<Dropout>,
}

impl EmbeddingBackward {
    /// A GPU sorts the rows by token. Bytes of each token's count (and their total), of where
    /// its rows end, and of the rows' numbers before and after those of a token are in order.
    pub fn cuda_parts(rows: usize, vocabulary: usize) -> [u64; 4] {
        let words = |count: usize| aligned(product([count as u64, DType::I32.size()]));
        [
            words(vocabulary.saturating_add(1)),
            words(vocabulary),
            words(rows),
            words(rows),
        ]
    }
}

impl Graph {
    pub fn embedding(
        &mut self,
        name: &str,
        tokens: TensorId,
        table: TensorId,
        positions: Option<TensorId>,
        dropout: Option<Dropout>,
    ) -> Result<TensorId, GraphError> {
        let random = dropout.map(|_| self.random_state());
        let op = Embedding {
            positions: positions.is_some(),
            dropout,
        };
        let inputs = [tokens, table]
            .into_iter()
            .chain(positions)
            .chain(random)
            .collect();
        Ok(self.emit(name, op, inputs)?[0])
    }
}

impl Declare for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let random = 2 + usize::from(self.positions);
        expect_inputs(inputs, random + usize::from(self.dropout.is_some()))?;
        let (tokens, table) = (&inputs[0], &inputs[1]);
        expect_dtype("the tokens", tokens, DType::I32)?;
        expect(tokens.shape.rank() == 2, || {
            format!("the tokens are {}, expected [batch,length]", tokens.shape)
        })?;
        expect_matrix("the table", table)?;
        expect_float("the table", table)?;
        let (batch, length) = (tokens.shape.dims()[0], tokens.shape.dims()[1]);
        if self.positions {
            let positions = &inputs[2];
            expect_dtype("the positions", positions, table.dtype)?;
            expect(
                positions.shape.rank() == 2
                    && positions.width() == table.width()
                    && positions.shape.dims()[0] >= length,
                || {
                    format!(
                        "a sequence of {length} does not fit positions {}",
                        positions.shape
                    )
                },
            )?;
        }
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &inputs[random])?;
        }
        Ok(vec![TensorType::new(
            [batch, length, table.width()],
            table.dtype,
        )])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let rows = |backward: &Backward<'_>, id| backward.graph().ty(id).shape.dims()[0];
        let table = backward
            .parameter_gradient(node, node.inputs[1])?
            .map(|gradient| (gradient, rows(backward, node.inputs[1])));
        let positions = if self.positions {
            backward
                .parameter_gradient(node, node.inputs[2])?
                .map(|gradient| (gradient, rows(backward, node.inputs[2])))
        } else {
            None
        };
        if table.is_none() && positions.is_none() {
            return Ok(());
        }
        let op = EmbeddingBackward {
            table: table.map(|(_, rows)| rows),
            positions: positions.map(|(_, rows)| rows),
            dropout: self.dropout,
        };
        let random = self.dropout.map(|_| node.inputs[node.inputs.len() - 1]);
        let inputs = [dy, node.inputs[0]].into_iter().chain(random).collect();
        let into = [table, positions]
            .into_iter()
            .flatten()
            .map(|(gradient, _)| Some(gradient))
            .collect();
        backward.accumulate(node, "table", op, inputs, into)?;
        Ok(())
    }

    fn flops(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        outputs[0].shape.elements() as u64
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // Only the rows that the tokens name are read.
        let rows = product([outputs[0].bytes(), 2 + u64::from(self.positions)]);
        sum([inputs[0].bytes(), rows])
    }
}

impl Declare for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["table", "positions"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2 + usize::from(self.dropout.is_some()))?;
        let (dy, tokens) = (&inputs[0], &inputs[1]);
        expect_float("dy", dy)?;
        expect(dy.shape.rank() == 3, || {
            format!("dy is {}, expected [batch,length,width]", dy.shape)
        })?;
        expect_dtype("the tokens", tokens, DType::I32)?;
        expect_shape("the tokens", tokens, dy.shape.without_width().dims())?;
        if let Some(dropout) = self.dropout {
            expect_dropout(dropout, &inputs[2])?;
        }
        let length = tokens.width();
        if let Some(positions) = self.positions {
            expect(positions >= length, || {
                format!("a sequence of {length} does not fit {positions} positions")
            })?;
        }
        let dtype = dy.dtype.accumulator();
        Ok([self.table, self.positions]
            .into_iter()
            .flatten()
            .map(|rows| TensorType::new([rows, dy.width()], dtype))
            .collect())
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match (target, self.table) {
            (Target::Cuda, Some(vocabulary)) => sum(Self::cuda_parts(inputs[0].rows(), vocabulary)),
            _ => 0,
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].shape.elements() as u64, 2])
    }

    fn bytes(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].bytes(), 3])
    }

    /// With the whole gradients, which are zeroed first unless something was added to them before: rows
    /// are few beside those of a vocabulary.
    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let bytes = sum(outputs
            .iter()
            .map(TensorType::bytes)
            .chain([self.bytes(inputs, outputs)]));
        CpuCost::vector(0.0, 0, bytes)
    }

    /// The rows are sorted by token before they are added up, which takes as long as so many bytes of
    /// each, however narrow it is.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        const SORTED_ROW: u64 = 8192;
        let sorting = product([inputs[0].rows() as u64, SORTED_ROW]);
        let bytes = sum([self.bytes(inputs, outputs), sorting]);
        Cost::of([KernelCost::streamed(6, bytes)])
    }
}
