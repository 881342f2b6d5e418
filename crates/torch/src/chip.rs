//! What PyTorch asks of a card. By it kernels are chosen and work is cut, and with them the memory that they take.
//!
//! The rules are those of PyTorch 2.11 and the CUB that it is compiled with; each was compared with PyTorch itself on cards that
//! are not there (`tests/fixtures/rehearsed/cards.jsonl`).

use cinch_device::{Card, ComputeCapability};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chip {
    pub capability: ComputeCapability,
    pub multiprocessors: u64,
}

const KIB: u64 = 1 << 10;

impl Chip {
    /// The card on which the rules were first measured; what is predicted where no other is known.
    pub const H200: Chip = Chip {
        capability: ComputeCapability::new(9, 0),
        multiprocessors: 132,
    };

    /// `None` for what has no CUDA.
    pub fn of(card: &Card) -> Option<Chip> {
        Some(Chip {
            capability: card.compute_capability?,
            multiprocessors: card.multiprocessors as u64,
        })
    }

    fn is_at_least(self, major: u32, minor: u32) -> bool {
        self.capability >= ComputeCapability::new(major, minor)
    }

    /// Whether bf16 is more than emulated.
    pub fn has_bf16(self) -> bool {
        self.is_at_least(8, 0)
    }

    /// Threads that a multiprocessor holds, as NVIDIA's programming guide tabulates them.
    pub fn threads_per_multiprocessor(self) -> u64 {
        match (self.capability.major, self.capability.minor) {
            (7, 5) => 1024,
            (8, 1..) | (12.., _) => 1536,
            _ => 2048,
        }
    }

    /// Whether a block may have the shared memory that attention's widest tiles want: chips for computing have it.
    pub(crate) fn has_large_shared_memory(self) -> bool {
        matches!(
            (self.capability.major, self.capability.minor),
            (8, 0 | 7) | (9..=11, _)
        )
    }

    /// What each cuBLAS handle is given: two parts of 4 MiB and eight of 16 KiB, or 32 MiB on Hopper.
    pub(crate) fn cublas_workspace(self) -> u64 {
        match self.capability.major {
            9 => 32 * KIB * KIB,
            _ => 2 * 4096 * KIB + 8 * 16 * KIB,
        }
    }

    /// Whether attention goes to cuDNN first.
    pub(crate) fn prefers_cudnn(self) -> bool {
        matches!(self.capability.major, 9 | 10)
    }

    /// The widest heads of cuDNN's attention.
    pub(crate) fn widest_in_cudnn(self) -> u64 {
        match self.capability.major {
            9 => 256,
            _ => 128,
        }
    }

    /// Whether cuDNN's attention writes down which weights are left out.
    pub(crate) fn writes_dropout(self) -> bool {
        self.capability.major >= 10
    }

    /// Whether flash attention has kernels for the card.
    pub(crate) fn has_flash_attention(self) -> bool {
        self.is_at_least(8, 0)
    }

    /// Whether flash attention's backward has too little shared memory for heads of some widths.
    pub(crate) fn narrows_flash_backward(self) -> bool {
        matches!(
            (self.capability.major, self.capability.minor),
            (8, 6..=9) | (12, _)
        )
    }

    /// Whether memory-efficient attention has tiles of its own for heads of up to 96: chips for graphics before Blackwell.
    pub(crate) fn has_tiles_of_96(self) -> bool {
        matches!((self.capability.major, self.capability.minor), (8, 6 | 9))
    }

    /// Whether memory-efficient attention sums rows by itself whatever their width.
    pub(crate) fn is_after_volta(self) -> bool {
        self.is_at_least(7, 5)
    }

    /// Keys that a block of CUB's radix sort takes, of pairs of 64-bit numbers.
    pub(crate) fn sorted_by_a_block(self) -> u64 {
        const THREADS: u64 = 256;
        THREADS
            * match self.capability.major {
                ..=7 => 11,
                8 => 15,
                _ => 18,
            }
    }

    /// The same of CUB's selection of unique keys.
    pub(crate) fn selected_by_a_block(self) -> u64 {
        match (self.capability.major, self.capability.minor) {
            (8, 0) => 1792,
            (9, _) => 4480,
            (10.., _) => 3840,
            _ => 320,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chip(name: &str) -> Chip {
        Chip::of(&cinch_device::find(name).unwrap().card()).unwrap()
    }

    #[test]
    fn the_catalogue_has_the_measured_card() {
        assert_eq!(chip("H200"), Chip::H200);
    }

    /// What PyTorch 2.11 gives its handles on each generation.
    #[test]
    fn hopper_alone_has_the_large_workspace() {
        for name in ["T4", "V100 SXM2 16GB", "A100 SXM4 40GB", "RTX 4090", "B200"] {
            assert_eq!(chip(name).cublas_workspace(), 8_519_680, "{name}");
        }
        for name in ["H100 PCIe", "H200"] {
            assert_eq!(chip(name).cublas_workspace(), 33_554_432, "{name}");
        }
    }

    #[test]
    fn a_card_without_cuda_has_no_chip() {
        assert_eq!(
            Chip::of(&cinch_device::find("MI300X").unwrap().card()),
            None
        );
    }
}
