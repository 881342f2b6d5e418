//! Updates inside the backward, as a pass over the training graph: each weight is updated as
//! soon as its gradient is complete and nobody reads the weight any more. Its gradient is then
//! an ordinary transient tensor, and all gradients never exist at once.
//!
//! A gradient that the forward writes (the head's, made along with the loss) or that several
//! nodes add to stays what it was, an accumulator, and its weight is updated at the end; so do
//! the gradients that share a node with it.
//!
//! Clipping by the norm of all gradients, and half precision's check for overflow, need every
//! gradient before the first update. The result must not change, so then the backward runs
//! twice:
//!
//! ```text
//! one pass:   forward | backward, each gradient: Σ g², update | norm | updates of kept ones
//! two passes: forward | backward, each gradient: Σ g²         | norm
//!                     | backward again, each gradient: update        | updates of kept ones
//! ```
//!
//! The second pass makes the transient gradients again, from the same tensors by the same ops,
//! and leaves out what only leads to kept ones. Sums of squares are kept block by block and
//! added up in the order of the parameters, as they are without this pass: the bits are the same.

use crate::differentiate::TrainingGraph;
use crate::graph::{Graph, Node, Phase, Role, TensorId};
use crate::op::{GradientNorm, GradientSquares, Op};
use crate::recompute::repeat;
use crate::types::{DType, TensorType};

impl TrainingGraph {
    /// The step with its updates inside the backward. It is a step of one micro batch, and
    /// recomputation has been chosen before.
    #[must_use]
    pub fn update_in_backward(&self) -> Self {
        let mut result = self.clone();
        let mut parts = Parts::of(&mut result.graph);
        let kept = kept_gradients(&result.graph, &parts);
        let needs_norm = parts
            .updates
            .iter()
            .any(|node| node.op.declaration().changes_updates());
        let squares = add_squares(&mut result.graph, &mut parts.updates);
        let (norm, updates): (Vec<Node>, Vec<Node>) = parts.updates.into_iter().partition(is_norm);
        let (mut late, mut early): (Vec<Node>, Vec<Node>) = updates
            .into_iter()
            .partition(|node| kept[node.inputs[0].index()]);
        for update in &early {
            make_transient(&mut result.graph, update.inputs[0]);
        }
        let nodes = if needs_norm {
            let again = again(&mut result.graph, &parts.backward, &mut early);
            let again = insert(&result.graph, again, Vec::new(), early);
            let first = insert(&result.graph, parts.backward, squares, Vec::new());
            [parts.forward, first, norm, again, late].concat()
        } else {
            for update in early.iter_mut().chain(&mut late) {
                without_factor(update);
            }
            let backward = insert(&result.graph, parts.backward, squares, early);
            [parts.forward, backward, norm, late].concat()
        };
        result.graph.nodes = nodes;
        result.backward_passes = Some(1 + usize::from(needs_norm));
        result
    }
}

/// The nodes of a step by what they do.
struct Parts {
    forward: Vec<Node>,
    /// With recomputation.
    backward: Vec<Node>,
    /// The norm, and each parameter's update, whose first input is its gradient.
    updates: Vec<Node>,
}

impl Parts {
    fn of(graph: &mut Graph) -> Self {
        let (mut parts, nodes) = (
            Self {
                forward: Vec::new(),
                backward: Vec::new(),
                updates: Vec::new(),
            },
            std::mem::take(&mut graph.nodes),
        );
        for node in nodes {
            match node.phase {
                Phase::Forward => parts.forward.push(node),
                Phase::Recompute | Phase::Backward | Phase::Exchange => parts.backward.push(node),
                Phase::Update => parts.updates.push(node),
            }
        }
        parts
    }
}

fn is_norm(node: &Node) -> bool {
    node.op.declaration().over_squares().is_some()
}

/// By tensor: whether it is a gradient that stays an accumulator. A node that writes such a one
/// is not run twice, so everything it writes is kept.
fn kept_gradients(graph: &Graph, parts: &Parts) -> Vec<bool> {
    let is_gradient = |id: &&TensorId| graph.tensor(**id).role == Role::Gradient;
    let mut kept = vec![false; graph.tensors.len()];
    let mut written = kept.clone();
    for id in parts.forward.iter().flat_map(|node| &node.outputs) {
        kept[id.index()] |= is_gradient(&id);
    }
    for id in parts.backward.iter().flat_map(|node| &node.outputs) {
        let again = std::mem::replace(&mut written[id.index()], true);
        kept[id.index()] |= again && is_gradient(&id);
    }
    loop {
        let mut spread: Vec<TensorId> = Vec::new();
        for node in &parts.backward {
            let gradients = node.outputs.iter().filter(is_gradient).copied();
            let (with, without): (Vec<TensorId>, Vec<TensorId>) =
                gradients.partition(|id| kept[id.index()]);
            if !with.is_empty() {
                spread.extend(without);
            }
        }
        if spread.is_empty() {
            return kept;
        }
        for id in spread {
            kept[id.index()] = true;
        }
    }
}

