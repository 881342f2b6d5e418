//! Element types, as far as their sizes and promotion matter.

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    Float32,
    BFloat16,
    Float16,
    Int64,
    Int32,
    UInt8,
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            DType::Int64 => 8,
            DType::Float32 | DType::Int32 => 4,
            DType::BFloat16 | DType::Float16 => 2,
            DType::UInt8 | DType::Bool => 1,
        }
    }

    pub fn is_floating(self) -> bool {
        matches!(self, DType::Float32 | DType::BFloat16 | DType::Float16)
    }

    /// Whether autocast may lower this type's operands, and raise them again for fp32 ops.
    pub fn is_half(self) -> bool {
        matches!(self, DType::BFloat16 | DType::Float16)
    }

    /// What an op over both types computes in: the wider category first, then the wider type;
    /// the two half types meet in fp32.
    pub fn promote(self, other: DType) -> DType {
        if self == other {
            return self;
        }
        match (self.is_floating(), other.is_floating()) {
            (true, false) => self,
            (false, true) => other,
            (true, true) => DType::Float32,
            (false, false) => {
                if self == DType::Bool {
                    other
                } else if other == DType::Bool || self.size() >= other.size() {
                    self
                } else {
                    other
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DType::{self, *};

    #[test]
    fn promotion_follows_category_then_width() {
        // Pairs and results as torch.promote_types gives them.
        let table: [(DType, DType, DType); 6] = [
            (Float32, BFloat16, Float32),
            (BFloat16, Float16, Float32),
            (Int64, Float16, Float16),
            (Bool, Int32, Int32),
            (Int64, Int32, Int64),
            (UInt8, Bool, UInt8),
        ];
        for (a, b, result) in table {
            assert_eq!(a.promote(b), result);
            assert_eq!(b.promote(a), result);
        }
    }
}
