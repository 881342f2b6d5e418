//! `cinch embed`: texts in, embeddings out, by a trained run or a BERT model's folder.

mod format;
mod subject;
mod texts;

use std::path::Path;

use anyhow::Context;
use cinch_data::{EncoderTokenizer, Tokenizer};
use cinch_train::{Embedder, normalised};

use super::print_raw;
use crate::args::{EmbedArguments, EmbedderArguments};
use crate::failure::usage;
use crate::model_folder::model_folder;
use crate::progress::{ShareBar, shown};
use crate::table::counted;
use crate::voice::{aside, is_quiet, tell};

use subject::SentenceModel;
pub use subject::TrainedRun;
use texts::{Text, Texts, place};

const OR_A_MODEL: &str = ", or a BERT model's folder with config.json, tokenizer.json and weights; \
    a hub id where they were downloaded";

pub fn run(arguments: &EmbedArguments) -> anyhow::Result<()> {
    let format = format::format(arguments)?;
    keep_texts(arguments)?;
    let (given, options) = (&arguments.subject, &arguments.embedder);
    let made = match model_folder(given) {
        Some(folder) => sentences(SentenceModel::open(&folder, options)?, arguments)?,
        None => points(&TrainedRun::open(given, options, OR_A_MODEL)?, arguments)?,
    };
    let Embeddings { numbers, width } = &made;
    let rows = numbers.len() / (*width).max(1);
    let bytes = format::encoded(numbers, [rows, *width], format)?;
    match &arguments.output {
        None => print_raw(&bytes),
        Some(path) => {
            cinch_files::replace(path, &bytes)
                .with_context(|| format!("cannot write {}", shown(path)))?;
            if !is_quiet() {
                tell(&format!(
                    "wrote {rows} embeddings of {width} numbers to {}",
                    shown(path)
                ));
            }
            Ok(())
        }
    }
}

/// One row after the other.
struct Embeddings {
    numbers: Vec<f32>,
    width: usize,
}

/// Texts to points, by a run.
fn points(run: &TrainedRun, arguments: &EmbedArguments) -> anyhow::Result<Embeddings> {
    let texts = Texts::read(&arguments.texts)?;
    let lengths = run.channel_lengths()?;
    let tokenizer = run.tokenizer()?;
    let read = encoded(&texts, &tokenizer, &lengths, |(_, text)| {
        Ok(text.channels().map(str::to_owned).to_vec())
    })?;
    let options = limited(&arguments.embedder, &texts);
    embedded(&mut run.embedder(&options)?, &read)
}

/// Sentences to what an encoder alone makes of them.
fn sentences(model: SentenceModel, arguments: &EmbedArguments) -> anyhow::Result<Embeddings> {
    let texts = Texts::read(&arguments.texts)?;
    let form = model.form();
    aside(Some(model.describe()));
    let tokenizer = model.tokenizer()?;
    let read = encoded(
        &texts,
        &tokenizer,
        &[form.longest],
        |(number, text)| match text {
            Text::Plain(text) => Ok(vec![form.prepared(text)]),
            Text::Channels(_) => Err(usage(format!(
                "{}: there is no `text`, and {} has one encoder, which reads one text\n\
                 hint: title, description, excluded and examples are for a run of `cinch train \
                 --model naics`",
                place(&arguments.texts, *number),
                model.path()
            ))),
        },
    )?;
    let options = limited(&arguments.embedder, &texts);
    let made = embedded(&mut model.embedder(&options)?, &read)?;
    Ok(match form.normalised {
        true => Embeddings {
            numbers: normalised(&made.numbers, made.width),
            ..made
        },
        false => made,
    })
}

/// No more texts at once than there are.
fn limited(arguments: &EmbedderArguments, texts: &Texts) -> EmbedderArguments {
    EmbedderArguments {
        batch_size: arguments.batch_size.min(texts.texts.len() as u64),
        ..arguments.clone()
    }
}

/// The tokens of each text's channels. Texts that are cut, and lines without any, are told.
fn encoded(
    texts: &Texts,
    tokenizer: &Tokenizer,
    lengths: &[usize],
    mut channels: impl FnMut(&(usize, Text)) -> anyhow::Result<Vec<String>>,
) -> anyhow::Result<Vec<Vec<Vec<i32>>>> {
    let tokenizer = EncoderTokenizer::new(tokenizer);
    let mut cut = 0;
    let mut read = Vec::with_capacity(texts.texts.len());
    for text in &texts.texts {
        let mut is_cut = false;
        let mut ids = Vec::with_capacity(lengths.len());
        for (text, &length) in channels(text)?.iter().zip(lengths) {
            let encoded = tokenizer.encode(text, length)?;
            is_cut |= encoded.is_cut;
            ids.push(encoded.ids);
        }
        cut += usize::from(is_cut);
        read.push(ids);
    }
    if texts.empty_lines > 0 {
        let lines = counted(texts.empty_lines as u64, "empty line");
        aside(Some(format!(
            "{lines} left out: no embedding stands for them"
        )));
    }
    if cut > 0 {
        let lengths: Vec<String> = lengths.iter().map(usize::to_string).collect();
        let all = counted(texts.texts.len() as u64, "text");
        let lengths = lengths.join(", ");
        aside(Some(format!(
            "{cut} of {all} cut to what the model reads: {lengths} tokens"
        )));
    }
    Ok(read)
}

fn embedded(embedder: &mut Embedder, texts: &[Vec<Vec<i32>>]) -> anyhow::Result<Embeddings> {
    let bar = ShareBar::new("embedding");
    let texts = texts.iter().map(Vec::as_slice);
    let numbers = embedder.embed(texts, &mut |share| bar.tell(share))?;
    Ok(Embeddings {
        numbers,
        width: embedder.width(),
    })
}

/// Refuses to write over the file that texts are read from.
fn keep_texts(arguments: &EmbedArguments) -> anyhow::Result<()> {
    let Some(output) = &arguments.output else {
        return Ok(());
    };
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let is_same = real(output).is_some_and(|output| real(&arguments.texts) == Some(output));
    match is_same {
        false => Ok(()),
        true => Err(usage(format!(
            "--output {} is the file of the texts, which would be lost\nhint: name another file",
            shown(output)
        ))),
    }
}
