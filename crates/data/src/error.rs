//! Everything that can go wrong between a path the user typed and a window of tokens.
//!
//! Each message names the file and the value at fault; where there is something the user can do
//! about it, a `hint:` line says what.

use std::io;
use std::path::PathBuf;

use crate::sample::names_sample;
use crate::source::READ_EXTENSIONS;

/// The one error type of this crate.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(
        "the data {what} `{}` does not exist\nhint: check the path, or leave it out to train on what is built in",
        cinch_files::shown(&path)
    )]
    SourceMissing { what: &'static str, path: PathBuf },

    #[error("`{}` is {found}, but a {wanted} is needed here", cinch_files::shown(&path))]
    WrongKind {
        path: PathBuf,
        wanted: &'static str,
        found: &'static str,
    },

    #[error(
        "no file in `{}` can be used as text: {num_skipped} skipped\nhint: files ending in {} are read; name a single file directly to read it whatever its ending",
        cinch_files::shown(&folder),
        extension_list()
    )]
    NoUsableFile { folder: PathBuf, num_skipped: usize },

    #[error(
        "`{}` lies more than {deepest} folders below the data folder\nhint: name a folder closer to the text, or move this one out",
        cinch_files::shown(&folder)
    )]
    TooDeep { folder: PathBuf, deepest: usize },

    #[error("`{}` holds no text: {num_files} file(s) were read and all are empty", cinch_files::shown(&path))]
    NoText { path: PathBuf, num_files: usize },

    #[error(
        "the text gives {num_tokens} token(s) with the tokenizer `{tokenizer}`; at least 2 are needed to predict one from another"
    )]
    TooFewTokens { num_tokens: u64, tokenizer: String },

    #[error(
        "`{}` is not UTF-8 text: the byte at offset {offset} does not belong to any character\nhint: convert it (`iconv -f LATIN1 -t UTF-8 old > new`, or `-f UTF-16`), or move it out of the data folder",
        cinch_files::shown(&path)
    )]
    NotUtf8 { path: PathBuf, offset: u64 },

    #[error("cannot read `{}`: {source}", cinch_files::shown(&path))]
    Read { path: PathBuf, source: io::Error },

    #[error(
        "`{}`: {problem}\nhint: train.bin holds little-endian ids, and metadata.json beside it says their dtype and vocab_size",
        cinch_files::shown(&path)
    )]
    TokenFile { path: PathBuf, problem: String },

    #[error("`{}` changed while it was being read\nhint: run again once nothing writes to it", cinch_files::shown(&path))]
    Changed { path: PathBuf },

    #[error("`{}` line {line}: {problem}\nhint: each line of a .jsonl file is one JSON object", cinch_files::shown(&path))]
    BadJsonLine {
        path: PathBuf,
        line: u64,
        problem: String,
    },

    #[error(
        "`{}` line {line}: {problem}\nhint: each line has a code of its own (digits), a title and a description; excluded and examples may be empty",
        cinch_files::shown(&path)
    )]
    BadCode {
        path: PathBuf,
        line: u64,
        problem: String,
    },

    #[error(
        "`{}`: every text of the channel `{channel}` is empty, so its encoder would learn nothing\nhint: fill the field `{channel}` of some lines",
        cinch_files::shown(&path)
    )]
    EmptyChannel {
        path: PathBuf,
        channel: &'static str,
    },

    #[error(
        "`{}`: {asked} negatives are asked for{}, and the code {code} has {found} that are farther from it than its positive\nhint: {}",
        cinch_files::shown(&path),
        of_stage(stage),
        fewer_negatives(*found)
    )]
    TooFewNegatives {
        path: PathBuf,
        /// Empty where there is one stage only.
        stage: String,
        code: String,
        asked: usize,
        found: usize,
    },

    #[error(
        "`{}` has no pairs of codes{}: no two are parent and child or siblings, or as the stage says\nhint: codes are digits, each level one more: 11, 111, 1112; a stage's anchor_level and positive_level count digits",
        cinch_files::shown(&path),
        of_stage(stage)
    )]
    NoPairs {
        path: PathBuf,
        /// Empty where there is one stage only.
        stage: String,
    },

    #[error(
        "`{}` line {line} is longer than {} MiB, the most that a line of a .jsonl file may have\nhint: put its text into several lines, or into a .txt file, which may be of any length",
        cinch_files::shown(&path),
        longest_bytes >> 20
    )]
    LineTooLong {
        path: PathBuf,
        line: u64,
        longest_bytes: u64,
    },

    #[error(
        "`{}` line {line} has no column `{column}`; it has {}\nhint: {}",
        cinch_files::shown(&path),
        column_list(columns),
        column_hint(columns)
    )]
    MissingColumn {
        path: PathBuf,
        line: u64,
        column: String,
        columns: Vec<String>,
    },

    #[error("`{}` line {line}: the column `{column}` is {found}, but a string is needed", cinch_files::shown(&path))]
    ColumnNotText {
        path: PathBuf,
        line: u64,
        column: String,
        found: &'static str,
    },

    #[error(
        "cannot read the tokenizer `{}`: {source}\nhint: a tokenizer is `bytes`, `gpt2`, `train`, or the path of a Hugging Face tokenizer.json",
        cinch_files::shown(&path)
    )]
    TokenizerRead { path: PathBuf, source: io::Error },

    #[error(
        "no tokenizer could be trained on the data: {problem}\nhint: name one with `--tokenizer`: `bytes`, `gpt2`, or a tokenizer.json"
    )]
    TokenizerTraining { problem: String },

    #[error(
        "`{}` is not a tokenizer.json that can be used: {problem}\nhint: save it again with `tokenizer.save_pretrained(folder)` of a fast tokenizer",
        cinch_files::shown(&path)
    )]
    TokenizerParse { path: PathBuf, problem: String },

    #[error("the tokenizer `{tokenizer}` gives the id {id}, but ids up to {largest} can be stored")]
    TokenIdTooLarge {
        tokenizer: String,
        id: u32,
        largest: u32,
    },

    #[error("the tokenizer `{tokenizer}` cannot encode a text: {problem}")]
    Encode { tokenizer: String, problem: String },

    #[error(
        "the tokenizer `{tokenizer}` has not encoded {} KiB of text within {seconds} s\nhint: its rules take too long; use another tokenizer.json",
        piece_bytes >> 10
    )]
    Stuck {
        tokenizer: String,
        piece_bytes: usize,
        seconds: u64,
    },

    #[error(
        "cannot write the token cache in `{}`: {source}\nhint: {}; another folder can be named with `--cache-dir`",
        cinch_files::shown(&folder),
        cache_hint(source)
    )]
    CacheWrite { folder: PathBuf, source: io::Error },

    #[error(
        "cannot read the token cache `{}`: {source}\nhint: run again: a cache that was changed is made anew",
        path.display()
    )]
    CacheRead { path: PathBuf, source: io::Error },

    #[error("interrupted while the data was prepared")]
    Interrupted,

    #[error("a sequence length of 0 holds no token\nhint: use a length of 1 or more")]
    ZeroSequenceLength,

    #[error(
        "`{}` already holds `{example}`, which the generator did not write or which was edited since\nhint: name an empty folder, or ask to overwrite",
        cinch_files::shown(&folder)
    )]
    FolderInUse { folder: PathBuf, example: String },

    #[error("cannot write `{}`: {source}", cinch_files::shown(&path))]
    Write { path: PathBuf, source: io::Error },

    #[error("unknown language `{name}`\nhint: one of {known}")]
    UnknownLanguage { name: String, known: String },

    #[error("`{}` does not exist\nhint: name a file of samples, or a folder of them", path.display())]
    SamplesMissing { path: PathBuf },

    #[error("no file in `{}` holds samples\nhint: files ending in{endings} are read", folder.display())]
    NoSampleFile { folder: PathBuf, endings: String },

    #[error(
        "`{}` cannot be read: .{ending} is not supported\nhint: {}",
        path.display(), format_hint(ending)
    )]
    SampleFormat { path: PathBuf, ending: String },

    #[error("`{}` line {line}: {problem}", path.display())]
    BadRecord {
        path: PathBuf,
        line: u64,
        problem: String,
    },

    #[error(
        "`{}` line {line}: the kind of its records cannot be told; it has {keys}\nhint: `messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, `question` with `answer`, or `text` are read",
        path.display()
    )]
    UnknownRecord {
        path: PathBuf,
        line: u64,
        keys: String,
    },

    #[error("there are no samples in {}", path_list(paths))]
    NoSamples { paths: Vec<PathBuf> },

    #[error(
        "`{}` line {line}: the sample has {num_tokens} tokens, and a row {limit}\nhint: choose longer rows (--seq-len), or have long samples cut or left out (--too-long truncate or drop)",
        path.display()
    )]
    SampleTooLong {
        path: PathBuf,
        line: u64,
        num_tokens: usize,
        limit: usize,
    },

    #[error(
        "no sample has anything to learn within {limit} tokens; the shortest has {shortest}\nhint: choose longer rows (--seq-len)"
    )]
    NoSampleShortEnough { limit: usize, shortest: usize },

    #[error("`{}` line {line}: the record is longer than {limit} bytes", path.display())]
    LongRecord {
        path: PathBuf,
        line: u64,
        limit: usize,
    },

    #[error("`{}` cannot be used: {problem}", path.display())]
    TokenizerConfig { path: PathBuf, problem: String },

    #[error(
        "`{}` line {line}: a conversation needs a chat template, and the model has none\nhint: name a folder whose tokenizer_config.json has a `chat_template`, or give prompts with completions",
        path.display()
    )]
    NoTemplate { path: PathBuf, line: u64 },

    #[error(
        "`{}` line {line}: the chat template in `{}` does not take this conversation{template_line}: {problem}",
        path.display(),
        template.display()
    )]
    TemplateRender {
        path: PathBuf,
        line: u64,
        template: PathBuf,
        template_line: String,
        problem: String,
    },

    #[error("the chat template in `{}` cannot be read, line {line} of it: {problem}", path.display())]
    TemplateParse {
        path: PathBuf,
        line: usize,
        problem: String,
    },
}

