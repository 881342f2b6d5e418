//! Several samples in one row: first-fit decreasing.
//!
//! The longest samples are placed first, each into the first row that still has room. The rows
//! number at most 11/9 of the fewest possible, plus one; no sample is cut. Samples of the same
//! length are taken in an order that the seed decides.

use crate::permutation::Permutation;

/// Rows as lists of places in `lengths`, in the order in which they were begun. No length may be
/// above `capacity`.
pub(super) fn first_fit_decreasing(
    lengths: &[usize],
    capacity: usize,
    seed: u64,
) -> Vec<Vec<usize>> {
    let shuffle = Permutation::new(lengths.len() as u64, seed);
    let mut order: Vec<usize> = (0..lengths.len())
        .map(|place| shuffle.apply(place as u64) as usize)
        .collect();
    order.sort_by_key(|place| std::cmp::Reverse(lengths[*place]));
    let mut rooms = Rooms::new(lengths.len(), capacity);
    let mut rows: Vec<Vec<usize>> = Vec::new();
    for place in order {
        let row = rooms.first_with(lengths[place]);
        rooms.take(row, lengths[place]);
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(place);
    }
    rows
}

/// The room left in each row, as a tree of maxima: the first row with enough is found on the way
/// down, in the logarithm of their number.
struct Rooms {
    /// Node `k` has the children `2k` and `2k + 1`; the rows are the last `leaves` nodes.
    tree: Vec<usize>,
    leaves: usize,
}

impl Rooms {
    fn new(num_rows: usize, capacity: usize) -> Self {
        let leaves = num_rows.next_power_of_two();
        Self {
            tree: vec![capacity; 2 * leaves],
            leaves,
        }
    }

    /// The first row with room for `length`. There are as many rows as samples, so one is empty.
    fn first_with(&self, length: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.tree[node] < length {
                node += 1;
            }
        }
        node - self.leaves
    }

    fn take(&mut self, row: usize, length: usize) {
        let mut node = self.leaves + row;
        self.tree[node] = self.tree[node].saturating_sub(length);
        while node > 1 {
            node /= 2;
            self.tree[node] = self.tree[2 * node].max(self.tree[2 * node + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_sample_is_placed_once_and_first_fit_holds() {
        let mut random = Random::new(5, 0);
        for num in [1, 2, 3, 7, 64, 500] {
            let lengths: Vec<usize> = (0..num).map(|_| 1 + random.below(100)).collect();
            let rows = first_fit_decreasing(&lengths, 100, 9);
            let mut seen: Vec<usize> = rows.iter().flatten().copied().collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..num));
            let used = |row: &Vec<usize>| row.iter().map(|place| lengths[*place]).sum::<usize>();
            assert!(rows.iter().all(|row| used(row) <= 100));
            // What begins a row fitted into none of those before it.
            for (index, row) in rows.iter().enumerate() {
                let first = lengths[row[0]];
                for before in &rows[..index] {
                    let longer = before.iter().filter(|place| lengths[**place] >= first);
                    let then: usize = longer.map(|place| lengths[*place]).sum();
                    assert!(then + first > 100);
                }
            }
            let fewest = lengths.iter().sum::<usize>().div_ceil(100);
            assert!(rows.len() >= fewest);
        }
    }

    #[test]
    fn the_seed_decides_which_of_equals_share_a_row() {
        let lengths = vec![50; 20];
        let one = first_fit_decreasing(&lengths, 100, 1);
        assert_eq!(one.len(), 10);
        assert_eq!(one, first_fit_decreasing(&lengths, 100, 1));
        assert_ne!(one, first_fit_decreasing(&lengths, 100, 2));
    }
}
