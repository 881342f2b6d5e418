//! Activations in host memory: of some recomputed blocks, what takes longest to make again is
//! copied to the host while the forward goes on, and copied back ahead of the block's backward.
//!
//! ```text
//! forward:  block 0, store 0 | block 1 | block 2 | await 0, store 3 …
//! backward: fetch 3, block 4 | block 3 | …       | fetch 0, block 1 | block 0
//! ```
//!
//! The bus is the narrow place, so what counts is the work that a byte saves: arithmetic, and more of
//! it where a kernel fills the matrix units only in part. The tensors of a block are taken by that,
//! from the first until one saves less than three quarters as much, because more blocks can be had
//! instead: products with weights, mostly, or attention with narrow heads, while norms and pointwise
//! ops are made again. The blocks are spread evenly, as then the bus has the longest time for each.
//! What is narrow beside what it is made of goes along, of every recomputed block: it takes the bus
//! little, and making it again is a pass over what is wide.
//!
//! A tensor stays in the arena until its copy has been waited for: where the next but one begins,
//! and at the latest behind the last block, because the loss is where a step takes the most and
//! whatever would be on its way then could as well stay. What comes back has its place one block
//! ahead of its use.

use crate::cost::{Arithmetic, KernelCost};
use crate::graph::{BlockId, Graph, Node, Phase, Role, TensorId};
use crate::op::{Await, Fetch, Store};
use crate::recompute::NARROW;

/// Copies to the host that may be under way when another begins.
const UNDER_WAY: usize = 2;

/// What may be made again: the forward node of each tensor, where it may run twice.
pub(crate) struct Repeatable {
    producers: Vec<Option<usize>>,
}

impl Repeatable {
    /// From the forward node of each tensor, and whether it may run twice.
    pub fn new(producers: Vec<Option<usize>>, may_repeat: impl Fn(usize) -> bool) -> Self {
        let may = |producer: Option<usize>| producer.filter(|&node| may_repeat(node));
        Self {
            producers: producers.into_iter().map(may).collect(),
        }
    }

    pub fn producer(&self, id: TensorId) -> Option<usize> {
        self.producers.get(id.index()).copied().flatten()
    }

    /// The results of some nodes are at hand.
    pub fn keep(&mut self, nodes: &[usize]) {
        for producer in &mut self.producers {
            *producer = producer.filter(|node| !nodes.contains(node));
        }
    }
}

/// A block with activations in host memory.
pub(crate) struct OffloadedBlock {
    pub block: BlockId,
    /// Whether it is one of those that were asked for: of others only what is narrow is stored.
    pub is_chosen: bool,
    /// The forward nodes whose results are stored, in their order.
    pub nodes: Vec<usize>,
}

/// Chooses `wanted` of the first `count` blocks, and what of each is stored; of the others it is what
/// is narrow. A block of which nothing is worth it is left out.
pub(crate) fn choose(
    graph: &Graph,
    repeatable: &Repeatable,
    count: usize,
    wanted: usize,
) -> Vec<OffloadedBlock> {
    let wanted = wanted.min(count);
    if wanted == 0 {
        return Vec::new();
    }
    let mut read_by_backward: Vec<Vec<usize>> = vec![Vec::new(); count];
    let backward = graph.nodes.iter().filter(|n| n.phase == Phase::Backward);
    for producer in backward
        .flat_map(|node| &node.inputs)
        .filter_map(|&id| repeatable.producer(id))
    {
        if let Some(block) = graph.nodes[producer].block {
            read_by_backward[block.index()].push(producer);
        }
    }
    let mut is_chosen = vec![false; count];
    for number in 0..wanted {
        is_chosen[number * count / wanted] = true;
    }
    let in_scope = |node: &Node| node.block.is_some_and(|block| block.index() < count);
    let nodes = graph.nodes.iter();
    let works = nodes.map(|node| if in_scope(node) { work(graph, node) } else { 0 });
    let works: Vec<u128> = works.collect();
    let blocks = is_chosen.into_iter().enumerate();
    let blocks = blocks.map(|(block, is_chosen)| {
        let dearest = Dearest {
            graph,
            repeatable,
            works: &works,
            wanted: &read_by_backward[block],
            stored: Vec::new(),
        };
        OffloadedBlock {
            block: BlockId(block as u32),
            is_chosen,
            nodes: match is_chosen {
                true => dearest.choose(),
                false => dearest.narrow(),
            },
        }
    });
    blocks.filter(|block| !block.nodes.is_empty()).collect()
}

