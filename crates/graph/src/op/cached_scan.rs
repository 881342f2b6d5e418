//! The selective scan over tokens that follow others, whose state is in a cache.

use super::scan::CPU_SIGMOIDS;
use super::{Declare, Scan, ScanInputs, expect, expect_inputs, expect_positions, product, sum};
use crate::cost::{Arithmetic, Cost, KernelCost};
use crate::error::GraphError;
use crate::graph::{Graph, TensorId};
use crate::types::TensorType;

/// Inputs: those of [`Scan`]; positions i32 [B, T], of which the first of each row counts: at 0
/// nothing came before, and the state starts from zero. Outputs: y [B, T, inner]; the state
/// [B, inner, N], which the scan continues from and leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedScan(pub Scan);

impl CachedScan {
    /// Threads of a GPU that share the states of a channel.
    pub const CUDA_LANES: usize = 16;
    /// Channels of a GPU's block.
    pub const CUDA_CHANNELS: usize = 8;
    /// Seconds that a step of time takes at the least: it waits for loads and for the sum over the
    /// states.
    const CUDA_LATENCY: f64 = 200e-9;

    fn state(&self, x: &TensorType) -> TensorType {
        let batch = x.shape.dims().first().copied().unwrap_or(0);
        let Scan { inner, state, .. } = self.0;
        TensorType::new([batch, inner, state], x.dtype.accumulator())
    }
}

impl Graph {
    pub fn scan_cached(
        &mut self,
        name: &str,
        inputs: ScanInputs,
        rank: usize,
        chunk: usize,
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        let (op, mut operands) = self.scan_operands(inputs, rank, chunk);
        let op = CachedScan(op);
        let ty = op.state(&self.ty(inputs.x));
        let state = self.cache(&format!("{name}.state"), ty);
        operands.push(positions);
        Ok(self.emit_into(name, op, operands, &[state])?[0])
    }
}

impl Declare for CachedScan {
    fn name(&self) -> &'static str {
        "cached_scan"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "state"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let own = self.0.num_sources() + 4;
        expect_inputs(inputs, own + 1)?;
        self.0.check(&inputs[..own])?;
        expect(!self.0.keep_states, || {
            "states for a backward that there is not".to_owned()
        })?;
        let x = &inputs[0];
        expect_positions(&inputs[own], x)?;
        let y = TensorType::new(x.shape.with_width(self.0.inner), x.dtype);
        Ok(vec![y, self.state(x)])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([8, self.0.elements(&inputs[0])])
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // The state is read as well.
        let tensors = inputs.iter().chain(outputs).chain(&outputs[1..]);
        sum(tensors.map(TensorType::bytes))
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (batch, length) = (inputs[0].shape.dims()[0], inputs[0].shape.dims()[1]);
        let blocks = self
            .0
            .inner
            .div_ceil(Self::CUDA_CHANNELS)
            .saturating_mul(batch);
        let arithmetic = Arithmetic::Recurrence {
            blocks,
            steps: length,
            step: 0.0,
            latency: Self::CUDA_LATENCY,
            passes: 1.0,
        };
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(1, bytes, arithmetic)])
    }
}
