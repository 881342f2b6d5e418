//! The end of a step: the norm of all gradients, and AdamW, fused and in place.

use super::{
    Declare, LossScale, expect, expect_dtype, expect_float, expect_inputs, expect_shape, product,
    sum,
};
use crate::graph::Target;
use crate::types::{DType, TensorType};

/// Inputs: every gradient. Output: [norm, factor], the factor being what clipping to
/// `max_norm` multiplies gradients by (1 without clipping).
///
/// With `scaled`, gradients come multiplied by the loss scale, which is the second output and
/// updated in place. The norm is that of the gradients proper, the factor takes the scale out as
/// well, and is 0 where gradients are not finite: a step that must not change anything.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientNorm {
    pub max_norm: Option<f64>,
    pub scaled: bool,
}

/// Inputs: gradient, [norm, factor], step scalars [learning rate, bias corrections]. Updated
/// in place: parameter, first and second moment, and the compute copy when `copy` is its type.
/// A factor of 0 leaves everything as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    pub copy: Option<DType>,
}

impl GradientNorm {
    /// Elements whose squares are summed by one task; tasks' sums are added in order.
    pub const BLOCK: usize = 1 << 16;
}

impl AdamW {
    /// Learning rate and the two bias corrections.
    pub const NUM_SCALARS: usize = 3;
}

impl Declare for GradientNorm {
    fn name(&self) -> &'static str {
        "gradient_norm"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "loss_scale"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect(!inputs.is_empty(), || {
            "no gradients: no trainable parameter reaches the loss".to_owned()
        })?;
        for gradient in inputs {
            expect_float("a gradient", gradient)?;
            expect_dtype("a gradient", gradient, inputs[0].dtype)?;
        }
        let norm = TensorType::new([2], DType::F32);
        Ok(if self.scaled {
            vec![norm, LossScale::tensor_type()]
        } else {
            vec![norm]
        })
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], _target: Target) -> u64 {
        let blocks = inputs
            .iter()
            .map(|ty| ty.shape.elements().div_ceil(Self::BLOCK) as u64);
        product([sum(blocks), DType::F64.size()])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        let elements = inputs.iter().map(|ty| ty.shape.elements() as u64);
        product([2, sum(elements)])
    }
}

impl Declare for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["parameter", "m", "v", "copy"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        expect_float("the gradient", &inputs[0])?;
        expect_dtype("the norm", &inputs[1], DType::F32)?;
        expect_shape("the norm", &inputs[1], &[2])?;
        expect_dtype("the step's scalars", &inputs[2], DType::F32)?;
        expect_shape("the step's scalars", &inputs[2], &[Self::NUM_SCALARS])?;
        let mut outputs = vec![inputs[0]; 3];
        if let Some(dtype) = self.copy {
            expect(dtype.is_float(), || {
                format!("a copy in {dtype}, expected a floating-point type")
            })?;
            outputs.push(TensorType { dtype, ..inputs[0] });
        }
        Ok(outputs)
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([14, inputs[0].shape.elements() as u64])
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // Parameter and moments are read as well as written.
        let written = sum(outputs.iter().map(TensorType::bytes));
        sum([product([inputs[0].bytes(), 4]), written])
    }
}
