//! What goes back to the driver, and when: old segments above the garbage collection's
//! threshold, oversize blocks with `max_split_size_mb`, and every free segment before memory
//! is said to have run out.

use super::free_set::FreeBlock;
use super::{Allocator, COMMON_POOL, NONE, PrivatePool, SegmentEvent, State};

impl Allocator {
    /// `torch.cuda.empty_cache()`: every segment without a living block, and every page of
    /// expandable segments without one. The large pool goes first.
    pub fn release_cached(&mut self) {
        for small in [false, true] {
            let mut pools: Vec<u32> = (0..self.pools.len() as u32)
                .filter(|&pool| {
                    let pool = &self.pools[pool as usize];
                    pool.releasable && pool.small == small
                })
                .collect();
            pools.sort_by_key(|&pool| {
                let pool = &self.pools[pool as usize];
                (pool.private, pool.stream)
            });
            for pool in pools {
                self.release_pool(pool);
            }
        }
    }

    /// The graphs of a private pool are gone: from now on its free segments can be released.
    pub fn end_private_pool(&mut self, private: PrivatePool) {
        for pool in &mut self.pools {
            pool.releasable |= pool.private == private;
        }
    }

    fn release_pool(&mut self, pool: u32) {
        let free: Vec<FreeBlock> = self.pools[pool as usize].free.iter().collect();
        for &FreeBlock { block, .. } in &free {
            if !self.blocks[block as usize].expandable && self.is_whole(block) {
                self.release_segment(block);
            }
        }
        for FreeBlock { block, .. } in free {
            // A block whose segment has just been released is vacant.
            if self.blocks[block as usize].state == State::Free
                && self.blocks[block as usize].expandable
                && let Some(unmapped) = self.unmap(block)
                && self.is_whole(unmapped)
            {
                self.drop_range(unmapped);
            }
        }
    }

    /// Gives up the addresses of the segment that a block fills: an ordinary one, or an
    /// expandable one without a mapped page.
    fn drop_range(&mut self, block: u32) {
        let entry = self.blocks[block as usize];
        self.leave_set(block);
        self.discard(block);
        self.segments[entry.segment as usize] = None;
        self.vacant_segments.push(entry.segment);
        self.occupied.remove(&entry.address);
        self.addresses.release(entry.address, entry.size);
        self.statistics.num_segments.subtract(1);
    }

    /// Whether a block is all of its segment.
    fn is_whole(&self, block: u32) -> bool {
        let block = &self.blocks[block as usize];
        block.previous == NONE && block.next == NONE
    }

    /// `cudaFree` of the segment that a free block fills.
    fn release_segment(&mut self, block: u32) {
        let entry = self.blocks[block as usize];
        self.drop_range(block);
        self.statistics.reserved.subtract(entry.size);
        self.statistics.num_device_free += 1;
        self.segment_events.push(SegmentEvent::Free {
            address: entry.address,
            bytes: entry.size,
        });
    }

    /// With `max_split_size_mb`: gives back one oversize block that holds the request, else the
    /// largest ones until their sum does. Only blocks that fill a segment are oversize, because
    /// such blocks are never split.
    pub(super) fn release_oversize(&mut self, pool: u32, size: u64) -> bool {
        if self.config.max_split == u64::MAX {
            return false;
        }
        let wanted = size.max(self.config.max_split);
        let one = self.pools[pool as usize].free.best_fit(wanted);
        if let Some((_, found)) = one
            && !self.blocks[found.block as usize].expandable
        {
            if self.is_whole(found.block) {
                self.release_segment(found.block);
            }
            return true;
        }
        let largest: Vec<FreeBlock> = self.pools[pool as usize]
            .free
            .iter_down()
            .take_while(|free| free.size >= self.config.max_split)
            .collect();
        let mut released = 0;
        for FreeBlock { block, size, .. } in largest {
            if released >= wanted {
                break;
            }
            if !self.blocks[block as usize].expandable && self.is_whole(block) {
                self.release_segment(block);
                released += size;
            }
        }
        released >= wanted
    }

    pub(super) fn collects_garbage(&self) -> bool {
        self.config.garbage_collection_threshold > 0.0 && self.cap().is_some()
    }

    /// Above the threshold, gives back free segments of the large pool that have not been used
    /// for longer than the average, and repeats with the average of the rest until enough is
    /// free. A block's age is the number of searches it was passed over.
    pub(super) fn collect_garbage(&mut self) {
        let Some(cap) = self.cap().filter(|_| self.collects_garbage()) else {
            return;
        };
        let threshold = (self.config.garbage_collection_threshold * cap as f64) as u64;
        let reserved = self.statistics.reserved.current;
        if reserved <= threshold {
            return;
        }
        let wanted = reserved - threshold;
        let mut candidates: Vec<(u32, u64, u64)> = self
            .pools
            .iter()
            .filter(|pool| pool.private == COMMON_POOL && !pool.small)
            .flat_map(|pool| pool.free.iter())
            .filter(|free| self.is_whole(free.block))
            .map(|free| {
                let since = self.blocks[free.block as usize].free_since;
                (free.block, free.size, self.searches - since)
            })
            .collect();
        let mut released = 0;
        while released < wanted && !candidates.is_empty() {
            let ages: u64 = candidates.iter().map(|&(_, _, age)| age).sum();
            let average = ages as f64 / candidates.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) =
                candidates.into_iter().partition(|&(block, _, age)| {
                    age as f64 >= average && !self.blocks[block as usize].expandable
                });
            if old.is_empty() {
                return;
            }
            for (block, size, _) in old {
                released += size;
                self.release_segment(block);
            }
            candidates = young;
        }
    }
}
