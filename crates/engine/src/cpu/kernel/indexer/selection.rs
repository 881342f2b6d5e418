//! The selection of keys by their scores. Where the number of keys depends on the variance of a
//! row against that of all rows, the scores are computed twice: no table holds all of them.

use crate::cpu::kernel::lanes;
use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::{IndexerShape, Inputs, Part, WORD};

/// How many keys a query selects, at most those that it sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Count {
    /// All that it sees.
    All,
    Fixed(usize),
    Adaptive {
        base: usize,
        least: usize,
        most: usize,
        temperature: f64,
    },
}

impl Count {
    /// Of the query at `t`, whose row has `variance` where the mean of all is `mean`. In single
    /// precision, as it is defined.
    pub(super) fn keys(self, t: usize, variance: f64, mean: f64) -> usize {
        let visible = t + 1;
        match self {
            Self::All => visible,
            Self::Fixed(count) => count.min(visible),
            Self::Adaptive {
                base,
                least,
                most,
                temperature,
            } => {
                let ratio = variance as f32 / (mean as f32 + 1e-8);
                let share = 0.5 + 1.0 / (1.0 + ratio * temperature as f32);
                let count = (base as f32 * share).clamp(least as f32, most as f32);
                (count.min(visible as f32) as usize).clamp(1, visible)
            }
        }
    }
}

/// Writes the log-sum-exp `[rows]` of the selected scores and, where `bits` is there, the
/// selection: a bit for each key, `[rows, ⌈seq/32⌉]` words.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn select<F: Real>(
    shape: &IndexerShape,
    inputs: &Inputs<'_, F>,
    count: Count,
    workspace: &mut [F],
    lse: &mut [F],
    bits: Option<&mut [i32]>,
) {
    inputs.check(shape);
    let rows = shape.num_rows();
    assert_eq!(lse.len(), rows, "the log-sum-exp");
    let row_words = shape.seq.div_ceil(WORD);
    if let Some(bits) = &bits {
        assert_eq!(bits.len(), rows * row_words, "the selection");
    }
    let (products, rest) = workspace.split_at_mut(shape.table());
    let (scores, variances) = rest.split_at_mut(shape.table());
    let variances = &mut variances[..rows];
    let adaptive = matches!(count, Count::Adaptive { .. });
    if adaptive {
        for part in shape.parts() {
            inputs.scores(shape, part, products, scores);
            let variances = Shared::new(&mut *variances);
            for_each_row(shape, part, scores, |_, row, line| {
                // SAFETY: each task has its own row.
                let out = unsafe { variances.part(row, 1) };
                out[0] = variance(line, shape.seq);
            });
        }
    }
    let total: f64 = variances
        .iter()
        .filter(|_| adaptive)
        .map(|v| v.to_f64())
        .sum();
    let mean = total / rows.max(1) as f64;
    let variances = &*variances;
    let lse = Shared::new(lse);
    let mut none = [];
    let has_bits = bits.is_some();
    let bits = Shared::new(bits.unwrap_or(&mut none));
    for part in shape.parts() {
        inputs.scores(shape, part, products, scores);
        let copies = Shared::new(&mut *products);
        for_each_row(shape, part, scores, |i, row, line| {
            let variance = if adaptive {
                variances[row].to_f64()
            } else {
                0.0
            };
            let keys = count.keys(line.len() - 1, variance, mean);
            let least = (keys < line.len()).then(|| {
                // SAFETY: each task has its own row.
                let copy = unsafe { copies.part(i * part.columns(), line.len()) };
                copy.copy_from_slice(line);
                Threshold::of(copy, keys)
            });
            // SAFETY: as above.
            let lse = unsafe { lse.part(row, 1) };
            if has_bits {
                // SAFETY: as above.
                let words = unsafe { bits.part(row * row_words, row_words) };
                lse[0] = mark(line, least, words);
            } else {
                lse[0] = log_sum(line);
            }
        });
    }
}

