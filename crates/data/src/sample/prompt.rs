//! How a model is asked, and where its answer is over: as `encode.rs` writes samples, so that
//! what generates meets what was trained.
//!
//! An answer may end by several tokens. The tokenizer's own ends a document; `eos_token` of
//! `tokenizer_config.json` ends completions, and is another one in models that were taught to
//! talk; `generation_config.json` lists what transformers stops at; and a chat template ends
//! turns by a token that none of them names where a base model is taught to talk.

use std::path::Path;

use serde_json::Value;

use super::chat::{Conversation, TokenizerConfig};
use super::message::{Object, message};
use super::turns::MARK;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::special::SpecialTokenizer;

const GENERATION_FILE: &str = "generation_config.json";

/// Encodes prompts, and knows what ends an answer.
pub struct Prompter<'a> {
    tokenizer: SpecialTokenizer<'a>,
    ends: Vec<u32>,
}

impl<'a> Prompter<'a> {
    /// `config` is what the model's folder says of its text, `stops` the ids of
    /// [`generation_ends`].
    pub fn new(
        tokenizer: &'a Tokenizer,
        config: Option<&TokenizerConfig>,
        stops: &[u32],
    ) -> Result<Self, DataError> {
        let special = SpecialTokenizer::new(tokenizer);
        let mut ends: Vec<u32> = tokenizer.end_of_text().into_iter().collect();
        if let Some(config) = config {
            let named = config.token("eos_token");
            ends.extend(named.and_then(|token| special.id(token)));
            ends.extend(end_of_turn(config, &special)?);
        }
        // The ids are those of the model's own tokenizer.
        if special.is_of_file() {
            ends.extend(stops);
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            tokenizer: special,
            ends,
        })
    }

    /// A prompt with what the tokenizer puts before a text. Special tokens are meant as such.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, DataError> {
        let mut ids = self.tokenizer.beginning().to_vec();
        ids.extend(self.encode_rendered(prompt)?);
        Ok(ids)
    }

    /// What a template has rendered: it writes the beginning of a text itself.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let placed = self.tokenizer.encode(text)?;
        Ok(placed.into_iter().map(|(id, _)| id).collect())
    }

    /// The tokens that end an answer.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }
}

/// The first special token that the template writes after an answer; none where it writes none,
/// or does not take a question and an answer.
fn end_of_turn(
    config: &TokenizerConfig,
    tokenizer: &SpecialTokenizer<'_>,
) -> Result<Option<u32>, DataError> {
    let Some(template) = config.template(false) else {
        return Ok(None);
    };
    let conversation = Conversation {
        messages: vec![message("user", "?"), message("assistant", MARK)],
        tools: None,
    };
    let rendered = config.render(template, &conversation, 2, false);
    let text = rendered.map_or_else(|_| String::new(), |rendered| rendered.text);
    let Some((_, after)) = text.split_once(MARK) else {
        return Ok(None);
    };
    let mut placed = tokenizer.encode(after)?.into_iter();
    let end = placed.find(|(id, _)| tokenizer.is_added(*id));
    Ok(end.map(|(id, _)| id))
}

/// The ids at which `generation_config.json` of a model's folder says to stop.
pub fn generation_ends(folder: &Path) -> Result<Vec<u32>, DataError> {
    let path = folder.join(GENERATION_FILE);
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let bad = |problem: String| DataError::TokenizerConfig {
        path: path.clone(),
        problem,
    };
    let text = cinch_files::read_regular_text(&path, cinch_files::MAX_READ)
        .map_err(|error| bad(error.to_string()))?;
    let config: Object = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match config.get("eos_token_id") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => id(value).map(|id| vec![id]),
    };
    ids.ok_or_else(|| bad("`eos_token_id` is neither an id nor a list of ids".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::chat::Moment;
    use super::*;
    use crate::TokenizerSpec;

    const TOKENIZER: &str = r#"{
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 1, "content": "<|endoftext|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 2, "content": "<|im_start|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 3, "content": "<|im_end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
        },
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "<|endoftext|>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "a": 4, "[UNK]": 5}, "unk_token": "[UNK]"}
    }"#;

    /// A base model's: its `eos_token` is not what its template ends turns by.
    const CONFIG: &str = r#"{
        "eos_token": "<|endoftext|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    }"#;

    fn tokenizer(folder: &Path) -> Tokenizer {
        let path = folder.join("tokenizer.json");
        std::fs::write(&path, TOKENIZER).unwrap();
        Tokenizer::load(&TokenizerSpec::File(path)).unwrap()
    }

    fn config(text: &str) -> TokenizerConfig {
        TokenizerConfig::new(Path::new("tokenizer_config.json"), text, None, Moment(0)).unwrap()
    }

    #[test]
    fn a_prompt_begins_as_samples_do_and_its_special_tokens_are_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer(folder.path());
        let prompter = Prompter::new(&tokenizer, None, &[]).unwrap();
        assert_eq!(prompter.encode("a <|im_end|>").unwrap(), [0, 4, 3]);
        assert_eq!(prompter.encode_rendered("<s> a").unwrap(), [0, 4]);
    }

    #[test]
    fn an_answer_ends_by_the_token_that_ended_it_in_training() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer(folder.path());
        let ends = |config: Option<&TokenizerConfig>, stops: &[u32]| {
            let prompter = Prompter::new(&tokenizer, config, stops).unwrap();
            prompter.ends().to_vec()
        };
        assert_eq!(ends(None, &[]), [1]);
        let named = config(r#"{"eos_token": "<|im_end|>"}"#);
        assert_eq!(ends(Some(&named), &[]), [1, 3]);
        assert_eq!(ends(Some(&config(CONFIG)), &[]), [1, 3]);
        assert_eq!(ends(None, &[1, 2]), [1, 2]);
        let refuses = config(r#"{"chat_template": "{{ raise_exception('no') }}"}"#);
        assert_eq!(ends(Some(&refuses), &[]), [1]);
        // The ids of a model's own tokenizer mean nothing to bytes.
        let bytes = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        assert_eq!(Prompter::new(&bytes, None, &[65]).unwrap().ends(), [256]);
    }

    #[test]
    fn generation_stops_at_one_id_or_several() {
        let folder = tempfile::tempdir().unwrap();
        assert!(generation_ends(folder.path()).unwrap().is_empty());
        let written = |text: &str| {
            std::fs::write(folder.path().join(GENERATION_FILE), text).unwrap();
            generation_ends(folder.path())
        };
        assert_eq!(written(r#"{"eos_token_id": 7}"#).unwrap(), [7]);
        assert_eq!(written(r#"{"eos_token_id": [7, 9]}"#).unwrap(), [7, 9]);
        assert!(written("{}").unwrap().is_empty());
        let error = written(r#"{"eos_token_id": -1}"#).unwrap_err().to_string();
        assert!(
            error.contains(GENERATION_FILE) && error.contains("eos_token_id"),
            "{error}"
        );
    }
}
