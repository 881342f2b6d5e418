//! What lanes compute from registers, their own and each other's.

use super::cluster::{Cluster, RANK_SHIFT};
use super::lanes::{
    LANES, Lanes, apply, compare, compare_halves, convert, convert_pair, insert_bits, permute_bytes,
};
use super::warp::{Next, Now, UNKNOWN, Warp, lanes_of};
use crate::program::{Function, Op, Reduction, Shuffle, Space};
use crate::{PARAMETERS, SHARED};

impl Warp {
    /// Writes registers, and touches nothing else.
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each kind of instruction"
    )]
    pub(super) fn compute(&mut self, now: &Now<'_>, cluster: &Cluster) -> Result<Next, String> {
        match now.instruction.op {
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
                let read = |source: usize| match now.instruction.from.get(source) {
                    Some(&source) => self.read(now.context, cluster, source),
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
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::Compare(comparison, ty, unordered) => {
                let (a, b) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let result = compare(comparison, ty, unordered, &a, &b);
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::CompareHalves(half, comparison) => {
                let (a, b) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let result = compare_halves(half, comparison, &a, &b);
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::CompareHalvesApart(half, comparison) => {
                let (a, b) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let both = compare_halves(half, comparison, &a, &b);
                for (part, &to) in now.instruction.to.iter().enumerate() {
                    let holds = both.map(|ones| ones >> (16 * part) & 1);
                    self.write(to, &holds, now.lanes);
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
                let (a, b) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                self.write(
                    now.instruction.to[0],
                    &convert_pair(half, &a, &b),
                    now.lanes,
                );
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
                let sources: [Lanes; 3] =
                    std::array::from_fn(|source| self.operand(now, cluster, source));
                let (values, found) = shuffle(kind, &sources);
                self.write(now.instruction.to[0], &values, now.lanes);
                if let Some(&to) = now.instruction.to.get(1) {
                    self.write(to, &found, now.lanes);
                }
            }
            Op::AnyVote | Op::Ballot => {
                let (votes, members) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let ballot = lanes_of(now.lanes).fold(0_u32, |ballot, lane| {
                    ballot | (votes[lane] as u32 & 1) << lane
                });
                let is_any = now.instruction.op == Op::AnyVote;
                let result = members.map(|members| {
                    let ballot = ballot & members as u32;
                    if is_any {
                        u64::from(ballot != 0)
                    } else {
                        ballot.into()
                    }
                });
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::Reduce(reduction) => {
                let (values, members) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let result = members.map(|members| {
                    let of = lanes_of(members as u32 & now.lanes).map(|lane| values[lane] as u32);
                    let result = match reduction {
                        Reduction::AddSigned => of.fold(0, u32::wrapping_add),
                        Reduction::MaxUnsigned => of.max().unwrap_or(0),
                        Reduction::MinUnsigned => of.min().unwrap_or(0),
                    };
                    result.into()
                });
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }
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
