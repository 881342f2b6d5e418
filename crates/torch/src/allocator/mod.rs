//! PyTorch's caching allocator, sizes only: the same segments, blocks and numbers for the same
//! requests, without a device.
//!
//! A *segment* is what the driver gives; *blocks* cover it without gaps. A free block serves the
//! smallest request it fits best, may be split, and merges with free neighbours when it comes
//! back. Segments return to the driver only when memory runs out (`release`). With expandable
//! segments a pool is one long range of addresses whose pages are mapped as needed
//! (`expandable`).
//!
//! Blocks live in one vector and are named by their index, so that a million requests take
//! a fraction of a second.

mod address;
mod block;
mod config;
mod expandable;
mod free_set;
mod inspect;
mod release;
mod restore;
mod size;
mod statistics;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use thiserror::Error;

use address::AddressSpace;
use block::{Block, NONE, State};
pub use config::{AllocatorConfig, ConfigError};
use free_set::{Cursor, FreeSet};
pub use inspect::{BlockView, SegmentView};
pub use restore::{RestoredBlock, RestoredState};
pub use size::{MIN_BLOCK, SMALL_REQUEST, SMALL_SEGMENT, block_bytes, segment_bytes};
pub use statistics::{Gauge, Statistics};

/// A block that a tensor owns. Valid until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The number by which a tensor names its block.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn of_number(number: u32) -> Self {
        Self(number)
    }
}

/// A stream, as PyTorch's traces number it. Blocks are reused within one stream only.
pub type Stream = u64;

/// A pool apart from the common one, as CUDA graphs have. [`COMMON_POOL`] is the ordinary one.
pub type PrivatePool = u64;

pub const COMMON_POOL: PrivatePool = 0;

/// No block of the right size is free, and the device or the cap leaves no room for a segment.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "out of memory: {requested} bytes were asked for, which needs {segment} bytes of the device; {allocated} bytes are allocated, {reserved} reserved, and the limit is {limit}"
)]
pub struct OutOfMemory {
    pub requested: u64,
    pub segment: u64,
    pub allocated: u64,
    pub reserved: u64,
    /// What may be reserved: the device's memory less what others use, or the cap.
    pub limit: u64,
    /// The limit is `per_process_memory_fraction`, not the device.
    pub capped: bool,
}

/// What was asked of the driver, or given back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentEvent {
    Alloc { address: u64, bytes: u64 },
    Free { address: u64, bytes: u64 },
    Map { address: u64, bytes: u64 },
    Unmap { address: u64, bytes: u64 },
}

/// More than any device has. It stands for an unknown device, and keeps sums of sizes that a
/// damaged file may hold far from overflow.
const LARGEST_DEVICE: u64 = 1 << 46;

struct Segment {
    address: u64,
    /// Bytes of the device; of an expandable segment those that are mapped.
    reserved: u64,
    first: u32,
    pool: u32,
    expandable: bool,
}

/// The blocks of one stream in the small or the large pool.
struct Pool {
    stream: Stream,
    private: PrivatePool,
    small: bool,
    /// A private pool whose graphs are gone: its free segments may go back to the driver.
    releasable: bool,
    free: FreeSet,
    /// Unmapped blocks of expandable segments, by address.
    unmapped: BTreeSet<(u64, u32)>,
}

/// The allocator of one device.
pub struct Allocator {
    config: AllocatorConfig,
    device_total: Option<u64>,
    outside: u64,
    blocks: Vec<Block>,
    vacant: Vec<u32>,
    segments: Vec<Option<Segment>>,
    vacant_segments: Vec<u32>,
    /// Pairs: the small and the large pool of a stream, `2·i` and `2·i + 1`.
    pools: Vec<Pool>,
    addresses: AddressSpace,
    /// Addresses of all segments, with their lengths.
    occupied: BTreeMap<u64, u64>,
    next_address: Option<u64>,
    /// Searches in the common large pool, counted while garbage collection is on.
    searches: u64,
    statistics: Statistics,
    segment_events: Vec<SegmentEvent>,
}

