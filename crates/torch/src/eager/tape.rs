//! The tape: the backward graph's nodes, in the order in which their ops ran.
//!
//! A long loop keeps a million nodes, and a replay's time is the time to read them. So they lie side by side: forward writes
//! the tape from the front, backward reads it from the end, and both walk through memory in a line. A node's place is also
//! its sequence number. Places at the end are given up as soon as their nodes are gone, so that the next step, or
//! a recomputation, takes the same ones again.

use std::num::NonZero;
use std::rc::Rc;

use smallvec::SmallVec;

use super::checkpoint::Packed;
use super::context::State;
use super::dtype::DType;
use super::layout::Layout;
use super::node::{Formula, Grads};
use super::place::PlaceId;
use super::tensor::Tensor;

/// A node's place on the tape, counted from one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(NonZero<u32>);

impl NodeId {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Where a gradient goes: a node, and which of its op's outputs it belongs to.
#[derive(Clone, Copy)]
pub(super) struct Edge {
    pub node: NodeId,
    pub output: u32,
}

/// One for each input of an op; none where no gradient is wanted.
pub(super) type Edges = SmallVec<[Option<Edge>; 2]>;
pub(super) type Saved = SmallVec<[Option<Packed>; 2]>;
pub(super) type Outputs = SmallVec<[Output; 1]>;

/// An output of an op: gradients are brought to its sizes and type.
pub(super) struct Output {
    pub layout: Rc<Layout>,
    pub dtype: DType,
    /// What has arrived of its gradient.
    pub grad: Option<Tensor>,
}

impl Output {
    pub fn of(tensor: &Tensor) -> Output {
        Output {
            layout: tensor.layout().clone(),
            dtype: tensor.dtype(),
            grad: None,
        }
    }
}

pub(super) enum Kind {
    /// A leaf takes its gradient.
    Accumulate(Tensor),
    Op(Formula),
}

impl Kind {
    /// Of a node that is gone, or runs: a formula that nobody calls, and no memory.
    fn none() -> Kind {
        Kind::Op(Box::new(|_| Grads::new()))
    }
}

/// Two cache lines; what a gradient on its way to a node looks at is in the first.
#[repr(C, align(64))]
pub(super) struct Node {
    /// Tensors that are its op's outputs, edges that lead to it, and the engine while it has yet to run.
    pub references: u32,
    /// Edges by which gradients are still to come in this pass.
    pub dependencies: u32,
    /// The last pass of the engine that reached it.
    pass: u32,
    place: PlaceId,
    /// The formula holds tensors itself, besides those that were saved.
    formula_holds_tensors: bool,
    outputs: Outputs,
    kind: Kind,
    next: Edges,
    saved: Saved,
}

const _: () = assert!(size_of::<Node>() == 128, "a node is two cache lines");

impl Node {
    /// The node of an op that has run, of so many outputs.
    pub fn of_op(
        place: PlaceId,
        formula: Formula,
        formula_holds_tensors: bool,
        next: Edges,
        outputs: Outputs,
        saved: Saved,
    ) -> Node {
        Node {
            references: outputs.len() as u32,
            dependencies: 0,
            pass: 0,
            place,
            formula_holds_tensors,
            outputs,
            kind: Kind::Op(formula),
            next,
            saved,
        }
    }

    /// The node by which a leaf takes its gradient; nothing refers to it yet.
    pub fn of_leaf(leaf: &Tensor) -> Node {
        Node {
            references: 0,
            dependencies: 0,
            pass: 0,
            place: leaf.context().place(),
            formula_holds_tensors: false,
            outputs: Outputs::from_iter([Output::of(leaf)]),
            kind: Kind::Accumulate(leaf.clone()),
            next: Edges::new(),
            saved: Saved::new(),
        }
    }

    /// Marks it for a pass, which refers to it until it has run; one where it was not marked yet.
    fn reach(&mut self, pass: u32) -> usize {
        let is_new = self.pass != pass;
        if is_new {
            self.pass = pass;
            self.dependencies = 0;
            self.references += 1;
        }
        usize::from(is_new)
    }

    /// Whether tensors may live as long as this node, and not only until it has run. A model keeps its parameters; other
    /// leaves may have no other owner once the graph has run.
    fn holds_tensors(&self) -> bool {
        match &self.kind {
            Kind::Accumulate(leaf) => !leaf.is_parameter() || leaf.handles() == 1,
            Kind::Op(_) => self.formula_holds_tensors,
        }
    }
}

/// One run of the engine over the graph.
pub(super) struct Pass {
    number: u32,
    /// Some node holds tensors: they go when the graph's last handle does, in the graph's order, and so the graph stays.
    keeps_graph: bool,
}

/// The parts of a node while it runs.
pub(super) struct Running {
    pub kind: Kind,
    pub place: PlaceId,
    pub next: Edges,
    pub saved: Saved,
    pub outputs: Outputs,
}

/// Nodes that are asked of the system at once: half a megabyte.
const CHUNK: usize = 1 << 12;

#[derive(Default)]
pub(super) struct Tape {
    /// Nodes by the [`CHUNK`]: a tape that grows moves nothing.
    chunks: Vec<Vec<Node>>,
    len: usize,
    /// Nodes that lose a reference once the one that is being taken down is gone: a chain of a hundred thousand must not be
    /// taken down by recursion.
    pending: Vec<NodeId>,
    is_taking_down: bool,
    passes: u32,
}

impl Tape {
    pub fn push(&mut self, node: Node) -> NodeId {
        let chunk = self.len / CHUNK;
        if chunk == self.chunks.len() {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks[chunk].push(node);
        self.len += 1;
        let place = u32::try_from(self.len).ok().and_then(NonZero::new);
        NodeId(place.expect("a graph has fewer than four thousand million nodes"))
    }

    fn at(&self, index: usize) -> &Node {
        &self.chunks[index / CHUNK][index % CHUNK]
    }

    pub fn node(&self, id: NodeId) -> &Node {
        self.at(id.index())
    }

    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        let index = id.index();
        &mut self.chunks[index / CHUNK][index % CHUNK]
    }

