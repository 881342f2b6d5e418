//! Backward: PyTorch's engine in its order.
//!
//! Ready nodes run by sequence number, latest first; a leaf's accumulator runs at once. Gradients
//! that meet at a node are added in its input buffer, in place where the buffer is the only owner.

use std::cell::Cell;
use std::collections::BinaryHeap;
use std::rc::Rc;

use super::context::{Category, Context, Thread};
use super::node::{Grads, Node};
use super::op::pointwise::like;
use super::op::{cast, reduce};
use super::tensor::Tensor;

struct Ready(Rc<Node>);

impl PartialEq for Ready {
    fn eq(&self, other: &Ready) -> bool {
        self.0.sequence == other.0.sequence
    }
}
impl Eq for Ready {}
impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Ready) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Ready {
    fn cmp(&self, other: &Ready) -> std::cmp::Ordering {
        self.0.sequence.cmp(&other.0.sequence)
    }
}

thread_local! {
    /// Numbers the passes over a graph, so that nodes need no clearing between them.
    static PASSES: Cell<u32> = const { Cell::new(0) };
}

fn next_pass() -> u32 {
    PASSES.with(|passes| {
        passes.set(passes.get().wrapping_add(1));
        passes.get()
    })
}

/// `loss.backward()`: makes the loss's own gradient, then runs the graph.
pub fn backward(loss: &Tensor) {
    let context = loss.context().clone();
    let category = context.set_category(Category::Backward);
    let ones = context.no_grad(|| context.empty("ones_like", loss.sizes(), loss.dtype()));
    run(&context, loss, &ones);
    drop(ones);
    context.set_category(category);
}

/// Runs the graph behind `root` with its gradient. The caller keeps its own handle of it.
pub fn run(context: &Context, root: &Tensor, grad: &Tensor) {
    let Some((node, output)) = root.gradient_edge() else {
        return;
    };
    if context.is_stopped() {
        return;
    }
    let thread = context.set_thread(Thread::Backward);
    let grad_mode = context.set_grad_enabled(false);
    // The backward thread has its own autocast state: off, with its own cache.
    let autocast = context.autocast.take();

    count_dependencies(&node);
    let mut queue = BinaryHeap::new();
    accumulate(&node, output, grad.clone());
    queue.push(Ready(node));
    while let Some(Ready(node)) = queue.pop() {
        evaluate(context, &node, &mut queue);
        if context.is_stopped() {
            break;
        }
    }

    context.autocast.replace(autocast);
    context.set_grad_enabled(grad_mode);
    context.set_thread(thread);
}

fn count_dependencies(root: &Node) {
    let pass = next_pass();
    let mut stack = vec![root];
    root.visited.set(pass);
    root.dependencies.set(0);
    while let Some(node) = stack.pop() {
        for (next, _) in node.next.iter().flatten() {
            if next.visited.replace(pass) != pass {
                next.dependencies.set(0);
                stack.push(next);
            }
            next.dependencies.set(next.dependencies.get() + 1);
        }
    }
}

/// Adds a gradient into a node's input buffer.
fn accumulate(node: &Node, output: u32, grad: Tensor) {
    let mut buffer = node.buffer.borrow_mut();
    if buffer.is_empty() {
        buffer.resize(node.num_outputs(), None);
    }
    let slot = &mut buffer[output as usize];
    *slot = Some(match slot.take() {
        None => grad,
        Some(old) if old.is_sole_owner() && old.is_dense() => old,
        Some(old) => {
            let sum = like(&old, old.dtype(), "add (gradients)");
            drop(old);
            sum
        }
    });
}

fn evaluate(context: &Context, node: &Rc<Node>, queue: &mut BinaryHeap<Ready>) {
    let mut grads = std::mem::take(&mut *node.buffer.borrow_mut());
    if let Some(leaf) = node.leaf() {
        if let Some(grad) = grads.pop().flatten() {
            take_gradient(context, leaf, grad);
        }
        return;
    }
    let outputs = if grads.iter().all(Option::is_none) {
        Grads::from_elem(None, node.next.len())
    } else {
        let mut outputs = node.apply(context, &grads);
        fit_outputs(node, &mut outputs);
        outputs
    };
    for grad in grads {
        drop(grad);
    }
    node.release();
    for (edge, grad) in node.next.iter().zip(outputs) {
        let Some((next, output)) = edge else { continue };
        if let Some(grad) = grad {
            accumulate(next, *output, grad);
        }
        let left = next.dependencies.get() - 1;
        next.dependencies.set(left);
        if left == 0 {
            queue.push(Ready(next.clone()));
        }
    }
}

/// Gradients must have the sizes and the type of what they are the gradient of: broadcast
/// dimensions are summed, other types cast.
fn fit_outputs(node: &Node, outputs: &mut [Option<Tensor>]) {
    for (edge, slot) in node.next.iter().zip(outputs) {
        let (Some((next, output)), Some(grad)) = (edge, slot.as_ref()) else {
            continue;
        };
        let (layout, dtype) = next.output(*output);
        if !Rc::ptr_eq(grad.layout(), layout) && grad.sizes() != layout.sizes {
            *slot = Some(reduce::sum_to(grad, layout.sizes));
        }
        if let Some(grad) = slot.as_ref()
            && grad.dtype() != *dtype
        {
            *slot = Some(cast::to(grad, *dtype));
        }
    }
}

/// A leaf's gradient: taken as it is when nobody else holds it and its element order is the
/// leaf's, else copied; later ones are added in place.
fn take_gradient(context: &Context, leaf: &Tensor, grad: Tensor) {
    if leaf.grad().is_some() {
        drop(grad);
        return;
    }
    let keeps_order = !leaf.is_dense() || leaf.strides() == grad.strides() || grad.numel() <= 1;
    let stolen = if grad.handles() == 1 && keeps_order {
        grad.detach()
    } else {
        context.empty_strided(
            "clone (gradient)",
            leaf.sizes(),
            leaf.strides(),
            grad.dtype(),
        )
    };
    drop(grad);
    leaf.set_grad(Some(stolen));
}
