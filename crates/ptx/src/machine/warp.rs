//! A warp: its registers, and which of its lanes are where. What instructions do is in `compute`,
//! `access`, `meet`, `multiply` and `copy`.

use super::Context;
use super::cluster::Cluster;
use super::lanes::{LANES, Lanes, Words};
use super::memory::Memory;
use super::order::Unit;
use super::shadow::Access;
use crate::error::PtxError;
use crate::program::{Instruction, Op, Register, Source, Special};

/// How a turn ended.
pub(crate) enum Turn {
    Ended,
    Moved,
    Waits,
    /// Waits for something in global memory.
    LooksAgain,
}

/// What some lanes wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Nothing,
    /// The others of their warp.
    Lanes,
    Barrier {
        number: usize,
        generation: u32,
    },
    Cluster {
        generation: u32,
    },
    /// Until the warps that compute products together have closed so many groups of them.
    Products {
        groups: u32,
    },
    Phase {
        address: usize,
        parity: u32,
    },
}

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    at: usize,
    lanes: u32,
    wait: Wait,
}

/// What an instruction leaves behind, where that is not the next one.
pub(super) enum Next {
    Go,
    Wait(Wait),
    /// The instruction again, once others have had a turn.
    LookAgain,
}

/// An instruction while it runs.
pub(super) struct Now<'a> {
    pub context: &'a Context<'a>,
    pub instruction: &'a Instruction,
    pub at: usize,
    /// The group of lanes that is at it.
    pub group: usize,
    /// Those of them that it is for, and all of them.
    pub lanes: u32,
    pub all: u32,
}

pub(super) const UNKNOWN: &str = "is not known for these operands";

pub(crate) struct Warp {
    pub(super) block: usize,
    /// In its block.
    pub(super) index: usize,
    /// In its cluster.
    pub(super) number: usize,
    /// By rows of 32 bits.
    pub(super) registers: Vec<Words>,
    /// Of each thread, where it has asked for another number than it began with.
    asked_registers: Option<usize>,
    pub(super) local: Vec<u8>,
    pub(super) local_bytes: usize,
    groups: Vec<Group>,
    /// The groups of products, and of copies by lane, that are not ended yet are of this number.
    pub(super) products: u32,
    pub(super) async_copies: [u32; LANES],
    pub(super) bulk_copies: u32,
    /// The cluster's meeting that lanes have arrived at.
    pub(super) cluster_generation: u32,
    looks_again: bool,
}

pub(super) fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

/// Those whose lowest bit is one.
pub(super) fn lanes_with(values: &Words) -> u32 {
    let bits = values.iter().zip(LANE_BITS);
    bits.fold(0, |lanes, (value, bit)| {
        lanes | (value & 1).wrapping_neg() & bit
    })
}

pub(super) const LANE_BITS: Words = {
    let mut bits = [1; LANES];
    let mut lane = 0;
    while lane < LANES {
        bits[lane] <<= lane;
        lane += 1;
    }
    bits
};

fn write_row(to: &mut Words, values: &Words, lanes: u32) {
    if lanes == u32::MAX {
        *to = *values;
        return;
    }
    for lane in 0..LANES {
        to[lane] = match lanes & LANE_BITS[lane] {
            0 => to[lane],
            _ => values[lane],
        };
    }
}

impl Warp {
    pub fn empty() -> Self {
        Self {
            block: 0,
            index: 0,
            number: 0,
            registers: Vec::new(),
            asked_registers: None,
            local: Vec::new(),
            local_bytes: 0,
            groups: Vec::new(),
            products: 1,
            async_copies: [1; LANES],
            bulk_copies: 1,
            cluster_generation: 0,
            looks_again: false,
        }
    }

    /// Of all its threads, each of which began with so many.
    pub fn num_registers(&self, each: usize) -> usize {
        LANES * self.asked_registers.unwrap_or(each)
    }

    pub fn new(context: &Context<'_>, block: usize, index: usize, number: usize) -> Self {
        let threads = context.threads() - index * LANES;
        let lanes = match threads {
            LANES.. => u32::MAX,
            some => (1 << some) - 1,
        };
        Self {
            block,
            index,
            number,
            groups: vec![Group {
                at: 0,
                lanes,
                wait: Wait::Nothing,
            }],
            ..Self::empty()
        }
    }

    pub fn looks_again(&self) -> bool {
        self.looks_again
    }

    pub(super) fn thread(&self, lane: usize) -> Unit {
        (self.number * LANES + lane) as Unit
    }

