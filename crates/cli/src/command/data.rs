//! `cinch data`: make or prepare training data.

use std::io::Write;

use anyhow::Context;
use cinch_data::synth::{self, Language, SynthOptions, TaxonomyShape};
use cinch_data::{
    Corpus, DataError, DataOptions, Source, Tokenizer, TokenizerSpec, train_tokenizer,
};
use serde_json::json;

use super::{print, print_json};
use crate::args::{
    DataArguments, DataCommand, PrepareArguments, SynthArguments, TaxonomyArguments,
};
use crate::failure::Interrupted;
use crate::interrupt;
use crate::progress::{DataBar, shown};
use crate::table::thousands;
use crate::voice::{self, tell};

pub fn run(arguments: &DataArguments) -> anyhow::Result<()> {
    match &arguments.command {
        DataCommand::Synth(arguments) => synthesize(arguments),
        DataCommand::Prepare(arguments) => prepare(arguments),
        DataCommand::Taxonomy(arguments) => taxonomy(arguments),
    }
}

fn taxonomy(arguments: &TaxonomyArguments) -> anyhow::Result<()> {
    let shape = TaxonomyShape {
        sectors: arguments.sectors,
        children: arguments.children,
        digits: usize::from(arguments.digits),
    };
    let lines = synth::taxonomy(shape, arguments.seed);
    let file = shown(&arguments.file);
    let mut created = std::fs::File::create_new(&arguments.file)
        .with_context(|| format!("cannot write {file}"))?;
    created
        .write_all(lines.as_bytes())
        .with_context(|| format!("cannot write {file}"))?;
    let codes = lines.lines().count() as u64;
    print(&format!("wrote {} codes to {file}", thousands(codes)))
}

fn synthesize(arguments: &SynthArguments) -> anyhow::Result<()> {
    let languages: Result<Vec<Language>, _> = arguments
        .languages
        .iter()
        .map(|name| name.parse())
        .collect();
    let options = SynthOptions {
        folder: arguments.folder.clone(),
        num_files: arguments.files,
        seed: arguments.seed,
        languages: languages?,
        approx_bytes_per_file: arguments.bytes,
        overwrite: arguments.overwrite,
    };
    let report = synth::generate(&options, &DataBar::default())?;
    let by_language = report.per_language.iter();
    if arguments.json {
        let counts: serde_json::Map<String, serde_json::Value> = by_language
            .map(|(language, files)| (language.to_string(), json!(files)))
            .collect();
        return print_json(&json!({
            "folder": cinch_files::shown(&arguments.folder).to_string(),
            "files": report.num_files,
            "bytes": report.num_bytes,
            "languages": counts,
        }));
    }
    let counts: Vec<String> = by_language
        .map(|(language, files)| format!("{language} {files}"))
        .collect();
    let folder = shown(&arguments.folder);
    print(&format!(
        "wrote {} files, {} bytes, to {folder}: {}\n\
         train on it: cinch train --model-size small --vram 8gb --data-dir {folder}",
        report.num_files,
        thousands(report.num_bytes),
        counts.join(", ")
    ))
}

fn prepare(arguments: &PrepareArguments) -> anyhow::Result<()> {
    let spec: TokenizerSpec = match arguments.tokenizer.parse() {
        Ok(spec) => spec,
        Err(never) => match never {},
    };
    let options = DataOptions {
        source: if arguments.path.is_file() {
            Source::File(arguments.path.clone())
        } else {
            Source::Folder(arguments.path.clone())
        },
        tokenizer: spec.clone(),
        text_column: arguments.text_column.clone(),
        cache_dir: arguments.cache_dir.clone(),
    };
    interrupt::listen("stopping (Ctrl-C again to stop at once)")?;
    let bar = DataBar::until(&interrupt::STOP);
    let prepared = || {
        let spec = match spec {
            TokenizerSpec::Trained => {
                TokenizerSpec::File(train_tokenizer(&options, arguments.vocab_size, &bar)?)
            }
            named => named,
        };
        let tokenizer = Tokenizer::load(&spec)?;
        let corpus = Corpus::prepare(&options, &tokenizer, &bar)?;
        Ok((tokenizer, corpus))
    };
    let (tokenizer, corpus) = match prepared() {
        Err(DataError::Interrupted) => {
            tell("stopped while the data was prepared");
            return Err(Interrupted.into());
        }
        prepared => prepared?,
    };
    voice::aside(corpus.cut_note());
    if arguments.json {
        return print_json(&json!({
            "path": cinch_files::shown(&arguments.path).to_string(),
            "tokenizer": tokenizer.name(),
            "vocabulary": tokenizer.vocab_size(),
            "tokens": corpus.num_tokens(),
            "documents": corpus.num_documents(),
            "cuts": corpus.num_cuts(),
            "cache": cinch_files::shown(corpus.cache_path()).to_string(),
            "was_cached": corpus.was_cached(),
        }));
    }
    print(&format!(
        "{} tokens in {} documents ({}, vocabulary {})\ncache: {}{}",
        thousands(corpus.num_tokens()),
        thousands(corpus.num_documents()),
        tokenizer.name(),
        thousands(tokenizer.vocab_size() as u64),
        corpus.cache_path().display(),
        if corpus.was_cached() {
            " (was there already)"
        } else {
            ""
        }
    ))
}
