//! The GPUs that cinch knows: memory, rates, and what each can be used for.
//!
//! Rates are data-sheet peaks times the share of them that programs reach. The shares are those
//! of the one card that was measured, the H200, so that a prediction for another card errs the
//! way its data sheet does.

mod table;

pub use table::CATALOGUE;

use cinch_graph::Target;
use serde::Serialize;

use crate::architecture::{ComputeCapability, Generation};
use crate::card::Card;
use crate::fabric::Fabric;

/// One GPU as it can be bought.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    pub name: &'static str,
    /// Names under which drivers and shops know it besides.
    pub aliases: &'static [&'static str],
    pub generation: Generation,
    /// `None` for what is not of NVIDIA.
    pub compute_capability: Option<ComputeCapability>,
    pub memory: CardMemory,
    /// What the data sheet promises.
    pub peaks: Peaks,
    /// What was reached in a measurement, where there was one.
    pub measured: Option<Peaks>,
    pub multiprocessors: usize,
    pub link: Link,
    /// What joins it to others.
    pub fabric: Fabric,
}

/// The memory of a card, from the box to what a program gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardMemory {
    /// What the name of the card says.
    pub marketed_gb: u64,
    /// The total that `nvidia-smi` shows, in MiB.
    pub shown_mib: u64,
    /// The total that a CUDA program sees, in MiB: without what the driver keeps for itself
    /// and, where there are no extra chips for it, without the bits of error correction.
    pub usable_mib: u64,
    pub provenance: Provenance,
}

impl CardMemory {
    pub const fn shown_bytes(self) -> u64 {
        self.shown_mib << 20
    }

    pub const fn usable_bytes(self) -> u64 {
        self.usable_mib << 20
    }
}

/// Rates of dense arithmetic and of memory, per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Matrix products of fp16 numbers, summed in fp32 as training does it. GeForce cards do
    /// this at half the rate that fp16 sums would have.
    pub half_flops: f64,
    /// Of numbers rounded to tf32; `None` where the matrix units do not have it.
    pub tf32_flops: Option<f64>,
    pub single_flops: f64,
    pub bandwidth: f64,
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// On the card itself, by cinch.
    Measured,
    /// The maker's figure; rates are taken times the share that the H200 reaches of its own.
    DataSheet,
    /// What drivers print on such cards.
    Reported,
    /// Between reports that differ, or by cards of the same kind: the lower figure.
    Assumed,
}

impl Provenance {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::DataSheet => "data sheet",
            Self::Reported => "reported",
            Self::Assumed => "assumed",
        }
    }
}

/// How the card reaches host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Pcie {
        generation: u32,
        lanes: u32,
    },
    /// NVLink-C2C, between the two chips of a Grace Hopper.
    ChipToChip,
}

impl Link {
    /// Bytes per second in one direction as the standard has them. A PCIe lane carries 8, 16
    /// and 32 Gbit/s in generations 3 to 5, 128 of 130 bits being data.
    pub const fn peak(self) -> f64 {
        match self {
            Self::Pcie { generation, lanes } => {
                let gigabits = (1_u32 << generation) as f64;
                gigabits * 1e9 / 8.0 * (128.0 / 130.0) * lanes as f64
            }
            Self::ChipToChip => 450e9,
        }
    }

    /// What large copies from pinned memory reach; headers of packets and credits take the rest.
    pub const fn reached(self) -> f64 {
        self.peak() * LINK_SHARE
    }
}

/// The share of a link's peak that copies reach.
pub(crate) const LINK_SHARE: f64 = 0.8;

/// Whether cinch trains on a card, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Training {
    Supported,
    /// The card has no CUDA.
    NoCuda,
    /// The chip is older than what the kernels are written for.
    TooOld(ComputeCapability),
}

impl Training {
    pub const fn is_supported(self) -> bool {
        matches!(self, Self::Supported)
    }

    /// Why the card is for planning only.
    pub fn reason(self) -> Option<String> {
        match self {
            Self::Supported => None,
            Self::NoCuda => Some("no CUDA: cinch's kernels run on NVIDIA GPUs".to_owned()),
            Self::TooOld(found) => Some(format!(
                "compute capability {found}: cinch's kernels need {} or later",
                ComputeCapability::REQUIRED
            )),
        }
    }

    /// What can be done on a chip with that number.
    pub fn on(compute_capability: Option<ComputeCapability>) -> Self {
        match compute_capability {
            None => Self::NoCuda,
            Some(found) if found < ComputeCapability::REQUIRED => Self::TooOld(found),
            Some(_) => Self::Supported,
        }
    }
}

impl Gpu {
    pub fn training(&self) -> Training {
        Training::on(self.compute_capability)
    }

    /// Rates as programs reach them.
    pub fn card(&self) -> Card {
        let reached = self.reached();
        Card {
            name: self.name.to_owned(),
            target: Target::Cuda,
            half_flops: reached.half_flops,
            bf16_flops: self.generation.has_bf16().then_some(reached.half_flops),
            tf32_flops: reached.tf32_flops.unwrap_or(reached.single_flops),
            single_flops: reached.single_flops,
            sigmoids: None,
            bandwidth: reached.bandwidth,
            multiprocessors: self.multiprocessors,
            cache_bandwidth: None,
            host_bandwidth: self.link.reached(),
            fabric: self.fabric,
            compute_capability: self.compute_capability,
            generation: Some(self.generation),
        }
    }

    /// Where the rates of [`Gpu::card`] come from.
    pub const fn rates_provenance(&self) -> Provenance {
        match self.measured {
            Some(_) => Provenance::Measured,
            None => Provenance::DataSheet,
        }
    }

    fn reached(&self) -> Peaks {
        if let Some(measured) = self.measured {
            return measured;
        }
        let (peak, reached) = (table::H200_PEAKS, table::H200_MEASURED);
        let matrix = reached.half_flops / peak.half_flops;
        Peaks {
            half_flops: self.peaks.half_flops * matrix,
            tf32_flops: self.peaks.tf32_flops.map(|flops| flops * matrix),
            single_flops: self.peaks.single_flops * (reached.single_flops / peak.single_flops),
            bandwidth: self.peaks.bandwidth * (reached.bandwidth / peak.bandwidth),
        }
    }
}

#[cfg(test)]
mod tests;
