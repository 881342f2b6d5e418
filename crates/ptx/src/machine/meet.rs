//! Where threads wait for each other, and for copies.

use super::cluster::{Cluster, RANK_SHIFT};
use super::lanes::LANES;
use super::warp::{Next, Now, UNKNOWN, Wait, Warp, lanes_of};
use crate::program::Op;

impl Warp {
    /// Arrives, waits, or lets others know.
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each kind of instruction"
    )]
    pub(super) fn meet_others(
        &mut self,
        now: &Now<'_>,
        cluster: &mut Cluster,
    ) -> Result<Next, String> {
        match now.instruction.op {
            Op::Barrier | Op::BarrierArrive | Op::BarrierAll => {
                let first = now.lanes.trailing_zeros() as usize;
                let number = self.operand(now, cluster, 0)[first] as usize;
                let count = now.instruction.from.len() > 1;
                let says = match now.instruction.op {
                    Op::BarrierAll => self.operand(now, cluster, 2),
                    _ => [1; LANES],
                };
                let expected = match count {
                    true => self.operand(now, cluster, 1)[first] as usize,
                    false => 0,
                };
                let Cluster { blocks, order, .. } = cluster;
                let block = &mut blocks[self.block];
                let expected = match count {
                    true => expected,
                    false => now.context.threads() - block.ended,
                };
                let Some(meeting) = block.barriers.get_mut(number) else {
                    return Err(format!("there is no barrier {number}"));
                };
                let generation = meeting.generation;
                meeting.arrive(self.number, now.lanes, order);
                meeting.say(lanes_of(now.lanes).all(|lane| says[lane] & 1 == 1));
                meeting.end_with(expected);
                if now.instruction.op != Op::BarrierArrive {
                    if now.lanes != now.all {
                        self.split(now.group, now.lanes);
                    }
                    return Ok(Next::Wait(Wait::Barrier { number, generation }));
                }
            }
            Op::WarpBarrier => {
                // Those of one mask meet; there may be several masks at once.
                let members = self.operand(now, cluster, 0);
                let mut left = now.lanes;
                while left != 0 {
                    let first = left.trailing_zeros() as usize;
                    let group = members[first] as u32 & now.lanes | 1 << first;
                    cluster.order.meet(self.number, group);
                    left &= !group;
                }
            }
            Op::ClusterArrive => {
                self.cluster_generation = cluster.meeting.generation;
                let Cluster { meeting, order, .. } = cluster;
                meeting.arrive(self.number, now.lanes, order);
                let expected = cluster.num_threads(now.context) - cluster.ended();
                cluster.meeting.end_with(expected);
            }
            Op::ClusterWait => {
                let generation = self.cluster_generation;
                return Ok(Next::Wait(Wait::Cluster { generation }));
            }
            Op::BarrierInit => {
                let (address, count) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                for lane in lanes_of(now.lanes) {
                    cluster.init(self.block, address[lane] as usize, count[lane] as u32)?;
                }
            }
            Op::ArriveShared => {
                let address = self.operand(now, cluster, 0);
                for lane in lanes_of(now.lanes) {
                    let address = address[lane] as usize;
                    cluster.arrive(self.block, address, self.number, lane)?;
                }
            }
            Op::ArriveCluster => {
                let address = self.operand(now, cluster, 0);
                for lane in lanes_of(now.lanes) {
                    let rank = (address[lane] >> RANK_SHIFT) as usize;
                    let block = if rank == 0 { self.block } else { rank - 1 };
                    let within = (address[lane] & ((1 << RANK_SHIFT) - 1)) as usize;
                    cluster.arrive(block, within, self.number, lane)?;
                }
            }
            Op::ExpectBytes(arrives) => {
                let (address, bytes) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                for lane in lanes_of(now.lanes) {
                    let at = address[lane] as usize;
                    cluster.phases(self.block, at)?.expect(bytes[lane] as u32);
                    if arrives {
                        cluster.arrive(self.block, at, self.number, lane)?;
                    }
                }
            }
            Op::TryWait => {
                let (address, parity) =
                    (self.operand(now, cluster, 0), self.operand(now, cluster, 1));
                let first = now.lanes.trailing_zeros() as usize;
                // Lanes that wait for something else have their turn afterwards.
                let alike = lanes_of(now.lanes)
                    .filter(|&lane| {
                        (address[lane], parity[lane]) == (address[first], parity[first])
                    })
                    .fold(0, |mask, lane| mask | 1 << lane);
                if alike != now.all {
                    self.split(now.group, alike);
                }
                let address = address[first] as usize;
                let parity = parity[first] as u32;
                cluster.phases(self.block, address)?;
                let Cluster { blocks, order, .. } = cluster;
                let Some(told) = blocks[self.block].phases[&address].over(parity) else {
                    return Ok(Next::Wait(Wait::Phase { address, parity }));
                };
                order.learn(self.number, alike, told);
                self.write(now.instruction.to[0], &[1; LANES], alike);
            }
            Op::ProxyFence => {
                cluster.order.publish(self.number, now.lanes);
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }
}
