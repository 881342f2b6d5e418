//! A second set of books. It watches a step node by node and works out for itself what is
//! alive: a tensor from the node that writes it to the last that reads it, by counting reads
//! down. What the plan says of lifetimes is never asked, only where a tensor lies.
//!
//! After each node it checks that
//! - no two live tensors overlap, except an output over an input of its own node where the op
//!   allows it;
//! - no byte has changed outside the node's outputs and workspace;
//!
//! and then overwrites everything dead with NaN, so that a kernel that reads what it should
//! not cannot give the right result by chance.

use std::ops::Range;

use cinch_engine::Arena;
use cinch_graph::{ALIGNMENT, Node, Role, TensorId, TrainingGraph};
use cinch_plan::{Placement, Plan, Residence};
use cinch_train::Session;

/// Every bit set is a NaN in single and in double precision.
const POISON: u8 = 0xff;

/// The books of one step.
pub struct Account {
    graph: TrainingGraph,
    plan: Plan,
    /// Bytes of everything that keeps its place.
    persistent: u64,
    reads_left: Vec<usize>,
    live: Vec<TensorId>,
    /// The arena as it was after the node before.
    before: Vec<u8>,
    /// Live bytes while each node ran, alignment included.
    timeline: Vec<u64>,
    /// The end of the highest byte that was ever occupied.
    highest: u64,
}

impl Account {
    /// Opens the books of the session's next step.
    pub fn new(session: &Session) -> Self {
        let step = session.plan();
        let arena = session.arena().expect("a session on the CPU");
        let kept = step.training.tensors.iter();
        let kept = kept.filter(|tensor| {
            let states = tensor.role == Role::State && step.config.batch.offload;
            let away = states || matches!(tensor.role, Role::Offloaded | Role::HostActivation);
            tensor.role.is_persistent() && !away
        });
        let persistent = kept.map(|tensor| aligned(tensor.ty.bytes())).sum();
        Self {
            graph: step.training.clone(),
            plan: step.plan.clone(),
            persistent,
            reads_left: Vec::new(),
            live: Vec::new(),
            before: arena.read(whole(arena)).to_vec(),
            timeline: vec![0; step.training.nodes.len()],
            highest: persistent,
        }
    }

    /// What [`Session::train_step_observed`] calls.
    pub fn after(&mut self, arena: &mut Arena, index: usize) {
        let node = self.graph.nodes[index].clone();
        if index == 0 {
            self.start_micro_batch(arena);
        }
        let transient = |id: &TensorId| self.graph.tensor(*id).role == Role::Activation;
        let outputs: Vec<TensorId> = node.outputs.iter().copied().filter(transient).collect();
        self.live.extend(outputs);
        self.measure(index, &node);
        self.check_writes(arena, index, &node);

        for id in &node.inputs {
            self.reads_left[id.index()] -= 1;
        }
        self.live.retain(|id| self.reads_left[id.index()] > 0);
        self.poison(arena, index);
        self.before.copy_from_slice(arena.read(whole(arena)));
    }

    /// The step is over: its peak and its extent are the planned ones, to the byte.
    pub fn close(&self) {
        assert!(
            self.live.is_empty(),
            "alive after the step: {:?}",
            self.live
        );
        assert_eq!(self.timeline, self.plan.timeline());
        assert_eq!(self.timeline.iter().max(), Some(&self.plan.peak_bytes));
        assert_eq!(self.highest, self.plan.arena_bytes);
    }

    fn start_micro_batch(&mut self, arena: &Arena) {
        assert!(self.live.is_empty(), "alive in between: {:?}", self.live);
        self.reads_left = vec![0; self.graph.tensors.len()];
        for id in self.graph.nodes.iter().flat_map(|node| &node.inputs) {
            self.reads_left[id.index()] += 1;
        }
        // What the session fills before the first node runs.
        for (index, tensor) in self.graph.tensors.iter().enumerate() {
            if matches!(tensor.role, Role::Batch | Role::Control) {
                let place = self.place(TensorId(index as u32));
                self.before[range(place)].copy_from_slice(arena.read(place));
            }
        }
    }

