//! The blocks of a cluster, with their shared memory and barriers, and the turns of their warps.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Context;
use super::barriers::{Meeting, Phases};
use super::lanes::LANES;
use super::memory::Memory;
use super::order::{Order, Unit};
use super::shadow::{Conflict, Shadow};
use super::warp::{Turn, Warp};
use crate::SHARED_START;
use crate::error::PtxError;
use crate::program::Op;

/// What was never written is no number.
const POISON: u8 = 0xff;
/// Barriers of a block that have numbers.
const NUM_BARRIERS: usize = 16;
/// Barriers in a block's shared memory that copies may report to.
const MAX_PHASES: usize = 96;
/// Warps that compute products together.
const WARPGROUP: usize = 4;
/// Of a multiprocessor, and in how many at once each thread has them.
const NUM_REGISTERS: usize = 65_536;
const REGISTERS_AT_ONCE: usize = 8;
/// Instructions of a warp before it is another's turn.
const TURN: usize = 20_000;

pub(crate) enum Progress {
    Done,
    Moved,
    Waits,
}

pub(crate) struct Block {
    pub coordinates: [u32; 3],
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    pub barriers: Vec<Meeting>,
    /// By address.
    pub phases: HashMap<usize, Phases>,
    num_phases: usize,
    /// Threads that have ended.
    pub ended: usize,
}

/// Who does what beside threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Others {
    products: Unit,
    async_copies: Unit,
    bulk_copies: Unit,
    phases: Unit,
}

pub(crate) struct Cluster {
    pub number: u32,
    pub blocks: Vec<Block>,
    warps: Vec<Warp>,
    pub order: Order,
    others: Others,
    pub meeting: Meeting,
    /// Of each warp, the groups of products that it has begun and closed.
    pub products: Vec<u32>,
    pub conflicts: BTreeSet<Conflict>,
}

impl Cluster {
    pub fn new(context: &Context<'_>, number: u32, blocks: Vec<[u32; 3]>) -> Self {
        let threads = context.threads();
        let per_block = threads.div_ceil(LANES);
        let num_warps = per_block * blocks.len();
        let lanes = num_warps * LANES;
        // Those that a kernel does not have take no room.
        let room = |is_it: fn(&Op) -> bool, count: usize| match context.kernel.has(is_it) {
            true => count,
            false => 0,
        };
        let products = room(|op| matches!(op, Op::Wgmma(_)), num_warps);
        let async_copies = room(|op| matches!(op, Op::AsyncCopy { .. }), lanes);
        let bulk_copies = room(|op| matches!(op, Op::BulkCommit), num_warps);
        let phases = room(
            |op| matches!(op, Op::BarrierInit),
            MAX_PHASES * blocks.len(),
        );
        let others = Others {
            products: lanes as Unit,
            async_copies: (lanes + products) as Unit,
            bulk_copies: (lanes + products + async_copies) as Unit,
            phases: (lanes + products + async_copies + bulk_copies) as Unit,
        };
        let order = Order::new(
            num_warps,
            products + async_copies + bulk_copies + phases,
            (async_copies > 0).then_some(others.async_copies),
        );
        let units = order.num_units();
        let warps =
            (0..num_warps).map(|warp| Warp::new(context, warp / per_block, warp % per_block, warp));
        let warps = warps.collect();
        let blocks = blocks.into_iter().map(|coordinates| Block {
            coordinates,
            shared: vec![POISON; context.shared_bytes],
            shadow: Shadow::new(context.shared_bytes),
            barriers: std::iter::repeat_with(|| Meeting::new(units))
                .take(NUM_BARRIERS)
                .collect(),
            phases: HashMap::new(),
            num_phases: 0,
            ended: 0,
        });
        Self {
            number,
            blocks: blocks.collect(),
            warps,
            others,
            meeting: Meeting::new(units),
            products: vec![0; num_warps],
            conflicts: BTreeSet::new(),
            order,
        }
    }

    /// Gives each warp a turn, again and again, as long as one of them gets on.
    pub fn run(
        &mut self,
        context: &Context<'_>,
        memory: &mut Memory<'_>,
        conflicts: &mut BTreeSet<Conflict>,
    ) -> Result<Progress, PtxError> {
        let mut has_moved = false;
        loop {
            let mut is_done = true;
            let mut moves = false;
            for index in 0..self.warps.len() {
                // Taken out for its turn, so that it may use all of the cluster.
                let placeholder = Warp::empty();
                let mut warp = std::mem::replace(&mut self.warps[index], placeholder);
                let turn = warp.run(context, self, memory, TURN);
                self.warps[index] = warp;
                match turn? {
                    Turn::Ended => {}
                    Turn::Moved => {
                        moves = true;
                        is_done = false;
                    }
                    Turn::Waits | Turn::LooksAgain => is_done = false,
                }
            }
            conflicts.append(&mut self.conflicts);
            if is_done {
                self.check_registers(context)?;
                return Ok(Progress::Done);
            }
            if !moves {
                return Ok(match has_moved {
                    true => Progress::Moved,
                    false => Progress::Waits,
                });
            }
            has_moved = true;
        }
    }

