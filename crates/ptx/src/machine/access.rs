//! Reads and writes of memory by threads.

use super::Context;
use super::cluster::Cluster;
use super::lanes::{LANES, Lanes, Words, sign_extend};
use super::memory::Memory;
use super::shadow::{Access, Does};
use super::warp::{LANE_BITS, Next, Now, UNKNOWN, Warp, lanes_of};
use crate::program::{Kind, Op, Space, Type};
use crate::{CONSTANTS, PARAMETERS, SHARED};

/// Numbers of a lane that one instruction reads or writes.
const MAX_VECTOR: usize = 4;

impl Warp {
    /// Loads, stores and sums.
    pub(super) fn touch(
        &mut self,
        now: &Now<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
    ) -> Result<Next, String> {
        match now.instruction.op {
            Op::Load {
                space,
                ty,
                offset,
                acquires,
            } => {
                let base = self.operand(now, cluster, 0);
                let count = now.instruction.to.len();
                let mut values = [[0; LANES]; MAX_VECTOR];
                // What several lanes read is read once.
                let alike = match space {
                    Space::Parameter => alike(&base, now.lanes),
                    Space::Shared if cluster.order.is_same(self.number) => alike(&base, now.lanes),
                    _ => LANE_BITS,
                };
                for lane in lanes_of(now.lanes) {
                    let lanes = alike[lane];
                    let first = lanes.trailing_zeros() as usize;
                    if first < lane {
                        for values in &mut values[..count] {
                            values[lane] = values[first];
                        }
                        continue;
                    }
                    let address = base[lane].wrapping_add_signed(offset);
                    let mut buffer = [0; 16];
                    let access = Access {
                        lanes,
                        ..self.access(now, cluster, lane)
                    };
                    self.load(
                        now.context,
                        cluster,
                        memory,
                        (space, address),
                        &mut buffer[..ty.bytes * count],
                        &access,
                        lane,
                    )?;
                    let all = u128::from_le_bytes(buffer);
                    for (piece, values) in values[..count].iter_mut().enumerate() {
                        values[lane] = number((all >> (8 * piece * ty.bytes)) as u64, ty);
                    }
                }
                for (&to, values) in now.instruction.to.iter().zip(&values) {
                    self.write(to, values, now.lanes);
                }
                if acquires {
                    // Others may have to write it first.
                    return Ok(Next::LookAgain);
                }
            }
            Op::Store {
                space, ty, offset, ..
            } => {
                let base = self.operand(now, cluster, 0);
                let count = now.instruction.from.len() - 1;
                let mut values = [[0; LANES]; MAX_VECTOR];
                let values = values.get_mut(..count).ok_or(UNKNOWN)?;
                for (piece, values) in values.iter_mut().enumerate() {
                    *values = self.operand(now, cluster, 1 + piece);
                }
                let ones = u64::MAX >> (64 - 8 * ty.bytes as u32);
                for lane in lanes_of(now.lanes) {
                    let address = base[lane].wrapping_add_signed(offset);
                    let all = values.iter().rev().fold(0_u128, |all, values| {
                        (all << (8 * ty.bytes)) | u128::from(values[lane] & ones)
                    });
                    let bytes = &all.to_le_bytes()[..ty.bytes * count];
                    let access = self.access(now, cluster, lane);
                    self.store(cluster, memory, (space, address), bytes, &access, lane)?;
                }
            }
            Op::AtomicAdd { space, offset } => {
                let (base, value) = (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let mut before = [0; LANES];
                for lane in lanes_of(now.lanes) {
                    let address = base[lane].wrapping_add_signed(offset);
                    let value = value[lane] as u32;
                    before[lane] = match space {
                        Space::Global => memory.add(address, value)?.into(),
                        Space::Shared => {
                            let (block, place) = cluster.place(self.block, address, 4)?;
                            let access = self.access(now, cluster, lane);
                            let known = cluster.order.view(access.thread);
                            let owner = &mut cluster.blocks[block];
                            let outcome =
                                owner.shadow.meets(place, 4, (Does::Add, &access, &known));
                            let word = &mut owner.shared[place..place + 4];
                            let old = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                            word.copy_from_slice(&old.wrapping_add(value).to_le_bytes());
                            cluster.note(outcome);
                            old.into()
                        }
                        _ => return Err("adds to memory of a kind that is not known".to_owned()),
                    };
                }
                self.write(now.instruction.to[0], &before, now.lanes);
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }

    #[expect(clippy::too_many_arguments, reason = "where, into what, by whom")]
    pub(super) fn load(
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
        if address & (bytes as u64 - 1) != 0 {
            return Err(format!(
                "reads {bytes} bytes at {address:#x}, which is not aligned"
            ));
        }
        let beyond = |what: &str| format!("reads {bytes} bytes at {address:#x}, beyond {what}");
        let copy = |from: &[u8], at: u64, into: &mut [u8]| -> Option<()> {
            let from = from.get(at as usize..at as usize + bytes)?;
            copy_few(from, into);
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
                copy_few(memory.read(address, bytes, cluster.number)?, into);
                Ok(())
            }
        }
    }

    pub(super) fn store(
        &mut self,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
        (space, address): (Space, u64),
        from: &[u8],
        access: &Access,
        lane: usize,
    ) -> Result<(), String> {
        let bytes = from.len();
        if address & (bytes as u64 - 1) != 0 {
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
    pub(super) fn get(
        &self,
        cluster: &mut Cluster,
        address: u64,
        into: &mut [u8],
        access: &Access,
    ) -> Result<(), String> {
        let (block, place) = cluster.place(self.block, address, into.len())?;
        let known = cluster.order.view_of(access.thread, access.lanes);
        let owner = &mut cluster.blocks[block];
        let what = (Does::Read, access, &known);
        let outcome = owner.shadow.meets(place, into.len(), what);
        copy_few(&owner.shared[place..place + into.len()], into);
        cluster.note(outcome);
        Ok(())
    }

    /// To shared memory.
    pub(super) fn put(
        &self,
        cluster: &mut Cluster,
        own: usize,
        address: u64,
        from: &[u8],
        access: &Access,
    ) -> Result<(), String> {
        let (block, place) = cluster.place(own, address, from.len())?;
        let known = cluster.order.view(access.thread);
        let owner = &mut cluster.blocks[block];
        let what = (Does::Write, access, &known);
        let outcome = owner.shadow.meets(place, from.len(), what);
        copy_few(from, &mut owner.shared[place..place + from.len()]);
        cluster.note(outcome);
        Ok(())
    }
}

/// Of each lane that the instruction is for: the lanes with the same address.
fn alike(base: &Lanes, lanes: u32) -> Words {
    const SLOTS: usize = 64;
    // By what an address leaves, the first lane that has it; another address may take its place.
    let mut slots = [LANES; SLOTS];
    let mut firsts = [0_u8; LANES];
    let mut alike = [0; LANES];
    for lane in lanes_of(lanes) {
        let address = base[lane];
        let slot = &mut slots[(address ^ address >> 6) as usize / 4 % SLOTS];
        let first = match *slot {
            first if first < LANES && base[first] == address => first,
            _ => lane,
        };
        *slot = first;
        firsts[lane] = first as u8;
        alike[first] |= 1 << lane;
    }
    for lane in lanes_of(lanes) {
        alike[lane] = alike[firsts[lane] as usize];
    }
    alike
}

/// Mostly they are as many as a register or a few have, which needs no call.
fn copy_few(from: &[u8], to: &mut [u8]) {
    macro_rules! of {
        ($($count:literal)*) => {
            match to.len() {
                $($count => {
                    if let (Some(from), Some(to)) =
                        (from.first_chunk::<$count>(), to.first_chunk_mut::<$count>())
                    {
                        *to = *from;
                    }
                })*
                _ => to.copy_from_slice(from),
            }
        };
    }
    of!(2 4 8 16);
}

fn number(bits: u64, ty: Type) -> u64 {
    let extended = sign_extend(bits, ty.bytes).cast_unsigned();
    match ty.kind {
        Kind::Signed => extended,
        _ => bits & u64::MAX >> (64 - 8 * ty.bytes as u32),
    }
}
