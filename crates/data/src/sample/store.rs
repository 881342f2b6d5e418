//! All samples of a run, kept compactly in host memory.
//!
//! One flat list of tokens with offsets, and one bit a token that says whether it is learned.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use super::encode::Sample;
use super::length::Lengths;
use super::record::Kind;
use crate::error::DataError;

/// One file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleFile {
    pub path: PathBuf,
    /// What its records were recognised as.
    pub kind: Kind,
    /// Columns that are not read, by those of the first record that have something in them.
    pub unread: Vec<String>,
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
    /// No samples yet, and the token that fills rows up.
    pub(super) fn new(padding: i32) -> Self {
        Self {
            offsets: vec![0],
            padding,
            ..Self::default()
        }
    }

    pub(super) fn push_file(&mut self, file: SampleFile) {
        self.files.push(file);
    }

    pub(super) fn push(&mut self, sample: &Sample, line: u64) {
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

    pub(super) fn shrink(&mut self) {
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
        let mut limited = Self::new(self.padding);
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
