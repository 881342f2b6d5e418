//! The optimizer's part of a step: the norm of all gradients, and AdamW, fused and in place.

use super::{
    Declare, LossScale, Op, expect, expect_dtype, expect_float, expect_inputs, expect_shape,
    product, sum,
};
use crate::cost::{Cost, KernelCost};
use crate::graph::Target;
use crate::types::{DType, TensorType};

/// Inputs: every gradient. Output: [norm, factor], the factor being what clipping to
/// `max_norm` multiplies gradients by (1 without clipping).
///
/// With `from_squares` the one input is the tensor in which [`GradientSquares`] left the sums of
/// squares, because the gradients themselves are gone.
///
/// With `scaled`, gradients come multiplied by the loss scale, which is the second output and
/// updated in place. The norm is that of the gradients proper, the factor takes the scale out as
/// well, and is 0 where gradients are not finite: a step that must not change anything.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientNorm {
    pub max_norm: Option<f64>,
    pub scaled: bool,
    pub from_squares: bool,
}

/// Input: one gradient. Output: the sums of squares of the blocks of all gradients, f64 `[total]`,
/// of which this node writes those from `first` on. Adding all of them up in order is what
/// [`GradientNorm`] does with the gradients at hand.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientSquares {
    pub first: usize,
    pub total: usize,
}

/// How the optimizer's moments are kept between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MomentFormat {
    /// In the precision of sums.
    #[default]
    Full,
    /// In the type in which the weight is kept.
    AsKept,
    /// One byte a number, in blocks with a scale each.
    EightBit,
}

/// How the gradient of a weight without a master is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientFormat {
    /// In the precision of sums.
    #[default]
    Full,
    /// In the type of the weight, where the gradient comes in one piece.
    AsKept,
}

/// Inputs: gradient, step scalars [learning rate, bias corrections], and with `factor` the
/// [norm, factor] of all gradients. Updated in place: parameter, first and second moment, and the
/// compute copy when `copy` is its type. A factor of 0 leaves everything as it is.
///
/// The arithmetic is that of sums whatever the parameter, the gradient and the moments are kept
/// in; what is coarser is rounded to nearest when it is written.
///
/// With moments in eight bits, each is two tensors: codes, and the scales of their blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Of the learning rate, the decay's too.
    pub learning_rate_scale: f64,
    /// What the parameter is kept in.
    pub parameter: DType,
    pub copy: Option<DType>,
    pub moments: MomentFormat,
    /// Whether gradients are multiplied by a factor: clipping, loss scaling.
    pub factor: bool,
}

/// The positions of an [`AdamW`]'s outputs.
#[derive(Clone, Copy, Debug)]
pub struct AdamWLayout {
    pub m: usize,
    pub v: usize,
    /// Of m and v, in eight bits.
    pub scales: Option<[usize; 2]>,
    pub copy: Option<usize>,
}

impl GradientNorm {
    /// Elements whose squares are summed by one task; tasks' sums are added in order.
    pub const BLOCK: usize = 1 << 16;

    /// Tasks of a gradient.
    pub fn num_blocks(gradient: &TensorType) -> usize {
        gradient.shape.elements().div_ceil(Self::BLOCK)
    }
}

impl MomentFormat {
    /// Numbers that share a scale.
    pub const BLOCK: usize = 256;
    /// A tensor with fewer elements is kept in full: biases and norms are where errors weigh
    /// most, and take next to nothing.
    pub const SMALLEST: usize = 4096;

    /// The format for a parameter of this type.
    #[must_use]
    pub fn of(self, parameter: &TensorType) -> Self {
        if parameter.shape.elements() < Self::SMALLEST {
            Self::Full
        } else {
            self
        }
    }

    /// A moment's type.
    pub fn moment(self, parameter: &TensorType) -> TensorType {
        match self {
            Self::Full => TensorType {
                dtype: parameter.dtype.accumulator(),
                ..*parameter
            },
            Self::AsKept => *parameter,
            Self::EightBit => TensorType {
                dtype: DType::U8,
                ..*parameter
            },
        }
    }

    /// The type of its scales, where it has any.
    pub fn scales(self, parameter: &TensorType) -> Option<TensorType> {
        let blocks = parameter.shape.elements().div_ceil(Self::BLOCK);
        match self {
            Self::Full | Self::AsKept => None,
            Self::EightBit => Some(TensorType::new([blocks], DType::F32)),
        }
    }
}

impl AdamW {
    /// Learning rate and the two bias corrections.
    pub const NUM_SCALARS: usize = 3;

