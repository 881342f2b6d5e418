//! Kernels on the host, from the PTX that NVRTC makes of them: what they compute, and whether they
//! read and write only what they may, in an order that something determines.
//!
//! This is for tests where there is no card. It says nothing of speed, and rounds sums of matrix
//! products as single precision does, not as a card's units do. Every instruction that our kernels
//! have is known; any other is an error.
//!
//! A warp's lanes go together as far as they can: those that are furthest behind go first, and
//! instructions for all lanes wait for them. Blocks run one after the other, several at once only
//! where one waits for another. Copies and products that run beside their threads happen at once, and
//! whether somebody uses their results or overwrites what they read before they are known to be over
//! is found by clocks (`machine/order.rs`), not by chance.

mod decode;
mod error;
mod lifetimes;
mod machine;
mod parse;
mod program;
mod text;

pub use error::PtxError;
pub use machine::{Argument, Launch, Memory, Region, TensorMap, run};
pub use parse::parse;
pub use program::{Kernel, Module};

/// What a card keeps of a block's shared memory for itself.
pub(crate) const SHARED_START: usize = 1024;
/// Addresses of what a source has as constants.
pub(crate) const CONSTANTS: u64 = 0x10_0000_0000;
/// Generic addresses of shared memory and of parameters.
pub(crate) const SHARED: u64 = 0x20_0000_0000;
pub(crate) const PARAMETERS: u64 = 0x30_0000_0000;
/// The most threads that any block has.
pub(crate) const MAX_THREADS: usize = 1024;
/// The most shared memory that a block of a Hopper card has.
pub(crate) const MAX_SHARED: usize = 227 << 10;
