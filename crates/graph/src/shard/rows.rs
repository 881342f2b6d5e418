//! What rows of all ranks meet in: the mean of what an op makes of the rows of each.
//!
//! Each rank has the results of all and adds them up itself, in the order of ranks, so that all of
//! them go on with the same bits. They have no gradient, and so nothing is exchanged in the
//! backward.

use super::Sharding;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Role};
use crate::op::GatherRows;
use crate::recompute::Insertions;

/// Lets every rank go on with the mean of all where an op says so, in recomputed blocks too.
pub(super) fn meet(graph: &mut Graph, sharding: Sharding) -> Result<(), GraphError> {
    let mut insertions = Vec::new();
    for index in 0..graph.nodes.len() {
        if !graph.nodes[index].op.declaration().is_mean_of_ranks() {
            continue;
        }
        let (name, mean) = (
            graph.nodes[index].name.clone(),
            graph.nodes[index].outputs[0],
        );
        let own = graph.add_tensor(format!("{name}.own"), graph.ty(mean), Role::Activation);
        graph.nodes[index].outputs[0] = own;
        // Built at the end, and put where the results are there.
        let ranks = sharding.ranks;
        let before = graph.nodes.len();
        let all = graph.emit(format!("{name}.ranks"), GatherRows { ranks }, vec![own])?[0];
        let count = ranks as f64;
        graph.sum_of_micro_batch(&name, &[all], |v| &v[0] / count)?;
        let (phase, block) = (graph.nodes[index].phase, graph.nodes[index].block);
        let mut nodes = graph.nodes.split_off(before);
        if let Some(last) = nodes.last_mut() {
            last.outputs[0] = mean;
        }
        let nodes = nodes.into_iter().map(|node| Node {
            phase,
            block,
            ..node
        });
        insertions.push((index + 1, nodes.collect()));
    }
    Insertions::new(insertions).apply(&mut graph.nodes);
    Ok(())
}
