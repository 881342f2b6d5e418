//! Text as an encoder such as BERT reads it: between two marks.

use super::Tokenizer;
use super::around::Around;
use super::special::SpecialTokenizer;
use crate::error::DataError;

/// BERT's own, where a tokenizer has them and does not say what it puts around a text.
const MARKS: [&str; 2] = ["[CLS]", "[SEP]"];

/// A tokenizer that puts around each text what its file says.
pub struct EncoderTokenizer<'a> {
    inner: SpecialTokenizer<'a>,
    around: Around,
    has_other_marks: bool,
}

/// A text as tokens.
pub struct EncodedText {
    pub ids: Vec<i32>,
    /// Whether it has more tokens than were asked for.
    pub is_cut: bool,
}

impl<'a> EncoderTokenizer<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let inner = SpecialTokenizer::new(tokenizer);
        let [before, after] = MARKS.map(|mark| inner.id(mark).into_iter().collect());
        let usual = Around { before, after };
        let around = match inner.around().is_empty() {
            true => usual.clone(),
            false => inner.around().clone(),
        };
        Self {
            has_other_marks: around != usual,
            inner,
            around,
        }
    }

    /// What tells the tokens apart from those between BERT's own marks, where they are not.
    pub(crate) fn fingerprint(&self) -> String {
        let Around { before, after } = &self.around;
        match self.has_other_marks {
            true => format!("-between-{before:?}-{after:?}"),
            false => String::new(),
        }
    }

    /// The tokens of a text, at most `length` with the marks. An empty text has no tokens but
    /// those.
    pub fn encode(&self, text: &str, length: usize) -> Result<EncodedText, DataError> {
        let Around { before, after } = &self.around;
        let room = length.saturating_sub(before.len() + after.len());
        let placed = self.inner.encode(text)?;
        let is_cut = placed.len() > room;
        let ids = placed.into_iter().take(room).map(|(id, _)| id);
        let ids = before
            .iter()
            .copied()
            .chain(ids)
            .chain(after.iter().copied());
        Ok(EncodedText {
            ids: ids.take(length).map(u32::cast_signed).collect(),
            is_cut,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerSpec;

    fn tokenizer(processor: &str) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let added = |id: u32, content: &str| {
            format!(
                r#"{{"id":{id},"content":"{content}","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}"#
            )
        };
        let added = [
            added(0, "<s>"),
            added(1, "</s>"),
            added(2, "[CLS]"),
            added(3, "[SEP]"),
        ];
        let text = format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{}],"normalizer":null,
            "pre_tokenizer":{{"type":"WhitespaceSplit"}},"post_processor":{processor},"decoder":null,
            "model":{{"type":"WordLevel","vocab":{{"<s>":0,"</s>":1,"[CLS]":2,"[SEP]":3,"?":4,"a":5}},"unk_token":"?"}}}}"#,
            added.join(",")
        );
        std::fs::write(&path, text).unwrap();
        Tokenizer::load(&TokenizerSpec::File(path)).unwrap()
    }

    /// An encoder of many languages has the marks of another tokenizer, whatever its vocabulary
    /// holds.
    #[test]
    fn marks_are_those_of_the_file_and_else_those_of_bert() {
        let template = r#"{"type":"TemplateProcessing",
            "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},
                {"SpecialToken":{"id":"</s>","type_id":0}}],
            "pair":[],
            "special_tokens":{"<s>":{"id":"<s>","ids":[0],"tokens":["<s>"]},
                "</s>":{"id":"</s>","ids":[1],"tokens":["</s>"]}}}"#;
        for (processor, first, last) in [(template, 0, 1), ("null", 2, 3)] {
            let tokenizer = tokenizer(processor);
            let marked = EncoderTokenizer::new(&tokenizer);
            let of = |text: &str, length: usize| {
                let encoded = marked.encode(text, length).unwrap();
                (encoded.ids, encoded.is_cut)
            };
            assert_eq!(of("a a", 4), (vec![first, 5, 5, last], false));
            assert_eq!(of("a a a", 4), (vec![first, 5, 5, last], true));
            assert_eq!(of("", 4), (vec![first, last], false));
            assert_eq!(of("a", 1).0, [first]);
            // Data between other marks are other data.
            let others = marked.fingerprint();
            assert_eq!(others.is_empty(), first == 2, "{others}");
        }
    }
}
