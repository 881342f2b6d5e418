//! Weights that are brought into the arena ahead of their use and dropped behind it: where they
//! are read, and the nodes that bring them.
//!
//! ```text
//! bring 0 | bring 1, block 0 | bring 2, block 1 | block 2 | loss | bring 1, block 2 backward | …
//! ```
//!
//! What is brought is an ordinary transient tensor, so the planner's places for it are the staging
//! slots: at most two blocks' weights are in the arena at once. A weight that is still there, as
//! the last block's is when its backward begins, is not brought again.

use std::collections::HashMap;

use crate::graph::{BlockId, Graph, Node, Phase, TensorId};
use crate::recompute::Insertions;

/// Nodes of one block, or of what stands between blocks, that follow each other on the same way,
/// forward or backward.
pub(crate) struct Visit {
    block: Option<BlockId>,
    forward: bool,
    /// Those that read what is brought, by their places.
    nodes: Vec<usize>,
    /// In the order of their first use.
    pub weights: Vec<TensorId>,
}

/// The visits of a graph in which one of the wanted tensors is read.
pub(crate) fn visits(graph: &Graph, wanted: &[bool]) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let forward = node.phase == Phase::Forward;
        let reads = node.inputs.iter().filter(|id| wanted[id.index()]);
        let reads: Vec<TensorId> = reads.copied().collect();
        if reads.is_empty() {
            continue;
        }
        let goes_on = |visit: &Visit| (visit.block, visit.forward) == (node.block, forward);
        if !visits.last().is_some_and(goes_on) {
            visits.push(Visit {
                block: node.block,
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

/// Where a node stands that brings something.
pub(crate) struct Beside {
    pub block: Option<BlockId>,
    pub phase: Phase,
    /// Which of the visits it is for.
    pub number: usize,
}

/// Lets the nodes of each visit read what `bring` brings for it, while the visit before runs.
/// `bring` makes a node whose outputs are the given tensors, one for each.
pub(crate) fn bring_ahead(
    graph: &mut Graph,
    visits: &[Visit],
    mut bring: impl FnMut(&mut Graph, &[TensorId], Beside) -> Node,
) {
    let mut insertions: Vec<(usize, Vec<Node>)> = Vec::new();
    // What each visit's nodes read instead of a weight.
    let mut brought: Vec<HashMap<TensorId, TensorId>> = Vec::with_capacity(visits.len());
    for (number, visit) in visits.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &visits[before]);
        let goes_on = before.filter(|before| before.block == visit.block);
        let mut here = match goes_on {
            Some(_) => brought[number - 1].clone(),
            None => HashMap::new(),
        };
        let missing = visit.weights.iter().filter(|id| !here.contains_key(id));
        let missing: Vec<TensorId> = missing.copied().collect();
        if !missing.is_empty() {
            let at = before.map_or(0, |before| before.nodes[0]);
            let beside = &graph.nodes[at];
            let beside = Beside {
                block: beside.block,
                phase: match beside.phase {
                    Phase::Forward => Phase::Forward,
                    _ => Phase::Recompute,
                },
                number,
            };
            let node = bring(graph, &missing, beside);
            here.extend(missing.into_iter().zip(node.outputs.iter().copied()));
            insertions.push((at, vec![node]));
        }
        brought.push(here);
    }
    for (visit, brought) in visits.iter().zip(&brought) {
        for &index in &visit.nodes {
            for id in &mut graph.nodes[index].inputs {
                *id = brought.get(id).copied().unwrap_or(*id);
            }
        }
    }
    Insertions::new(insertions).apply(&mut graph.nodes);
}
