//! All samples of a run, tokenised beforehand and kept compactly in host memory.
//!
//! Lengths decide what a step takes, so they are known before anything is planned: every record
//! is encoded at the start, on all cores, into one flat list of tokens with offsets and one bit
//! a token that says whether it is learned. The result does not depend on the number of threads.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::chat::TokenizerConfig;
use super::encode::{Origin, Sample, SampleEncoder, Templating};
use super::length::Lengths;
use super::read::{self, Content, Found, TextUnit};
use super::record::{Kind, Record, kind_of};
use crate::error::DataError;
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

/// One file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleFile {
    pub path: PathBuf,
    /// What its records were recognised as.
    pub kind: Kind,
    pub num_samples: usize,
}

/// What to do with a sample that is longer than a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// Keep its beginning.
    #[default]
    Truncate,
    /// Leave it out.
    Drop,
    /// Refuse it.
    Error,
}

/// What a limit did; its `Display` is a sentence for the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limited {
    pub limit: usize,
    pub num_truncated: usize,
    pub num_dropped: usize,
    /// Truncated samples of which nothing that is learned was left; they are left out.
    pub num_emptied: usize,
    pub num_tokens_lost: u64,
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            limit,
            num_truncated,
            num_dropped,
            num_emptied,
            num_tokens_lost,
        } = self;
        if num_truncated + num_dropped + num_emptied == 0 {
            return write!(f, "no sample is longer than {limit} tokens");
        }
        write!(f, "samples longer than {limit} tokens: ")?;
        let mut parts = Vec::new();
        if *num_truncated > 0 {
            parts.push(format!("{num_truncated} cut at the end"));
        }
        if *num_emptied > 0 {
            parts.push(format!(
                "{num_emptied} left out, because the cut leaves nothing to learn"
            ));
        }
        if *num_dropped > 0 {
            parts.push(format!("{num_dropped} left out"));
        }
        write!(f, "{} ({num_tokens_lost} tokens lost)", parts.join(", "))
    }
}

/// Samples in the order in which they were read.
#[derive(Debug, Default)]
pub struct Samples {
    /// All tokens, one sample after the other.
    tokens: Vec<i32>,
    /// Where each sample begins, and where the last one ends: [number + 1].
    offsets: Vec<usize>,
    /// One bit a token, the lowest first.
    counted: Vec<u64>,
    /// The line of its file where each sample begins.
    lines: Vec<u64>,
    files: Vec<SampleFile>,
    padding: i32,
    fingerprint: OnceLock<String>,
}

/// A borrowed sample.
#[derive(Debug, Clone, Copy)]
pub struct SampleView<'a> {
    pub tokens: &'a [i32],
    samples: &'a Samples,
    start: usize,
}

