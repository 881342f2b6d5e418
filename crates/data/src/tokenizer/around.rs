//! What a tokenizer.json puts around a text by itself, such as LLaMA's beginning-of-text or BERT's
//! marks.
//!
//! Read from the file and not tried out: a post-processor can repeat a text as often as it likes,
//! so none is ever run.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    post_processor: Option<Value>,
}

/// The ids before a text and after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Around {
    pub before: Arc<[u32]>,
    pub after: Arc<[u32]>,
}

impl Around {
    /// Nothing where the file says nothing of it.
    pub fn of(content: &[u8]) -> Self {
        let file: Result<File, _> = serde_json::from_slice(content);
        let processor = file.ok().and_then(|file| file.post_processor);
        processor.map_or_else(Self::default, |processor| Self::of_processor(&processor))
    }

    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    fn of_processor(processor: &Value) -> Self {
        match processor.get("type").and_then(Value::as_str) {
            Some("Sequence") => {
                let members = processor.get("processors").and_then(Value::as_array);
                let mut members = members.into_iter().flatten().map(Self::of_processor);
                members
                    .find(|around| !around.is_empty())
                    .unwrap_or_default()
            }
            Some("BertProcessing" | "RobertaProcessing") => {
                let mark = |name: &str| processor.get(name)?.get(1).and_then(id);
                Self {
                    before: mark("cls").into_iter().collect(),
                    after: mark("sep").into_iter().collect(),
                }
            }
            Some("TemplateProcessing") => {
                let pieces = processor.get("single").and_then(Value::as_array);
                let pieces: &[Value] = pieces.map_or(&[], Vec::as_slice);
                let mut after = of_pieces(processor, pieces.iter().rev());
                after.reverse();
                Self {
                    before: of_pieces(processor, pieces.iter()).concat().into(),
                    after: after.concat().into(),
                }
            }
            _ => Self::default(),
        }
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// The ids of each special token of a template, up to the text.
fn of_pieces<'a>(processor: &Value, pieces: impl Iterator<Item = &'a Value>) -> Vec<Vec<u32>> {
    let tokens = pieces.map_while(|piece| piece.get("SpecialToken")?.get("id")?.as_str());
    let ids = |token: &str| -> Option<Vec<u32>> {
        let known = processor.get("special_tokens")?.get(token)?;
        Some(
            known
                .get("ids")?
                .as_array()?
                .iter()
                .filter_map(id)
                .collect(),
        )
    };
    tokens.filter_map(ids).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_and_pairs_say_what_comes_first_and_last() {
        let template = r#"{"model": 1, "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}}]}}"#;
        let around = |text: &str| {
            let Around { before, after } = Around::of(text.as_bytes());
            (before.to_vec(), after.to_vec())
        };
        assert_eq!(around(template), (vec![1], vec![2]));
        let bert = r#"{"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 102],
            "cls": ["[CLS]", 101]}}"#;
        assert_eq!(around(bert), (vec![101], vec![102]));
        for none in [
            "{}",
            "",
            r#"{"post_processor": null}"#,
            r#"{"post_processor": 3}"#,
        ] {
            assert!(Around::of(none.as_bytes()).is_empty(), "{none}");
        }
    }
}
