//! What can go wrong while a plan runs.

use cinch_graph::DType;
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
    #[error("could not start {threads} threads: {problem}")]
    Threads { threads: usize, problem: String },
}
