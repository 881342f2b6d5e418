//! Blocks and the chain they form within a segment: cutting, merging, and the sets in which free
//! and unmapped ones are found.

use super::Allocator;
use super::free_set::FreeBlock;

/// The end of a chain of blocks.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    Free,
    Allocated,
    /// Freed by its owner, but another stream may still use it.
    Pending,
    /// Addresses without memory, in an expandable segment.
    Unmapped,
    /// The slot is not in use.
    Vacant,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    /// Searches of the pool when the block became free: its age for garbage collection.
    pub free_since: u64,
    pub previous: u32,
    pub next: u32,
    pub segment: u32,
    pub pool: u32,
    pub state: State,
    /// Part of an expandable segment.
    pub expandable: bool,
}

impl Allocator {
    /// Joins a block, which is in no set, with neighbours in the same state, which are; the
    /// lowest remains.
    pub(super) fn merge(&mut self, block: u32) -> u32 {
        let Block {
            previous,
            next,
            state,
            ..
        } = self.blocks[block as usize];
        if next != NONE && self.blocks[next as usize].state == state {
            self.leave_set(next);
            self.absorb(block, next);
        }
        if previous != NONE && self.blocks[previous as usize].state == state {
            self.leave_set(previous);
            self.absorb(previous, block);
            return previous;
        }
        block
    }

    /// Joins a block that has become free, and is in no set yet, with its free neighbours; the whole takes the place of one of
    /// them. The lowest remains.
    pub(super) fn merge_free(&mut self, block: u32) -> u32 {
        let Block { previous, next, .. } = self.blocks[block as usize];
        let next = self.free_entry(next);
        let previous = self.free_entry(previous);
        if let Some(next) = next {
            self.absorb(block, next.block);
        }
        let whole = match previous {
            Some(previous) => {
                self.absorb(previous.block, block);
                previous.block
            }
            None => block,
        };
        let free = self.age_free(whole);
        let pool = self.blocks[whole as usize].pool;
        let set = &mut self.pools[pool as usize].free;
        match (previous, next) {
            (None, None) => set.insert(free),
            (Some(part), None) | (None, Some(part)) => set.replace(part, free),
            (Some(previous), Some(next)) => {
                set.remove(previous);
                set.replace(next, free);
            }
        }
        whole
    }

    /// What the set holds of a block, if that exists and is free.
    fn free_entry(&self, block: u32) -> Option<FreeBlock> {
        if block == NONE {
            return None;
        }
        let entry = &self.blocks[block as usize];
        (entry.state == State::Free).then_some(FreeBlock {
            size: entry.size,
            address: entry.address,
            block,
        })
    }

    /// Adds the block after `block` to it.
    pub(super) fn absorb(&mut self, block: u32, next: u32) {
        let Block {
            size,
            next: after_next,
            ..
        } = self.blocks[next as usize];
        let block_entry = &mut self.blocks[block as usize];
        block_entry.size += size;
        block_entry.next = after_next;
        if after_next != NONE {
            self.blocks[after_next as usize].previous = block;
        }
        self.discard(next);
    }

    /// Notes since when a block is free; what its pool's set is to hold of it.
    pub(super) fn age_free(&mut self, block: u32) -> FreeBlock {
        let entry = &mut self.blocks[block as usize];
        entry.free_since = self.searches;
        FreeBlock {
            size: entry.size,
            address: entry.address,
            block,
        }
    }

    pub(super) fn insert_free(&mut self, block: u32) {
        let free = self.age_free(block);
        let pool = self.blocks[block as usize].pool;
        self.pools[pool as usize].free.insert(free);
    }

    /// Takes a free or unmapped block out of its pool's set.
    pub(super) fn leave_set(&mut self, block: u32) {
        let Block {
            address,
            size,
            pool,
            state,
            ..
        } = self.blocks[block as usize];
        let pool = &mut self.pools[pool as usize];
        if state == State::Unmapped {
            pool.unmapped.remove(&(address, block));
        } else {
            pool.free.remove(FreeBlock {
                size,
                address,
                block,
            });
        }
    }

    pub(super) fn new_block(&mut self, block: Block) -> u32 {
        match self.vacant.pop() {
            Some(index) => {
                self.blocks[index as usize] = block;
                index
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        }
    }

    pub(super) fn discard(&mut self, block: u32) {
        self.blocks[block as usize].state = State::Vacant;
        self.vacant.push(block);
    }

    /// Cuts a block, which is in no set, and returns its second part, which is in none either.
    pub(super) fn cut(&mut self, block: u32, bytes: u64) -> u32 {
        let whole = self.blocks[block as usize];
        let rest = self.new_block(Block {
            address: whole.address + bytes,
            size: whole.size - bytes,
            previous: block,
            ..whole
        });
        if whole.next != NONE {
            self.blocks[whole.next as usize].previous = rest;
        }
        self.blocks[block as usize].next = rest;
        self.blocks[block as usize].size = bytes;
        rest
    }
}
