//! Text to token ids and back: bytes, GPT-2's vocabulary, or a Hugging Face tokenizer.json.
//!
//! Input text is always ordinary text. A document that happens to contain `<|endoftext|>` gets
//! the tokens of those thirteen characters: only the corpus itself places the real token.
//!
//! Text is encoded in pieces of 256 KiB, so that memory and the time of a piece are bounded
//! whatever the text: GPT-2's pairs of a word take some 50 times its bytes, a tokenizer.json up to
//! some 300 times a piece. A piece ends where the tokens beside the cut are those of the uncut
//! text. A text without such a place (a word above 256 KiB, or a tokenizer.json whose rules are
//! not known to have one) is cut where it looks best, and the corpus counts such cuts for its
//! user.
//!
//! A tokenizer.json may come from anywhere. The file may have 64 MiB and a token 4 KiB, its rules
//! are checked (`rules`), run under limits (`bounded`) and behind a wall (`guard`): a bad file is
//! an error that names it.

mod around;
pub(crate) mod marked;
pub(crate) mod special;

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use around::Around;
use sha2::{Digest, Sha256};
use tokenizers::TokenizerImpl;
use tokenizers::models::ModelWrapper;

use crate::boundary;
use crate::bounded::{
    BoundedDecoder, BoundedNormalizer, BoundedPreTokenizer, NoPostProcessor, allowing,
};
use crate::error::DataError;
use crate::guard::guarded;
use crate::rules::Rules;

/// Targets are `i32` on every device, so this is the largest id a batch can hold.
pub(crate) const LARGEST_TOKEN_ID: u32 = i32::MAX as u32;

/// The byte tokenizer's end-of-text, the first id that is no byte.
const BYTES_END_OF_TEXT: u32 = 256;
const GPT2_END_OF_TEXT: u32 = 50_256;
const END_OF_TEXT: &str = "<|endoftext|>";

/// The longest text that is encoded at once: large enough that the work of a piece dwarfs the
/// cost of handing it to a thread.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// The largest tokenizer.json that is read: twice the largest that is published. Loading takes
/// some 20 times its bytes.
pub(crate) const LARGEST_FILE: u64 = 64 << 20;

/// The longest token that a tokenizer.json may have: a text may be nothing but that token, and
/// the library writes it out each time.
const LONGEST_TOKEN: usize = 4 << 10;

/// Whitespace runs beyond this many bytes are handed to the regex engine on their own: far below
/// where it fails, far above what ordinary text holds.
pub(crate) const LONGEST_WHITESPACE_RUN: usize = 4096;

/// How the common families spell the token that ends a document, in order of preference. A
/// tokenizer.json does not say which of its special tokens has that meaning.
const END_OF_TEXT_SPELLINGS: [&str; 10] = [
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "EOS",
    "<｜end▁of▁sentence｜>",
    "[SEP]",
];

/// What to tokenise with, as the user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// Ids 0..=255 are bytes, 256 ends a document.
    Bytes,
    /// GPT-2's byte-pair encoding, 50257 ids.
    Gpt2,
    /// Byte pairs that are learned from the data itself: see [`crate::train_tokenizer`].
    Trained,
    /// A Hugging Face tokenizer.json.
    File(PathBuf),
}

impl FromStr for TokenizerSpec {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "bytes" | "byte" => Self::Bytes,
            "gpt2" | "gpt-2" => Self::Gpt2,
            "train" | "trained" => Self::Trained,
            _ => Self::File(PathBuf::from(name)),
        })
    }
}

impl fmt::Display for TokenizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("bytes"),
            Self::Gpt2 => f.write_str("gpt2"),
            Self::Trained => f.write_str("train"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The library's tokenizer with its parts under limits.
type FileTokenizer = TokenizerImpl<
    ModelWrapper,
    BoundedNormalizer,
    BoundedPreTokenizer,
    NoPostProcessor,
    BoundedDecoder,
>;

/// A place to cut a text at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) at: usize,
    /// Whether the tokens of both sides are those of the uncut text.
    pub(crate) is_exact: bool,
}

