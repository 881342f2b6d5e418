//! How long the rows of a run's samples are, before anything is planned: the longest decides how
//! long a planned row is where nobody stated it, and a few shorter lengths are planned beside it
//! where padding all rows to the longest would waste enough.
//!
//! A step has the same samples whatever the lengths are. Its rows are put in the order of their
//! lengths, cut into micro batches, and each micro batch is padded to the shortest length that
//! holds its longest row. So the order of samples is that of the seed, and a run's place in its
//! data is still one number.

use std::fmt;
use std::path::PathBuf;

use cinch_config::{BatchConfig, BucketChoice, Config};
use cinch_data::sample::{Lengths, Limited, Rows};
use cinch_data::{Corpus, Progress};
use serde::Serialize;

use crate::data::{
    holds_samples, load_tokenizer, may_hold_samples, read_samples, row_style, too_long,
};
use crate::error::TrainError;

/// Lengths that are planned at most where the data decides, the longest included. Each is a graph
/// of its own, and beyond a few the next one saves little.
const MOST_LENGTHS: usize = 4;
/// What lengths are multiples of, so that rows of 16-bit numbers stay aligned.
const MULTIPLE: usize = 8;
/// The share of all positions that several lengths must save to be taken.
const WORTH_IT: f64 = 0.1;

/// The tokens of training rows without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowLengths {
    /// In the order in which the first epoch draws them.
    drawn: Vec<usize>,
}

impl RowLengths {
    pub(crate) fn of(rows: &Rows, seed: u64) -> Self {
        let drawn = (0..rows.len()).map(|number| rows.row_len(rows.index(number, seed)));
        Self {
            drawn: drawn.collect(),
        }
    }

    /// What an epoch computes, batch by batch, with the lengths of a configuration.
    pub fn padding(&self, batch: &BatchConfig) -> Padding {
        let lengths = batch.lengths();
        let mut rows = vec![0; lengths.len()];
        let mut positions = 0;
        for step in self.drawn.chunks(batch.effective_batch().max(1)) {
            let mut step = step.to_vec();
            if lengths.len() > 1 {
                step.sort_unstable();
            }
            for micro in step.chunks(batch.batch_size.max(1)) {
                let longest = micro.iter().copied().max().unwrap_or(0);
                let fits = lengths.iter().position(|&length| length >= longest);
                let bucket = fits.unwrap_or(lengths.len() - 1);
                rows[bucket] += micro.len() as u64;
                positions += (micro.len() * lengths[bucket]) as u64;
            }
        }
        let tokens = self.drawn.iter().map(|&length| length as u64).sum::<u64>();
        let share = match positions {
            0 => 0.0,
            positions => positions.saturating_sub(tokens) as f64 / positions as f64,
        };
        let lengths = lengths.into_iter().zip(rows);
        Padding {
            buckets: lengths
                .map(|(length, rows)| PaddedRows { length, rows })
                .collect(),
            positions,
            share,
        }
    }
}

/// Training rows that are padded to one length, in the first epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PaddedRows {
    pub length: usize,
    pub rows: u64,
}

/// To what the rows of an epoch are padded; its `Display` is a sentence for the user.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Padding {
    /// The shortest first.
    pub buckets: Vec<PaddedRows>,
    /// All that is computed, tokens and padding.
    pub positions: u64,
    /// The share of it that is padding.
    pub share: f64,
}

impl fmt::Display for Padding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = |one: &PaddedRows| format!("{} of {}", one.rows, one.length);
        let rows: Vec<String> = self.buckets.iter().map(rows).collect();
        write!(
            f,
            "rows to train on: {} tokens, {:.1} % of them padding",
            rows.join(", "),
            100.0 * self.share
        )
    }
}

/// What the samples of a run say about its rows.
#[derive(Clone, Debug)]
pub struct RowSurvey {
    pub source: PathBuf,
    pub num_samples: usize,
    /// Tokens of the longest sample, as it was read.
    pub longest: usize,
    /// What a limit did to those that are longer.
    pub limited: Limited,
    /// Tokens of the longest planned row.
    pub seq_len: usize,
    /// Shorter lengths that are planned beside it.
    pub buckets: Vec<usize>,
    /// What samples and their layout take of the host's memory while they are prepared.
    pub host_bytes: u64,
    pub training: RowLengths,
}

