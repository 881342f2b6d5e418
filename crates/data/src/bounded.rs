//! The rules of a tokenizer.json, run one after another with a limit on how much text they make.
//!
//! A rule may replace a character by a text, and the next one each character of that text: a file
//! of a few lines can ask for more memory than there is. So before a rule runs, the most that it
//! could make of the text at hand is computed from the rule, and refused above
//! [`MOST_POSSIBLE`]; and what goes on to be split into tokens, each of which takes some hundred
//! bytes of memory, is refused above [`MOST_TEXT`]. Both are far above what a piece of text
//! becomes in a published tokenizer.
//!
//! The library takes its parts by type, so the parts here are the library's, wrapped. It drops
//! errors of normalizers, therefore a refusal is also kept for [`allowing`] to find.

use std::cell::{Cell, RefCell};

use serde::{Deserialize, Deserializer};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{
    Decoder, Encoding, NormalizedString, Normalizer, PostProcessor, PreTokenizedString,
    PreTokenizer,
};

use crate::rules::{CHARSMAP, longest_charsmap_entry};

/// Bytes that one rule may be able to make.
pub(crate) const MOST_POSSIBLE: usize = 16 << 20;
/// Bytes that may be split into tokens at once.
pub(crate) const MOST_TEXT: usize = 1 << 20;

thread_local! {
    /// Bytes that normalizers have made since the work began.
    static MADE: Cell<usize> = const { Cell::new(0) };
    static REFUSAL: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `work` with a fresh allowance. The first refusal in it, if there was any, is the error.
pub(crate) fn allowing<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    MADE.set(0);
    REFUSAL.take();
    let done = work();
    match REFUSAL.take() {
        Some(refusal) => Err(refusal),
        None => Ok(done),
    }
}

fn refuse<T>(what: &str, bytes: usize, most: usize) -> tokenizers::Result<T> {
    let refusal = format!(
        "its {what} can make {bytes} bytes of a piece of text, and more than {most} are not made"
    );
    REFUSAL.with_borrow_mut(|kept| {
        // What follows on a refusal that was dropped is refused for its sake.
        kept.get_or_insert_with(|| refusal.clone());
    });
    Err(refusal.into())
}

/// The most bytes that a rule makes of a text: `times` as many, and `more` once.
#[derive(Debug, Clone, Copy)]
struct Growth {
    times: usize,
    more: usize,
}

impl Growth {
    const fn times(times: usize) -> Self {
        Self { times, more: 0 }
    }

    /// A replacement at every match: a match may be empty, and then there is one before each
    /// byte and one at the end.
    fn replacing(content: &str) -> Self {
        Self {
            times: content.len().saturating_add(1),
            more: content.len(),
        }
    }

    fn of(self, bytes: usize) -> usize {
        bytes.saturating_mul(self.times).saturating_add(self.more)
    }
}

/// Normalizers in a row.
#[derive(Clone, Debug)]
pub(crate) struct BoundedNormalizer(Vec<(NormalizerWrapper, Growth)>);

impl<'de> Deserialize<'de> for BoundedNormalizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        flatten_normalizer(NormalizerWrapper::deserialize(deserializer)?, &mut steps);
        Ok(Self(steps))
    }
}

fn flatten_normalizer(wrapper: NormalizerWrapper, steps: &mut Vec<(NormalizerWrapper, Growth)>) {
    let growth = match &wrapper {
        NormalizerWrapper::Sequence(_) => {
            if let NormalizerWrapper::Sequence(list) = wrapper {
                for step in list {
                    flatten_normalizer(step, steps);
                }
            }
            return;
        }
        NormalizerWrapper::Replace(replace) => Growth::replacing(&replace.content),
        NormalizerWrapper::Prepend(prepend) => Growth {
            times: 1,
            more: prepend.prepend.len(),
        },
        NormalizerWrapper::Precompiled(_) => Growth::times(longest_entry(&wrapper)),
        // The longest decompositions of Unicode, in bytes of UTF-8.
        NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => Growth::times(11),
        NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => Growth::times(3),
        // Accents apart (3), blanks around a character (5 for 3), lower case (3 for 2).
        NormalizerWrapper::BertNormalizer(_) => Growth::times(3 * 2 * 2),
        NormalizerWrapper::Lowercase(_) | NormalizerWrapper::ByteLevel(_) => Growth::times(2),
        NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::Nmt(_) => Growth::times(1),
    };
    steps.push((wrapper, growth));
}

/// The longest text that a sentencepiece normalizer puts in the place of a character. It shows
/// its rules only as the file has them.
fn longest_entry(charsmap: &NormalizerWrapper) -> usize {
    let written = serde_json::to_value(charsmap).unwrap_or_default();
    let text = written[CHARSMAP].as_str().unwrap_or_default();
    longest_charsmap_entry(text).map_or(usize::MAX, |longest| longest.max(1))
}

