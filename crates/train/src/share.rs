//! Which part of an effective batch a rank has.
//!
//! The micro batches of a step are dealt to the ranks in turn, so that a step has the same rows in
//! the same places however many ranks it is cut over: rows are numbered, and dropout masks drawn,
//! by their place in the effective batch. Where rows are sorted by their length, neighbours are
//! about as long, and ranks that run them at the same time do not wait for each other.

/// One rank's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub rank: usize,
    pub ranks: usize,
}

impl Share {
    /// Of a run of one rank.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// The place in the step of this rank's micro batch of that number.
    pub fn micro(self, number: usize) -> usize {
        number * self.ranks + self.rank
    }

    /// The place in the effective batch of this rank's sequence of that number, in micro batches
    /// of `size`.
    pub fn sequence(self, number: usize, size: usize) -> usize {
        let size = size.max(1);
        self.micro(number / size) * size + number % size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_have_every_sequence_once_and_micro_batches_whole() {
        for (ranks, size, accumulation) in [(1, 2, 3), (2, 1, 4), (3, 4, 2), (4, 3, 1)] {
            let mut seen = Vec::new();
            for rank in 0..ranks {
                let share = Share { rank, ranks };
                for number in 0..size * accumulation {
                    let place = share.sequence(number, size);
                    assert_eq!(place / size, share.micro(number / size));
                    seen.push(place);
                }
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..ranks * size * accumulation));
        }
    }

    #[test]
    fn one_rank_has_all_of_it_in_order() {
        assert!((0..12).all(|number| Share::WHOLE.sequence(number, 5) == number));
    }
}
