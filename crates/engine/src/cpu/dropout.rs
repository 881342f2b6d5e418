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
    /// Elements whose number is below this are dropped; its lower half is zero.
    threshold: u32,
    rate: f64,
}

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
        let random = mix_upper(base.wrapping_add((column as u32).wrapping_mul(0x9e37_79b9)));
        if random < self.threshold {
            F::ZERO
        } else {
            F::from_f64(1.0 / (1.0 - self.rate))
        }
    }
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

    #[test]
    fn is_the_same_however_the_batch_is_cut() {
        let whole = mask(3, 0, 40);
        assert_eq!(whole[2000..], mask(3, 20, 20)[..]);
        assert_ne!(whole, mask(4, 0, 40));
    }
}