    pub fn output(&self, edge: Edge) -> &Output {
        &self.node(edge.node).outputs[edge.output as usize]
    }

    pub fn output_mut(&mut self, edge: Edge) -> &mut Output {
        &mut self.node_mut(edge.node).outputs[edge.output as usize]
    }

    /// Later ops run first; leaves run as soon as they can.
    pub fn priority(&self, id: NodeId) -> u32 {
        match self.node(id).kind {
            Kind::Accumulate(_) => u32::MAX,
            _ => id.0.get(),
        }
    }

    /// Counts the edges by which gradients will come to each node behind `root`, and takes a reference to each. An op's
    /// inputs were made before it, so that edges lead towards the front and one walk meets every node after all that
    /// lead to it.
    pub fn begin_pass(&mut self, root: NodeId) -> Pass {
        self.passes += 1;
        let pass = self.passes;
        let mut keeps_graph = false;
        let mut waiting = self.node_mut(root).reach(pass);
        for index in (0..=root.index()).rev() {
            if waiting == 0 {
                break;
            }
            let node = self.at(index);
            if node.pass != pass {
                continue;
            }
            waiting -= 1;
            keeps_graph |= node.holds_tensors();
            for input in 0..node.next.len() {
                if let Some(edge) = self.at(index).next[input] {
                    let next = self.node_mut(edge.node);
                    waiting += next.reach(pass);
                    next.dependencies += 1;
                }
            }
        }
        Pass {
            number: pass,
            keeps_graph,
        }
    }

    /// Nodes that a pass reached and did not run.
    pub fn left_of(&self, pass: &Pass) -> Vec<NodeId> {
        let ids = (1..=self.len as u32).filter_map(NonZero::new);
        ids.map(NodeId)
            .filter(|&id| self.node(id).pass == pass.number)
            .collect()
    }

    /// Takes a node's parts out, to run it.
    pub fn start(&mut self, id: NodeId) -> Running {
        let node = self.node_mut(id);
        node.pass = 0;
        Running {
            kind: std::mem::replace(&mut node.kind, Kind::none()),
            place: node.place,
            next: std::mem::take(&mut node.next),
            saved: std::mem::take(&mut node.saved),
            outputs: std::mem::take(&mut node.outputs),
        }
    }

    /// Puts a node's parts back.
    pub fn restore(&mut self, id: NodeId, running: Running) {
        let node = self.node_mut(id);
        node.kind = running.kind;
        node.next = running.next;
        node.outputs = running.outputs;
    }

    /// After a node has run. One that others still refer to may run again if it had saved nothing; else its edges go, and
    /// with them what only it referred to: a graph is taken down while it is read.
    pub fn finish(&mut self, pass: &Pass, id: NodeId, running: Running, had_saved: bool) {
        let stays = !had_saved || pass.keeps_graph;
        if self.node(id).references > 1 && stays {
            self.restore(id, running);
            return;
        }
        let next = running.next;
        for edge in next.iter().flatten() {
            // Never the last one: the engine refers to it too, until it has run.
            self.node_mut(edge.node).references -= 1;
        }
    }

    /// Gives up a reference; the node's parts, where it was the last.
    fn lose(&mut self, id: NodeId) -> Option<(Saved, Edges, Kind)> {
        let node = self.node_mut(id);
        node.references -= 1;
        if node.references > 0 {
            return None;
        }
        let saved = std::mem::take(&mut node.saved);
        let next = std::mem::take(&mut node.next);
        let kind = std::mem::replace(&mut node.kind, Kind::none());
        Some((saved, next, kind))
    }

    /// Gives up the places at the end that nobody refers to.
    fn trim(&mut self) {
        while let Some(index) = self.len.checked_sub(1)
            && self.at(index).references == 0
        {
            self.chunks[index / CHUNK].pop();
            self.len = index;
        }
    }
}

impl State {
    /// A tensor, an edge or the engine lets go of a node.
    pub(super) fn release_node(&self, id: NodeId) {
        let mut tape = self.tape.borrow_mut();
        if tape.is_taking_down {
            tape.pending.push(id);
            return;
        }
        let Some(mut parts) = tape.lose(id) else {
            return;
        };
        tape.is_taking_down = true;
        drop(tape);
        loop {
            let (saved, next, kind) = parts;
            // In the order in which they were saved. Their own nodes join the pending ones.
            for packed in saved {
                drop(packed);
            }
            if let Kind::Accumulate(leaf) = &kind {
                leaf.forget_accumulator();
            }
            drop(kind);
            let mut tape = self.tape.borrow_mut();
            let edges = next.into_iter().flatten();
            tape.pending.extend(edges.map(|edge| edge.node));
            let next_parts = loop {
                let Some(id) = tape.pending.pop() else {
                    break None;
                };
                if let Some(parts) = tape.lose(id) {
                    break Some(parts);
                }
            };
            let Some(next_parts) = next_parts else {
                tape.is_taking_down = false;
                tape.trim();
                return;
            };
            parts = next_parts;
        }
    }
}
