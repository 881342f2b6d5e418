//! A warp: its registers, which of its lanes are where, and what an instruction does.

use super::Context;
use super::cluster::{Cluster, RANK_SHIFT};
use super::lanes::{
    LANES, Lanes, apply, bits_of, compare, compare_halves, convert, convert_pair, f32_of,
    from_half, insert_bits, permute_bytes, sign_extend,
};
use super::matrix::{self, Operand};
use super::memory::Memory;
use super::order::{Access, Unit};
use crate::error::PtxError;
use crate::program::{
    Function, Instruction, Kind, Op, Reduction, SINK, Shuffle, Source, Space, Special, Type, Wgmma,
};
use crate::{CONSTANTS, PARAMETERS, SHARED};

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
enum Wait {
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
enum Next {
    Go,
    Wait(Wait),
    /// The instruction again, once others have had a turn.
    LookAgain,
}

pub(crate) struct Warp {
    block: usize,
    /// In its block.
    index: usize,
    /// In its cluster.
    number: usize,
    registers: Vec<Lanes>,
    local: Vec<u8>,
    local_bytes: usize,
    groups: Vec<Group>,
    /// The groups of products, and of copies by lane, that are not ended yet are of this number.
    products: u32,
    async_copies: [u32; LANES],
    bulk_copies: u32,
    /// The cluster's meeting that lanes have arrived at.
    cluster_generation: u32,
    looks_again: bool,
}

fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

impl Warp {
    pub fn empty() -> Self {
        Self {
            block: 0,
            index: 0,
            number: 0,
            registers: Vec::new(),
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

    fn thread(&self, lane: usize) -> Unit {
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
            self.registers = vec![[0; LANES]; context.kernel.num_registers];
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
                    for lane in lanes_of(group.lanes) {
                        order.learn(self.thread(lane), meeting.told());
                    }
                    let held = [u64::from(meeting.held); LANES];
                    if let Some(&to) = context.kernel.code[group.at].to.first() {
                        self.write(to, &held, group.lanes);
                    }
                    self.go_on(index);
                }
            }
            Wait::Cluster { generation } => {
                let expected = cluster.num_threads(context) - cluster.ended();
                cluster.meeting.end_with(expected);
                let Cluster { meeting, order, .. } = cluster;
                if meeting.generation != generation {
                    for lane in lanes_of(group.lanes) {
                        order.learn(self.thread(lane), meeting.told());
                    }
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

    fn read(&self, context: &Context<'_>, cluster: &Cluster, source: Source) -> Lanes {
        match source {
            Source::Register(register) => self.registers[register as usize],
            Source::Value(value) => [value; LANES],
            Source::Special(Special::Thread(dimension)) => {
                let [x, y, _] = context.block.map(|side| side as usize);
                std::array::from_fn(|lane| {
                    let thread = self.index * LANES + lane;
                    [thread % x, thread / x % y, thread / (x * y)][dimension] as u64
                })
            }
            Source::Special(special) => {
                let value = match special {
                    Special::Threads(dimension) => context.block[dimension],
                    Special::Block(dimension) => cluster.blocks[self.block].coordinates[dimension],
                    Special::Blocks(dimension) => context.grid[dimension],
                    Special::ClusterRank | Special::Thread(_) => self.block as u32,
                };
                [value.into(); LANES]
            }
        }
    }

    fn write(&mut self, register: u32, values: &Lanes, lanes: u32) {
        if register == SINK {
            return;
        }
        let to = &mut self.registers[register as usize];
        if lanes == u32::MAX {
            *to = *values;
            return;
        }
        for (lane, (to, value)) in to.iter_mut().zip(values).enumerate() {
            if lanes >> lane & 1 == 1 {
                *to = *value;
            }
        }
    }

    /// Which of a group's lanes the instruction is for.
    fn guarded(&self, instruction: &Instruction, lanes: u32) -> u32 {
        let Some((register, expected)) = instruction.guard else {
            return lanes;
        };
        let predicate = &self.registers[register as usize];
        let holds = lanes_of(lanes).filter(|&lane| (predicate[lane] & 1 == 1) == expected);
        holds.fold(0, |mask, lane| mask | 1 << lane)
    }

    /// All lanes that have not ended.
    fn alive(&self) -> u32 {
        self.groups
            .iter()
            .fold(0, |lanes, group| lanes | group.lanes)
    }

    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each kind of instruction"
    )]
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
        let from = |warp: &Self, cluster: &Cluster, source: usize| {
            warp.read(context, cluster, instruction.from[source])
        };
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
        // What all lanes of a warp do together waits for all.
        let together = match instruction.op {
            Op::WarpBarrier => Some(from(self, cluster, 0)),
            Op::Shuffle(_) => Some(from(self, cluster, 3)),
            Op::AnyVote | Op::Ballot | Op::Reduce(_) => Some(from(self, cluster, 1)),
            Op::Mma(_)
            | Op::LoadMatrix { .. }
            | Op::StoreMatrix { .. }
            | Op::TransposeMatrix
            | Op::Wgmma(_)
            | Op::WgmmaCommit
            | Op::WgmmaWait(_)
            | Op::ClusterArrive
            | Op::ClusterWait => Some([u64::MAX; LANES]),
            _ => None,
        };
        if let Some(members) = together {
            let needed = lanes_of(lanes).fold(0, |needed, lane| needed | members[lane] as u32);
            if needed & self.alive() & !lanes != 0 {
                return Ok(Next::Wait(Wait::Lanes));
            }
        }
        let access = |warp: &Self, cluster: &Cluster, lane: usize| {
            let thread = warp.thread(lane);
            Access {
                thread,
                unit: thread,
                clock: cluster.order.clock(thread),
                instruction: at as u32,
            }
        };
        match instruction.op {
            Op::Nothing | Op::Branch(_) | Op::Return => {}
            Op::Move(bytes) => {
                let ones = u64::MAX >> (64 - 8 * bytes as u32);
                let value = from(self, cluster, 0).map(|value| value & ones);
                self.write(instruction.to[0], &value, lanes);
            }
            Op::Pack(bytes) => {
                let mut packed = [0; LANES];
                for piece in 0..instruction.from.len() {
                    let values = from(self, cluster, piece);
                    let shift = 8 * (bytes * piece) as u32;
                    let ones = u64::MAX >> (64 - 8 * bytes as u32);
                    for (packed, value) in packed.iter_mut().zip(values) {
                        *packed |= (value & ones) << shift;
                    }
                }
                self.write(instruction.to[0], &packed, lanes);
            }
            Op::Unpack(bytes) => {
                let value = from(self, cluster, 0);
                for (piece, &to) in instruction.to.iter().enumerate() {
                    let shift = 8 * (bytes * piece) as u32;
                    let ones = u64::MAX >> (64 - 8 * bytes as u32);
                    self.write(to, &value.map(|value| value >> shift & ones), lanes);
                }
            }
            Op::Lane(function, ty) => {
                let read = |source: usize| match instruction.from.get(source) {
                    Some(&source) => self.read(context, cluster, source),
                    None => [0; LANES],
                };
                let (a, b, c) = (read(0), read(1), read(2));
                let result = match function {
                    Function::InsertBits => {
                        let length = read(3);
                        Some(insert_bits(&a, &b, c[0], length[0]))
                    }
                    Function::Permute => Some(permute_bytes(&a, &b, &c)),
                    // The product and what is added to it have twice the width.
                    _ => apply(function, ty, &a, &b, &c),
                };
                let result = result.ok_or("is not known for this type")?;
                self.write(instruction.to[0], &result, lanes);
            }
            Op::Compare(comparison, ty, unordered) => {
                let (a, b) = (from(self, cluster, 0), from(self, cluster, 1));
                let result = compare(comparison, ty, unordered, &a, &b);
                self.write(instruction.to[0], &result, lanes);
            }
            Op::CompareHalves(half, comparison) => {
                let (a, b) = (from(self, cluster, 0), from(self, cluster, 1));
                let result = compare_halves(half, comparison, &a, &b);
                self.write(instruction.to[0], &result, lanes);
            }
            Op::CompareHalvesApart(half, comparison) => {
                let (a, b) = (from(self, cluster, 0), from(self, cluster, 1));
                let both = compare_halves(half, comparison, &a, &b);
                for (part, &to) in instruction.to.iter().enumerate() {
                    let holds = both.map(|ones| ones >> (16 * part) & 1);
                    self.write(to, &holds, lanes);
                }
            }
            Op::Convert {
                to,
                from: ty,
                rounding,
                saturates,
                half,
            } => {
                let value = from(self, cluster, 0);
                let result = convert(to, ty, rounding, saturates, half, &value);
                self.write(instruction.to[0], &result, lanes);
            }
            Op::ConvertPair(half) => {
                let (a, b) = (from(self, cluster, 0), from(self, cluster, 1));
                self.write(instruction.to[0], &convert_pair(half, &a, &b), lanes);
            }
            Op::ToGeneric(space) => {
                let start = if space == Space::Shared {
                    SHARED
                } else {
                    PARAMETERS
                };
                let value = from(self, cluster, 0).map(|value| value + start);
                self.write(instruction.to[0], &value, lanes);
            }
            Op::Load {
                space,
                ty,
                offset,
                acquires,
            } => {
                let base = from(self, cluster, 0);
                let count = instruction.to.len();
                let mut values = [[0; LANES]; MAX_VECTOR];
                for lane in lanes_of(lanes) {
                    let address = base[lane].wrapping_add_signed(offset);
                    let bytes = ty.bytes * count;
                    let mut buffer = [0; 16];
                    let buffer = &mut buffer[..bytes];
                    let access = access(self, cluster, lane);
                    self.load(
                        context,
                        cluster,
                        memory,
                        (space, address),
                        buffer,
                        &access,
                        lane,
                    )?;
                    for (values, bytes) in values.iter_mut().zip(buffer.chunks_exact(ty.bytes)) {
                        values[lane] = number(bytes, ty);
                    }
                }
                for (&to, values) in instruction.to.iter().zip(&values) {
                    self.write(to, values, lanes);
                }
                if acquires {
                    // Others may have to write it first.
                    self.groups[index].at += 1;
                    return Ok(Next::LookAgain);
                }
            }
            Op::Store {
                space, ty, offset, ..
            } => {
                let base = from(self, cluster, 0);
                let count = instruction.from.len() - 1;
                let values: Vec<Lanes> = (1..=count)
                    .map(|source| from(self, cluster, source))
                    .collect();
                for lane in lanes_of(lanes) {
                    let address = base[lane].wrapping_add_signed(offset);
                    let mut buffer = [0; 16];
                    for (piece, values) in values.iter().enumerate() {
                        let bytes = values[lane].to_le_bytes();
                        buffer[piece * ty.bytes..][..ty.bytes].copy_from_slice(&bytes[..ty.bytes]);
                    }
                    let bytes = &buffer[..ty.bytes * count];
                    let access = access(self, cluster, lane);
                    self.store(cluster, memory, (space, address), bytes, &access, lane)?;
                }
            }
            Op::AtomicAdd { space, offset } => {
                let (base, value) = (from(self, cluster, 0), from(self, cluster, 1));
                let mut before = [0; LANES];
                for lane in lanes_of(lanes) {
                    let address = base[lane].wrapping_add_signed(offset);
                    let value = value[lane] as u32;
                    before[lane] = match space {
                        Space::Global => memory.add(address, value)?.into(),
                        Space::Shared => {
                            let (block, place) = cluster.place(self.block, address, 4)?;
                            let access = access(self, cluster, lane);
                            let known = cluster.order.known(access.thread);
                            let owner = &mut cluster.blocks[block];
                            let outcome = owner.shadow.add(place, 4, &access, known);
                            let word = &mut owner.shared[place..place + 4];
                            let old = number(word, UNSIGNED) as u32;
                            word.copy_from_slice(&old.wrapping_add(value).to_le_bytes());
                            cluster.note(outcome);
                            old.into()
                        }
                        _ => return Err("adds to memory of a kind that is not known".to_owned()),
                    };
                }
                self.write(instruction.to[0], &before, lanes);
            }
            Op::Barrier | Op::BarrierArrive | Op::BarrierAll => {
                let number = from(self, cluster, 0)[0] as usize;
                let count = instruction.from.len() > 1;
                let says = match instruction.op {
                    Op::BarrierAll => from(self, cluster, 2),
                    _ => [1; LANES],
                };
                let Cluster { blocks, order, .. } = cluster;
                let block = &mut blocks[self.block];
                let expected = match count {
                    true => self.read_one(instruction.from[1]),
                    false => context.threads() - block.ended,
                };
                let Some(meeting) = block.barriers.get_mut(number) else {
                    return Err(format!("there is no barrier {number}"));
                };
                let generation = meeting.generation;
                for lane in lanes_of(lanes) {
                    meeting.arrive(self.thread(lane), order);
                    meeting.say(says[lane] & 1 == 1);
                }
                meeting.end_with(expected);
                if instruction.op != Op::BarrierArrive {
                    if lanes != all {
                        self.split(index, lanes);
                    }
                    return Ok(Next::Wait(Wait::Barrier { number, generation }));
                }
            }
            Op::WarpBarrier => {
                // Those of one mask meet; there may be several masks at once.
                let members = from(self, cluster, 0);
                let mut left = lanes;
                while left != 0 {
                    let first = left.trailing_zeros() as usize;
                    let group = members[first] as u32 & lanes | 1 << first;
                    self.meet(cluster, group);
                    left &= !group;
                }
            }
            Op::ClusterArrive => {
                self.cluster_generation = cluster.meeting.generation;
                let Cluster { meeting, order, .. } = cluster;
                for lane in lanes_of(lanes) {
                    meeting.arrive(self.thread(lane), order);
                }
                let expected = cluster.num_threads(context) - cluster.ended();
                cluster.meeting.end_with(expected);
            }
            Op::ClusterWait => {
                let generation = self.cluster_generation;
                return Ok(Next::Wait(Wait::Cluster { generation }));
            }
            Op::ClusterAddress => {
                let (address, rank) = (from(self, cluster, 0), from(self, cluster, 1));
                let there = std::array::from_fn(|lane| {
                    let within = address[lane] & ((1 << RANK_SHIFT) - 1);
                    ((rank[lane] + 1) << RANK_SHIFT) + within
                });
                self.write(instruction.to[0], &there, lanes);
            }
            Op::Shuffle(kind) => {
                let sources: [Lanes; 3] = std::array::from_fn(|source| from(self, cluster, source));
                let (values, found) = shuffle(kind, &sources);
                self.write(instruction.to[0], &values, lanes);
                if let Some(&to) = instruction.to.get(1) {
                    self.write(to, &found, lanes);
                }
            }
            Op::AnyVote | Op::Ballot => {
                let (votes, members) = (from(self, cluster, 0), from(self, cluster, 1));
                let ballot = lanes_of(lanes).fold(0_u32, |ballot, lane| {
                    ballot | (votes[lane] as u32 & 1) << lane
                });
                let is_any = instruction.op == Op::AnyVote;
                let result = members.map(|members| {
                    let ballot = ballot & members as u32;
                    if is_any {
                        u64::from(ballot != 0)
                    } else {
                        ballot.into()
                    }
                });
                self.write(instruction.to[0], &result, lanes);
            }
            Op::Reduce(reduction) => {
                let (values, members) = (from(self, cluster, 0), from(self, cluster, 1));
                let result = members.map(|members| {
                    let of = lanes_of(members as u32 & lanes).map(|lane| values[lane] as u32);
                    let result = match reduction {
                        Reduction::AddSigned => of.fold(0, u32::wrapping_add),
                        Reduction::MaxUnsigned => of.max().unwrap_or(0),
                        Reduction::MinUnsigned => of.min().unwrap_or(0),
                    };
                    result.into()
                });
                self.write(instruction.to[0], &result, lanes);
            }
            Op::Mma(kind) => {
                let sources = instruction.from.iter();
                let sources: Vec<Lanes> = sources
                    .map(|&source| self.read(context, cluster, source))
                    .collect();
                let results = matrix::mma(kind, &sources);
                for (&to, values) in instruction.to.iter().zip(&results) {
                    self.write(to, values, lanes);
                }
            }
            Op::LoadMatrix { transposed, offset } => {
                let base = from(self, cluster, 0);
                let mut rows = Vec::with_capacity(LANES);
                for (lane, base) in base.iter().enumerate() {
                    let address = base.wrapping_add_signed(offset);
                    let mut row = [0; 16];
                    let access = access(self, cluster, lane);
                    self.load(
                        context,
                        cluster,
                        memory,
                        (Space::Shared, address),
                        &mut row,
                        &access,
                        lane,
                    )?;
                    rows.push(row);
                }
                let half = |row: &[u8; 16], at: usize| {
                    u64::from(u16::from_le_bytes([row[2 * at], row[2 * at + 1]]))
                };
                for (matrix, &to) in instruction.to.iter().enumerate() {
                    let rows = &rows[8 * matrix..8 * matrix + 8];
                    let values = std::array::from_fn(|lane| {
                        let (g, t) = (lane / 4, lane % 4 * 2);
                        match transposed {
                            false => half(&rows[g], t) | half(&rows[g], t + 1) << 16,
                            true => half(&rows[t], g) | half(&rows[t + 1], g) << 16,
                        }
                    });
                    self.write(to, &values, lanes);
                }
            }
            Op::StoreMatrix { offset } => {
                let base = from(self, cluster, 0);
                let values: Vec<Lanes> = (1..5).map(|source| from(self, cluster, source)).collect();
                for lane in 0..LANES {
                    // The lane says where row lane % 8 of matrix lane / 8 is.
                    let address = base[lane].wrapping_add_signed(offset);
                    let mut row = [0; 16];
                    for (t, pair) in row.chunks_exact_mut(4).enumerate() {
                        let bits = values[lane / 8][lane % 8 * 4 + t] as u32;
                        pair.copy_from_slice(&bits.to_le_bytes());
                    }
                    let access = access(self, cluster, lane);
                    self.store(
                        cluster,
                        memory,
                        (Space::Shared, address),
                        &row,
                        &access,
                        lane,
                    )?;
                }
            }
            Op::TransposeMatrix => {
                let value = from(self, cluster, 0);
                let element = |row: usize, column: usize| {
                    value[row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff
                };
                let result = std::array::from_fn(|lane| {
                    let (g, t) = (lane / 4, lane % 4 * 2);
                    element(t, g) | element(t + 1, g) << 16
                });
                self.write(instruction.to[0], &result, lanes);
            }
            Op::Wgmma(shape) => self.wgmma(context, cluster, instruction, shape, at)?,
            Op::WgmmaCommit => {
                cluster.products[self.number] = self.products;
                self.products += 1;
            }
            Op::WgmmaWait(left) => {
                let ended = (self.products - 1).saturating_sub(left);
                // They are over for four warps at once, which have to begin them first.
                if !cluster.have_closed(self.number, ended) {
                    return Ok(Next::Wait(Wait::Products { groups: ended }));
                }
                let unit = cluster.products_of(self.number);
                for lane in lanes_of(lanes) {
                    cluster.order.learn_end(self.thread(lane), unit, ended);
                }
            }
            Op::BarrierInit => {
                let (address, count) = (from(self, cluster, 0), from(self, cluster, 1));
                for lane in lanes_of(lanes) {
                    cluster.init(self.block, address[lane] as usize, count[lane] as u32)?;
                }
            }
            Op::ArriveShared => {
                let address = from(self, cluster, 0);
                for lane in lanes_of(lanes) {
                    let address = address[lane] as usize;
                    cluster.arrive(self.block, address, self.thread(lane))?;
                }
            }
            Op::ArriveCluster => {
                let address = from(self, cluster, 0);
                for lane in lanes_of(lanes) {
                    let rank = (address[lane] >> RANK_SHIFT) as usize;
                    let block = if rank == 0 { self.block } else { rank - 1 };
                    let within = (address[lane] & ((1 << RANK_SHIFT) - 1)) as usize;
                    cluster.arrive(block, within, self.thread(lane))?;
                }
            }
            Op::ExpectBytes(arrives) => {
                let (address, bytes) = (from(self, cluster, 0), from(self, cluster, 1));
                for lane in lanes_of(lanes) {
                    let at = address[lane] as usize;
                    cluster.phases(self.block, at)?.expect(bytes[lane] as u32);
                    if arrives {
                        cluster.arrive(self.block, at, self.thread(lane))?;
                    }
                }
            }
            Op::TryWait => {
                let (address, parity) = (from(self, cluster, 0), from(self, cluster, 1));
                let first = lanes.trailing_zeros() as usize;
                // Lanes that wait for something else have their turn afterwards.
                let alike = lanes_of(lanes)
                    .filter(|&lane| {
                        (address[lane], parity[lane]) == (address[first], parity[first])
                    })
                    .fold(0, |mask, lane| mask | 1 << lane);
                if alike != all {
                    self.split(index, alike);
                }
                let address = address[first] as usize;
                let parity = parity[first] as u32;
                cluster.phases(self.block, address)?;
                let Cluster { blocks, order, .. } = cluster;
                let Some(told) = blocks[self.block].phases[&address].over(parity) else {
                    return Ok(Next::Wait(Wait::Phase { address, parity }));
                };
                for lane in lanes_of(alike) {
                    order.learn(self.thread(lane), told);
                }
                self.write(instruction.to[0], &[1; LANES], alike);
            }
            Op::TensorLoad { rank, to_many } => {
                let sources: Vec<Lanes> = (0..instruction.from.len())
                    .map(|source| from(self, cluster, source))
                    .collect();
                for lane in lanes_of(lanes) {
                    let each: Vec<u64> = sources.iter().map(|values| values[lane]).collect();
                    let access = access(self, cluster, lane);
                    self.tensor_load(context, cluster, memory, &each, (rank, to_many), access)?;
                }
            }
            Op::TensorStore { rank } => {
                let sources: Vec<Lanes> = (0..instruction.from.len())
                    .map(|source| from(self, cluster, source))
                    .collect();
                for lane in lanes_of(lanes) {
                    let each: Vec<u64> = sources.iter().map(|values| values[lane]).collect();
                    let access = self.bulk_access(cluster, lane, at);
                    self.tensor_store(context, cluster, memory, &each, rank, &access)?;
                }
            }
            Op::BulkLoad => {
                let sources: Vec<Lanes> =
                    (0..4).map(|source| from(self, cluster, source)).collect();
                for lane in lanes_of(lanes) {
                    let [to, address, bytes, barrier] =
                        std::array::from_fn(|source| sources[source][lane]);
                    let bytes = bytes as usize;
                    if to % 16 != 0 || address % 16 != 0 || !bytes.is_multiple_of(16) {
                        return Err("copies what is not in pieces of 16 bytes".to_owned());
                    }
                    let buffer = memory.read(address, bytes, cluster.number)?.to_vec();
                    let barrier = barrier as usize;
                    let (unit, clock) = cluster.phases(self.block, barrier)?.copies();
                    let access = Access {
                        unit,
                        clock,
                        ..access(self, cluster, lane)
                    };
                    self.put(cluster, self.block, to, &buffer, &access)?;
                    cluster.phases(self.block, barrier)?.complete(bytes);
                }
            }
            Op::BulkStore { adds } => {
                let sources: Vec<Lanes> =
                    (0..3).map(|source| from(self, cluster, source)).collect();
                for lane in lanes_of(lanes) {
                    let [to, address, bytes] = std::array::from_fn(|source| sources[source][lane]);
                    let access = self.bulk_access(cluster, lane, at);
                    let mut buffer = vec![0; bytes as usize];
                    self.get(cluster, address, &mut buffer, &access)?;
                    match adds {
                        true => memory.add_floats(to, &buffer)?,
                        false => memory.write(to, &buffer, cluster.number)?,
                    }
                }
            }
            Op::BulkCommit => {
                if lanes.count_ones() > 1 {
                    return Err("closes groups of copies of several lanes".to_owned());
                }
                self.bulk_copies += 1;
            }
            Op::BulkWait(left) => {
                for lane in lanes_of(lanes) {
                    let ended = (self.bulk_copies - 1).saturating_sub(left);
                    let thread = self.thread(lane);
                    let unit = cluster.bulk_copies_of(self.number);
                    cluster.order.learn_end(thread, unit, ended);
                }
            }
            Op::AsyncCopy { offset } => {
                let sources: Vec<Lanes> = (0..instruction.from.len())
                    .map(|source| from(self, cluster, source))
                    .collect();
                for lane in lanes_of(lanes) {
                    let (to, address) = (sources[0][lane], sources[1][lane]);
                    let bytes = sources[2][lane] as usize;
                    // The rest of them are zeros.
                    let read = sources.get(3).map_or(bytes, |read| read[lane] as usize);
                    let address = address.wrapping_add_signed(offset);
                    if to % bytes as u64 != 0 || address % bytes as u64 != 0 && read > 0 {
                        return Err(format!("copies {bytes} bytes that are not aligned"));
                    }
                    let mut buffer = vec![0; bytes];
                    if read > 0 {
                        let there = memory.read(address, read.min(bytes), cluster.number)?;
                        buffer[..there.len()].copy_from_slice(there);
                    }
                    let thread = self.thread(lane);
                    // By the threads' own way to shared memory, but later.
                    let access = Access {
                        thread: cluster.async_copies_of(thread),
                        unit: cluster.async_copies_of(thread),
                        clock: self.async_copies[lane],
                        instruction: at as u32,
                    };
                    let (block, place) = cluster.place(self.block, to, bytes)?;
                    let known = cluster.order.known(thread);
                    let owner = &mut cluster.blocks[block];
                    let outcome = owner.shadow.write(place, bytes, &access, known);
                    owner.shared[place..place + bytes].copy_from_slice(&buffer);
                    cluster.note(outcome);
                }
            }
            Op::AsyncCommit => {
                for lane in lanes_of(lanes) {
                    self.async_copies[lane] += 1;
                }
            }
            Op::AsyncWait(left) => {
                for lane in lanes_of(lanes) {
                    // For all, those of no group yet are waited for too.
                    if left.is_none() {
                        self.async_copies[lane] += 1;
                    }
                    let closed = self.async_copies[lane] - 1;
                    let ended = closed.saturating_sub(left.unwrap_or(0));
                    let thread = self.thread(lane);
                    let unit = cluster.async_copies_of(thread);
                    cluster.order.learn_done(thread, unit, ended);
                }
            }
            Op::ProxyFence => {
                for lane in lanes_of(lanes) {
                    cluster.order.publish(self.thread(lane));
                }
            }
        }
        self.groups[index].at = at + 1;
        Ok(Next::Go)
    }

    fn read_one(&self, source: Source) -> usize {
        match source {
            Source::Register(register) => self.registers[register as usize][0] as usize,
            Source::Value(value) => value as usize,
            Source::Special(_) => 0,
        }
    }

    /// Leaves some of a group's lanes in it; the others go on with the same instruction by themselves.
    fn split(&mut self, index: usize, lanes: u32) {
        let group = self.groups[index];
        self.groups[index].lanes = lanes;
        self.groups.push(Group {
            lanes: group.lanes & !lanes,
            ..group
        });
    }

    /// Lanes tell each other what they know.
    fn meet(&self, cluster: &mut Cluster, lanes: u32) {
        let units = cluster.order.num_units();
        let mut meeting = super::barriers::Meeting::new(units);
        for lane in lanes_of(lanes) {
            meeting.arrive(self.thread(lane), &mut cluster.order);
        }
        meeting.end_with(lanes.count_ones() as usize);
        for lane in lanes_of(lanes) {
            cluster.learn(self.thread(lane), meeting.told());
        }
    }

    #[expect(clippy::too_many_arguments, reason = "where, into what, by whom")]
    fn load(
        &self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        (space, address): (Space, u64),
        into: &mut [u8],
        access: &Access,
        lane: usize,
    ) -> Result<(), String> {
        let bytes = into.len();
        if address % bytes as u64 != 0 {
            return Err(format!(
                "reads {bytes} bytes at {address:#x}, which is not aligned"
            ));
        }
        let beyond = |what: &str| format!("reads {bytes} bytes at {address:#x}, beyond {what}");
        let copy = |from: &[u8], at: u64, into: &mut [u8]| -> Option<()> {
            let from = from.get(at as usize..at as usize + bytes)?;
            into.copy_from_slice(from);
            Some(())
        };
        match space {
            Space::Generic if (PARAMETERS..PARAMETERS + (1 << 20)).contains(&address) => {
                copy(&context.parameters, address - PARAMETERS, into)
                    .ok_or_else(|| beyond("the parameters"))
            }
            Space::Parameter => {
                copy(&context.parameters, address, into).ok_or_else(|| beyond("the parameters"))
            }
            Space::Local => {
                let own = &self.local[lane * self.local_bytes..][..self.local_bytes];
                copy(own, address, into).ok_or_else(|| beyond("local memory"))
            }
            Space::Shared | Space::ClusterShared => self.get(cluster, address, into, access),
            Space::Generic if (SHARED..SHARED + (1 << 32)).contains(&address) => {
                self.get(cluster, address - SHARED, into, access)
            }
            Space::Global | Space::Generic => {
                let constant = address.checked_sub(CONSTANTS);
                if let Some(at) = constant.filter(|&at| at < context.constants.len() as u64) {
                    return copy(context.constants, at, into).ok_or_else(|| beyond("constants"));
                }
                into.copy_from_slice(memory.read(address, bytes, cluster.number)?);
                Ok(())
            }
        }
    }

    fn store(
        &mut self,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        (space, address): (Space, u64),
        from: &[u8],
        access: &Access,
        lane: usize,
    ) -> Result<(), String> {
        let bytes = from.len();
        if address % bytes as u64 != 0 {
            return Err(format!(
                "writes {bytes} bytes at {address:#x}, which is not aligned"
            ));
        }
        match space {
            Space::Local => {
                let own = &mut self.local[lane * self.local_bytes..][..self.local_bytes];
                let to = own.get_mut(address as usize..address as usize + bytes);
                to.ok_or("writes beyond local memory")?
                    .copy_from_slice(from);
                Ok(())
            }
            Space::Shared | Space::ClusterShared => {
                self.put(cluster, self.block, address, from, access)
            }
            Space::Generic if (SHARED..SHARED + (1 << 32)).contains(&address) => {
                self.put(cluster, self.block, address - SHARED, from, access)
            }
            Space::Global | Space::Generic => memory.write(address, from, cluster.number),
            Space::Parameter => Err("writes to a parameter".to_owned()),
        }
    }

    /// From shared memory.
    fn get(
        &self,
        cluster: &mut Cluster,
        address: u64,
        into: &mut [u8],
        access: &Access,
    ) -> Result<(), String> {
        let (block, place) = cluster.place(self.block, address, into.len())?;
        let known = cluster.order.known(access.thread);
        let owner = &mut cluster.blocks[block];
        let outcome = owner.shadow.read(place, into.len(), access, known);
        into.copy_from_slice(&owner.shared[place..place + into.len()]);
        cluster.note(outcome);
        Ok(())
    }

    /// To shared memory.
    fn put(
        &self,
        cluster: &mut Cluster,
        own: usize,
        address: u64,
        from: &[u8],
        access: &Access,
    ) -> Result<(), String> {
        let (block, place) = cluster.place(own, address, from.len())?;
        let known = cluster.order.known(access.thread);
        let owner = &mut cluster.blocks[block];
        let outcome = owner.shadow.write(place, from.len(), access, known);
        owner.shared[place..place + from.len()].copy_from_slice(from);
        cluster.note(outcome);
        Ok(())
    }

    fn bulk_access(&self, cluster: &Cluster, lane: usize, at: usize) -> Access {
        let thread = self.thread(lane);
        Access {
            thread,
            unit: cluster.bulk_copies_of(self.number),
            clock: self.bulk_copies,
            instruction: at as u32,
        }
    }

    /// `to, map, coordinates, barrier[, blocks]`.
    fn tensor_load(
        &self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        sources: &[u64],
        (rank, to_many): (usize, bool),
        access: Access,
    ) -> Result<(), String> {
        let map = map_at(context, sources[1])?;
        let coordinates = coordinates(&sources[2..2 + rank]);
        let barrier = sources[2 + rank] as usize;
        let to = sources[0] as usize;
        let blocks = match to_many {
            true => sources[3 + rank] as u32,
            false => 1 << self.block,
        };
        let alignment = if map.row_bytes() == 128 {
            128
        } else {
            map.row_bytes()
        };
        if !to.is_multiple_of(alignment) {
            return Err(format!("copies a box to {to:#x}, which is not aligned"));
        }
        let rows = map.rows(&coordinates);
        for block in lanes_of(blocks) {
            let (unit, clock) = cluster.phases(block, barrier)?.copies();
            let access = Access {
                unit,
                clock,
                ..access
            };
            for row in &rows {
                let mut bytes = vec![0; map.row_bytes()];
                if row.elements > 0 {
                    let there = memory.read(row.address, row.elements * 2, cluster.number)?;
                    bytes[..there.len()].copy_from_slice(there);
                }
                for (piece, at) in bytes.chunks_exact(16).zip(map.pieces(to, row)) {
                    self.put(cluster, block, at as u64, piece, &access)?;
                }
            }
            cluster.phases(block, barrier)?.complete(map.box_bytes());
        }
        Ok(())
    }

    /// `map, coordinates, from`.
    fn tensor_store(
        &self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        sources: &[u64],
        rank: usize,
        access: &Access,
    ) -> Result<(), String> {
        let map = map_at(context, sources[0])?;
        let coordinates = coordinates(&sources[1..=rank]);
        let from = sources[1 + rank] as usize;
        for row in map.rows(&coordinates) {
            let mut bytes = vec![0; map.row_bytes()];
            for (piece, at) in bytes.chunks_exact_mut(16).zip(map.pieces(from, &row)) {
                self.get(cluster, at as u64, piece, access)?;
            }
            if row.elements > 0 {
                memory.write(row.address, &bytes[..row.elements * 2], cluster.number)?;
            }
        }
        Ok(())
    }

    /// This warp's 16 of the 64 rows.
    fn wgmma(
        &mut self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        instruction: &Instruction,
        shape: Wgmma,
        at: usize,
    ) -> Result<(), String> {
        const UNKNOWN: &str = "has an operand that lies as none of our tiles do";
        let [adds, right, left @ ..] = &*instruction.from else {
            return Err("has too few operands".to_owned());
        };
        let adds = self.read(context, cluster, *adds)[0] & 1 == 1;
        let thread = self.thread(0);
        let access = Access {
            thread,
            unit: cluster.products_of(self.number),
            clock: self.products,
            instruction: at as u32,
        };
        let right = self.read(context, cluster, *right)[0];
        let right = Operand::new(right, shape.right_by_column).ok_or(UNKNOWN)?;
        let elements = |cluster: &mut Cluster, operand: &Operand, outer: std::ops::Range<usize>| {
            let first = outer.start;
            let mut matrix = vec![[0.0_f32; 16]; outer.len()];
            for (place, outer, inner) in operand.pieces(outer) {
                let mut bytes = [0; 16];
                self.get(cluster, place as u64, &mut bytes, &access)?;
                for (i, element) in bytes.chunks_exact(2).enumerate() {
                    let bits = u16::from_le_bytes([element[0], element[1]]);
                    let x = from_half(shape.half, bits);
                    match operand.is_by_column() {
                        true => matrix[outer + i - first][inner] = x,
                        false => matrix[outer - first][inner + i] = x,
                    }
                }
            }
            Ok::<_, String>(matrix)
        };
        let right = elements(cluster, &right, 0..shape.columns)?;
        let rows = self.index % 4 * 16;
        let left: Vec<[f32; 16]> = if shape.left_in_registers {
            let registers: Vec<Lanes> = left
                .iter()
                .map(|&source| self.read(context, cluster, source))
                .collect();
            matrix::left(shape.half, 16, &registers).into()
        } else {
            let descriptor = self.read(context, cluster, left[0])[0];
            let operand = Operand::new(descriptor, shape.left_by_column).ok_or(UNKNOWN)?;
            // Pieces of a column are eight rows, of which this warp's begin at a multiple of 16.
            elements(cluster, &operand, rows..rows + 16)?
        };
        for (index, &to) in instruction.to.iter().enumerate() {
            let mut values = self.registers[to as usize];
            for (lane, value) in values.iter_mut().enumerate() {
                let (g, t) = (lane / 4, lane % 4);
                let (row, column) = (g + index % 4 / 2 * 8, index / 4 * 8 + 2 * t + index % 2);
                let pairs = left[row].iter().zip(&right[column]);
                let product: f32 = pairs.map(|(a, b)| a * b).sum();
                let before = if adds { f32_of(*value) } else { 0.0 };
                *value = bits_of(before + product);
            }
            self.write(to, &values, u32::MAX);
        }
        Ok(())
    }
}

/// Numbers of a lane that one instruction reads or writes.
const MAX_VECTOR: usize = 4;

const UNSIGNED: Type = Type {
    kind: Kind::Unsigned,
    bytes: 4,
};

fn number(bytes: &[u8], ty: Type) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(all);
    match ty.kind {
        Kind::Signed => sign_extend(bits, ty.bytes).cast_unsigned(),
        _ => bits,
    }
}

fn coordinates(bits: &[u64]) -> Vec<i64> {
    let signed = bits.iter().map(|&bits| (bits as u32).cast_signed());
    signed.map(i64::from).collect()
}

fn map_at<'a>(context: &'a Context<'_>, address: u64) -> Result<&'a super::TensorMap, String> {
    let at = address.wrapping_sub(PARAMETERS) as usize;
    let found = context.maps.iter().find(|(offset, _)| *offset == at);
    let map = found.map(|(_, map)| map);
    map.ok_or_else(|| format!("there is no tensor map at {address:#x}"))
}

/// The value of another lane, and whether there is one; of its own where there is none.
fn shuffle(kind: Shuffle, [values, lane_or_step, clamp]: &[Lanes; 3]) -> (Lanes, Lanes) {
    let mut found = [0; LANES];
    let result = std::array::from_fn(|lane| {
        let (step, clamp) = (lane_or_step[lane] as usize & 31, clamp[lane] as usize);
        let segment = clamp >> 8 & 31;
        let bound = clamp & 31;
        let most = lane & segment | bound & !segment;
        let least = lane & segment;
        let (from, is_there) = match kind {
            Shuffle::Up => (lane.wrapping_sub(step), lane >= step + most),
            Shuffle::Down => (lane + step, lane + step <= most),
            Shuffle::Xor => (lane ^ step, lane ^ step <= most),
            Shuffle::Index => {
                let from = least | step & !segment;
                (from, from <= most)
            }
        };
        found[lane] = u64::from(is_there);
        values[if is_there { from } else { lane }] & 0xffff_ffff
    });
    (result, found)
}
