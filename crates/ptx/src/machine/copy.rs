//! Copies between global and shared memory that run beside the threads that start them.

use super::cluster::Cluster;
use super::lanes::Lanes;
use super::memory::Memory;
use super::shadow::{Access, Does};
use super::warp::{Next, Now, UNKNOWN, Warp, lanes_of};
use super::{Context, TensorMap};
use crate::PARAMETERS;
use crate::program::Op;

impl Warp {
    /// Starts copies, or waits for them.
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each kind of instruction"
    )]
    pub(super) fn copy(
        &mut self,
        now: &Now<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
    ) -> Result<Next, String> {
        match now.instruction.op {
            Op::TensorLoad { rank, to_many } => {
                let sources: Vec<Lanes> = (0..now.instruction.from.len())
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in lanes_of(now.lanes) {
                    let each: Vec<u64> = sources.iter().map(|values| values[lane]).collect();
                    let access = self.access(now, cluster, lane);
                    self.tensor_load(now.context, cluster, memory, &each, (rank, to_many), access)?;
                }
            }
            Op::TensorStore { rank } => {
                let sources: Vec<Lanes> = (0..now.instruction.from.len())
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in lanes_of(now.lanes) {
                    let each: Vec<u64> = sources.iter().map(|values| values[lane]).collect();
                    let access = self.bulk_access(cluster, lane, now.at);
                    self.tensor_store(now.context, cluster, memory, &each, rank, &access)?;
                }
            }
            Op::BulkLoad => {
                let sources: Vec<Lanes> = (0..4)
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in lanes_of(now.lanes) {
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
                        ..self.access(now, cluster, lane)
                    };
                    self.put(cluster, self.block, to, &buffer, &access)?;
                    cluster.phases(self.block, barrier)?.complete(bytes);
                }
            }
            Op::BulkStore { adds } => {
                let sources: Vec<Lanes> = (0..3)
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in lanes_of(now.lanes) {
                    let [to, address, bytes] = std::array::from_fn(|source| sources[source][lane]);
                    let access = self.bulk_access(cluster, lane, now.at);
                    let mut buffer = vec![0; bytes as usize];
                    self.get(cluster, address, &mut buffer, &access)?;
                    match adds {
                        true => memory.add_floats(to, &buffer)?,
                        false => memory.write(to, &buffer, cluster.number)?,
                    }
                }
            }
            Op::BulkCommit => {
                if now.lanes.count_ones() > 1 {
                    return Err("closes groups of copies of several lanes".to_owned());
                }
                self.bulk_copies += 1;
            }
            Op::BulkWait(left) => {
                let ended = (self.bulk_copies - 1).saturating_sub(left);
                let unit = cluster.bulk_copies_of(self.number);
                let order = &mut cluster.order;
                order.learn_end(self.number, now.lanes, unit, ended);
            }
            Op::AsyncCopy { offset } => {
                let sources: Vec<Lanes> = (0..now.instruction.from.len())
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in lanes_of(now.lanes) {
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
                        lanes: 1,
                        unit: cluster.async_copies_of(thread),
                        clock: self.async_copies[lane],
                        instruction: now.at as u32,
                    };
                    let (block, place) = cluster.place(self.block, to, bytes)?;
                    let known = cluster.order.view(thread);
                    let owner = &mut cluster.blocks[block];
                    let what = (Does::Write, &access, &known);
                    let outcome = owner.shadow.meets(place, bytes, what);
                    owner.shared[place..place + bytes].copy_from_slice(&buffer);
                    cluster.note(outcome);
                }
            }
            Op::AsyncCommit => {
                for lane in lanes_of(now.lanes) {
                    self.async_copies[lane] += 1;
                }
            }
            Op::AsyncWait(left) => {
                for lane in lanes_of(now.lanes) {
                    // For all, those of no group yet are waited for too.
                    if left.is_none() {
                        self.async_copies[lane] += 1;
                    }
                    let closed = self.async_copies[lane] - 1;
                    let ended = closed.saturating_sub(left.unwrap_or(0));
                    cluster.order.learn_copied(self.thread(lane), ended);
                }
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }

    fn bulk_access(&self, cluster: &Cluster, lane: usize, at: usize) -> Access {
        let thread = self.thread(lane);
        Access {
            thread,
            lanes: 1 << lane,
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
}

fn coordinates(bits: &[u64]) -> Vec<i64> {
    let signed = bits.iter().map(|&bits| (bits as u32).cast_signed());
    signed.map(i64::from).collect()
}

fn map_at<'a>(context: &'a Context<'_>, address: u64) -> Result<&'a TensorMap, String> {
    let at = address.wrapping_sub(PARAMETERS) as usize;
    let found = context.maps.iter().find(|(offset, _)| *offset == at);
    let map = found.map(|(_, map)| map);
    map.ok_or_else(|| format!("there is no tensor map at {address:#x}"))
}
