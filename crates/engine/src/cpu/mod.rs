//! The CPU executor: the reference for every op, and fast in its own right.

mod collective;
pub mod dropout;
pub(crate) mod executor;
pub mod kernel;
mod op;
mod operands;
pub mod parallel;
pub mod real;
pub mod simd;
