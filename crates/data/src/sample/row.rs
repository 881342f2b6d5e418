//! Rows of tokens for a step: samples packed together, or one to a row with padding.
//!
//! The position of a run in its data is one integer, the number of rows drawn so far. Epoch and
//! place follow from it, and the order of an epoch is a computed permutation, so a resumed run
//! continues with exactly the row it would have seen next.

use std::sync::Arc;

use cinch_graph::op::IGNORE_INDEX;
use sha2::{Digest, Sha256};

use super::length::Lengths;
use super::pack;
use super::store::Samples;
use crate::error::DataError;
use crate::permutation::Permutation;
use crate::random::mix;

/// How rows are made of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStyle {
    /// As many samples as fit.
    #[default]
    Packed,
    /// One sample.
    Padded,
}

/// What a row is written to; each slice has the length of the row.
#[derive(Debug)]
pub struct Row<'a> {
    pub tokens: &'a mut [i32],
    /// The next token of the same sample where it is learned, and otherwise what the loss
    /// leaves out.
    pub targets: &'a mut [i32],
    /// The place in the sample, from 0.
    pub positions: &'a mut [i32],
    /// The place in the row where the sample begins. Padding is a sample of its own.
    pub starts: &'a mut [i32],
}

/// Samples of one purpose, training or validation.
#[derive(Debug, Clone)]
pub struct Selection {
    samples: Arc<Samples>,
    /// In the order in which they were read.
    indices: Vec<usize>,
}

impl Samples {
    /// (training, validation): samples drawn at random by `seed` go to validation, before any
    /// are packed, so that none is in both. With a fraction above 0 and two samples or more,
    /// neither part is empty.
    pub fn split(self, val_fraction: f64, seed: u64) -> (Selection, Selection) {
        let num = self.len();
        let wanted = if val_fraction > 0.0 && num >= 2 {
            ((num as f64 * val_fraction).round() as usize).clamp(1, num - 1)
        } else {
            0
        };
        let order = Permutation::new(num as u64, seed);
        let samples = Arc::new(self);
        let part = |places: std::ops::Range<usize>| {
            let mut indices: Vec<usize> = places
                .map(|place| order.apply(place as u64) as usize)
                .collect();
            indices.sort_unstable();
            Selection {
                samples: samples.clone(),
                indices,
            }
        };
        (part(wanted..num), part(0..wanted))
    }
}

impl Selection {
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The numbers of the samples, in the order in which they were read.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// How long the samples of this part are.
    pub fn lengths(&self) -> Lengths {
        let length = |index: &usize| self.samples.length(*index);
        Lengths::new(self.indices.iter().map(length).collect())
    }

    /// Rows of `seq_len` tokens. A sample that is longer is an error: `Samples::limit` says what
    /// becomes of those. `seed` decides which samples of equal length share a row.
    pub fn rows(&self, seq_len: usize, style: RowStyle, seed: u64) -> Result<Rows, DataError> {
        if seq_len == 0 {
            return Err(DataError::ZeroSequenceLength);
        }
        let lengths: Vec<usize> = self
            .indices
            .iter()
            .map(|index| self.samples.length(*index))
            .collect();
        if let Some(place) = lengths.iter().position(|length| *length > seq_len) {
            let (path, line) = self.samples.origin(self.indices[place]);
            return Err(DataError::SampleTooLong {
                path: path.to_path_buf(),
                line,
                num_tokens: lengths[place],
                limit: seq_len,
            });
        }
        let places: Vec<Vec<usize>> = match style {
            RowStyle::Packed => pack::first_fit_decreasing(&lengths, seq_len, seed),
            RowStyle::Padded => (0..lengths.len()).map(|place| vec![place]).collect(),
        };
        let mut members = Vec::with_capacity(lengths.len());
        let mut offsets = Vec::with_capacity(places.len() + 1);
        offsets.push(0);
        for row in places {
            members.extend(row.into_iter().map(|place| self.indices[place]));
            offsets.push(members.len());
        }
        Ok(Rows {
            samples: self.samples.clone(),
            members,
            offsets,
            seq_len,
            num_tokens: lengths.iter().map(|length| *length as u64).sum(),
        })
    }
}

