//! The caching allocator once more, written for clarity and not for speed: it keeps only which
//! bytes are owned and which are mapped, and derives every free block, every sum and every
//! choice from that, each time anew.
//!
//! It is told the addresses of new segments, which are the driver's choice, and decides
//! everything else itself.

use std::collections::BTreeMap;

pub const MIB: u64 = 1 << 20;

/// The device's memory. Nearly all of it is taken by others when it is to run out, so that the
/// addresses of an expandable segment, which are as many as the device has bytes, never do.
pub const TOTAL: u64 = 64 << 30;

#[derive(Clone, Debug)]
pub struct Rules {
    pub expandable: bool,
    pub max_split: Option<u64>,
    pub divisions: u64,
    /// What others leave of the device.
    pub device: Option<u64>,
    pub fraction: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    stream: u64,
    large: bool,
}

#[derive(Clone, Debug)]
struct Memory {
    place: Place,
    start: u64,
    end: u64,
    expandable: bool,
    /// Of an expandable segment: pages with memory.
    pages: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Owned {
    size: u64,
    requested: u64,
    pending: bool,
}

/// A driver call, in the order in which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    Get(u64),
    Return(u64),
}

#[derive(Clone, Debug)]
struct FreeRun {
    start: u64,
    size: u64,
    /// How far it could grow into unmapped addresses behind it.
    reach: u64,
    memory: usize,
}

