//! What a Hopper card computes in the kernel of a product before it (docs/design/0017): products that
//! add to the same result, and what follows it element by element. What they have in common is
//! neither written nor read again.

use cinch_graph::{Arithmetic, Cost, Graph, JoinKind, Joins, KernelCost, Node, TensorId};

/// How far a product is looked for.
const WINDOW: usize = 24;
/// Products that have room in one kernel.
const MAX_TERMS: usize = 4;
/// Of the inner dimension, at once: a shorter term takes as long.
const DEPTH: usize = 64;

/// What the nodes of a graph cost where those that join a product are part of it: they cost nothing
/// themselves then.
pub(super) fn costs(graph: &Graph) -> Vec<Cost> {
    let mut costs: Vec<Cost> = graph
        .nodes
        .iter()
        .map(|node| graph.cuda_cost(node))
        .collect();
    // The node in whose kernel others' results are made, where there is one.
    let mut hosts: Vec<Option<usize>> = (0..graph.nodes.len()).map(Some).collect();
    let mut terms = vec![1; graph.nodes.len()];
    // Products that add to something and have not joined it: the only kernel of a sum that adds to
    // what is there is the one for a term that is dropped in part.
    let mut adds = vec![false; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some(joins) = graph.joins(node) else {
            continue;
        };
        let (is_term, is_dropped) = match joins.kind {
            JoinKind::Term { dropped, .. } => (true, dropped),
            JoinKind::Tail { .. } => (false, false),
        };
        adds[index] = is_term && !is_dropped;
        hosts[index] = adds[index].then_some(index);
        let maker = maker(&graph.nodes[..index], node.inputs[joins.input]);
        let Some(host) = maker.and_then(|maker| hosts[maker]) else {
            continue;
        };
        if index - host > WINDOW || is_term && terms[host] == MAX_TERMS || adds[host] && !is_dropped
        {
            continue;
        }
        if let Some(kernel) = costs[host].kernels.last_mut()
            && join(kernel, &joins)
        {
            terms[host] += usize::from(is_term);
            hosts[index] = Some(host);
            costs[index] = Cost::of([]);
        }
    }
    costs
}

/// The node that has made a tensor last.
fn maker(before: &[Node], id: TensorId) -> Option<usize> {
    let first = before.len().saturating_sub(WINDOW);
    let made = before[first..].iter();
    let place = made.rev().position(|node| node.outputs.contains(&id))?;
    Some(before.len() - 1 - place)
}

/// Makes a product's kernel one that computes what joins it besides, where there is such a kernel.
fn join(kernel: &mut KernelCost, joins: &Joins) -> bool {
    let Arithmetic::Product { m, n, k, stored } = kernel.arithmetic else {
        return false;
    };
    if stored.size() != 2 {
        return false;
    }
    let result = (m as u64)
        .saturating_mul(n as u64)
        .saturating_mul(stored.size());
    match joins.kind {
        JoinKind::Term { columns, inner, .. } => {
            let longer = inner.div_ceil(DEPTH).saturating_mul(DEPTH);
            let longer = longer.saturating_mul(columns) / n.max(1);
            kernel.arithmetic = Arithmetic::Product {
                m,
                n,
                k: k.saturating_add(longer),
                stored,
            };
        }
        JoinKind::Tail { over: true } => kernel.bytes = kernel.bytes.saturating_sub(result),
        JoinKind::Tail { over: false } => {}
    }
    kernel.bytes = kernel.bytes.saturating_add(joins.bytes);
    true
}