/// The rows of one part.
#[derive(Debug, Clone)]
pub struct Rows {
    samples: Arc<Samples>,
    /// The samples of all rows, one row after the other.
    members: Vec<usize>,
    /// Where each row begins in `members`, and where the last one ends.
    offsets: Vec<usize>,
    seq_len: usize,
    num_tokens: u64,
}

impl Rows {
    /// The number of rows of an epoch.
    pub fn len(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    pub fn num_samples(&self) -> usize {
        self.members.len()
    }

    /// The share of all places that hold padding.
    pub fn padding_share(&self) -> f64 {
        let places = self.len() * self.seq_len as u64;
        if places == 0 {
            return 0.0;
        }
        1.0 - self.num_tokens as f64 / places as f64
    }

    /// What the layout takes of host memory, in bytes. The samples, which all parts of a split
    /// share, are counted by [`Samples::host_bytes`].
    pub fn host_bytes(&self) -> usize {
        (self.members.capacity() + self.offsets.capacity()) * size_of::<usize>()
    }

    /// Identifies the rows: the tokens, which are learned, and how they are laid out. A resumed
    /// run compares it with the one it started with.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.samples.fingerprint());
        hash.update((self.seq_len as u64).to_le_bytes());
        hash.update(self.samples.padding().to_le_bytes());
        for list in [&self.offsets, &self.members] {
            hash.update((list.len() as u64).to_le_bytes());
            for value in list {
                hash.update((*value as u64).to_le_bytes());
            }
        }
        // 128 bits tell any number of data sets apart.
        format!("{:x}", hash.finalize())[..32].to_owned()
    }

    /// The number of the row that is drawn `sample`-th, counting from 0 over all epochs. Each
    /// epoch visits every row once, in an order of its own that depends on `seed`.
    pub fn index(&self, sample: u64, seed: u64) -> u64 {
        match self.len() {
            0 => 0,
            len => {
                let (epoch, place) = (sample / len, sample % len);
                Permutation::new(len, mix(seed) ^ epoch).apply(place)
            }
        }
    }

    /// Tokens of row `index` without padding; none beyond the end.
    pub fn row_len(&self, index: u64) -> usize {
        let lengths = self.members_of(index).iter();
        lengths.map(|member| self.samples.length(*member)).sum()
    }

    /// Writes the row that is drawn `sample`-th, as [`Self::index`] has it.
    pub fn fill(&self, sample: u64, seed: u64, row: &mut Row<'_>) {
        self.fill_in_order(self.index(sample, seed), row);
    }

    /// The samples of row `index`; none beyond the end.
    fn members_of(&self, index: u64) -> &[usize] {
        match usize::try_from(index) {
            Ok(index) if (index as u64) < self.len() => {
                &self.members[self.offsets[index]..self.offsets[index + 1]]
            }
            _ => &[],
        }
    }

    /// Writes row `index`, in an order that never changes. Beyond the end, as in an empty part,
    /// it is a row of padding that counts for no loss.
    pub fn fill_in_order(&self, index: u64, row: &mut Row<'_>) {
        for slice in [&row.tokens, &row.targets, &row.positions, &row.starts] {
            assert_eq!(slice.len(), self.seq_len, "one row");
        }
        let mut start = 0;
        for member in self.members_of(index) {
            let sample = self.samples.sample(*member);
            let length = sample.tokens.len();
            row.tokens[start..start + length].copy_from_slice(sample.tokens);
            for place in 0..length {
                let next = place + 1;
                let is_learned = next < length && sample.is_counted(next);
                row.targets[start + place] = if is_learned {
                    sample.tokens[next]
                } else {
                    IGNORE_INDEX
                };
            }
            number(row, start, length);
            start += length;
        }
        row.tokens[start..].fill(self.samples.padding());
        row.targets[start..].fill(IGNORE_INDEX);
        number(row, start, self.seq_len - start);
    }
}

/// Numbers the places of one document of a row.
fn number(row: &mut Row<'_>, start: usize, length: usize) {
    for place in 0..length {
        row.positions[start + place] = place as i32;
        row.starts[start + place] = start as i32;
    }
}