/// Runs `task(row of the part, row of all, what it sees)` for each row of a part.
pub(super) fn for_each_row<F: Real>(
    shape: &IndexerShape,
    part: Part,
    scores: &[F],
    task: impl Fn(usize, usize, &[F]) + Sync + Send,
) {
    parallel::for_each(part.rows, |i| {
        let line = &scores[i * part.columns()..][..=part.position(i)];
        task(i, part.b * shape.seq + part.t0 + i, line);
    });
}

/// The unbiased variance of a row of `seq` columns, of which those after the line are 0.
fn variance<F: Real>(line: &[F], seq: usize) -> F {
    if seq < 2 {
        return F::ZERO;
    }
    let mean = row_sum(line) / F::from_f64(seq as f64);
    let hidden = F::from_f64((seq - line.len()) as f64) * mean * mean;
    (squares(line, mean) + hidden) / F::from_f64((seq - 1) as f64)
}

simd! {
    pub(super) fn row_sum<F: Real>(line: &[F]) -> F {
        lanes::sum(line, |x| x)
    }
}

simd! {
    pub(super) fn squares<F: Real>(line: &[F], mean: F) -> F {
        lanes::sum(line, |x| (x - mean) * (x - mean))
    }
}

/// `ln Σ e^x`. Scores are small sums of sigmoids, but their number is the user's.
fn log_sum<F: Real>(line: &[F]) -> F {
    let largest = line.iter().fold(line[0], |best, &x| x.larger(best));
    largest + exponentials(line, largest).ln()
}

simd! {
    fn exponentials<F: Real>(line: &[F], largest: F) -> F {
        lanes::sum(line, |x| (x - largest).exp())
    }
}

/// The lowest selected score, and how many that are equal to it are selected.
#[derive(Clone, Copy)]
pub(super) struct Threshold<F> {
    score: F,
    equal: usize,
}

impl<F: Real> Threshold<F> {
    /// Of the `count` highest scores. The line's order is lost.
    pub(super) fn of(line: &mut [F], count: usize) -> Self {
        let at = line.len() - count;
        let order = |a: &F, b: &F| a.to_f64().total_cmp(&b.to_f64());
        let (_, &mut score, above) = line.select_nth_unstable_by(at, order);
        let higher = above.iter().filter(|&&x| x > score).count();
        Self {
            score,
            equal: count - higher,
        }
    }
}

/// Sets the bits of the selected keys, of equal scores those at lower positions; the log-sum-exp
/// of what is selected.
pub(super) fn mark<F: Real>(line: &[F], least: Option<Threshold<F>>, words: &mut [i32]) -> F {
    let Some(least) = least else {
        for (index, word) in words.iter_mut().enumerate() {
            let count = line.len().saturating_sub(index * WORD).min(WORD);
            let ones = ((1_u64 << count) - 1) as u32;
            *word = ones.cast_signed();
        }
        return log_sum(line);
    };
    let largest = line.iter().fold(line[0], |best, &x| x.larger(best));
    let mut equal = least.equal;
    let mut sum = F::ZERO;
    for (index, word) in words.iter_mut().enumerate() {
        let first = (index * WORD).min(line.len());
        let chunk = &line[first..line.len().min(first + WORD)];
        let mut ones = 0_u32;
        for (bit, &x) in chunk.iter().enumerate() {
            let tie = x == least.score && equal > 0;
            equal -= usize::from(tie);
            let chosen = x > least.score || tie;
            ones |= u32::from(chosen) << bit;
        }
        sum += chosen_exponentials(chunk, ones, largest);
        *word = ones.cast_signed();
    }
    largest + sum.ln()
}

simd! {
    /// The exponentials of a word's selected scores.
    fn chosen_exponentials<F: Real>(chunk: &[F], ones: u32, largest: F) -> F {
        let mut terms = [F::ZERO; WORD];
        for (l, (term, &x)) in terms.iter_mut().zip(chunk).enumerate() {
            let exponential = (x - largest).exp();
            *term = if ones >> l & 1 == 1 { exponential } else { F::ZERO };
        }
        lanes::sum(&terms, |x| x)
    }
}
