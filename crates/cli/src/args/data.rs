//! Data that is made or prepared.

use std::path::PathBuf;

use cinch_data::synth::TaxonomyShape;
use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Write a folder of code-like files in several languages
    Synth(SynthArguments),
    /// Tokenise a folder or file into the cache and say what is in it
    Prepare(PrepareArguments),
    /// Write a made-up taxonomy of codes, for embedders
    Taxonomy(TaxonomyArguments),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data synth synthetic_data               a folder to train on when there is none\n  \
    cinch data prepare my_code                    tokenise now, train later")]
pub struct DataArguments {
    #[command(subcommand)]
    pub command: DataCommand,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data synth synthetic_data --files 500\n  \
    cinch data synth synthetic_data --languages python,rust --seed 7")]
pub struct SynthArguments {
    /// The folder to write
    pub folder: PathBuf,
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub files: usize,
    /// About so many bytes a file
    #[arg(long, value_name = "N", default_value_t = 4000)]
    pub bytes: usize,
    /// Only these, for example python,rust
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub languages: Vec<String>,
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Replace files that an earlier call wrote
    #[arg(long)]
    pub overwrite: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data taxonomy codes.jsonl --sectors 12")]
pub struct TaxonomyArguments {
    /// The .jsonl file to write; it must not be there yet
    pub file: PathBuf,
    /// Codes of two digits, at most 89
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.sectors)]
    pub sectors: usize,
    /// Codes below each code, at most 9
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.children)]
    pub children: usize,
    /// Digits of the longest codes
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.digits as u8, value_parser = clap::value_parser!(u8).range(2..=6))]
    pub digits: u8,
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data prepare my_code\n  \
    cinch data prepare texts.jsonl --text-column content --tokenizer bytes\n\n\
    Limits: a .jsonl line of 64 MiB, a tokenizer.json of 64 MiB with tokens of up\n\
    to 4 KiB, folders 256 levels deep. Text files may have any size. Text is cut\n\
    into pieces of 256 KiB where no token changes; where there is no such place (in\n\
    a longer word, or with many a tokenizer.json) a note tells how often. Memory\n\
    stays below 512 MiB; a tokenizer.json takes some 100 MiB for each core more, and\n\
    at most 1 GiB if its rules make text grow.")]
pub struct PrepareArguments {
    /// A folder, a text file or a .jsonl file
    pub path: PathBuf,
    /// gpt2, bytes, train (byte pairs of the data), or the path of a tokenizer.json
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    pub tokenizer: String,
    /// Tokens that a trained tokenizer has at the most
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    pub vocab_size: usize,
    /// The field of .jsonl lines that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_column: String,
    /// Where tokenised data is kept
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}
