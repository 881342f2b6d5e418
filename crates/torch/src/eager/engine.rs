//! Backward: PyTorch's engine in its order.
//!
//! Ready nodes run by sequence number, latest first; a leaf's accumulator runs at once. Gradients
//! that meet at a node are added in its input buffer, in place where the buffer is the only owner.

use std::collections::BinaryHeap;
use std::rc::Rc;

use super::context::{AllocationCategory, Context, Thread};
use super::node::{self, Grads};
use super::op::pointwise::like;
use super::op::{cast, reduce};
use super::tape::{Edge, Kind, NodeId, Pass};
use super::tensor::Tensor;

/// A node that has all its gradients. Nodes of one priority are equal.
struct Ready {
    priority: u32,
    node: NodeId,
}

impl PartialEq for Ready {
    fn eq(&self, other: &Ready) -> bool {
        self.priority == other.priority
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
        self.priority.cmp(&other.priority)
    }
}

/// `loss.backward()`: makes the loss's own gradient, then runs the graph.
pub fn backward(loss: &Tensor) {
    let context = loss.context().clone();
    let category = context.set_category(AllocationCategory::Backward);
    let ones = context.no_grad(|| context.empty("ones_like", loss.sizes(), loss.dtype()));
    run(&context, loss, &ones);
    drop(ones);
    context.set_category(category);
}

/// Runs the graph behind `root` with its gradient. The caller keeps its own handle of it.
pub fn run(context: &Context, root: &Tensor, grad: &Tensor) {
    let Some(edge) = root.gradient_edge() else {
        return;
    };
    if context.is_stopped() {
        context.release_node(edge.node);
        return;
    }
    let thread = context.set_thread(Thread::Backward);
    let grad_mode = context.set_grad_enabled(false);
    // The backward thread has its own autocast state: off, with its own cache.
    let autocast = context.autocast.take();

    let pass = context.tape.borrow_mut().begin_pass(edge.node);
    let mut queue = BinaryHeap::new();
    accumulate(context, edge, grad.clone());
    let priority = context.tape.borrow().priority(edge.node);
    queue.push(Ready {
        priority,
        node: edge.node,
    });
    while let Some(ready) = queue.pop() {
        evaluate(context, &pass, ready.node, &mut queue);
        if context.is_stopped() {
            let left = context.tape.borrow().left_of(&pass);
            for node in left {
                context.release_node(node);
            }
            break;
        }
    }
    context.release_node(edge.node);

    context.autocast.replace(autocast);
    context.set_grad_enabled(grad_mode);
    context.set_thread(thread);
}

/// Adds a gradient to what has arrived of it before.
fn accumulate(context: &Context, edge: Edge, grad: Tensor) {
    let mut tape = context.tape.borrow_mut();
    let slot = &mut tape.output_mut(edge).grad;
    let Some(old) = slot.take() else {
        *slot = Some(grad);
        return;
    };
    if old.is_sole_owner() && old.is_dense() {
        *slot = Some(old);
        drop(tape);
        drop(grad);
        return;
    }
    drop(tape);
    let sum = like(&old, old.dtype(), "add (gradients)");
    drop(old);
    context.tape.borrow_mut().output_mut(edge).grad = Some(sum);
    drop(grad);
}

fn evaluate(context: &Context, pass: &Pass, node: NodeId, queue: &mut BinaryHeap<Ready>) {
    let mut running = context.tape.borrow_mut().start(node);
    if let Kind::Accumulate(leaf) = &running.kind {
        if let Some(grad) = running.outputs[0].grad.take() {
            take_gradient(context, leaf, grad);
        }
        context.tape.borrow_mut().restore(node, running);
        context.release_node(node);
        return;
    }
    let outputs = if running.outputs.iter().all(|output| output.grad.is_none()) {
        Grads::from_elem(None, running.next.len())
    } else {
        let mut outputs = node::apply(context, &running);
        fit_outputs(context, &running.next, &mut outputs);
        outputs
    };
    for output in &mut running.outputs {
        drop(output.grad.take());
    }
    let saved = std::mem::take(&mut running.saved);
    let had_saved = !saved.is_empty();
    for packed in saved {
        drop(packed);
    }
    for (edge, grad) in running.next.iter().zip(outputs) {
        let Some(edge) = *edge else { continue };
        if let Some(grad) = grad {
            accumulate(context, edge, grad);
        }
        let mut tape = context.tape.borrow_mut();
        let next = tape.node_mut(edge.node);
        next.dependencies -= 1;
        if next.dependencies == 0 {
            queue.push(Ready {
                priority: tape.priority(edge.node),
                node: edge.node,
            });
        }
    }
    let mut tape = context.tape.borrow_mut();
    tape.finish(pass, node, running, had_saved);
    drop(tape);
    context.release_node(node);
}

/// Gradients must have the sizes and the type of what they are the gradient of: broadcast
/// dimensions are summed, other types cast.
fn fit_outputs(context: &Context, next: &[Option<Edge>], outputs: &mut [Option<Tensor>]) {
    for (edge, slot) in next.iter().zip(outputs) {
        let (Some(edge), Some(grad)) = (edge, slot.as_ref()) else {
            continue;
        };
        let (fits, dtype) = {
            let tape = context.tape.borrow();
            let output = tape.output(*edge);
            let fits = Rc::ptr_eq(grad.layout(), &output.layout)
                || grad.layout().sizes == output.layout.sizes;
            (fits, output.dtype)
        };
        if !fits {
            let sizes = context.tape.borrow().output(*edge).layout.sizes;
            *slot = Some(reduce::sum_to(grad, sizes));
        }
        if let Some(grad) = slot.as_ref()
            && grad.dtype() != dtype
        {
            *slot = Some(cast::to(grad, dtype));
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
