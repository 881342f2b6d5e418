//! What PyTorch would use: its eager ops replayed as sizes, its caching allocator, and the
//! traces it records of itself.
//!
//! ```
//! use cinch_config::{Settings, Source};
//! use cinch_torch::configured::Configured;
//!
//! let mut settings = Settings::new();
//! let flag = || Source::Flag("--model".to_owned());
//! settings.set("model.type", "gpt2", flag())?;
//! settings.set("vram.batch_size", "1", flag())?;
//! let run = Configured::of(&settings.resolve()?, "", None)?;
//! let prediction = run.workload.predict()?;
//! assert!(prediction.peak_allocated <= prediction.peak_reserved);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod allocator;
pub mod change;
pub mod chip;
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
