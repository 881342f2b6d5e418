//! The logits of one position, for sampling.

use super::{
    CUDA_GEMM_WORKSPACE, Declare, Head, aligned, expect, expect_dtype, expect_float, expect_inputs,
    expect_matrix, expect_small, product, sum,
};
use crate::cpu::CpuCost;
use crate::error::GraphError;
use crate::graph::{Graph, Target, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: h [B, T, d], W [V, d], positions i32 `[B]`, a bias [V] of the logits where there is one.
/// Output: the logits of each sequence's position [B, V].
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    pub bias: bool,
}

impl Logits {
    /// Bytes of the rows of h that a GPU gathers before it multiplies them.
    pub fn cuda_gathered_bytes(h: &TensorType) -> u64 {
        let batch = h.shape.dims()[0] as u64;
        aligned(product([batch, h.width() as u64, h.dtype.size()]))
    }
}

impl Graph {
    pub fn logits(
        &mut self,
        name: &str,
        h: TensorId,
        head: impl Into<Head>,
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        let Head { weight, bias } = head.into();
        let op = Logits {
            bias: bias.is_some(),
        };
        let inputs = [h, weight, positions].into_iter().chain(bias);
        let logits = self.emit(name, op, inputs.collect())?[0];
        self.result = Some(logits);
        Ok(logits)
    }
}

impl Declare for Logits {
    fn name(&self) -> &'static str {
        "logits"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3 + usize::from(self.bias))?;
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
        if self.bias {
            expect_small("the bias", &inputs[3], &[w.rows()], h)?;
        }
        Ok(vec![TensorType::new(
            [h.shape.dims()[0], w.rows()],
            h.dtype.accumulator(),
        )])
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => sum([Self::cuda_gathered_bytes(&inputs[0]), CUDA_GEMM_WORKSPACE]),
        }
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product([
            2,
            outputs[0].shape.elements() as u64,
            inputs[0].width() as u64,
        ])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let rows = outputs[0].rows();
        let shape = [rows, outputs[0].width(), inputs[0].width()];
        CpuCost::product(shape, self.bytes(inputs, outputs))
    }
}