    pub fn layout(&self) -> AdamWLayout {
        let (m, v, scales, next) = match self.moments {
            MomentFormat::Full | MomentFormat::AsKept => (1, 2, None, 3),
            MomentFormat::EightBit => (1, 2, Some([3, 4]), 5),
        };
        AdamWLayout {
            m,
            v,
            scales,
            copy: self.copy.map(|_| next),
        }
    }
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
        if self.from_squares {
            expect_inputs(inputs, 1)?;
            expect_dtype("the sums of squares", &inputs[0], DType::F64)?;
            expect(inputs[0].shape.rank() == 1, || {
                format!("the sums of squares are {}, expected a list", inputs[0])
            })?;
        }
        for gradient in inputs {
            expect_float("a gradient", gradient)?;
            let (sums, first) = (gradient.dtype.accumulator(), inputs[0].dtype.accumulator());
            expect(sums == first, || {
                format!("gradients in {} and {}", gradient.dtype, inputs[0].dtype)
            })?;
        }
        let norm = TensorType::new([2], DType::F32);
        Ok(if self.scaled {
            vec![norm, LossScale::tensor_type()]
        } else {
            vec![norm]
        })
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], _target: Target) -> u64 {
        if self.from_squares {
            return 0;
        }
        let blocks = inputs.iter().map(|ty| Self::num_blocks(ty) as u64);
        product([sum(blocks), DType::F64.size()])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Adding up blocks is nothing beside making them.
        if self.from_squares {
            return 0;
        }
        let elements = inputs.iter().map(|ty| ty.shape.elements() as u64);
        product([2, sum(elements)])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.39
    }

    /// The second launch adds up the blocks.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(2, self.bytes(inputs, outputs))])
    }

    fn over_squares(&self) -> Option<Op> {
        Some(Op::from(Self {
            from_squares: true,
            ..self.clone()
        }))
    }

    fn changes_updates(&self) -> bool {
        self.max_norm.is_some() || self.scaled
    }
}

impl Declare for GradientSquares {
    fn name(&self) -> &'static str {
        "gradient_squares"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 1)?;
        expect_float("the gradient", &inputs[0])?;
        let blocks = GradientNorm::num_blocks(&inputs[0]);
        expect(self.first.saturating_add(blocks) <= self.total, || {
            format!(
                "writes {blocks} sums from {} on, but there are {}",
                self.first, self.total
            )
        })?;
        Ok(vec![TensorType::new([self.total], DType::F64)])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([2, inputs[0].shape.elements() as u64])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.39
    }

    fn bytes(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        let sums = GradientNorm::num_blocks(&inputs[0]) as u64;
        sum([inputs[0].bytes(), product([sums, DType::F64.size()])])
    }
}

impl Declare for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn outputs(&self) -> &'static [&'static str] {
        match self.moments {
            MomentFormat::Full | MomentFormat::AsKept => &["parameter", "m", "v", "copy"],
            MomentFormat::EightBit => &["parameter", "m", "v", "m.scales", "v.scales", "copy"],
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2 + usize::from(self.factor))?;
        let gradient = inputs[0];
        expect_float("the gradient", &gradient)?;
        expect_dtype("the step's scalars", &inputs[1], DType::F32)?;
        expect_shape("the step's scalars", &inputs[1], &[Self::NUM_SCALARS])?;
        if self.factor {
            expect_dtype("the norm", &inputs[2], DType::F32)?;
            expect_shape("the norm", &inputs[2], &[2])?;
        }
        let parameter = TensorType {
            dtype: self.parameter,
            ..gradient
        };
        expect_float("the parameter", &parameter)?;
        expect(
            [self.parameter, self.parameter.accumulator()].contains(&gradient.dtype),
            || {
                format!(
                    "a gradient in {} for a parameter in {}",
                    gradient.dtype, self.parameter
                )
            },
        )?;
        expect(
            self.learning_rate_scale >= 0.0 && self.learning_rate_scale.is_finite(),
            || format!("a learning rate times {}", self.learning_rate_scale),
        )?;
        let moment = self.moments.moment(&parameter);
        let mut outputs = vec![parameter, moment, moment];
        if let Some(scales) = self.moments.scales(&parameter) {
            outputs.extend([scales; 2]);
        }
        if let Some(dtype) = self.copy {
            expect(dtype.is_float(), || {
                format!("a copy in {dtype}, expected a floating-point type")
            })?;
            outputs.push(TensorType { dtype, ..gradient });
        }
        Ok(outputs)
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // A square root and some more for each code.
        let each = match self.moments {
            MomentFormat::Full | MomentFormat::AsKept => 14,
            MomentFormat::EightBit => 26,
        };
        product([each, inputs[0].shape.elements() as u64])
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // Parameter and moments are read as well as written, the copy is only written.
        let read = &outputs[..outputs.len() - usize::from(self.copy.is_some())];
        let all = outputs.iter().chain(read).map(TensorType::bytes);
        sum([inputs[0].bytes(), sum(all)])
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let layout = self.layout();
        let states = [layout.m, layout.v].into_iter();
        let states = states.chain(layout.scales.into_iter().flatten());
        Cost::of([KernelCost {
            merges: true,
            state_bytes: sum(states.map(|output| outputs[output].bytes())),
            ..KernelCost::streamed(1, self.bytes(inputs, outputs))
        }])
    }

    fn without_factor(&self) -> Option<Op> {
        self.factor.then(|| {
            Op::from(Self {
                factor: false,
                ..self.clone()
            })
        })
    }
}
