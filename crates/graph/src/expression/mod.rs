//! Scalar expressions: what a fused pointwise op computes for each element, as data. Executors
//! run one as a loop over tiles or as a generated kernel, and its derivative is another one.
//!
//! An [`Expression`] is a list of scalars, each made of earlier ones. Models do not write it: they
//! combine [`Expr`]s by operators, and equal parts, constants and factors of one are found on the
//! way.

mod broadcast;
mod build;
mod derivative;
#[cfg(test)]
mod tests;

pub use broadcast::Broadcast;
pub(crate) use build::Builder;
pub use build::{Expr, Term};
pub(crate) use derivative::adjoints;

use std::sync::Arc;

/// A number that can be compared and hashed: by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Number(u64);

impl Number {
    pub fn new(value: f64) -> Self {
        // Both zeros are one.
        Self(if value == 0.0 { 0.0 } else { value }.to_bits())
    }

    pub fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// The same number; no gradient goes through.
    Detach,
    Negate,
    Abs,
    Exp,
    /// Of what is at least [`SMALLEST`], so that 0·ln 0 is 0.
    Ln,
    Sqrt,
    /// 1/√x.
    InverseSqrt,
    Sigmoid,
    Tanh,
    /// ln(1 + eˣ).
    Softplus,
    /// Φ, the normal distribution function: GELU is x·Φ(x).
    NormalDistribution,
    Cosh,
    Sinh,
    /// The inverse of cosh, for x ≥ 1.
    Acosh,
}

/// The smallest number whose logarithm is taken: the smallest normal one of single precision.
pub const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Max,
    Min,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    Less,
    Equal,
}

/// One step of an expression; operands are the numbers of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// The element of an input that belongs to this place.
    Input(u32),
    Constant(Number),
    /// The number of the element's column.
    Column,
    /// What dropout multiplies this place by: 0 or 1/(1 − rate).
    Kept {
        stream: u32,
        rate: Number,
    },
    Unary(Unary, u32),
    Binary(Binary, u32, u32),
    /// `[a, b, then, otherwise]`: then where a compares so with b.
    Select(Comparison, [u32; 4]),
}

impl Scalar {
    /// The steps that this one reads.
    pub fn operands(&self) -> impl Iterator<Item = u32> {
        let (operands, count) = match *self {
            Self::Unary(_, a) => ([a, 0, 0, 0], 1),
            Self::Binary(_, a, b) => ([a, b, 0, 0], 2),
            Self::Select(_, all) => (all, 4),
            _ => ([0; 4], 0),
        };
        operands.into_iter().take(count)
    }

    /// Operations: a transcendental function counts as about ten.
    fn flops(&self) -> u64 {
        match self {
            Self::Input(_) | Self::Constant(_) | Self::Column => 0,
            Self::Kept { .. } => 10,
            Self::Unary(Unary::Detach | Unary::Negate | Unary::Abs, _) => 1,
            Self::Unary(Unary::Sqrt | Unary::InverseSqrt, _) => 4,
            Self::Unary(..) => 10,
            Self::Binary(Binary::Divide, ..) => 4,
            Self::Binary(..) => 1,
            Self::Select(..) => 2,
        }
    }
}

/// What is computed for each element.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expression {
    scalars: Arc<[Scalar]>,
    outputs: Arc<[u32]>,
    /// The memory cell of each scalar, while a tile is evaluated one scalar after the other.
    slots: Arc<[u32]>,
    num_slots: u32,
}

impl Expression {
    /// The most scalars and cells of an expression: what the CPU's threads set memory aside for.
    pub const MOST_SCALARS: usize = 512;
    pub const MOST_SLOTS: usize = 96;

    fn new(scalars: Vec<Scalar>, outputs: Vec<u32>) -> Self {
        let (slots, num_slots) = assign_slots(&scalars, &outputs);
        Self {
            scalars: scalars.into(),
            outputs: outputs.into(),
            slots: slots.into(),
            num_slots,
        }
    }

    pub fn scalars(&self) -> &[Scalar] {
        &self.scalars
    }

    /// The numbers of the scalars that are results.
    pub fn outputs(&self) -> &[u32] {
        &self.outputs
    }

    /// Where each scalar is kept until its last use; never where one of its operands is.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    pub fn num_slots(&self) -> usize {
        self.num_slots as usize
    }

    pub fn num_inputs(&self) -> usize {
        let inputs = self.scalars.iter().filter_map(|scalar| match scalar {
            Scalar::Input(input) => Some(*input as usize + 1),
            _ => None,
        });
        inputs.max().unwrap_or(0)
    }

    /// Whether it reads the random state.
    pub fn drops(&self) -> bool {
        let kept = |scalar: &Scalar| matches!(scalar, Scalar::Kept { .. });
        self.scalars.iter().any(kept)
    }

    /// Operations for one element.
    pub fn flops(&self) -> u64 {
        self.scalars.iter().map(Scalar::flops).sum()
    }

    /// Whether a scalar is the same at every place.
    pub fn is_constant(&self, scalar: u32) -> bool {
        matches!(self.scalars[scalar as usize], Scalar::Constant(_))
    }
}

/// A cell is free again after the last use of what it holds. Constants and inputs have cells of
/// their own: some are written once for all tiles.
fn assign_slots(scalars: &[Scalar], outputs: &[u32]) -> (Vec<u32>, u32) {
    let mut last_use = vec![0; scalars.len()];
    for (number, scalar) in scalars.iter().enumerate() {
        for operand in scalar.operands() {
            last_use[operand as usize] = number;
        }
    }
    for &output in outputs {
        last_use[output as usize] = usize::MAX;
    }
    let is_kept = |scalar: &Scalar| matches!(scalar, Scalar::Constant(_) | Scalar::Input(_));
    for (number, scalar) in scalars.iter().enumerate() {
        if is_kept(scalar) {
            last_use[number] = usize::MAX;
        }
    }
    let mut free: Vec<u32> = Vec::new();
    let mut slots = Vec::with_capacity(scalars.len());
    let mut count = 0;
    for (number, scalar) in scalars.iter().enumerate() {
        let used = if is_kept(scalar) { None } else { free.pop() };
        slots.push(used.unwrap_or_else(|| {
            count += 1;
            count - 1
        }));
        let mut ended: Vec<u32> = scalar.operands().collect();
        ended.sort_unstable();
        ended.dedup();
        let ended = ended
            .into_iter()
            .filter(|&o| last_use[o as usize] == number);
        free.extend(ended.map(|operand| slots[operand as usize]));
    }
    (slots, count)
}
