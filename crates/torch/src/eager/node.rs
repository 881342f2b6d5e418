//! Nodes of the backward graph: what an op keeps, where its gradients go, and how it makes them.

use std::cell::Cell;

use smallvec::SmallVec;

use super::checkpoint::Packed;
use super::context::Context;
use super::dtype::DType;
use super::shape::Dims;
use super::tape::{Edge, Edges, Kind, Node, Output, Outputs, Running, Saved};
use super::tensor::Tensor;

/// A backward formula: the gradients of an op's outputs in, those of its inputs out, in the
/// order of the inputs. It allocates what PyTorch's formula allocates, in the same order.
pub type Formula = Box<dyn Fn(&Step<'_>) -> Grads>;

/// Gradients, one for each input or output of an op. Most ops have few of them, and a run has millions of ops: lists that
/// are part of the node itself save most of its time.
pub type Grads = SmallVec<[Option<Tensor>; 2]>;

/// The gradients that a formula gives back.
macro_rules! grads {
    ($($grad:expr),* $(,)?) => {{
        let list: $crate::eager::node::Grads = smallvec::smallvec![$($grad),*];
        list
    }};
}
pub(crate) use grads;

/// What a formula sees.
pub struct Step<'a> {
    pub context: &'a Context,
    saved: &'a [Option<Packed>],
    /// In the places of what hooks had packed: the tensors.
    unpacked: &'a [Option<Tensor>],
    outputs: &'a [Output],
    next: &'a [Option<Edge>],
    in_python: Cell<bool>,
}

impl Step<'_> {
    /// The tensor saved under this number.
    pub fn saved(&self, index: usize) -> &Tensor {
        let tensor = match &self.saved[index] {
            Some(Packed::Tensor(tensor)) => Some(tensor),
            Some(Packed::Held(_)) => self.unpacked[index].as_ref(),
            None => None,
        };
        tensor.expect("a formula reads only what its op saved")
    }

    /// The gradient of the op's only output.
    pub fn grad(&self) -> &Tensor {
        self.grad_of(0)
            .expect("the engine calls a node only with a gradient")
    }

    /// The gradient of one of several outputs; none where that output was not used.
    pub fn grad_of(&self, output: usize) -> Option<&Tensor> {
        self.outputs[output].grad.as_ref()
    }

    /// The formula is a function in Python: what was unpacked for it are its locals, which go first to last.
    pub fn runs_in_python(&self) {
        self.in_python.set(true);
    }

    /// Whether this input's gradient is wanted.
    pub fn needs(&self, input: usize) -> bool {
        self.next[input].is_some()
    }

    /// The sizes of the op's only input. The node its gradient goes to knows them.
    pub fn input_sizes(&self) -> Dims {
        self.context
            .tape
            .borrow()
            .output(self.only_edge())
            .layout
            .sizes
    }

    /// The type of the op's only input.
    pub fn input_dtype(&self) -> DType {
        self.context.tape.borrow().output(self.only_edge()).dtype
    }

    fn only_edge(&self) -> Edge {
        self.next[0].expect("a node of one input exists for its gradient")
    }
}

/// Runs a node's formula. What hooks had packed is unpacked first, all of it, and goes when the formula returns, last first:
/// C++ locals; in Python the other way.
pub(super) fn apply(context: &Context, running: &Running) -> Grads {
    let Kind::Op(formula) = &running.kind else {
        return Grads::new();
    };
    let mut unpacked = Grads::new();
    if running.saved.iter().flatten().any(Packed::is_held) {
        unpacked.extend(running.saved.iter().map(|packed| match packed {
            Some(Packed::Held(holder)) => Some(holder.unpack(context)),
            _ => None,
        }));
    }
    context.restore_place(running.place);
    let step = Step {
        context,
        saved: &running.saved,
        unpacked: &unpacked,
        outputs: &running.outputs,
        next: &running.next,
        in_python: Cell::new(false),
    };
    let outputs = formula(&step);
    if step.in_python.get() {
        unpacked.reverse();
    }
    while let Some(last) = unpacked.pop() {
        drop(last);
    }
    outputs
}

/// A node while its op runs. Empty where nothing requires a gradient: then nothing is kept.
///
/// The order is PyTorch's: inputs are saved before the op allocates its result, outputs after.
pub struct Recorder {
    context: Context,
    building: Option<Building>,
}

struct Building {
    next: Edges,
    saved: Saved,
}

impl Context {
    /// Begins to record an op over these inputs.
    pub fn record(&self, inputs: &[&Tensor]) -> Recorder {
        let records = self.is_grad_enabled()
            && !self.is_stopped()
            && inputs.iter().any(|input| input.requires_grad());
        let building = records.then(|| {
            let mut next = Edges::new();
            for input in inputs {
                next.push(input.gradient_edge());
            }
            Building {
                next,
                saved: Saved::new(),
            }
        });
        Recorder {
            context: self.clone(),
            building,
        }
    }
}

impl Recorder {
    pub fn is_recording(&self) -> bool {
        self.building.is_some()
    }

    /// Whether the gradient of this input will be wanted.
    pub fn needs(&self, input: usize) -> bool {
        self.building
            .as_ref()
            .is_some_and(|building| building.next[input].is_some())
    }

    pub fn save(&mut self, tensor: &Tensor) {
        self.save_if(true, tensor);
    }

    /// Saves under a condition; the number is taken either way.
    pub fn save_if(&mut self, condition: bool, tensor: &Tensor) {
        if let Some(building) = &mut self.building {
            let packed = condition.then(|| Packed::pack(&self.context, tensor.clone()));
            building.saved.push(packed);
        }
    }

    /// Saves an output: without its history, or it would hold itself.
    pub fn save_output(&mut self, tensor: &Tensor) {
        if let Some(building) = &mut self.building {
            building
                .saved
                .push(Some(Packed::pack(&self.context, tensor.detach())));
        }
    }

    /// Ends the recording: the outputs get this node as their history. The formula holds no tensors: what it needs is saved.
    pub fn finish(self, outputs: &[&Tensor], formula: impl Fn(&Step<'_>) -> Grads + 'static) {
        self.end(outputs, || Box::new(formula), false);
    }

    /// The same for a formula that holds tensors, which then live as long as the graph.
    pub(super) fn finish_holding(
        self,
        outputs: &[&Tensor],
        formula: impl Fn(&Step<'_>) -> Grads + 'static,
    ) {
        self.end(outputs, || Box::new(formula), true);
    }

    fn end(mut self, outputs: &[&Tensor], formula: impl FnOnce() -> Formula, holds_tensors: bool) {
        if self.context.is_stopped() {
            // What stopped this op while it saved its outputs is an exception: they go at once.
            if self.building.is_some() {
                for output in outputs {
                    output.give_up_bytes();
                }
            }
            return;
        }
        let Some(Building { next, saved }) = self.building.take() else {
            return;
        };
        let mut places = Outputs::new();
        for output in outputs {
            places.push(Output::of(output));
        }
        let node = self.context.tape.borrow_mut().push(Node::of_op(
            self.context.place(),
            formula(),
            holds_tensors,
            next,
            places,
            saved,
        ));
        for (index, tensor) in outputs.iter().enumerate() {
            let output = index as u32;
            tensor.set_history(Edge { node, output });
        }
    }
}

impl Drop for Recorder {
    /// An op that came to nothing lets go of its inputs' nodes.
    fn drop(&mut self) {
        if let Some(building) = self.building.take() {
            drop(building.saved);
            for edge in building.next.into_iter().flatten() {
                self.context.release_node(edge.node);
            }
        }
    }
}
