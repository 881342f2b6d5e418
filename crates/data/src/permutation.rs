//! A shuffle that is computed and never stored.
//!
//! Shuffling a list of a billion windows would take 8 GB and would have to be rebuilt on resume.
//! A Feistel network is a bijection of `2^b` integers whatever its round function is, and needs
//! only its keys. For a size that is no power of two it is applied again while the result lies
//! outside (cycle walking): following the cycle of an element inside the range must come back
//! inside, and two elements cannot meet, so the result is a permutation of `0..len`.

use crate::random::mix;

/// With half-blocks of one bit few rounds reach few permutations; ten cost nothing next to
/// reading a window.
const NUM_ROUNDS: usize = 10;

/// A seeded permutation of `0..len`, evaluated at one point at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; NUM_ROUNDS],
}

impl Permutation {
    pub(crate) fn new(len: u64, seed: u64) -> Self {
        // Bits that write len - 1, rounded up to an even number: at most 4·len values are walked.
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        let mut keys = [0; NUM_ROUNDS];
        let mut state = mix(seed);
        for key in &mut keys {
            state = mix(state);
            *key = state;
        }
        Self {
            len,
            half_bits,
            keys,
        }
    }

    /// The image of `index`, which must be below the length.
    pub(crate) fn apply(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mut value = self.network(index);
        while value >= self.len {
            value = self.network(value);
        }
        value
    }

    /// (L, R) → (R, L ⊕ F(R)): invertible round by round, since R survives.
    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_permuted_without_gaps_or_repeats() {
        for len in (1..200).chain([255, 256, 257, 1000, 4097]) {
            for seed in 0..3 {
                let permutation = Permutation::new(len, seed);
                let mut seen: Vec<u64> = (0..len).map(|i| permutation.apply(i)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..len), "length {len}, seed {seed}");
            }
        }
    }

    #[test]
    fn each_element_lands_everywhere_about_equally_often() {
        // 5 of 16 values of the network are kept, so this also exercises cycle walking.
        let mut counts = [[0usize; 5]; 5];
        for seed in 0..20_000 {
            let permutation = Permutation::new(5, seed);
            for index in 0..5 {
                counts[index as usize][permutation.apply(index) as usize] += 1;
            }
        }
        for row in counts {
            assert!(row.iter().all(|&c| (3_700..4_300).contains(&c)), "{row:?}");
        }
    }

    #[test]
    fn neighbours_do_not_stay_neighbours() {
        let permutation = Permutation::new(10_000, 42);
        let adjacent = (1..10_000)
            .filter(|&i| permutation.apply(i).abs_diff(permutation.apply(i - 1)) == 1)
            .count();
        // A random permutation has 2 such pairs on average.
        assert!(adjacent < 15, "{adjacent}");
    }

    #[test]
    fn seeds_give_different_orders_and_large_ranges_work() {
        let len = (1 << 40) + 12_345;
        let (a, b) = (Permutation::new(len, 1), Permutation::new(len, 2));
        assert!((0..100).all(|i| a.apply(i) < len && a.apply(i) != b.apply(i)));
    }
}
