//! What exchanging messages takes besides the arena.

use cinch_config::ShardedPart;
use cinch_graph::Target;

/// What a rank's device loses to the network, by what of a step is cut: NCCL connects at the first
/// use what a collective needs, and other levels have other collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkBytes([u64; ShardedPart::ALL.len()]);

impl NetworkBytes {
    /// Where nothing was measured. On a GPU: what NCCL 2.32 took for each of two ranks on an H200,
    /// rounded up to the megabyte. On the CPU messages are sent from where tensors lie.
    pub fn assumed(target: Target) -> Self {
        match target {
            Target::Cpu => Self([0; 4]),
            Target::Cuda => Self([1542, 1578, 1579, 1582].map(|mebibytes: u64| mebibytes << 20)),
        }
    }

    pub fn of(self, part: ShardedPart) -> u64 {
        self.0[part as usize]
    }

    /// With what was measured for some of them.
    pub fn with(mut self, part: ShardedPart, bytes: u64) -> Self {
        self.0[part as usize] = bytes;
        self
    }
}
