//! A node's tensors as slices of the arena, or of the host memory beside it.

use cinch_graph::{Dropout as DropoutSpec, Graph, Node, TensorId, TensorType};
use cinch_plan::{Placement, Plan, Residence};

use super::dropout::{Dropout, RandomState};
use super::parallel::Accumulate;
use crate::arena::{Arena, Element};

/// One node, resolved. The plan guarantees what the views rely on: the tensors of a node do
/// not overlap, except an output that takes over an input, which is then never viewed as an
/// input (see [`Self::input_unless_in_place`]).
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub arena: &'a Arena,
    pub host: &'a Arena,
    pub graph: &'a Graph,
    pub plan: &'a Plan,
    pub node: &'a Node,
    pub index: usize,
    /// Whether this is the first micro batch of a step.
    pub first_micro: bool,
}

impl<'a> Operands<'a> {
    fn place(&self, id: TensorId) -> Placement {
        self.plan.placement(id).unwrap_or(Placement::EMPTY)
    }

    /// The allocation that a place is in.
    fn memory(&self, place: Placement) -> &'a Arena {
        match place.residence {
            Residence::Arena => self.arena,
            Residence::Host => self.host,
        }
    }

    pub fn input_type(&self, input: usize) -> TensorType {
        self.graph.ty(self.node.inputs[input])
    }

    pub fn output_type(&self, output: usize) -> TensorType {
        self.graph.ty(self.node.outputs[output])
    }

    pub fn input<T: Element>(&self, input: usize) -> &'a [T] {
        // SAFETY: no output of this node overlaps an input that is viewed (type's contract),
        // and no other node runs at the same time.
        unsafe {
            let place = self.place(self.node.inputs[input]);
            self.memory(place).view(place)
        }
    }

    pub fn output<T: Element>(&self, output: usize) -> &'a mut [T] {
        // SAFETY: outputs of a node are distinct tensors, placed apart by the plan; each is
        // viewed once per execution of the node.
        unsafe {
            let place = self.place(self.node.outputs[output]);
            self.memory(place).view_mut(place)
        }
    }

    /// The input, or `None` where the output has taken over its memory.
    pub fn input_unless_in_place<T: Element>(
        &self,
        input: usize,
        output: usize,
    ) -> Option<&'a [T]> {
        (!self.is_in_place(input, output)).then(|| self.input(input))
    }

    pub fn is_in_place(&self, input: usize, output: usize) -> bool {
        let from = self.place(self.node.inputs[input]);
        let to = self.place(self.node.outputs[output]);
        (from.residence, from.offset) == (to.residence, to.offset)
    }

    /// Whether an accumulator starts over with this write.
    pub fn mode(&self, output: usize) -> Accumulate {
        let accumulates = self
            .graph
            .tensor(self.node.outputs[output])
            .role
            .is_accumulator();
        let starts = self.first_micro && self.plan.is_first_write(self.index, output);
        if accumulates && !starts {
            Accumulate::Add
        } else {
            Accumulate::Overwrite
        }
    }

    /// An accumulator and how to write it.
    pub fn accumulator<T: Element>(&self, output: usize) -> (&'a mut [T], Accumulate) {
        (self.output(output), self.mode(output))
    }

    pub fn workspace<T: Element>(&self) -> &'a mut [T] {
        match self.plan.workspace(self.index) {
            // SAFETY: the workspace lives only while this node runs, apart from its tensors.
            Some(place) => unsafe { self.arena.view_mut(place) },
            None => &mut [],
        }
    }

    /// The mask of this node, with its random state at `input`.
    pub fn dropout(&self, spec: Option<DropoutSpec>, input: Option<usize>) -> Option<Dropout> {
        let (spec, state) = (spec?, self.random_state(input?));
        Some(Dropout::new(state, spec.stream, spec.rate))
    }

    /// The random state at `input`.
    pub fn random_state(&self, input: usize) -> RandomState {
        let words = self.input::<i32>(input);
        RandomState {
            key: [words[0].cast_unsigned(), words[1].cast_unsigned()],
            row_offset: words[2].cast_unsigned(),
        }
    }
}
