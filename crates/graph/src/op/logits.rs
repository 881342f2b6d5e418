//! The logits of one position, for sampling.

use super::{Declare, expect, expect_dtype, expect_float, expect_inputs, expect_matrix, product};
use crate::error::GraphError;
use crate::graph::{Graph, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: h [B, T, d], W [V, d], positions i32 [B]. Output: the logits of each sequence's
/// position [B, V].
#[derive(Clone, Debug, PartialEq)]
pub struct Logits;

impl Graph {
    pub fn logits(
        &mut self,
        name: &str,
        h: TensorId,
        weight: TensorId,
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        let logits = self.emit(name, Logits, vec![h, weight, positions])?[0];
        self.result = Some(logits);
        Ok(logits)
    }
}

impl Declare for Logits {
    fn name(&self) -> &'static str {
        "logits"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        let (h, w, positions) = (&inputs[0], &inputs[1], &inputs[2]);
        expect_float("h", h)?;
        expect_matrix("the weight", w)?;
        expect_dtype("the weight", w, h.dtype)?;
        expect(h.shape.rank() == 3 && w.width() == h.width(), || {
            format!("h {} does not meet the weight {}", h.shape, w.shape)
        })?;
        expect_dtype("the positions", positions, DType::I32)?;
        expect(positions.shape.dims() == [h.shape.dims()[0]], || {
            format!("positions {} for h {}", positions.shape, h.shape)
        })?;
        Ok(vec![TensorType::new(
            [h.shape.dims()[0], w.rows()],
            h.dtype.accumulator(),
        )])
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product([
            2,
            outputs[0].shape.elements() as u64,
            inputs[0].width() as u64,
        ])
    }
}