    /// What its lanes wait for, in words.
    pub fn waits(&self, context: &Context<'_>, cluster: &Cluster) -> Vec<String> {
        let waits = self.groups.iter().map(|group| {
            let instruction = &context.kernel.code[group.at];
            let state = match group.wait {
                Wait::Phase { address, .. } => {
                    let phases = cluster.blocks[self.block].phases.get(&address);
                    phases.map_or_else(String::new, |phases| format!(" ({})", phases.state()))
                }
                _ => String::new(),
            };
            format!(
                "lanes {:08x} at line {} `{}` for {:?}{state}",
                group.lanes, instruction.line, instruction.text, group.wait
            )
        });
        waits.collect()
    }

    pub fn run(
        &mut self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        turn: usize,
    ) -> Result<Turn, PtxError> {
        if self.registers.is_empty() && !self.groups.is_empty() {
            self.registers = vec![[0; LANES]; context.kernel.num_rows];
            self.local_bytes = context.kernel.local_bytes;
            self.local = vec![0; self.local_bytes * LANES];
        }
        self.looks_again = false;
        let mut has_moved = false;
        for _ in 0..turn {
            if self.groups.is_empty() {
                self.registers = Vec::new();
                return Ok(Turn::Ended);
            }
            let Some(index) = self.next_group(context, cluster) else {
                break;
            };
            let group = self.groups[index];
            let instruction = &context.kernel.code[group.at];
            let next =
                self.step(context, cluster, memory, index)
                    .map_err(|what| PtxError::Fault {
                        kernel: context.kernel.name.clone(),
                        block: cluster.blocks[self.block].coordinates,
                        warp: self.index,
                        line: instruction.line,
                        text: instruction.text.clone(),
                        what,
                    })?;
            match next {
                Next::Go => has_moved = true,
                Next::Wait(wait) => {
                    self.groups[index].wait = wait;
                    has_moved |= !matches!(wait, Wait::Lanes);
                }
                Next::LookAgain => {
                    self.looks_again = true;
                    break;
                }
            }
        }
        Ok(match (self.looks_again, has_moved) {
            (true, _) => Turn::LooksAgain,
            (false, true) => Turn::Moved,
            (false, false) => Turn::Waits,
        })
    }

    /// Of the lanes that can go on, those that are furthest behind. Lanes that are at the same place
    /// go on together.
    fn next_group(&mut self, context: &Context<'_>, cluster: &mut Cluster) -> Option<usize> {
        if let [group] = self.groups[..]
            && group.wait == Wait::Nothing
        {
            return Some(0);
        }
        for index in 0..self.groups.len() {
            self.end_wait(context, cluster, index);
        }
        let mut index = 0;
        while index < self.groups.len() {
            let group = self.groups[index];
            let is_free = |wait| matches!(wait, Wait::Nothing | Wait::Lanes);
            let other = self.groups[..index]
                .iter()
                .position(|other| other.at == group.at && is_free(other.wait));
            match other {
                Some(other) if is_free(group.wait) => {
                    self.groups[other].lanes |= group.lanes;
                    self.groups[other].wait = Wait::Nothing;
                    self.groups.remove(index);
                }
                _ => index += 1,
            }
        }
        let free = self.groups.iter().enumerate();
        let free = free.filter(|(_, group)| group.wait == Wait::Nothing);
        free.min_by_key(|(_, group)| group.at)
            .map(|(index, _)| index)
    }

    /// Lets lanes go on whose wait is over.
    fn end_wait(&mut self, context: &Context<'_>, cluster: &mut Cluster, index: usize) {
        let group = self.groups[index];
        match group.wait {
            Wait::Nothing | Wait::Lanes => {}
            Wait::Barrier { number, generation } => {
                let is_counted = context.kernel.code[group.at].from.len() > 1;
                if !is_counted {
                    // Those that have ended are waited for no more.
                    let block = &mut cluster.blocks[self.block];
                    let expected = context.threads() - block.ended;
                    block.barriers[number].end_with(expected);
                }
                let Cluster { blocks, order, .. } = cluster;
                let meeting = &blocks[self.block].barriers[number];
                if meeting.generation != generation {
                    order.learn(self.number, group.lanes, meeting.told());
                    let held = [u32::from(meeting.held); LANES];
                    if let Some(&to) = context.kernel.code[group.at].to.first() {
                        self.write_words(to, &held, group.lanes);
                    }
                    self.go_on(index);
                }
            }
            Wait::Cluster { generation } => {
                let expected = cluster.num_threads(context) - cluster.ended();
                cluster.meeting.end_with(expected);
                let Cluster { meeting, order, .. } = cluster;
                if meeting.generation != generation {
                    order.learn(self.number, group.lanes, meeting.told());
                    self.go_on(index);
                }
            }
            Wait::Products { groups } => {
                if cluster.have_closed(self.number, groups) {
                    self.groups[index].wait = Wait::Nothing;
                }
            }
            Wait::Phase { address, parity } => {
                let phases = cluster.blocks[self.block].phases.get(&address);
                // The instruction is run again, and goes on then.
                if phases.is_none_or(|phases| phases.over(parity).is_some()) {
                    self.groups[index].wait = Wait::Nothing;
                }
            }
        }
    }

