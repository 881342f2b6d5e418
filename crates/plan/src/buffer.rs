//! From tensors to buffers: who lives from when to when, and which outputs take over the
//! memory of an input that ends with their node.

use cinch_graph::{Graph, Node, NodeId, Role, Target, TensorId};

/// What occupies a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Tensor(TensorId),
    Workspace(NodeId),
}

/// A piece of transient memory and its lifetime, in nodes, both ends included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub bytes: u64,
    pub start: usize,
    pub end: usize,
    /// One tensor after another, each written over the one before.
    pub owners: Vec<Owner>,
}

impl Buffer {
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

/// The transient buffers of a graph, in the order of their start. `reserved` are the bytes of each
/// tensor with what is read beyond it.
pub(crate) fn buffers(graph: &Graph, target: Target, reserved: &[u64]) -> Vec<Buffer> {
    let last_use = last_uses(graph);
    let mut buffers: Vec<Buffer> = Vec::with_capacity(graph.tensors.len());
    let mut buffer_of: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        let taken = taken_over(graph, node, index, &last_use);
        for (output, &id) in node.outputs.iter().enumerate() {
            if graph.tensor(id).role != Role::Activation {
                continue;
            }
            let end = last_use[id.index()].unwrap_or(index);
            let inherited = taken
                .iter()
                .find(|(_, to)| *to == output)
                .and_then(|(from, _)| buffer_of[node.inputs[*from].index()]);
            let slot = inherited.unwrap_or_else(|| {
                buffers.push(Buffer {
                    bytes: 0,
                    start: index,
                    end,
                    owners: Vec::with_capacity(1),
                });
                buffers.len() - 1
            });
            let buffer = &mut buffers[slot];
            buffer.bytes = buffer.bytes.max(reserved[id.index()]);
            buffer.end = end;
            buffer.owners.push(Owner::Tensor(id));
            buffer_of[id.index()] = Some(slot);
        }
        let workspace = node.op.declaration().workspace(
            &graph.types(&node.inputs),
            &graph.types(&node.outputs),
            target,
        );
        if workspace > 0 {
            buffers.push(Buffer {
                bytes: workspace,
                start: index,
                end: index,
                owners: vec![Owner::Workspace(NodeId(index as u32))],
            });
        }
    }
    buffers
}

fn last_uses(graph: &Graph) -> Vec<Option<usize>> {
    let mut last = vec![None; graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in &node.inputs {
            last[id.index()] = Some(index);
        }
    }
    // A result is read after the graph has run.
    for id in graph
        .terms
        .iter()
        .map(|term| term.value)
        .chain(graph.result)
    {
        last[id.index()] = Some(graph.nodes.len().saturating_sub(1));
    }
    last
}

/// The pairs (input, output) of a node that share memory: the op allows it, the input is a
/// transient tensor read here for the last time and only once, not what the graph is run for,
/// and no other output has it.
fn taken_over(
    graph: &Graph,
    node: &Node,
    index: usize,
    last_use: &[Option<usize>],
) -> Vec<(usize, usize)> {
    let mut taken: Vec<(usize, usize)> = Vec::new();
    for &(input, output) in node.op.declaration().in_place() {
        let id = node.inputs[input];
        let ends_here = last_use[id.index()] == Some(index);
        let is_result = graph.result == Some(id) || graph.term_of(id).is_some();
        let read_once = node.inputs.iter().filter(|&&other| other == id).count() == 1;
        let free = taken.iter().all(|&(i, o)| i != input && o != output);
        let is_transient = graph.tensor(id).role == Role::Activation && !is_result;
        if ends_here && read_once && free && is_transient {
            taken.push((input, output));
        }
    }
    taken
}
