//! What graphs that run in turn have in common: the tensors that keep their place, by name.

use std::collections::HashMap;

use cinch_graph::{Role, Tensor, TensorType, aligned};

use crate::{Options, PERSISTENT_ROLES, Persistent, Placement, PlanError, Residence};

/// The persistent tensors of several graphs, each once.
#[derive(Default)]
pub(crate) struct Shared<'a> {
    slots: Vec<Slot>,
    by_name: HashMap<&'a str, usize>,
}

struct Slot {
    ty: TensorType,
    role: Role,
    /// With what ops may read beyond it, in any of the graphs.
    reserved: u64,
    place: Placement,
    /// The last graph that named it.
    graph: usize,
}

impl<'a> Shared<'a> {
    /// Adds a tensor of the graph with that number, or finds that another graph has it too.
    pub fn add(
        &mut self,
        graph: usize,
        tensor: &'a Tensor,
        reserved: u64,
    ) -> Result<(), PlanError> {
        let Some(&index) = self.by_name.get(tensor.name.as_str()) else {
            self.by_name.insert(&tensor.name, self.slots.len());
            self.slots.push(Slot {
                ty: tensor.ty,
                role: tensor.role,
                reserved,
                place: Placement::EMPTY,
                graph,
            });
            return Ok(());
        };
        let slot = &mut self.slots[index];
        let alike = match tensor.role {
            Role::Batch | Role::HostActivation => slot.ty.dtype == tensor.ty.dtype,
            _ => slot.ty == tensor.ty,
        };
        // Two tensors of one graph are never in one place.
        let is_other = slot.role != tensor.role || slot.graph == graph;
        if !alike || is_other {
            return Err(PlanError::NotShared {
                tensor: tensor.name.clone(),
            });
        }
        slot.reserved = slot.reserved.max(reserved);
        slot.graph = graph;
        Ok(())
    }

    /// Gives every tensor its place, in the order in which a single graph has them.
    pub fn place(&mut self, options: Options) -> Persistent {
        let mut persistent = Persistent { arena: 0, host: 0 };
        for role in PERSISTENT_ROLES {
            let residence = options.residence(role);
            let end = match residence {
                Residence::Arena => &mut persistent.arena,
                Residence::Host => &mut persistent.host,
            };
            for slot in self.slots.iter_mut().filter(|slot| slot.role == role) {
                slot.place = Placement {
                    residence,
                    offset: *end,
                    bytes: 0,
                };
                *end = end.saturating_add(aligned(slot.reserved));
            }
        }
        persistent
    }

    /// The place of a graph's tensor, with the bytes that it has there.
    pub fn placement(&self, tensor: &Tensor) -> Option<Placement> {
        let index = self.by_name.get(tensor.name.as_str())?;
        Some(Placement {
            bytes: tensor.ty.bytes(),
            ..self.slots[*index].place
        })
    }
}
