//! The table itself. One line a card; to add one, copy the line of a card of its generation.
//!
//! Columns: name, chip, memory (GB in the name, MiB that `nvidia-smi` shows, MiB that a program
//! sees), peaks (TFLOP/s of fp16 with fp32 sums, tf32 and fp32 without sparsity; GB/s),
//! multiprocessors, link to the host; boards that join several cards say by what. Laptop chips run at the clock of their usual power.

use super::{CardMemory, Gpu, Link, Peaks, Provenance};
use crate::architecture::{ComputeCapability, Generation};
use crate::fabric::Fabric;

const SM70: ComputeCapability = ComputeCapability::new(7, 0);
const SM75: ComputeCapability = ComputeCapability::new(7, 5);
const SM80: ComputeCapability = ComputeCapability::new(8, 0);
const SM86: ComputeCapability = ComputeCapability::new(8, 6);
const SM89: ComputeCapability = ComputeCapability::new(8, 9);
const SM90: ComputeCapability = ComputeCapability::new(9, 0);
const SM100: ComputeCapability = ComputeCapability::new(10, 0);
const SM120: ComputeCapability = ComputeCapability::new(12, 0);

const PCIE3: Link = pcie(3, 16);
const PCIE4: Link = pcie(4, 16);
const PCIE4_X8: Link = pcie(4, 8);
const PCIE5: Link = pcie(5, 16);
const PCIE5_X8: Link = pcie(5, 8);

pub const H200_PEAKS: Peaks = tensor(989.0, 494.5, 67.0, 4800.0);

/// Products of random numbers, which draw more power than zeros and so run slower; a large copy.
pub const H200_MEASURED: Peaks = tensor(790.0, 395.0, 51.0, 4300.0);

