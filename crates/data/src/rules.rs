//! What a tokenizer.json says of its rules, looked at before the library takes it: whether they
//! can be loaded without trouble, and whether a text may be cut without changing its tokens.

use serde::Deserialize;
use serde_json::Value;

/// Bytes of text in the rules, that is, in everything but the vocabulary. The largest that
/// published files have is a sentencepiece normalizer of some 300 KiB. The library copies a rule
/// once for each level it is nested in.
const MOST_RULE_BYTES: usize = 4 << 20;
const DEEPEST_RULE: usize = 16;

/// The parts of a tokenizer.json that are looked at here. Its model is left to the library.
#[derive(Debug, Deserialize)]
pub(crate) struct Rules {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Debug, Deserialize)]
struct AddedToken {
    #[serde(default)]
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

impl Rules {
    /// Reads the rules of a file and refuses those that the library cannot take.
    pub(crate) fn read(content: &[u8]) -> Result<Self, String> {
        let rules: Self = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        for (name, rule) in [
            ("normalizer", &rules.normalizer),
            ("pre_tokenizer", &rules.pre_tokenizer),
            ("decoder", &rules.decoder),
        ] {
            let bytes = check(rule, 0).map_err(|problem| format!("its {name} {problem}"))?;
            if bytes > MOST_RULE_BYTES {
                return Err(format!(
                    "its {name} has {bytes} bytes, and at most {MOST_RULE_BYTES} are read"
                ));
            }
        }
        Ok(rules)
    }

    /// Whether a text may be cut before a whitespace character that follows another without
    /// changing its tokens. That needs rules which look at one side of such a place at a time:
    ///
    /// - no normalizer, or one that goes character by character or composes accents, of which
    ///   whitespace takes none,
    /// - a pre-tokenizer that ends a part there: GPT-2's pattern (see `boundary`) without a blank
    ///   put before the text, or one that splits at whitespace,
    /// - no added token that reaches over whitespace. Special ones are not looked for in text.
    pub(crate) fn can_be_cut_at_whitespace(&self) -> bool {
        let normalizer = match list(&self.normalizer, "normalizers") {
            Some(steps) => steps
                .iter()
                .all(|step| matches!(kind(step), "Lowercase" | "NFC" | "NFD") || step.is_null()),
            None => false,
        };
        let pre_tokenizer = match kind(&self.pre_tokenizer) {
            "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer" => true,
            "ByteLevel" => {
                self.pre_tokenizer["add_prefix_space"] == Value::Bool(false)
                    && self.pre_tokenizer["use_regex"] != Value::Bool(false)
            }
            _ => false,
        };
        let reaches_over = |token: &AddedToken| {
            !token.special
                && (token.single_word
                    || token.lstrip
                    || token.rstrip
                    || token.content.contains(char::is_whitespace))
        };
        normalizer && pre_tokenizer && !self.added_tokens.iter().any(reaches_over)
    }
}

fn kind(rule: &Value) -> &str {
    rule["type"].as_str().unwrap_or_default()
}

/// A rule as the list it stands for; None where lists are nested.
fn list<'a>(rule: &'a Value, key: &str) -> Option<&'a [Value]> {
    if kind(rule) != "Sequence" {
        return Some(std::slice::from_ref(rule));
    }
    rule[key].as_array().map(Vec::as_slice)
}