/// The tensor of all sums of squares, from which the norm now comes, and the nodes that fill it:
/// the blocks of one gradient after those of another, in the order of the norm's inputs.
pub(crate) fn add_squares(graph: &mut Graph, updates: &mut [Node]) -> Vec<Node> {
    let mut norms = updates.iter_mut().filter_map(|node| {
        let op = node.op.declaration().over_squares()?;
        Some((node, op))
    });
    let Some((norm, op)) = norms.next() else {
        return Vec::new();
    };
    norm.op = op;
    let gradients = std::mem::take(&mut norm.inputs);
    let blocks = |id: &TensorId| GradientNorm::num_blocks(&graph.ty(*id));
    let total = gradients.iter().map(blocks).fold(0, usize::saturating_add);
    let ty = TensorType::new([total], DType::F64);
    let mut squares = Vec::with_capacity(gradients.len());
    let mut first = 0_usize;
    for &gradient in &gradients {
        let name = format!("{}.squares", graph.tensor(gradient).name);
        squares.push((gradient, name, first));
        first = first.saturating_add(blocks(&gradient));
    }
    let sums = graph.add_tensor("gradient_squares", ty, Role::Result);
    norm.inputs = vec![sums];
    let node = |(gradient, name, first): (TensorId, String, usize)| Node {
        op: Op::from(GradientSquares { first, total }),
        name,
        inputs: vec![gradient],
        outputs: vec![sums],
        block: None,
        phase: Phase::Update,
    };
    squares.into_iter().map(node).collect()
}

fn make_transient(graph: &mut Graph, gradient: TensorId) {
    graph.tensors[gradient.index()].role = Role::Activation;
    let mut parameters = graph.parameters.iter_mut();
    if let Some(owner) = parameters.find(|p| p.gradient == Some(gradient)) {
        owner.gradient = None;
    }
}

/// The updates without the factor: before the backward is over there is none, and it would be 1.
fn without_factor(update: &mut Node) {
    if let Some(op) = update.op.declaration().without_factor() {
        update.op = op;
        update.inputs.pop();
    }
}

/// What of the backward leads to the gradients of `updates`, with results of its own, which the
/// updates then read.
fn again(graph: &mut Graph, backward: &[Node], updates: &mut [Node]) -> Vec<Node> {
    let mut wanted = vec![false; graph.tensors.len()];
    for update in &*updates {
        wanted[update.inputs[0].index()] = true;
    }
    let mut leads = vec![false; backward.len()];
    for (index, node) in backward.iter().enumerate().rev() {
        leads[index] = node.outputs.iter().any(|id| wanted[id.index()]);
        if leads[index] {
            for id in &node.inputs {
                wanted[id.index()] = true;
            }
        }
    }
    let mut replaced: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
    let mut repeated = Vec::new();
    for (node, _) in backward.iter().zip(leads).filter(|(_, leads)| *leads) {
        repeated.push(repeat(graph, node.clone(), &mut replaced));
    }
    for update in updates {
        let gradient = &mut update.inputs[0];
        *gradient = replaced[gradient.index()].unwrap_or(*gradient);
    }
    repeated
}

/// `nodes` with each of `squares` right after the last write of its gradient, and each of
/// `updates` after that and after the last read of its weight.
fn insert(graph: &Graph, nodes: Vec<Node>, squares: Vec<Node>, updates: Vec<Node>) -> Vec<Node> {
    let mut last_write: Vec<usize> = vec![0; graph.tensors.len()];
    let mut last_read = last_write.clone();
    for (index, node) in nodes.iter().enumerate() {
        for id in &node.outputs {
            last_write[id.index()] = index + 1;
        }
        for id in &node.inputs {
            last_read[id.index()] = index + 1;
        }
    }
    let is_weight = |id: &&TensorId| {
        let role = graph.tensor(**id).role;
        matches!(role, Role::Parameter | Role::ComputeCopy)
    };
    // By the number of nodes that come before.
    let mut inserted: Vec<Vec<Node>> = vec![Vec::new(); nodes.len() + 1];
    for node in squares {
        inserted[last_write[node.inputs[0].index()]].push(node);
    }
    for node in updates {
        let weights = node.outputs.iter().filter(is_weight);
        let reads = weights.map(|id| last_read[id.index()]).max().unwrap_or(0);
        inserted[reads.max(last_write[node.inputs[0].index()])].push(node);
    }
    let mut merged = std::mem::take(&mut inserted[0]);
    for (node, after) in nodes.into_iter().zip(&mut inserted[1..]) {
        merged.push(node);
        merged.append(after);
    }
    merged
}