/// Every card that is known: by generation, then from the smallest memory to the largest.
#[rustfmt::skip]
pub static CATALOGUE: &[Gpu] = &[
    // Volta and Turing: planning only, and of the 16-bit types fp16 only.
    nvidia("RTX 2080 Ti",       SM75,  assumed( 11,  11264,  10823),   half( 53.8, 13.4, 616.0),              68, PCIE3),
    nvidia("T4",                SM75,  assumed( 16,  15360,  14909),   half( 65.0,  8.1, 320.0),              40, PCIE3),
    nvidia("V100 PCIe 16GB",    SM70,  reported( 16,  16384,  16148),  half(112.0, 14.0, 900.0),              80, PCIE3),
    nvidia("V100 SXM2 16GB",    SM70,  reported( 16,  16384,  16148),  half(125.0, 15.7, 900.0),              80, PCIE3).joined(Fabric::V100_SXM),
    nvidia("Quadro RTX 6000",   SM75,  reported( 24,  24576,  24207),  half(130.5, 16.3, 672.0),              72, PCIE3),
    nvidia("V100 PCIe 32GB",    SM70,  reported( 32,  32768,  32491),  half(112.0, 14.0, 900.0),              80, PCIE3),
    nvidia("V100 SXM2 32GB",    SM70,  reported( 32,  32768,  32491),  half(125.0, 15.7, 900.0),              80, PCIE3).also(&["V100 SXM3 32GB"]).joined(Fabric::V100_SXM),

    // Ampere.
    nvidia("RTX 3060 Laptop",   SM86,  assumed(  6,   6144,   5795),   tensor(  21.8,   10.9,  10.9,  336.0),  30, PCIE4_X8),
    nvidia("RTX 3060 Ti",       SM86,  assumed(  8,   8192,   7843),   tensor(  32.4,   16.2,  16.2,  448.0),  38, PCIE4),
    nvidia("RTX 3070 Laptop",   SM86,  assumed(  8,   8192,   7843),   tensor(  32.0,   16.0,  16.0,  448.0),  40, PCIE4_X8),
    nvidia("RTX 3070",          SM86,  assumed(  8,   8192,   7843),   tensor(  40.6,   20.3,  20.3,  448.0),  46, PCIE4),
    nvidia("RTX 3070 Ti",       SM86,  assumed(  8,   8192,   7843),   tensor(  43.4,   21.7,  21.7,  608.0),  48, PCIE4),
    nvidia("RTX 3080 10GB",     SM86,  assumed( 10,  10240,   9861),   tensor(  59.6,   29.8,  29.8,  760.0),  68, PCIE4),
    nvidia("RTX 3060",          SM86,  assumed( 12,  12288,  11909),   tensor(  25.4,   12.7,  12.7,  360.0),  28, PCIE4),
    nvidia("RTX 3080 12GB",     SM86,  assumed( 12,  12288,  11909),   tensor(  61.2,   30.6,  30.6,  912.0),  70, PCIE4),
    nvidia("RTX 3080 Ti",       SM86,  assumed( 12,  12288,  11909),   tensor(  68.2,   34.1,  34.1,  912.0),  80, PCIE4),
    nvidia("RTX 3080 Laptop",   SM86,  assumed( 16,  16384,  15974),   tensor(  38.0,   19.0,  19.0,  448.0),  48, PCIE4_X8),
    nvidia("A10",               SM86,  reported( 24,  23028,  22568),  tensor( 125.0,   62.5,  31.2,  600.0),  72, PCIE4),
    nvidia("A10G",              SM86,  reported( 24,  23028,  22568),  tensor(  70.0,   35.0,  35.0,  600.0),  80, PCIE4),
    nvidia("RTX 3090",          SM86,  reported( 24,  24576,  24125),  tensor(  71.2,   35.6,  35.6,  936.0),  82, PCIE4),
    nvidia("RTX 3090 Ti",       SM86,  assumed( 24,  24564,  24115),   tensor(  80.0,   40.0,  40.0, 1008.0),  84, PCIE4),
    nvidia("A100 PCIe 40GB",    SM80,  reported( 40,  40960,  40335),  tensor( 312.0,  156.0,  19.5, 1555.0), 108, PCIE4),
    nvidia("A100 SXM4 40GB",    SM80,  reported( 40,  40960,  40335),  tensor( 312.0,  156.0,  19.5, 1555.0), 108, PCIE4).joined(Fabric::A100_SXM),
    nvidia("A40",               SM86,  reported( 48,  46068,  45404),  tensor( 149.7,   74.8,  37.4,  696.0),  84, PCIE4),
    nvidia("RTX A6000",         SM86,  reported( 48,  49140,  48547),  tensor( 154.8,   77.4,  38.7,  768.0),  84, PCIE4),
    nvidia("A100 PCIe 80GB",    SM80,  reported( 80,  81920,  81049),  tensor( 312.0,  156.0,  19.5, 1935.0), 108, PCIE4),
    nvidia("A100 SXM4 80GB",    SM80,  reported( 80,  81920,  81049),  tensor( 312.0,  156.0,  19.5, 2039.0), 108, PCIE4).joined(Fabric::A100_SXM),

    // Ada.
    nvidia("RTX 4060 Laptop",   SM89,  assumed(  8,   8188,   7792),   tensor(  23.2,   11.6,  11.6,  256.0),  24, PCIE4_X8),
    nvidia("RTX 4060",          SM89,  assumed(  8,   8188,   7792),   tensor(  30.2,   15.1,  15.1,  272.0),  24, PCIE4_X8),
    nvidia("RTX 4070 Laptop",   SM89,  assumed(  8,   8188,   7792),   tensor(  31.2,   15.6,  15.6,  256.0),  36, PCIE4_X8),
    nvidia("RTX 4060 Ti 8GB",   SM89,  assumed(  8,   8188,   7792),   tensor(  44.2,   22.1,  22.1,  288.0),  34, PCIE4_X8),
    nvidia("RTX 4080 Laptop",   SM89,  assumed( 12,  12282,  11868),   tensor(  49.4,   24.7,  24.7,  432.0),  58, PCIE4_X8),
    nvidia("RTX 4070",          SM89,  assumed( 12,  12282,  11868),   tensor(  58.2,   29.1,  29.1,  504.0),  46, PCIE4),
    nvidia("RTX 4070 Super",    SM89,  assumed( 12,  12282,  11868),   tensor(  71.0,   35.5,  35.5,  504.0),  56, PCIE4),
    nvidia("RTX 4070 Ti",       SM89,  assumed( 12,  12282,  11868),   tensor(  80.2,   40.1,  40.1,  504.0),  60, PCIE4),
    nvidia("RTX 4060 Ti 16GB",  SM89,  reported( 16,  16380,  15923),  tensor(  44.2,   22.1,  22.1,  288.0),  34, PCIE4_X8),
    nvidia("RTX 4090 Laptop",   SM89,  assumed( 16,  16376,  15923),   tensor(  66.0,   33.0,  33.0,  576.0),  76, PCIE4),
    nvidia("RTX 4070 Ti Super", SM89,  assumed( 16,  16376,  15923),   tensor(  88.2,   44.1,  44.1,  672.0),  66, PCIE4),
    nvidia("RTX 4080",          SM89,  assumed( 16,  16376,  15923),   tensor(  97.4,   48.7,  48.7,  717.0),  76, PCIE4),
    nvidia("RTX 4080 Super",    SM89,  assumed( 16,  16376,  15923),   tensor( 104.4,   52.2,  52.2,  736.0),  80, PCIE4),
    nvidia("L4",                SM89,  reported( 24,  23034,  22558),  tensor( 121.0,   60.5,  30.3,  300.0),  58, PCIE4),
    nvidia("RTX 4090",          SM89,  reported( 24,  24564,  24084),  tensor( 165.2,   82.6,  82.6, 1008.0), 128, PCIE4),
    nvidia("L40",               SM89,  assumed( 48,  46068,  45383),   tensor( 181.0,   90.5,  90.5,  864.0), 142, PCIE4),
    nvidia("L40S",              SM89,  reported( 48,  46068,  45383),  tensor( 362.0,  183.0,  91.6,  864.0), 142, PCIE4),
    nvidia("RTX 6000 Ada",      SM89,  reported( 48,  49140,  48506),  tensor( 364.2,  182.1,  91.1,  960.0), 142, PCIE4),

    // Hopper. Drivers call the SXM board of the H100 by its memory alone, and a Grace Hopper by the
    // memory of its CPU.
    nvidia("H100 PCIe",         SM90,  reported( 80,  81559,  80998),  tensor( 756.0,  378.0,  51.2, 2039.0), 114, PCIE5),
    nvidia("H100 SXM5",         SM90,  reported( 80,  81559,  80998),  tensor( 989.0,  494.5,  67.0, 3350.0), 132, PCIE5).also(&["H100 80GB HBM3"]).joined(Fabric::HOPPER_SXM),
    nvidia("H100 NVL",          SM90,  assumed( 94,  95830,  95232),   tensor( 835.0,  417.5,  60.0, 3938.0), 132, PCIE5),
    nvidia("GH200 96GB",        SM90,  assumed( 96,  97871,  96768),   tensor( 989.0,  494.5,  67.0, 4000.0), 132, Link::ChipToChip).also(&["GH200 480GB"]).joined(Fabric::HOPPER_SXM),
    nvidia("H200",              SM90,  reported(141, 143771, 143073),  H200_PEAKS,                           132, PCIE5).measured(H200_MEASURED).joined(Fabric::HOPPER_SXM),
    nvidia("H200 NVL",          SM90,  assumed(141, 143771, 143073),   tensor( 835.0,  417.5,  60.0, 4800.0), 132, PCIE5),
    nvidia("GH200 144GB",       SM90,  assumed(144, 143771, 143073),   tensor( 989.0,  494.5,  67.0, 4900.0), 132, Link::ChipToChip).joined(Fabric::HOPPER_SXM),

    // Blackwell.
    nvidia("RTX 5060",          SM120, assumed(  8,   8151,   7710),   tensor(  38.4,   19.2,  19.2,  448.0),  30, PCIE5_X8),
    nvidia("RTX 5060 Ti 8GB",   SM120, assumed(  8,   8151,   7710),   tensor(  47.4,   23.7,  23.7,  448.0),  36, PCIE5_X8),
    nvidia("RTX 5070",          SM120, assumed( 12,  12227,  11765),   tensor(  61.8,   30.9,  30.9,  672.0),  48, PCIE5),
    nvidia("RTX 5060 Ti 16GB",  SM120, assumed( 16,  16303,  15841),   tensor(  47.4,   23.7,  23.7,  448.0),  36, PCIE5_X8),
    nvidia("RTX 5070 Ti",       SM120, assumed( 16,  16303,  15841),   tensor(  87.8,   43.9,  43.9,  896.0),  70, PCIE5),
    nvidia("RTX 5080",          SM120, assumed( 16,  16303,  15841),   tensor( 112.6,   56.3,  56.3,  960.0),  84, PCIE5),
    nvidia("RTX 5090 Laptop",   SM120, assumed( 24,  24463,  23961),   tensor(  63.6,   31.8,  31.8,  896.0),  82, PCIE5),
    nvidia("RTX 5090",          SM120, reported( 32,  32607,  32112),  tensor( 209.6,  104.8, 104.8, 1792.0), 170, PCIE5),
    nvidia("B200",              SM100, reported(180, 183359, 182630),  tensor(2250.0, 1125.0,  75.0, 7670.0), 148, PCIE5).joined(Fabric::BLACKWELL_SXM),

    // AMD's, for planning.
    amd("MI300X", Generation::Cdna3, assumed(192, 196592, 196096), tensor(1307.0, 653.7, 163.4, 5300.0), 304, PCIE5).joined(Fabric::MI300X),
];

