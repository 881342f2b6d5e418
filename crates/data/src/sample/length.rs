//! How long samples are, and the few lengths that waste the least on padding.

use std::fmt;

/// The lengths of samples, in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    pub num_samples: usize,
    pub num_tokens: u64,
    pub shortest: usize,
    pub median: usize,
    /// 95 of a hundred samples are no longer than this.
    pub percentile_95: usize,
    pub longest: usize,
    sorted: Vec<usize>,
}

impl Lengths {
    pub(super) fn new(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        // The smallest length that at least this share of the samples does not exceed.
        let rank = |percent: usize| {
            let place = (lengths.len() * percent).div_ceil(100).max(1) - 1;
            lengths.get(place).copied().unwrap_or(0)
        };
        Self {
            num_samples: lengths.len(),
            num_tokens: lengths.iter().map(|length| *length as u64).sum(),
            shortest: lengths.first().copied().unwrap_or(0),
            median: rank(50),
            percentile_95: rank(95),
            longest: lengths.last().copied().unwrap_or(0),
            sorted: lengths,
        }
    }

    /// How many samples are longer than `limit`.
    pub fn longer_than(&self, limit: usize) -> usize {
        self.num_samples - self.sorted.partition_point(|length| *length <= limit)
    }

    /// The length of rows that hold one sample each: the longest, rounded up to a multiple.
    pub fn padded_length(&self, multiple: usize) -> usize {
        self.longest.max(1).next_multiple_of(multiple.max(1))
    }

    /// At most `most` lengths, each a multiple of `multiple`, such that padding every sample to
    /// the next of them takes the fewest tokens.
    pub fn buckets(&self, most: usize, multiple: usize) -> Buckets {
        let multiple = multiple.max(1);
        // Candidates are the rounded lengths that occur, and how many samples each has.
        let mut candidates: Vec<(usize, u64)> = Vec::new();
        for length in &self.sorted {
            let rounded = (*length).max(1).next_multiple_of(multiple);
            match candidates.last_mut() {
                Some((last, count)) if *last == rounded => *count += 1,
                _ => candidates.push((rounded, 1)),
            }
        }
        let ends = best_ends(&candidates, most.max(1));
        let mut buckets = Vec::with_capacity(ends.len());
        let mut first = 0;
        for end in ends {
            buckets.push(Bucket {
                length: candidates[end - 1].0,
                num_samples: candidates[first..end].iter().map(|(_, n)| n).sum(),
            });
            first = end;
        }
        Buckets {
            buckets,
            num_tokens: self.num_tokens,
            one_bucket_tokens: (self.padded_length(multiple) * self.num_samples) as u64,
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples, {} tokens; lengths {} to {}, median {}, 95 % up to {}",
            self.num_samples,
            self.num_tokens,
            self.shortest,
            self.longest,
            self.median,
            self.percentile_95
        )
    }
}

/// Rows of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    pub length: usize,
    pub num_samples: u64,
}

/// Lengths of rows, the shortest first; a sample goes to the first that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    pub buckets: Vec<Bucket>,
    /// The tokens of the samples themselves.
    pub num_tokens: u64,
    /// What one length for all would take.
    pub one_bucket_tokens: u64,
}

impl Buckets {
    /// Tokens with padding.
    pub fn padded_tokens(&self) -> u64 {
        let tokens = |bucket: &Bucket| bucket.length as u64 * bucket.num_samples;
        self.buckets.iter().map(tokens).sum()
    }

    /// The share of the padded tokens that is padding.
    pub fn padding_share(&self) -> f64 {
        share(self.padded_tokens() - self.num_tokens, self.padded_tokens())
    }

