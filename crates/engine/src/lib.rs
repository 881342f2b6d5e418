//! Runs a plan. The executor makes one allocation, the arena, and every op reads
//! and writes inside it at the offsets the plan chose.
//!
//! This is the only crate with unsafe code: the arena hands out disjoint views of one
//! allocation, and the kernels use vector instructions chosen at run time.
#![expect(
    unsafe_code,
    reason = "arena views and vector instructions; each block says why it is sound"
)]

mod arena;
pub mod copy_rate;
pub mod cpu;
pub mod cuda;
mod engine;
mod error;
pub mod gemm_rate;

pub use arena::{Arena, Element};
pub use cpu::executor::Executor;
pub use engine::{Engine, EngineOptions, Part};
pub use error::EngineError;
