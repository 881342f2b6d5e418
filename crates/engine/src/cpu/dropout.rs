//! Dropout masks from a counter: whether an element is kept is a function of the run's key,
//! the op's stream and the element's place in the effective batch. Nothing is stored, a
//! recomputed block sees the same mask, and cutting the batch into micro batches does not
//! change it.

use super::real::Real;

/// One op's mask in one micro batch.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    key: u32,
    /// The number of rows of the effective batch that come before this micro batch.
    pub row_offset: u32,
    /// Elements whose number is below this are dropped; its lower half is zero, unless numbers are
    /// paired.
    threshold: u32,
    rate: f64,
    /// Whether two probabilities of attention share a number.
    paired: bool,
}

/// Of a number that two probabilities share, each has so many bits.
const PAIRED_BITS: u32 = 14;

/// The op's key within a step, and where the micro batch starts: the contents of the graph's
/// random-state input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    pub key: [u32; 2],
    pub row_offset: u32,
}

impl Dropout {
    /// `stream` tells the ops of one step apart; `rate` is in [0, 1).
    pub fn new(state: RandomState, stream: u32, rate: f64) -> Self {
        let threshold = cinch_graph::Dropout::threshold(rate);
        Self {
            key: mix(state.key[0] ^ mix(stream ^ state.key[1])),
            row_offset: state.row_offset,
            threshold,
            rate: f64::from(threshold) / 4_294_967_296.0,
            paired: false,
        }
    }

    /// The mask of attention's probabilities. There are so many of them that keys s and s + 8 of
    /// sixteen share a number.
    #[must_use]
    pub fn paired(self) -> Self {
        let most = (1 << PAIRED_BITS) - 1;
        let threshold = (((self.threshold >> (31 - PAIRED_BITS)) + 1) >> 1).min(most);
        Self {
            threshold,
            rate: f64::from(threshold) / f64::from(most + 1),
            paired: true,
            ..self
        }
    }

    /// The same mask for an op with `rows` rows of its own per row of the batch, such as one
    /// per attention head.
    #[must_use]
    pub fn scaled(self, rows: usize) -> Self {
        Self {
            row_offset: self.row_offset.wrapping_mul(rows as u32),
            ..self
        }
    }

    /// The row's part of the counter; `row` counts within the micro batch.
    #[inline(always)]
    pub fn row(&self, row: usize) -> u32 {
        mix((row as u32).wrapping_add(self.row_offset) ^ self.key)
    }

    /// 0 for a dropped element, `1/(1 − rate)` for a kept one; `base` is from [`Self::row`].
    #[inline(always)]
    pub fn factor<F: Real>(&self, base: u32, column: usize) -> F {
        let random = match self.paired {
            true => half_of_word(base, column as u32),
            false => mix_upper(base.wrapping_add((column as u32).wrapping_mul(0x9e37_79b9))),
        };
        if random < self.threshold {
            F::ZERO
        } else {
            F::from_f64(1.0 / (1.0 - self.rate))
        }
    }
}

/// The bits of a probability: of a word that the key eight further on shares. The row's own number
/// is mixed already, so that less mixing is needed.
#[inline(always)]
fn half_of_word(base: u32, key: u32) -> u32 {
    let word = key >> 4 << 3 | key & 7;
    let mut x = base.wrapping_add(word.wrapping_mul(0x9e37_79b9));
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    (x >> ((key & 8) << 1)) & ((1 << PAIRED_BITS) - 1)
}

/// A bijection of 32-bit words in which each input bit flips each output bit with a
/// probability close to one half (two multiply-xorshift rounds).
#[inline(always)]
fn mix(x: u32) -> u32 {
    let x = mix_upper(x);
    x ^ (x >> 16)
}

/// The upper half of [`mix`]; the lower is less well mixed.
#[inline(always)]
fn mix_upper(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x.wrapping_mul(0x846c_a68b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(stream: u32, row_offset: u32, rows: usize) -> Vec<f64> {
        let state = RandomState {
            key: [1, 2],
            row_offset,
        };
        let dropout = Dropout::new(state, stream, 0.25);
        (0..rows)
            .flat_map(|row| {
                let base = dropout.row(row);
                (0..100).map(move |column| dropout.factor::<f64>(base, column))
            })
            .collect()
    }

    #[test]
    fn keeps_the_right_share_and_the_mean() {
        let mask = mask(0, 0, 2000);
        let mean = mask.iter().sum::<f64>() / mask.len() as f64;
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
    }

    /// Of attention's probabilities, whether each is kept: 400 rows of 512 keys.
    fn kept_scores(rate: f64) -> Vec<Vec<bool>> {
        let state = RandomState {
            key: [1, 2],
            row_offset: 0,
        };
        let dropout = Dropout::new(state, 5, rate).paired();
        let kept = |row: usize| {
            let base = dropout.row(row);
            let kept = (0..512).map(|key| dropout.factor::<f64>(base, key) > 0.0);
            kept.collect()
        };
        (0..400).map(kept).collect()
    }

    #[test]
    fn scores_that_share_a_number_do_not_share_their_fate() {
        let kept = kept_scores(0.1);
        let share = |pick: &dyn Fn(usize, usize) -> bool| {
            let places = (0..392).flat_map(|row| (0..488).map(move |key| (row, key)));
            let (mut all, mut chosen) = (0.0, 0.0);
            for (row, key) in places {
                all += 1.0;
                chosen += f64::from(u8::from(pick(row, key)));
            }
            chosen / all
        };
        // Five times the deviation that chance has.
        let apart = |share: f64, expected: f64| {
            let deviation = (expected * (1.0 - expected) / (392.0 * 488.0)).sqrt();
            (share - expected).abs() < 5.0 * deviation
        };
        assert!(apart(share(&|row, key| kept[row][key]), 0.9));
        for (rows, keys) in [(0, 1), (0, 8), (0, 16), (1, 0), (1, 1), (8, 8), (0, 24)] {
            let both = share(&|row, key| kept[row][key] && kept[row + rows][key + keys]);
            assert!(apart(both, 0.81), "{rows} {keys}: {both}");
        }
    }

    #[test]
    fn the_mean_of_scores_is_kept_whatever_the_rate() {
        for rate in [0.0, 1e-6, 0.1, 0.3, 0.999, 0.999_999] {
            let state = RandomState {
                key: [1, 2],
                row_offset: 0,
            };
            let dropout = Dropout::new(state, 5, rate).paired();
            let factor = 1.0 / (1.0 - dropout.rate);
            assert!(factor.is_finite());
            assert!((dropout.rate - rate).abs() <= 1.0 / f64::from(1 << PAIRED_BITS));
        }
    }

    #[test]
    fn is_the_same_however_the_batch_is_cut() {
        let whole = mask(3, 0, 40);
        assert_eq!(whole[2000..], mask(3, 20, 20)[..]);
        assert_ne!(whole, mask(4, 0, 40));
    }
}
