//! Text as an encoder such as BERT reads it: between two marks.

use super::Tokenizer;
use super::special::TemplateTokenizer;
use crate::error::DataError;

/// A tokenizer whose texts begin and end with marks, where its vocabulary has them.
pub struct EncoderTokenizer<'a> {
    inner: TemplateTokenizer<'a>,
    first: Option<u32>,
    last: Option<u32>,
}

/// A text as tokens.
pub struct EncodedText {
    pub ids: Vec<i32>,
    /// Whether it has more tokens than were asked for.
    pub is_cut: bool,
}

impl<'a> EncoderTokenizer<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let inner = TemplateTokenizer::new(tokenizer);
        let [first, last] = ["[CLS]", "[SEP]"].map(|mark| inner.id(mark));
        Self { inner, first, last }
    }

    /// The tokens of a text, at most `length` with the marks. An empty text has no tokens but
    /// those.
    pub fn encode(&self, text: &str, length: usize) -> Result<EncodedText, DataError> {
        let around = usize::from(self.first.is_some()) + usize::from(self.last.is_some());
        let room = length.saturating_sub(around);
        let ids = self.inner.encode(text)?;
        let is_cut = ids.len() > room;
        let ids = ids.into_iter().take(room);
        let ids = self.first.into_iter().chain(ids).chain(self.last);
        Ok(EncodedText {
            ids: ids.take(length).map(u32::cast_signed).collect(),
            is_cut,
        })
    }
}
