//! Weights of which a rank keeps a part, and how whole ones come of them.

use std::collections::HashMap;

use super::{Shard, ShardLevel, Sharding};
use crate::graph::{Graph, Node, Role, TensorId};
use crate::op::AllGather;
use crate::parameter::{Parameter, Storage};
use crate::types::TensorType;
use crate::visit::{Beside, bring_ahead, visits};

/// A whole weight that is made of parts: what products read, and the part that the rank keeps.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    pub whole: TensorId,
    pub part: TensorId,
}

/// Cuts the weights that the level says. Those whose whole copies keep their place are returned:
/// somebody has to gather them after each update.
pub(super) fn cut(graph: &mut Graph, sharding: Sharding) -> Vec<Whole> {
    match sharding.level {
        ShardLevel::None => Vec::new(),
        ShardLevel::Optimizer | ShardLevel::Gradients => cut_masters(graph, sharding.ranks),
        ShardLevel::Weights => {
            cut_all(graph, sharding.ranks);
            Vec::new()
        }
    }
}

/// Makes a tensor this rank's part of what it was; returns the type it had.
fn keep_part(graph: &mut Graph, id: TensorId, ranks: usize) -> TensorType {
    let whole = graph.ty(id);
    graph.tensors[id.index()].ty = Shard::of(&whole, ranks).part_type(whole.dtype);
    whole
}

/// Trained weights: the master becomes a part, and what products read is a copy of its own.
fn cut_masters(graph: &mut Graph, ranks: usize) -> Vec<Whole> {
    let mut wholes = Vec::new();
    let mut copies: HashMap<TensorId, TensorId> = HashMap::new();
    for index in 0..graph.parameters.len() {
        let parameter = &graph.parameters[index];
        if !parameter.is_trained() {
            continue;
        }
        let (master, compute) = (parameter.master, parameter.compute);
        let whole = keep_part(graph, master, ranks);
        let copy = if compute == master {
            let name = format!("{}.{}", graph.tensor(master).name, whole.dtype);
            let copy = graph.add_tensor(name, whole, Role::ComputeCopy);
            copies.insert(master, copy);
            copy
        } else {
            compute
        };
        let parameter = &mut graph.parameters[index];
        parameter.compute = copy;
        parameter.shard = Some(Shard::of(&whole, ranks));
        wholes.push(Whole {
            whole: copy,
            part: master,
        });
    }
    for id in graph.nodes.iter_mut().flat_map(|node| &mut node.inputs) {
        *id = copies.get(id).copied().unwrap_or(*id);
    }
    wholes
}

/// All weights in the arena: what nodes read of them is gathered ahead and dropped.
fn cut_all(graph: &mut Graph, ranks: usize) {
    // By what nodes read: the part, and the type of the whole.
    let mut sources: HashMap<TensorId, (TensorId, TensorType)> = HashMap::new();
    for index in 0..graph.parameters.len() {
        let parameter = graph.parameters[index].clone();
        if graph.tensor(parameter.master).role == Role::Offloaded {
            continue;
        }
        let (read, kept) = read_and_kept(&parameter);
        for (read, kept) in read.into_iter().zip(kept) {
            let ty = graph.ty(read);
            let whole = keep_part(graph, kept, ranks);
            if kept == parameter.master {
                graph.parameters[index].shard = Some(Shard::of(&whole, ranks));
            }
            sources.insert(read, (kept, ty));
        }
        if parameter.compute != parameter.master
            && !matches!(parameter.storage, Storage::Quantised(_))
        {
            // There is no whole copy any more, and so no place for one.
            graph.tensors[parameter.compute.index()].role = Role::Activation;
            graph.parameters[index].compute = parameter.master;
        }
    }
    let mut wanted = vec![false; graph.tensors.len()];
    for id in sources.keys() {
        wanted[id.index()] = true;
    }
    let visits = visits(graph, &wanted);
    bring_ahead(graph, &visits, |graph, weights, beside| {
        let sources: Vec<_> = weights.iter().map(|id| sources[id]).collect();
        gather_ahead(graph, &sources, ranks, beside)
    });
}

/// The tensors of a parameter that nodes read, and those that are kept for them.
fn read_and_kept(parameter: &Parameter) -> (Vec<TensorId>, Vec<TensorId>) {
    match parameter.storage {
        Storage::Quantised(_) => {
            let codes = [parameter.master]
                .into_iter()
                .chain(parameter.code_scales.clone());
            let codes: Vec<TensorId> = codes.collect();
            (codes.clone(), codes)
        }
        Storage::Trained | Storage::TrainedAsRead | Storage::Frozen => {
            (vec![parameter.compute], vec![parameter.master])
        }
    }
}

fn gather_ahead(
    graph: &mut Graph,
    sources: &[(TensorId, TensorType)],
    ranks: usize,
    beside: Beside,
) -> Node {
    let mut outputs = Vec::with_capacity(sources.len());
    for &(part, whole) in sources {
        let name = format!("{}.gathered", graph.tensor(part).name);
        outputs.push(graph.add_tensor(name, whole, Role::Activation));
    }
    Node {
        op: AllGather {
            ranks,
            tensors: sources.iter().map(|&(_, whole)| whole).collect(),
        }
        .into(),
        name: format!("gather.{}", beside.number),
        inputs: sources.iter().map(|&(part, _)| part).collect(),
        outputs,
        block: beside.block,
        phase: beside.phase,
    }
}
