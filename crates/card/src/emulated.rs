//! Which card is emulated: the catalogue's figures in the forms that the library and cuDNN read.

use cinch_device::{Generation, Gpu};

use crate::library::card::Card;

/// The card in a process of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emulated {
    pub card: Card,
}

/// What the process takes of the card besides its allocations: the context, and each library with its first handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    pub context: u64,
    pub blas: u64,
    pub dnn: u64,
    pub nccl: u64,
}

impl Emulated {
    /// `None` for what is not of NVIDIA.
    pub fn new(gpu: &Gpu, outside: Outside, devices: u32) -> Option<Self> {
        let chip = gpu.compute_capability?;
        let (major, minor) = (chip.major as i32, chip.minor as i32);
        let multiprocessors = gpu.multiprocessors as i32;
        // Lanes of single precision of a multiprocessor, two operations each.
        let lanes = match (major, minor) {
            (7, _) | (8, 0) => 64.0,
            _ => 128.0,
        };
        let clock = gpu.peaks.single_flops / (f64::from(multiprocessors) * lanes * 2.0) / 1e3;
        let bus_width = match (gpu.generation, gpu.memory.marketed_gb) {
            (Generation::Hopper, 141..) => 6016,
            (Generation::Hopper | Generation::Volta, _) | (_, 40..=47 | 80) => 5120,
            (Generation::Blackwell, 100..) => 8192,
            (Generation::Blackwell, 32) => 512,
            (_, 24..) => 384,
            (_, 12..) => 192,
            _ => 128,
        };
        // Both edges of the clock carry data.
        let memory_clock = gpu.peaks.bandwidth * 8.0 / 2.0 / f64::from(bus_width) / 1e3;
        let l2_mebibytes = match (gpu.generation, gpu.memory.marketed_gb) {
            (Generation::Hopper, 141..) => 60,
            (Generation::Hopper, _) => 50,
            (Generation::Ada, _) => 72,
            (Generation::Ampere, _) if minor == 0 => 40,
            (Generation::Blackwell, 100..) => 126,
            (Generation::Blackwell, _) => 96,
            _ => 6,
        };
        Some(Self {
            card: Card {
                name: format!("NVIDIA {}", gpu.name),
                memory: gpu.memory.usable_bytes(),
                major,
                minor,
                multiprocessors,
                devices: devices as i32,
                context: outside.context,
                blas: outside.blas,
                dnn: outside.dnn,
                nccl: outside.nccl,
                clock: clock as i32,
                memory_clock: memory_clock as i32,
                bus_width,
                l2_cache: l2_mebibytes << 20,
            },
        })
    }

    /// For the library.
    pub fn variable(&self) -> String {
        let card = &self.card;
        format!(
            "name={};memory={};major={};minor={};multiprocessors={};devices={};context={};blas={};dnn={};nccl={};\
             clock={};memory_clock={};bus_width={};l2_cache={}",
            card.name,
            card.memory,
            card.major,
            card.minor,
            card.multiprocessors,
            card.devices,
            card.context,
            card.blas,
            card.dnn,
            card.nccl,
            card.clock,
            card.memory_clock,
            card.bus_width,
            card.l2_cache
        )
    }

    /// For cuDNN: the properties in the form that it writes on a card itself. Those of an H200 were compared.
    pub fn cudnn_device(&self) -> String {
        let card = &self.card;
        let limits = card.limits();
        format!(
            "{{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\
             \"multiProcessorCount\":{},\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,\
             \"maxSharedMemoryPerBlockOptin\":{},\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\
             \"maxCtasPerSM\":{},\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":{},\"pciDeviceId\":6,\"isTccDriver\":0,\
             \"supportCoopLaunch\":1,\"totalGlobalMem\":{},\"smClockRateKHz\":{},\"memClockRateKHz\":{},\
             \"l2CacheSize\":{},\"cudaDeviceId\":0,\"deviceVer\":{},\"driverVer\":13000,\"deviceName\":\"{}\"}}",
            card.multiprocessors,
            limits.shared_per_block_opt_in,
            limits.blocks_per_multiprocessor,
            limits.threads_per_multiprocessor,
            card.memory,
            card.clock,
            card.memory_clock,
            card.l2_cache,
            card.major * 100 + card.minor * 10,
            card.name
        )
    }
}
