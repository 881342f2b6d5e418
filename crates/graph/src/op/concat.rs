//! Tensors side by side as one, and one cut into several: along columns, or along rows.

use super::{Declare, expect, expect_float, expect_inputs};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::{Shape, TensorType};

/// Which way tensors are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// Along the last dimension.
    Columns,
    /// Along the first.
    Rows,
}

impl Joined {
    /// The size along the joined dimension.
    fn size(self, shape: &Shape) -> usize {
        let dims = shape.dims();
        let size = match self {
            Self::Columns => dims.last(),
            Self::Rows => dims.first(),
        };
        size.copied().unwrap_or(1)
    }

    fn with_size(self, shape: &Shape, size: usize) -> Shape {
        let mut dims = shape.dims().to_vec();
        let joined = match self {
            Self::Columns => dims.last_mut(),
            Self::Rows => dims.first_mut(),
        };
        if let Some(joined) = joined {
            *joined = size;
        }
        Shape::new(&dims)
    }

    /// How often a part of this shape is copied, and how many elements at a time: what is joined
    /// along rows lies in one piece.
    pub fn pieces(self, shape: &Shape) -> (usize, usize) {
        match self {
            Self::Columns => (shape.rows(), shape.width()),
            Self::Rows => (1, shape.elements()),
        }
    }
}

/// Inputs: the parts that are there. Output: all parts one after the other, those that are not
/// there as zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Concat {
    pub joined: Joined,
    /// Each part's size along the joined dimension, and whether it is there.
    pub parts: Vec<(usize, bool)>,
}

/// Input: x. Outputs: its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    pub joined: Joined,
    /// Their sizes.
    pub parts: Vec<usize>,
}

impl Graph {
    /// Tensors side by side: `[.., a]` and `[.., b]` as `[.., a + b]`, or `[a, ..]` and `[b, ..]`
    /// as `[a + b, ..]`.
    pub fn concat(
        &mut self,
        name: &str,
        joined: Joined,
        parts: &[TensorId],
    ) -> Result<TensorId, GraphError> {
        let sizes = parts.iter().map(|&id| joined.size(&self.ty(id).shape));
        let op = Concat {
            joined,
            parts: sizes.map(|size| (size, true)).collect(),
        };
        Ok(self.emit(name, op, parts.to_vec())?[0])
    }

    /// The parts of a tensor, by their sizes.
    pub fn split(
        &mut self,
        name: &str,
        joined: Joined,
        x: TensorId,
        parts: &[usize],
    ) -> Result<Vec<TensorId>, GraphError> {
        let parts = parts.to_vec();
        self.emit(name, Split { joined, parts }, vec![x])
    }
}

impl Declare for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let present = self.parts.iter().filter(|(_, is_there)| *is_there);
        expect_inputs(inputs, present.clone().count())?;
        let Some(first) = inputs.first() else {
            return Err("joins nothing".to_owned());
        };
        for (index, (input, (size, _))) in inputs.iter().zip(present).enumerate() {
            expect_float("a part", input)?;
            let expected = self.joined.with_size(&first.shape, *size);
            let fits = input.shape == expected && input.dtype == first.dtype;
            expect(fits && input.shape.rank() > 0, || {
                format!(
                    "part {index} is {input}, expected {}{expected}",
                    first.dtype
                )
            })?;
        }
        let sizes = self.parts.iter().map(|(size, _)| *size);
        let size = sizes.fold(0, usize::saturating_add);
        let shape = self.joined.with_size(&first.shape, size);
        Ok(vec![TensorType::new(shape, first.dtype)])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let op = Split {
            joined: self.joined,
            parts: self.parts.iter().map(|(size, _)| *size).collect(),
        };
        let gradients = backward.emit(node, "parts", op, vec![dy])?;
        let present = self.parts.iter().zip(gradients);
        let present = present.filter(|((_, is_there), _)| *is_there);
        for (&input, (_, gradient)) in node.inputs.iter().zip(present) {
            backward.contribute(node, input, gradient)?;
        }
        Ok(())
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        copies(self.parts.len(), self.bytes(inputs, outputs))
    }
}

impl Declare for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 1)?;
        let x = &inputs[0];
        expect_float("x", x)?;
        let size = self.parts.iter().copied().fold(0, usize::saturating_add);
        let whole = self.joined.size(&x.shape);
        expect(size == whole && x.shape.rank() > 0, || {
            format!(
                "parts of {:?} in all {size}, but x is {}",
                self.parts, x.shape
            )
        })?;
        let part = |&size| TensorType::new(self.joined.with_size(&x.shape, size), x.dtype);
        Ok(self.parts.iter().map(part).collect())
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let outputs = node.outputs.iter();
        let gradients: Vec<_> = outputs.map(|&id| backward.gradient_of(id)).collect();
        let there = gradients.iter().map(Option::is_some);
        let op = Concat {
            joined: self.joined,
            parts: self.parts.iter().copied().zip(there).collect(),
        };
        let gradients = gradients.into_iter().flatten().collect();
        let dx = backward.emit(node, "input", op, gradients)?[0];
        backward.contribute(node, node.inputs[0], dx)
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        copies(self.parts.len(), self.bytes(inputs, outputs))
    }
}

/// A copy for each part.
fn copies(parts: usize, bytes: u64) -> Cost {
    Cost::of([KernelCost::streamed(parts as u32, bytes)])
}
