//! The small files that make a folder of weights a model: its configuration and its tokenizer.

use std::fs::{self, File};
use std::path::Path;

use crate::error::WeightError;

/// What transformers looks for beside the weights, and what tokenizers are saved as.
const COMPANIONS: [&str; 15] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// Copies configuration and tokenizer of a model into another folder, and gives the names of what
/// there was.
pub fn copy_companions(from: &Path, to: &Path) -> Result<Vec<&'static str>, WeightError> {
    let mut copied = Vec::new();
    for name in COMPANIONS {
        let (source, target) = (from.join(name), to.join(name));
        if !source.is_file() {
            continue;
        }
        fs::copy(&source, &target).map_err(WeightError::io("copy", &source))?;
        File::open(&target)
            .and_then(|file| file.sync_all())
            .map_err(WeightError::io("write", &target))?;
        copied.push(name);
    }
    Ok(copied)
}
