//! The one list of architectures.
//!
//! An architecture is a type in `family/` that implements [`Describe`](crate::Describe). Listed
//! here, it becomes a variant of [`Architecture`](crate::Architecture), and the compiler asks for
//! the rest: what is `trained` needs its builder (`cinch_model::Build`), and every one its replay
//! (`cinch_torch::model::Replay`).

/// Calls a macro with all architectures: those that cinch's engine trains, and those whose
/// PyTorch runs alone are predicted.
#[macro_export]
macro_rules! with_architectures {
    ($callback:ident) => {
        $callback! {
            trained { Mamba, Gpt2, Llama, Mistral, Qwen2, Qwen3, Gsa, Mu, Naics }
            predicted { Bert, HuggingFaceMamba, Phi3, Gemma2, Gemma3, Roberta, DistilBert, Opt, GptNeoX, T5, Vit }
        }
    };
}
