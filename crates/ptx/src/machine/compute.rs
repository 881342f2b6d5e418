//! What lanes compute from registers, their own and each other's.

use super::cluster::{Cluster, RANK_SHIFT};
use super::lanes::{
    LANES, Words, apply, apply_wide, compare, compare_halves, compare_wide, convert, convert_pair,
    insert_bits,
};
use super::warp::{Next, Now, UNKNOWN, Warp, lanes_of, lanes_with};
use crate::program::{Function, Op, Reduction, Shuffle, Source, Space};
use crate::{PARAMETERS, SHARED};

const NOT_OF_TYPE: &str = "is not known for this type";

impl Warp {
    /// Writes registers, and touches nothing else.
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each kind of instruction"
    )]
    pub(super) fn compute(&mut self, now: &Now<'_>, cluster: &Cluster) -> Result<Next, String> {
        match now.instruction.op {
            Op::Move(4) => {
                let mut room = [0; LANES];
                let value = *self.narrow(now, cluster, 0, &mut room);
                self.write_words(now.instruction.to[0], &value, now.lanes);
            }
            Op::Move(bytes) => {
                let ones = u64::MAX >> (64 - 8 * bytes as u32);
                let value = self.operand(now, cluster, 0).map(|value| value & ones);
                self.write(now.instruction.to[0], &value, now.lanes);
            }
            Op::Pack(bytes) => {
                let mut packed = [0; LANES];
                for piece in 0..now.instruction.from.len() {
                    let values = self.operand(now, cluster, piece);
                    let shift = 8 * (bytes * piece) as u32;
                    let ones = u64::MAX >> (64 - 8 * bytes as u32);
                    for (packed, value) in packed.iter_mut().zip(values) {
                        *packed |= (value & ones) << shift;
                    }
                }
                self.write(now.instruction.to[0], &packed, now.lanes);
            }
            Op::Unpack(bytes) => {
                let value = self.operand(now, cluster, 0);
                for (piece, &to) in now.instruction.to.iter().enumerate() {
                    let shift = 8 * (bytes * piece) as u32;
                    let ones = u64::MAX >> (64 - 8 * bytes as u32);
                    self.write(to, &value.map(|value| value >> shift & ones), now.lanes);
                }
            }
            Op::Lane(function, ty) => {
                let to = now.instruction.to[0];
                let from = |source: usize| {
                    let source = now.instruction.from.get(source);
                    source.copied().unwrap_or(Source::Value(0))
                };
                if to.is_wide {
                    let [a, b, c] =
                        [0, 1, 2].map(|source| self.read(now.context, cluster, from(source)));
                    let result = apply_wide(function, ty, [&a, &b, &c]);
                    self.write(to, &result.ok_or(NOT_OF_TYPE)?, now.lanes);
                } else {
                    let mut rooms = [[0; LANES]; 4];
                    let [a, b, c, d] = &mut rooms;
                    let a = self.words(now.context, cluster, from(0), a);
                    let b = self.words(now.context, cluster, from(1), b);
                    let c = self.words(now.context, cluster, from(2), c);
                    let result = match function {
                        Function::InsertBits => {
                            let d = self.words(now.context, cluster, from(3), d);
                            Some(insert_bits([a, b, c, d]))
                        }
                        _ => apply(function, ty, [a, b, c]),
                    };
                    self.write_words(to, &result.ok_or(NOT_OF_TYPE)?, now.lanes);
                }
            }
            Op::Compare(comparison, ty, unordered) => {
                let result = if ty.bytes == 8 {
                    let (a, b) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                    compare_wide(comparison, ty.kind, unordered, &a, &b)
                } else {
                    let (mut a, mut b) = ([0; LANES], [0; LANES]);
                    let a = self.narrow(now, cluster, 0, &mut a);
                    let b = self.narrow(now, cluster, 1, &mut b);
                    compare(comparison, ty, unordered, a, b)
                };
                self.write_words(now.instruction.to[0], &result, now.lanes);
            }
            Op::CompareHalves(half, comparison) | Op::CompareHalvesApart(half, comparison) => {
                let (mut a, mut b) = ([0; LANES], [0; LANES]);
                let a = self.narrow(now, cluster, 0, &mut a);
                let b = self.narrow(now, cluster, 1, &mut b);
                let both = compare_halves(half, comparison, a, b);
                if matches!(now.instruction.op, Op::CompareHalves(..)) {
                    self.write_words(now.instruction.to[0], &both, now.lanes);
                    return Ok(Next::Go);
                }
                for (part, &to) in now.instruction.to.iter().enumerate() {
                    let holds = both.map(|ones| ones >> (16 * part) & 1);
                    self.write_words(to, &holds, now.lanes);
                }
            }
            Op::Convert {
                to,
                from: ty,
                rounding,
                saturates,
                half,
            } => {
                let value = self.operand(now, cluster, 0);
                let result = convert(to, ty, rounding, saturates, half, &value);
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::ConvertPair(half) => {
                let (mut a, mut b) = ([0; LANES], [0; LANES]);
                let a = self.narrow(now, cluster, 0, &mut a);
                let b = self.narrow(now, cluster, 1, &mut b);
                let result = convert_pair(half, a, b);
                self.write_words(now.instruction.to[0], &result, now.lanes);
            }
            Op::ToGeneric(space) => {
                let start = if space == Space::Shared {
                    SHARED
                } else {
                    PARAMETERS
                };
                let value = self.operand(now, cluster, 0).map(|value| value + start);
                self.write(now.instruction.to[0], &value, now.lanes);
            }
            Op::ClusterAddress => {
                let (address, rank) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let there = std::array::from_fn(|lane| {
                    let within = address[lane] & ((1 << RANK_SHIFT) - 1);
                    ((rank[lane] + 1) << RANK_SHIFT) + within
                });
                self.write(now.instruction.to[0], &there, now.lanes);
            }
            Op::Shuffle(kind) => {
                let mut rooms = [[0; LANES]; 3];
                let [values, steps, clamps] = &mut rooms;
                let values = self.narrow(now, cluster, 0, values);
                let steps = self.narrow(now, cluster, 1, steps);
                let clamps = self.narrow(now, cluster, 2, clamps);
                let (values, found) = shuffle(kind, values, steps, clamps);
                self.write_words(now.instruction.to[0], &values, now.lanes);
                if let Some(&to) = now.instruction.to.get(1) {
                    self.write_words(to, &found, now.lanes);
                }
            }
            Op::AnyVote | Op::Ballot => {
                let mut rooms = [[0; LANES]; 2];
                let [votes, members] = &mut rooms;
                let votes = self.narrow(now, cluster, 0, votes);
                let members = self.narrow(now, cluster, 1, members);
                let ballot = lanes_with(votes) & now.lanes;
                let is_any = now.instruction.op == Op::AnyVote;
                let result = members.map(|members| match is_any {
                    true => u32::from(ballot & members != 0),
                    false => ballot & members,
                });
                self.write_words(now.instruction.to[0], &result, now.lanes);
            }
            Op::Reduce(reduction) => {
                let mut rooms = [[0; LANES]; 2];
                let [values, members] = &mut rooms;
                let values = self.narrow(now, cluster, 0, values);
                let members = self.narrow(now, cluster, 1, members);
                let result = members.map(|members| {
                    let of = lanes_of(members & now.lanes).map(|lane| values[lane]);
                    match reduction {
                        Reduction::AddSigned => of.fold(0, u32::wrapping_add),
                        Reduction::MaxUnsigned => of.max().unwrap_or(0),
                        Reduction::MinUnsigned => of.min().unwrap_or(0),
                    }
                });
                self.write_words(now.instruction.to[0], &result, now.lanes);
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }
}

/// The value of another lane, and whether there is one; of its own where there is none.
fn shuffle(kind: Shuffle, values: &Words, steps: &Words, clamps: &Words) -> (Words, Words) {
    let mut found = [0; LANES];
    let result = std::array::from_fn(|lane| {
        let (step, clamp) = (steps[lane] as usize & 31, clamps[lane] as usize);
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
        found[lane] = u32::from(is_there);
        values[if is_there { from } else { lane }]
    });
    (result, found)
}
