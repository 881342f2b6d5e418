//! Puts an allocator into a recorded state: segments at their addresses, with the blocks in
//! them.

use super::{Allocator, Block, BlockId, LARGEST_DEVICE, NONE, PrivatePool, State, Stream, size};

/// A block of a recorded segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoredBlock {
    pub size: u64,
    pub requested: u64,
    pub state: RestoredState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoredState {
    Free,
    Allocated,
    Pending,
    Unmapped,
}

impl Allocator {
    /// Adds a segment whose blocks follow each other from `address` on. Returns the living
    /// blocks in that order. The caller sees to it that free neighbours are merged.
    pub fn restore_segment(
        &mut self,
        address: u64,
        stream: Stream,
        private: PrivatePool,
        small: bool,
        blocks: &[RestoredBlock],
    ) -> Vec<BlockId> {
        self.restore(address, stream, private, small, false, blocks)
    }

    /// Adds an expandable segment. `blocks` begin at the first mapped page and may have
    /// unmapped ones between; addresses behind them are added.
    pub fn restore_expandable(
        &mut self,
        address: u64,
        stream: Stream,
        private: PrivatePool,
        small: bool,
        blocks: &[RestoredBlock],
    ) -> Vec<BlockId> {
        let used: u64 = blocks.iter().map(|block| block.size).sum();
        let total = self.device_total.unwrap_or(LARGEST_DEVICE);
        let page = size::page_bytes(&self.config, small);
        let range = (total + total / 8).max(used).next_multiple_of(page);
        let mut blocks = blocks.to_vec();
        let rest = range - used;
        match blocks.last_mut() {
            Some(last) if last.state == RestoredState::Unmapped => last.size += rest,
            _ if rest > 0 => blocks.push(RestoredBlock {
                size: rest,
                requested: 0,
                state: RestoredState::Unmapped,
            }),
            _ => {}
        }
        self.restore(address, stream, private, small, true, &blocks)
    }

    fn restore(
        &mut self,
        address: u64,
        stream: Stream,
        private: PrivatePool,
        small: bool,
        expandable: bool,
        blocks: &[RestoredBlock],
    ) -> Vec<BlockId> {
        let Some(first) = blocks.first() else {
            return Vec::new();
        };
        let pool = self.pool_index(stream, private, small);
        let mut previous = self.add_segment(address, first.size, pool, expandable);
        let segment = self.blocks[previous as usize].segment;
        let mut indices = vec![previous];
        for block in &blocks[1..] {
            let Block { address, size, .. } = self.blocks[previous as usize];
            let index = self.new_block(Block {
                address: address + size,
                size: block.size,
                requested: 0,
                free_since: 0,
                previous,
                next: NONE,
                segment,
                pool,
                state: State::Free,
                expandable,
            });
            self.blocks[previous as usize].next = index;
            indices.push(index);
            previous = index;
        }
        let mut living = Vec::new();
        let mut reserved = 0;
        for (&index, block) in indices.iter().zip(blocks) {
            if block.state != RestoredState::Unmapped {
                reserved += block.size;
            }
            self.settle(index, block, expandable);
            if matches!(
                block.state,
                RestoredState::Allocated | RestoredState::Pending
            ) {
                living.push(BlockId(index));
            }
        }
        if let Some(segment) = self.segments[segment as usize].as_mut() {
            segment.reserved = reserved;
        }
        let length = blocks.iter().map(|block| block.size).sum();
        self.occupied.insert(address, length);
        self.statistics.reserved.add(reserved);
        living
    }

    /// Gives a block of a restored segment its state, with its place in sets and sums.
    fn settle(&mut self, index: u32, block: &RestoredBlock, expandable: bool) {
        let entry = &mut self.blocks[index as usize];
        let is_split = entry.previous != NONE || entry.next != NONE;
        match block.state {
            RestoredState::Free => {
                entry.state = State::Free;
                self.insert_free(index);
                if is_split && !expandable {
                    self.statistics.inactive_split.add(block.size);
                }
            }
            RestoredState::Unmapped => {
                entry.state = State::Unmapped;
                let key = (entry.address, index);
                let pool = entry.pool as usize;
                self.pools[pool].unmapped.insert(key);
            }
            RestoredState::Allocated | RestoredState::Pending => {
                entry.requested = block.requested;
                self.statistics.active.add(block.size);
                self.statistics.requested.add(block.requested);
                if block.state == RestoredState::Allocated {
                    entry.state = State::Allocated;
                    self.statistics.allocated.add(block.size);
                } else {
                    entry.state = State::Pending;
                }
            }
        }
    }
}
