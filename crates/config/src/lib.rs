//! What the user asked for: settings from defaults, presets, files, the
//! environment and flags, with the origin of every value, resolved to one typed
//! [`Config`].
//!
//! The way through, module by module:
//!
//! - `format`, `json`, `yaml`, `toml`, `python`: a file as text → an `outline`
//!   of bytes, and a `document` of leaves with their places;
//! - `setting`, `registry`, `value`: the settings there are, their types and ranges;
//! - `remedy`: the changes that alter what a run takes, each declared once;
//! - `preset`: named sets of values (named shapes are of `cinch-architecture`);
//! - `source`, `settings`, `file`, `folder`, `environment`: the layers, and who overrode whom;
//! - `completion`, `rules`, `resolve`, `config`: what follows from what, what
//!   cannot stand together, and the typed result.
//!
//! And back into the user's own files:
//!
//! - `dialect`: what other programs call our settings;
//! - `edit`, `insert`, `literal`: values changed in place, byte for byte;
//! - `place`, `expression`, `apply`, `diff`: which files say what, and what would change;
//! - `whole_batch`, `derived`: what must follow a change, and what follows it by itself;
//! - `transaction`, `disk`, `lock`, `leftover`, `manifest`, `undo`: all files or none, and back.
//!
//! Nothing here looks at a device or a clock: the same inputs give the same
//! config. Only config files are touched, and what is kept beside them.
//!
//! ```
//! use cinch_config::{Settings, Source};
//!
//! let mut settings = Settings::new();
//! settings.set("model.type", "gpt2", Source::Flag("--model".to_owned()))?;
//! settings.set("vram.budget", "8gb", Source::Flag("--vram".to_owned()))?;
//! let config = settings.resolve()?;
//! assert_eq!(config.model_title(), "gpt2");
//! assert_eq!(config.batch.budget.map(|size| size.to_string()).as_deref(), Some("8.00 GiB"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod apply;
mod bytes;
mod completion;
mod config;
mod curriculum;
mod derived;
mod dialect;
mod diff;
mod disk;
mod document;
mod edit;
mod environment;
mod error;
mod expression;
mod file;
mod folder;
mod format;
mod insert;
mod json;
mod leftover;
mod literal;
mod lock;
mod lossless;
mod manifest;
mod number;
mod outline;
mod place;
mod preset;
mod python;
mod pytorch;
mod registry;
pub mod remedy;
mod resolve;
mod rules;
mod setting;
mod settings;
mod shell;
mod source;
mod toml;
mod transaction;
mod tuning;
mod undo;
mod unfollowed;
mod value;
mod whole_batch;
mod world_note;
mod yaml;

pub use apply::{Application, Applied, ChangedFile, Report, Unplaced};
pub use bytes::Bytes;
pub use config::{
    BatchConfig, BucketChoice, Checkpointing, Config, DataConfig, GradientType, INITIAL_WEIGHTS,
    NamedModel, OutputConfig, Precision, Schedule, ShardedPart, StateFormat, TooLong,
    TrainingConfig, WorldConfig,
};
pub use curriculum::Stage;
pub use dialect::Program;
pub use dialect::draft::{ReadKey, Reading, Saving, UnreadKey};
pub use disk::{Disk, LocalDisk};
pub use document::{Document, Entry, Position, Scalar};
pub use edit::edit;
pub use error::{ConfigError, Given, Stated};
pub use file::Matters;
pub use folder::config_files;
pub use format::Format;
pub use outline::KeyPath;
pub use place::FileChange;
pub use preset::{Preset, TRAINING_PRESETS, TrainingPreset, VRAM_PRESETS, VramPreset};
pub use pytorch::{
    FrozenWeights, Sharding, TorchAttention, TorchConfig, TorchOptimizer, TorchPrecision,
    TrainingLoop,
};
pub use registry::SETTINGS;
pub use setting::{Alias, Flag, Meaning, Setting};
pub use settings::{Explained, Overridden, Settings};
pub use source::Source;
pub use tuning::{LoraConfig, LoraTargets, TuningConfig};
pub use undo::{undo, undo_on};
pub use unfollowed::{Instead, UnfollowedKey};
pub use value::{Interval, Kind, Value};
