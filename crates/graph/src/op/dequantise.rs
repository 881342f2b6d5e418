//! Frozen weights that are kept as codes, and the op that turns codes into numbers.
//!
//! The numbers are a transient matrix, and a recipe of the codes: they exist while one product
//! reads them and are made again for the backward.

use super::{Declare, Op, Operand, Recipe, expect, expect_inputs, expect_same, product};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::Node;
use crate::types::{DType, Shape, TensorType};

/// How a frozen matrix is kept in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantisation {
    /// bitsandbytes' 4-bit normal float: two codes a byte, blocks of [`Self::NF4_BLOCK`] numbers
    /// in units of their largest. With `double` those are codes of one byte themselves, less
    /// their mean and in units of the largest of [`Self::SCALE_BLOCK`] of them.
    Nf4 { double: bool },
    /// A signed byte a number, in units of the largest of its row.
    Int8,
}

/// The tensors that hold a quantised matrix.
pub struct QuantisedTensors {
    pub codes: TensorType,
    /// With the ending of their names.
    pub scales: Vec<(&'static str, TensorType)>,
}

impl Quantisation {
    /// Numbers that share a scale in four bits.
    pub const NF4_BLOCK: usize = 64;
    /// Scales that share a scale, where they are codes themselves.
    pub const SCALE_BLOCK: usize = 256;

    pub fn tensors(self, shape: &Shape) -> QuantisedTensors {
        let elements = shape.elements();
        let blocks = elements.div_ceil(Self::NF4_BLOCK);
        let list = |len: usize, dtype| TensorType::new([len], dtype);
        match self {
            Self::Nf4 { double } => QuantisedTensors {
                codes: list(elements.div_ceil(2), DType::U8),
                scales: if double {
                    vec![
                        ("scales", list(blocks, DType::U8)),
                        (
                            "scale_units",
                            list(blocks.div_ceil(Self::SCALE_BLOCK), DType::F32),
                        ),
                        ("scale_mean", list(1, DType::F32)),
                    ]
                } else {
                    vec![("scales", list(blocks, DType::F32))]
                },
            },
            Self::Int8 => QuantisedTensors {
                codes: list(elements, DType::U8),
                scales: vec![("scales", list(shape.rows(), DType::F32))],
            },
        }
    }
}

/// Inputs: codes, then their scales as [`Quantisation::tensors`] lists them. Output: the numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Dequantise {
    pub quantisation: Quantisation,
    pub shape: Shape,
    pub dtype: DType,
}

impl Declare for Dequantise {
    fn name(&self) -> &'static str {
        "dequantise"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let tensors = self.quantisation.tensors(&self.shape);
        expect_inputs(inputs, 1 + tensors.scales.len())?;
        expect_same("the codes", &inputs[0], &tensors.codes)?;
        for ((kind, ty), input) in tensors.scales.iter().zip(&inputs[1..]) {
            expect_same(kind, input, ty)?;
        }
        expect(self.dtype.is_float(), || {
            format!("numbers in {}, expected a floating-point type", self.dtype)
        })?;
        Ok(vec![TensorType::new(self.shape, self.dtype)])
    }

    /// Codes are not trained.
    fn backward(&self, _: &mut Backward<'_>, _: &Node) -> Result<(), GraphError> {
        Ok(())
    }

    fn recipe(&self, _output: usize) -> Option<Recipe> {
        let inputs = 1 + self.quantisation.tensors(&self.shape).scales.len();
        Some(Recipe {
            op: Op::from(self.clone()),
            inputs: (0..inputs).map(Operand::Input).collect(),
            output: 0,
        })
    }

    fn flops(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product([2, outputs[0].shape.elements() as u64])
    }
}
