//! Recomputation as a pass over the training graph: what is not kept is computed again,
//! from the same inputs by the same ops, right before the backward needs it.
//!
//! Two kinds. *Recipes* are always applied: an output that can be had again by one cheap
//! pointwise pass from tensors that are kept anyway (a norm's output, a GELU's) is not kept.
//! *Blocks* are a choice: in a recomputed block only what leaves the block is kept, with what is
//! narrow beside that, and the ops that the backward needs run a second time.
//!
//! What a recipe would give is written by a backward node instead where one can
//! ([`crate::value_again`]).
//!
//! The first blocks are recomputed, not the last: when the backward reaches them, the
//! activations of all later blocks are gone, so that the second forward costs no peak.

use crate::differentiate::TrainingGraph;
use crate::error::GraphError;
use crate::graph::{BlockId, Graph, Node, Phase, Role, TensorId};
use crate::offload_activations::{self, Places, Repeatable};
use crate::op::Operand;
use crate::value_again::write_values_again;

/// How many blocks to recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    None,
    Full,
    /// The first so many.
    Blocks(usize),
}

impl Recompute {
    pub fn count(self, blocks: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Full => blocks,
            Self::Blocks(count) => count,
        }
    }
}

impl TrainingGraph {
    /// The step with `choice` applied to its blocks, and recipes to everything.
    ///
    /// The receiver must not have been through this pass before.
    pub fn recompute(&self, choice: Recompute) -> Result<Self, GraphError> {
        self.recompute_and_offload(choice, 0)
    }

    /// The same, where so many of the recomputed blocks keep in host memory what takes longest to
    /// make again (`offload_activations.rs`); all of them where they are fewer.
    pub fn recompute_and_offload(
        &self,
        choice: Recompute,
        offloaded: usize,
    ) -> Result<Self, GraphError> {
        let blocks = self.blocks.len();
        let count = choice.count(blocks);
        if count > blocks {
            return Err(GraphError::TooManyBlocks {
                asked: count,
                blocks,
            });
        }
        let mut result = self.clone();
        result.num_recomputed = count;
        // What comes from weights alone has its own place in the backward before blocks are
        // repeated: otherwise the numbers of a block's quantised weights would all be alive from
        // the repeated forward on.
        apply_recipes(&mut result.graph, Sources::Weights)?;
        result.num_offloaded = recompute_blocks(&mut result.graph, count, offloaded);
        drop_unread_outputs(&mut result.graph)?;
        apply_recipes(&mut result.graph, Sources::Any)?;
        write_values_again(&mut result.graph);
        Ok(result)
    }
}

/// Nodes to insert before the node at an index.
pub(crate) struct Insertions(Vec<(usize, Vec<Node>)>);

impl Insertions {
    pub(crate) fn new(insertions: Vec<(usize, Vec<Node>)>) -> Self {
        Self(insertions)
    }

    pub(crate) fn apply(mut self, nodes: &mut Vec<Node>) {
        self.0.sort_by_key(|(index, _)| *index);
        let mut insertions = self.0.into_iter().peekable();
        let mut merged = Vec::with_capacity(nodes.len() * 2);
        for (index, node) in std::mem::take(nodes).into_iter().enumerate() {
            while let Some((_, new)) = insertions.next_if(|(at, _)| *at == index) {
                merged.extend(new);
            }
            merged.push(node);
        }
        *nodes = merged;
    }
}

/// The forward node that makes each tensor.
fn producers(graph: &Graph) -> Vec<Option<usize>> {
    let mut producers = vec![None; graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.phase == Phase::Forward {
            for id in &node.outputs {
                producers[id.index()] = Some(index);
            }
        }
    }
    producers
}

/// Whether the node's results are kept although its block is recomputed: they are read
/// outside the block, or outlive the step.
fn leaving_nodes(graph: &Graph, producers: &[Option<usize>]) -> Vec<bool> {
    let mut leaves = vec![false; graph.nodes.len()];
    for node in graph.nodes.iter().filter(|n| n.phase == Phase::Forward) {
        for id in &node.inputs {
            if let Some(producer) = producers[id.index()] {
                leaves[producer] |= graph.nodes[producer].block != node.block;
            }
        }
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        leaves[index] |= node
            .outputs
            .iter()
            .any(|&id| graph.tensor(id).role != Role::Activation);
    }
    leaves
}

