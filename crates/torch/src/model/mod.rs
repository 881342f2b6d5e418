//! Models as their Python code runs, on the ops of [`crate::eager`]. Each statement is preceded by the line it stands for.

mod activation;
pub mod adapter;
mod attending;
mod bert;
mod bert_embeddings;
mod bert_lines;
mod causal;
mod decoder;
mod decoder_layer;
mod decoder_lines;
mod distilbert;
pub mod frozen;
mod gemma;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod gsa;
mod head_attention;
pub mod liger;
mod llama;
mod load;
mod mamba;
mod mamba_hugging_face;
pub mod mask;
mod mistral;
pub mod module;
mod mu;
mod multihead;
mod naics;
mod opt;
mod phi3;
pub mod profile;
mod qwen2;
mod qwen3;
mod replay;
mod roberta;
mod rotary;
mod t5;
mod t5_attention;
mod t5_lines;
mod vit;
pub mod workload;

pub use profile::{Alive, Origin, Profile};
pub use replay::{Replay, Setup};
pub use workload::{Prediction, Weights, Workload};

/// The library whose files the lines `modeling_*.py` are of.
pub const LINES_OF: &str = "transformers 5.17";
