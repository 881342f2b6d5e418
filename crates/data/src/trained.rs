//! A tokenizer of byte pairs that are learned from a text, by the library's trainer. It is kept in
//! the cache under a name that follows from the text and the size, like the text's tokens.
//!
//! At most 64 MiB of text are learned from, in pieces from all over it: frequencies of a language
//! hardly change beyond that, and memory and time stay bounded whatever the text. Words are told
//! apart as GPT-2 does, so that any text can be written and read back; a word of more bytes than
//! [`LONGEST_WORD`] teaches nothing and is left out.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, OffsetReferential, OffsetType,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, TokenizerImpl,
    Trainer,
};

use crate::boundary;
use crate::cache::Entry;
use crate::corpus::{DataOptions, Input, fingerprint, identify};
use crate::document::SourceRecord;
use crate::error::DataError;
use crate::guard::guarded;
use crate::progress::Progress;
use crate::tokenizer::{LARGEST_FILE, LONGEST_WHITESPACE_RUN, Tokenizer, TokenizerSpec};

/// Raised whenever the same text gives another tokenizer.
const VERSION: u32 = 1;

/// Padding, what is unknown, and the two ends of a text: the first ids, in this order.
const SPECIAL: [&str; 4] = ["<PAD>", "<UNK>", "<BOS>", "<EOS>"];
const UNKNOWN: &str = SPECIAL[1];

/// The fewest tokens: all bytes, and the special ones.
const FEWEST: usize = 256 + SPECIAL.len();

/// Bytes of text that are learned from.
const MOST_BYTES: u64 = 64 << 20;

/// Bytes of the longest word that is learned from.
const LONGEST_WORD: usize = 128;

/// A pair that occurs once is no pattern.
const LEAST_COUNT: u64 = 2;

/// Pieces that wait to be counted.
const QUEUE: usize = 16;

/// How often an interruption is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// The path of a tokenizer.json with at most `size` tokens, trained on the text that the options
/// name, unless it is in the cache already. The same text gives the same tokenizer.
pub fn train_tokenizer(
    options: &DataOptions,
    size: usize,
    progress: &dyn Progress,
) -> Result<PathBuf, DataError> {
    if size < FEWEST {
        return Err(failed(format!(
            "it would have {size} tokens, and needs {FEWEST} for all bytes and {} special ones",
            SPECIAL.len()
        )));
    }
    let input = Input::find(&options.source, progress)?;
    let records = identify(&input, progress)?;
    let by = format!("byte-pairs-{VERSION}-{size}");
    let key = fingerprint(&input, &records, &options.text_column, &by);
    let entry = Entry::new(options.cache_folder()?, key);
    entry.sweep();
    let path = entry.tokenizer_path();
    if is_usable(&path) {
        return Ok(path);
    }
    let json = train(&input, &records, options, size, progress)?;
    let place = || {
        fs::create_dir_all(options.cache_folder().map_err(std::io::Error::other)?)?;
        cinch_files::replace(&path, &json)
    };
    place().map_err(|error| entry.write_error(error))?;
    Ok(path)
}

/// Whether what is in the cache is a tokenizer: one that was cut off is trained anew.
fn is_usable(path: &Path) -> bool {
    let content = cinch_files::read_regular(path, LARGEST_FILE);
    content.is_ok_and(|content| Tokenizer::from_json_bytes(path, &content).is_ok())
}

fn train(
    input: &Input,
    records: &[SourceRecord],
    options: &DataOptions,
    size: usize,
    progress: &dyn Progress,
) -> Result<Vec<u8>, DataError> {
    let total: u64 = records.iter().map(|record| record.bytes).sum();
    progress.begin("training a tokenizer", total);
    let trained = count_words(input, records, options, size, progress)
        .and_then(|trainer| merge(trainer, progress));
    progress.end();
    write(trained?)
}

/// A trainer that knows how often each word occurs.
fn count_words(
    input: &Input,
    records: &[SourceRecord],
    options: &DataOptions,
    size: usize,
    progress: &dyn Progress,
) -> Result<BpeTrainer, DataError> {
    let mut trainer = BpeTrainer::builder()
        .vocab_size(size)
        .min_frequency(LEAST_COUNT)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.map(special).to_vec())
        .build();
    // Every so many pieces, such that no more than `MOST_BYTES` are learned from.
    let total: u64 = records.iter().map(|record| record.bytes).sum();
    let every = total.div_ceil(MOST_BYTES).max(1);
    let cut_for = Tokenizer::load(&TokenizerSpec::Gpt2)?;
    let mut num_pieces = 0_u64;
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(QUEUE);
        let reader = scope.spawn(move || {
            input.read(
                records,
                &options.text_column,
                &cut_for,
                progress,
                &mut |piece| {
                    if progress.is_interrupted() {
                        return Err(DataError::Interrupted);
                    }
                    progress.advance(piece.source_bytes);
                    num_pieces += 1;
                    let stopped = || failed("its thread has ended".to_owned());
                    match (num_pieces - 1).is_multiple_of(every) {
                        true => sender.send(piece.text).map_err(|_| stopped()),
                        false => Ok(()),
                    }
                },
            )
        });
        let counted = guarded(|| trainer.feed(receiver.into_iter(), words));
        reader
            .join()
            .map_err(|_| failed("the text could not be read".to_owned()))??;
        match counted {
            Ok(Ok(())) => Ok(()),
            Ok(Err(problem)) => Err(failed(problem.to_string())),
            Err(problem) => Err(failed(problem)),
        }
    })?;
    match trainer.get_word_count() {
        0 => Err(options.no_text(records.len())),
        _ => Ok(trainer),
    }
}

