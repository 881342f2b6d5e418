//! The free blocks of one pool and stream, ordered by size and then by address: best fit is the
//! first one that is large enough.
//!
//! A sorted sequence cut into short runs. Most runs of a program keep a few hundred free blocks,
//! so an insertion moves a few cache lines and no node is ever allocated; with hundreds of
//! thousands it still costs a search over runs and one short move.

use super::size::MIN_BLOCK;

/// Length at which a run is cut in two.
const LONGEST_RUN: usize = 16;

/// Slots for the runs where sizes were last found.
const SLOTS: usize = 32;

/// A free block in the order of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeBlock {
    pub size: u64,
    pub address: u64,
    pub block: u32,
}

/// Size and then address, as one number: a comparison without a branch.
type Key = u128;

impl FreeBlock {
    #[inline]
    fn key(&self) -> Key {
        Key::from(self.size) << u64::BITS | Key::from(self.address)
    }
}

/// Where a block stands, valid until the next change.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    run: usize,
    index: usize,
}

#[derive(Default)]
pub(super) struct FreeSet {
    /// Each run is sorted and not empty, and runs follow each other.
    runs: Vec<Vec<FreeBlock>>,
    /// The last key of each run, side by side, so that the search for a run reads no other.
    lasts: Vec<Key>,
    /// Where a size was last found, by its slot: programs ask for few sizes, again and again.
    found: [u32; SLOTS],
    /// Runs that became empty, for the next that are needed: a program that frees what it takes asks for no memory here.
    spare: Vec<Vec<FreeBlock>>,
}

impl FreeSet {
    /// The first place at or after `key`; the end of the set is the start of a run that does not exist.
    #[inline]
    fn seek(&mut self, key: Key) -> Cursor {
        let run = self.run_of(key);
        let index = self
            .runs
            .get(run)
            .map_or(0, |run| run.partition_point(|entry| entry.key() < key));
        Cursor { run, index }
    }

    /// The first run that ends at or after `key`.
    #[inline]
    fn run_of(&mut self, key: Key) -> usize {
        let size = (key >> u64::BITS) as u64;
        let slot = (size / MIN_BLOCK) as usize % SLOTS;
        let run = self.found[slot] as usize;
        let ends_after = self.lasts.get(run).is_some_and(|last| key <= *last);
        if ends_after && (run == 0 || self.lasts[run - 1] < key) {
            return run;
        }
        let run = self.lasts.partition_point(|last| *last < key);
        self.found[slot] = run as u32;
        run
    }

    /// The smallest block of at least `size` bytes, the lowest address first.
    pub fn best_fit(&mut self, size: u64) -> Option<(Cursor, FreeBlock)> {
        let cursor = self.seek(Key::from(size) << u64::BITS);
        Some((cursor, self.get(cursor)?))
    }

    pub fn get(&self, cursor: Cursor) -> Option<FreeBlock> {
        self.runs.get(cursor.run)?.get(cursor.index).copied()
    }

    pub fn next(&self, cursor: Cursor) -> Cursor {
        let Cursor { run, index } = cursor;
        // The end of a run is the start of the next one.
        if index + 1 < self.runs[run].len() {
            Cursor {
                run,
                index: index + 1,
            }
        } else {
            Cursor {
                run: run + 1,
                index: 0,
            }
        }
    }

    pub fn insert(&mut self, entry: FreeBlock) {
        let key = entry.key();
        let mut cursor = self.seek(key);
        if cursor.run == self.runs.len() {
            // Behind all others: at the end of the last run.
            let Some(last) = self.runs.last() else {
                let mut run = self.new_run();
                run.push(entry);
                self.runs.push(run);
                self.lasts.push(key);
                return;
            };
            cursor = Cursor {
                run: cursor.run - 1,
                index: last.len(),
            };
            self.lasts[cursor.run] = key;
        }
        let run = &mut self.runs[cursor.run];
        run.insert(cursor.index, entry);
        if run.len() == LONGEST_RUN {
            let mut tail = self.new_run();
            let run = &mut self.runs[cursor.run];
            tail.extend(run.drain(LONGEST_RUN / 2..));
            let end = run[LONGEST_RUN / 2 - 1].key();
            self.runs.insert(cursor.run + 1, tail);
            self.lasts.insert(cursor.run, end);
        }
    }