impl Allocator {
    /// An allocator that has reserved nothing. Without `device_total` memory never runs out,
    /// and a memory fraction has no effect.
    pub fn new(config: AllocatorConfig, device_total: Option<u64>) -> Self {
        let mut allocator = Self {
            config,
            device_total: device_total.map(|total| total.min(LARGEST_DEVICE)),
            outside: 0,
            blocks: Vec::new(),
            vacant: Vec::new(),
            segments: Vec::new(),
            vacant_segments: Vec::new(),
            pools: Vec::new(),
            addresses: AddressSpace::of_context(address::TOP),
            occupied: BTreeMap::new(),
            next_address: None,
            searches: 0,
            statistics: Statistics::default(),
            segment_events: Vec::new(),
        };
        allocator.pool_index(0, COMMON_POOL, true);
        allocator
    }

    /// Memory of the device that the allocator cannot have: the CUDA context, libraries and
    /// other processes.
    pub fn set_outside_bytes(&mut self, bytes: u64) {
        self.outside = bytes;
    }

    /// A number that stands for every block, its place and its state: equal ones mean that the same requests get the same
    /// blocks. Garbage collection goes by time too, so with it no two are equal.
    pub fn arrangement(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let mut chained: Vec<_> = self
            .blocks
            .iter()
            .filter(|block| block.state != State::Vacant)
            .map(|block| (block.address, block.size, block.state))
            .collect();
        chained.sort_unstable_by_key(|&(address, ..)| address);
        chained.hash(&mut hasher);
        self.searches.hash(&mut hasher);
        hasher.finish()
    }

    pub fn config(&self) -> &AllocatorConfig {
        &self.config
    }

    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    pub fn reset_peaks(&mut self) {
        self.statistics.reset_peaks();
    }

    /// What was asked of the driver since the last call.
    pub fn take_segment_events(&mut self) -> Vec<SegmentEvent> {
        std::mem::take(&mut self.segment_events)
    }

    /// Puts the next segment at a recorded address instead of a modelled one.
    pub fn place_next_segment(&mut self, address: Option<u64>) {
        self.next_address = address;
    }

    /// A block for `bytes` in the common pool.
    pub fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<BlockId, OutOfMemory> {
        self.allocate_in(bytes, stream, COMMON_POOL)
    }

    /// A block for `bytes` in a private pool.
    pub fn allocate_in(
        &mut self,
        bytes: u64,
        stream: Stream,
        private: PrivatePool,
    ) -> Result<BlockId, OutOfMemory> {
        if bytes > size::LARGEST_REQUEST {
            return Err(self.out_of_memory(bytes, size::LARGEST_REQUEST));
        }
        let size = block_bytes(&self.config, bytes);
        let pool = self.pool_index(stream, private, size::is_small(size));
        let (block, place) = match self.find_free_block(pool, size) {
            Some((block, place)) => (block, Some(place)),
            None => {
                let block = self.obtain(pool, size);
                (block.ok_or_else(|| self.out_of_memory(bytes, size))?, None)
            }
        };
        self.hand_out(block, place, size, bytes);
        Ok(BlockId(block))
    }

    /// The order of remedies when no free block fits.
    fn obtain(&mut self, pool: u32, size: u64) -> Option<u32> {
        self.collect_garbage();
        let segment = segment_bytes(&self.config, size);
        if let Some(block) = self.grow(pool, size, segment) {
            return Some(block);
        }
        if self.release_oversize(pool, size)
            && let Some(block) = self.grow(pool, size, segment)
        {
            return Some(block);
        }
        self.release_cached();
        self.statistics.num_alloc_retries += 1;
        self.grow(pool, size, segment)
    }

