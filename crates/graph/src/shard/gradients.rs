//! Gradients added up over the ranks as they become complete, in buckets, by the order in which
//! the backward makes them.

use std::collections::HashMap;

use super::{Shard, ShardLevel, Sharding};
use crate::graph::{BlockId, Graph, Node, Phase, Role, TensorId};
use crate::op::{AllReduce, Await, Op, ReduceScatter};
use crate::recompute::Insertions;

/// A bucket is closed as soon as it has so many bytes, and where a block ends. Links reach their
/// rate with messages of a few megabytes, and a rank's share of a bucket is one message; larger
/// ones would only begin later. Blocks that are alike have buckets that are alike.
const BUCKET_BYTES: u64 = 32 << 20;

/// A tensor that is complete after so many nodes, and the block that it belongs to.
#[derive(Clone, Copy)]
pub(super) struct Complete {
    pub after: usize,
    pub id: TensorId,
    pub block: Option<BlockId>,
}

/// Tensors that are exchanged together.
pub(super) struct Bucket {
    pub tensors: Vec<TensorId>,
    /// The number of nodes after which all of them are complete.
    pub after: usize,
}

/// Cuts tensors into buckets, in the order in which they are complete.
pub(super) fn buckets(graph: &Graph, mut complete: Vec<Complete>) -> Vec<Bucket> {
    complete.sort_by_key(|one| one.after);
    let mut buckets: Vec<Bucket> = Vec::new();
    let (mut bytes, mut block) = (u64::MAX, None);
    for one in complete {
        if bytes >= BUCKET_BYTES || block != one.block {
            (bytes, block) = (0, one.block);
            buckets.push(Bucket {
                tensors: Vec::new(),
                after: one.after,
            });
        }
        bytes = bytes.saturating_add(graph.ty(one.id).bytes());
        if let Some(bucket) = buckets.last_mut() {
            bucket.tensors.push(one.id);
            bucket.after = one.after;
        }
    }
    buckets
}

/// Adds what the ranks exchange before the update. Returns, where gradients are cut, the part of
/// each that this rank's update reads.
pub(super) fn reduce(graph: &mut Graph, sharding: Sharding) -> HashMap<TensorId, TensorId> {
    let micro = graph.nodes.iter().take_while(|n| n.phase != Phase::Update);
    let micro = micro.count();
    let mut writes: Vec<Vec<usize>> = vec![Vec::new(); graph.tensors.len()];
    for (index, node) in graph.nodes[..micro].iter().enumerate() {
        for id in &node.outputs {
            writes[id.index()].push(index);
        }
    }
    let gradients = graph.parameters.iter().filter_map(|p| p.gradient);
    let complete = gradients.map(|id| {
        let last = writes[id.index()].last().copied().unwrap_or(0);
        Complete {
            after: last + 1,
            id,
            block: graph.nodes[last].block,
        }
    });
    let cuts =
        |id: TensorId| sharding.level >= ShardLevel::Gradients && writes[id.index()].len() == 1;
    let (cut, whole): (Vec<_>, Vec<_>) = complete.partition(|one| cuts(one.id));
    let mut insertions = Vec::new();
    let mut parts = HashMap::new();
    let transient = buckets(graph, cut);
    reduce_transient(
        graph,
        sharding,
        &transient,
        micro,
        &mut insertions,
        &mut parts,
    );
    for bucket in buckets(graph, whole) {
        let node = match sharding.level {
            ShardLevel::None => all_reduce(graph, sharding, bucket.tensors, "gradients"),
            _ => {
                let role = Role::Activation;
                reduce_scatter(graph, sharding, &bucket, role, &mut parts)
            }
        };
        let block = graph.nodes[bucket.after - 1].block;
        insertions.push((bucket.after, vec![Node { block, ..node }]));
    }
    let values = graph.terms.iter().map(|term| term.value).collect();
    insertions.push((micro, vec![all_reduce(graph, sharding, values, "loss")]));
    Insertions::new(insertions).apply(&mut graph.nodes);
    parts
}

/// Gradients that are gone as soon as their part is added to the accumulator: each bucket waits
/// for the one before it, so that two of them are alive at most.
fn reduce_transient(
    graph: &mut Graph,
    sharding: Sharding,
    buckets: &[Bucket],
    micro: usize,
    insertions: &mut Vec<(usize, Vec<Node>)>,
    parts: &mut HashMap<TensorId, TensorId>,
) {
    let mut sent: Option<&Bucket> = None;
    for bucket in buckets {
        let node = reduce_scatter(graph, sharding, bucket, Role::Gradient, parts);
        let beside = &graph.nodes[bucket.after - 1];
        let (phase, block) = (beside.phase, beside.block);
        let mut nodes = Vec::with_capacity(2);
        nodes.extend(sent.map(|sent| wait(&sent.tensors, phase, block)));
        nodes.push(Node {
            phase,
            block,
            ..node
        });
        insertions.push((bucket.after, nodes));
        for &id in &bucket.tensors {
            graph.tensors[id.index()].role = Role::Activation;
        }
        sent = Some(bucket);
    }
    if let Some(sent) = sent {
        let node = wait(&sent.tensors, Phase::Backward, None);
        insertions.push((micro, vec![node]));
    }
    for parameter in &mut graph.parameters {
        let part = parameter.gradient.and_then(|id| parts.get(&id));
        parameter.gradient = part.copied().or(parameter.gradient);
    }
}

/// The end of what is being sent.
fn wait(tensors: &[TensorId], phase: Phase, block: Option<BlockId>) -> Node {
    Node {
        op: Await.into(),
        name: "gradients.sent".to_owned(),
        inputs: tensors.to_vec(),
        outputs: Vec::new(),
        block,
        phase,
    }
}

pub(super) fn all_reduce(
    graph: &Graph,
    sharding: Sharding,
    tensors: Vec<TensorId>,
    name: &str,
) -> Node {
    let op = AllReduce {
        ranks: sharding.ranks,
        tensors: graph.types(&tensors),
    };
    Node {
        op: Op::from(op),
        name: format!("{name}.summed"),
        inputs: Vec::new(),
        outputs: tensors,
        block: None,
        phase: Phase::Exchange,
    }
}

/// The node that reduces a bucket to this rank's parts, which have a role.
fn reduce_scatter(
    graph: &mut Graph,
    sharding: Sharding,
    bucket: &Bucket,
    role: Role,
    parts: &mut HashMap<TensorId, TensorId>,
) -> Node {
    let ranks = sharding.ranks;
    let mut outputs = Vec::with_capacity(bucket.tensors.len());
    for &id in &bucket.tensors {
        let whole = graph.ty(id);
        let name = format!("{}.part", graph.tensor(id).name);
        let ty = Shard::of(&whole, ranks).part_type(whole.dtype);
        let part = graph.add_tensor(name, ty, role);
        parts.insert(id, part);
        outputs.push(part);
    }
    Node {
        op: ReduceScatter { ranks }.into(),
        name: "gradients.reduced".to_owned(),
        inputs: bucket.tensors.clone(),
        outputs,
        block: None,
        phase: Phase::Exchange,
    }
}
