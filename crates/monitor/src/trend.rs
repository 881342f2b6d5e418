//! What a trend means on a card: MiB a minute, how long until it is full, and whether it is worth a
//! word. Whether memory rises at all is decided by `cinch_diagnose::trend`, for logs and for
//! samples alike.

use cinch_diagnose::trend::{FEWEST_SAMPLES, Series};

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

/// Points from which a rise can be told.
pub const FEWEST: usize = FEWEST_SAMPLES as usize;
/// Points from which a series that stays as it is can be called steady.
const FEWEST_STEADY: usize = 12;
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
    if points.len() < FEWEST_STEADY {
        return None;
    }
    let (first, last) = (points.first()?, points.last()?);
    let seconds = last.0 - first.0;
    if seconds <= 0.0 {
        return None;
    }
    let values = points.iter().map(|point| point.1);
    let least = values.clone().min().unwrap_or(0);
    // Most series are flat, and that is seen without looking further.
    if ((values.max().unwrap_or(0) - least) as f64) < LEAST_GROWTH {
        let growth_bytes = last.1 as f64 - first.1 as f64;
        return Some(Trend {
            bytes_per_second: growth_bytes / seconds,
            is_creep: false,
            growth_bytes,
            seconds,
        });
    }
    let mut series = Series::new();
    for (second, bytes) in points {
        series.push(*second, *bytes as f64);
    }
    let found = series.trend()?;
    let growth_bytes = found.slope * seconds;
    Some(Trend {
        bytes_per_second: found.slope,
        is_creep: found.is_rising && growth_bytes >= LEAST_GROWTH,
        growth_bytes,
        seconds,
    })
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
        assert_eq!(trend(&[(0.0, 1); FEWEST_STEADY - 1]), None);
        let rising = series(FEWEST as u64 - 1, |second| (100 * second * MIB) as f64);
        assert_eq!(trend(&rising), None);
        assert_eq!(trend(&[(5.0, 1); 50]), None);
    }
}