    /// A new segment, or more pages: a block that is free and in no set.
    fn grow(&mut self, pool: u32, size: u64, segment: u64) -> Option<u32> {
        if let Some(cap) = self.cap()
            && self.statistics.reserved.current.saturating_add(segment) > cap
        {
            return None;
        }
        if self.config.expandable_segments {
            return self.grow_expandable(pool, size);
        }
        self.has_room(segment)
            .then(|| self.new_segment(pool, segment))
    }

    fn new_segment(&mut self, pool: u32, bytes: u64) -> u32 {
        let address = self.address_for(bytes);
        let block = self.add_segment(address, bytes, pool, false);
        self.statistics.reserved.add(bytes);
        self.statistics.num_device_alloc += 1;
        self.segment_events
            .push(SegmentEvent::Alloc { address, bytes });
        block
    }

    /// Where a new segment goes: to its recorded place, or where the driver would put it. Places that a recording has taken
    /// are left alone.
    fn address_for(&mut self, bytes: u64) -> u64 {
        let recorded = self.next_address.take();
        if let Some(address) = recorded.filter(|&address| self.is_vacant(address, bytes)) {
            return address;
        }
        loop {
            let address = self.addresses.allocate(bytes);
            if self.is_vacant(address, bytes) {
                return address;
            }
        }
    }

    /// Whether no segment lies there.
    fn is_vacant(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        let before = self.occupied.range(..end).next_back();
        before.is_none_or(|(&start, &length)| start.saturating_add(length) <= address)
    }

    /// A segment of one block, which is free and in no set.
    fn add_segment(&mut self, address: u64, bytes: u64, pool: u32, expandable: bool) -> u32 {
        let segment = match self.vacant_segments.pop() {
            Some(segment) => segment,
            None => {
                self.segments.push(None);
                (self.segments.len() - 1) as u32
            }
        };
        let first = self.new_block(Block {
            address,
            size: bytes,
            requested: 0,
            free_since: 0,
            previous: NONE,
            next: NONE,
            segment,
            pool,
            state: if expandable {
                State::Unmapped
            } else {
                State::Free
            },
            expandable,
        });
        self.segments[segment as usize] = Some(Segment {
            address,
            reserved: if expandable { 0 } else { bytes },
            first,
            pool,
            expandable,
        });
        self.occupied.insert(address, bytes);
        self.statistics.num_segments.add(1);
        first
    }

    /// The free block that a request gets, and its place in the pool's set.
    fn find_free_block(&mut self, pool: u32, size: u64) -> Option<(u32, Cursor)> {
        if self.collects_garbage() {
            let pool = &self.pools[pool as usize];
            if pool.private == COMMON_POOL && !pool.small {
                self.searches += 1;
            }
        }
        let (mut cursor, mut found) = self.pools[pool as usize].free.best_fit(size)?;
        if self.config.expandable_segments {
            (cursor, found) = self.least_expandable(pool, cursor, found);
        }
        // Blocks of max_split and more are kept for requests of that size, and those may only
        // be rounded up so far.
        if size < self.config.max_split {
            if found.size >= self.config.max_split {
                return None;
            }
        } else if found.size >= size.saturating_add(self.config.max_non_split_rounding) {
            return None;
        }
        Some((found.block, cursor))
    }

    /// Gives a free block to its owner, after cutting off what is not needed: the rest takes the block's place in the set, if
    /// it has one.
    fn hand_out(&mut self, block: u32, place: Option<Cursor>, size: u64, requested: u64) {
        let taken = self.blocks[block as usize];
        let was_split = taken.previous != NONE || taken.next != NONE;
        let rest = taken.size - size;
        if self.cuts(taken.pool, size, rest) {
            let remainder = self.cut(block, size);
            let free = self.age_free(remainder);
            let set = &mut self.pools[taken.pool as usize].free;
            match place {
                Some(place) => set.replace_at(place, free),
                None => set.insert(free),
            }
            if !taken.expandable {
                if was_split {
                    self.statistics.inactive_split.subtract(size);
                } else {
                    self.statistics.inactive_split.add(rest);
                }
            }
        } else {
            if let Some(place) = place {
                self.pools[taken.pool as usize].free.remove_at(place);
            }
            if was_split && !taken.expandable {
                self.statistics.inactive_split.subtract(taken.size);
            }
        }
        let block = &mut self.blocks[block as usize];
        block.state = State::Allocated;
        block.requested = requested;
        self.statistics.allocated.add(block.size);
        self.statistics.active.add(block.size);
        self.statistics.requested.add(requested);
        self.statistics.num_allocations += 1;
    }