    fn go_on(&mut self, index: usize) {
        self.groups[index].wait = Wait::Nothing;
        self.groups[index].at += 1;
    }

    pub(super) fn read(&self, context: &Context<'_>, cluster: &Cluster, source: Source) -> Lanes {
        if let Source::Register(register) = source
            && register.is_wide
        {
            let at = register.at as usize;
            let (low, high) = (&self.registers[at], &self.registers[at + 1]);
            return std::array::from_fn(|lane| u64::from(high[lane]) << 32 | u64::from(low[lane]));
        }
        if let Source::Value(value) = source {
            return [value; LANES];
        }
        let mut room = [0; LANES];
        self.words(context, cluster, source, &mut room)
            .map(u64::from)
    }

    /// The lower 32 bits, where they are or, of what is no register, in the room that is given.
    pub(super) fn words<'a>(
        &'a self,
        context: &Context<'_>,
        cluster: &Cluster,
        source: Source,
        room: &'a mut Words,
    ) -> &'a Words {
        *room = match source {
            Source::Register(register) => return &self.registers[register.at as usize],
            Source::Value(value) => [value as u32; LANES],
            Source::Special(Special::Thread(dimension)) => {
                let [x, y, _] = context.block.map(|side| side as usize);
                std::array::from_fn(|lane| {
                    let thread = self.index * LANES + lane;
                    [thread % x, thread / x % y, thread / (x * y)][dimension] as u32
                })
            }
            Source::Special(special) => {
                let value = match special {
                    Special::Threads(dimension) => context.block[dimension],
                    Special::Block(dimension) => cluster.blocks[self.block].coordinates[dimension],
                    Special::Blocks(dimension) => context.grid[dimension],
                    Special::ClusterRank | Special::Thread(_) => self.block as u32,
                };
                [value; LANES]
            }
        };
        room
    }

    pub(super) fn write(&mut self, register: Register, values: &Lanes, lanes: u32) {
        self.write_words(register, &values.map(|value| value as u32), lanes);
        if register.is_wide {
            let high = values.map(|value| (value >> 32) as u32);
            write_row(&mut self.registers[register.at as usize + 1], &high, lanes);
        }
    }

    /// The lower 32 bits.
    pub(super) fn write_words(&mut self, register: Register, values: &Words, lanes: u32) {
        if register != Register::SINK {
            write_row(&mut self.registers[register.at as usize], values, lanes);
        }
    }

    /// Which of a group's lanes the instruction is for.
    fn guarded(&self, instruction: &Instruction, lanes: u32) -> u32 {
        let Some((register, expected)) = instruction.guard else {
            return lanes;
        };
        let predicate = &self.registers[register.at as usize];
        let holds = lanes_with(predicate);
        lanes & if expected { holds } else { !holds }
    }

    /// All lanes that have not ended.
    fn alive(&self) -> u32 {
        self.groups
            .iter()
            .fold(0, |lanes, group| lanes | group.lanes)
    }

    fn step(
        &mut self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        index: usize,
    ) -> Result<Next, String> {
        let Group { at, lanes: all, .. } = self.groups[index];
        let instruction = &context.kernel.code[at];
        let lanes = self.guarded(instruction, all);
        match instruction.op {
            Op::Branch(target) => {
                if lanes == all {
                    self.groups[index].at = target;
                } else {
                    self.groups[index].at += 1;
                    if lanes != 0 {
                        self.groups[index].lanes = all & !lanes;
                        self.groups.push(Group {
                            at: target,
                            lanes,
                            wait: Wait::Nothing,
                        });
                    }
                }
                return Ok(Next::Go);
            }
            Op::Return => {
                cluster.blocks[self.block].ended += lanes.count_ones() as usize;
                if lanes == all {
                    self.groups.remove(index);
                    // Whoever waits for lanes that have ended need not.
                    for group in &mut self.groups {
                        if group.wait == Wait::Lanes {
                            group.wait = Wait::Nothing;
                        }
                    }
                } else {
                    self.groups[index].lanes = all & !lanes;
                    self.groups[index].at += 1;
                }
                return Ok(Next::Go);
            }
            _ => {}
        }
        if lanes == 0 {
            self.groups[index].at += 1;
            return Ok(Next::Go);
        }
        let now = Now {
            context,
            instruction,
            at,
            group: index,
            lanes,
            all,
        };
        // What all lanes of a warp do together waits for all.
        let together = match instruction.op {
            Op::WarpBarrier => Some(instruction.from[0]),
            Op::Shuffle(_) => Some(instruction.from[3]),
            Op::AnyVote | Op::Ballot | Op::Reduce(_) => Some(instruction.from[1]),
            Op::Mma(_)
            | Op::LoadMatrix { .. }
            | Op::StoreMatrix { .. }
            | Op::TransposeMatrix
            | Op::Wgmma(_)
            | Op::WgmmaCommit
            | Op::WgmmaWait(_)
            | Op::ClusterArrive
            | Op::ClusterWait => Some(Source::Value(u64::MAX)),
            _ => None,
        };
        if let Some(members) = together {
            let needed = match members {
                Source::Value(members) => members as u32,
                members => {
                    let members = self.read(context, cluster, members);
                    lanes_of(lanes).fold(0, |needed, lane| needed | members[lane] as u32)
                }
            };
            if needed & self.alive() & !lanes != 0 {
                return Ok(Next::Wait(Wait::Lanes));
            }
        }
        let next = match instruction.op {
            Op::Nothing => Next::Go,
            Op::AskRegisters(count) => {
                self.asked_registers = Some(count);
                Next::Go
            }
            Op::Load { .. } | Op::Store { .. } | Op::AtomicAdd { .. } => {
                self.touch(&now, cluster, memory)?
            }
            Op::Barrier
            | Op::BarrierArrive
            | Op::BarrierAll
            | Op::WarpBarrier
            | Op::ClusterArrive
            | Op::ClusterWait
            | Op::BarrierInit
            | Op::ArriveShared
            | Op::ArriveCluster
            | Op::ExpectBytes(_)
            | Op::TryWait
            | Op::ProxyFence => self.meet_others(&now, cluster)?,
            Op::Mma(_)
            | Op::LoadMatrix { .. }
            | Op::StoreMatrix { .. }
            | Op::TransposeMatrix
            | Op::Wgmma(_)
            | Op::WgmmaCommit
            | Op::WgmmaWait(_) => self.multiply(&now, cluster, memory)?,
            Op::TensorLoad { .. }
            | Op::TensorStore { .. }
            | Op::BulkLoad
            | Op::BulkStore { .. }
            | Op::BulkCommit
            | Op::BulkWait(_)
            | Op::AsyncCopy { .. }
            | Op::AsyncCommit
            | Op::AsyncWait(_) => self.copy(&now, cluster, memory)?,
            _ => self.compute(&now, cluster)?,
        };
        if !matches!(next, Next::Wait(_)) {
            self.groups[index].at = at + 1;
        }
        Ok(next)
    }

    /// What an instruction reads, by number.
    pub(super) fn operand(&self, now: &Now<'_>, cluster: &Cluster, number: usize) -> Lanes {
        self.read(now.context, cluster, now.instruction.from[number])
    }

    /// Its lower 32 bits.
    pub(super) fn narrow<'a>(
        &'a self,
        now: &Now<'_>,
        cluster: &Cluster,
        number: usize,
        room: &'a mut Words,
    ) -> &'a Words {
        self.words(now.context, cluster, now.instruction.from[number], room)
    }

    /// An access by a lane's thread itself.
    pub(super) fn access(&self, now: &Now<'_>, cluster: &Cluster, lane: usize) -> Access {
        let thread = self.thread(lane);
        Access {
            thread,
            lanes: 1 << lane,
            unit: thread,
            clock: cluster.order.clock(thread),
            instruction: now.at as u32,
        }
    }

    /// Leaves some of a group's lanes in it; the others go on with the same instruction by themselves.
    pub(super) fn split(&mut self, index: usize, lanes: u32) {
        let group = self.groups[index];
        self.groups[index].lanes = lanes;
        self.groups.push(Group {
            lanes: group.lanes & !lanes,
            ..group
        });
    }
}
