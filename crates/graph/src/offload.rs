//! Frozen weights in host memory, as a pass over a graph whose nodes stand in their final order:
//! the matrices of each block, or their codes and scales, are fetched into the arena before the
//! block's forward and again before its backward, each time while the block before it runs.
//!
//! ```text
//! fetch 0 | fetch 1, block 0 | fetch 2, block 1 | block 2 | loss | fetch 1, block 2 backward | …
//! ```
//!
//! What is fetched is an ordinary transient tensor, so the planner's places for it are the staging
//! slots: at most two blocks' weights are in the arena at once. A weight that is still there, as
//! the last block's is when its backward begins, is not fetched again. What stands outside the
//! blocks, what is trained, and vectors (norms, biases) stay where they are: they are read too
//! often, or too small, for the bus.

use std::collections::HashMap;

use crate::differentiate::TrainingGraph;
use crate::graph::{BlockId, Graph, Node, Phase, Role, TensorId};
use crate::op::Fetch;
use crate::parameter::{Parameter, Storage};

/// Nodes of one block that follow each other on the same way, forward or backward.
struct Visit {
    block: BlockId,
    forward: bool,
    /// Those that read offloaded weights, by their places.
    nodes: Vec<usize>,
    /// In the order of their first use.
    weights: Vec<TensorId>,
}

impl Graph {
    /// The graph with the frozen matrices of its blocks in host memory.
    #[must_use]
    pub fn offload_frozen(&self) -> Self {
        let mut graph = self.clone();
        let visits = visits(&graph);
        for visit in &visits {
            for &id in &visit.weights {
                graph.tensors[id.index()].role = Role::Offloaded;
            }
        }
        let mut fetches: Vec<(usize, Node)> = Vec::new();
        // What each visit's nodes read instead of a weight.
        let mut fetched: Vec<HashMap<TensorId, TensorId>> = Vec::with_capacity(visits.len());
        for (number, visit) in visits.iter().enumerate() {
            let before = number.checked_sub(1).map(|before| &visits[before]);
            let goes_on = before.filter(|before| before.block == visit.block);
            let mut here = match goes_on {
                Some(_) => fetched[number - 1].clone(),
                None => HashMap::new(),
            };
            let missing = visit.weights.iter().filter(|id| !here.contains_key(id));
            let missing: Vec<TensorId> = missing.copied().collect();
            if !missing.is_empty() {
                let at = before.map_or(0, |before| before.nodes[0]);
                let node = fetch(&mut graph, &missing, number, at);
                here.extend(missing.into_iter().zip(node.outputs.iter().copied()));
                fetches.push((at, node));
            }
            fetched.push(here);
        }
        for (visit, fetched) in visits.iter().zip(&fetched) {
            read_fetched(&mut graph, visit, fetched);
        }
        insert(&mut graph, fetches);
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

fn visits(graph: &Graph) -> Vec<Visit> {
    let matrices = matrices(graph);
    let mut visits: Vec<Visit> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some(block) = node.block else { continue };
        let forward = node.phase == Phase::Forward;
        let reads = node.inputs.iter().filter(|id| matrices[id.index()]);
        let reads: Vec<TensorId> = reads.copied().collect();
        if reads.is_empty() {
            continue;
        }
        let goes_on = |visit: &Visit| (visit.block, visit.forward) == (block, forward);
        if !visits.last().is_some_and(goes_on) {
            visits.push(Visit {
                block,
                forward,
                nodes: Vec::new(),
                weights: Vec::new(),
            });
        }
        if let Some(visit) = visits.last_mut() {
            visit.nodes.push(index);
            for id in reads {
                if !visit.weights.contains(&id) {
                    visit.weights.push(id);
                }
            }
        }
    }
    visits
}

/// The node that fetches weights for a visit. It stands before the node at `at`, as part of what
/// runs there.
fn fetch(graph: &mut Graph, weights: &[TensorId], number: usize, at: usize) -> Node {
    let mut outputs = Vec::with_capacity(weights.len());
    for &id in weights {
        let (name, ty) = (format!("{}.fetched", graph.tensor(id).name), graph.ty(id));
        outputs.push(graph.add_tensor(name, ty, Role::Activation));
    }
    let beside = &graph.nodes[at];
    Node {
        op: Fetch.into(),
        name: format!("fetch.{number}"),
        inputs: weights.to_vec(),
        outputs,
        block: beside.block,
        phase: match beside.phase {
            Phase::Forward => Phase::Forward,
            _ => Phase::Recompute,
        },
    }
}

/// Lets the nodes of a visit read what was fetched for it.
fn read_fetched(graph: &mut Graph, visit: &Visit, fetched: &HashMap<TensorId, TensorId>) {
    for &index in &visit.nodes {
        for id in &mut graph.nodes[index].inputs {
            *id = fetched.get(id).copied().unwrap_or(*id);
        }
    }
}

fn insert(graph: &mut Graph, fetches: Vec<(usize, Node)>) {
    let mut fetches = fetches.into_iter().peekable();
    let mut nodes = Vec::with_capacity(graph.nodes.len() + fetches.len());
    for (index, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        while let Some((_, fetch)) = fetches.next_if(|(at, _)| *at == index) {
            nodes.push(fetch);
        }
        nodes.push(node);
    }
    graph.nodes = nodes;
}
