//! Who has read and written shared memory, and which of two accesses nothing orders.
//!
//! What is copied, multiplied or loaded as a matrix comes in pieces of 16 bytes, so one cell says it
//! for as many; what is touched in smaller parts has a cell for each four bytes or each two.

use super::lanes::LANES;
use super::order::{Unit, View};

/// By whom, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// The thread, or the lane that started a copy or a product.
    pub thread: Unit,
    /// The lanes of its warp that do the same at once.
    pub lanes: u32,
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
    /// Which from there on; 0 where there was no read.
    lanes: u32,
    clock: u32,
    instruction: u32,
}

impl Read {
    const NONE: Self = Self {
        unit: 0,
        lanes: 0,
        clock: 0,
        instruction: 0,
    };

    fn is_known(&self, known: &View<'_>) -> bool {
        match self.lanes {
            0 => true,
            1 => known.all(self.unit) >= self.clock,
            lanes => known.has_lanes(self.unit, lanes, self.clock),
        }
    }
}

#[derive(Clone, Debug)]
struct Cell {
    /// Of the last write; 0 where there was none.
    clock: u32,
    unit: Unit,
    instruction: u32,
    is_apart: bool,
    /// Whether it was added to, which others may do at the same time.
    is_sum: bool,
    /// Since then. Mostly there is one.
    read: Read,
    more_reads: Vec<Read>,
}

impl Cell {
    const NEW: Self = Self {
        clock: 0,
        unit: 0,
        instruction: 0,
        is_apart: false,
        is_sum: false,
        read: Read::NONE,
        more_reads: Vec::new(),
    };

    fn reads(&self) -> impl Iterator<Item = &Read> {
        std::iter::once(&self.read).chain(&self.more_reads)
    }

    fn add(&mut self, new: Read, is_apart: bool, known: &View<'_>) {
        // Whoever knows of a later end of what is apart knows of an earlier one.
        let is_joined = |read: &Read| {
            read.lanes != 0 && read.unit == new.unit && (read.clock == new.clock || is_apart)
        };
        let mut reads = std::iter::once(&mut self.read).chain(&mut self.more_reads);
        if let Some(read) = reads.find(|read| is_joined(read)) {
            read.lanes |= new.lanes;
            read.clock = new.clock;
            read.instruction = new.instruction;
            return;
        }
        // Whoever comes after this read comes after what it knows of.
        if !is_apart {
            let is_over = |read: &Read| {
                let is_own = read.unit == new.unit && read.lanes & !new.lanes == 0;
                is_own || read.is_known(known)
            };
            self.more_reads.retain(|read| !is_over(read));
            if is_over(&self.read) {
                self.read = Read::NONE;
            }
        }
        match self.read.lanes {
            0 => self.read = new,
            _ => self.more_reads.push(new),
        }
    }

    fn written_before(
        &self,
        access: &Access,
        known: &View<'_>,
        kind: ConflictKind,
    ) -> Result<(), Conflict> {
        let conflict = |kind| Conflict {
            first: self.instruction,
            second: access.instruction,
            kind,
        };
        if self.clock == 0 {
            return Ok(());
        }
        if known.all(self.unit) < self.clock {
            return Err(conflict(kind));
        }
        if access.is_apart() && !self.is_apart && known.published(self.unit) < self.clock {
            return Err(conflict(ConflictKind::Unpublished));
        }
        Ok(())
    }

    fn is_read(&mut self, access: &Access, known: &View<'_>) -> Result<(), Conflict> {
        let outcome = self.written_before(access, known, ConflictKind::ReadAfterWrite);
        let (unit, lanes) = match access.is_apart() {
            true => (access.unit, 1),
            false => (access.unit - access.unit % LANES as u32, access.lanes),
        };
        let new = Read {
            unit,
            lanes,
            clock: access.clock,
            instruction: access.instruction,
        };
        self.add(new, access.is_apart(), known);
        outcome
    }

