//! Nodes of the backward graph: what an op keeps, where its gradients go, and how it makes them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use smallvec::SmallVec;

use super::checkpoint::Packed;
use super::context::{Context, ScopeId};
use super::dtype::DType;
use super::layout::Layout;
use super::line::Line;
use super::shape::Dims;
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
    saved: &'a [Option<Tensor>],
    grads: &'a [Option<Tensor>],
    next: &'a [Option<Edge>],
}

impl Step<'_> {
    /// The tensor saved under this number.
    pub fn saved(&self, index: usize) -> &Tensor {
        self.saved[index]
            .as_ref()
            .expect("a formula reads only what its op saved")
    }

    /// The gradient of the op's only output.
    pub fn grad(&self) -> &Tensor {
        self.grads[0]
            .as_ref()
            .expect("the engine calls a node only with a gradient")
    }

    /// The gradient of one of several outputs; none where that output was not used.
    pub fn grad_of(&self, output: usize) -> Option<&Tensor> {
        self.grads[output].as_ref()
    }

    /// Whether this input's gradient is wanted.
    pub fn needs(&self, input: usize) -> bool {
        self.next[input].is_some()
    }

    /// The sizes of the op's only input. The node its gradient goes to knows them.
    pub fn input_sizes(&self) -> Dims {
        let (next, output) = self.next[0]
            .as_ref()
            .expect("a node of one input exists for its gradient");
        next.output(*output).0.sizes
    }
}

pub type Edge = (Rc<Node>, u32);

type Edges = SmallVec<[Option<Edge>; 2]>;
type Outputs = SmallVec<[(Rc<Layout>, DType); 1]>;
type Saved = SmallVec<[Option<Packed>; 2]>;
/// Gradients of a node's outputs as they arrive.
pub(super) type Buffer = SmallVec<[Option<Tensor>; 1]>;

enum Kind {
    /// A leaf takes its gradient.
    Accumulate(Tensor),
    Op(Formula),
}

/// A long loop has a million of them alive, so that reading them from memory is most of the time of a replay: what a pass over
/// the graph looks at comes first, in as few cache lines as can be.
#[repr(C)]
pub struct Node {
    /// Later ops have higher numbers and run first; leaves run as soon as they can.
    pub(super) sequence: u32,
    pub(super) visited: Cell<u32>,
    pub(super) dependencies: Cell<u32>,
    scope: ScopeId,
    pub(super) next: Edges,
    kind: Kind,
    /// Sizes and types of the op's outputs: gradients are brought to them.
    outputs: Outputs,
    saved: RefCell<Saved>,
    /// The line of the forward that made it.
    line: Option<&'static Line>,
    pub(super) buffer: RefCell<Buffer>,
}

impl Node {
    pub(super) fn accumulator(leaf: Tensor) -> Rc<Node> {
        let outputs = SmallVec::from_elem((leaf.layout().clone(), leaf.dtype()), 1);
        let (scope, line) = (leaf.context().scope(), leaf.context().line());
        Node::new(
            u32::MAX,
            Kind::Accumulate(leaf),
            Edges::new(),
            outputs,
            Saved::new(),
            scope,
            line,
        )
    }

    fn new(
        sequence: u32,
        kind: Kind,
        next: Edges,
        outputs: Outputs,
        saved: Saved,
        scope: ScopeId,
        line: Option<&'static Line>,
    ) -> Rc<Node> {
        Rc::new(Node {
            sequence,
            kind,
            next,
            outputs,
            saved: RefCell::new(saved),
            scope,
            line,
            visited: Cell::new(0),
            dependencies: Cell::new(0),
            buffer: RefCell::default(),
        })
    }

    pub(super) fn leaf(&self) -> Option<&Tensor> {
        match &self.kind {
            Kind::Accumulate(leaf) => Some(leaf),
            Kind::Op(_) => None,
        }
    }

    pub(super) fn num_outputs(&self) -> usize {
        self.outputs.len()
    }

    pub(super) fn output(&self, index: u32) -> &(Rc<Layout>, DType) {
        &self.outputs[index as usize]
    }

    /// Runs the formula. What hooks had packed is unpacked first, all of it, and goes when the
    /// formula returns, last first: C++ locals.
    pub(super) fn apply(&self, context: &Context, grads: &[Option<Tensor>]) -> Grads {
        let Kind::Op(formula) = &self.kind else {
            return Grads::new();
        };
        let mut saved: Grads = self
            .saved
            .borrow()
            .iter()
            .map(|packed| packed.as_ref().map(|packed| packed.unpack(context)))
            .collect();
        context.restore_scope(self.scope);
        context.restore_line(self.line);
        let outputs = formula(&Step {
            context,
            saved: &saved,
            grads,
            next: &self.next,
        });
        while let Some(last) = saved.pop() {
            drop(last);
        }
        outputs
    }

    /// Gives up what was saved, in the order in which it was declared.
    pub(super) fn release(&self) {
        let saved = std::mem::take(&mut *self.saved.borrow_mut());
        for packed in saved {
            drop(packed);
        }
    }
}

/// Nodes that a node being dropped leaves behind.
type Pending = SmallVec<[Rc<Node>; 4]>;

impl Drop for Node {
    /// A chain of a hundred thousand nodes must not be taken down by recursion.
    fn drop(&mut self) {
        let mut pending = Pending::new();
        detach_children(self, &mut pending);
        while let Some(mut node) = pending.pop() {
            if let Some(node) = Rc::get_mut(&mut node) {
                detach_children(node, &mut pending);
            }
        }
    }
}

fn detach_children(node: &mut Node, pending: &mut Pending) {
    for packed in std::mem::take(node.saved.get_mut()) {
        if let Some(Packed::Tensor(tensor)) = packed {
            pending.extend(tensor.take_history());
        }
    }
    pending.extend(
        std::mem::take(&mut node.next)
            .into_iter()
            .flatten()
            .map(|(next, _)| next),
    );
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
        let building = records.then(|| Building {
            next: inputs.iter().map(|input| input.gradient_edge()).collect(),
            saved: Saved::new(),
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

    /// Ends the recording: the outputs get this node as their history.
    pub fn finish(self, outputs: &[&Tensor], formula: impl Fn(&Step<'_>) -> Grads + 'static) {
        let Some(building) = self.building else {
            return;
        };
        if self.context.is_stopped() {
            return;
        }
        let node = Node::new(
            self.context.next_sequence(),
            Kind::Op(Box::new(formula)),
            building.next,
            outputs
                .iter()
                .map(|output| (output.layout().clone(), output.dtype()))
                .collect(),
            building.saved,
            self.context.scope(),
            self.context.line(),
        );
        for (index, output) in outputs.iter().enumerate() {
            output.set_history(node.clone(), index as u32);
        }
    }
}
