//! Every buffer of a step, placed: lifetimes, in-place reuse, offsets in one arena, and what
//! there is to say about them (breakdown, timeline, peak).
//!
//! A plan is pure: it needs no device, clock or randomness, and the same graph gives the same
//! plan, byte for byte.
//!
//! ```
//! use cinch_graph::{DType, Graph, Init, Target};
//! use cinch_plan::{Options, Plan};
//!
//! let mut graph = Graph::new(DType::F32);
//! let x = graph.batch("x", [2, 8], DType::F32);
//! let weight = graph.weight("weight", [4, 8], Init::Zeros);
//! let y = graph.linear("y", x, weight, None)?;
//! let plan = Plan::new(&graph, Options::new(Target::Cpu));
//! let place = plan.placement(y).expect("every tensor has a place");
//! assert_eq!(place.bytes, 2 * 4 * 4);
//! assert!(place.end() <= plan.arena_bytes);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod buffer;
mod category;
mod demand;
mod place;
mod shared;
mod summary;

use cinch_graph::{ALIGNMENT, Graph, Phase, Role, Target, Tensor, TensorId, aligned};
use thiserror::Error;

use shared::Shared;

pub use buffer::{Buffer, Owner};
pub use category::{BytesByCategory, Category};
pub use demand::Demand;
pub use place::place;
pub use summary::{Breakdown, LiveTensor, Moment};

/// Which allocation a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// The device's one allocation.
    Arena,
    /// A second one in the host's memory, which the device reads and writes where it is, or
    /// copies from.
    Host,
}

/// A range of one of the two allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub residence: Residence,
    pub offset: u64,
    /// What the tensor needs; the next offset is aligned.
    pub bytes: u64,
}

impl Placement {
    /// Nothing.
    pub const EMPTY: Self = Self::in_arena(0, 0);

    pub const fn in_arena(offset: u64, bytes: u64) -> Self {
        Self {
            residence: Residence::Arena,
            offset,
            bytes,
        }
    }

    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// What a graph is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub target: Target,
    /// Optimizer states live in host memory, where the update reads and writes them.
    pub offload_states: bool,
    /// What the device loses besides the arena: [`overhead_bytes`], or what was measured.
    pub overhead_bytes: u64,
    /// And what ranks exchange messages with.
    pub network_bytes: u64,
}

impl Options {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            offload_states: false,
            overhead_bytes: overhead_bytes(target),
            network_bytes: 0,
        }
    }

    /// Where tensors of this role lie.
    fn residence(self, role: Role) -> Residence {
        match role {
            Role::Offloaded | Role::HostActivation => Residence::Host,
            Role::State if self.offload_states => Residence::Host,
            _ => Residence::Arena,
        }
    }
}

/// Where everything is, for one graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub options: Options,
    /// By tensor; `None` for one that no node touches.
    placements: Vec<Option<Placement>>,
    /// By tensor: its bytes, with what ops may read beyond it.
    reserved: Vec<u64>,
    /// By node.
    workspaces: Vec<Option<Placement>>,
    /// By node: for each output, whether this is the first time in a micro batch that the
    /// accumulator is written.
    first_writes: Vec<Vec<bool>>,
    /// Bytes of tensors that keep their place in the arena over the whole step.
    pub persistent_bytes: u64,
    /// What is allocated.
    pub arena_bytes: u64,
    /// What is allocated in host memory beside it, for tensors that are kept there instead.
    pub host_bytes: u64,
    /// The most bytes that are in use at once, alignment included.
    pub peak_bytes: u64,
    /// The largest sum of live tensors, without alignment: no plan of this graph in this order
    /// can be smaller.
    pub lower_bound_bytes: u64,
    /// The node at which the peak is reached.
    pub peak_node: usize,
    /// Live bytes (alignment included) while each node runs.
    timeline: Vec<u64>,
    buffers: Vec<Buffer>,
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    #[error("`{tensor}` is not the same in all graphs that share its place")]
    NotShared { tensor: String },
    #[error(
        "what is alive at `{node}` takes more than 2^64 bytes, which no plan counts\n\
         hint: a smaller batch, shorter sequences or a smaller model"
    )]
    TooLarge { node: String },
}

/// A sum that stops at the largest number.
pub(crate) fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