    /// Whether a block gives up the `rest` that a request of `size` does not need.
    fn cuts(&self, pool: u32, size: u64, rest: u64) -> bool {
        if self.pools[pool as usize].small || self.config.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            size < self.config.max_split && rest > SMALL_REQUEST
        }
    }

    /// The owner is done, and no other stream uses the block.
    pub fn free(&mut self, id: BlockId) {
        self.request_free(id);
        self.complete_free(id);
    }

    /// The owner is done; another stream may still use the block until
    /// [`complete_free`](Self::complete_free).
    ///
    /// # Panics
    /// If the block is not allocated: a handle was used twice.
    pub fn request_free(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        assert_eq!(block.state, State::Allocated, "a block is freed once");
        block.state = State::Pending;
        self.statistics.allocated.subtract(block.size);
        self.statistics.num_frees += 1;
    }

    /// No stream uses the block any more: it merges with free neighbours and can be reused.
    ///
    /// # Panics
    /// If [`request_free`](Self::request_free) did not come first.
    pub fn complete_free(&mut self, id: BlockId) {
        let Block {
            size,
            requested,
            state,
            ..
        } = self.blocks[id.0 as usize];
        assert_eq!(state, State::Pending, "a block's free is completed once");
        self.statistics.active.subtract(size);
        self.statistics.requested.subtract(requested);
        self.blocks[id.0 as usize].state = State::Free;
        let block = self.merge_free(id.0);
        let merged = &self.blocks[block as usize];
        if !merged.expandable {
            // Neighbours that were counted are part of the block now.
            let counted = merged.size - size;
            let is_split = merged.previous != NONE || merged.next != NONE;
            self.statistics.inactive_split.subtract(counted);
            if is_split {
                self.statistics.inactive_split.add(merged.size);
            }
        }
    }

    fn pool_index(&mut self, stream: Stream, private: PrivatePool, small: bool) -> u32 {
        let pair = self
            .pools
            .chunks(2)
            .position(|pair| pair[0].stream == stream && pair[0].private == private)
            .unwrap_or_else(|| {
                for small in [true, false] {
                    self.pools.push(Pool {
                        stream,
                        private,
                        small,
                        releasable: private == COMMON_POOL,
                        free: FreeSet::default(),
                        unmapped: BTreeSet::new(),
                    });
                }
                self.pools.len() / 2 - 1
            });
        2 * pair as u32 + u32::from(!small)
    }

    /// What the process may reserve, if it is told to stay below the device's memory.
    fn cap(&self) -> Option<u64> {
        let total = self.device_total? as f64;
        Some((total * self.config.memory_fraction?) as u64)
    }

    /// Whether the driver has `bytes` more.
    fn has_room(&self, bytes: u64) -> bool {
        let total = self.device_total.unwrap_or(LARGEST_DEVICE);
        self.statistics.reserved.current.saturating_add(bytes) <= total.saturating_sub(self.outside)
    }

    fn out_of_memory(&mut self, requested: u64, size: u64) -> OutOfMemory {
        self.statistics.num_ooms += 1;
        let total = self.device_total.unwrap_or(LARGEST_DEVICE);
        let device = total.saturating_sub(self.outside);
        let cap = self.cap().unwrap_or(u64::MAX);
        OutOfMemory {
            requested,
            segment: segment_bytes(&self.config, size),
            allocated: self.statistics.allocated.current,
            reserved: self.statistics.reserved.current,
            limit: device.min(cap),
            capped: cap < device,
        }
    }
}
