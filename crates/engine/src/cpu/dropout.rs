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
    /// Elements whose number is below this are dropped: of 32 bits for numbers that are not shared,
    /// and of 14.
    whole: u32,
    threshold: u32,
    rate: f64,
    numbers: Numbers,
}

/// Which elements have a random number to themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    /// Columns 2c and 2c + 1 share one.
    Neighbours,
    /// Columns s and s + 8 of sixteen do.
    EightApart,
    /// None share one, of which the upper half decides.
    Single,
}

/// Of a number that two elements share, each has so many bits.
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
        let most = (1 << PAIRED_BITS) - 1;
        let whole = cinch_graph::Dropout::threshold(rate);
        let threshold = (((whole >> (31 - PAIRED_BITS)) + 1) >> 1).min(most);
        Self {
            key: mix(state.key[0] ^ mix(stream ^ state.key[1])),
            row_offset: state.row_offset,
            whole,
            threshold,
            rate: f64::from(threshold) / f64::from(most + 1),
            numbers: Numbers::Neighbours,
        }
    }

    /// The mask of attention's probabilities: keys s and s + 8 of sixteen share a number.
    #[must_use]
    pub fn of_scores(self) -> Self {
        Self {
            numbers: Numbers::EightApart,
            ..self
        }
    }

    /// The mask of narrow heads' probabilities, with a number for each.
    #[must_use]
    pub fn single(self) -> Self {
        Self {
            rate: f64::from(self.whole) / 4_294_967_296.0,
            numbers: Numbers::Single,
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
        let column = column as u32;
        // Two ways, so that a loop over columns is taken apart into two without a branch.
        let (random, threshold) = if self.numbers == Numbers::Single {
            (number_of(base, column), self.whole)
        } else {
            let apart = match self.numbers {
                Numbers::Neighbours => 0,
                _ => 3,
            };
            (half_of_word(base, column, apart), self.threshold)
        };
        if random < threshold {
            F::ZERO
        } else {
            self.kept()
        }
    }

    /// The factors of one column, for rows of these bases: what [`Self::factor`] says.
    #[inline(always)]
    pub fn factors_of<F: Real, const ROWS: usize>(
        &self,
        bases: &[u32; ROWS],
        column: usize,
        factors: &mut [F; ROWS],
    ) {
        if self.numbers == Numbers::Single {
            let kept = self.kept();
            for l in 0..ROWS {
                let random = number_of(bases[l], column as u32);
                factors[l] = if random < self.whole { F::ZERO } else { kept };
            }
        } else {
            for l in 0..ROWS {
                factors[l] = self.factor(bases[l], column);
            }
        }
    }

    #[inline(always)]
    fn kept<F: Real>(&self) -> F {
        F::from_f64(1.0 / (1.0 - self.rate))
    }

    /// Multiplies each of a row's elements by its factor, columns counting from `column`: what
    /// [`Self::factor`] says, some four times as fast.
    #[inline(always)]
    pub fn multiply<F: Real>(&self, base: u32, column: usize, line: &mut [F]) {
        let before = column.next_multiple_of(RUN) - column;
        let (before, line) = line.split_at_mut(before.min(line.len()));
        for (j, x) in before.iter_mut().enumerate() {
            *x *= self.factor(base, column + j);
        }
        let run = column.div_ceil(RUN);
        let kept = self.kept();
        // Each a loop of its own, in which what it does is known.
        match self.numbers {
            Numbers::Neighbours => runs(run, line, |column| {
                let random = half_of_word(base, column, 0);
                if random < self.threshold {
                    F::ZERO
                } else {
                    kept
                }
            }),
            Numbers::EightApart => runs(run, line, |column| {
                let random = half_of_word(base, column, 3);
                if random < self.threshold {
                    F::ZERO
                } else {
                    kept
                }
            }),
            Numbers::Single => runs(run, line, |column| {
                let random = number_of(base, column);
                if random < self.whole { F::ZERO } else { kept }
            }),
        }
    }
}

/// Elements that [`Dropout::multiply`] takes at once: a vector, and all columns whose words are in
/// the same places.
const RUN: usize = 16;

/// Multiplies elements by factors of their columns, which count from that of run `first`.
#[inline(always)]
fn runs<F: Real>(first: usize, line: &mut [F], factor: impl Fn(u32) -> F) {
    let (whole, rest) = line.as_chunks_mut::<RUN>();
    let place = |run: usize| ((first + run) * RUN) as u32;
    let last = place(whole.len());
    for (run, line) in whole.iter_mut().enumerate() {
        let column = place(run);
        for (j, x) in line.iter_mut().enumerate() {
            *x *= factor(column | j as u32);
        }
    }
    for (j, x) in rest.iter_mut().enumerate() {
        *x *= factor(last | j as u32);
    }
}

