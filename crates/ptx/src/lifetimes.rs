//! Which registers may lie in the same place: those that are never needed at the same time. A kernel
//! names thousands, of which some dozens are in use at once, and these stay in the nearest cache.

use std::collections::HashMap;

use crate::program::{Instruction, Op, Register, Source};

/// Numbers anew what registers instructions read and write, and gives how many rows there are: one
/// for each narrow register, two for each wide one. The first is nobody's.
pub(crate) fn assign(code: &mut [Instruction]) -> usize {
    let intervals = intervals(code);
    let mut places = HashMap::new();
    let mut end = Register::SINK.at + 1;
    for is_wide in [false, true] {
        let side = if is_wide { 2 } else { 1 };
        let mut free = Vec::new();
        // By the last instruction that needs them.
        let mut used: Vec<(usize, u32)> = Vec::new();
        for interval in &intervals {
            if interval.register.is_wide != is_wide {
                continue;
            }
            used.retain(|&(last, at)| {
                let is_over = last < interval.first;
                if is_over {
                    free.push(at);
                }
                !is_over
            });
            let at = free.pop().unwrap_or_else(|| {
                end += side;
                end - side
            });
            used.push((interval.last, at));
            places.insert(interval.register, Register { at, is_wide });
        }
    }
    let replace = |register: &mut Register| {
        *register = places.get(register).copied().unwrap_or(Register::SINK);
    };
    for instruction in code {
        if let Some((register, _)) = &mut instruction.guard {
            replace(register);
        }
        instruction.to.iter_mut().for_each(replace);
        for source in &mut instruction.from {
            if let Source::Register(register) = source {
                replace(register);
            }
        }
    }
    end as usize
}

/// From the first instruction that needs a register to the last one.
struct Interval {
    register: Register,
    first: usize,
    last: usize,
}

/// Instructions that follow each other, and what is needed where they begin and where they end.
struct Block {
    begin: usize,
    end: usize,
    next: Vec<usize>,
    before: Bits,
    after: Bits,
}

#[derive(Clone, PartialEq)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    fn set(&mut self, at: usize, value: bool) {
        let bit = 1 << (at % 64);
        match value {
            true => self.0[at / 64] |= bit,
            false => self.0[at / 64] &= !bit,
        }
    }

    fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine |= theirs;
        }
    }

    fn ones(&self) -> impl Iterator<Item = usize> {
        let words = self.0.iter().enumerate();
        words.flat_map(|(index, &word)| {
            let bits = (0..64).filter(move |bit| word >> bit & 1 == 1);
            bits.map(move |bit| index * 64 + bit)
        })
    }
}

fn read(instruction: &Instruction) -> impl Iterator<Item = Register> {
    let guard = instruction.guard.iter().map(|(register, _)| *register);
    let sources = instruction.from.iter().filter_map(|source| match source {
        Source::Register(register) => Some(*register),
        _ => None,
    });
    // What these write may be what was there before: sums that are added to, and what a lane keeps for
    // which the instruction is not.
    let keeps = instruction.guard.is_some() || matches!(instruction.op, Op::Wgmma(_));
    let kept = instruction.to.iter().copied().filter(move |_| keeps);
    guard.chain(sources).chain(kept)
}

/// By their first instructions.
fn intervals(code: &[Instruction]) -> Vec<Interval> {
    let mut numbers: HashMap<Register, usize> = HashMap::new();
    let mut registers = Vec::new();
    for instruction in code {
        for register in read(instruction).chain(instruction.to.iter().copied()) {
            if register != Register::SINK && !numbers.contains_key(&register) {
                numbers.insert(register, registers.len());
                registers.push(register);
            }
        }
    }
    let number = |register: Register| numbers.get(&register).copied();
    let blocks = needed(code, registers.len(), number);
    let mut ranges = vec![(usize::MAX, 0); registers.len()];
    let mut touch = |register: usize, at: usize| {
        let (first, last) = ranges[register];
        ranges[register] = (first.min(at), last.max(at));
    };
    for (at, instruction) in code.iter().enumerate() {
        let touched = read(instruction).chain(instruction.to.iter().copied());
        touched
            .filter_map(number)
            .for_each(|register| touch(register, at));
    }
    for block in &blocks {
        block
            .before
            .ones()
            .for_each(|register| touch(register, block.begin));
        block
            .after
            .ones()
            .for_each(|register| touch(register, block.end - 1));
    }
    let intervals = registers.iter().zip(ranges);
    let mut intervals: Vec<_> = intervals
        .map(|(&register, (first, last))| Interval {
            register,
            first,
            last,
        })
        .collect();
    intervals.sort_by_key(|interval| interval.first);
    intervals
}

/// Blocks with what is needed where they begin and end.
fn needed(
    code: &[Instruction],
    count: usize,
    number: impl Fn(Register) -> Option<usize>,
) -> Vec<Block> {
    let mut begins: Vec<usize> = vec![0];
    for (at, instruction) in code.iter().enumerate() {
        match instruction.op {
            Op::Branch(target) => begins.extend([target, at + 1]),
            Op::Return => begins.push(at + 1),
            _ => {}
        }
    }
    begins.retain(|&begin| begin < code.len());
    begins.sort_unstable();
    begins.dedup();
    let block_at: HashMap<usize, usize> = begins.iter().copied().zip(0..).collect();
    let ends = begins.iter().skip(1).copied().chain([code.len()]);
    let blocks = begins.iter().zip(ends);
    let mut blocks: Vec<Block> = blocks
        .map(|(&begin, end)| {
            let last = &code[end - 1];
            let goes_on = last.guard.is_some() || !matches!(last.op, Op::Branch(_) | Op::Return);
            let mut next = Vec::new();
            if let Op::Branch(target) = last.op {
                next.push(target);
            }
            if goes_on {
                next.push(end);
            }
            Block {
                begin,
                end,
                next: next
                    .iter()
                    .filter_map(|at| block_at.get(at).copied())
                    .collect(),
                before: Bits::new(count),
                after: Bits::new(count),
            }
        })
        .collect();
    loop {
        let mut has_changed = false;
        for index in (0..blocks.len()).rev() {
            let mut after = Bits::new(count);
            for &next in &blocks[index].next {
                after.add(&blocks[next].before);
            }
            let block = &mut blocks[index];
            if after == block.after && block.before.0.iter().any(|&word| word != 0) {
                continue;
            }
            let mut before = after.clone();
            for instruction in code[block.begin..block.end].iter().rev() {
                let written = instruction.to.iter().copied();
                written
                    .filter_map(&number)
                    .for_each(|register| before.set(register, false));
                read(instruction)
                    .filter_map(&number)
                    .for_each(|register| before.set(register, true));
            }
            has_changed |= before != block.before;
            block.after = after;
            block.before = before;
        }
        if !has_changed {
            return blocks;
        }
    }
}
