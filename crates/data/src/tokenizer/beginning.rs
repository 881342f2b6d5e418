//! What a tokenizer.json puts before a text by itself, such as LLaMA's beginning-of-text.
//!
//! Read from the file and not tried out: a post-processor can repeat a text as often as it likes,
//! so none is ever run.

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    post_processor: Option<Value>,
}

/// The ids before a text; none where the file says nothing of it.
pub(super) fn beginning(content: &[u8]) -> Vec<u32> {
    let file: Result<File, _> = serde_json::from_slice(content);
    let processor = file.ok().and_then(|file| file.post_processor);
    processor.map_or_else(Vec::new, |processor| of_processor(&processor))
}

fn of_processor(processor: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match processor.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            let members = processor.get("processors").and_then(Value::as_array);
            let members = members.into_iter().flatten();
            members
                .map(of_processor)
                .find(|ids| !ids.is_empty())
                .unwrap_or_default()
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            let first = processor.get("cls").and_then(|cls| cls.get(1));
            first.and_then(id).into_iter().collect()
        }
        Some("TemplateProcessing") => {
            let pieces = processor.get("single").and_then(Value::as_array);
            let tokens = pieces
                .into_iter()
                .flatten()
                .map_while(|piece| piece.get("SpecialToken")?.get("id")?.as_str());
            let ids = |token: &str| {
                let known = processor.get("special_tokens")?.get(token)?;
                known.get("ids")?.as_array()
            };
            tokens.filter_map(ids).flatten().filter_map(id).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_and_pairs_say_what_comes_first() {
        let template = r#"{"model": 1, "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}}]}}"#;
        assert_eq!(beginning(template.as_bytes()), [1]);
        let bert = r#"{"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 102],
            "cls": ["[CLS]", 101]}}"#;
        assert_eq!(beginning(bert.as_bytes()), [101]);
        for none in [
            "{}",
            "",
            r#"{"post_processor": null}"#,
            r#"{"post_processor": 3}"#,
        ] {
            assert!(beginning(none.as_bytes()).is_empty(), "{none}");
        }
    }
}
