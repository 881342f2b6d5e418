//! What happens before what: a clock for everything that reads and writes shared memory, and which
//! of its moments each thread knows of.
//!
//! A thread knows what it did itself, and of others what they did before something that it waited
//! for: a barrier, a phase of a barrier in shared memory, the end of a copy or of a product. Copies of
//! the copy engine and products of the matrix units are apart from the thread that starts them, so
//! each has a clock of its own: one for each barrier that copies report to, and for each warp one of
//! its products, one of its copies to global memory and one of the copies of each lane. They go past
//! the threads' way to shared memory, so what a thread wrote reaches them only after a fence, which
//! is what `published` knows.

use super::lanes::LANES;

/// Who reads or writes. Threads come first, by warp and lane.
pub(crate) type Unit = u32;

/// Moments, by unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// What was done until then has been done.
    pub all: Vec<u32>,
    /// And the copy engine and the matrix units see it.
    pub published: Vec<u32>,
}

impl Known {
    pub fn new(units: usize) -> Self {
        Self {
            all: vec![0; units],
            published: vec![0; units],
        }
    }

    pub fn learn(&mut self, other: &Self) {
        for (mine, theirs) in self.all.iter_mut().zip(&other.all) {
            *mine = (*mine).max(*theirs);
        }
        for (mine, theirs) in self.published.iter_mut().zip(&other.published) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Of something that is apart from threads.
    pub fn learn_end(&mut self, unit: Unit, clock: u32) {
        let unit = unit as usize;
        self.all[unit] = self.all[unit].max(clock);
        self.published[unit] = self.published[unit].max(clock);
    }
}

/// The clocks of a cluster.
#[derive(Debug)]
pub(crate) struct Order {
    known: Vec<Known>,
    /// Of each warp: a thread's own moment is its warp's.
    clocks: Vec<u32>,
    num_units: usize,
}

impl Order {
    pub fn new(warps: usize, others: usize) -> Self {
        let num_units = warps * LANES + others;
        let mut known = vec![Known::new(num_units); warps * LANES];
        for (unit, known) in known.iter_mut().enumerate() {
            // Whatever a thread has done itself, it knows of.
            known.all[unit] = u32::MAX;
        }
        Self {
            known,
            clocks: vec![1; warps],
            num_units,
        }
    }

    pub fn num_units(&self) -> usize {
        self.num_units
    }

    pub fn clock(&self, unit: Unit) -> u32 {
        self.clocks[unit as usize / LANES]
    }

    pub fn known(&self, unit: Unit) -> &Known {
        &self.known[unit as usize]
    }

    /// What a thread tells by arriving somewhere: all that it knows, and what it has done. What it does
    /// from here on is later.
    pub fn tell(&mut self, unit: Unit, to: &mut Known) {
        let clock = self.clock(unit);
        let known = &self.known[unit as usize];
        let own = to.all[unit as usize].max(clock);
        to.learn(known);
        to.all[unit as usize] = own;
        self.clocks[unit as usize / LANES] += 1;
    }

    pub fn learn(&mut self, unit: Unit, from: &Known) {
        self.known[unit as usize].learn(from);
    }

    pub fn learn_end(&mut self, unit: Unit, other: Unit, clock: u32) {
        self.known[unit as usize].learn_end(other, clock);
    }

    /// Of a copy that goes the threads' own way: the copy engine does not see it by itself.
    pub fn learn_done(&mut self, unit: Unit, other: Unit, clock: u32) {
        let known = &mut self.known[unit as usize].all[other as usize];
        *known = (*known).max(clock);
    }

    /// What a thread did and knows of is seen by the copy engine and the matrix units.
    pub fn publish(&mut self, unit: Unit) {
        let clock = self.clock(unit);
        let known = &mut self.known[unit as usize];
        known.published.copy_from_slice(&known.all);
        known.published[unit as usize] = clock;
        self.clocks[unit as usize / LANES] += 1;
    }
}

/// By whom, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// The thread, or the lane that started a copy or a product.
    pub thread: Unit,
    /// The same, or what does it for the thread.
    pub unit: Unit,
    pub clock: u32,
    /// The instruction.
    pub instruction: u32,
}

impl Access {
    /// Whether it goes past the threads' way to shared memory.
    fn is_apart(&self) -> bool {
        self.unit != self.thread
    }
}

#[derive(Clone, Copy, Debug)]
struct Read {
    /// The first of the units.
    unit: Unit,
    /// Which from there on.
    lanes: u32,
    clock: u32,
    instruction: u32,
}

impl Read {
    fn is_known(&self, known: &Known) -> bool {
        let known = &known.all[self.unit as usize..];
        let mut lanes = self.lanes;
        while lanes != 0 {
            if known[lanes.trailing_zeros() as usize] < self.clock {
                return false;
            }
            lanes &= lanes - 1;
        }
        true
    }
}

#[derive(Clone, Debug, Default)]
struct Cell {
    /// Of the last write; 0 where there was none.
    clock: u32,
    unit: Unit,
    instruction: u32,
    is_apart: bool,
    /// Whether it was added to, which others may do at the same time.
    is_sum: bool,
    /// Since then. Mostly there is one.
    read: Option<Read>,
    more_reads: Vec<Read>,
}

