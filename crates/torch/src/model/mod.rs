//! Models as their Python code runs, on the ops of [`crate::eager`].

pub mod bert;
pub mod gpt2;
pub mod gsa;
pub mod hugging_face;
pub mod llama;
pub mod mamba;
pub mod mask;
pub mod module;
pub mod mu;
pub mod multihead;
pub mod naics;
pub mod profile;
pub mod workload;

pub use profile::{Alive, Profile};
pub use workload::{Architecture, Prediction, Weights, Workload};
