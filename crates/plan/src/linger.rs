//! Room that is left over gives time. What the gradient of a weight is made of is mostly read there
//! for the last time, and its place would be somebody else's with the next node. Where the arena has
//! room beside what is alive, such places stay free for some nodes more, so that an executor may
//! compute the gradient beside these. The arena stays as large as it is.

use cinch_graph::{Graph, Node, Role, aligned};

use crate::Plan;
use crate::buffer::{Buffer, Owner};
use crate::place::place_within;
use crate::summary::timeline;

/// For how many nodes places stay free, at most. Fewer are tried where so many do not fit.
const NODES: [usize; 3] = [16, 8, 4];

impl Plan {
    /// Keeps places of what gradients are made of free for longer, inside an arena of
    /// `arena_bytes`. `graph` is the one that was planned.
    pub fn linger(&mut self, graph: &Graph, arena_bytes: u64) {
        let room = arena_bytes.saturating_sub(self.persistent_bytes);
        let offsets = NODES.into_iter().find_map(|nodes| {
            let longer = extended(graph, &self.buffers, room, nodes);
            place_within(&longer, room)
        });
        if let Some(offsets) = offsets {
            self.put(graph, &offsets);
        }
    }
}

/// Whether nothing but gradients comes out of a node: nobody reads them before the backward is over.
fn is_gradient(graph: &Graph, node: &Node) -> bool {
    let mut outputs = node.outputs.iter();
    outputs.all(|&id| graph.tensor(id).role == Role::Gradient)
}

/// The buffers, of which some live longer, as far as no more than `room` is in use at once.
fn extended(graph: &Graph, buffers: &[Buffer], room: u64, nodes: usize) -> Vec<Buffer> {
    let mut buffers = buffers.to_vec();
    let mut live = timeline(&buffers, graph.nodes.len(), 0, aligned);
    // The buffers of which a tensor or a node is the last owner.
    let mut of_tensor = vec![None; graph.tensors.len()];
    let mut of_node = vec![None; graph.nodes.len()];
    for (slot, buffer) in buffers.iter().enumerate() {
        match buffer.owners.last() {
            Some(Owner::Tensor(id)) => of_tensor[id.index()] = Some(slot),
            Some(Owner::Workspace(node)) => of_node[node.index()] = Some(slot),
            None => {}
        }
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        if !is_gradient(graph, node) {
            continue;
        }
        let until = (index + nodes).min(graph.nodes.len() - 1);
        let inputs = node.inputs.iter().filter_map(|id| of_tensor[id.index()]);
        for slot in inputs.chain(of_node[index]) {
            let buffer = &mut buffers[slot];
            let bytes = aligned(buffer.bytes);
            while buffer.end < until && live[buffer.end + 1].saturating_add(bytes) <= room {
                buffer.end += 1;
                live[buffer.end] += bytes;
            }
        }
    }
    buffers
}

#[cfg(test)]
mod tests {
    use cinch_graph::op::{GradientFormat, MomentFormat};
    use cinch_graph::{DType, Init, Optimizer, Target, TensorId, TrainingGraph, differentiate};

    use super::*;
    use crate::{Options, Placement};

    fn step() -> TrainingGraph {
        let mut graph = Graph::new(DType::Bf16);
        let mut x = graph.batch("x", [32, 64], DType::Bf16);
        for layer in 0..12 {
            let weight = graph.weight(&format!("weight{layer}"), [64, 64], Init::Ones);
            x = graph.linear(&format!("y{layer}"), x, weight, None).unwrap();
        }
        let head = graph.weight("head", [16, 64], Init::Ones);
        let targets = graph.batch("targets", [32], DType::I32);
        graph
            .cross_entropy("loss", x, head, targets, 0.0, None)
            .unwrap();
        let optimizer = Optimizer {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            max_norm: Some(1.0),
            moments: MomentFormat::Full,
            gradients: GradientFormat::Full,
        };
        differentiate(graph, &optimizer).unwrap()
    }

    /// Of gradients whose inputs are transient: for how many nodes all of them stay as they are.
    fn free_nodes(graph: &Graph, plan: &Plan) -> Vec<usize> {
        let place = |id: TensorId| plan.placement(id);
        let meet = |a: Placement, b: Placement| a.offset < b.end() && b.offset < a.end();
        let gradients = graph.nodes.iter().enumerate();
        let gradients = gradients.filter(|(_, node)| {
            let transient = |id: &TensorId| graph.tensor(*id).role == Role::Activation;
            is_gradient(graph, node) && node.inputs.iter().all(transient)
        });
        let free = gradients.map(|(index, node)| {
            let inputs = || node.inputs.iter().filter_map(|&id| place(id));
            let writes = |later: usize| {
                let outputs = graph.nodes[later].outputs.iter();
                let outputs = outputs.filter_map(|&id| place(id));
                let mut written = outputs.chain(plan.workspace(later));
                written.any(|other| inputs().any(|input| meet(input, other)))
            };
            let later = index + 1..graph.nodes.len();
            later.take_while(|&later| !writes(later)).count()
        });
        free.collect()
    }

    #[test]
    fn gradients_have_time_where_there_is_room() {
        let graph = step();
        let tight = Plan::new(&graph, Options::new(Target::Cuda));
        let mut roomy = tight.clone();
        roomy.linger(&graph, 4 * tight.arena_bytes);
        let (before, after) = (free_nodes(&graph, &tight), free_nodes(&graph, &roomy));
        assert!(before.len() > 8, "{before:?}");
        assert!(before.iter().any(|&nodes| nodes < 2), "{before:?}");
        // The last have fewer nodes behind them.
        assert!(after.iter().all(|&nodes| nodes >= 4), "{after:?}");
        assert!(after.iter().any(|&nodes| nodes >= NODES[0]), "{after:?}");
    }

    #[test]
    fn nothing_changes_without_room() {
        let graph = step();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut same = plan.clone();
        same.linger(&graph, plan.persistent_bytes);
        assert_eq!(same, plan);
    }
}
