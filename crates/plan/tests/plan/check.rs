//! The proof that a plan is right for its graph, from the node list alone.
//!
//! Lifetimes are worked out here again, node by node, and every two tensors or workspaces
//! that live during one node are compared. The only overlap allowed is an output exactly over
//! an input of its own node, where the op declares the pair and nobody reads the input later.

use cinch_graph::{ALIGNMENT, Graph, Node, Role, TensorId};
use cinch_plan::{Placement, Plan, Residence};

/// Panics with the names of what is wrong.
pub fn check(graph: &Graph, plan: &Plan) {
    check_persistent(graph, plan);
    let mut peak = plan.persistent_bytes;
    let mut bound = persistent_bytes(graph, plan);
    for (index, node) in graph.nodes.iter().enumerate() {
        let live = live_at(graph, plan, index);
        check_ranges(plan, &live);
        let shared = check_overlaps(graph, index, &live);
        let bytes = |size: fn(u64) -> u64| -> u64 {
            let all: u64 = live.iter().map(|l| size(l.place.bytes)).sum();
            let twice: u64 = shared.iter().map(|&i| size(live[i].place.bytes)).sum();
            all - twice
        };
        let aligned = bytes(|b| b.next_multiple_of(ALIGNMENT));
        let here = plan.persistent_bytes + aligned;
        assert_eq!(plan.timeline()[index], here, "live at `{}`", node.name);
        peak = peak.max(here);
        bound = bound.max(persistent_bytes(graph, plan) + bytes(|b| b));
        check_touched(graph, plan, node);
        check_first_writes(graph, plan, index);
    }
    assert_eq!(plan.timeline().len(), graph.nodes.len());
    assert_eq!(plan.peak_bytes, peak);
    assert_eq!(plan.lower_bound_bytes, bound);
    assert!(plan.lower_bound_bytes <= plan.peak_bytes);
    assert!(plan.peak_bytes <= plan.arena_bytes);
    if !graph.nodes.is_empty() {
        assert_eq!(plan.timeline()[plan.peak_node], plan.peak_bytes);
    }
}

/// Something in the transient part of the arena while a node runs.
struct Live {
    tensor: Option<TensorId>,
    place: Placement,
    name: String,
}

/// Where tensors of this role belong.
fn residence(plan: &Plan, role: Role) -> Residence {
    match role {
        Role::State if plan.options.offload_states => Residence::Host,
        Role::Offloaded | Role::HostActivation => Residence::Host,
        _ => Residence::Arena,
    }
}

fn ids(graph: &Graph) -> impl Iterator<Item = TensorId> {
    (0..graph.tensors.len() as u32).map(TensorId)
}

fn persistent_bytes(graph: &Graph, plan: &Plan) -> u64 {
    let persistent = ids(graph).filter(|&id| {
        let role = graph.tensor(id).role;
        role.is_persistent() && residence(plan, role) == Residence::Arena
    });
    persistent.map(|id| graph.ty(id).bytes()).sum()
}

/// What keeps its place has one, apart from all others, below the transient part or in host
/// memory.
fn check_persistent(graph: &Graph, plan: &Plan) {
    let mut ranges: Vec<(Placement, &str)> = Vec::new();
    for id in ids(graph) {
        let tensor = graph.tensor(id);
        if !tensor.role.is_persistent() {
            continue;
        }
        let place = plan.placement(id).expect("a persistent tensor has a place");
        assert_eq!(
            place.residence,
            residence(plan, tensor.role),
            "`{}`",
            tensor.name
        );
        assert_eq!(place.bytes, tensor.ty.bytes(), "`{}`", tensor.name);
        assert_eq!(place.offset % ALIGNMENT, 0, "`{}`", tensor.name);
        let end = match place.residence {
            Residence::Arena => plan.persistent_bytes,
            Residence::Host => plan.host_bytes,
        };
        assert!(place.end() <= end, "`{}`", tensor.name);
        ranges.push((place, &tensor.name));
    }
    ranges.sort_by_key(|(place, _)| (place.residence == Residence::Host, place.offset));
    for pair in ranges.windows(2) {
        let [(a, first), (b, second)] = pair else {
            unreachable!("windows of two")
        };
        let apart = a.residence != b.residence || a.end() <= b.offset;
        assert!(apart, "`{first}` and `{second}`");
    }
}

