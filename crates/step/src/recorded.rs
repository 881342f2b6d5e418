//! What the recorded steps of a GPU take of its memory, outside the arena.
//!
//! All that a run does is recorded before its first step: the micro batch as the first of a step
//! and as a later one, the update, the evaluation, of each variant. The driver keeps what each
//! launch needs on the card, so this grows with the number of launches, which ops declare, and
//! not with the sizes of tensors.

use cinch_graph::{Graph, Phase, Target, TrainingGraph};
use cinch_plan::num_micro_nodes;

/// What the driver holds of the card's memory for a launch of a recorded graph. On an H200 with
/// driver 580, preparing a session took, besides its arena, 6.7 MiB for GPT-2 124M (636 launches),
/// 11.1 for Qwen2.5-0.5B (1,080), 12.8 for 7B with adapters (2,307), 14.7 for MU (3,067) and 88.0
/// for the embedder (34,026): this times the launches, and 5 to 9 MiB.
const LAUNCH_BYTES: u64 = 2_530;

/// Bytes of so many recorded launches.
pub fn recorded_bytes(target: Target, launches: u64) -> u64 {
    match target {
        Target::Cpu => 0,
        Target::Cuda => launches.saturating_mul(LAUNCH_BYTES),
    }
}

/// How many times the nodes of a micro batch are recorded: as the only one of a step; as the first
/// and as a later one; or as the last besides, where ranks exchange something then.
pub fn num_micro_recordings(graph: &Graph, accumulation: usize) -> usize {
    let micro = &graph.nodes[..num_micro_nodes(graph)];
    let exchanges = micro.iter().any(|node| node.phase == Phase::Exchange);
    match accumulation {
        0 | 1 => 1,
        2.. if exchanges => accumulation.min(3),
        _ => 2,
    }
}

/// Recorded launches of each node of a training graph.
pub fn training_launches(graph: &TrainingGraph, accumulation: usize) -> Vec<u64> {
    let micro = num_micro_nodes(graph);
    let recordings = num_micro_recordings(graph, accumulation) as u64;
    let times = |index: usize| if index < micro { recordings } else { 1 };
    // Updates among the backward stand apart.
    let together = graph.backward_passes.is_none();
    let nodes = graph.nodes.iter().enumerate();
    let launches = nodes.map(|(index, node)| {
        let launches = graph.cuda_cost(node).launches(together);
        launches.saturating_mul(times(index))
    });
    launches.collect()
}

/// Recorded launches of each node of a graph that runs as a whole.
pub fn whole_launches(graph: &Graph) -> Vec<u64> {
    let nodes = graph.nodes.iter();
    nodes
        .map(|node| graph.cuda_cost(node).launches(true))
        .collect()
}

/// The launches of several graphs.
pub(crate) fn sum(launches: impl Iterator<Item = Vec<u64>>) -> u64 {
    launches.flatten().fold(0, u64::saturating_add)
}
