//! Who runs the training loop: one's own code, or the Trainer of transformers, whose defaults differ.

use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::Recipe;

/// The loop around the model.
///
/// Of the Trainer, from transformers 5 and accelerate ([`crate::eager::trainer`]):
/// - with PyTorch 2.8 or later its default optimizer is `adamw_torch_fused`, which keeps the moments of AdamW but takes no temporaries;
/// - it clips gradients at a norm of 1.0 unless `max_grad_norm` is 0;
/// - it empties the allocator's cache before the first step;
/// - the loss is divided by the number of labelled tokens of all micro batches, which allocates one number;
/// - under `bf16=True` or `fp16=True` accelerate converts the logits to fp32 when the model returns;
/// - bitsandbytes keeps the states of embeddings in 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Convention {
    /// `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`, `zero_grad()`, as written in a loop.
    #[default]
    PlainLoop,
    Trainer,
}

impl Convention {
    pub fn name(self) -> &'static str {
        match self {
            Convention::PlainLoop => "plain loop",
            Convention::Trainer => "Hugging Face Trainer",
        }
    }

    /// The recipe as this loop runs it where the user has left its settings alone.
    pub fn recipe(self, recipe: Recipe) -> Recipe {
        match self {
            Convention::PlainLoop => Recipe {
                convention: self,
                ..recipe
            },
            Convention::Trainer => Recipe {
                convention: self,
                optimizer: match recipe.optimizer {
                    Optimizer::Adam(_) => Optimizer::Adam(Execution::Fused),
                    other => other,
                },
                clips_gradients: true,
                ..recipe
            },
        }
    }

    /// What is taken for granted about the loop.
    pub fn assumptions(self) -> &'static [&'static str] {
        match self {
            Convention::PlainLoop => &[],
            Convention::Trainer => &[
                "the Trainer's defaults are those of transformers 5: AdamW fused (PyTorch 2.8 or later), gradients clipped at 1.0",
            ],
        }
    }
}