    fn place(&self, id: TensorId) -> Placement {
        let name = &self.graph.tensor(id).name;
        let place = self.plan.placement(id);
        place.unwrap_or_else(|| panic!("`{name}` is used but has no place"))
    }

    /// Adds up what is alive while the node runs.
    fn measure(&mut self, index: usize, node: &Node) {
        let tensors = self.live.iter().map(|&id| (self.place(id), Some(id)));
        let workspace = self.plan.workspace(index).map(|place| (place, None));
        let held: Vec<(Placement, Option<TensorId>)> = tensors.chain(workspace).collect();
        // One entry per piece of memory: its place, and who was there first.
        let mut pieces: Vec<(Placement, Option<TensorId>)> = Vec::new();
        for (place, owner) in held {
            let end = place.offset + aligned(place.bytes);
            assert!(place.offset >= self.persistent, "{}", node.name);
            self.highest = self.highest.max(end);
            let mut shared = false;
            for (other, earlier) in &mut pieces {
                if other.offset >= end || place.offset >= other.offset + aligned(other.bytes) {
                    continue;
                }
                assert!(
                    place.offset == other.offset && takes_over(node, *earlier, owner),
                    "`{}`: {earlier:?} at {other:?} and {owner:?} at {place:?}",
                    node.name
                );
                other.bytes = other.bytes.max(place.bytes);
                shared = true;
            }
            if !shared {
                pieces.push((place, owner));
            }
        }
        let live: u64 = pieces.iter().map(|(place, _)| aligned(place.bytes)).sum();
        self.timeline[index] = self.persistent + live;
    }

    /// Only the node's outputs and workspace may have changed.
    fn check_writes(&self, arena: &Arena, index: usize, node: &Node) {
        let outputs = node.outputs.iter().map(|&id| self.place(id));
        let outputs = outputs.filter(|place| place.residence == Residence::Arena);
        let written = outputs.chain(self.plan.workspace(index)).map(range);
        let now: &[u8] = arena.read(whole(arena));
        for gap in gaps(written.collect(), 0..now.len()) {
            let changed = || (gap.clone()).find(|&byte| now[byte] != self.before[byte]);
            assert!(
                now[gap.clone()] == self.before[gap.clone()],
                "`{}` wrote byte {:?}, which is none of its outputs",
                node.name,
                changed()
            );
        }
    }

    fn poison(&self, arena: &mut Arena, index: usize) {
        let transient = self.persistent as usize..arena.len();
        let live = self.live.iter().map(|&id| range(self.place(id))).collect();
        let whole = whole(arena);
        let bytes: &mut [u8] = arena.write(whole);
        for gap in gaps(live, transient) {
            bytes[gap].fill(POISON);
        }
        // After the update the gradients are spent: the next step must start them over.
        if index + 1 == self.graph.nodes.len() {
            for id in self.graph.parameters.iter().filter_map(|p| p.gradient) {
                bytes[range(self.place(id))].fill(POISON);
            }
        }
    }
}

/// Whether `to` is an output that may lie over the input `from`.
fn takes_over(node: &Node, from: Option<TensorId>, to: Option<TensorId>) -> bool {
    let allowed = node.op.declaration().in_place();
    allowed.iter().any(|&(input, output)| {
        Some(node.inputs[input]) == from && Some(node.outputs[output]) == to
    })
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

fn range(place: Placement) -> Range<usize> {
    place.offset as usize..place.end() as usize
}

fn whole(arena: &Arena) -> Placement {
    Placement::in_arena(0, arena.len() as u64)
}

/// What `taken` leaves of `all`.
fn gaps(mut taken: Vec<Range<usize>>, all: Range<usize>) -> Vec<Range<usize>> {
    taken.sort_by_key(|range| range.start);
    let mut gaps = Vec::new();
    let mut start = all.start;
    for range in taken {
        if start < range.start {
            gaps.push(start..range.start);
        }
        start = start.max(range.end);
    }
    gaps.push(start..all.end);
    gaps
}