/// The bytes of text in a rule, checked to be no deeper than rules are and to hold no broken
/// sentencepiece normalizer.
fn check(rule: &Value, depth: usize) -> Result<usize, String> {
    if depth > DEEPEST_RULE {
        return Err(format!("is nested more than {DEEPEST_RULE} deep"));
    }
    match rule {
        Value::String(text) => Ok(text.len()),
        Value::Array(items) => items
            .iter()
            .try_fold(items.len(), |sum, item| Ok(sum + check(item, depth + 1)?)),
        Value::Object(items) => items.iter().try_fold(items.len(), |sum, (name, item)| {
            if name == CHARSMAP
                && let Value::String(text) = item
            {
                longest_charsmap_entry(text)?;
            }
            Ok(sum + name.len() + check(item, depth + 1)?)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(1),
    }
}

/// The key of a sentencepiece normalizer: base64 of the length of a trie in bytes, the trie, and
/// the texts it leads to, each ended by a zero.
pub(crate) const CHARSMAP: &str = "precompiled_charsmap";

/// Bytes of the longest text in a sentencepiece normalizer. A length of the trie beyond the end is
/// refused: the library reserves memory for it before it reads on.
pub(crate) fn longest_charsmap_entry(text: &str) -> Result<usize, String> {
    let broken = || format!("has a {CHARSMAP} that is cut off or no base64");
    let bytes = base64(text).ok_or_else(broken)?;
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or_else(broken)?;
    let length = u32::from_le_bytes(*length) as usize;
    let texts = rest.get(length..).ok_or_else(broken)?;
    let longest = texts.split(|&byte| byte == 0).map(<[u8]>::len).max();
    Ok(longest.unwrap_or(0))
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut num_bits) = (0_u32, 0);
    for digit in text.trim_end_matches('=').bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(value)) & 0xFFFF;
        num_bits += 6;
        if num_bits >= 8 {
            num_bits -= 8;
            bytes.push((bits >> num_bits) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can_be_cut(normalizer: &str, pre_tokenizer: &str, added: &str) -> bool {
        let json = format!(
            r#"{{"normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},"added_tokens":[{added}],"model":{{}}}}"#
        );
        Rules::read(json.as_bytes())
            .unwrap()
            .can_be_cut_at_whitespace()
    }

    #[test]
    fn rules_that_look_at_one_side_can_be_cut() {
        let byte_level = r#"{"type":"ByteLevel","add_prefix_space":false}"#;
        let composed = r#"{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]}"#;
        assert!(can_be_cut("null", byte_level, ""));
        assert!(can_be_cut(composed, r#"{"type":"WhitespaceSplit"}"#, ""));
        let special = r#"{"content":"<a b>","special":true,"lstrip":true}"#;
        assert!(can_be_cut("null", byte_level, special));
        assert!(can_be_cut("null", byte_level, r#"{"content":"<a>"}"#));
        for (normalizer, pre_tokenizer, added) in [
            (r#"{"type":"Prepend","prepend":"_"}"#, byte_level, ""),
            (
                "null",
                r#"{"type":"ByteLevel","add_prefix_space":true}"#,
                "",
            ),
            (
                "null",
                r#"{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}"#,
                "",
            ),
            ("null", r#"{"type":"Metaspace"}"#, ""),
            ("null", "null", ""),
            ("null", byte_level, r#"{"content":"a b"}"#),
            ("null", byte_level, r#"{"content":"ab","rstrip":true}"#),
        ] {
            assert!(
                !can_be_cut(normalizer, pre_tokenizer, added),
                "{normalizer} {pre_tokenizer} {added}"
            );
        }
    }

    #[test]
    fn rules_that_are_too_large_or_too_deep_are_refused() {
        let refusal = |normalizer: &str| {
            let json = format!(r#"{{"normalizer":{normalizer}}}"#);
            Rules::read(json.as_bytes()).unwrap_err()
        };
        let large = format!(r#"{{"prepend":"{}"}}"#, "x".repeat(MOST_RULE_BYTES));
        assert!(refusal(&large).contains("its normalizer has "));
        let deep = format!("{}{}", "[".repeat(40), "]".repeat(40));
        assert!(refusal(&deep).contains("nested"));
        assert!(refusal(r#"{"precompiled_charsmap":"////f0FB"}"#).contains("cut off"));
    }

    #[test]
    fn the_longest_text_of_a_charsmap_is_found() {
        // A trie of four bytes, then "abc", 0, "de", 0.
        let bytes = b"\x04\0\0\0\0\0\0\0abc\0de\0";
        let text = "BAAAAAAAAABhYmMAZGUA";
        assert_eq!(base64(text).unwrap(), bytes);
        assert_eq!(longest_charsmap_entry(text), Ok(3));
        assert_eq!(base64("YQ==").unwrap(), b"a");
        assert!(base64("Y Q").is_none());
        assert!(longest_charsmap_entry("").is_err());
    }
}
