//! What a model reads: text from files or from the program itself, as windows of token ids.
//!
//! In the order in which text flows: [`Source`] names it, the files are found and read as
//! documents, a [`Tokenizer`] turns them into ids, a cache keeps those on disk, and
//! [`Corpus::windows`] cuts them into samples whose order is a function of a seed and a sample
//! number. [`synth`] writes code-like files for those who have no data yet. [`sample`] is for
//! fine-tuning: prompts and conversations, of which only a part is learned.
//!
//! ```
//! use cinch_data::{Tokenizer, TokenizerSpec};
//!
//! let tokenizer = Tokenizer::load(&TokenizerSpec::Gpt2)?;
//! let ids = tokenizer.encode("The arena holds every tensor.")?;
//! assert_eq!(tokenizer.decode(&ids), "The arena holds every tensor.");
//! assert_eq!(tokenizer.vocab_size(), 50257);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod boundary;
mod bounded;
mod cache;
mod corpus;
mod decoder;
mod document;
mod embedded;
mod encode;
mod error;
mod guard;
mod json_line;
mod permutation;
mod progress;
mod random;
mod rules;
pub mod sample;
mod source;
pub mod synth;
pub mod taxonomy;
mod token_file;
mod tokenizer;
mod trained;
mod window;

pub use cache::default_cache_folder;
pub use corpus::{Corpus, DataOptions};
pub use decoder::Decoder;
pub use error::DataError;
pub use progress::{NoProgress, Progress};
pub use source::{READ_EXTENSIONS, Source};
#[doc(hidden)]
pub use tokenizer::exercise_tokenizer_json;
pub use tokenizer::marked::{EncodedText, EncoderTokenizer};
pub use tokenizer::{Tokenizer, TokenizerSpec};
pub use trained::train_tokenizer;
pub use window::{Split, Windows};
