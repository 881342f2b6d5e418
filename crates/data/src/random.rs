//! Random numbers that are a pure function of a seed, on every machine and in every version.
//!
//! A dependency would do, but its stream may change between releases, and then a resumed run
//! would see other data than the run it continues.

/// A bijection on 64-bit integers whose output bits all depend on all input bits: an increment by
/// the golden ratio followed by two xor-shift-multiply rounds (the SplitMix64 finaliser).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// Streams of different `stream` numbers are independent for the same seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self {
            state: mix(mix(seed) ^ stream),
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.state)
    }

    /// Uniform in `0..bound` (0 when `bound` is 0), by the high half of a 128-bit product.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Uniform in `low..=high`.
    pub(crate) fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1).max(1) as usize) as i64
    }

    /// True `percent` times in a hundred.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of `options`, which must not be empty.
    pub(crate) fn pick<'a, T: ?Sized>(&mut self, options: &[&'a T]) -> &'a T {
        options[self.below(options.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_matches_the_published_first_outputs_of_splitmix64() {
        // SplitMix64 seeded with 0 returns these, whatever the implementation.
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mix(0x9E37_79B9_7F4A_7C15), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn below_reaches_every_value_about_equally_often() {
        let mut random = Random::new(7, 0);
        let mut counts = [0usize; 6];
        for _ in 0..60_000 {
            counts[random.below(6)] += 1;
        }
        assert!(
            counts.iter().all(|&c| (9_500..10_500).contains(&c)),
            "{counts:?}"
        );
    }
}
