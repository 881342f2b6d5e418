//! Whether a series of bytes rises, and how fast.
//!
//! The slope is the median of the slopes between all pairs of points (Theil and Sen): a spike or
//! an evaluation every few minutes does not move it. Whether it is a rise at all is decided by
//! Mann and Kendall's count of pairs that rise and pairs that fall, and by its later half, so that
//! a run that fills its allocator's cache once and then stays is no creep.

/// What a series does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    pub bytes_per_second: f64,
    /// Rises, and goes on rising: noise and a first fill-up do not.
    pub is_creep: bool,
    /// What the series grew by, over `seconds`.
    pub growth_bytes: f64,
    pub seconds: f64,
}

/// Points from which a trend can be told.
pub const FEWEST: usize = 12;
/// Points that are compared pair by pair.
const MOST: usize = 64;
/// Standard deviations of the count of rising pairs beyond which chance is no explanation: one
/// clean series in some 3,000 is above three; both halves have to be.
const SIGNIFICANT: f64 = 3.0;
/// Growth that is worth a word.
const LEAST_GROWTH: f64 = (32_u64 << 20) as f64;

impl Trend {
    pub fn mebibytes_per_minute(&self) -> f64 {
        self.bytes_per_second * 60.0 / f64::from(1 << 20)
    }

    /// Seconds until so many bytes more are taken; `None` where nothing creeps.
    pub fn seconds_until(&self, free_bytes: u64) -> Option<f64> {
        let rises = self.is_creep && self.bytes_per_second > 0.0;
        rises.then(|| free_bytes as f64 / self.bytes_per_second)
    }
}

/// The trend of points in the order of time; `None` where there are too few.
pub fn trend(points: &[(f64, u64)]) -> Option<Trend> {
    if points.len() < FEWEST {
        return None;
    }
    let points = thinned(points);
    let (first, last) = (points.first()?, points.last()?);
    let seconds = last.0 - first.0;
    if seconds <= 0.0 {
        return None;
    }
    let values = points.iter().map(|point| point.1);
    let least = values.clone().min().unwrap_or(0);
    // Most series are flat, and that is seen without comparing all pairs.
    if ((values.max().unwrap_or(0) - least) as f64) < LEAST_GROWTH {
        return Some(Trend {
            bytes_per_second: (last.1 as f64 - first.1 as f64) / seconds,
            is_creep: false,
            growth_bytes: last.1 as f64 - first.1 as f64,
            seconds,
        });
    }
    let bytes_per_second = median_slope(&points)?;
    let growth_bytes = bytes_per_second * seconds;
    let later = &points[points.len() / 2..];
    let is_creep = growth_bytes >= LEAST_GROWTH
        && rising(&points) > SIGNIFICANT
        && rising(later) > SIGNIFICANT / 2.0
        && every_quarter_rises(&points, growth_bytes);
    Some(Trend {
        bytes_per_second,
        is_creep,
        growth_bytes,
        seconds,
    })
}

/// Whether each quarter after the first lies above the one before, by a good part of what an even
/// rise would give. Evaluations at the end and caches filled at the beginning lift one quarter.
fn every_quarter_rises(points: &[(f64, u64)], growth_bytes: f64) -> bool {
    const PART: f64 = 0.5;
    let middle = |points: &[(f64, u64)]| {
        let mut values: Vec<u64> = points.iter().map(|point| point.1).collect();
        let middle = values.len() / 2;
        *values.select_nth_unstable(middle).1 as f64
    };
    let quarters: Vec<f64> = points
        .chunks(points.len().div_ceil(4))
        .map(middle)
        .collect();
    let [_, second, third, fourth] = quarters[..] else {
        return false;
    };
    let least = PART * growth_bytes / 4.0;
    // The later half by itself has to be worth a third of a word.
    third - second >= least && fourth - third >= least && fourth - second >= LEAST_GROWTH / 3.0
}

/// At most [`MOST`] points, evenly chosen, with both ends.
fn thinned(points: &[(f64, u64)]) -> Vec<(f64, u64)> {
    if points.len() <= MOST {
        return points.to_vec();
    }
    let last = points.len() - 1;
    let place = |index: usize| points[index * last / (MOST - 1)];
    (0..MOST).map(place).collect()
}

