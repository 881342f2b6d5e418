//! What nodes wait for the bus between host memory and a card, over which weights and activations
//! move while the card computes.

use std::collections::{BTreeMap, HashMap};

use cinch_graph::op::Op;
use cinch_graph::{BlockId, Node, Phase, TensorId, TrainingGraph};
use cinch_plan::num_micro_nodes;

/// What the nodes of each block wait, over all micro batches. `by_node` is what each node takes,
/// likewise.
pub(super) fn waits(
    graph: &TrainingGraph,
    by_node: &[f64],
    accumulation: f64,
    bandwidth: f64,
) -> Vec<f64> {
    match graph.num_offloaded {
        0 => steady(graph, by_node, accumulation / bandwidth),
        _ => followed(graph, by_node, accumulation, bandwidth),
    }
}

/// What each block waits for its fetched weights. They cross the bus while the block before
/// computes, and blocks are alike: so a pass over a block takes as long as its own computing or
/// its own weights, whichever is longer.
fn steady(graph: &TrainingGraph, by_node: &[f64], seconds_per_byte: f64) -> Vec<f64> {
    let visit = |node: &Node| Some((node.block?, node.phase == Phase::Forward));
    let mut bytes: HashMap<TensorId, u64> = HashMap::new();
    // Computing and bytes of the two passes over each block.
    let mut passes: BTreeMap<(BlockId, bool), (f64, u64)> = BTreeMap::new();
    for (node, seconds) in graph.nodes.iter().zip(by_node) {
        if matches!(node.op, Op::Fetch(_)) {
            bytes.extend(node.outputs.iter().map(|&id| (id, graph.ty(id).bytes())));
        } else if let Some(key) = visit(node) {
            let pass = passes.entry(key).or_default();
            pass.0 += seconds;
            // Each is counted where it is read first.
            let fetched = node.inputs.iter().filter_map(|id| bytes.remove(id));
            pass.1 = pass.1.saturating_add(fetched.sum::<u64>());
        }
    }
    let mut waits = vec![0.0; graph.blocks.len()];
    for ((block, _), (computing, bytes)) in passes {
        waits[block.index()] += (bytes as f64 * seconds_per_byte - computing).max(0.0);
    }
    waits
}

/// The same where blocks are not alike, because some have activations in host memory: node after
/// node, with the times at which the card and both directions of the bus are free. A wait between
/// blocks is the last block's.
fn followed(graph: &TrainingGraph, by_node: &[f64], accumulation: f64, bandwidth: f64) -> Vec<f64> {
    let mut waits = vec![0.0; graph.blocks.len()];
    let Some(last) = waits.len().checked_sub(1) else {
        return waits;
    };
    let (mut now, mut to_host, mut from_host) = (0.0_f64, 0.0_f64, 0.0_f64);
    // When what is under way with a tensor ends. Of what is stored, others may read the source.
    let mut ends: HashMap<TensorId, f64> = HashMap::new();
    let mut sources: HashMap<TensorId, f64> = HashMap::new();
    let micro = num_micro_nodes(graph);
    for (node, seconds) in graph.nodes.iter().zip(by_node).take(micro) {
        let named = || node.inputs.iter().chain(&node.outputs);
        let bytes = graph.bus_bytes(node);
        if bytes == 0 || matches!(node.op, Op::Fetch(_)) {
            let until = named().filter_map(|id| match node.op {
                Op::Await(_) => sources.get(id).or(ends.get(id)),
                _ => ends.get(id),
            });
            let until = until.copied().fold(now, f64::max);
            let block = node.block.map_or(last, BlockId::index);
            waits[block] += accumulation * (until - now);
            now = until + seconds / accumulation;
        }
        if bytes > 0 {
            let (direction, inputs) = match node.op {
                Op::Store(_) => (&mut to_host, &mut sources),
                _ => (&mut from_host, &mut ends),
            };
            let end = direction.max(now) + bytes as f64 / bandwidth;
            *direction = end;
            inputs.extend(node.inputs.iter().map(|&id| (id, end)));
            ends.extend(node.outputs.iter().map(|&id| (id, end)));
        }
    }
    waits
}
