//! Generations of GPUs and what each can compute with.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// NVIDIA's number for what a chip can do: 8.0 is A100, 8.6 RTX 30, 9.0 Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

impl ComputeCapability {
    /// What cinch's kernels are written for: bf16 arithmetic and asynchronous copies begin here.
    pub const REQUIRED: Self = Self::new(8, 0);

    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// The generation of chips with this number; `None` for those before tensor cores and for
    /// numbers that no chip has yet.
    pub const fn generation(self) -> Option<Generation> {
        Some(match (self.major, self.minor) {
            (7, 0 | 2) => Generation::Volta,
            (7, 5) => Generation::Turing,
            (8, 9) => Generation::Ada,
            (8, _) => Generation::Ampere,
            (9, _) => Generation::Hopper,
            (10..=12, _) => Generation::Blackwell,
            _ => return None,
        })
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for ComputeCapability {
    type Err = std::num::ParseIntError;

    /// `8.6`, as `nvidia-smi` prints it; `9` is 9.0.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        Ok(Self::new(major.trim().parse()?, minor.trim().parse()?))
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A family of chips with the same kinds of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Generation {
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
    /// AMD's, which has no CUDA.
    Cdna3,
}

impl Generation {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Volta => "Volta",
            Self::Turing => "Turing",
            Self::Ampere => "Ampere",
            Self::Ada => "Ada",
            Self::Hopper => "Hopper",
            Self::Blackwell => "Blackwell",
            Self::Cdna3 => "CDNA 3",
        }
    }

    /// Whether the matrix units multiply bf16 and round single precision to tf32. Both came
    /// with Ampere; before it there is fp16 alone.
    pub const fn has_bf16(self) -> bool {
        !matches!(self, Self::Volta | Self::Turing)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_its_generation() {
        for (text, generation) in [
            ("6.1", None),
            ("7.0", Some(Generation::Volta)),
            ("7.5", Some(Generation::Turing)),
            ("8.0", Some(Generation::Ampere)),
            ("8.6", Some(Generation::Ampere)),
            ("8.9", Some(Generation::Ada)),
            ("9", Some(Generation::Hopper)),
            ("10.0", Some(Generation::Blackwell)),
            ("12.0", Some(Generation::Blackwell)),
            ("99.9", None),
        ] {
            let capability: ComputeCapability = text.parse().unwrap();
            assert_eq!(capability.generation(), generation, "{text}");
        }
        assert!("[N/A]".parse::<ComputeCapability>().is_err());
        assert!("8.".parse::<ComputeCapability>().is_err());
    }

    #[test]
    fn numbers_are_ordered_by_major_then_minor() {
        let turing = ComputeCapability::new(7, 5);
        assert!(turing < ComputeCapability::REQUIRED);
        assert!(ComputeCapability::new(8, 9) < ComputeCapability::new(9, 0));
        assert!(ComputeCapability::new(12, 0) > ComputeCapability::new(9, 0));
        assert_eq!(turing.to_string(), "7.5");
    }
}
