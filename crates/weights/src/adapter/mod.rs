//! LoRA adapters in peft's format: a folder with `adapter_config.json`, which says where they are
//! and how strong, and `adapter_model.safetensors` with two factors for each adapted module.
//!
//! A module computes `W·x + scale · B·(A·x)` with A of [rank, inputs], B of [outputs, rank] and
//! scale = alpha / rank, or alpha / √rank with `use_rslora`.

mod config;
mod files;
mod target;

pub use config::{AdapterConfig, Bias, Modules, Targets};
pub use files::{
    Adapter, AdapterContents, AdapterModule, AdapterParts, AdapterTensor, Factor, Replaced,
    write_adapter, write_adapter_files,
};
pub use target::AdaptedModule;

pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";
