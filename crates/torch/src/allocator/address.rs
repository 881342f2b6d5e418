//! Where the driver puts segments.
//!
//! Addresses matter because free blocks of one size are taken in the order of their addresses.
//! What recorded traces show of `cudaMalloc` (driver 580): a hole that the context leaves is filled
//! first; then address space is reserved in multiples of 32 MiB, each new range below the ones before; a request goes to the lowest hole
//! of the reserved ranges that holds it, so the 12 MiB that a segment of 20 MiB leaves are
//! taken by a later segment of 12 MiB. The driver keeps things of its own in those holes too,
//! which no model can know; only the order among segments follows from here.

use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
/// The driver reserves address space in multiples of this.
const RANGE_MULTIPLE: u64 = 32 * MIB;
/// What the context leaves free of the range it made when it came up: the first segments go there, from its lowest
/// address on. Recorded on an H200 (driver 580, CUDA 13.0), in traces of models small enough to end inside it.
const CONTEXT_HOLE: u64 = 344 * MIB;
/// The first range ends here where no memory stands behind addresses. Any value does that leaves room below for every
/// stream's range of expandable segments: only the order counts.
pub(super) const TOP: u64 = 1 << 62;

pub(super) struct AddressSpace {
    /// Reserved ranges: start and length.
    ranges: BTreeMap<u64, u64>,
    /// Holes of reserved ranges: start and length. A hole never crosses ranges.
    holes: BTreeMap<u64, u64>,
    /// Ranges given back, to be reserved again: start and length.
    gaps: BTreeMap<u64, u64>,
    /// Everything from here up has been reserved at some time.
    bottom: u64,
}

#[cfg(test)]
impl Default for AddressSpace {
    fn default() -> Self {
        Self {
            ranges: BTreeMap::new(),
            holes: BTreeMap::new(),
            gaps: BTreeMap::new(),
            bottom: TOP,
        }
    }
}

impl AddressSpace {
    /// The address space of a process whose CUDA context is up, below `top`.
    pub fn of_context(top: u64) -> Self {
        let start = top - CONTEXT_HOLE;
        Self {
            ranges: BTreeMap::from([(start, CONTEXT_HOLE)]),
            holes: BTreeMap::from([(start, CONTEXT_HOLE)]),
            gaps: BTreeMap::new(),
            bottom: start,
        }
    }

    /// The address of a new segment.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let hole = self.holes.iter().find(|&(_, &length)| length >= bytes);
        let (start, length) = match hole {
            Some((&start, &length)) => (start, length),
            None => self.reserve(bytes.next_multiple_of(RANGE_MULTIPLE)),
        };
        self.holes.remove(&start);
        if length > bytes {
            self.holes.insert(start + bytes, length - bytes);
        }
        start
    }

    fn reserve(&mut self, length: u64) -> (u64, u64) {
        let gap = self.gaps.iter().rev().find(|&(_, &gap)| gap >= length);
        let start = match gap {
            Some((&start, &gap)) => {
                self.gaps.remove(&start);
                if gap > length {
                    self.gaps.insert(start, gap - length);
                }
                start + (gap - length)
            }
            None => {
                self.bottom = self.bottom.saturating_sub(length);
                self.bottom
            }
        };
        self.ranges.insert(start, length);
        (start, length)
    }

    /// Takes back a segment. One that was not placed here (a recorded address) is ignored.
    pub fn release(&mut self, address: u64, bytes: u64) {
        let Some((&range, &range_length)) = self.ranges.range(..=address).next_back() else {
            return;
        };
        if address + bytes > range + range_length {
            return;
        }
        let (mut start, mut length) = (address, bytes);
        if let Some((&before, &before_length)) = self.holes.range(range..address).next_back()
            && before + before_length == start
        {
            self.holes.remove(&before);
            start = before;
            length += before_length;
        }
        let end = start + length;
        if end < range + range_length
            && let Some(after) = self.holes.remove(&end)
        {
            length += after;
        }
        if (start, length) == (range, range_length) {
            self.ranges.remove(&range);
            self.give_back(range, range_length);
        } else {
            self.holes.insert(start, length);
        }
    }

    fn give_back(&mut self, mut start: u64, mut length: u64) {
        if let Some((&before, &before_length)) = self.gaps.range(..start).next_back()
            && before + before_length == start
        {
            self.gaps.remove(&before);
            start = before;
            length += before_length;
        }
        if let Some(after) = self.gaps.remove(&(start + length)) {
            length += after;
        }
        self.gaps.insert(start, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order of addresses that a trace of GPT-2 shows.
    #[test]
    fn grows_down_and_fills_holes_from_the_lowest() {
        let mut space = AddressSpace::default();
        let first = space.allocate(24 * MIB);
        assert_eq!(space.allocate(24 * MIB), first - 32 * MIB);
        let shared = space.allocate(20 * MIB);
        assert_eq!(shared, first - 64 * MIB);
        // The rest of that range is 12 MiB, and of the two before it 8 MiB each.
        assert_eq!(space.allocate(12 * MIB), shared + 20 * MIB);
        assert_eq!(space.allocate(2 * MIB), first - 32 * MIB + 24 * MIB);
        let wide = space.allocate(394 * MIB);
        assert_eq!(wide, shared - 416 * MIB);
        assert_eq!(space.allocate(2 * MIB), wide + 394 * MIB);
    }

    /// Segments of a small model and its first step, as a trace of a Qwen2 layer shows them: upwards in the context's hole
    /// until one does not fit, then below, and back where there is room.
    #[test]
    fn fills_the_hole_of_the_context_first() {
        let mut space = AddressSpace::of_context(TOP);
        let mut next = space.allocate(2 * MIB) + 2 * MIB;
        for size in [16, 20, 20, 16, 32, 2, 20, 2, 14, 28, 28, 20, 18, 36, 36] {
            assert_eq!(space.allocate(size * MIB), next);
            next += size * MIB;
        }
        let below = space.allocate(36 * MIB);
        assert!(below < next);
        assert_eq!(space.allocate(28 * MIB), below + 36 * MIB);
        assert_eq!(space.allocate(28 * MIB), next);
    }

    #[test]
    fn a_range_that_is_free_is_reserved_again() {
        let mut space = AddressSpace::default();
        let first = space.allocate(20 * MIB);
        let second = space.allocate(12 * MIB);
        let third = space.allocate(64 * MIB);
        space.release(second, 12 * MIB);
        assert_eq!(space.allocate(10 * MIB), second);
        space.release(second, 10 * MIB);
        space.release(first, 20 * MIB);
        // The first range is gone as a whole; a wide segment cannot use its 32 MiB.
        assert_eq!(space.allocate(48 * MIB), third - 64 * MIB);
        assert_eq!(space.allocate(30 * MIB), first);
        // Not placed by this space.
        space.release(u64::MAX - 4 * MIB, 2 * MIB);
    }
}
