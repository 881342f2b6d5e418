//! A small eager PyTorch in which every op is a rule about sizes.
//!
//! Programs are written as their Python runs: a tensor is a counted handle, its memory goes when
//! the last handle does, an op that takes a temporary by value frees it as CPython would. What an
//! op allocates, keeps for backward and allocates there stands in one place under [`op`].

pub mod autocast;
pub mod checkpoint;
pub mod clip;
pub mod context;
pub mod dtype;
pub mod engine;
mod layout;
pub mod line;
pub mod memory;
pub mod node;
pub mod op;
pub mod optimizer;
mod place;
pub mod scaler;
pub mod shape;
mod storage;
mod tape;
pub mod tensor;
pub mod trainer;
pub mod training;

pub use context::{AllocationCategory, Context, Event};
pub use dtype::DType;
pub use line::Line;
pub use memory::{Block, Ledger, MemoryModel};
pub use place::Scope;
pub use shape::Dims;
pub use tensor::Tensor;
