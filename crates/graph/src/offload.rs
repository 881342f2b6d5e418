//! Frozen weights in host memory, as a pass over a graph whose nodes stand in their final order:
//! the matrices of each block, or their codes and scales, are fetched into the arena before the
//! block's forward and again before its backward, each time while the block before it runs.
//!
//! What stands outside the blocks, what is trained, and vectors (norms, biases) stay where they are: they are read too
//! often, or too small, for the bus.

use crate::differentiate::TrainingGraph;
use crate::graph::{Graph, Node, Role, TensorId};
use crate::op::Fetch;
use crate::parameter::{Parameter, Storage};
use crate::visit::{Beside, bring_ahead, visits};

impl Graph {
    /// The graph with the frozen matrices of its blocks in host memory.
    #[must_use]
    pub fn offload_frozen(&self) -> Self {
        let mut graph = self.clone();
        let visits = visits(&graph, &matrices(&graph));
        for visit in &visits {
            for &id in &visit.weights {
                graph.tensors[id.index()].role = Role::Offloaded;
            }
        }
        bring_ahead(&mut graph, &visits, fetch);
        graph
    }
}

impl TrainingGraph {
    /// The step with the frozen matrices of its blocks in host memory. Recomputation, and updates
    /// inside the backward, have been chosen before.
    #[must_use]
    pub fn offload_frozen(&self) -> Self {
        Self {
            graph: self.graph.offload_frozen(),
            ..self.clone()
        }
    }
}

/// Which tensors are matrices of frozen parameters, as they are kept.
fn matrices(graph: &Graph) -> Vec<bool> {
    let mut matrices = vec![false; graph.tensors.len()];
    let frozen = |p: &&Parameter| p.storage != Storage::Trained && p.shape.rank() > 1;
    for parameter in graph.parameters.iter().filter(frozen) {
        for id in [parameter.master].iter().chain(&parameter.code_scales) {
            matrices[id.index()] = true;
        }
    }
    // One that is also read outside the blocks would be needed all the time.
    for node in graph.nodes.iter().filter(|node| node.block.is_none()) {
        for id in &node.inputs {
            matrices[id.index()] = false;
        }
    }
    matrices
}

/// The node that fetches weights for a visit.
fn fetch(graph: &mut Graph, weights: &[TensorId], beside: Beside) -> Node {
    let mut outputs = Vec::with_capacity(weights.len());
    for &id in weights {
        let (name, ty) = (format!("{}.fetched", graph.tensor(id).name), graph.ty(id));
        outputs.push(graph.add_tensor(name, ty, Role::Activation));
    }
    Node {
        op: Fetch.into(),
        name: format!("fetch.{}", beside.number),
        inputs: weights.to_vec(),
        outputs,
        block: beside.block,
        phase: beside.phase,
    }
}