fn extension_list() -> String {
    let dotted: Vec<String> = READ_EXTENSIONS.iter().map(|e| format!(".{e}")).collect();
    dotted.join(" ")
}

fn column_list(columns: &[String]) -> String {
    if columns.is_empty() {
        return "none at all".to_owned();
    }
    let quoted: Vec<String> = columns.iter().map(|c| format!("`{c}`")).collect();
    quoted.join(", ")
}

fn column_hint(columns: &[String]) -> &'static str {
    match names_sample(|name| columns.iter().any(|column| column == name)) {
        true => {
            "prompts with answers are read from one file: give `--data-dir` the file and not its folder, and begin it with such a line"
        }
        false => "choose one of them with `--text-column`",
    }
}

fn format_hint(ending: &str) -> &'static str {
    match ending {
        "gz" | "zst" | "zip" | "xz" => "unpack it",
        "csv" | "tsv" => {
            "convert it to JSON lines (`datasets.load_dataset(…).to_json(\"data.jsonl\")`); as plain text it is read under a name that ends in .txt"
        }
        _ => "convert it to JSON lines (`datasets.load_dataset(…).to_json(\"data.jsonl\")`)",
    }
}

fn path_list(paths: &[PathBuf]) -> String {
    let quoted: Vec<String> = paths.iter().map(|p| format!("`{}`", p.display())).collect();
    quoted.join(", ")
}

fn cache_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "the disk is full: make room there"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "the folder cannot be written to"
        }
        _ => "check that the folder can be created and written to",
    }
}

/// Which stage of a curriculum a message is about.
fn fewer_negatives(found: usize) -> String {
    match found {
        0 => "add codes".to_owned(),
        found => format!("set model.negatives (n_negatives) to {found} or less, or add codes"),
    }
}

fn of_stage(stage: &str) -> String {
    match stage {
        "" => String::new(),
        name => format!(" in the stage {name}"),
    }
}
