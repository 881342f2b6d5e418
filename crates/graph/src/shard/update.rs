//! The update of a rank's own part: the norm of all ranks' gradients, AdamW over parts, and whole
//! weights from them.

use std::collections::HashMap;

use super::gradients::{Complete, all_reduce, buckets};
use super::weights::Whole;
use super::{Shard, Sharding};
use crate::graph::{Graph, Node, Phase, TensorId};
use crate::op::{AllGather, Op};
use crate::update_in_backward::add_squares;

/// Lets the update work on parts: `parts` of the gradients, by the whole ones, and masters that
/// are cut already. `wholes` are gathered after it.
pub(super) fn update_parts(
    graph: &mut Graph,
    sharding: Sharding,
    parts: &HashMap<TensorId, TensorId>,
    wholes: &[Whole],
) {
    let first = graph.nodes.iter().position(|n| n.phase == Phase::Update);
    let mut updates = graph.nodes.split_off(first.unwrap_or(graph.nodes.len()));
    for id in updates.iter_mut().flat_map(|node| &mut node.inputs) {
        *id = parts.get(id).copied().unwrap_or(*id);
    }
    let mut squares = add_squares(graph, &mut updates);
    let sums = squares.first().map(|node| node.outputs.clone());
    graph.nodes.append(&mut squares);
    if let Some(sums) = sums {
        graph.nodes.push(Node {
            phase: Phase::Update,
            ..all_reduce(graph, sharding, sums, "gradient_squares")
        });
    }
    for update in &mut updates {
        cut_update(graph, update, sharding.ranks);
    }
    let gathers = gathers(graph, sharding, &updates, wholes);
    for (index, update) in updates.into_iter().enumerate() {
        graph.nodes.push(update);
        let here = gathers.iter().filter(|(after, _)| *after == index + 1);
        let here: Vec<Node> = here.map(|(_, node)| node.clone()).collect();
        graph.nodes.extend(here);
    }
}

/// An update whose gradient is a part: its states are parts too, and it makes no whole copy.
fn cut_update(graph: &mut Graph, update: &mut Node, ranks: usize) {
    let Op::AdamW(op) = &mut update.op else {
        return;
    };
    if let Some(copy) = op.layout().copy {
        update.outputs.truncate(copy);
        op.copy = None;
    }
    // The master has been cut with the weights.
    for &id in &update.outputs[1..] {
        let whole = graph.ty(id);
        let is_scales = op.layout().scales.is_some_and(|scales| {
            let ids = scales.map(|output| update.outputs[output]);
            ids.contains(&id)
        });
        // Scales follow their blocks, of which a part has a whole number.
        let ty = match is_scales {
            true => op.moments.scales(&graph.ty(update.outputs[0])),
            false => Some(Shard::of(&whole, ranks).part_type(whole.dtype)),
        };
        graph.tensors[id.index()].ty = ty.unwrap_or(whole);
    }
}

/// The nodes that gather whole weights, each with the number of updates that come before it.
fn gathers(
    graph: &Graph,
    sharding: Sharding,
    updates: &[Node],
    wholes: &[Whole],
) -> Vec<(usize, Node)> {
    let part_of: HashMap<TensorId, TensorId> =
        wholes.iter().map(|one| (one.whole, one.part)).collect();
    // A weight that the loss does not depend on has no update, and is gathered with the first.
    let updated = |part: TensorId| {
        let by = updates.iter().position(|node| node.outputs.contains(&part));
        by.map_or(1, |index| index + 1)
    };
    let block_of = |whole: TensorId| {
        let read = graph.nodes.iter().find(|node| node.inputs.contains(&whole));
        read.and_then(|node| node.block)
    };
    let complete = wholes.iter().map(|one| Complete {
        after: updated(one.part),
        id: one.whole,
        block: block_of(one.whole),
    });
    let buckets = buckets(graph, complete.collect());
    let gather = buckets.into_iter().enumerate().map(|(number, bucket)| {
        let node = Node {
            op: AllGather {
                ranks: sharding.ranks,
                tensors: graph.types(&bucket.tensors),
            }
            .into(),
            name: format!("weights.gathered.{number}"),
            inputs: bucket.tensors.iter().map(|id| part_of[id]).collect(),
            outputs: bucket.tensors,
            block: None,
            phase: Phase::Update,
        };
        (bucket.after, node)
    });
    gather.collect()
}
