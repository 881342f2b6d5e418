//! What the allocator holds, segment by segment: for reports, and for the check that its
//! books are right.

use super::{Allocator, BlockId, NONE, PrivatePool, State, Stream};

/// A block as a report shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    pub address: u64,
    pub size: u64,
    /// What its owner asked for; 0 when it is free.
    pub requested: u64,
    pub allocated: bool,
    /// Freed by its owner, waiting for another stream.
    pub pending: bool,
}

/// A segment as a report shows it. Of an expandable segment only the mapped blocks are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentView {
    pub address: u64,
    pub reserved: u64,
    pub stream: Stream,
    pub private: PrivatePool,
    pub small: bool,
    pub expandable: bool,
    pub blocks: Vec<BlockView>,
}

impl Allocator {
    /// The address of a block: comparable with a recorded one if its segment was placed there.
    pub fn address(&self, id: BlockId) -> u64 {
        self.blocks[id.0 as usize].address
    }

    /// The size of a block, which is what `memory_allocated()` counts.
    pub fn block_size(&self, id: BlockId) -> u64 {
        self.blocks[id.0 as usize].size
    }

    /// Whether the owner has not asked for the block's free yet.
    pub fn is_allocated(&self, id: BlockId) -> bool {
        self.blocks[id.0 as usize].state == State::Allocated
    }

    /// The addresses of a block's segment and of the block.
    pub fn segment_of(&self, id: BlockId) -> (u64, u64) {
        let block = &self.blocks[id.0 as usize];
        let segment = self.segments[block.segment as usize].as_ref();
        (segment.map_or(0, |segment| segment.address), block.address)
    }

    /// All segments in the order of their addresses.
    pub fn segments(&self) -> Vec<SegmentView> {
        let mut views: Vec<SegmentView> = self
            .segments
            .iter()
            .flatten()
            .map(|segment| {
                let pool = &self.pools[segment.pool as usize];
                SegmentView {
                    address: segment.address,
                    reserved: segment.reserved,
                    stream: pool.stream,
                    private: pool.private,
                    small: pool.small,
                    expandable: segment.expandable,
                    blocks: self
                        .chain(segment.first)
                        .filter(|block| block.state != State::Unmapped)
                        .map(|block| BlockView {
                            address: block.address,
                            size: block.size,
                            requested: block.requested,
                            allocated: block.state == State::Allocated,
                            pending: block.state == State::Pending,
                        })
                        .collect(),
                }
            })
            .collect();
        views.sort_by_key(|view| view.address);
        views
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = &super::Block> {
        let mut next = first;
        std::iter::from_fn(move || {
            let block = self.blocks.get(next as usize)?;
            next = block.next;
            Some(block)
        })
    }

    /// Checks every rule the books must keep: blocks cover their segment exactly, no two free
    /// neighbours are unmerged, free sets hold exactly the free blocks, and each counter equals
    /// the sum over blocks. The message names the first rule that is broken.
    pub fn verify(&self) -> Result<(), String> {
        let mut allocated = 0;
        let mut active = 0;
        let mut requested = 0;
        let mut reserved = 0;
        let mut inactive_split = 0;
        let mut num_segments = 0;
        let mut num_free = vec![0; self.pools.len()];
        let mut num_unmapped = vec![0; self.pools.len()];
        for (index, segment) in self.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            num_segments += 1;
            reserved += segment.reserved;
            let mut end = segment.address;
            let mut mapped = 0;
            let mut previous = NONE;
            let mut block = segment.first;
            while block != NONE {
                let entry = &self.blocks[block as usize];
                if entry.address != end {
                    return Err(format!(
                        "block {block} starts at {}, not {end}",
                        entry.address
                    ));
                }
                if entry.previous != previous
                    || entry.segment != index as u32
                    || entry.pool != segment.pool
                {
                    return Err(format!("block {block} is linked wrongly: {entry:?}"));
                }
                if previous != NONE
                    && matches!(entry.state, State::Free | State::Unmapped)
                    && self.blocks[previous as usize].state == entry.state
                {
                    return Err(format!("blocks {previous} and {block} are not merged"));
                }
                let pool = entry.pool as usize;
                match entry.state {
                    State::Vacant => return Err(format!("block {block} is vacant")),
                    State::Unmapped => {
                        num_unmapped[pool] += 1;
                        if !self.pools[pool].unmapped.contains(&(entry.address, block)) {
                            return Err(format!("unmapped block {block} is not in its set"));
                        }
                    }
                    State::Free => {
                        num_free[pool] += 1;
                        let found = self.pools[pool].free.iter().any(|free| {
                            (free.size, free.address, free.block)
                                == (entry.size, entry.address, block)
                        });
                        if !found {
                            return Err(format!("free block {block} is not in its set"));
                        }
                        if !segment.expandable && (previous != NONE || entry.next != NONE) {
                            inactive_split += entry.size;
                        }
                    }
                    State::Allocated | State::Pending => {
                        active += entry.size;
                        requested += entry.requested;
                        if entry.requested > entry.size {
                            return Err(format!("block {block} is smaller than its request"));
                        }
                        if entry.state == State::Allocated {
                            allocated += entry.size;
                        }
                    }
                }
                if entry.state != State::Unmapped {
                    mapped += entry.size;
                }
                end += entry.size;
                previous = block;
                block = entry.next;
            }
            if mapped != segment.reserved {
                return Err(format!(
                    "segment {index} has {mapped} bytes of blocks, {} reserved",
                    segment.reserved
                ));
            }
        }
        for (index, pool) in self.pools.iter().enumerate() {
            if pool.free.iter().count() != num_free[index]
                || pool.unmapped.len() != num_unmapped[index]
            {
                return Err(format!("pool {index} has blocks of no segment"));
            }
        }
        let statistics = &self.statistics;
        for (name, counted, sum) in [
            ("allocated", statistics.allocated.current, allocated),
            ("active", statistics.active.current, active),
            ("requested", statistics.requested.current, requested),
            ("reserved", statistics.reserved.current, reserved),
            (
                "inactive_split",
                statistics.inactive_split.current,
                inactive_split,
            ),
            (
                "num_segments",
                statistics.num_segments.current,
                num_segments,
            ),
        ] {
            if counted != sum {
                return Err(format!("{name} is {counted}, the blocks say {sum}"));
            }
        }
        Ok(())
    }
}
