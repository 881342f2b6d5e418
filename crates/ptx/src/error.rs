//! What a source or a launch can have wrong.

use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum PtxError {
    #[error("line {line} of the PTX has something that is not known: {what}")]
    Unknown { what: String, line: u32 },
    #[error("the PTX ends in the middle of something")]
    Ends,
    #[error("there is no kernel `{0}`")]
    NoKernel(String),
    #[error("`{kernel}` takes {expected} arguments; there are {given}")]
    Arguments {
        kernel: String,
        expected: usize,
        given: usize,
    },
    #[error("argument {index} of `{kernel}` has {given} bytes, and its parameter {expected}")]
    Argument {
        kernel: String,
        index: usize,
        expected: usize,
        given: usize,
    },
    #[error("a grid of {grid:?} blocks is no multiple of the clusters of {cluster} of `{kernel}`")]
    Cluster {
        kernel: String,
        grid: [u32; 3],
        cluster: usize,
    },
    #[error("a block of `{kernel}` has {given} {what}, and may have {most}")]
    TooMany {
        kernel: String,
        what: &'static str,
        given: usize,
        most: usize,
    },
    /// What a kernel did that it must not do.
    #[error("{kernel}, block {block:?}, warp {warp}, line {line} `{text}`: {what}")]
    Fault {
        kernel: String,
        block: [u32; 3],
        warp: usize,
        line: u32,
        text: String,
        what: String,
    },
    #[error("`{kernel}` waits for ever: {waits}")]
    Waits { kernel: String, waits: String },
}