/// A loaded tokenizer. Encoding and decoding may be called from any number of threads.
#[derive(Clone)]
pub struct Tokenizer {
    name: String,
    kind: Kind,
    vocab_size: usize,
    end_of_text: Option<u32>,
    fingerprint: String,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    Gpt2(&'static tiktoken_rs::CoreBPE),
    File {
        inner: Arc<FileTokenizer>,
        /// See `Rules::can_be_cut_at_whitespace`.
        can_be_cut: bool,
        /// What its post-processor puts around a text.
        around: Around,
    },
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.name)
            .field("vocab_size", &self.vocab_size)
            .field("end_of_text", &self.end_of_text)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    pub fn load(spec: &TokenizerSpec) -> Result<Self, DataError> {
        match spec {
            TokenizerSpec::Bytes => Ok(Self {
                name: spec.to_string(),
                kind: Kind::Bytes,
                vocab_size: 257,
                end_of_text: Some(BYTES_END_OF_TEXT),
                fingerprint: "bytes-257".to_owned(),
            }),
            TokenizerSpec::Gpt2 => Ok(Self {
                name: spec.to_string(),
                kind: Kind::Gpt2(tiktoken_rs::r50k_base_singleton()),
                vocab_size: 50_257,
                end_of_text: Some(GPT2_END_OF_TEXT),
                fingerprint: "gpt2-50257".to_owned(),
            }),
            TokenizerSpec::Trained => Err(DataError::TokenizerTraining {
                problem: "there is no data here to train it on".to_owned(),
            }),
            TokenizerSpec::File(path) => Self::from_json_bytes(path, &read_file(path)?),
        }
    }

    /// The tokenizer of a tokenizer.json with that content; `path` names it in messages. Whatever
    /// the content, this returns.
    pub fn from_json_bytes(path: &Path, content: &[u8]) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let unusable = |problem: String| DataError::TokenizerParse {
            path: path.to_path_buf(),
            problem,
        };
        if content.len() as u64 > LARGEST_FILE {
            return Err(unusable(too_large()));
        }
        let rules = Rules::read(content).map_err(unusable)?;
        let inner = guarded(|| allowing(|| build(content)))
            .and_then(|built| built)
            .and_then(|built| built)
            .map_err(unusable)?;

        let vocabulary = inner.get_vocab(true);
        if let Some(longest) = vocabulary.keys().map(String::len).max()
            && longest > LONGEST_TOKEN
        {
            return Err(unusable(format!(
                "a token of its vocabulary has {longest} bytes, and at most {LONGEST_TOKEN} are read"
            )));
        }
        // Ids may have gaps, so the embedding needs the largest one, not the number of entries.
        let Some(largest) = vocabulary.into_values().max() else {
            return Err(unusable("its vocabulary is empty".to_owned()));
        };
        if largest > LARGEST_TOKEN_ID {
            return Err(DataError::TokenIdTooLarge {
                tokenizer: name,
                id: largest,
                largest: LARGEST_TOKEN_ID,
            });
        }
        let end_of_text = END_OF_TEXT_SPELLINGS
            .iter()
            .find_map(|spelling| inner.token_to_id(spelling));
        Ok(Self {
            name,
            kind: Kind::File {
                inner: Arc::new(inner),
                can_be_cut: rules.can_be_cut_at_whitespace(),
                around: Around::of(content),
            },
            vocab_size: largest as usize + 1,
            end_of_text,
            fingerprint: format!("tokenizer-json-{:x}", Sha256::digest(content)),
        })
    }

    /// How the user named it, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that ends a document; a tokenizer.json may have none.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The same for two tokenizers exactly when they give the same ids, as far as can be told:
    /// a tokenizer.json is identified by its content, not its path.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    /// The ids of `text`, without any special token added or recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut rest = text;
        let mut ids = Vec::new();
        while let Some(cut) = self.cut(rest) {
            ids.append(&mut self.encode_piece(&rest[..cut.at])?);
            rest = &rest[cut.at..];
        }
        ids.append(&mut self.encode_piece(rest)?);
        Ok(ids)
    }

    /// The ids of a text that is not longer than a piece.
    fn encode_piece(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoded = match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Gpt2(inner) => guarded(|| {
                let parts = boundary::parts(text, LONGEST_WHITESPACE_RUN);
                match parts.as_slice() {
                    [whole] => inner.encode_ordinary(whole),
                    parts => parts
                        .iter()
                        .flat_map(|part| inner.encode_ordinary(part))
                        .collect(),
                }
            }),
            Kind::File { inner, .. } => guarded(|| allowing(|| inner.encode_fast(text, false)))
                .and_then(|encoding| encoding)
                .and_then(|encoding| match encoding {
                    Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                    Err(problem) => Err(problem.to_string()),
                }),
        };
        encoded.map_err(|problem| DataError::Encode {
            tokenizer: self.name.clone(),
            problem,
        })
    }

    /// The text of `ids`. Bytes that form no character, and ids outside the vocabulary, become
    /// U+FFFD: a half-trained model may produce any of them.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::File { inner, .. } => match guarded(|| inner.decode(ids, false)) {
                Ok(Ok(text)) => text,
                _ => char::REPLACEMENT_CHARACTER.to_string(),
            },
            _ => {
                let mut bytes = Vec::with_capacity(ids.len() * 4);
                for &id in ids {
                    self.push_bytes(id, &mut bytes);
                }
                String::from_utf8_lossy(&bytes).into_owned()
            }
        }
    }

    /// Appends the bytes of one id and answers true, or false for a tokenizer whose ids have no
    /// bytes of their own because its decoder joins tokens into words.
    pub(crate) fn push_bytes(&self, id: u32, bytes: &mut Vec<u8>) -> bool {
        match &self.kind {
            Kind::Bytes => match u8::try_from(id) {
                Ok(byte) => bytes.push(byte),
                Err(_) if id == BYTES_END_OF_TEXT => bytes.extend(END_OF_TEXT.bytes()),
                Err(_) => bytes.extend("\u{FFFD}".bytes()),
            },
            Kind::Gpt2(inner) => match inner.decode_bytes(&[id]) {
                Ok(token) => bytes.extend(token),
                Err(_) => bytes.extend("\u{FFFD}".bytes()),
            },
            Kind::File { .. } => return false,
        }
        true
    }

    /// Where the first piece of a text ends that is longer than one. It depends on that piece
    /// alone, so that a text is cut at the same places however it is read.
    pub(crate) fn cut(&self, text: &str) -> Option<Cut> {
        if text.len() <= PIECE_BYTES {
            return None;
        }
        let piece = &text[..text.floor_char_boundary(PIECE_BYTES)];
        let whitespace = || boundary::last_cut(piece);
        let change = || boundary::last_change(piece);
        let (found, is_exact) = match &self.kind {
            Kind::Bytes => (Some(piece.len()), true),
            Kind::Gpt2(_) => (whitespace().or_else(change), true),
            Kind::File { can_be_cut, .. } => match whitespace() {
                Some(at) => (Some(at), *can_be_cut),
                None => (change(), false),
            },
        };
        Some(match found {
            Some(at) => Cut { at, is_exact },
            None => Cut {
                at: piece.len(),
                is_exact: false,
            },
        })
    }
}