impl RowSurvey {
    /// Reads the samples of a configuration; none where it trains on text without samples. With
    /// `length_is_free` nobody stated how long rows are: then they are as long as the longest
    /// sample, which the model's positions limit.
    pub fn read(
        config: &Config,
        length_is_free: bool,
        progress: &dyn Progress,
    ) -> Result<Option<Self>, TrainError> {
        let source = config.data.source.as_deref();
        let Some(path) = source.filter(|path| may_hold_samples(path)) else {
            return Ok(None);
        };
        // Ids that are there already need no tokenizer.
        if Corpus::holds_ids(path) {
            return Ok(None);
        }
        let tokenizer = load_tokenizer(config, progress)?.tokenizer;
        if !holds_samples(path, config, &tokenizer)? {
            return Ok(None);
        }
        let samples = read_samples(path, config, &tokenizer, progress)?;
        let (lengths, read_bytes) = (samples.lengths(), samples.host_bytes() as u64);
        let stated = config.batch.seq_len;
        let positions = config
            .model
            .positions()
            .map_or(usize::MAX, |most| most as usize);
        let seq_len = match (length_is_free, config.data.packing) {
            (false, _) => stated,
            (true, false) => lengths.padded_length(MULTIPLE).min(positions),
            // Several samples share a row, which has at least its usual length.
            (true, true) => lengths.padded_length(MULTIPLE).max(stated).min(positions),
        };
        let (samples, limited) = samples.limit(seq_len, too_long(config))?;
        let kept_bytes = samples.host_bytes() as u64;
        let seed = config.training.seed;
        let (training, validation) = samples.split(config.data.val_split, seed);
        let of_training = training.lengths();
        let training = training.rows(seq_len, row_style(config), seed)?;
        let validation = validation.rows(seq_len, row_style(config), seed)?;
        let layout = (training.host_bytes() + validation.host_bytes()) as u64;
        let training = RowLengths::of(&training, seed);
        let mut batch = config.batch.clone();
        batch.seq_len = seq_len;
        Ok(Some(Self {
            source: path.to_owned(),
            num_samples: lengths.num_samples,
            longest: lengths.longest,
            seq_len,
            buckets: match config.data.buckets {
                BucketChoice::Off => Vec::new(),
                BucketChoice::Stated => batch.buckets.clone(),
                BucketChoice::Auto if config.data.packing => Vec::new(),
                BucketChoice::Auto => worthwhile(&training, &of_training, batch),
            },
            // What a limit cuts is there twice for a moment.
            host_bytes: layout
                + match limited.num_tokens_lost {
                    0 => kept_bytes,
                    _ => read_bytes + kept_bytes,
                },
            limited,
            training,
        }))
    }
}

/// The few lengths that save the most positions, where they save enough of them in the batches as
/// they are cut.
fn worthwhile(rows: &RowLengths, lengths: &Lengths, mut batch: BatchConfig) -> Vec<usize> {
    batch.buckets = Vec::new();
    let one = rows.padding(&batch).positions;
    let buckets = lengths.buckets(MOST_LENGTHS, MULTIPLE).buckets.into_iter();
    let shorter = buckets.map(|bucket| bucket.length);
    batch.buckets = shorter.filter(|&length| length < batch.seq_len).collect();
    let several = rows.padding(&batch);
    let saved = one.saturating_sub(several.positions) as f64;
    if one == 0 || saved < WORTH_IT * one as f64 {
        return Vec::new();
    }
    // Which lengths are best was asked of single rows; where they share micro batches, one may be
    // left without any.
    let used = several.buckets.iter().filter(|one| one.rows > 0);
    let used = used.map(|one| one.length);
    used.filter(|&length| length < batch.seq_len).collect()
}

#[cfg(test)]
mod tests {
    use cinch_config::Settings;

    use super::*;

    fn batch(batch_size: usize, accumulation: usize, buckets: &[usize]) -> BatchConfig {
        BatchConfig {
            batch_size,
            accumulation,
            seq_len: 64,
            buckets: buckets.to_vec(),
            ..Settings::new().resolve().unwrap().batch
        }
    }

    fn padded(padding: &Padding) -> Vec<(usize, u64)> {
        let rows = padding.buckets.iter();
        rows.map(|one| (one.length, one.rows)).collect()
    }

    #[test]
    fn rows_are_padded_as_their_micro_batch_needs_it() {
        let rows = RowLengths {
            drawn: vec![60, 5, 8, 30, 7, 6],
        };
        let alone = rows.padding(&batch(1, 6, &[8, 32]));
        assert_eq!(padded(&alone), [(8, 4), (32, 1), (64, 1)]);
        assert_eq!(alone.positions, 4 * 8 + 32 + 64);
        // 5 and 6, 7 and 8, 30 and 60 share a micro batch.
        let pairs = rows.padding(&batch(2, 3, &[8, 32]));
        assert_eq!(padded(&pairs), [(8, 4), (32, 0), (64, 2)]);
        // Steps of two: what a step draws is what it computes.
        let steps = rows.padding(&batch(2, 1, &[8, 32]));
        assert_eq!(padded(&steps), [(8, 2), (32, 2), (64, 2)]);
        let one = rows.padding(&batch(2, 3, &[]));
        assert_eq!(padded(&one), [(64, 6)]);
        assert_eq!(one.share, 268.0 / 384.0);
        assert_eq!(
            one.to_string(),
            "rows to train on: 6 of 64 tokens, 69.8 % of them padding"
        );
    }
}