impl Normalizer for BoundedNormalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for (step, growth) in &self.0 {
            let possible = MADE.get().saturating_add(growth.of(text.get().len()));
            if possible > MOST_POSSIBLE {
                return refuse("normalizer", possible, MOST_POSSIBLE);
            }
            step.normalize(text)?;
        }
        MADE.set(MADE.get().saturating_add(text.get().len()));
        Ok(())
    }
}

/// Pre-tokenizers in a row. None at all is one of them, for the limit on what is split.
#[derive(Clone, Debug, Default)]
pub(crate) struct BoundedPreTokenizer(Vec<(PreTokenizerWrapper, Growth)>);

impl<'de> Deserialize<'de> for BoundedPreTokenizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        flatten_pre_tokenizer(PreTokenizerWrapper::deserialize(deserializer)?, &mut steps);
        Ok(Self(steps))
    }
}

fn flatten_pre_tokenizer(
    wrapper: PreTokenizerWrapper,
    steps: &mut Vec<(PreTokenizerWrapper, Growth)>,
) {
    let growth = match &wrapper {
        PreTokenizerWrapper::Sequence(_) => {
            if let PreTokenizerWrapper::Sequence(list) = wrapper {
                for step in list {
                    flatten_pre_tokenizer(step, steps);
                }
            }
            return;
        }
        // A character of up to four bytes for each blank, and one before each part.
        PreTokenizerWrapper::Metaspace(_) => Growth::times(8),
        // Two bytes for each byte, and a blank before each part.
        PreTokenizerWrapper::ByteLevel(_) => Growth::times(4),
        _ => Growth::times(1),
    };
    steps.push((wrapper, growth));
}

impl PreTokenizer for BoundedPreTokenizer {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        let mut bytes = bytes_of(text)?;
        for (step, growth) in &self.0 {
            let possible = growth.of(bytes);
            if possible > MOST_POSSIBLE {
                return refuse("pre-tokenizer", possible, MOST_POSSIBLE);
            }
            step.pre_tokenize(text)?;
            bytes = bytes_of(text)?;
        }
        Ok(())
    }
}

/// The bytes of all parts that are to become tokens.
fn bytes_of(text: &mut PreTokenizedString) -> tokenizers::Result<usize> {
    let bytes = Cell::new(0_usize);
    text.normalize(|part| {
        bytes.set(bytes.get() + part.get().len());
        Ok(())
    })?;
    match bytes.get() {
        bytes if bytes > MOST_TEXT => refuse("rules", bytes, MOST_TEXT),
        bytes => Ok(bytes),
    }
}

/// Decoders in a row.
#[derive(Clone, Debug)]
pub(crate) struct BoundedDecoder(Vec<(DecoderWrapper, Growth)>);

impl<'de> Deserialize<'de> for BoundedDecoder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        flatten_decoder(&DecoderWrapper::deserialize(deserializer)?, &mut steps);
        Ok(Self(steps))
    }
}

fn flatten_decoder(wrapper: &DecoderWrapper, steps: &mut Vec<(DecoderWrapper, Growth)>) {
    let growth = match wrapper {
        DecoderWrapper::Sequence(list) => {
            for step in list.get_decoders() {
                flatten_decoder(step, steps);
            }
            return;
        }
        DecoderWrapper::Replace(replace) => Growth::replacing(&replace.content),
        // A byte that is no character becomes three, a blank stands before a token or, where a
        // suffix is empty, between any two characters.
        _ => Growth::times(4),
    };
    steps.push((wrapper.clone(), growth));
}

impl Decoder for BoundedDecoder {
    fn decode_chain(&self, mut tokens: Vec<String>) -> tokenizers::Result<Vec<String>> {
        for (step, growth) in &self.0 {
            // One more byte for each token: rules also add to empty ones.
            let bytes = tokens.iter().map(|token| token.len() + 1).sum();
            let possible = growth.of(bytes);
            if possible > MOST_POSSIBLE {
                return refuse("decoder", possible, MOST_POSSIBLE);
            }
            tokens = step.decode_chain(tokens)?;
        }
        Ok(tokens)
    }
}

/// In place of the file's post-processor, which adds special tokens: none are wanted, and a
/// template may repeat the text any number of times.
#[derive(Clone, Debug)]
pub(crate) struct NoPostProcessor;

impl<'de> Deserialize<'de> for NoPostProcessor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

impl PostProcessor for NoPostProcessor {
    fn added_tokens(&self, _is_pair: bool) -> usize {
        0
    }

    fn process_encodings(
        &self,
        encodings: Vec<Encoding>,
        _add_special_tokens: bool,
    ) -> tokenizers::Result<Vec<Encoding>> {
        Ok(encodings)
    }
}
