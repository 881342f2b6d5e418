//! Mamba's short convolution over tokens that follow others, whose last inputs are in a cache.

use super::convolution::check;
use super::{Declare, expect, expect_inputs, expect_positions, product, sum};
use crate::error::GraphError;
use crate::graph::{Graph, TensorId};
use crate::types::TensorType;

/// Inputs: x [B, T, C or more], weight [C, width], bias `[C]`, positions i32 [B, T], of which the
/// first of each row counts: at 0 nothing came before. Outputs: what
/// [`Convolution`](super::Convolution) gives [B, T, C]; the cache [B, width − 1, C] of the last
/// inputs, oldest first.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedConvolution {
    pub first_column: usize,
}

fn cache(x: &TensorType, weight: &TensorType) -> TensorType {
    let (channels, width) = (weight.rows(), weight.width());
    let batch = x.shape.dims().first().copied().unwrap_or(0);
    TensorType::new([batch, width.saturating_sub(1), channels], x.dtype)
}

impl Graph {
    pub fn convolution_cached(
        &mut self,
        name: &str,
        x: TensorId,
        first_column: usize,
        (weight, bias): (TensorId, TensorId),
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        let ty = cache(&self.ty(x), &self.ty(weight));
        let cache = self.cache(&format!("{name}.cache"), ty);
        let op = CachedConvolution { first_column };
        let inputs = vec![x, weight, bias, positions];
        Ok(self.emit_into(name, op, inputs, &[cache])?[0])
    }
}

impl Declare for CachedConvolution {
    fn name(&self) -> &'static str {
        "cached_convolution"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "cache"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 4)?;
        let (x, w) = (&inputs[0], &inputs[1]);
        check(self.first_column, x, w, &inputs[2])?;
        expect(w.width() > 1, || {
            "a convolution over one step, which has no past to keep".to_owned()
        })?;
        expect_positions(&inputs[3], x)?;
        let y = TensorType::new(x.shape.with_width(w.rows()), x.dtype);
        Ok(vec![y, cache(x, w)])
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let per_element = product([2, inputs[1].width() as u64]).saturating_add(12);
        product([outputs[0].shape.elements() as u64, per_element])
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // Of x only the columns that are read; the cache both ways.
        let read = sum(inputs[1..].iter().map(TensorType::bytes));
        sum([
            read,
            product([2, outputs[0].bytes()]),
            product([2, outputs[1].bytes()]),
        ])
    }
}
