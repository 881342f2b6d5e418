//! Models as their Python code runs, on the ops of [`crate::eager`]. Each statement is preceded by the line it stands for.

pub mod activation;
pub mod bert;
mod fields;
pub mod gpt2;
pub mod gsa;
pub mod hugging_face;
pub mod llama;
pub mod llama_lines;
pub mod mamba;
pub mod mamba_hugging_face;
pub mod mask;
pub mod module;
pub mod mu;
pub mod multihead;
pub mod naics;
pub mod profile;
mod rotary;
pub mod workload;

pub use profile::{Alive, Origin, Profile};
pub use workload::{Architecture, Prediction, Weights, Workload};

/// The library whose files the lines `modeling_*.py` are of.
pub const LINES_OF: &str = "transformers 5.17";