/// The node that writes the transient tensor, and the last one that needs it.
fn lifetime(graph: &Graph, id: TensorId) -> Option<(usize, usize)> {
    let written = graph.nodes.iter().position(|n| n.outputs.contains(&id))?;
    if graph.term_of(id).is_some() || graph.result == Some(id) {
        return Some((written, usize::MAX));
    }
    let read = graph.nodes.iter().rposition(|n| n.inputs.contains(&id));
    Some((written, read.unwrap_or(written)))
}

fn live_at(graph: &Graph, plan: &Plan, index: usize) -> Vec<Live> {
    let transient = ids(graph).filter(|&id| graph.tensor(id).role == Role::Activation);
    let here = transient.filter(|&id| {
        lifetime(graph, id).is_some_and(|(first, last)| (first..=last).contains(&index))
    });
    let mut live: Vec<Live> = here
        .map(|id| {
            let tensor = graph.tensor(id);
            let place = plan.placement(id).expect("a live tensor has a place");
            assert_eq!(place.bytes, tensor.ty.bytes(), "`{}`", tensor.name);
            Live {
                tensor: Some(id),
                place,
                name: tensor.name.clone(),
            }
        })
        .collect();
    live.extend(plan.workspace(index).map(|place| Live {
        tensor: None,
        place,
        name: format!("workspace of {}", graph.nodes[index].name),
    }));
    live
}

fn check_ranges(plan: &Plan, live: &[Live]) {
    for Live { place, name, .. } in live {
        assert_eq!(place.offset % ALIGNMENT, 0, "`{name}`");
        assert!(place.offset >= plan.persistent_bytes, "`{name}`");
        assert!(place.end() <= plan.arena_bytes, "`{name}`");
    }
}

/// Returns what shares the memory of something else.
fn check_overlaps(graph: &Graph, index: usize, live: &[Live]) -> Vec<usize> {
    let mut shared = Vec::new();
    for (i, a) in live.iter().enumerate() {
        for (j, b) in live.iter().enumerate().skip(i + 1) {
            let apart = a.place.end() <= b.place.offset || b.place.end() <= a.place.offset;
            if apart {
                continue;
            }
            let node = &graph.nodes[index].name;
            let pair = format!("`{}` and `{}` at `{node}`", a.name, b.name);
            assert_eq!(a.place, b.place, "{pair} overlap in part");
            let allowed = match (a.tensor, b.tensor) {
                (Some(a), Some(b)) => {
                    takes_over(graph, index, a, b) || takes_over(graph, index, b, a)
                }
                _ => false,
            };
            assert!(allowed, "{pair} overlap");
            assert!(!shared.contains(&j), "{pair}: a third one is there too");
            shared.push(j);
        }
    }
    shared
}

/// Whether the node may write `output` over `input`.
fn takes_over(graph: &Graph, index: usize, input: TensorId, output: TensorId) -> bool {
    let node = &graph.nodes[index];
    let mut pairs = node.op.declaration().in_place().iter();
    let declared = pairs.any(|&(i, o)| node.inputs[i] == input && node.outputs[o] == output);
    let readings = node.inputs.iter().filter(|&&id| id == input).count();
    let ends_here = lifetime(graph, input).is_some_and(|(_, last)| last == index);
    declared && readings == 1 && ends_here
}

fn check_touched(graph: &Graph, plan: &Plan, node: &Node) {
    for &id in node.inputs.iter().chain(&node.outputs) {
        let tensor = graph.tensor(id);
        assert!(plan.placement(id).is_some(), "`{}`", tensor.name);
    }
}

fn check_first_writes(graph: &Graph, plan: &Plan, index: usize) {
    for (output, id) in graph.nodes[index].outputs.iter().enumerate() {
        let earlier = &graph.nodes[..index];
        let first = !earlier.iter().any(|n| n.outputs.contains(id));
        assert_eq!(plan.is_first_write(index, output), first);
    }
}
