//! Decoding one token at a time, for printing a text while it is being sampled.
//!
//! A character may be spread over several tokens. What is printed cannot be taken back, so bytes
//! that may still become a character are held until they have, or until they cannot any more.

use crate::tokenizer::Tokenizer;

/// No character of UTF-8 spans more tokens than this, so a longer wait is for a character that
/// will not come.
const LONGEST_WAIT: usize = 4;

/// Turns ids into printable text as they come.
#[derive(Debug)]
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes not printed yet: the beginning of a character.
    held: Vec<u8>,
    /// For tokenizers whose decoder joins tokens: the ids of the last printed step, which give
    /// the context that decides on a space before the next word, then the ids not printed yet.
    window: Vec<u32>,
    num_printed: usize,
}

impl<'a> Decoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            held: Vec::new(),
            window: Vec::new(),
            num_printed: 0,
        }
    }

    /// The text that is certain now that `id` has come; often empty inside a character.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.push_bytes(id, &mut self.held) {
            return self.take_certain();
        }
        self.window.push(id);
        let waiting = self.window.len() - self.num_printed;
        let text = self.unprinted();
        if text.ends_with(char::REPLACEMENT_CHARACTER) && waiting < LONGEST_WAIT {
            return String::new();
        }
        self.window.drain(..self.num_printed);
        self.num_printed = self.window.len();
        text
    }

    /// What is still held when the text ends, with U+FFFD for an unfinished character.
    pub fn finish(mut self) -> String {
        if self.window.is_empty() {
            return String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned();
        }
        self.unprinted()
    }

    /// What the unprinted ids add to the text of the printed ones.
    fn unprinted(&self) -> String {
        let before = self.tokenizer.decode(&self.window[..self.num_printed]);
        let whole = self.tokenizer.decode(&self.window);
        // Where the decoder rewrites what it gave before, the new ids are decoded on their own.
        match whole.strip_prefix(before.as_str()) {
            Some(added) => added.to_owned(),
            None => self.tokenizer.decode(&self.window[self.num_printed..]),
        }
    }

    /// Moves everything out of `held` but the incomplete character at its end.
    fn take_certain(&mut self) -> String {
        let mut certain = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(text) => {
                    certain.push_str(text);
                    self.held.clear();
                    return certain;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    certain.push_str(&String::from_utf8_lossy(&self.held[..valid]));
                    let Some(num_bad) = error.error_len() else {
                        self.held.drain(..valid);
                        return certain;
                    };
                    certain.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + num_bad);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::TokenizerSpec;

    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut decoder = Decoder::new(tokenizer);
        let mut steps: Vec<String> = ids.iter().map(|&id| decoder.push(id)).collect();
        steps.push(decoder.finish());
        steps
    }

    #[test]
    fn a_character_is_held_until_it_is_whole() {
        let bytes = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        assert_eq!(
            stream(&bytes, &[0x61, 0xC3, 0xA9, 0x62]),
            ["a", "", "é", "b", ""]
        );
        // A lead byte followed by a letter can no longer become a character.
        assert_eq!(stream(&bytes, &[0xC3, 0x61]), ["", "\u{FFFD}a", ""]);
        assert_eq!(stream(&bytes, &[0xE6, 0xBC]), ["", "", "\u{FFFD}"]);
    }

    #[test]
    fn the_stream_adds_up_to_the_whole() {
        let gpt2 = Tokenizer::load(&TokenizerSpec::Gpt2).unwrap();
        let text = "naïve 漢字 👍👩‍🚀 done\n";
        let ids = gpt2.encode(text).unwrap();
        let steps = stream(&gpt2, &ids);
        assert_eq!(steps.concat(), text);
        assert!(!steps.concat().contains(char::REPLACEMENT_CHARACTER));
    }

    #[test]
    fn words_of_a_tokenizer_file_keep_their_spaces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(
            &path,
            r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},
            "post_processor":null,
            "decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},
            "model":{"type":"WordLevel","vocab":{"?":0,"▁one":1,"▁two":2},"unk_token":"?"}}"#,
        )
        .unwrap();
        let file = Tokenizer::load(&TokenizerSpec::File(path)).unwrap();
        let ids = file.encode("one two one").unwrap();
        assert_eq!(ids, [1, 2, 1]);
        assert_eq!(stream(&file, &ids).concat(), "one two one");
    }
}