impl Cell {
    fn reads(&self) -> impl Iterator<Item = &Read> {
        self.read.iter().chain(&self.more_reads)
    }

    fn forget_reads(&mut self) {
        self.read = None;
        self.more_reads.clear();
    }

    fn add(&mut self, new: Read, is_apart: bool, known: &Known) {
        // Whoever knows of a later end of what is apart knows of an earlier one.
        let is_joined =
            |read: &&mut Read| read.unit == new.unit && (read.clock == new.clock || is_apart);
        let mut reads = self.read.iter_mut().chain(&mut self.more_reads);
        if let Some(read) = reads.find(is_joined) {
            read.lanes |= new.lanes;
            read.clock = new.clock;
            read.instruction = new.instruction;
            return;
        }
        // Whoever comes after this read comes after what it knows of.
        if !is_apart {
            self.more_reads.retain(|read| !read.is_known(known));
            self.read = self.read.filter(|read| !read.is_known(known));
        }
        match self.read {
            None => self.read = Some(new),
            Some(_) => self.more_reads.push(new),
        }
    }
}

/// Two accesses to the same memory, one of which writes, with nothing that says which is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Conflict {
    pub first: u32,
    pub second: u32,
    pub kind: ConflictKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ConflictKind {
    WriteAfterWrite,
    ReadAfterWrite,
    WriteAfterRead,
    /// Ordered, but the copy engine or the matrix units may not see it yet.
    Unpublished,
}

/// Who has read and written the shared memory of a block, by two bytes.
#[derive(Debug)]
pub(crate) struct Shadow {
    cells: Vec<Cell>,
}

const CELL_BYTES: usize = 2;

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        Self {
            cells: vec![Cell::default(); bytes.div_ceil(CELL_BYTES)],
        }
    }

    fn range(begin: usize, bytes: usize) -> std::ops::Range<usize> {
        begin / CELL_BYTES..(begin + bytes).div_ceil(CELL_BYTES)
    }

    fn written_before(
        cell: &Cell,
        access: &Access,
        known: &Known,
        kind: ConflictKind,
    ) -> Result<(), Conflict> {
        let conflict = |kind| Conflict {
            first: cell.instruction,
            second: access.instruction,
            kind,
        };
        if cell.clock == 0 {
            return Ok(());
        }
        let unit = cell.unit as usize;
        if known.all[unit] < cell.clock {
            return Err(conflict(kind));
        }
        if access.is_apart() && !cell.is_apart && known.published[unit] < cell.clock {
            return Err(conflict(ConflictKind::Unpublished));
        }
        Ok(())
    }

    pub fn read(
        &mut self,
        begin: usize,
        bytes: usize,
        access: &Access,
        known: &Known,
    ) -> Result<(), Conflict> {
        let mut outcome = Ok(());
        for cell in &mut self.cells[Self::range(begin, bytes)] {
            let kind = ConflictKind::ReadAfterWrite;
            outcome = outcome.and(Self::written_before(cell, access, known, kind));
            let (first, lane) = if access.is_apart() {
                (access.unit, 0)
            } else {
                (
                    access.unit / LANES as u32 * LANES as u32,
                    access.unit % LANES as u32,
                )
            };
            cell.add(
                Read {
                    unit: first,
                    lanes: 1 << lane,
                    clock: access.clock,
                    instruction: access.instruction,
                },
                access.is_apart(),
                known,
            );
        }
        outcome
    }

    pub fn write(
        &mut self,
        begin: usize,
        bytes: usize,
        access: &Access,
        known: &Known,
    ) -> Result<(), Conflict> {
        let mut outcome = Ok(());
        for cell in &mut self.cells[Self::range(begin, bytes)] {
            let kind = ConflictKind::WriteAfterWrite;
            outcome = outcome.and(Self::written_before(cell, access, known, kind));
            if let Some(read) = cell.reads().find(|read| !read.is_known(known)) {
                outcome = outcome.and(Err(Conflict {
                    first: read.instruction,
                    second: access.instruction,
                    kind: ConflictKind::WriteAfterRead,
                }));
            }
            cell.forget_reads();
            cell.clock = access.clock;
            cell.unit = access.unit;
            cell.instruction = access.instruction;
            cell.is_apart = access.is_apart();
            cell.is_sum = false;
        }
        outcome
    }

    /// What reads and writes at once, and may meet others that do.
    pub fn add(
        &mut self,
        begin: usize,
        bytes: usize,
        access: &Access,
        known: &Known,
    ) -> Result<(), Conflict> {
        let mut outcome = Ok(());
        for cell in &mut self.cells[Self::range(begin, bytes)] {
            // Those that add come in any order.
            if !cell.is_sum {
                let kind = ConflictKind::WriteAfterWrite;
                outcome = outcome.and(Self::written_before(cell, access, known, kind));
            }
            cell.forget_reads();
            cell.clock = access.clock;
            cell.unit = access.unit;
            cell.instruction = access.instruction;
            cell.is_apart = false;
            cell.is_sum = true;
        }
        outcome
    }
}
