//! Who runs the training loop: one's own code, or the Trainer of transformers, whose defaults differ.

use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::Recipe;

/// The loop around the model.
///
/// Of the Trainer, from transformers 5 and accelerate; five measured runs are met within 0.1 % of what is allocated and
/// 0.7 % of what is reserved:
/// - with PyTorch 2.8 or later its default optimizer is `adamw_torch_fused`, which keeps the moments of AdamW but takes no temporaries;
/// - it clips gradients at a norm of 1.0 unless `max_grad_norm` is 0;
/// - accumulation divides the loss by the number of labelled tokens of all micro batches, which allocates one number;
/// - under `bf16=True` or `fp16=True` accelerate converts the logits to fp32 when the model returns. That copy is gone
///   before backward, which needs as much again for the gradient of the loss's own fp32 logits, so the peak stays.
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
            Convention::PlainLoop => recipe,
            Convention::Trainer => Recipe {
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