const fn pcie(generation: u32, lanes: u32) -> Link {
    Link::Pcie { generation, lanes }
}

const fn reported(marketed_gb: u64, shown_mib: u64, usable_mib: u64) -> CardMemory {
    CardMemory {
        marketed_gb,
        shown_mib,
        usable_mib,
        provenance: Provenance::Reported,
    }
}

const fn assumed(marketed_gb: u64, shown_mib: u64, usable_mib: u64) -> CardMemory {
    CardMemory {
        provenance: Provenance::Assumed,
        ..reported(marketed_gb, shown_mib, usable_mib)
    }
}

/// A card whose matrix units take fp16, bf16 and tf32.
const fn tensor(half: f64, tf32: f64, single: f64, bandwidth: f64) -> Peaks {
    Peaks {
        half_flops: half * 1e12,
        tf32_flops: Some(tf32 * 1e12),
        single_flops: single * 1e12,
        bandwidth: bandwidth * 1e9,
    }
}

/// A card whose matrix units take fp16 alone.
const fn half(half: f64, single: f64, bandwidth: f64) -> Peaks {
    Peaks {
        tf32_flops: None,
        ..tensor(half, 0.0, single, bandwidth)
    }
}

const fn nvidia(
    name: &'static str,
    chip: ComputeCapability,
    memory: CardMemory,
    peaks: Peaks,
    multiprocessors: usize,
    link: Link,
) -> Gpu {
    let Some(generation) = chip.generation() else {
        panic!("the chip of this line has no generation");
    };
    Gpu {
        compute_capability: Some(chip),
        ..amd(name, generation, memory, peaks, multiprocessors, link)
    }
}

const fn amd(
    name: &'static str,
    generation: Generation,
    memory: CardMemory,
    peaks: Peaks,
    multiprocessors: usize,
    link: Link,
) -> Gpu {
    Gpu {
        name,
        aliases: &[],
        generation,
        compute_capability: None,
        memory,
        peaks,
        measured: None,
        multiprocessors,
        link,
        fabric: match link {
            Link::Pcie { generation, .. } => Fabric::slots(generation),
            Link::ChipToChip => Fabric::HOPPER_SXM,
        },
    }
}

impl Gpu {
    const fn measured(self, measured: Peaks) -> Self {
        Self {
            measured: Some(measured),
            ..self
        }
    }

    /// On a board that joins several.
    const fn joined(self, fabric: Fabric) -> Self {
        Self { fabric, ..self }
    }

    const fn also(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }
}
