//! The small files that make a folder of weights a model: its configuration and its tokenizer.

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Map, Value};

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

/// The small files of a model, for the folder of another that was made from it.
#[derive(Clone, Copy, Debug)]
pub struct Companions<'a> {
    pub from: &'a Path,
    /// Whether the other has embeddings and a head of their own where the model has one tensor.
    pub is_untied: bool,
}

impl<'a> Companions<'a> {
    /// All as they are.
    pub fn of(from: &'a Path) -> Companions<'a> {
        Companions {
            from,
            is_untied: false,
        }
    }

    /// Copies configuration and tokenizer into another folder, and gives the names of what there
    /// was.
    pub fn copy_to(&self, to: &Path) -> Result<Vec<&'static str>, WeightError> {
        let mut copied = Vec::new();
        for name in COMPANIONS {
            let (source, target) = (self.from.join(name), to.join(name));
            if !source.is_file() {
                continue;
            }
            fs::copy(&source, &target).map_err(WeightError::io("copy", &source))?;
            if self.is_untied && name == CONFIG {
                untie(&target)?;
            }
            File::open(&target)
                .and_then(|file| file.sync_all())
                .map_err(WeightError::io("write", &target))?;
            copied.push(name);
        }
        Ok(copied)
    }
}

const CONFIG: &str = "config.json";
const TIED: &str = "tie_word_embeddings";

/// The fields of a `config.json` that bear on embeddings and head.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    pub size: Option<usize>,
    /// Whether the head is a copy of the embeddings, where it is said.
    pub is_tied: Option<bool>,
}

impl Vocabulary {
    /// Nothing is known of a folder without a configuration that can be read.
    pub(crate) fn of(folder: &Path) -> Vocabulary {
        let fields = read(&folder.join(CONFIG)).unwrap_or_default();
        let size = fields.get("vocab_size").and_then(Value::as_u64);
        Vocabulary {
            size: size.map(|size| size as usize),
            is_tied: fields.get(TIED).and_then(Value::as_bool),
        }
    }
}

/// Says in a configuration that the head is no copy of the embeddings.
fn untie(config: &Path) -> Result<(), WeightError> {
    let mut fields = read(config)?;
    fields.insert(TIED.to_owned(), false.into());
    let text = format!("{:#}\n", Value::Object(fields));
    cinch_files::replace(config, text.as_bytes()).map_err(WeightError::io("write", config))
}

fn read(config: &Path) -> Result<Map<String, Value>, WeightError> {
    let bytes = fs::read(config).map_err(WeightError::io("read", config))?;
    serde_json::from_slice(&bytes).map_err(|error| WeightError::Damaged {
        path: config.to_owned(),
        problem: error.to_string(),
    })
}
