//! From files to samples: read, recognise, encode.
//!
//! Lengths decide what a step takes, so they are known before anything is planned: every record
//! is encoded at the start, on all cores. The result does not depend on the number of threads.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::chat::TokenizerConfig;
use super::encode::{Origin, Sample, SampleEncoder, Templating};
use super::message::kind_of;
use super::read::{self, Content, Found, TextUnit};
use super::record::{Kind, Record, refused};
use super::store::{SampleFile, Samples};
use crate::error::DataError;
use crate::json_line::ONE_LINE;
use crate::progress::Progress;
use crate::tokenizer::Tokenizer;

/// Text that waits to be encoded together: enough for all cores, little next to the samples.
const BATCH_BYTES: u64 = 16 << 20;

/// What to read and how.
#[derive(Debug, Clone, Default)]
pub struct SampleOptions {
    /// Files, or folders of files.
    pub paths: Vec<PathBuf>,
    /// What one sample of a plain text file is.
    pub text_unit: TextUnit,
    /// Whether pairs become conversations.
    pub templating: Templating,
    /// Learn prompts too, not only what follows them.
    pub train_on_inputs: bool,
    /// Read no more than so many samples, the first ones.
    pub max_samples: Option<usize>,
}

impl Samples {
    /// Reads and encodes. `config` is what the model's folder says of its text; without it there
    /// are no chat templates.
    pub fn prepare(
        options: &SampleOptions,
        tokenizer: &Tokenizer,
        config: Option<&TokenizerConfig>,
        progress: &dyn Progress,
    ) -> Result<Self, DataError> {
        let encoder = SampleEncoder::new(
            tokenizer,
            config,
            options.templating,
            options.train_on_inputs,
        )?;
        let mut paths = Vec::new();
        for path in &options.paths {
            paths.extend(read::files_of(path)?);
        }
        let mut samples = Self::new(encoder.end_of_text().unwrap_or(0) as i32);
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |data| data.len());
        progress.begin("tokenizing", paths.iter().map(size).sum());
        let outcome = paths
            .iter()
            .try_for_each(|path| samples.read_file(path, options, &encoder, progress));
        progress.end();
        outcome?;
        if samples.is_empty() {
            return Err(DataError::NoSamples {
                paths: options.paths.clone(),
            });
        }
        samples.shrink();
        Ok(samples)
    }

    fn read_file(
        &mut self,
        path: &Path,
        options: &SampleOptions,
        encoder: &SampleEncoder<'_>,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        let most = options.max_samples.unwrap_or(usize::MAX);
        if self.len() >= most {
            return Ok(());
        }
        let format = read::format_of(path, options.text_unit)?;
        let before = self.len();
        let mut batch = Batch {
            path,
            kind: format.kind(),
            unread: Vec::new(),
            encoder,
            progress,
            found: Vec::new(),
            num_bytes: 0,
        };
        read::read(path, format, &mut |found| {
            batch.num_bytes += found.num_bytes;
            batch.found.push(found);
            let is_last = self.len() + batch.found.len() >= most;
            if batch.num_bytes >= BATCH_BYTES || is_last {
                batch.flush(self)?;
            }
            Ok(!is_last)
        })?;
        batch.flush(self)?;
        if let Some(kind) = batch.kind {
            self.push_file(SampleFile {
                path: path.to_path_buf(),
                kind,
                unread: batch.unread,
                num_samples: self.len() - before,
            });
        }
        Ok(())
    }
}

/// Records of one file that wait to be encoded together.
struct Batch<'a> {
    path: &'a Path,
    kind: Option<Kind>,
    /// Columns of the first record that its kind does not read.
    unread: Vec<String>,
    encoder: &'a SampleEncoder<'a>,
    progress: &'a dyn Progress,
    found: Vec<Found>,
    num_bytes: u64,
}

impl Batch<'_> {
    /// Encodes in parallel, adds in order; the first record at fault is the one that is named.
    fn flush(&mut self, samples: &mut Samples) -> Result<(), DataError> {
        let found = std::mem::take(&mut self.found);
        self.num_bytes = 0;
        if let (None, Some(first)) = (self.kind, found.first()) {
            let (kind, unread) = self.recognise(first)?;
            (self.kind, self.unread) = (Some(kind), unread);
        }
        let encoded: Vec<Result<(Sample, u64), DataError>> = found
            .into_par_iter()
            .map(|found| {
                let (line, num_bytes) = (found.line, found.num_bytes);
                let sample = self.encode(found);
                self.progress.advance(num_bytes);
                if self.progress.is_interrupted() {
                    return Err(DataError::Interrupted);
                }
                sample.map(|sample| (sample, line))
            })
            .collect();
        for outcome in encoded {
            let (sample, line) = outcome?;
            samples.push(&sample, line);
        }
        Ok(())
    }

    fn origin(&self, line: u64) -> Origin<'_> {
        Origin {
            path: self.path,
            line,
        }
    }

    /// The kind of a record, and its columns that are not read.
    fn recognise(&self, found: &Found) -> Result<(Kind, Vec<String>), DataError> {
        let origin = self.origin(found.line);
        let Content::Json(text) = &found.content else {
            return Err(origin.bad("it is of no known kind"));
        };
        let object = parse(text).map_err(|problem| origin.bad(problem))?;
        if let Some(problem) = refused(&object) {
            return Err(origin.bad(problem));
        }
        let kind = Kind::of(&object).ok_or_else(|| {
            let keys: Vec<String> = object.keys().map(|key| format!("`{key}`")).collect();
            DataError::UnknownRecord {
                path: self.path.to_path_buf(),
                line: found.line,
                keys: keys.join(", "),
            }
        })?;
        Ok((kind, kind.unread(&object)))
    }

    fn encode(&self, found: Found) -> Result<Sample, DataError> {
        let origin = self.origin(found.line);
        let record = match (found.content, self.kind) {
            (Content::Record(record), _) => record,
            (Content::Json(text), Some(kind)) => self.record(&text, kind, origin)?,
            (Content::Json(_), None) => return Err(origin.bad("it is of no known kind")),
        };
        let encoded = self.encoder.encode(record, origin);
        encoded.map_err(|error| match error {
            DataError::Encode { tokenizer, problem } => origin.bad(format!(
                "the tokenizer `{tokenizer}` cannot encode it: {problem}"
            )),
            error => error,
        })
    }

    fn record(&self, text: &str, kind: Kind, origin: Origin<'_>) -> Result<Record, DataError> {
        let object = parse(text).map_err(|problem| origin.bad(problem))?;
        kind.record(&object).map_err(|problem| {
            let others = match Kind::of(&object) {
                Some(other) if other != kind => format!(
                    "{problem}: it belongs to {other}, but the file holds {kind}, by its first record"
                ),
                _ => problem,
            };
            origin.bad(others)
        })
    }
}

fn parse(text: &str) -> Result<serde_json::Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format!("found {}, not an object", kind_of(&other))),
        Err(error) => {
            // The parser's lines are those of the record, which would mislead.
            let whole = error.to_string();
            let problem = whole.split(" at line ").next().unwrap_or(&whole);
            let place = match error.line() {
                1 => format!("character {}", error.column()),
                line => format!("character {} of the record's line {line}", error.column()),
            };
            let problem = format!("not JSON: {problem} at {place}");
            Err(match error.is_eof() {
                true => format!("{problem}\n{ONE_LINE}"),
                false => problem,
            })
        }
    }
}
