//! What a graph needs before anything is placed: enough to bound the arena from below, in a
//! fraction of the time that placing takes.

use cinch_graph::{Graph, TensorId, aligned};

use crate::buffer::{Buffer, buffers};
use crate::{Options, Residence, persistent_order, reserved, sum};

/// The sizes and lifetimes that a plan would place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Tensors that keep their place over the whole step, with the bytes they need.
    pub persistent: Vec<(TensorId, u64)>,
    /// Tensors kept in host memory instead.
    pub host_bytes: u64,
    /// The transient buffers, in the order of their start.
    pub buffers: Vec<Buffer>,
}

impl Demand {
    pub fn new(graph: &Graph, options: Options) -> Self {
        let reserved = reserved(graph, options.target);
        let (persistent, host): (Vec<TensorId>, Vec<TensorId>) = persistent_order(graph)
            .partition(|&id| options.residence(graph.tensor(id).role) == Residence::Arena);
        let persistent = persistent.into_iter();
        Self {
            persistent: persistent.map(|id| (id, reserved[id.index()])).collect(),
            host_bytes: sum(host.iter().map(|id| aligned(reserved[id.index()]))),
            buffers: buffers(graph, options.target, &reserved),
        }
    }

    /// Their part of the arena.
    pub fn persistent_bytes(&self) -> u64 {
        sum(self.persistent.iter().map(|&(_, bytes)| aligned(bytes)))
    }
}

impl Buffer {
    /// What the buffer takes in the arena.
    pub fn aligned_bytes(&self) -> u64 {
        aligned(self.bytes)
    }
}
