//! Live bytes by what they are for, node by node: the timeline, taken apart.
//!
//! [`Plan::breakdown`] says what the arena is spent on at the peak. A picture of the step also
//! needs the moments before and after it, with weights and their compute copies told apart.

use cinch_graph::{Graph, Role, TensorId, aligned};
use serde::Serialize;

use crate::buffer::{Buffer, Owner};
use crate::{Plan, Residence};

/// What a byte of the arena is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    Weights,
    ComputeCopies,
    Gradients,
    Optimizer,
    Activations,
    /// Scratch memory of an op, staging of states that live in host memory included.
    Workspace,
    Batch,
    /// What tokens leave for those that follow: keys and values, states.
    Cache,
    /// Weights that are brought ahead of their use and dropped behind it.
    Staged,
    /// Gradients on their way between ranks.
    Exchanged,
    /// The step's scalars, and what a plan that shares its arena with another leaves alone.
    Other,
}

impl Category {
    /// In the order of the arrays that [`Plan::timeline_by_category`] returns.
    pub const ALL: [Self; 11] = [
        Self::Weights,
        Self::ComputeCopies,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Workspace,
        Self::Batch,
        Self::Cache,
        Self::Staged,
        Self::Exchanged,
        Self::Other,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::ComputeCopies => "compute copies",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer states",
            Self::Activations => "activations",
            Self::Workspace => "workspace",
            Self::Batch => "batch",
            Self::Cache => "cache",
            Self::Staged => "staged weights",
            Self::Exchanged => "exchanged gradients",
            Self::Other => "other",
        }
    }

    /// Its place in [`Self::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    fn of(role: Role) -> Self {
        match role {
            Role::Parameter | Role::Offloaded => Self::Weights,
            Role::ComputeCopy => Self::ComputeCopies,
            Role::Gradient => Self::Gradients,
            Role::State => Self::Optimizer,
            Role::Batch => Self::Batch,
            Role::Cache => Self::Cache,
            Role::Activation | Role::HostActivation => Self::Activations,
            Role::Control | Role::LossScale | Role::Result => Self::Other,
        }
    }

    /// A buffer is either one node's scratch memory or a chain of transient tensors.
    pub(crate) fn of_buffer(buffer: &Buffer, of_tensors: &[Self]) -> Self {
        match buffer.owners.first() {
            Some(Owner::Workspace(_)) => Self::Workspace,
            Some(Owner::Tensor(id)) => of_tensors[id.index()],
            None => Self::Activations,
        }
    }
}

/// What each tensor is for: by its role, and of transient ones by what makes or sends them.
pub(crate) fn categories(graph: &Graph) -> Vec<Category> {
    let roles = graph.tensors.iter().map(|tensor| Category::of(tensor.role));
    let mut categories: Vec<Category> = roles.collect();
    let is_back = |id: &TensorId| graph.tensor(*id).role == Role::HostActivation;
    let others = graph.nodes.iter();
    for node in others.filter(|node| !node.inputs.iter().any(is_back)) {
        let (category, tensors) = match (node.op.declaration().brings_weights(), graph.wire(node)) {
            (true, _) => (Category::Staged, node.outputs.as_slice()),
            (false, Some(_)) => (Category::Exchanged, node.outputs.as_slice()),
            (false, None) => continue,
        };
        let sent = match category {
            Category::Exchanged => node.inputs.as_slice(),
            _ => &[],
        };
        for id in tensors.iter().chain(sent) {
            if graph.tensor(*id).role == Role::Activation {
                categories[id.index()] = category;
            }
        }
    }
    categories
}

/// Bytes by category, in the order of [`Category::ALL`].
pub type BytesByCategory = [u64; Category::ALL.len()];

impl Plan {
    /// Live bytes (alignment included) while each node runs, by category. The sum over the
    /// categories is [`Plan::timeline`]. `graph` is the one that was planned.
    pub fn timeline_by_category(&self, graph: &Graph) -> Vec<BytesByCategory> {
        // Wider than the sizes, so that what ends takes away exactly what it added.
        let mut live = self.persistent_by_category(graph).map(i128::from);
        let mut change = vec![[0_i128; Category::ALL.len()]; graph.nodes.len() + 1];
        let of_tensors = categories(graph);
        for buffer in self.buffers() {
            let category = Category::of_buffer(buffer, &of_tensors).index();
            let bytes = i128::from(aligned(buffer.bytes));
            change[buffer.start][category] += bytes;
            change[buffer.end + 1][category] -= bytes;
        }
        change.pop();
        let step = |change: BytesChange| {
            for (bytes, delta) in live.iter_mut().zip(change) {
                *bytes += delta;
            }
            live.map(|bytes| u64::try_from(bytes).unwrap_or(u64::MAX))
        };
        change.into_iter().map(step).collect()
    }

    /// What keeps its place over the whole step.
    fn persistent_by_category(&self, graph: &Graph) -> BytesByCategory {
        let mut persistent = BytesByCategory::default();
        for (tensor, bytes) in graph.tensors.iter().zip(&self.reserved) {
            let in_arena = self.options.residence(tensor.role) == Residence::Arena;
            if tensor.role.is_persistent() && in_arena {
                let slot = &mut persistent[Category::of(tensor.role).index()];
                *slot = slot.saturating_add(aligned(*bytes));
            }
        }
        let named = crate::sum(persistent.into_iter());
        let shared = self.persistent_bytes.saturating_sub(named);
        let other = &mut persistent[Category::Other.index()];
        *other = other.saturating_add(shared);
        persistent
    }
}

/// What begins less what ends with a node.
type BytesChange = [i128; Category::ALL.len()];