/// What leaves a block is so many times as large as what is kept beside it.
pub(crate) const NARROW: u64 = 8;

/// Whether the node's results are kept although its block is recomputed, because they are narrow:
/// what adapters read takes long to make again for what it would save. A node that reads nothing
/// but weights is none of them: what it makes is as large in every block, and cheap.
fn narrow_nodes(graph: &Graph, leaves: &[bool]) -> Vec<bool> {
    let transient = |id: &TensorId| graph.tensor(*id).role == Role::Activation;
    let bytes = |id: &TensorId| graph.ty(*id).bytes();
    let mut leaving = vec![0; graph.blocks.len()];
    for (node, _) in graph
        .nodes
        .iter()
        .zip(leaves)
        .filter(|(_, leaves)| **leaves)
    {
        if let (Phase::Forward, Some(block)) = (node.phase, node.block) {
            let most = node
                .outputs
                .iter()
                .filter(|id| transient(id))
                .map(bytes)
                .max();
            let slot = &mut leaving[block.index()];
            *slot = most.unwrap_or(0).max(*slot);
        }
    }
    let is_narrow = |node: &Node| match node.block {
        Some(block) if node.phase == Phase::Forward => {
            let most = leaving[block.index()] / NARROW;
            node.inputs.iter().any(transient) && node.outputs.iter().all(|id| bytes(id) <= most)
        }
        _ => false,
    };
    graph.nodes.iter().map(is_narrow).collect()
}

/// Recomputes the first `count` blocks. Returns how many of them have more activations in host memory
/// than narrow ones, at most as many as asked for.
fn recompute_blocks(graph: &mut Graph, count: usize, offloaded: usize) -> usize {
    if count == 0 {
        return 0;
    }
    let producers = producers(graph);
    let leaves = leaving_nodes(graph, &producers);
    let narrow = narrow_nodes(graph, &leaves);
    let in_scope = |node: &Node| node.block.is_some_and(|BlockId(id)| (id as usize) < count);
    let mut repeatable = Repeatable::new(producers, |index| {
        in_scope(&graph.nodes[index]) && !leaves[index] && !narrow[index]
    });
    let offloaded = offload_activations::choose(graph, &repeatable, count, offloaded);
    for block in &offloaded {
        repeatable.keep(&block.nodes);
    }

    // Which forward nodes the backward needs again, and before which node.
    let mut first_use: Vec<Option<usize>> = vec![None; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.phase != Phase::Backward {
            continue;
        }
        let mut pending: Vec<usize> = node
            .inputs
            .iter()
            .filter_map(|&id| repeatable.producer(id))
            .collect();
        while let Some(producer) = pending.pop() {
            if first_use[producer].is_none() {
                first_use[producer] = Some(index);
                let inputs = &graph.nodes[producer].inputs;
                pending.extend(inputs.iter().filter_map(|&id| repeatable.producer(id)));
            }
        }
    }
    // A block's repeated nodes run together, at the earliest use of any of them.
    let mut at_block: Vec<Option<usize>> = vec![None; count];
    for (producer, at) in first_use.iter().enumerate() {
        if let (Some(at), Some(block)) = (at, graph.nodes[producer].block) {
            let slot = &mut at_block[block.index()];
            *slot = Some(slot.map_or(*at, |earliest| earliest.min(*at)));
        }
    }

    let mut replaced: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
    let away = match offloaded.is_empty() {
        true => Vec::new(),
        false => {
            let places = Places::new(graph, &first_use, count);
            offload_activations::store(graph, &offloaded, &places, &mut replaced)
        }
    };
    let mut insertions: Vec<(usize, Vec<Node>)> = at_block
        .iter()
        .map(|at| (at.unwrap_or(0), Vec::new()))
        .collect();
    let repeated = (0..graph.nodes.len()).filter(|&index| first_use[index].is_some());
    for producer in repeated {
        let node = graph.nodes[producer].clone();
        let Some(block) = node.block else { continue };
        let node = repeat(graph, node, &mut replaced);
        insertions[block.index()].1.push(node);
    }
    for node in graph
        .nodes
        .iter_mut()
        .filter(|n| n.phase == Phase::Backward)
    {
        for id in &mut node.inputs {
            if let Some(Some(copy)) = replaced.get(id.index()) {
                *id = *copy;
            }
        }
    }
    insertions.retain(|(_, nodes)| !nodes.is_empty());
    // What comes back stands before what runs again at the same place.
    Insertions([away, insertions].concat()).apply(&mut graph.nodes);
    offloaded.iter().filter(|block| block.is_chosen).count()
}

