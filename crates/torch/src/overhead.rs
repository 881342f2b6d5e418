//! What a process takes of a card outside PyTorch's allocator: the CUDA context, kernels that are loaded when they are
//! first used, and the handles of libraries.

use cinch_device::Generation;

use crate::eager::context::Libraries;
use crate::model::Prediction;

/// Bytes of a card that the allocator does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overhead {
    /// Once the context is up, before any tensor.
    pub context: u64,
    /// PyTorch's kernels and cuBLAS after the first steps.
    pub kernels: u64,
    /// cuDNN and its kernels, where it runs: attention, convolutions in fp16.
    pub cudnn: u64,
    /// Compaction of indices (`nonzero`), where it runs.
    pub nonzero: u64,
    /// bitsandbytes' cuBLASLt and its kernels for eight-bit integers, where they run.
    pub int8: u64,
    /// NCCL, where several ranks exchange: its first communicator.
    pub nccl: u64,
    /// Whether these were measured on such a card, or taken over from another.
    pub measured: bool,
    /// Where the figures come from, as a sentence for the user.
    pub basis: &'static str,
    /// Whether the safe figure is above the prediction. Without it the margin is taken elsewhere:
    /// there is one, not two.
    pub has_margin: bool,
}

/// An H200 with CUDA 13.0 and PyTorch 2.11: read from the driver over the runs in the fixtures.
pub const H200: Overhead = Overhead {
    context: 650_969_088,
    kernels: 130 << 20,
    cudnn: 16 << 20,
    nonzero: 4 << 20,
    int8: 64 << 20,
    nccl: 560 << 20,
    measured: true,
    basis: "measured on an H200 with CUDA 13.0 and PyTorch 2.11",
    has_margin: true,
};

/// Room for what no model knows: the addresses that the driver gives to segments, by which free blocks of one size are
/// chosen, and sizes that depend on the data. A share of what is reserved, and a part that small runs need.
const SAFETY_SHARE: u64 = 25;
const SAFETY_BYTES: u64 = 64 << 20;

/// The driver was seen to take managed memory in multiples of this.
const MANAGED_CHUNK: u64 = 128 << 20;

/// What is added to the reserved bytes of a run that was not measured.
pub const fn safety_margin(reserved: u64) -> u64 {
    reserved / SAFETY_SHARE + SAFETY_BYTES
}

impl Overhead {
    /// The overhead on a card of this generation; without one, the largest of all.
    ///
    /// Only Hopper was measured. A context holds the stacks of every thread that the card can run at once, so that it
    /// grows with the number of multiprocessors: the assumed sizes are estimates for the generation's largest cards,
    /// meant to be too high rather than too low. Kernels and libraries are taken over from the H200.
    pub fn of(generation: Option<Generation>) -> Overhead {
        let assumed = |mebibytes: u64, basis| Overhead {
            context: mebibytes << 20,
            measured: false,
            basis,
            ..H200
        };
        match generation {
            Some(Generation::Hopper) => H200,
            Some(Generation::Volta) => assumed(
                460,
                "assumed: a context of 460 MiB, estimated for a V100; kernels as on an H200",
            ),
            Some(Generation::Turing) => assumed(
                420,
                "assumed: a context of 420 MiB, estimated for an RTX 6000; kernels as on an H200",
            ),
            Some(Generation::Ampere) => assumed(
                540,
                "assumed: a context of 540 MiB, estimated for an A100; kernels as on an H200",
            ),
            Some(Generation::Ada) => assumed(
                540,
                "assumed: a context of 540 MiB, estimated for an RTX 4090; kernels as on an H200",
            ),
            Some(Generation::Blackwell) => assumed(
                840,
                "assumed: a context of 840 MiB, a third above the H200's for its larger chips; kernels as on an H200",
            ),
            Some(Generation::Cdna3) => assumed(
                1024,
                "assumed: 1 GiB for the ROCm runtime; the allocator's rules are those of CUDA",
            ),
            None => assumed(
                1024,
                "assumed: the card's generation is not known, so the largest context of all is taken",
            ),
        }
    }

    /// What the driver would show for the run: the allocator's segments and what lies outside them.
    pub fn device_bytes(&self, prediction: &Prediction) -> u64 {
        let paged = prediction.paged.next_multiple_of(MANAGED_CHUNK);
        prediction.reserved_at_end + paged + self.bytes(prediction.libraries)
    }

    /// The same without a margin of its own, for a budget that has one.
    pub fn without_margin(self) -> Overhead {
        Overhead {
            has_margin: false,
            ..self
        }
    }

    /// The figure to plan with, above the prediction by the safety margin.
    pub fn safe_bytes(&self, prediction: &Prediction) -> u64 {
        self.safe_of(prediction.peak_reserved, prediction.libraries)
    }

    /// The same of what a run with these libraries reserves.
    pub(crate) fn safe_of(&self, reserved: u64, libraries: Libraries) -> u64 {
        let margin = match self.has_margin {
            true => safety_margin(reserved),
            false => 0,
        };
        reserved + margin + self.bytes(libraries)
    }

    /// With more than this reserved the safe figure is above the budget, whatever libraries the run uses.
    pub fn most_reserved(&self, budget: u64) -> u64 {
        if !self.has_margin {
            return budget.saturating_sub(self.bytes(Libraries::default()));
        }
        let rest = budget.saturating_sub(SAFETY_BYTES + self.bytes(Libraries::default()));
        rest - rest / (SAFETY_SHARE + 1)
    }

    /// The overhead of a run that uses these libraries.
    pub fn bytes(&self, libraries: Libraries) -> u64 {
        let parts = [
            (libraries.cudnn, self.cudnn),
            (libraries.nonzero, self.nonzero),
            (libraries.int8, self.int8),
        ];
        let used = parts.iter().filter(|(is_used, _)| *is_used);
        self.context + self.kernels + used.map(|(_, bytes)| bytes).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_most_reserved_is_above_the_budget() {
        let safe = |reserved: u64| {
            reserved + reserved / SAFETY_SHARE + SAFETY_BYTES + H200.bytes(Libraries::default())
        };
        for budget in (0..200).map(|n| (8 << 30) + 12_345 * n) {
            let most = H200.most_reserved(budget);
            assert!(safe(most + 1) > budget);
            assert!(safe(most - 1) <= budget);
        }
        assert_eq!(H200.most_reserved(1 << 20), 0);
    }
}
