//! What a processor can do: the rates that a step's time is predicted from.

use cinch_graph::{DType, Target};

use crate::architecture::{ComputeCapability, Generation};
use crate::fabric::Fabric;
use crate::find::find;

/// Rates of one processor, as programs reach them.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    pub name: String,
    pub target: Target,
    /// Operations per second of a large matrix product of fp16 numbers.
    pub half_flops: f64,
    /// Of bf16 numbers; `None` where the processor has no matrix units for them.
    pub bf16_flops: Option<f64>,
    /// Of single-precision numbers rounded to tf32; where the processor does not round, the
    /// rate of single precision.
    pub tf32_flops: f64,
    /// Of single-precision numbers.
    pub single_flops: f64,
    /// Sigmoids of single-precision numbers per second, by vector code; `None` for a GPU, whose
    /// kernels are told by their bytes and products.
    pub sigmoids: Option<f64>,
    /// Bytes per second of a large copy, read and written bytes counted.
    pub bandwidth: f64,
    /// The same of a copy of [`Self::CACHED_BYTES`], which a CPU's last cache may hold; `None` where
    /// it was not measured.
    pub cache_bandwidth: Option<f64>,
    pub multiprocessors: usize,
    /// Bytes per second between host memory and the processor's own, in one direction, from
    /// pinned memory.
    pub host_bandwidth: f64,
    /// What joins it to others.
    pub fabric: Fabric,
    /// `None` for what is not of NVIDIA.
    pub compute_capability: Option<ComputeCapability>,
    /// `None` for a CPU.
    pub generation: Option<Generation>,
}

impl Card {
    /// The side of the square product by which a CPU's rate is measured: large enough to reach it,
    /// and so small (12 MiB) that it stays in a cache that others use as well.
    pub const CPU_PRODUCT: usize = 1024;
    /// Read and written bytes of a copy that a CPU's last cache may hold.
    pub const CACHED_BYTES: u64 = 16 << 20;

    /// The card of that name, where the catalogue has it and the name means one card.
    pub fn known(name: &str) -> Option<Self> {
        let gpu = find(name).ok()?;
        Some(Self {
            name: name.to_owned(),
            ..gpu.card()
        })
    }

    /// A CPU, by what was measured on it. Its own memory is the host's, so that a transfer to
    /// it is a copy: each byte is read once and written once.
    pub fn cpu(num_threads: usize, matrix_flops: f64, sigmoids: f64, bandwidth: f64) -> Self {
        Self {
            name: format!("{num_threads} threads"),
            target: Target::Cpu,
            half_flops: matrix_flops,
            bf16_flops: None,
            tf32_flops: matrix_flops,
            single_flops: matrix_flops,
            sigmoids: Some(sigmoids),
            bandwidth,
            cache_bandwidth: None,
            multiprocessors: num_threads,
            host_bandwidth: bandwidth / 2.0,
            fabric: Fabric::CPU,
            compute_capability: None,
            generation: None,
        }
    }

    /// The rate of matrix products in a precision. Without matrix units for bf16 its products
    /// run as single precision.
    pub fn matrix_flops(&self, dtype: DType, tf32: bool) -> f64 {
        match dtype {
            DType::F16 => self.half_flops,
            DType::Bf16 => self.bf16_flops.unwrap_or(self.single_flops),
            _ if tf32 => self.tf32_flops,
            _ => self.single_flops,
        }
    }
}
