//! Encoding text in which special tokens are meant as such.
//!
//! A corpus is ordinary text, and `Tokenizer::encode` never gives a special token. A rendered
//! chat template is the opposite: its `<|im_end|>` is the token. Both views of a tokenizer.json
//! need settings of their own inside the library, so this is a second copy, for as long as
//! samples are prepared.

use std::ops::Range;

use super::around::Around;
use super::{BYTES_END_OF_TEXT, END_OF_TEXT, FileTokenizer, GPT2_END_OF_TEXT, Kind, Tokenizer};
use crate::bounded::allowing;
use crate::error::DataError;
use crate::guard::guarded;

/// An id and the bytes of the text that it stands for.
pub(crate) type Placed = (u32, Range<usize>);

/// A tokenizer that recognises special tokens.
pub(crate) struct SpecialTokenizer<'a> {
    tokenizer: &'a Tokenizer,
    inner: Option<Box<FileTokenizer>>,
    around: Around,
}

impl<'a> SpecialTokenizer<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        let (inner, around) = match &tokenizer.kind {
            Kind::Bytes | Kind::Gpt2(_) => (None, Around::default()),
            Kind::File { inner, around, .. } => {
                let mut inner = FileTokenizer::clone(inner);
                inner.set_encode_special_tokens(false);
                (Some(Box::new(inner)), around.clone())
            }
        };
        Self {
            tokenizer,
            inner,
            around,
        }
    }

    /// Whether the tokenizer is a tokenizer.json.
    pub(crate) fn is_of_file(&self) -> bool {
        self.inner.is_some()
    }

    /// What the tokenizer puts before a text by itself, such as LLaMA's beginning-of-text.
    pub(crate) fn beginning(&self) -> &[u32] {
        &self.around.before
    }

    /// What the tokenizer puts before and after a text by itself.
    pub(crate) fn around(&self) -> &Around {
        &self.around
    }

    /// The id of one token by its text.
    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        match &self.inner {
            Some(inner) => inner.token_to_id(token),
            None => self
                .tokenizer
                .end_of_text()
                .filter(|_| token == END_OF_TEXT),
        }
    }

    /// Whether an id stands for a text of its own, such as a special token, that must stay whole.
    pub(crate) fn is_added(&self, id: u32) -> bool {
        match &self.inner {
            Some(inner) => inner
                .get_added_vocabulary()
                .get_added_tokens_decoder()
                .contains_key(&id),
            None => self.tokenizer.end_of_text() == Some(id),
        }
    }

    /// The ids of `text` with their places in it. A long one is encoded in pieces.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<Placed>, DataError> {
        let mut start = 0;
        let mut placed = Vec::new();
        while let Some(cut) = self.tokenizer.cut(&text[start..]) {
            let end = start + cut.at;
            self.add_piece(start, &text[start..end], &mut placed)?;
            start = end;
        }
        self.add_piece(start, &text[start..], &mut placed)?;
        Ok(placed)
    }

    fn add_piece(
        &self,
        start: usize,
        piece: &str,
        placed: &mut Vec<Placed>,
    ) -> Result<(), DataError> {
        let moved = |place: Range<usize>| place.start + start..place.end + start;
        let encoded = self.encode_piece(piece)?;
        placed.extend(encoded.into_iter().map(|(id, place)| (id, moved(place))));
        Ok(())
    }

    /// The ids of a text that is not longer than a piece.
    fn encode_piece(&self, text: &str) -> Result<Vec<Placed>, DataError> {
        let Some(inner) = &self.inner else {
            return self.encode_parts(text);
        };
        let encoding = guarded(|| allowing(|| inner.encode(text, false)))
            .and_then(|encoding| encoding)
            .and_then(|encoding| encoding.map_err(|problem| problem.to_string()))
            .map_err(|problem| encode_error(self.tokenizer, problem))?;
        let places = encoding
            .get_offsets()
            .iter()
            .map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    /// The tokenizers without a file have one special token, and their ids have bytes.
    fn encode_parts(&self, text: &str) -> Result<Vec<Placed>, DataError> {
        let end_of_text = match self.tokenizer.kind {
            Kind::Bytes => BYTES_END_OF_TEXT,
            _ => GPT2_END_OF_TEXT,
        };
        let mut placed = Vec::new();
        let mut at = 0;
        let mut bytes = Vec::new();
        for (index, part) in text.split(END_OF_TEXT).enumerate() {
            if index > 0 {
                placed.push((end_of_text, at..at + END_OF_TEXT.len()));
                at += END_OF_TEXT.len();
            }
            for id in self.tokenizer.encode(part)? {
                bytes.clear();
                self.tokenizer.push_bytes(id, &mut bytes);
                placed.push((id, at..at + bytes.len()));
                at += bytes.len();
            }
        }
        Ok(placed)
    }
}

fn encode_error(tokenizer: &Tokenizer, problem: String) -> DataError {
    DataError::Encode {
        tokenizer: tokenizer.name().to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerSpec;

    #[test]
    fn the_end_of_text_is_a_token_and_places_are_bytes() {
        for spec in [TokenizerSpec::Bytes, TokenizerSpec::Gpt2] {
            let tokenizer = Tokenizer::load(&spec).unwrap();
            let special = SpecialTokenizer::new(&tokenizer);
            let text = "né <|endoftext|><|endoftext|> b";
            let placed = special.encode(text).unwrap();
            let end = tokenizer.end_of_text().unwrap();
            let ends: Vec<_> = placed.iter().filter(|(id, _)| *id == end).collect();
            assert_eq!(ends.len(), 2, "{placed:?}");
            assert_eq!(&text[ends[1].1.clone()], END_OF_TEXT);
            assert_eq!(placed.last().unwrap().1.end, text.len());
            assert!(
                placed
                    .windows(2)
                    .all(|pair| pair[0].1.end == pair[1].1.start)
            );
            assert_eq!(special.id(END_OF_TEXT), Some(end));
            assert!(special.is_added(end) && !special.is_added(98));
            assert_eq!(special.id("</s>"), None);
            assert!(special.beginning().is_empty());
        }
    }

    #[test]
    fn a_long_text_is_encoded_in_pieces_at_their_places() {
        let tokenizer = Tokenizer::load(&TokenizerSpec::Gpt2).unwrap();
        let special = SpecialTokenizer::new(&tokenizer);
        let text = format!("{}<|endoftext|> end", "one two\n".repeat(300_000));
        let placed = special.encode(&text).unwrap();
        let end = placed.iter().find(|(id, _)| *id == GPT2_END_OF_TEXT);
        assert_eq!(&text[end.unwrap().1.clone()], END_OF_TEXT);
        assert!(
            placed
                .windows(2)
                .all(|pair| pair[0].1.end == pair[1].1.start)
        );
        assert_eq!(placed.last().unwrap().1.end, text.len());
    }
}
