//! Everything that can go wrong between a path the user typed and a window of tokens.
//!
//! Each message names the file and the value at fault; where there is something the user can do
//! about it, a `hint:` line says what.

use std::io;
use std::path::PathBuf;

use crate::source::READ_EXTENSIONS;

/// The one error type of this crate.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(
        "the data {what} `{}` does not exist\nhint: check the path, or leave it out to train on the embedded text",
        path.display()
    )]
    SourceMissing { what: &'static str, path: PathBuf },

    #[error("`{}` is {found}, but a {wanted} is needed here", path.display())]
    WrongKind {
        path: PathBuf,
        wanted: &'static str,
        found: &'static str,
    },

    #[error(
        "no file in `{}` can be used as text: {num_skipped} skipped\nhint: files ending in {} are read; name a single file directly to read it whatever its ending",
        folder.display(),
        extension_list()
    )]
    NoUsableFile { folder: PathBuf, num_skipped: usize },

    #[error(
        "`{}` lies more than {deepest} folders below the data folder\nhint: name a folder closer to the text, or move this one out",
        folder.display()
    )]
    TooDeep { folder: PathBuf, deepest: usize },

    #[error("`{}` holds no text: {num_files} file(s) were read and all are empty", path.display())]
    NoText { path: PathBuf, num_files: usize },

    #[error(
        "the text gives {num_tokens} token(s) with the tokenizer `{tokenizer}`; at least 2 are needed to predict one from another"
    )]
    TooFewTokens { num_tokens: u64, tokenizer: String },

    #[error(
        "`{}` is not UTF-8 text: the byte at offset {offset} does not belong to any character\nhint: convert it (`iconv -f LATIN1 -t UTF-8 old > new`, or `-f UTF-16`), or move it out of the data folder",
        path.display()
    )]
    NotUtf8 { path: PathBuf, offset: u64 },

    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },

    #[error("`{}` changed while it was being read\nhint: run again once nothing writes to it", path.display())]
    Changed { path: PathBuf },

    #[error("`{}` line {line}: {problem}\nhint: each line of a .jsonl file is one JSON object", path.display())]
    BadJsonLine {
        path: PathBuf,
        line: u64,
        problem: String,
    },

    #[error(
        "`{}` line {line} is longer than {} MiB, the most that a line of a .jsonl file may have\nhint: put its text into several lines, or into a .txt file, which may be of any length",
        path.display(),
        longest_bytes >> 20
    )]
    LineTooLong {
        path: PathBuf,
        line: u64,
        longest_bytes: u64,
    },

    #[error(
        "`{}` line {line} has no column `{column}`; it has {}\nhint: choose one of them with `--text-column`",
        path.display(),
        column_list(columns)
    )]
    MissingColumn {
        path: PathBuf,
        line: u64,
        column: String,
        columns: Vec<String>,
    },

    #[error("`{}` line {line}: the column `{column}` is {found}, but a string is needed", path.display())]
    ColumnNotText {
        path: PathBuf,
        line: u64,
        column: String,
        found: &'static str,
    },

    #[error(
        "cannot read the tokenizer `{}`: {source}\nhint: a tokenizer is `bytes`, `gpt2`, or the path of a Hugging Face tokenizer.json",
        path.display()
    )]
    TokenizerRead { path: PathBuf, source: io::Error },

    #[error(
        "`{}` is not a tokenizer.json that can be used: {problem}\nhint: save it again with `tokenizer.save_pretrained(folder)` of a fast tokenizer",
        path.display()
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
        folder.display(),
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
        folder.display()
    )]
    FolderInUse { folder: PathBuf, example: String },

    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },

    #[error("unknown language `{name}`\nhint: one of {known}")]
    UnknownLanguage { name: String, known: String },
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
