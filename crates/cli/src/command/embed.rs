//! `cinch embed`: texts in, embeddings out, by a trained run or a BERT model's folder.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use cinch_architecture::Architecture;
use cinch_config::{Config, Settings, Source};
use cinch_data::taxonomy::CHANNEL_NAMES;
use cinch_data::{Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::DType;
use cinch_model::Embedded;
use cinch_train::checkpoint;
use cinch_train::{
    Embedder, EmbedderFiles, EmbedderOptions, FirstWeights, State, normalised, sentence_config,
};
use cinch_weights::{Dtype, Layout, TensorSpec, WeightFiles};
use serde_json::{Value, json};

use super::{open_run, print_raw};
use crate::args::{EmbedArguments, EmbedderArguments, EmbeddingFormat};
use crate::device;
use crate::failure::usage;
use crate::progress::shown;
use crate::voice::tell;

/// The largest file of texts that is read.
const LARGEST_FILE: u64 = 1 << 30;

pub fn run(arguments: &EmbedArguments) -> anyhow::Result<()> {
    let format = format(arguments)?;
    keep_texts(arguments)?;
    let subject = Subject::open(&arguments.subject, &arguments.embedder)?;
    let texts = read_texts(&arguments.texts)?;
    let what = match subject.is_model {
        true => Embedded::Averages,
        false => Embedded::Points,
    };
    let mut embedder = subject.embedder(what, &arguments.embedder)?;
    let tokenizer = subject.tokenizer()?;
    let tokens = texts.iter().map(|text| embedder.tokens(&tokenizer, text));
    let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
    let mut numbers = embedder.embed(&tokens)?;
    let mut width = embedder.width();
    if subject.is_model {
        // One encoder in the place of all: the others read nothing.
        let own = width / CHANNEL_NAMES.len();
        numbers = normalised(&numbers, width, own);
        width = own;
    }
    let bytes = encoded(&numbers, [texts.len(), width], format)?;
    match &arguments.output {
        None => print_raw(&bytes),
        Some(path) => {
            cinch_files::replace(path, &bytes)
                .with_context(|| format!("cannot write {}", shown(path)))?;
            tell(&format!(
                "wrote {} embeddings of {width} numbers to {}",
                texts.len(),
                shown(path)
            ));
            Ok(())
        }
    }
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

fn format(arguments: &EmbedArguments) -> anyhow::Result<EmbeddingFormat> {
    if let Some(format) = arguments.format {
        return Ok(format);
    }
    let Some(path) = &arguments.output else {
        return Ok(EmbeddingFormat::Jsonl);
    };
    let ending = path.extension().and_then(|ending| ending.to_str());
    match ending {
        Some("npy") => Ok(EmbeddingFormat::Npy),
        Some("safetensors") => Ok(EmbeddingFormat::Safetensors),
        Some("jsonl") => Ok(EmbeddingFormat::Jsonl),
        _ => Err(usage(format!(
            "the ending of {} says no format\nhint: .npy, .safetensors or .jsonl, or --format",
            shown(path)
        ))),
    }
}

/// A run or a model, and its weights.
pub struct Subject {
    pub config: Config,
    is_model: bool,
    path: PathBuf,
    trained: Option<WeightFiles>,
    base: Option<WeightFiles>,
}

impl Subject {
    fn open(given: &Path, arguments: &EmbedderArguments) -> anyhow::Result<Self> {
        if given.join("config.json").is_file() && !given.join("checkpoints").exists() {
            return Self::of_model(given);
        }
        if !given.exists() {
            return Err(usage(format!(
                "there is no {}\nhint: a run of `cinch train --model naics`, one of its checkpoints, or a BERT model's folder with config.json, tokenizer.json and weights",
                shown(given)
            )));
        }
        Self::open_run(given, arguments)
    }

    /// The checkpoint of a run.
    pub fn open_run(given: &Path, arguments: &EmbedderArguments) -> anyhow::Result<Self> {
        let store = open_run(given)?;
        let best = store.best()?.filter(|_| arguments.best);
        let path = match best {
            Some(best) => best.path,
            None => checkpoint::resolve(&store, Some(given))?,
        };
        let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
        let base = match FirstWeights::of(&state.config)? {
            FirstWeights::Files(folder) => Some(WeightFiles::open(&folder)?),
            FirstWeights::Initial => None,
        };
        Ok(Self {
            is_model: false,
            trained: match arguments.initial {
                true => None,
                false => Some(checkpoint::load_weights(&path)?),
            },
            config: state.config,
            path,
            base,
        })
    }

    /// A BERT model's folder.
    fn of_model(folder: &Path) -> anyhow::Result<Self> {
        let mut settings = Settings::new();
        let name = folder.display().to_string();
        let source = Source::Flag("the first argument".to_owned());
        settings.set("model.type", &name, source)?;
        let config = settings.resolve()?;
        let Architecture::Bert(encoder) = &config.model else {
            return Err(usage(format!(
                "{} holds no BERT model but {}\nhint: give a run of an embedder, or the folder of \
                 a model such as all-MiniLM-L6-v2",
                shown(folder),
                config.model.family().title
            )));
        };
        Ok(Self {
            config: sentence_config(&config, encoder),
            is_model: true,
            path: folder.to_owned(),
            trained: None,
            base: Some(WeightFiles::open(folder)?),
        })
    }

    /// Whose weights they are.
    pub fn path(&self) -> String {
        match (&self.trained, &self.base) {
            (None, None) => format!("{} before training", shown(&self.path)),
            (None, Some(_)) if !self.is_model => {
                format!("{} before training", shown(&self.path))
            }
            _ => shown(&self.path).to_string(),
        }
    }

    pub fn tokenizer(&self) -> anyhow::Result<Tokenizer> {
        let spec: TokenizerSpec = match self.config.data.tokenizer.parse() {
            Ok(spec) => spec,
            Err(never) => match never {},
        };
        Ok(Tokenizer::load(&spec)?)
    }

    pub fn embedder(
        &self,
        what: Embedded,
        arguments: &EmbedderArguments,
    ) -> anyhow::Result<Embedder> {
        let options = EmbedderOptions {
            what,
            texts: arguments.batch_size as usize,
            compute: DType::F32,
            target: device::train_target(arguments.device)?,
            engine: EngineOptions {
                threads: arguments.threads,
                ..EngineOptions::default()
            },
        };
        let files = EmbedderFiles {
            trained: self.trained.as_ref(),
            base: self.base.as_ref(),
            seed: self.config.training.seed,
        };
        Ok(Embedder::new(&self.config, files, &options)?)
    }
}

/// The channels of each text.
fn read_texts(path: &Path) -> anyhow::Result<Vec<[String; CHANNEL_NAMES.len()]>> {
    let mut content = String::new();
    if path == Path::new("-") {
        let mut input = std::io::stdin().lock().take(LARGEST_FILE);
        input.read_to_string(&mut content)?;
    } else {
        content = cinch_files::read_regular_text(path, LARGEST_FILE).map_err(|error| {
            usage(format!(
                "cannot read {}: {error}\n\
                 hint: name a file with a text in each line, or - for standard input",
                shown(path)
            ))
        })?;
    }
    let is_json = path.extension().is_some_and(|ending| ending == "jsonl");
    let lines = (1..).zip(content.lines());
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let texts = lines.map(|(number, line)| match is_json {
        true => record(line).with_context(|| format!("{} line {number}", shown(path))),
        false => Ok(plain(line)),
    });
    let texts = texts.collect::<anyhow::Result<Vec<_>>>()?;
    match texts.is_empty() {
        true => Err(usage(format!("{} has no texts", shown(path)))),
        false => Ok(texts),
    }
}

/// A text without channels stands for its own title and description.
fn plain(text: &str) -> [String; CHANNEL_NAMES.len()] {
    [
        text.to_owned(),
        text.to_owned(),
        String::new(),
        String::new(),
    ]
}

fn record(line: &str) -> anyhow::Result<[String; CHANNEL_NAMES.len()]> {
    let value: Value = serde_json::from_str(line)?;
    let field = |name: &str| value.get(name).and_then(Value::as_str);
    if let Some(text) = field("text") {
        return Ok(plain(text));
    }
    let channels = CHANNEL_NAMES.map(|name| field(name).unwrap_or_default().to_owned());
    match channels.iter().all(String::is_empty) {
        true => Err(usage(format!(
            "there is no text: neither `text` nor any of {}",
            CHANNEL_NAMES.join(", ")
        ))),
        false => Ok(channels),
    }
}

fn encoded(
    numbers: &[f32],
    [rows, width]: [usize; 2],
    format: EmbeddingFormat,
) -> anyhow::Result<Vec<u8>> {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    match format {
        EmbeddingFormat::Npy => {
            let mut out = npy_header(rows, width);
            out.extend(bytes);
            Ok(out)
        }
        EmbeddingFormat::Safetensors => {
            let tensor = TensorSpec {
                name: "embeddings",
                dtype: Dtype::F32,
                shape: &[rows, width],
            };
            let mut out = Vec::new();
            out.extend_from_slice(Layout::new(&[tensor])?.header());
            out.extend(bytes);
            Ok(out)
        }
        EmbeddingFormat::Jsonl => {
            let mut out = Vec::new();
            for row in numbers.chunks_exact(width.max(1)) {
                writeln!(out, "{}", json!({ "embedding": row }))?;
            }
            Ok(out)
        }
    }
}

/// Version 1.0 of NumPy's format: the magic word, and a dictionary that ends at a multiple of 64.
fn npy_header(rows: usize, width: usize) -> Vec<u8> {
    const ALIGNMENT: usize = 64;
    let fixed = b"\x93NUMPY\x01\x00".len() + size_of::<u16>();
    let mut dictionary =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let length = (fixed + dictionary.len() + 1).next_multiple_of(ALIGNMENT);
    while fixed + dictionary.len() + 1 < length {
        dictionary.push(' ');
    }
    dictionary.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((dictionary.len() as u16).to_le_bytes());
    header.extend(dictionary.bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_of_npy_begins_aligned() {
        for (rows, width) in [(1, 1), (104, 34), (123_456, 1536)] {
            let header = npy_header(rows, width);
            assert_eq!(header.len() % 64, 0);
            let length = u16::from_le_bytes([header[8], header[9]]) as usize;
            assert_eq!(header.len(), 10 + length);
            assert_eq!(header.last(), Some(&b'\n'));
        }
    }

    #[test]
    fn texts_are_lines_or_records() {
        assert_eq!(plain("a")[1], "a");
        assert_eq!(
            record("{\"title\": \"t\", \"examples\": \"e\"}").unwrap()[3],
            "e"
        );
        assert_eq!(record("{\"text\": \"t\"}").unwrap()[..2], ["t", "t"]);
        let problem = record("{\"code\": \"11\"}").unwrap_err().to_string();
        assert!(problem.contains("there is no text"), "{problem}");
    }
}