/// What a node takes to run again: its arithmetic, as much of a large product as takes as long.
fn work(graph: &Graph, node: &Node) -> u128 {
    let in_part = |kernel: &KernelCost| match kernel.arithmetic {
        Arithmetic::Blocks { flops, any, hopper } => {
            Some(flops as f64 / hopper.unwrap_or(any).share)
        }
        _ => None,
    };
    let kernels = graph.cuda_cost(node).kernels;
    let slow: f64 = kernels.iter().filter_map(in_part).sum();
    u128::from(graph.flops(node)).max(slow as u128)
}

/// Finds what saves the most work for each byte that is stored of a block.
struct Dearest<'a> {
    graph: &'a Graph,
    repeatable: &'a Repeatable,
    /// Of each node of the graph that may run again.
    works: &'a [u128],
    /// Nodes whose results the backward reads.
    wanted: &'a [usize],
    stored: Vec<usize>,
}

/// Work that is saved, and the bytes that it takes.
#[derive(Clone, Copy)]
struct Worth {
    work: u128,
    bytes: u128,
}

impl Worth {
    /// Whether a byte saves so many times as much and more.
    fn exceeds(self, other: Self, [times, of]: [u128; 2]) -> bool {
        let own = self.work.saturating_mul(other.bytes).saturating_mul(of);
        let others = other.work.saturating_mul(self.bytes);
        own > others.saturating_mul(times)
    }
}

impl Dearest<'_> {
    fn choose(mut self) -> Vec<usize> {
        let mut most: Option<Worth> = None;
        loop {
            let needed = self.needed(None);
            let all = self.work(&needed);
            let mut best: Option<(usize, Worth)> = None;
            for &node in &needed {
                let without = self.work(&self.needed(Some(node)));
                let outputs = self.graph.nodes[node].outputs.iter();
                let bytes = outputs.map(|&id| u128::from(self.graph.ty(id).bytes()));
                let worth = Worth {
                    work: all - without,
                    bytes: bytes.sum(),
                };
                if worth.work > 0 && best.is_none_or(|(_, best)| worth.exceeds(best, [1, 1])) {
                    best = Some((node, worth));
                }
            }
            match best {
                Some((node, worth)) if most.is_none_or(|most| !most.exceeds(worth, [4, 3])) => {
                    most = most.or(Some(worth));
                    self.stored.push(node);
                }
                _ => break,
            }
        }
        if !self.stored.is_empty() {
            let narrow = self.narrow();
            self.stored.extend(narrow);
        }
        self.stored.sort_unstable();
        self.stored
    }

    /// Of the nodes that run again, those whose results are narrow, in their order.
    fn narrow(&self) -> Vec<usize> {
        let needed = self.needed(None).into_iter();
        needed.filter(|&node| self.is_narrow(node)).collect()
    }

    /// Whether all that a node makes is narrow beside what it reads of the block.
    fn is_narrow(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        let bytes = |id: &TensorId| self.graph.ty(*id).bytes();
        let inputs = node.inputs.iter();
        let transient = inputs.filter(|&&id| self.graph.tensor(id).role == Role::Activation);
        let most = transient.map(bytes).max().unwrap_or(0) / NARROW;
        node.outputs.iter().all(|id| bytes(id) <= most)
    }

    /// The nodes that run again when one more is stored, in their order.
    fn needed(&self, stored: Option<usize>) -> Vec<usize> {
        let runs = |node: &usize| Some(*node) != stored && !self.stored.contains(node);
        let mut needed: Vec<usize> = Vec::new();
        let mut pending: Vec<usize> = self.wanted.iter().copied().filter(runs).collect();
        while let Some(node) = pending.pop() {
            if !needed.contains(&node) {
                needed.push(node);
                let inputs = self.graph.nodes[node].inputs.iter();
                let producers = inputs.filter_map(|&id| self.repeatable.producer(id));
                pending.extend(producers.filter(runs));
            }
        }
        needed.sort_unstable();
        needed
    }

    fn work(&self, nodes: &[usize]) -> u128 {
        nodes.iter().map(|&node| self.works[node]).sum()
    }
}

/// Where the nodes of a step stand that stored activations depend on.
pub(crate) struct Places {
    /// By tensor: whether the backward reads it, or what runs again for it.
    read_again: Vec<bool>,
    /// By block: its first node in the backward.
    backward: Vec<Option<usize>>,
    /// Where the blocks of the forward end that are recomputed, and where all do.
    recomputed_end: usize,
    forward_end: usize,
    /// Where the backward begins.
    backward_start: usize,
}