fn byte_level() -> ByteLevel {
    ByteLevel::new(false, true, true)
}

/// The words of a text, their bytes written as the model has them.
fn words(text: &str) -> tokenizers::Result<Vec<String>> {
    let mut words = Vec::new();
    for part in boundary::parts(text, LONGEST_WHITESPACE_RUN) {
        let mut split = PreTokenizedString::from(part);
        byte_level().pre_tokenize(&mut split)?;
        let found = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let short = found
            .into_iter()
            .filter(|(word, ..)| word.len() <= LONGEST_WORD);
        words.extend(short.map(|(word, ..)| word.to_owned()));
    }
    Ok(words)
}

/// The model, made on a thread that nobody has to wait for.
fn merge(trainer: BpeTrainer, progress: &dyn Progress) -> Result<BPE, DataError> {
    let (sender, receiver) = mpsc::channel();
    let work = move || {
        let made = guarded(|| {
            let mut model = BPE::builder()
                .unk_token(UNKNOWN.to_owned())
                .build()
                .map_err(|problem| problem.to_string())?;
            match trainer.train(&mut model) {
                Ok(_) => Ok(model),
                Err(problem) => Err(problem.to_string()),
            }
        });
        // Nobody listens once the work was interrupted.
        let _ = sender.send(made.and_then(|made| made));
    };
    thread::Builder::new()
        .name("train-tokenizer".to_owned())
        .spawn(work)
        .map_err(|error| failed(format!("no thread could be started: {error}")))?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(made) => return made.map_err(failed),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed("its thread ended before its work".to_owned()));
            }
            Err(RecvTimeoutError::Timeout) if progress.is_interrupted() => {
                return Err(DataError::Interrupted);
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

type Whole = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// The tokenizer.json of a model.
fn write(model: BPE) -> Result<Vec<u8>, DataError> {
    let mut whole = Whole::new(model);
    whole
        .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(byte_level())))
        .with_decoder(Some(DecoderWrapper::ByteLevel(byte_level())));
    whole
        .add_special_tokens(SPECIAL.map(special))
        .map_err(|problem| failed(problem.to_string()))?;
    let json = whole.to_string(false);
    json.map(String::into_bytes)
        .map_err(|problem| failed(problem.to_string()))
}

fn special(content: &str) -> AddedToken {
    AddedToken::from(content, true)
}

fn failed(problem: String) -> DataError {
    DataError::TokenizerTraining { problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;
    use crate::source::Source;
    use crate::tokenizer::special::SpecialTokenizer;

    fn options(folder: &Path, text: &str) -> DataOptions {
        let path = folder.join("text.txt");
        fs::write(&path, text).unwrap();
        DataOptions {
            source: Source::File(path),
            cache_dir: Some(folder.join("cache")),
            ..DataOptions::default()
        }
    }

    fn load(path: PathBuf) -> Tokenizer {
        Tokenizer::load(&TokenizerSpec::File(path)).unwrap()
    }

    #[test]
    fn frequent_words_become_tokens_and_any_text_survives() {
        let folder = tempfile::tempdir().unwrap();
        let text = "the arena holds every tensor; the plan gives every tensor a place.\n";
        let options = options(folder.path(), &text.repeat(50));
        let tokenizer = load(train_tokenizer(&options, 290, &NoProgress).unwrap());
        assert_eq!(tokenizer.vocab_size(), 290);
        assert_eq!(tokenizer.encode(" tensor").unwrap().len(), 1);
        let other = "Ünrelated <EOS>\ttext\u{1F600} \u{0}";
        assert_eq!(tokenizer.decode(&tokenizer.encode(other).unwrap()), other);
        // What the special tokens are called, in a text, is a text.
        let names = SpecialTokenizer::new(&tokenizer);
        for (id, name) in SPECIAL.iter().enumerate() {
            assert_eq!(names.id(name), Some(id as u32));
            assert!(!tokenizer.encode(name).unwrap().contains(&(id as u32)));
        }
        assert_eq!(tokenizer.end_of_text(), Some(3));
    }

    #[test]
    fn the_same_text_gives_the_same_tokenizer_and_another_size_another() {
        let folder = tempfile::tempdir().unwrap();
        let words: Vec<String> = (0..4000).map(|n| format!("w{}", n * n % 977)).collect();
        let options = options(folder.path(), &words.join(" "));
        let path = train_tokenizer(&options, 400, &NoProgress).unwrap();
        let first = fs::read(&path).unwrap();
        // Found again where it is, trained again where it is damaged or gone.
        assert_eq!(train_tokenizer(&options, 400, &NoProgress).unwrap(), path);
        fs::write(&path, &first[..first.len() / 2]).unwrap();
        train_tokenizer(&options, 400, &NoProgress).unwrap();
        assert_eq!(fs::read(&path).unwrap(), first);
        let other = train_tokenizer(&options, 401, &NoProgress).unwrap();
        assert_ne!(other, path);
        assert_eq!(load(other).vocab_size(), 401);
    }

    #[test]
    fn a_text_of_few_words_gives_fewer_tokens_than_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), &"ab ab ab".repeat(3));
        let tokenizer = load(train_tokenizer(&options, 50_000, &NoProgress).unwrap());
        assert!((FEWEST..FEWEST + 8).contains(&tokenizer.vocab_size()));
    }

    #[test]
    fn too_few_tokens_and_no_text_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), "");
        let error = train_tokenizer(&options, FEWEST - 1, &NoProgress).unwrap_err();
        assert!(error.to_string().contains("needs 260"), "{error}");
        let error = train_tokenizer(&options, 300, &NoProgress).unwrap_err();
        assert!(matches!(error, DataError::NoText { .. }), "{error}");
    }
}