impl Plan {
    /// Plans a graph in an arena of its own.
    pub fn new(graph: &Graph, options: Options) -> Self {
        let mut placements = vec![None; graph.tensors.len()];
        let reserved = reserved(graph, options.target);
        let mut persistent = Persistent { arena: 0, host: 0 };
        for id in persistent_order(graph) {
            let residence = options.residence(graph.tensor(id).role);
            let end = match residence {
                Residence::Arena => &mut persistent.arena,
                Residence::Host => &mut persistent.host,
            };
            placements[id.index()] = Some(Placement {
                residence,
                offset: *end,
                bytes: graph.ty(id).bytes(),
            });
            *end = end.saturating_add(aligned(reserved[id.index()]));
        }
        Self::with_persistent(graph, options, placements, persistent)
    }

    /// Plans graphs that run in turn in one arena: training and evaluation, rows of several
    /// lengths, runs of more and fewer tokens. What several of them name is one tensor in one
    /// place, and their transient parts overlap. A batch tensor may have another size in each; it
    /// has room for the largest. The arena must have room for the largest of the plans.
    pub fn several(graphs: &[&Graph], options: Options) -> Result<Vec<Self>, PlanError> {
        let mut shared = Shared::default();
        for (number, graph) in graphs.iter().enumerate() {
            let reserved = reserved(graph, options.target);
            for id in persistent_order(graph) {
                shared.add(number, graph.tensor(id), reserved[id.index()])?;
            }
        }
        let persistent = shared.place(options);
        let plan = |graph: &&Graph| {
            let mut placements = vec![None; graph.tensors.len()];
            for id in persistent_order(graph) {
                let tensor = graph.tensor(id);
                placements[id.index()] = shared.placement(tensor);
            }
            Self::with_persistent(graph, options, placements, persistent)
        };
        Ok(graphs.iter().map(plan).collect())
    }

    fn with_persistent(
        graph: &Graph,
        options: Options,
        mut placements: Vec<Option<Placement>>,
        persistent: Persistent,
    ) -> Self {
        let persistent_bytes = persistent.arena;
        let reserved = reserved(graph, options.target);
        let buffers = buffer::buffers(graph, options.target, &reserved);
        let offsets = place(&buffers);
        let mut workspaces = vec![None; graph.nodes.len()];
        let mut extent = 0;
        for (buffer, offset) in buffers.iter().zip(offsets) {
            extent = extent.max(offset.saturating_add(aligned(buffer.bytes)));
            let offset = persistent_bytes.saturating_add(offset);
            for &owner in &buffer.owners {
                match owner {
                    Owner::Tensor(id) => {
                        let bytes = graph.ty(id).bytes();
                        placements[id.index()] = Some(Placement::in_arena(offset, bytes));
                    }
                    Owner::Workspace(node) => {
                        let bytes = buffer.bytes;
                        workspaces[node.index()] = Some(Placement::in_arena(offset, bytes));
                    }
                }
            }
        }
        let timeline = summary::timeline(&buffers, graph.nodes.len(), persistent_bytes, aligned);
        let resident = persistent_order(graph)
            .map(|id| graph.tensor(id))
            .filter(|tensor| options.residence(tensor.role) == Residence::Arena);
        let raw_persistent = sum(resident.map(|tensor| tensor.ty.bytes()));
        let raw = summary::timeline(&buffers, graph.nodes.len(), raw_persistent, |b| b);
        let peak_bytes = timeline.iter().copied().max().unwrap_or(persistent_bytes);
        Self {
            options,
            placements,
            reserved,
            workspaces,
            first_writes: first_writes(graph),
            persistent_bytes,
            arena_bytes: persistent_bytes.saturating_add(extent),
            host_bytes: persistent.host,
            peak_bytes,
            lower_bound_bytes: raw.iter().copied().max().unwrap_or(raw_persistent),
            peak_node: timeline.iter().position(|&b| b == peak_bytes).unwrap_or(0),
            timeline,
            buffers,
        }
    }

    /// Refuses a plan whose sums 64 bits do not count. They stop at the largest number, so what
    /// reaches it is not the sum any more. `graph` is the one that was planned.
    pub fn check_sizes(&self, graph: &Graph) -> Result<(), PlanError> {
        let outside = sum([self.options.overhead_bytes, self.options.network_bytes].into_iter());
        let device = self.arena_bytes.saturating_add(outside);
        let most = device.saturating_add(self.host_bytes);
        if most > u64::MAX - ALIGNMENT {
            let peak = graph.nodes.get(self.peak_node);
            let node = peak.map_or_else(String::new, |node| node.name.clone());
            return Err(PlanError::TooLarge { node });
        }
        Ok(())
    }

    pub fn placement(&self, tensor: TensorId) -> Option<Placement> {
        self.placements[tensor.index()]
    }

