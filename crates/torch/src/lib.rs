//! What PyTorch would use: its eager ops replayed as sizes, its caching allocator, and the
//! traces it records of itself.

pub mod allocator;
pub mod change;
pub mod choose;
pub mod claim;
pub mod configured;
pub mod convention;
pub mod eager;
mod error;
pub mod holdings;
pub mod model;
pub mod overhead;
mod parallel;
pub mod remedy;
pub mod sharding;
pub mod snapshot;
pub mod trace;
pub mod truth;

pub use error::TorchError;