/// Loads a tokenizer.json from any bytes and sends any text through it and back: the number of
/// its ids, or None where there was an error. For fuzzing: it returns, whatever it is given.
#[doc(hidden)]
pub fn exercise_tokenizer_json(json: &[u8], text: &str) -> Option<usize> {
    let tokenizer = Tokenizer::from_json_bytes(Path::new("tokenizer.json"), json).ok()?;
    let ids = tokenizer.encode(text).ok()?;
    tokenizer.decode(&ids);
    Some(ids.len())
}

/// Reads a tokenizer.json, which is not larger than one may be.
fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    cinch_files::read_regular(path, LARGEST_FILE).map_err(|source| DataError::TokenizerRead {
        path: path.to_path_buf(),
        source,
    })
}

fn too_large() -> String {
    format!("it has more than {} MiB", LARGEST_FILE >> 20)
}

fn build(content: &[u8]) -> Result<FileTokenizer, String> {
    let mut inner = FileTokenizer::from_bytes(content).map_err(|problem| problem.to_string())?;
    // Many published files carry the truncation and padding of the run they were saved from;
    // a corpus must be neither cut nor filled up.
    inner
        .with_truncation(None)
        .map_err(|problem| problem.to_string())?;
    inner.with_padding(None);
    inner.set_encode_special_tokens(true);
    if inner.get_pre_tokenizer().is_none() {
        inner.with_pre_tokenizer(Some(BoundedPreTokenizer::default()));
    }
    Ok(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_json(json: &str) -> Result<Tokenizer, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Tokenizer::load(&TokenizerSpec::File(path))
    }

    fn word_level(vocab: &str, extra: &str) -> String {
        format!(
            r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}},
            "padding":null,"added_tokens":[{extra}],"normalizer":null,
            "pre_tokenizer":{{"type":"WhitespaceSplit"}},"post_processor":null,"decoder":null,
            "model":{{"type":"WordLevel","vocab":{vocab},"unk_token":"?"}}}}"#
        )
    }

    #[test]
    fn names_round_trip() {
        for name in ["bytes", "gpt2", "train", "models/tokenizer.json"] {
            assert_eq!(name.parse::<TokenizerSpec>().unwrap().to_string(), name);
        }
        assert_eq!("byte".parse(), Ok(TokenizerSpec::Bytes));
    }

    #[test]
    fn bytes_are_their_own_ids() {
        let bytes = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        assert_eq!(bytes.encode("hé").unwrap(), [104, 0xC3, 0xA9]);
        assert_eq!(bytes.decode(&[104, 0xC3, 0xA9, 256]), "hé<|endoftext|>");
        assert_eq!(bytes.decode(&[0xC3, 999]), "\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn gpt2_gives_the_published_ids() {
        let gpt2 = Tokenizer::load(&TokenizerSpec::Gpt2).unwrap();
        assert_eq!(gpt2.encode("Hello world").unwrap(), [15496, 995]);
        assert_eq!(
            gpt2.encode("The quick brown fox").unwrap(),
            [464, 2068, 7586, 21831]
        );
        assert_eq!(gpt2.decode(&[50256]), "<|endoftext|>");
        assert_eq!(gpt2.decode(&[60_000]), "\u{FFFD}");
        let text = "fn main() {\n\n    let x = 1;\t// naïve 漢字 👍\r\n}\n";
        assert_eq!(gpt2.decode(&gpt2.encode(text).unwrap()), text);
    }

    #[test]
    fn special_text_in_ordinary_input_stays_ordinary() {
        for spec in [TokenizerSpec::Bytes, TokenizerSpec::Gpt2] {
            let tokenizer = Tokenizer::load(&spec).unwrap();
            let ids = tokenizer.encode("a<|endoftext|>b").unwrap();
            assert!(
                !ids.contains(&tokenizer.end_of_text().unwrap()),
                "{spec}: {ids:?}"
            );
        }
        let special = r#"{"id":3,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#;
        let file = from_json(&word_level(r#"{"?":0,"a":1,"b":2}"#, special)).unwrap();
        assert_eq!(file.end_of_text(), Some(3));
        assert_eq!(file.encode("a </s> b").unwrap(), [1, 0, 2]);
    }

    #[test]
    fn a_file_of_padding_does_not_stop_gpt2() {
        // Beyond a million spaces the regex engine fails, and the tokenizer underneath panics.
        let gpt2 = Tokenizer::load(&TokenizerSpec::Gpt2).unwrap();
        let text = format!("a{}b", " ".repeat(1_500_000));
        assert_eq!(gpt2.decode(&gpt2.encode(&text).unwrap()), text);
    }

    #[test]
    fn truncation_of_a_tokenizer_file_is_switched_off() {
        let file = from_json(&word_level(r#"{"?":0,"a":1,"b":7}"#, "")).unwrap();
        assert_eq!(file.encode("a b a b nothing").unwrap(), [1, 7, 1, 7, 0]);
        assert_eq!(file.vocab_size(), 8, "ids have gaps");
        assert_eq!(file.end_of_text(), None);
    }

    #[test]
    fn the_content_of_a_tokenizer_file_is_its_fingerprint() {
        let vocab = r#"{"?":0,"a":1}"#;
        let one = from_json(&word_level(vocab, "")).unwrap();
        let same = from_json(&word_level(vocab, "")).unwrap();
        let other = from_json(&word_level(r#"{"?":0,"b":1}"#, "")).unwrap();
        assert_eq!(one.fingerprint(), same.fingerprint());
        assert_ne!(one.fingerprint(), other.fingerprint());
    }

    #[test]
    fn bad_tokenizer_files_are_errors_that_name_the_file() {
        let message = from_json("{\"version\":").unwrap_err().to_string();
        assert!(
            message.contains("tokenizer.json") && message.contains("hint:"),
            "{message}"
        );
        assert!(matches!(
            from_json("[1, 2]"),
            Err(DataError::TokenizerParse { .. })
        ));
        assert!(matches!(
            from_json(&word_level(r#"{"a":4294967295}"#, "")),
            Err(DataError::TokenIdTooLarge {
                id: 4_294_967_295,
                ..
            })
        ));
        let missing = Tokenizer::load(&TokenizerSpec::File("no/such/tokenizer.json".into()));
        assert!(matches!(missing, Err(DataError::TokenizerRead { .. })));
    }
}
