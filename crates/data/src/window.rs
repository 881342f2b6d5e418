//! Cutting a corpus into training samples, and saying which sample comes when.
//!
//! The position of a run in its data is one integer, the number of samples drawn so far. Epoch
//! and place follow from it, and the order of an epoch is a computed permutation, so a resumed
//! run continues with exactly the sample it would have seen next.

use cinch_graph::op::IGNORE_INDEX;

use crate::cache::TokenStore;
use crate::error::DataError;
use crate::permutation::Permutation;
use crate::random::mix;

/// A corpus as windows of `seq_len` inputs that do not overlap. Window `i` holds the inputs
/// `i·T .. i·T + T` and the targets one further on; what is left at the end and fills no window
/// is not used, unless the whole corpus is shorter than one.
#[derive(Debug, Clone)]
pub struct Windows {
    tokens: TokenStore,
    seq_len: usize,
    padding: i32,
    len: u64,
}

impl Windows {
    pub(crate) fn new(tokens: TokenStore, seq_len: usize, padding: i32) -> Result<Self, DataError> {
        if seq_len == 0 {
            return Err(DataError::ZeroSequenceLength);
        }
        let len = (tokens.len().saturating_sub(1) / seq_len as u64).max(1);
        Ok(Self {
            tokens,
            seq_len,
            padding,
            len,
        })
    }

    /// How many windows there are; never 0.
    #[expect(clippy::len_without_is_empty, reason = "there is always one window")]
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// (training, validation): windows drawn at random by `seed` go to validation. With a
    /// fraction above 0 and two windows or more, neither part is empty.
    pub fn split(&self, val_fraction: f64, seed: u64) -> (Split, Split) {
        let wanted = if val_fraction > 0.0 && self.len >= 2 {
            let rounded = (self.len as f64 * val_fraction).round() as u64;
            rounded.clamp(1, self.len - 1)
        } else {
            0
        };
        let order = Permutation::new(self.len, seed);
        let part = |start: u64, len: u64| Split {
            windows: self.clone(),
            order,
            start,
            len,
        };
        (part(wanted, self.len - wanted), part(0, wanted))
    }

    /// Writes window `index`: tokens [T], targets [T]. A position that has no next token gets the
    /// target that the loss leaves out.
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        assert_eq!(tokens.len(), self.seq_len, "one window of tokens");
        assert_eq!(targets.len(), self.seq_len, "one window of targets");
        let mut ids = Vec::with_capacity(self.seq_len + 1);
        self.tokens
            .read(index * self.seq_len as u64, self.seq_len + 1, &mut ids)?;
        for (position, (token, target)) in tokens.iter_mut().zip(targets).enumerate() {
            *token = ids.get(position).copied().unwrap_or(self.padding);
            *target = ids.get(position + 1).copied().unwrap_or(IGNORE_INDEX);
        }
        Ok(())
    }
}

/// The windows of one purpose, training or validation.
#[derive(Debug, Clone)]
pub struct Split {
    windows: Windows,
    /// The order of all windows that decides which part each belongs to.
    order: Permutation,
    start: u64,
    len: u64,
}

impl Split {
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn seq_len(&self) -> usize {
        self.windows.seq_len
    }

    /// Writes the sample that is drawn `sample`-th, counting from 0 over all epochs. Each epoch
    /// visits every window once, in an order of its own that depends on `seed`.
    pub fn fill(
        &self,
        sample: u64,
        seed: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), DataError> {
        let index = match self.len {
            0 => 0,
            len => {
                let (epoch, place) = (sample / len, sample % len);
                Permutation::new(len, mix(seed) ^ epoch).apply(place)
            }
        };
        self.fill_in_order(index, tokens, targets)
    }

    /// Writes window `index` of the part, in an order that never changes. Beyond the end, as in
    /// an empty part, it is a window of padding that counts for no loss.
    pub fn fill_in_order(
        &self,
        index: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), DataError> {
        if index >= self.len {
            tokens.fill(self.windows.padding);
            targets.fill(IGNORE_INDEX);
            return Ok(());
        }
        let window = self.order.apply(self.start + index);
        self.windows.fill(window, tokens, targets)
    }
}
