//! Element types and shapes.

use std::fmt;

/// What a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// Gradient checks, and sums over all gradients.
    F64,
    F32,
    Bf16,
    F16,
    I32,
    /// Codes: numbers of a block in units of its scale.
    U8,
}

impl DType {
    pub fn size(self) -> u64 {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    pub fn is_float(self) -> bool {
        !matches!(self, Self::I32 | Self::U8)
    }

    /// What sums, statistics and master weights are kept in when this is computed in: at
    /// least single precision.
    pub fn accumulator(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

/// Up to four dimensions, outermost first; the last one is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Self::MAX_RANK],
    rank: u8,
}

impl Shape {
    pub const MAX_RANK: usize = 4;

    /// # Panics
    /// With more than four dimensions: no op has them.
    pub fn new(dims: &[usize]) -> Self {
        assert!(
            dims.len() <= Self::MAX_RANK,
            "a shape of rank {}",
            dims.len()
        );
        let mut shape = Self {
            dims: [1; Self::MAX_RANK],
            rank: dims.len() as u8,
        };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }

    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// The number of elements, or the largest number there is: an absurd size has to stay
    /// absurd, not wrap around to one that fits.
    pub fn elements(&self) -> usize {
        product(self.dims())
    }

    /// The last dimension; 1 for a scalar.
    pub fn width(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The product of all dimensions but the last: a matrix's rows.
    pub fn rows(&self) -> usize {
        let dims = self.dims();
        product(&dims[..dims.len().saturating_sub(1)])
    }

    /// The same shape with another last dimension.
    pub fn with_width(&self, width: usize) -> Self {
        let mut shape = *self;
        let last = shape.rank().max(1) - 1;
        shape.dims[last] = width;
        shape
    }

    /// The same shape without its last dimension.
    pub fn without_width(&self) -> Self {
        Self::new(&self.dims()[..self.rank().max(1) - 1])
    }
}

fn product(dims: &[usize]) -> usize {
    dims.iter().fold(1, |count, &dim| count.saturating_mul(dim))
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::new(&dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.dims().iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// A shape of elements of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    pub shape: Shape,
    pub dtype: DType,
}

impl TensorType {
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
        }
    }

    pub fn bytes(&self) -> u64 {
        (self.shape.elements() as u64).saturating_mul(self.dtype.size())
    }

    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    pub fn width(&self) -> usize {
        self.shape.width()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