    fn new_run(&mut self) -> Vec<FreeBlock> {
        let spare = self.spare.pop();
        spare.unwrap_or_else(|| Vec::with_capacity(LONGEST_RUN))
    }

    pub fn remove(&mut self, entry: FreeBlock) {
        let cursor = self.seek(entry.key());
        assert_eq!(self.get(cursor), Some(entry), "a free block is in its set");
        self.remove_at(cursor);
    }

    pub fn remove_at(&mut self, cursor: Cursor) {
        let run = &mut self.runs[cursor.run];
        run.remove(cursor.index);
        match run.last() {
            Some(last) => self.lasts[cursor.run] = last.key(),
            None => {
                self.spare.push(self.runs.remove(cursor.run));
                self.lasts.remove(cursor.run);
            }
        }
    }

    /// Puts a block in the place of another of which it is a part, or which is a part of it: mostly it stays where that was.
    pub fn replace(&mut self, old: FreeBlock, new: FreeBlock) {
        let cursor = self.seek(old.key());
        assert_eq!(self.get(cursor), Some(old), "a free block is in its set");
        self.replace_at(cursor, new);
    }

    /// The same, of the block at a cursor.
    pub fn replace_at(&mut self, cursor: Cursor, new: FreeBlock) {
        let key = new.key();
        let run = &mut self.runs[cursor.run];
        let follows = match cursor.index.checked_sub(1) {
            Some(before) => run[before].key() < key,
            None => match cursor.run.checked_sub(1) {
                Some(before) => self.lasts[before] < key,
                None => true,
            },
        };
        let is_last = cursor.index + 1 == run.len();
        let precedes = if is_last {
            // A run may end anywhere before the next one begins.
            match self.runs.get(cursor.run + 1) {
                Some(after) => key < after[0].key(),
                None => true,
            }
        } else {
            key < run[cursor.index + 1].key()
        };
        if follows && precedes {
            self.runs[cursor.run][cursor.index] = new;
            if is_last {
                self.lasts[cursor.run] = key;
            }
        } else {
            self.remove_at(cursor);
            self.insert(new);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.runs.iter().flatten().copied()
    }

    /// Sizes from the largest down, for the search that releases the largest blocks first.
    pub fn iter_down(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.runs
            .iter()
            .rev()
            .flat_map(|run| run.iter().rev())
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Against the standard library's ordered set, with enough entries for many runs.
        #[test]
        fn is_an_ordered_set(ops in prop::collection::vec((any::<bool>(), 0u64..40, 0u64..60), 1..1500)) {
            let mut set = FreeSet::default();
            let mut model = BTreeSet::new();
            for (add, size, address) in ops {
                if add {
                    if model.insert((size, address)) {
                        set.insert(FreeBlock { size, address, block: 0 });
                    }
                } else if model.remove(&(size, address)) {
                    set.remove(FreeBlock { size, address, block: 0 });
                }
                // What is left of the best fit takes its place, wherever that is now.
                if let Some((cursor, whole)) = set.best_fit(size)
                    && whole.size > 0
                    && model.insert((whole.size / 2, whole.address + 100))
                {
                    model.remove(&(whole.size, whole.address));
                    set.replace_at(cursor, FreeBlock { size: whole.size / 2, address: whole.address + 100, block: 0 });
                }
                // So does a block that has grown.
                if let Some((_, part)) = set.best_fit(address)
                    && model.insert((part.size + size, part.address))
                {
                    model.remove(&(part.size, part.address));
                    set.replace(part, FreeBlock { size: part.size + size, ..part });
                }
                let expected = model.range((size, 0)..).next().copied();
                let found = set.best_fit(size).map(|(_, entry)| (entry.size, entry.address));
                prop_assert_eq!(found, expected);
            }
            let all: Vec<_> = set.iter().map(|entry| (entry.size, entry.address)).collect();
            prop_assert_eq!(&all, &model.iter().copied().collect::<Vec<_>>());
            let mut down: Vec<_> = set.iter_down().map(|entry| (entry.size, entry.address)).collect();
            down.reverse();
            prop_assert_eq!(down, all);
        }
    }
}