fn pairs(points: &[(f64, u64)]) -> impl Iterator<Item = ((f64, u64), (f64, u64))> + '_ {
    let pairs = points.iter().enumerate();
    pairs.flat_map(|(index, early)| points[index + 1..].iter().map(|late| (*early, *late)))
}

fn median_slope(points: &[(f64, u64)]) -> Option<f64> {
    let slopes = pairs(points).filter(|(early, late)| late.0 > early.0);
    let slope = |(early, late): ((f64, u64), (f64, u64))| {
        (late.1 as f64 - early.1 as f64) / (late.0 - early.0)
    };
    let mut slopes: Vec<f64> = slopes.map(slope).collect();
    let middle = slopes.len().checked_sub(1)? / 2;
    let (_, median, _) = slopes.select_nth_unstable_by(middle, f64::total_cmp);
    Some(*median)
}

/// Mann and Kendall's statistic in standard deviations. Ties count for nothing, and the deviation
/// is that without ties, which is the larger one.
fn rising(points: &[(f64, u64)]) -> f64 {
    let count = points.len() as f64;
    let score: f64 = pairs(points)
        .map(|(early, late)| match late.1.cmp(&early.1) {
            std::cmp::Ordering::Greater => 1.0,
            std::cmp::Ordering::Less => -1.0,
            std::cmp::Ordering::Equal => 0.0,
        })
        .sum();
    let deviation = (count * (count - 1.0) * (2.0 * count + 5.0) / 18.0).sqrt();
    if deviation > 0.0 {
        score / deviation
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Numbers that look like noise and are always the same.
    fn noise(seed: u64, second: u64) -> f64 {
        let mut bits =
            seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ second.wrapping_mul(0xD134_2543_DE82_EF95);
        bits ^= bits >> 31;
        bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits ^= bits >> 29;
        (bits % 2001) as f64 / 1000.0 - 1.0
    }

    fn series(seconds: u64, bytes: impl Fn(u64) -> f64) -> Vec<(f64, u64)> {
        (0..seconds)
            .map(|second| (second as f64, bytes(second).max(0.0) as u64))
            .collect()
    }

    #[test]
    fn a_leak_is_found_with_its_rate() {
        for rate in [0.5, 2.0, 20.0] {
            let points = series(300, |second| {
                (8192.0 + rate * second as f64 + 20.0 * noise(7, second)) * MIB as f64
            });
            let trend = trend(&points).unwrap();
            assert!(trend.is_creep, "{rate}");
            let found = trend.mebibytes_per_minute() / 60.0;
            assert!((found - rate).abs() < 0.1 * rate + 0.1, "{rate}: {found}");
            let left = trend.seconds_until(600 * MIB).unwrap();
            assert!((left - 600.0 / rate).abs() < 0.3 * 600.0 / rate, "{left}");
        }
    }

    #[test]
    fn clean_series_are_not_called_leaks() {
        for seed in 0..1000 {
            let plateau = series(200, |second| {
                (8192.0 + 40.0 * noise(seed, second)) * MIB as f64
            });
            // An evaluation every forty seconds, and a cache that is filled in the first thirty.
            let saw = series(200, |second| {
                let evaluation = if second % 40 > 34 { 900.0 } else { 0.0 };
                let warm = 4000.0 * (second.min(30) as f64 / 30.0);
                (4096.0 + warm + evaluation + 10.0 * noise(seed, second)) * MIB as f64
            });
            for points in [plateau, saw] {
                assert!(!trend(&points).unwrap().is_creep, "seed {seed}");
            }
        }
    }

    #[test]
    fn a_staircase_of_segments_is_a_creep() {
        // PyTorch takes whole segments: the use rises by 20 MiB every ten seconds.
        let points = series(300, |second| {
            (1000 + 20 * (second / 10)) as f64 * MIB as f64
        });
        assert!(trend(&points).unwrap().is_creep);
    }

    #[test]
    fn too_little_says_nothing() {
        assert_eq!(trend(&[]), None);
        assert_eq!(trend(&[(0.0, 1); 11]), None);
        assert_eq!(trend(&[(5.0, 1); 50]), None);
    }
}