    /// Warps that ask for more registers wait on a card until others have given up as many; here none
    /// waits, and what a block has in the end is compared with what it began with: as many for each
    /// thread as a block of the largest size can have, which is what kernels that ask are made for.
    fn check_registers(&self, context: &Context<'_>) -> Result<(), PtxError> {
        let kernel = context.kernel;
        let each = NUM_REGISTERS / kernel.max_threads / REGISTERS_AT_ONCE * REGISTERS_AT_ONCE;
        let per_block = self.warps.len() / self.blocks.len();
        for warps in self.warps.chunks(per_block) {
            let given = warps.iter().map(|warp| warp.num_registers(each)).sum();
            let most = warps.len() * LANES * each;
            if given > most {
                return Err(PtxError::TooMany {
                    kernel: kernel.name.clone(),
                    what: "registers",
                    given,
                    most,
                });
            }
        }
        Ok(())
    }

    /// Whether something in global memory could still let it go on.
    pub fn looks_again(&self) -> bool {
        self.warps.iter().any(Warp::looks_again)
    }

    /// What is waited for, in words, with how many warps wait for it.
    pub fn waits(&self, context: &Context<'_>) -> String {
        let mut waits: BTreeMap<String, usize> = BTreeMap::new();
        for wait in self.warps.iter().flat_map(|warp| warp.waits(context, self)) {
            *waits.entry(wait).or_default() += 1;
        }
        let told = waits
            .iter()
            .map(|(wait, count)| format!("{count} × {wait}"));
        told.collect::<Vec<_>>().join("; ")
    }

    pub fn num_threads(&self, context: &Context<'_>) -> usize {
        self.blocks.len() * context.threads()
    }

    pub fn ended(&self) -> usize {
        self.blocks.iter().map(|block| block.ended).sum()
    }

    /// The first of the warps of its block that a warp computes products with.
    fn first_together(&self, warp: usize) -> usize {
        let per_block = self.warps.len() / self.blocks.len();
        warp / per_block * per_block + warp % per_block / WARPGROUP * WARPGROUP
    }

    /// The products of a warp and of the three that it computes them with, which are apart from their
    /// threads.
    pub fn products_of(&self, warp: usize) -> Unit {
        self.others.products + self.first_together(warp) as Unit
    }

    /// Whether the warps that compute products together have closed so many groups of them.
    pub fn have_closed(&self, warp: usize, groups: u32) -> bool {
        let first = self.first_together(warp);
        let together = self.products.iter().skip(first).take(WARPGROUP);
        together.into_iter().all(|&closed| closed >= groups)
    }

    pub fn async_copies_of(&self, thread: Unit) -> Unit {
        self.others.async_copies + thread
    }

    /// Of a warp, of which one lane copies.
    pub fn bulk_copies_of(&self, warp: usize) -> Unit {
        self.others.bulk_copies + warp as Unit
    }

    /// Makes a barrier in a block's shared memory.
    pub fn init(&mut self, block: usize, address: usize, count: u32) -> Result<(), String> {
        let units = self.order.num_units();
        let owner = &mut self.blocks[block];
        let known = owner.phases.get(&address).map(|phases| phases.copies().0);
        let copies = match known {
            Some(unit) => unit,
            None if owner.num_phases == MAX_PHASES => {
                return Err(format!("there are more than {MAX_PHASES} barriers"));
            }
            None => {
                let first = block * MAX_PHASES + owner.num_phases;
                owner.num_phases += 1;
                self.others.phases + first as Unit
            }
        };
        owner
            .phases
            .insert(address, Phases::new(count, copies, units));
        Ok(())
    }

    pub fn phases(&mut self, block: usize, address: usize) -> Result<&mut Phases, String> {
        let phases = self.blocks.get_mut(block);
        let phases = phases.and_then(|block| block.phases.get_mut(&address));
        phases.ok_or_else(|| format!("there is no barrier at {address:#x}"))
    }

    /// A lane of a warp of the cluster arrives at a barrier in a block's shared memory.
    pub fn arrive(
        &mut self,
        block: usize,
        address: usize,
        warp: usize,
        lane: usize,
    ) -> Result<(), String> {
        let Self { blocks, order, .. } = self;
        let phases = blocks.get_mut(block);
        let phases = phases.and_then(|block| block.phases.get_mut(&address));
        let phases = phases.ok_or_else(|| format!("there is no barrier at {address:#x}"))?;
        phases.arrive(warp, lane, order)
    }

    /// The block and the place of an address in shared memory, which may be another block's.
    pub fn place(&self, own: usize, address: u64, bytes: usize) -> Result<(usize, usize), String> {
        let rank = (address >> RANK_SHIFT) as usize;
        let block = if rank == 0 { own } else { rank - 1 };
        let within = (address & ((1 << RANK_SHIFT) - 1)) as usize;
        let size = self.blocks.get(block).map_or(0, |block| block.shared.len());
        let place = within.wrapping_sub(SHARED_START);
        if place.saturating_add(bytes) > size {
            return Err(format!(
                "{bytes} bytes at {address:#x} are beyond shared memory, which has {size} from {SHARED_START:#x} on"
            ));
        }
        Ok((block, place))
    }

    pub fn note(&mut self, outcome: Result<(), Conflict>) {
        if let Err(conflict) = outcome {
            self.conflicts.insert(conflict);
        }
    }
}

/// An address in a cluster's shared memory has the block's rank, from one, above the address there.
pub(crate) const RANK_SHIFT: u32 = 24;