    /// The share of what one length for all would take that these lengths save.
    pub fn saved_share(&self) -> f64 {
        let saved = self.one_bucket_tokens - self.padded_tokens();
        share(saved, self.one_bucket_tokens)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// Where to cut the candidates into at most `most` groups so that Σ (largest length × number) is
/// least; the ends of the groups, each one past its last candidate.
///
/// With C(k) samples up to candidate k, a group (i, j] costs `L(j)·(C(j) − C(i))`. For i ≤ i'
/// and j ≤ j', exchanging the ends changes the sum by `(C(i') − C(i))·(L(j) − L(j'))` ≤ 0, so
/// the best beginning of a last group never moves back as its end moves on, and halving the
/// range of ends bounds the beginnings on both sides: O(groups · n · log n).
fn best_ends(candidates: &[(usize, u64)], most: usize) -> Vec<usize> {
    let n = candidates.len();
    if n == 0 {
        return Vec::new();
    }
    let mut cumulative = vec![0u64; n + 1];
    for (place, (_, count)) in candidates.iter().enumerate() {
        cumulative[place + 1] = cumulative[place] + count;
    }
    let cost = |begin: usize, end: usize| {
        candidates[end - 1].0 as u64 * (cumulative[end] - cumulative[begin])
    };
    let groups = most.min(n);
    // best[end]: the least cost of the first `end` candidates in the groups so far.
    let mut best: Vec<u64> = (0..=n)
        .map(|end| if end == 0 { 0 } else { cost(0, end) })
        .collect();
    let mut begins: Vec<Vec<usize>> = vec![vec![0; n + 1]];
    for _ in 1..groups {
        let mut next = best.clone();
        // No beginning means that one group less is as good.
        let mut begin_of: Vec<usize> = vec![usize::MAX; n + 1];
        let mut ranges = vec![(1, n, 0, n - 1)];
        while let Some((low, high, from, to)) = ranges.pop() {
            if low > high {
                continue;
            }
            let middle = low + (high - low) / 2;
            let total = |begin: usize| best[begin] + cost(begin, middle);
            let begins = from..=to.min(middle - 1);
            let found = begins.min_by_key(|begin| total(*begin)).unwrap_or(from);
            let least = total(found);
            if least < next[middle] {
                next[middle] = least;
                begin_of[middle] = found;
            }
            ranges.push((low, middle - 1, from, found));
            ranges.push((middle + 1, high, found, to));
        }
        best = next;
        begins.push(begin_of);
    }
    let mut ends = Vec::new();
    let mut end = n;
    for begin_of in begins.iter().rev() {
        if end == 0 {
            break;
        }
        if begin_of[end] != usize::MAX {
            ends.push(end);
            end = begin_of[end];
        }
    }
    ends.reverse();
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn ranks_are_lengths_that_occur() {
        let lengths = Lengths::new((1..=100).rev().collect());
        assert_eq!((lengths.shortest, lengths.longest), (1, 100));
        assert_eq!((lengths.median, lengths.percentile_95), (50, 95));
        assert_eq!(lengths.longer_than(95), 5);
        assert_eq!(lengths.longer_than(100), 0);
        assert_eq!(lengths.padded_length(64), 128);
        let one = Lengths::new(vec![7]);
        assert_eq!((one.median, one.percentile_95), (7, 7));
        assert_eq!(
            one.to_string(),
            "1 samples, 7 tokens; lengths 7 to 7, median 7, 95 % up to 7"
        );
    }

    /// The least cost over every choice of lengths.
    fn brute(lengths: &[usize], most: usize, multiple: usize) -> u64 {
        let mut rounded: Vec<usize> = lengths
            .iter()
            .map(|length| length.next_multiple_of(multiple))
            .collect();
        rounded.sort_unstable();
        let mut distinct = rounded.clone();
        distinct.dedup();
        let last = distinct.len() - 1;
        (0..1u32 << last)
            .filter(|chosen| chosen.count_ones() < most as u32)
            .map(|chosen| {
                let held = |length: usize| {
                    let fits = |place: &usize| distinct[*place] >= length;
                    let is_chosen = |place: &usize| *place == last || chosen >> place & 1 == 1;
                    (0..=last).filter(is_chosen).find(fits).unwrap()
                };
                rounded
                    .iter()
                    .map(|length| distinct[held(*length)] as u64)
                    .sum()
            })
            .min()
            .unwrap()
    }

    #[test]
    fn buckets_are_the_best_there_are() {
        let mut random = Random::new(3, 0);
        for round in 0..200 {
            let num = 1 + random.below(12);
            let lengths: Vec<usize> = (0..num).map(|_| 1 + random.below(60)).collect();
            let report = Lengths::new(lengths.clone());
            for most in 1..=5 {
                for multiple in [1, 8] {
                    let buckets = report.buckets(most, multiple);
                    assert!(buckets.buckets.len() <= most);
                    assert_eq!(
                        buckets.padded_tokens(),
                        brute(&lengths, most, multiple),
                        "round {round}: {lengths:?}, {most} buckets of {multiple}"
                    );
                    let counted: u64 = buckets.buckets.iter().map(|b| b.num_samples).sum();
                    assert_eq!(counted, num as u64);
                    assert!(buckets.buckets.is_sorted_by_key(|bucket| bucket.length));
                }
            }
        }
    }

    #[test]
    fn shares_are_of_padded_tokens() {
        let report = Lengths::new(vec![10, 10, 10, 100]);
        let one = report.buckets(1, 1);
        assert_eq!(
            one.buckets,
            [Bucket {
                length: 100,
                num_samples: 4
            }]
        );
        assert_eq!(
            (one.saved_share(), one.padding_share()),
            (0.0, 270.0 / 400.0)
        );
        let two = report.buckets(2, 1);
        assert_eq!(
            (two.saved_share(), two.padding_share()),
            (270.0 / 400.0, 0.0)
        );
    }
}
