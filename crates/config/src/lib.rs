//! What the user asked for: settings from defaults, presets, files, the
//! environment and flags, with the origin of every value, resolved to one typed
//! [`Config`].
//!
//! The way through, module by module:
//!
//! - `document`, `json`: a file as text → leaves with their places;
//! - `setting`, `registry`, `value`: the settings there are, their types and ranges;
//! - `size`, `preset`: named shapes and named sets of values;
//! - `source`, `settings`, `file`, `environment`: the layers, and who overrode whom;
//! - `completion`, `rules`, `resolve`, `config`: what follows from what, what
//!   cannot stand together, and the typed result.
//!
//! Nothing here looks at a device or a clock: the same inputs give the same
//! config. The only thing touched outside is the config file itself.

mod bytes;
mod completion;
mod config;
mod document;
mod environment;
mod error;
mod file;
mod json;
mod nearest;
mod preset;
mod registry;
mod resolve;
mod rules;
mod setting;
mod settings;
mod size;
mod source;
mod value;

pub use bytes::Bytes;
pub use config::{
    BatchConfig, Checkpointing, Config, DataConfig, Gpt2Config, MambaConfig, ModelConfig,
    ModelKind, OutputConfig, Precision, Schedule, StateFormat, TrainingConfig,
};
pub use document::{Document, Entry, Position, Scalar};
pub use error::{ConfigError, Given, Stated};
pub use json::read_json;
pub use preset::{Preset, TRAINING_PRESETS, TrainingPreset, VRAM_PRESETS, VramPreset};
pub use registry::SETTINGS;
pub use setting::{Alias, Meaning, Setting};
pub use settings::{Explained, Overridden, Settings};
pub use size::{ModelSize, SIZES, sizes_of};
pub use source::Source;
pub use value::{Interval, Kind, Value};
