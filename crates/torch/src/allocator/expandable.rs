//! Expandable segments: one long range of addresses for each stream and pool, in which pages
//! are mapped as they are needed and unmapped when memory runs out.
//!
//! The range is covered by blocks like any segment; a block is mapped as a whole or not at all,
//! and only neighbours of one kind merge. Pages have 2 MiB in the small pool and 20 MiB in the
//! large one.

use super::free_set::{Cursor, FreeBlock};
use super::{Allocator, Block, LARGEST_DEVICE, NONE, SegmentEvent, State, size};

impl Allocator {
    /// Best fit counts the addresses that a block could still grow into, so that the open end
    /// of the range is used last: the search goes on to larger blocks as long as they could
    /// grow less.
    pub(super) fn least_expandable(
        &self,
        pool: u32,
        mut cursor: Cursor,
        mut found: FreeBlock,
    ) -> (Cursor, FreeBlock) {
        let free = &self.pools[pool as usize].free;
        let mut reach = self.reach(found.block);
        loop {
            let next = free.next(cursor);
            match free.get(next) {
                Some(candidate) if self.reach(candidate.block) < reach => {
                    (cursor, found) = (next, candidate);
                    reach = self.reach(candidate.block);
                }
                _ => return (cursor, found),
            }
        }
    }

    /// The size a free block could have if the addresses behind it were mapped.
    fn reach(&self, block: u32) -> u64 {
        let Block { size, next, .. } = self.blocks[block as usize];
        match self.blocks.get(next as usize) {
            Some(next) if next.state == State::Unmapped => size + next.size,
            _ => size,
        }
    }

    /// A free block of at least `size` bytes, in no set, after mapping what it lacks. `None`
    /// when the device has no pages left; what was mapped until then stays, and is free.
    pub(super) fn grow_expandable(&mut self, pool: u32, size: u64) -> Option<u32> {
        if size > self.device_total.unwrap_or(LARGEST_DEVICE) {
            return None;
        }
        let mut block = self.expandable_place(pool, size);
        if self.blocks[block as usize].state == State::Unmapped {
            let bytes = size.min(self.blocks[block as usize].size);
            block = self.map(block, bytes)?;
        }
        while self.blocks[block as usize].size < size {
            let Block {
                size: mapped, next, ..
            } = self.blocks[block as usize];
            let bytes = (size - mapped).min(self.blocks[next as usize].size);
            block = self.map(next, bytes)?;
        }
        self.leave_set(block);
        Some(block)
    }

    /// The lowest place with `size` bytes of free or unmapped addresses, which includes a free
    /// block right before it; else a new range.
    fn expandable_place(&mut self, pool: u32, size: u64) -> u32 {
        for &(_, unmapped) in &self.pools[pool as usize].unmapped {
            let previous = self.blocks[unmapped as usize].previous;
            let first = if previous != NONE && self.blocks[previous as usize].state == State::Free {
                previous
            } else {
                unmapped
            };
            if self.has_addresses(first, size) {
                return first;
            }
        }
        self.new_range(pool, size)
    }

    fn has_addresses(&self, mut block: u32, size: u64) -> bool {
        let mut bytes = 0;
        while bytes < size && block != NONE {
            let entry = self.blocks[block as usize];
            if !matches!(entry.state, State::Free | State::Unmapped) {
                return false;
            }
            bytes += entry.size;
            block = entry.next;
        }
        bytes >= size
    }

    /// A range of addresses, an eighth more than the device has memory, so that pages can move
    /// to its end.
    fn new_range(&mut self, pool: u32, size: u64) -> u32 {
        let page = size::page_bytes(&self.config, self.pools[pool as usize].small);
        let total = self.device_total.unwrap_or(LARGEST_DEVICE);
        let bytes = (total + total / 8).max(size).next_multiple_of(page);
        let address = self.address_for(bytes);
        let block = self.add_segment(address, bytes, pool, true);
        self.pools[pool as usize].unmapped.insert((address, block));
        block
    }

    /// Maps the pages under the first `bytes` of an unmapped block and returns the free block
    /// they are part of, which is in its set.
    fn map(&mut self, block: u32, bytes: u64) -> Option<u32> {
        let unmapped = self.blocks[block as usize];
        let small = self.pools[unmapped.pool as usize].small;
        // Unmapped blocks begin and end at pages.
        let mapped = bytes
            .next_multiple_of(size::page_bytes(&self.config, small))
            .min(unmapped.size);
        if !self.has_room(mapped) {
            return None;
        }
        self.leave_set(block);
        if mapped < unmapped.size {
            self.cut(block, mapped);
            let rest = self.blocks[block as usize].next;
            self.join_set(rest);
        }
        self.blocks[block as usize].state = State::Free;
        let merged = self.merge(block);
        self.insert_free(merged);
        self.change_mapped(unmapped.segment, mapped, true);
        self.segment_events.push(SegmentEvent::Map {
            address: unmapped.address,
            bytes: mapped,
        });
        Some(merged)
    }

    /// Gives back the pages that lie wholly in a free block. What remains of it before and
    /// after them stays free. Returns the unmapped block, if there was a page.
    pub(super) fn unmap(&mut self, block: u32) -> Option<u32> {
        let free = self.blocks[block as usize];
        let page = size::page_bytes(&self.config, self.pools[free.pool as usize].small);
        let base = self.segments[free.segment as usize]
            .as_ref()
            .map_or(0, |segment| segment.address);
        let start = (free.address - base).next_multiple_of(page);
        let end = (free.address - base + free.size) / page * page;
        if start >= end {
            return None;
        }
        self.leave_set(block);
        let mut middle = block;
        if base + start > free.address {
            middle = self.cut(block, base + start - free.address);
            self.insert_free(block);
        }
        if end - start < self.blocks[middle as usize].size {
            let after = self.cut(middle, end - start);
            self.insert_free(after);
        }
        self.blocks[middle as usize].state = State::Unmapped;
        let merged = self.merge(middle);
        self.join_set(merged);
        self.change_mapped(free.segment, end - start, false);
        self.segment_events.push(SegmentEvent::Unmap {
            address: base + start,
            bytes: end - start,
        });
        Some(merged)
    }

    fn join_set(&mut self, block: u32) {
        let Block { address, pool, .. } = self.blocks[block as usize];
        self.pools[pool as usize].unmapped.insert((address, block));
    }

    fn change_mapped(&mut self, segment: u32, bytes: u64, mapped: bool) {
        let Some(segment) = self.segments[segment as usize].as_mut() else {
            return;
        };
        if mapped {
            segment.reserved += bytes;
            self.statistics.reserved.add(bytes);
            self.statistics.num_device_alloc += 1;
        } else {
            segment.reserved -= bytes;
            self.statistics.reserved.subtract(bytes);
            self.statistics.num_device_free += 1;
        }
    }
}