    /// What ops read beyond the end of a transient tensor, where they expect zeros: whoever writes
    /// the tensor clears it. Beyond tensors that keep their place there are zeros from the start.
    pub fn beyond(&self, tensor: TensorId) -> Option<Placement> {
        let place = self.placement(tensor)?;
        let is_transient =
            place.residence == Residence::Arena && place.offset >= self.persistent_bytes;
        let bytes = self.reserved[tensor.index()].saturating_sub(place.bytes);
        (is_transient && bytes > 0).then(|| Placement::in_arena(place.end(), bytes))
    }

    pub fn workspace(&self, node: usize) -> Option<Placement> {
        self.workspaces[node]
    }

    /// Whether the node's output is the first write to that accumulator in a micro batch.
    pub fn is_first_write(&self, node: usize, output: usize) -> bool {
        self.first_writes[node][output]
    }

    /// The transient buffers, with their lifetimes.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Live bytes while each node runs.
    pub fn timeline(&self) -> &[u64] {
        &self.timeline
    }
}

/// Ends of what keeps its place, in each allocation.
#[derive(Clone, Copy)]
pub(crate) struct Persistent {
    arena: u64,
    host: u64,
}

/// Where the next content of a batch tensor is staged on a GPU: right behind it.
pub fn twin(place: Placement) -> Placement {
    Placement {
        offset: place.offset + aligned(place.bytes),
        ..place
    }
}

/// Bytes of each tensor with what ops may read beyond it.
pub(crate) fn reserved(graph: &Graph, target: Target) -> Vec<u64> {
    let own = |tensor: &Tensor| match (tensor.role, target) {
        // The next micro batch arrives beside this one.
        (Role::Batch, Target::Cuda) => aligned(tensor.ty.bytes()).saturating_add(tensor.ty.bytes()),
        _ => tensor.ty.bytes(),
    };
    let mut reserved: Vec<u64> = graph.tensors.iter().map(own).collect();
    for node in &graph.nodes {
        for (input, &id) in node.inputs.iter().enumerate() {
            let tensor = graph.tensor(id);
            let reach = node.op.declaration().reach(input, &tensor.ty, target);
            let slot = &mut reserved[id.index()];
            *slot = reach.max(*slot);
        }
    }
    reserved
}

const PERSISTENT_ROLES: [Role; 11] = [
    Role::Parameter,
    Role::Offloaded,
    Role::ComputeCopy,
    Role::Gradient,
    Role::State,
    Role::LossScale,
    Role::Cache,
    Role::HostActivation,
    Role::Batch,
    Role::Control,
    Role::Result,
];

/// Persistent tensors that the graph touches, in the order of their places: weights first, so
/// that graphs of one model agree on them. Gradients of one type are side by side, so that their
/// norm is a pass over few ranges.
fn persistent_order(graph: &Graph) -> impl Iterator<Item = TensorId> + '_ {
    PERSISTENT_ROLES.into_iter().flat_map(move |role| {
        let ids = (0..graph.tensors.len() as u32).map(TensorId);
        let mut ids: Vec<TensorId> = ids.filter(|&id| graph.tensor(id).role == role).collect();
        if role == Role::Gradient {
            ids.sort_by_key(|&id| graph.ty(id).dtype);
        }
        ids
    })
}

fn first_writes(graph: &Graph) -> Vec<Vec<bool>> {
    let mut written = vec![false; graph.tensors.len()];
    graph
        .nodes
        .iter()
        .map(|node| {
            node.outputs
                .iter()
                .map(|id| !std::mem::replace(&mut written[id.index()], true))
                .collect()
        })
        .collect()
}

/// Memory outside the arena.
///
/// On a GPU: the driver's context with loaded modules and library handles; the figure is what
/// an H200 with driver 580 and CUDA 13 showed for a process that holds cuBLAS handles, and is
/// replaced by a measurement wherever a card is at hand. On the CPU: code, tables, thread
/// stacks and packing buffers of the process, measured as resident size less the arena.
pub fn overhead_bytes(target: Target) -> u64 {
    match target {
        Target::Cpu => 48 << 20,
        Target::Cuda => 650_969_088,
    }
}

/// Nodes that run once per micro batch come first. In a step that updates weights inside the
/// backward, these are among them: it has one micro batch.
pub fn num_micro_nodes(graph: &Graph) -> usize {
    graph
        .nodes
        .iter()
        .rposition(|node| node.phase != Phase::Update)
        .map_or(0, |last| last + 1)
}