impl Places {
    /// `again` says before which node each forward node runs again, if it does; the first `count`
    /// blocks are recomputed.
    pub fn new(graph: &Graph, again: &[Option<usize>], count: usize) -> Self {
        let mut places = Self {
            read_again: vec![false; graph.tensors.len()],
            backward: vec![None; graph.blocks.len()],
            recomputed_end: 0,
            forward_end: 0,
            backward_start: graph.nodes.len(),
        };
        for (index, node) in graph.nodes.iter().enumerate() {
            let is_backward = node.phase == Phase::Backward;
            if let (Phase::Forward, Some(block)) = (node.phase, node.block) {
                places.forward_end = index + 1;
                if block.index() < count {
                    places.recomputed_end = index + 1;
                }
            }
            if is_backward {
                places.backward_start = places.backward_start.min(index);
                if let Some(block) = node.block {
                    places.backward[block.index()].get_or_insert(index);
                }
            }
            if is_backward || again[index].is_some() {
                for id in &node.inputs {
                    places.read_again[id.index()] = true;
                }
            }
        }
        places
    }

    /// Where something is brought back for a block: while the block behind it is at work.
    fn ahead_of(&self, block: BlockId) -> usize {
        let behind = self.backward.get(block.index() + 1).copied().flatten();
        let own = self.backward[block.index()].unwrap_or(self.backward_start);
        behind.unwrap_or(self.backward_start).min(own)
    }
}

/// Adds the tensors and nodes of stored activations. `replaced` gets what the backward reads
/// instead of each.
pub(crate) fn store(
    graph: &mut Graph,
    offloaded: &[OffloadedBlock],
    places: &Places,
    replaced: &mut [Option<TensorId>],
) -> Vec<(usize, Vec<Node>)> {
    let mut insertions: Vec<(usize, Vec<Node>)> = Vec::new();
    let mut under_way: Vec<(BlockId, Vec<TensorId>)> = Vec::new();
    for OffloadedBlock { block, nodes, .. } in offloaded {
        let outputs = nodes.iter().flat_map(|&node| &graph.nodes[node].outputs);
        let outputs = outputs.filter(|id| places.read_again[id.index()]);
        let tensors: Vec<TensorId> = outputs.copied().collect();
        let Some(last) = nodes.last() else { continue };
        let stored = copies(graph, &tensors, "stored", Role::HostActivation);
        let fetched = copies(graph, &tensors, "fetched", Role::Activation);
        for (id, copy) in tensors.iter().zip(&fetched) {
            replaced[id.index()] = Some(*copy);
        }
        let name = &graph.blocks[block.index()].name;
        let (store_name, fetch_name) = (format!("{name}.store"), format!("{name}.fetch"));
        let mut here = Vec::with_capacity(2);
        if under_way.len() == UNDER_WAY {
            let (earlier, tensors) = under_way.remove(0);
            here.push(wait(graph, earlier, tensors, Some(*block)));
        }
        under_way.push((*block, tensors.clone()));
        here.push(Node {
            op: Store.into(),
            name: store_name,
            inputs: tensors,
            outputs: stored.clone(),
            block: Some(*block),
            phase: Phase::Forward,
        });
        insertions.push((last + 1, here));
        let at = places.ahead_of(*block);
        let fetch = Node {
            op: Fetch.into(),
            name: fetch_name,
            inputs: stored,
            outputs: fetched,
            block: graph.nodes[at].block,
            phase: Phase::Recompute,
        };
        insertions.push((at, vec![fetch]));
    }
    // As if others followed at the same distance.
    let last = under_way.pop();
    let ends = under_way
        .into_iter()
        .map(|one| (one, places.recomputed_end));
    for ((block, tensors), at) in ends.chain(last.map(|one| (one, places.forward_end))) {
        let beside = graph.nodes.get(at).and_then(|node| node.block);
        let node = wait(graph, block, tensors, beside);
        insertions.push((at, vec![node]));
    }
    insertions
}

/// New tensors like these.
fn copies(graph: &mut Graph, tensors: &[TensorId], suffix: &str, role: Role) -> Vec<TensorId> {
    let add = |&id: &TensorId| {
        let (name, ty) = (format!("{}.{suffix}", graph.tensor(id).name), graph.ty(id));
        graph.add_tensor(name, ty, role)
    };
    tensors.iter().map(add).collect()
}

/// The end of a copy: what it read may be overwritten.
fn wait(graph: &Graph, stored: BlockId, tensors: Vec<TensorId>, block: Option<BlockId>) -> Node {
    Node {
        op: Await.into(),
        name: format!("{}.stored", graph.blocks[stored.index()].name),
        inputs: tensors,
        outputs: Vec::new(),
        block,
        phase: Phase::Forward,
    }
}
