//! What there is to say about a plan: bytes by purpose, and what is alive when.

use cinch_graph::{Graph, Phase, Role, aligned};
use serde::Serialize;

use crate::buffer::{Buffer, Owner};
use crate::category::categories;
use crate::{Category, Plan, Residence};

/// Bytes by purpose at the peak. The sum is the arena plus the overhead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Breakdown {
    pub weights: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Everything between forward and backward that is alive at the peak, and what placement
    /// could not use; of a graph that generates, its caches too.
    pub activations: u64,
    /// Weights that were brought ahead of their use.
    #[serde(skip_serializing_if = "is_none")]
    pub staged: u64,
    /// Gradients on their way between ranks.
    #[serde(skip_serializing_if = "is_none")]
    pub exchanged: u64,
    pub batch: u64,
    /// Scratch memory of the op at the peak, and the step's scalars.
    pub workspace: u64,
    /// Outside the arena, what ranks exchange messages with.
    #[serde(skip_serializing_if = "is_none")]
    pub network: u64,
    /// Outside the arena.
    pub overhead: u64,
}

/// Whether a part is left out, because only runs of several ranks have it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

impl Breakdown {
    /// The parts by name, in the order in which they are shown; those that only runs of several
    /// ranks have, or with weights in host memory, where there is anything of them.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let some = |part: (&'static str, u64)| (part.1 > 0).then_some(part);
        let parts = [
            Some(("weights", self.weights)),
            some(("staged weights", self.staged)),
            Some(("gradients", self.gradients)),
            some(("exchanged gradients", self.exchanged)),
            Some(("optimizer", self.optimizer)),
            Some(("activations", self.activations)),
            Some(("batch", self.batch)),
            Some(("workspace", self.workspace)),
            some(("network", self.network)),
            Some(("overhead", self.overhead)),
        ];
        parts.into_iter().flatten().collect()
    }

    pub fn total(&self) -> u64 {
        crate::sum(self.parts().into_iter().map(|(_, bytes)| bytes))
    }
}

/// A tensor that is alive at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveTensor {
    pub name: String,
    pub r#type: String,
    pub bytes: u64,
}

/// One point of the memory timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    pub node: String,
    pub op: &'static str,
    pub phase: &'static str,
    pub bytes: u64,
}

/// Live bytes while each node runs: `base` plus the buffers alive then.
pub(crate) fn timeline(
    buffers: &[Buffer],
    nodes: usize,
    base: u64,
    size: impl Fn(u64) -> u64,
) -> Vec<u64> {
    // Wider than the sizes, so that what ends takes away exactly what it added.
    let mut change = vec![0_i128; nodes + 1];
    for buffer in buffers {
        let bytes = i128::from(size(buffer.bytes));
        change[buffer.start] += bytes;
        change[buffer.end + 1] -= bytes;
    }
    let mut live = i128::from(base);
    change[..nodes]
        .iter()
        .map(|delta| {
            live += delta;
            u64::try_from(live).unwrap_or(u64::MAX)
        })
        .collect()
}

impl Plan {
    /// Bytes by purpose; `graph` is the one that was planned.
    pub fn breakdown(&self, graph: &Graph) -> Breakdown {
        let mut breakdown = Breakdown {
            overhead: self.options.overhead_bytes,
            network: self.options.network_bytes,
            ..Breakdown::default()
        };
        for (tensor, bytes) in graph.tensors.iter().zip(&self.reserved) {
            if self.options.residence(tensor.role) == Residence::Host {
                continue;
            }
            let bytes = aligned(*bytes);
            let part = match tensor.role {
                Role::Parameter | Role::Offloaded | Role::ComputeCopy => &mut breakdown.weights,
                Role::Gradient => &mut breakdown.gradients,
                Role::State => &mut breakdown.optimizer,
                Role::Batch => &mut breakdown.batch,
                Role::Control | Role::LossScale | Role::Result => &mut breakdown.workspace,
                Role::Activation | Role::HostActivation | Role::Cache => continue,
            };
            *part = part.saturating_add(bytes);
        }
        let peak = self.workspaces.get(self.peak_node).copied().flatten();
        let scratch = peak.map_or(0, |placement| aligned(placement.bytes));
        breakdown.workspace = breakdown.workspace.saturating_add(scratch);
        let of_tensors = categories(graph);
        let at_peak = |buffer: &&Buffer| (buffer.start..=buffer.end).contains(&self.peak_node);
        for buffer in self.buffers().iter().filter(at_peak) {
            let part = match Category::of_buffer(buffer, &of_tensors) {
                Category::Staged => &mut breakdown.staged,
                Category::Exchanged => &mut breakdown.exchanged,
                _ => continue,
            };
            *part = part.saturating_add(aligned(buffer.bytes));
        }
        let outside = crate::sum([breakdown.overhead, breakdown.network].into_iter());
        let inside = breakdown.total().saturating_sub(outside);
        breakdown.activations = self.arena_bytes.saturating_sub(inside);
        breakdown
    }

    /// What is alive at the peak besides weights, gradients and states, largest first.
    pub fn alive_at_peak(&self, graph: &Graph) -> Vec<LiveTensor> {
        let mut alive: Vec<LiveTensor> = self
            .buffers()
            .iter()
            .filter(|b| (b.start..=b.end).contains(&self.peak_node))
            .map(|buffer| self.describe(graph, buffer))
            .collect();
        alive.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        alive
    }

    fn describe(&self, graph: &Graph, buffer: &Buffer) -> LiveTensor {
        let mut description = LiveTensor {
            name: String::new(),
            r#type: "workspace".to_owned(),
            bytes: buffer.bytes,
        };
        for &owner in &buffer.owners {
            match owner {
                Owner::Workspace(node) => {
                    description.name = format!("{} (workspace)", graph.node(node).name);
                }
                // The last owner that exists by the time of the peak.
                Owner::Tensor(id) => {
                    let node = &graph.nodes[self.peak_node];
                    let written_later = !description.name.is_empty()
                        && !node.inputs.contains(&id)
                        && !node.outputs.contains(&id);
                    if !written_later {
                        let tensor = graph.tensor(id);
                        description.name.clone_from(&tensor.name);
                        description.r#type = tensor.ty.to_string();
                    }
                }
            }
        }
        description
    }

    /// The memory timeline over the step.
    pub fn moments(&self, graph: &Graph) -> Vec<Moment> {
        let live = graph.nodes.iter().zip(self.timeline());
        live.map(|(node, &bytes)| Moment {
            node: node.name.clone(),
            op: node.op.name(),
            phase: match node.phase {
                Phase::Forward => "forward",
                Phase::Recompute => "recompute",
                Phase::Backward => "backward",
                Phase::Exchange => "exchange",
                Phase::Update => "update",
            },
            bytes,
        })
        .collect()
    }
}
