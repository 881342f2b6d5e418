//! What can go wrong while a plan runs.

use cinch_graph::DType;
use cinch_ranks::RanksError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum EngineError {
    #[error(
        "could not allocate the arena of {bytes} bytes\n\
         hint: give a budget below the free memory (--vram), or lower the batch size"
    )]
    OutOfMemory { bytes: u64 },
    #[error("the CPU computes in fp32, but this graph is {dtype}")]
    Precision { dtype: DType },
    #[error("{op} `{node}`: {problem}")]
    Op {
        op: &'static str,
        node: String,
        problem: String,
    },
    #[error("{op} `{node}` needs the other ranks of the run, and none are connected")]
    NoRanks { op: &'static str, node: String },
    #[error(transparent)]
    Ranks(#[from] RanksError),
    #[error(
        "no CUDA driver was found on this machine\n\
         hint: install NVIDIA's driver, or train on the CPU with --device cpu; \
         `cinch plan --device cuda` plans for a GPU anywhere"
    )]
    NoDriver,
    #[error(
        "{library} was not found, which cinch needs to {purpose}\n\
         hint: install the CUDA toolkit, or `pip install {package}` and add its lib folder to \
         LD_LIBRARY_PATH"
    )]
    NoLibrary {
        library: &'static str,
        purpose: &'static str,
        package: &'static str,
    },
    #[error("no GPU {ordinal}: the driver shows {count}\nhint: check CUDA_VISIBLE_DEVICES")]
    NoDevice { ordinal: usize, count: usize },
    #[error(
        "{name} has compute capability {major}.{minor}; cinch needs 8.0 or later\n\
         hint: train on the CPU with --device cpu"
    )]
    OldDevice {
        name: String,
        major: i32,
        minor: i32,
    },
    #[error(
        "the GPU has {free} bytes free of {total}, the plan needs {needed}\n\
         hint: give --vram a budget below what is free, or end what else holds the GPU"
    )]
    DeviceMemory { free: u64, total: u64, needed: u64 },
    #[error(
        "could not pin {bytes} bytes of host memory for what is offloaded\n\
         hint: leave out --offload (vram.use_cpu_offload), --offload-frozen \
         (vram.offload_frozen) and --offload-activations (vram.offload_activations), or free host \
         memory; `ulimit -l` limits what a process may pin"
    )]
    PinnedMemory { bytes: u64 },
    #[error(
        "the plan needs {needed} bytes of {memory}, but the executor was made with {allocated}"
    )]
    OtherPlan {
        memory: &'static str,
        needed: u64,
        allocated: u64,
    },
    #[error("CUDA failed to {action}: {problem}")]
    Cuda { action: String, problem: String },
    #[error("NCCL failed to {action}: {problem}\nhint: NCCL_DEBUG=INFO lets it say more")]
    Nccl { action: String, problem: String },
    #[error(
        "NCCL {version} is too old: this run needs {oldest} or later\n\
         hint: `pip install -U nvidia-nccl-cu13` and add its lib folder to LD_LIBRARY_PATH"
    )]
    OldNccl { version: String, oldest: String },
    #[error("kernels/{file}.cu does not compile for {architecture}:\n{log}")]
    Compile {
        file: &'static str,
        architecture: String,
        log: String,
    },
    #[error("could not start {threads} threads: {problem}")]
    Threads { threads: usize, problem: String },
}
