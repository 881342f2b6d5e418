//! Activation checkpointing.
//!
//! Non-reentrant: the forward keeps empty holders in place of tensors, the first of them that
//! backward asks for runs the part again, and the run ends as soon as the last holder is filled.
//! Reentrant: the part is one node, whose backward runs it again with a graph of its own.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::autocast;
use super::context::{AllocationCategory, Context};
use super::dtype::DType;
use super::engine;
use super::node::grads;
use super::tensor::Tensor;

/// A saved tensor, as the hook in force made it.
#[derive(Clone)]
pub enum Packed {
    Tensor(Tensor),
    Held(Rc<Holder>),
}

/// What becomes of a tensor that an op saves.
pub trait Hook {
    fn pack(&self, context: &Context, tensor: Tensor) -> Packed;
}

/// The place of a tensor that is not kept.
pub struct Holder {
    frame: Rc<Frame>,
    value: RefCell<Option<Tensor>>,
}

/// One checkpointed part: how to run it again, and the holders it left. Alive as long as one of
/// them is, and with it the part's inputs.
struct Frame {
    run: Box<dyn Fn()>,
    autocast: Option<DType>,
    holders: RefCell<Vec<Weak<Holder>>>,
    recomputed: Cell<bool>,
}

impl Packed {
    pub(super) fn pack(context: &Context, tensor: Tensor) -> Packed {
        let hook = context.hooks.borrow().last().cloned();
        match hook {
            Some(hook) => hook.pack(context, tensor),
            None => Packed::Tensor(tensor),
        }
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self, Packed::Held(_))
    }
}

impl Holder {
    pub(super) fn unpack(&self, context: &Context) -> Tensor {
        if !self.frame.recomputed.replace(true) {
            recompute(context, &self.frame);
        }
        // A part that did not fill its holder has stopped the process: nothing follows.
        self.value
            .take()
            .unwrap_or_else(|| context.empty("stopped", [0], DType::Float32))
    }
}

/// The forward's hook: a holder for every tensor.
struct Forget(Rc<Frame>);

impl Hook for Forget {
    fn pack(&self, _context: &Context, _tensor: Tensor) -> Packed {
        let holder = Rc::new(Holder {
            frame: self.0.clone(),
            value: RefCell::new(None),
        });
        self.0.holders.borrow_mut().push(Rc::downgrade(&holder));
        Packed::Held(holder)
    }
}

/// The recomputation's hook: the n-th tensor goes to the n-th holder, if that is still wanted.
struct Refill {
    frame: Weak<Frame>,
    next: Cell<usize>,
}

impl Hook for Refill {
    fn pack(&self, context: &Context, tensor: Tensor) -> Packed {
        let tensor = if tensor.requires_grad() {
            tensor.detach()
        } else {
            tensor
        };
        if let Some(frame) = self.frame.upgrade() {
            let index = self.next.get();
            self.next.set(index + 1);
            let holders = frame.holders.borrow();
            if let Some(holder) = holders.get(index).and_then(Weak::upgrade) {
                holder.value.replace(Some(tensor.clone()));
            }
            if index + 1 == holders.len() {
                context.set_stopped(true);
            }
        }
        Packed::Tensor(tensor)
    }
}

fn recompute(context: &Context, frame: &Rc<Frame>) {
    let hook = Rc::new(Refill {
        frame: Rc::downgrade(frame),
        next: Cell::new(0),
    });
    context.hooks.borrow_mut().push(hook);
    let grad_mode = context.set_grad_enabled(true);
    let category = context.set_category(AllocationCategory::Activation);
    autocast::with(context, frame.autocast, || (frame.run)());
    context.set_category(category);
    context.set_grad_enabled(grad_mode);
    context.hooks.borrow_mut().pop();
    context.set_stopped(false);
}

/// Whether, and how, a model's layers are run again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpointing {
    Off,
    /// `use_reentrant=False`: saved tensors are replaced by holders.
    NonReentrant,
    /// `use_reentrant=True`: the part runs without recording, and again as a graph of its own inside backward.
    Reentrant,
}

impl Checkpointing {
    pub fn is_on(self) -> bool {
        self != Checkpointing::Off
    }

    /// Runs a part of a model. What the function captures lives as long as the part may run again.
    pub fn run(
        self,
        context: &Context,
        input: &Tensor,
        function: impl Fn(&Tensor) -> Tensor + 'static,
    ) -> Tensor {
        match self {
            Checkpointing::Off => function(input),
            _ if !context.is_grad_enabled() => function(input),
            Checkpointing::NonReentrant => non_reentrant(context, input, function),
            Checkpointing::Reentrant => reentrant(context, input, function),
        }
    }

    /// Runs a part that has several results, and is given all that it needs by position. Such a part is never reentrant.
    pub fn run_several<T: 'static>(
        self,
        context: &Context,
        input: &Tensor,
        function: impl Fn(&Tensor) -> T + 'static,
    ) -> T {
        if self == Checkpointing::Off || !context.is_grad_enabled() {
            return function(input);
        }
        let function = Rc::new(function);
        let again = Positional {
            input: input.clone(),
            function: function.clone(),
        };
        forgetting(context, Box::new(move || drop(again.run())), || {
            function(input)
        })
    }
}

fn non_reentrant(
    context: &Context,
    input: &Tensor,
    function: impl Fn(&Tensor) -> Tensor + 'static,
) -> Tensor {
    let function = Rc::new(function);
    let again = {
        let (function, input) = (function.clone(), input.clone());
        Box::new(move || drop(function(&input)))
    };
    forgetting(context, again, || function(input))
}

/// Runs a part whose saved tensors are not kept.
fn forgetting<T>(context: &Context, again: Box<dyn Fn()>, body: impl FnOnce() -> T) -> T {
    let frame = Rc::new(Frame {
        run: again,
        autocast: context.autocast.borrow().dtype(),
        holders: RefCell::default(),
        recomputed: Cell::new(false),
    });
    context.hooks.borrow_mut().push(Rc::new(Forget(frame)));
    let output = body();
    context.hooks.borrow_mut().pop();
    output
}

/// A part and what it is given by position: its input goes before the rest.
struct Positional<F> {
    input: Tensor,
    function: Rc<F>,
}

impl<F: Fn(&Tensor) -> T, T> Positional<F> {
    fn run(&self) -> T {
        (self.function)(&self.input)
    }
}

/// One node keeps the part's input. Its backward makes a leaf of it, runs the part with recording, and runs backward over
/// that graph, which gives the parameters their gradients; the leaf's gradient is what it returns.
fn reentrant(
    context: &Context,
    input: &Tensor,
    function: impl Fn(&Tensor) -> Tensor + 'static,
) -> Tensor {
    let mut recorder = context.record(&[input]);
    recorder.save(input);
    let dtype = context.autocast.borrow().dtype();
    let output = context.no_grad(|| function(input));
    recorder.finish_holding(&[&output], move |step| {
        let context = step.context;
        let leaf = step.saved(0).detach();
        leaf.set_requires_grad(true);
        let grad_mode = context.set_grad_enabled(true);
        let category = context.set_category(AllocationCategory::Activation);
        let output = autocast::with(context, dtype, || function(&leaf));
        context.set_category(category);
        context.set_grad_enabled(grad_mode);
        engine::run(context, &output, step.grad());
        drop(output);
        grads![leaf.grad()]
    });
    output
}