pub struct Naive {
    pub rules: Rules,
    memories: Vec<Memory>,
    owned: BTreeMap<u64, Owned>,
    pub calls: Vec<Call>,
    pub retries: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Sums {
    pub allocated: u64,
    pub active: u64,
    pub requested: u64,
    pub reserved: u64,
    pub inactive_split: u64,
}

impl Naive {
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            memories: Vec::new(),
            owned: BTreeMap::new(),
            calls: Vec::new(),
            retries: 0,
        }
    }

    fn page(large: bool) -> u64 {
        if large { 20 * MIB } else { 2 * MIB }
    }

    pub fn rounded(&self, bytes: u64) -> u64 {
        let plain = bytes.max(1).div_ceil(512) * 512;
        let divisions = self.rules.divisions;
        if divisions < 2 || bytes <= 512 * divisions {
            return plain;
        }
        // All steps of all powers of two, until one is large enough.
        let mut power = 512;
        loop {
            for step in 0..divisions {
                let candidate = power + power * step / divisions;
                if candidate >= bytes {
                    return candidate;
                }
            }
            power *= 2;
        }
    }

    /// Free runs of a stream and pool in best-fit order.
    fn free_runs(&self, place: Place) -> Vec<FreeRun> {
        let mut runs = Vec::new();
        for (index, memory) in self.memories.iter().enumerate() {
            if memory.place != place {
                continue;
            }
            // Bytes that nobody owns, cut where the memory ends.
            let mut cursor = memory.start;
            let mut holes = Vec::new();
            for (&start, owned) in self.owned.range(memory.start..memory.end) {
                holes.push((cursor, start));
                cursor = start + owned.size;
            }
            holes.push((cursor, memory.end));
            for (from, to) in holes {
                for (start, end) in Self::mapped_parts(memory, from, to) {
                    let reach = if memory.expandable && end < to {
                        Self::unmapped_end(memory, end, to) - start
                    } else {
                        end - start
                    };
                    runs.push(FreeRun {
                        start,
                        size: end - start,
                        reach,
                        memory: index,
                    });
                }
            }
        }
        runs.sort_by_key(|run| (run.size, run.start));
        runs
    }

    fn mapped_parts(memory: &Memory, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        if from >= to {
            return parts;
        }
        if !memory.expandable {
            return vec![(from, to)];
        }
        let page = Self::page(memory.place.large);
        let mut at = from;
        while at < to {
            let index = ((at - memory.start) / page) as usize;
            let end = (memory.start + (index as u64 + 1) * page).min(to);
            if memory.pages.get(index) == Some(&true) {
                match parts.last_mut() {
                    Some(last) if last.1 == at => last.1 = end,
                    _ => parts.push((at, end)),
                }
            } else if index >= memory.pages.len() {
                break;
            }
            at = end;
        }
        parts
    }

    /// Where the unmapped addresses that begin at `from` end.
    fn unmapped_end(memory: &Memory, from: u64, to: u64) -> u64 {
        let page = Self::page(memory.place.large);
        let mut index = ((from - memory.start) / page) as usize;
        while index < memory.pages.len() && !memory.pages[index] {
            index += 1;
        }
        if index >= memory.pages.len() {
            to
        } else {
            (memory.start + index as u64 * page).min(to)
        }
    }

    fn choose(&self, place: Place, size: u64) -> Option<FreeRun> {
        let runs = self.free_runs(place);
        let mut index = runs.iter().position(|run| run.size >= size)?;
        if self.rules.expandable {
            while index + 1 < runs.len() && runs[index + 1].reach < runs[index].reach {
                index += 1;
            }
        }
        let run = runs[index].clone();
        if let Some(max_split) = self.rules.max_split {
            let oversize_for_small = size < max_split && run.size >= max_split;
            let too_large = size >= max_split && run.size >= size + 20 * MIB;
            if oversize_for_small || too_large {
                return None;
            }
        }
        Some(run)
    }

    /// The address of the block, or `None` when memory ran out. `address` gives the place of a
    /// new segment.
    pub fn allocate(
        &mut self,
        bytes: u64,
        stream: u64,
        mut address: impl FnMut() -> u64,
    ) -> Option<u64> {
        let size = self.rounded(bytes);
        let place = Place {
            stream,
            large: size > MIB,
        };
        let mut run = self.choose(place, size);
        if run.is_none() {
            run = self.get(place, size, &mut address);
        }
        if run.is_none() && self.give_back_oversize(place, size) {
            run = self.get(place, size, &mut address);
        }
        if run.is_none() {
            self.give_back();
            self.retries += 1;
            run = self.get(place, size, &mut address);
        }
        let run = run?;
        let rest = run.size - size;
        let cut = if !place.large || self.rules.expandable {
            rest >= 512
        } else {
            rest > MIB && self.rules.max_split.is_none_or(|max| size < max)
        };
        let owned = Owned {
            size: if cut { size } else { run.size },
            requested: bytes,
            pending: false,
        };
        self.owned.insert(run.start, owned);
        Some(run.start)
    }

    fn fits(&self, bytes: u64) -> bool {
        self.rules
            .device
            .is_none_or(|device| self.sums().reserved + bytes <= device)
    }

    fn get(
        &mut self,
        place: Place,
        size: u64,
        address: &mut impl FnMut() -> u64,
    ) -> Option<FreeRun> {
        let segment = if !place.large {
            2 * MIB
        } else if size < 10 * MIB {
            20 * MIB
        } else {
            size.div_ceil(2 * MIB) * 2 * MIB
        };
        if let Some(fraction) = self.rules.fraction
            && self.sums().reserved + segment > (TOTAL as f64 * fraction) as u64
        {
            return None;
        }
        if self.rules.expandable {
            return self.map(place, size, address);
        }
        if !self.fits(segment) {
            return None;
        }
        let start = address();
        self.calls.push(Call::Get(segment));
        self.memories.push(Memory {
            place,
            start,
            end: start + segment,
            expandable: false,
            pages: Vec::new(),
        });
        Some(FreeRun {
            start,
            size: segment,
            reach: segment,
            memory: self.memories.len() - 1,
        })
    }

    /// Maps pages at the lowest unmapped place that leaves room, using free bytes before it.
    fn map(
        &mut self,
        place: Place,
        size: u64,
        address: &mut impl FnMut() -> u64,
    ) -> Option<FreeRun> {
        let page = Self::page(place.large);
        let known = self.memories.iter().position(|m| m.place == place);
        if known.is_none() && !self.fits(size.div_ceil(page) * page) {
            return None;
        }
        let index = known.unwrap_or_else(|| {
            let start = address();
            self.memories.push(Memory {
                place,
                start,
                end: u64::MAX / 2,
                expandable: true,
                pages: Vec::new(),
            });
            self.memories.len() - 1
        });
        let Memory { start, .. } = self.memories[index];
        // The open end is unmapped too.
        let last = self.memories[index].pages.len();
        let candidate = (0..=last).find_map(|number| {
            let memory = &self.memories[index];
            let unmapped = number == last || !memory.pages[number];
            let opens = number == 0 || (memory.pages[number - 1]);
            if !unmapped || !opens {
                return None;
            }
            let at = start + number as u64 * page;
            // Free bytes right before this page belong to the place.
            let from = self
                .free_runs(place)
                .iter()
                .find(|run| run.start + run.size == at)
                .map_or(at, |run| run.start);
            // Up to the next owner there must be room.
            let to = self
                .owned
                .range(at..)
                .next()
                .map_or(u64::MAX / 2, |(&next, _)| next);
            (to - from >= size).then_some((from, at))
        });
        let (from, _) = candidate?;
        // Page by page from the front. A run of unmapped pages is asked for as one piece.
        loop {
            let run = self
                .free_runs(place)
                .into_iter()
                .find(|run| run.start <= from && from < run.start + run.size);
            let (at, mapped) = match &run {
                Some(run) if run.size >= size => return Some(run.clone()),
                Some(run) => (run.start + run.size, run.size),
                None => (from, 0),
            };
            let number = ((at - start) / page) as usize;
            let missing = (size - mapped).div_ceil(page) as usize;
            let pages = &self.memories[index].pages;
            let gap = pages[number.min(pages.len())..]
                .iter()
                .take_while(|mapped| !**mapped)
                .count();
            let closed = number + gap < pages.len();
            let count = if closed { missing.min(gap) } else { missing };
            if !self.fits(count as u64 * page) {
                return None;
            }
            let pages = &mut self.memories[index].pages;
            if pages.len() < number + count {
                pages.resize(number + count, false);
            }
            pages[number..number + count].fill(true);
            self.calls.push(Call::Get(count as u64 * page));
        }
    }

    fn give_back_oversize(&mut self, place: Place, size: u64) -> bool {
        let Some(max_split) = self.rules.max_split else {
            return false;
        };
        let wanted = size.max(max_split);
        let runs = self.free_runs(place);
        let ordinary = |run: &&FreeRun| !self.memories[run.memory].expandable;
        let mut starts = Vec::new();
        let mut sum = 0;
        if let Some(run) = runs.iter().filter(ordinary).find(|run| run.size >= wanted) {
            starts.push(run.start);
            sum = run.size;
        } else {
            for run in runs.iter().filter(ordinary).rev() {
                if sum >= wanted || run.size < max_split {
                    break;
                }
                starts.push(run.start);
                sum += run.size;
            }
        }
        for start in starts {
            self.drop_segment(start);
        }
        sum >= wanted
    }

    fn drop_segment(&mut self, start: u64) {
        let index = self
            .memories
            .iter()
            .position(|memory| memory.start == start && !memory.expandable)
            .expect("an oversize block fills its segment");
        let memory = self.memories.remove(index);
        self.calls.push(Call::Return(memory.end - memory.start));
    }

    /// Every segment nobody owns a byte of, every page nobody owns a byte of.
    pub fn give_back(&mut self) {
        let owned = self.owned.clone();
        let used = |start: u64, end: u64| {
            owned
                .range(..end)
                .next_back()
                .is_some_and(|(&at, block)| at + block.size > start)
        };
        let mut calls = Vec::new();
        self.memories.retain_mut(|memory| {
            if !memory.expandable {
                let keep = used(memory.start, memory.end);
                if !keep {
                    calls.push(Call::Return(memory.end - memory.start));
                }
                return keep;
            }
            let page = Self::page(memory.place.large);
            let mut run = 0;
            for (number, mapped) in memory.pages.iter_mut().enumerate() {
                let start = memory.start + number as u64 * page;
                if *mapped && !used(start, start + page) {
                    *mapped = false;
                    run += page;
                } else if run > 0 {
                    calls.push(Call::Return(run));
                    run = 0;
                }
            }
            if run > 0 {
                calls.push(Call::Return(run));
            }
            while memory.pages.last() == Some(&false) {
                memory.pages.pop();
            }
            !memory.pages.is_empty()
        });
        self.calls.extend(calls);
    }

    pub fn request_free(&mut self, address: u64) {
        self.owned.get_mut(&address).expect("owned").pending = true;
    }

    pub fn complete_free(&mut self, address: u64) {
        self.owned.remove(&address).expect("owned");
    }

    pub fn sums(&self) -> Sums {
        let mut sums = Sums {
            allocated: 0,
            active: 0,
            requested: 0,
            reserved: 0,
            inactive_split: 0,
        };
        for block in self.owned.values() {
            sums.active += block.size;
            sums.requested += block.requested;
            if !block.pending {
                sums.allocated += block.size;
            }
        }
        for memory in &self.memories {
            if memory.expandable {
                let pages = memory.pages.iter().filter(|mapped| **mapped).count() as u64;
                sums.reserved += pages * Self::page(memory.place.large);
            } else {
                let size = memory.end - memory.start;
                let owned: u64 = self
                    .owned
                    .range(memory.start..memory.end)
                    .map(|(_, block)| block.size)
                    .sum();
                sums.reserved += size;
                if owned > 0 {
                    sums.inactive_split += size - owned;
                }
            }
        }
        sums
    }
}
