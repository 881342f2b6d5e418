//! Optimizers by the names that programs have for them: which of PyTorch's each is, and what
//! cinch's own engine, which updates by AdamW alone, makes of it.

use super::draft::Draft;
use super::{OPTIMIZER, OTHER_OPTIMIZER};
use crate::error::ConfigError;
use crate::pytorch::TorchOptimizer;
use crate::unfollowed::Instead;

/// Those of Hugging Face's Trainer that are known here.
pub(super) const WORDS: &[(&str, &str)] = &[
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw_fused"),
    ("adamw_bnb_8bit", "adamw_8bit"),
    ("adamw_8bit", "adamw_8bit"),
    ("paged_adamw_8bit", "paged_adamw_8bit"),
    ("paged_adamw_32bit", "paged_adamw_32bit"),
    ("paged_adamw", "paged_adamw_32bit"),
    ("adamw_hf", "adamw_loop"),
    ("adamw", "adamw"),
    ("sgd", "sgd"),
];

/// AdamW of torchao with states in eight bits: a byte a number in blocks with a scale, as here,
/// and not replayed.
const EIGHT_BIT_HERE: [&str; 2] = ["adamw_torch_8bit", "ao_adamw_8bit"];

pub(super) fn is_eight_bit_here(word: &str) -> bool {
    EIGHT_BIT_HERE.contains(&word.to_lowercase().as_str())
}

/// Whether cinch's own engine does not follow an optimizer of PyTorch, and what it does in its
/// place where that takes other memory.
pub(super) fn instead_of(word: &str) -> Option<Option<Instead>> {
    match TorchOptimizer::named(word)? {
        TorchOptimizer::Adamw
        | TorchOptimizer::AdamwFused
        | TorchOptimizer::AdamwLoop
        | TorchOptimizer::Adamw8bit => None,
        TorchOptimizer::PagedAdamw8bit | TorchOptimizer::PagedAdamw32bit => {
            Some(Some(Instead::StatesOnDevice))
        }
        // It decays weights in another way and keeps the same states.
        TorchOptimizer::Adam => Some(None),
        TorchOptimizer::Sgd | TorchOptimizer::Sgdm => Some(Some(Instead::AdamW)),
    }
}

/// An optimizer by the path of its class.
pub(super) fn by_class(
    draft: &mut Draft<'_>,
    entry: usize,
    is_fused: bool,
) -> Result<(), ConfigError> {
    let path = draft.text(entry).unwrap_or_default();
    let library = path.split('.').next().unwrap_or_default();
    let word = match (path.rsplit('.').next().unwrap_or_default(), library) {
        ("AdamW" | "Adam", _) if is_fused => "adamw_fused",
        ("AdamW" | "Adam", _) => "adamw",
        ("PagedAdamW8bit", _) => "paged_adamw_8bit",
        ("AdamW8bit", "bitsandbytes") => "adamw_8bit",
        ("AdamW8bit", "torchao") => {
            draft.eight_bit_here(entry, OTHER_OPTIMIZER);
            return Ok(());
        }
        ("PagedAdamW" | "PagedAdamW32bit", _) => "paged_adamw_32bit",
        ("SGD", _) => "sgd",
        _ => return Err(draft.refuse(entry, OTHER_OPTIMIZER)),
    };
    draft.say(entry, OPTIMIZER, word);
    Ok(())
}

/// Names of a constant that holds an optimizer's.
const CONSTANTS: [&str; 4] = ["optimizer", "optim", "optimizer_name", "optimizer_type"];

/// A constant that names an optimizer by a word of the Trainer's or of this program's. What the
/// script makes of another one is not known.
pub(super) fn by_constant(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    for name in CONSTANTS {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        if !draft.is_on(name) {
            draft.harmless();
            continue;
        }
        let text = draft.text(entry).unwrap_or_default().to_lowercase();
        let mut words = WORDS.iter();
        let known = words
            .find(|(word, _)| *word == text)
            .map(|(_, known)| *known)
            .or_else(|| TorchOptimizer::named(&text).map(TorchOptimizer::name));
        match known {
            Some(known) => draft.say(entry, OPTIMIZER, known),
            None if is_eight_bit_here(&text) => draft.eight_bit_here(entry, OTHER_OPTIMIZER),
            None => draft.not_understood(entry),
        }
    }
    Ok(())
}