/// The number of an element that has one to itself.
#[inline(always)]
fn number_of(base: u32, column: u32) -> u32 {
    mix_upper(base.wrapping_add(column.wrapping_mul(0x9e37_79b9)))
}

/// The bits of an element in its half of a word. Columns `2^apart` apart share a word: those of a
/// run of twice as many have as many words. The row's own number is mixed already, so that less
/// mixing is needed.
#[inline(always)]
fn half_of_word(base: u32, column: u32, apart: u32) -> u32 {
    let word = (column >> (apart + 1) << apart) | (column & ((1 << apart) - 1));
    let half = column >> apart & 1;
    let mut x = base.wrapping_add(word.wrapping_mul(0x9e37_79b9));
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    (x >> (half << 4)) & ((1 << PAIRED_BITS) - 1)
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

    const STATE: RandomState = RandomState {
        key: [1, 2],
        row_offset: 0,
    };

    /// Whether each is kept of 400 rows of 512.
    fn kept(dropout: Dropout) -> Vec<Vec<bool>> {
        let kept = |row: usize| {
            let base = dropout.row(row);
            let kept = (0..512).map(|column| dropout.factor::<f64>(base, column) > 0.0);
            kept.collect()
        };
        (0..400).map(kept).collect()
    }

    #[test]
    fn elements_that_share_a_number_do_not_share_their_fate() {
        let dropout = Dropout::new(STATE, 5, 0.1);
        for dropout in [dropout, dropout.of_scores(), dropout.single()] {
            let kept = kept(dropout);
            let share = |pick: &dyn Fn(usize, usize) -> bool| {
                let places = (0..392).flat_map(|row| (0..488).map(move |column| (row, column)));
                let (mut all, mut chosen) = (0.0, 0.0);
                for (row, column) in places {
                    all += 1.0;
                    chosen += f64::from(u8::from(pick(row, column)));
                }
                chosen / all
            };
            // Five times the deviation that chance has.
            let apart = |share: f64, expected: f64| {
                let deviation = (expected * (1.0 - expected) / (392.0 * 488.0)).sqrt();
                (share - expected).abs() < 5.0 * deviation
            };
            assert!(apart(share(&|row, column| kept[row][column]), 0.9));
            let steps = [
                (0, 1),
                (0, 2),
                (0, 8),
                (0, 16),
                (1, 0),
                (1, 1),
                (8, 8),
                (0, 24),
            ];
            for (rows, columns) in steps {
                let both =
                    share(&|row, column| kept[row][column] && kept[row + rows][column + columns]);
                assert!(apart(both, 0.81), "{dropout:?} {rows} {columns}: {both}");
            }
        }
    }

    #[test]
    fn a_row_is_multiplied_by_the_factors_of_its_columns() {
        let dropout = Dropout::new(STATE, 5, 0.3);
        for dropout in [dropout, dropout.of_scores(), dropout.single()] {
            for (column, len) in [(0, 64), (0, 5), (3, 4), (3, 90), (16, 33), (40, 8), (47, 0)] {
                let base = dropout.row(11);
                let mut line: Vec<f64> = (1..=len).map(f64::from).collect();
                dropout.multiply(base, column, &mut line);
                for (j, &x) in line.iter().enumerate() {
                    let factor = dropout.factor::<f64>(base, column + j);
                    assert_eq!(x, (j + 1) as f64 * factor, "{dropout:?} {column} {j}");
                }
            }
        }
    }

    #[test]
    fn the_mean_is_kept_whatever_the_rate() {
        for rate in [0.0, 1e-6, 0.1, 0.3, 0.999, 0.999_999] {
            let dropout = Dropout::new(STATE, 5, rate);
            for dropout in [dropout, dropout.of_scores(), dropout.single()] {
                let factor = 1.0 / (1.0 - dropout.rate);
                assert!(factor.is_finite());
                assert!((dropout.rate - rate).abs() <= 1.0 / f64::from(1 << PAIRED_BITS));
            }
        }
    }

    #[test]
    fn is_the_same_however_the_batch_is_cut() {
        let whole = mask(3, 0, 40);
        assert_eq!(whole[2000..], mask(3, 20, 20)[..]);
        assert_ne!(whole, mask(4, 0, 40));
    }
}