    fn is_written(&mut self, access: &Access, known: &View<'_>) -> Result<(), Conflict> {
        let mut outcome = self.written_before(access, known, ConflictKind::WriteAfterWrite);
        if let Some(read) = self.reads().find(|read| !read.is_known(known)) {
            outcome = outcome.and(Err(Conflict {
                first: read.instruction,
                second: access.instruction,
                kind: ConflictKind::WriteAfterRead,
            }));
        }
        self.set(access, access.is_apart(), false);
        outcome
    }

    /// Of what reads and writes at once, and may meet others that do.
    fn is_added_to(&mut self, access: &Access, known: &View<'_>) -> Result<(), Conflict> {
        // Those that add come in any order.
        let outcome = match self.is_sum {
            true => Ok(()),
            false => self.written_before(access, known, ConflictKind::WriteAfterWrite),
        };
        self.set(access, false, true);
        outcome
    }

    fn set(&mut self, access: &Access, is_apart: bool, is_sum: bool) {
        self.read = Read::NONE;
        self.more_reads.clear();
        self.clock = access.clock;
        self.unit = access.unit;
        self.instruction = access.instruction;
        self.is_apart = is_apart;
        self.is_sum = is_sum;
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

/// What happens to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    Read,
    Write,
    Add,
}

/// Of some bytes together, or of parts of them.
#[derive(Clone, Debug)]
enum Piece {
    Whole(Cell),
    Parts(Box<[Piece]>),
}

/// Bytes of a piece, of its parts, and of theirs.
const SIDES: [usize; 3] = [16, 4, 2];

impl Piece {
    /// What happens to the bytes of a range of it. Of several conflicts the first is told.
    fn meets(
        &mut self,
        level: usize,
        range: std::ops::Range<usize>,
        (does, access, known): (Does, &Access, &View<'_>),
    ) -> Result<(), Conflict> {
        let what = (does, access, known);
        let is_all = range.start == 0 && range.end >= SIDES[level] || level + 1 == SIDES.len();
        if let Self::Whole(cell) = self {
            if is_all {
                return match does {
                    Does::Read => cell.is_read(access, known),
                    Does::Write => cell.is_written(access, known),
                    Does::Add => cell.is_added_to(access, known),
                };
            }
            let part = Self::Whole(std::mem::replace(cell, Cell::NEW));
            let count = SIDES[level] / SIDES[level + 1];
            *self = Self::Parts(vec![part; count].into());
        }
        let mut outcome = Ok(());
        if let Self::Parts(parts) = self {
            let side = SIDES[level + 1];
            for (index, part) in parts.iter_mut().enumerate() {
                let begin = range.start.max(index * side);
                let end = range.end.min((index + 1) * side);
                if begin < end {
                    let within = begin - index * side..end - index * side;
                    outcome = outcome.and(part.meets(level + 1, within, what));
                }
            }
            // All of it has the same behind it then.
            if is_all && does != Does::Read {
                let mut cell = Cell::NEW;
                let (is_apart, is_sum) = match does {
                    Does::Add => (false, true),
                    _ => (access.is_apart(), false),
                };
                cell.set(access, is_apart, is_sum);
                *self = Self::Whole(cell);
            }
        }
        outcome
    }
}

/// The shared memory of a block.
#[derive(Debug)]
pub(crate) struct Shadow {
    pieces: Vec<Piece>,
}

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        Self {
            pieces: vec![Piece::Whole(Cell::NEW); bytes.div_ceil(SIDES[0])],
        }
    }

    pub fn meets(
        &mut self,
        begin: usize,
        bytes: usize,
        (does, access, known): (Does, &Access, &View<'_>),
    ) -> Result<(), Conflict> {
        let what = (does, access, known);
        let side = SIDES[0];
        let end = begin + bytes;
        let mut outcome = Ok(());
        let mut at = begin;
        while at < end {
            let index = at / side;
            let within = at - index * side..(end - index * side).min(side);
            outcome = outcome.and(self.pieces[index].meets(0, within, what));
            at = (index + 1) * side;
        }
        outcome
    }
}