impl SampleView<'_> {
    /// Whether the token at `place` of the sample is learned.
    pub fn is_counted(&self, place: usize) -> bool {
        self.samples.is_counted(self.start + place)
    }
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
        let mut samples = Self {
            offsets: vec![0],
            padding: encoder.end_of_text().unwrap_or(0) as i32,
            ..Self::default()
        };
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
            self.files.push(SampleFile {
                path: path.to_path_buf(),
                kind,
                num_samples: self.len() - before,
            });
        }
        Ok(())
    }

    fn push(&mut self, sample: &Sample, line: u64) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(&sample.tokens);
        self.counted
            .resize(self.tokens.len().div_ceil(u64::BITS as usize), 0);
        for (place, _) in sample.counted.iter().enumerate().filter(|(_, c)| **c) {
            self.count(start + place);
        }
        self.offsets.push(self.tokens.len());
        self.lines.push(line);
    }

    fn count(&mut self, place: usize) {
        let bits = u64::BITS as usize;
        self.counted[place / bits] |= 1 << (place % bits);
    }

    fn is_counted(&self, place: usize) -> bool {
        let bits = u64::BITS as usize;
        self.counted[place / bits] >> (place % bits) & 1 == 1
    }

    fn shrink(&mut self) {
        self.tokens.shrink_to_fit();
        self.offsets.shrink_to_fit();
        self.counted.shrink_to_fit();
        self.lines.shrink_to_fit();
    }

    pub fn len(&self) -> usize {
        self.lines.len()
    }

    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The files that were read, and what their records are.
    pub fn files(&self) -> &[SampleFile] {
        &self.files
    }

    /// The token that fills rows up; it counts for no loss.
    pub fn padding(&self) -> i32 {
        self.padding
    }

    /// The sample with the number `index`, below `len`.
    pub fn sample(&self, index: usize) -> SampleView<'_> {
        let start = self.offsets[index];
        SampleView {
            tokens: &self.tokens[start..self.offsets[index + 1]],
            samples: self,
            start,
        }
    }

    /// The number of tokens of sample `index`.
    pub(super) fn length(&self, index: usize) -> usize {
        self.offsets[index + 1] - self.offsets[index]
    }

    /// How long the samples are.
    pub fn lengths(&self) -> Lengths {
        Lengths::new((0..self.len()).map(|index| self.length(index)).collect())
    }

    /// The number of tokens that are learned.
    pub fn num_counted(&self) -> u64 {
        self.counted
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }

    /// What the samples take of host memory, in bytes.
    pub fn host_bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<i32>()
            + self.offsets.capacity() * size_of::<usize>()
            + self.counted.capacity() * size_of::<u64>()
            + self.lines.capacity() * size_of::<u64>()
    }

    /// Identifies the tokens and which of them are learned. Computed when first asked for.
    pub fn fingerprint(&self) -> &str {
        self.fingerprint.get_or_init(|| {
            let mut hash = Sha256::new();
            hash.update((self.len() as u64).to_le_bytes());
            for index in 0..self.len() {
                hash.update((self.length(index) as u64).to_le_bytes());
            }
            let mut block = Vec::with_capacity(1 << 16);
            for tokens in self.tokens.chunks(1 << 14) {
                block.clear();
                block.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                hash.update(&block);
            }
            for word in &self.counted {
                hash.update(word.to_le_bytes());
            }
            format!("{:x}", hash.finalize())
        })
    }

    /// Applies a limit to the length of samples, and says what that did.
    pub fn limit(self, limit: usize, too_long: TooLong) -> Result<(Self, Limited), DataError> {
        if (0..self.len()).all(|index| self.length(index) <= limit) {
            let outcome = Limited {
                limit,
                ..Limited::default()
            };
            return Ok((self, outcome));
        }
        let mut limited = Self {
            offsets: vec![0],
            padding: self.padding,
            ..Self::default()
        };
        let mut outcome = Limited {
            limit,
            ..Limited::default()
        };
        let mut first = 0;
        for file in &self.files {
            let before = limited.len();
            for index in first..first + file.num_samples {
                let view = self.sample(index);
                let kept = view.tokens.len().min(limit);
                let is_long = kept < view.tokens.len();
                if is_long && too_long == TooLong::Error {
                    return Err(DataError::SampleTooLong {
                        path: file.path.clone(),
                        line: self.lines[index],
                        num_tokens: view.tokens.len(),
                        limit,
                    });
                }
                let is_learned = (1..kept).any(|place| view.is_counted(place));
                let is_kept = !is_long || (too_long == TooLong::Truncate && is_learned);
                match (is_long, is_kept) {
                    (false, _) => {}
                    (true, true) => outcome.num_truncated += 1,
                    (true, false) if too_long == TooLong::Truncate => outcome.num_emptied += 1,
                    (true, false) => outcome.num_dropped += 1,
                }
                let kept = if is_kept { kept } else { 0 };
                outcome.num_tokens_lost += (view.tokens.len() - kept) as u64;
                if is_kept {
                    limited.push(
                        &Sample {
                            tokens: view.tokens[..kept].to_vec(),
                            counted: (0..kept).map(|place| view.is_counted(place)).collect(),
                        },
                        self.lines[index],
                    );
                }
            }
            first += file.num_samples;
            limited.files.push(SampleFile {
                num_samples: limited.len() - before,
                ..file.clone()
            });
        }
        if limited.is_empty() {
            return Err(DataError::NoSampleShortEnough {
                limit,
                shortest: self.lengths().shortest,
            });
        }
        limited.shrink();
        Ok((limited, outcome))
    }

    /// The file and the line of sample `index`.
    pub fn origin(&self, index: usize) -> (&Path, u64) {
        let mut first = 0;
        for file in &self.files {
            first += file.num_samples;
            if index < first {
                return (&file.path, self.lines[index]);
            }
        }
        (Path::new(""), self.lines[index])
    }
}

/// Records of one file that wait to be encoded together.
struct Batch<'a> {
    path: &'a Path,
    kind: Option<Kind>,
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
            self.kind = Some(self.recognise(first)?);
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

    fn recognise(&self, found: &Found) -> Result<Kind, DataError> {
        let origin = self.origin(found.line);
        let Content::Json(text) = &found.content else {
            return Err(origin.bad("it is of no known kind"));
        };
        let object = parse(text).map_err(|problem| origin.bad(problem))?;
        Kind::of(&object).ok_or_else(|| {
            let keys: Vec<String> = object.keys().map(|key| format!("`{key}`")).collect();
            DataError::UnknownRecord {
                path: self.path.to_path_buf(),
                line: found.line,
                keys: keys.join(", "),
            }
        })
    }

    fn encode(&self, found: Found) -> Result<Sample, DataError> {
        let origin = self.origin(found.line);
        let record = match (found.content, self.kind) {
            (Content::Record(record), _) => record,
            (Content::Json(text), Some(kind)) => self.record(&text, kind, origin)?,
            (Content::Json(_), None) => return Err(origin.bad("it is of no known kind")),
        };
        self.encoder.encode(record, origin)
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
            Err(format!("not JSON: {problem} at {place}"))
        }
    }
}
