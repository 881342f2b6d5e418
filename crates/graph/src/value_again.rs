//! Values that the backward writes again, as a pass over the training graph.
//!
//! What a recipe gives again (f(gate)·up, a GELU's output, a norm's) is mostly read by gradients of
//! weights, and then only shortly before the backward of the op that made it. That backward reads
//! what the recipe would read, so it can write the value besides, where its own incoming gradient
//! was. The recipe's node goes, with its pass over memory, and the gradients that read the value
//! run right after that backward. Other gradients that stand beside them come along: neighbours
//! can be computed together.
//!
//! Nothing else moves, and the step takes no more memory: what a gradient of a weight reads lives
//! on until the value is there, which has taken the memory of a tensor that had to be there then.

use crate::graph::{Graph, Node, Phase, Role, TensorId};

/// A recipe's node that another one can do the work of.
struct Replacement {
    /// The recipe.
    recipe: usize,
    /// The backward that writes the value, as it does so.
    backward: usize,
    node: Node,
    /// Gradients that run after it, in order.
    moved: Vec<usize>,
}

/// Lets backward nodes write the values of recipes where they can.
pub(crate) fn write_values_again(graph: &mut Graph) {
    let readers = readers(graph);
    let replacements: Vec<Replacement> = (0..graph.nodes.len())
        .filter(|&recipe| graph.nodes[recipe].phase == Phase::Recompute)
        .filter_map(|recipe| replacement(graph, &readers, recipe))
        .collect();
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    let mut away = vec![false; graph.nodes.len()];
    for replacement in replacements {
        // What stands between may belong to two; it moves once.
        let taken = replacement.moved.iter().any(|&index| away[index]);
        if taken || !after[replacement.backward].is_empty() {
            continue;
        }
        away[replacement.recipe] = true;
        // What follows belongs to the block that it stands in, so that the nodes of a block stay
        // together: the norm that opens a block is in the one before.
        let block = replacement.node.block;
        for &reader in &replacement.moved {
            away[reader] = true;
            graph.nodes[reader].block = block;
        }
        graph.nodes[replacement.backward] = replacement.node;
        after[replacement.backward] = replacement.moved;
    }
    let stay = (0..graph.nodes.len()).filter(|&index| !away[index]);
    let order: Vec<usize> = stay
        .flat_map(|index| [index].into_iter().chain(after[index].iter().copied()))
        .collect();
    graph.nodes = order
        .iter()
        .map(|&index| graph.nodes[index].clone())
        .collect();
}

/// The nodes that read each tensor, in order.
fn readers(graph: &Graph) -> Vec<Vec<usize>> {
    let mut readers = vec![Vec::new(); graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in &node.inputs {
            readers[id.index()].push(index);
        }
    }
    readers
}

fn replacement(graph: &Graph, readers: &[Vec<usize>], recipe: usize) -> Option<Replacement> {
    let [value] = graph.nodes[recipe].outputs[..] else {
        return None;
    };
    // The backward reads what the recipe reads.
    let first = *graph.nodes[recipe].inputs.first()?;
    let (backward, node) = readers[first.index()].iter().find_map(|&backward| {
        let node = with_value(&graph.nodes[backward], &graph.nodes[recipe])?;
        Some((backward, node))
    })?;
    let first = readers[value.index()].first().copied()?;
    let moved: Vec<usize> = (first..backward)
        .filter(|&index| {
            let inputs = &graph.nodes[index].inputs;
            let comes_along = !inputs.iter().any(|id| node.inputs.contains(id))
                && may_follow(graph, index, backward);
            inputs.contains(&value) || comes_along
        })
        .collect();
    let movable = moved
        .iter()
        .all(|&reader| may_follow(graph, reader, backward));
    let ends = |id: TensorId| {
        graph.tensor(id).role == Role::Activation
            && readers[id.index()].last() == Some(&backward)
            && moved
                .iter()
                .all(|&reader| !graph.nodes[reader].inputs.contains(&id))
    };
    (movable && needs_no_memory(graph, &node, ends)).then_some(Replacement {
        recipe,
        backward,
        node,
        moved,
    })
}

/// The backward node with the recipe's value as one more output, where it can write that.
fn with_value(backward: &Node, recipe: &Node) -> Option<Node> {
    if backward.phase != Phase::Backward {
        return None;
    }
    let again = backward.op.declaration().value_again()?;
    if again.recipe != recipe.op || again.inputs.len() != recipe.inputs.len() {
        return None;
    }
    let mut node = backward.clone();
    for (&own, &read) in again.inputs.iter().zip(&recipe.inputs) {
        match own {
            Some(input) if backward.inputs.get(input) != Some(&read) => return None,
            Some(_) => {}
            None => node.inputs.push(read),
        }
    }
    node.op = again.op;
    node.outputs.insert(again.output, recipe.outputs[0]);
    Some(node)
}

/// Whether the node at `reader` may run after the one at `backward` instead: all that it does is
/// to add to gradients that nobody touches in between.
fn may_follow(graph: &Graph, reader: usize, backward: usize) -> bool {
    let node = &graph.nodes[reader];
    let adds = |id: &TensorId| graph.tensor(*id).role == Role::Gradient;
    let touches =
        |other: &Node, id: &TensorId| other.inputs.contains(id) || other.outputs.contains(id);
    let between = &graph.nodes[reader + 1..=backward];
    node.phase == Phase::Backward
        && node.outputs.iter().all(adds)
        && between
            .iter()
            .all(|other| !node.outputs.iter().any(|id| touches(other, id)))
}

/// Whether every output of a node takes over an input that ends there.
fn needs_no_memory(graph: &Graph, node: &Node, ends: impl Fn(TensorId) -> bool) -> bool {
    let mut taken: Vec<(usize, usize)> = Vec::new();
    for &(input, output) in node.op.declaration().in_place() {
        let free = taken.iter().all(|&(i, o)| i != input && o != output);
        if free && ends(node.inputs[input]) {
            taken.push((input, output));
        }
    }
    let transient = (0..node.outputs.len())
        .filter(|&output| graph.tensor(node.outputs[output]).role == Role::Activation);
    let covered = |output| taken.iter().any(|&(_, to)| to == output);
    transient.into_iter().all(covered)
}