/// A node that runs once more: it reads the copies where there are some, and writes new ones.
pub(crate) fn repeat(graph: &mut Graph, mut node: Node, replaced: &mut [Option<TensorId>]) -> Node {
    node.phase = Phase::Recompute;
    node.name = format!("again.{}", node.name);
    for id in &mut node.inputs {
        *id = replaced[id.index()].unwrap_or(*id);
    }
    for id in &mut node.outputs {
        let tensor = graph.tensor(*id);
        let (name, ty) = (format!("again.{}", tensor.name), tensor.ty);
        let copy = graph.add_tensor(name, ty, Role::Activation);
        replaced[id.index()] = Some(copy);
        *id = copy;
    }
    node
}

/// A forward node whose extra outputs nobody reads any more stops making them.
fn drop_unread_outputs(graph: &mut Graph) -> Result<(), GraphError> {
    let mut read = vec![false; graph.tensors.len()];
    for id in graph.nodes.iter().flat_map(|node| &node.inputs) {
        read[id.index()] = true;
    }
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        let used: Vec<bool> = node.outputs.iter().map(|id| read[id.index()]).collect();
        if let Some(op) = node.op.declaration().without_unread(&used) {
            let types = op
                .declaration()
                .infer(&graph.types(&node.inputs))
                .map_err(|problem| GraphError::Op {
                    op: op.name(),
                    node: node.name.clone(),
                    problem,
                })?;
            let node = &mut graph.nodes[index];
            node.op = op;
            node.outputs.truncate(types.len());
        }
    }
    Ok(())
}

/// What the recipes read that are applied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sources {
    /// Nothing but what keeps its place over the whole step.
    Weights,
    Any,
}

fn apply_recipes(graph: &mut Graph, sources: Sources) -> Result<(), GraphError> {
    // First and last use of each tensor in the backward part.
    let mut first: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    let mut last = first.clone();
    for (index, node) in graph.nodes.iter().enumerate() {
        if matches!(node.phase, Phase::Backward | Phase::Recompute) {
            for id in &node.inputs {
                first[id.index()].get_or_insert(index);
                last[id.index()] = Some(index);
            }
        }
    }
    let mut insertions = Vec::new();
    let mut replaced: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
    for index in 0..graph.nodes.len() {
        if graph.nodes[index].phase != Phase::Forward {
            continue;
        }
        let node = graph.nodes[index].clone();
        for (output, &id) in node.outputs.iter().enumerate() {
            let (Some(at), Some(recipe)) =
                (first[id.index()], node.op.declaration().recipe(output))
            else {
                continue;
            };
            let inputs: Vec<TensorId> = recipe
                .inputs
                .iter()
                .map(|operand| match *operand {
                    Operand::Input(i) => node.inputs[i],
                    Operand::Output(i) => node.outputs[i],
                })
                .collect();
            // Worth it only if what the recipe reads is there anyway.
            let free = inputs.iter().all(|input| {
                graph.tensor(*input).role.is_persistent()
                    || (sources == Sources::Any && last[input.index()].is_some_and(|l| l >= at))
            });
            if !free {
                continue;
            }
            let name = format!("again.{}", graph.tensor(id).name);
            let block = graph.nodes[at].block;
            let again = graph.build_node(recipe.op, name, inputs, block, Phase::Recompute)?;
            replaced[id.index()] = Some(again.outputs[recipe.output]);
            insertions.push((at, vec![again]));
        }
    }
    for node in &mut graph.nodes {
        if matches!(node.phase, Phase::Backward | Phase::Recompute) {
            for id in &mut node.inputs {
                *id = replaced[id.index()].unwrap_or(*id);
            }
        }
    }
    Insertions(insertions).apply(&mut graph.nodes);
    Ok(())
}
