//! Recomputation: the backward reads the same values, what is kept is what leaves a block,
//! and the extra work is only what is repeated.

use std::collections::BTreeMap;

use cinch_graph::op::{ActivationKind, NormKind};
use cinch_graph::{
    DType, Graph, GraphError, Init, Node, Phase, Recompute, Role, TensorId, TrainingGraph,
    differentiate, verify,
};
use proptest::prelude::*;

use crate::random_model::{cases, models, optimizer};
use crate::small_model;
use crate::values::Values;

/// The step at every count of recomputed blocks.
fn levels(base: &TrainingGraph) -> Vec<TrainingGraph> {
    let counts = 0..=base.blocks.len();
    counts
        .map(|count| base.recompute(Recompute::Blocks(count)).unwrap())
        .collect()
}

fn is_again(node: &Node) -> bool {
    node.name.starts_with("again.")
}

/// Transient tensors that the forward of `node` makes for a later phase.
fn kept<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = TensorId> + 'g {
    let later = |id: &TensorId| {
        let readers = graph.nodes.iter().filter(|n| n.inputs.contains(id));
        let mut phases = readers.map(|n| n.phase);
        phases.any(|phase| phase != Phase::Forward)
    };
    let outputs = node.outputs.iter().copied();
    outputs.filter(move |id| graph.tensor(*id).role == Role::Activation && later(id))
}

/// Whether something of the node is read in the forward outside its block.
fn leaves(graph: &Graph, node: &Node) -> bool {
    let forward = graph.nodes.iter().filter(|n| n.phase == Phase::Forward);
    let mut outside = forward.filter(|n| n.block != node.block);
    outside.any(|n| n.inputs.iter().any(|id| node.outputs.contains(id)))
}

/// The names of the nodes that add to each gradient, in order.
fn gradient_writers(graph: &Graph) -> BTreeMap<TensorId, Vec<String>> {
    let mut writers: BTreeMap<TensorId, Vec<String>> = BTreeMap::new();
    for node in &graph.nodes {
        for &id in &node.outputs {
            if graph.tensor(id).role == Role::Gradient {
                writers.entry(id).or_default().push(node.name.clone());
            }
        }
    }
    writers
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn every_level_is_well_formed(model in models()) {
        for (count, step) in levels(&model.training()).iter().enumerate() {
            prop_assert_eq!(verify(step), Ok(()), "{} blocks", count);
            prop_assert_eq!(step.num_recomputed, count);
        }
    }

    #[test]
    fn the_backward_reads_the_same_values_at_every_level(model in models()) {
        let base = model.training();
        let mut values = Values::default();
        let reads = values.backward_reads(&base);
        for step in levels(&base) {
            prop_assert_eq!(&values.backward_reads(&step), &reads);
        }
    }

    /// Gradients of weights may run later than they were emitted, but each sum has its order.
    #[test]
    fn gradients_are_added_up_in_the_same_order_at_every_level(model in models()) {
        let base = model.training();
        for step in levels(&base) {
            prop_assert_eq!(gradient_writers(&step), gradient_writers(&base));
        }
    }

    #[test]
    fn useful_work_stays_and_total_work_grows(model in models()) {
        let base = model.training();
        let levels = levels(&base);
        for step in &levels {
            prop_assert_eq!(step.useful_flops(), base.useful_flops());
            prop_assert_eq!(step.update_flops(), base.update_flops());
            let again = step.nodes.iter().filter(|n| n.phase == Phase::Recompute);
            let again: u128 = again.map(|n| u128::from(step.flops(n))).sum();
            prop_assert_eq!(step.micro_flops(), step.useful_flops() + again);
        }
        let work: Vec<u128> = levels.iter().map(|step| step.micro_flops()).collect();
        prop_assert!(work.is_sorted(), "{:?}", work);
    }

    #[test]
    fn repeated_nodes_come_after_the_forward_and_before_their_use(model in models()) {
        for step in levels(&model.training()) {
            let forward = step.nodes.iter().filter(|n| n.phase == Phase::Forward).count();
            for (index, node) in step.nodes.iter().enumerate() {
                prop_assert_eq!(is_again(node), node.phase == Phase::Recompute);
                if !is_again(node) {
                    continue;
                }
                prop_assert!(index >= forward, "{}", &node.name);
                let reads = |n: &Node| n.inputs.iter().any(|id| node.outputs.contains(id));
                let first_use = step.nodes.iter().position(reads);
                prop_assert!(first_use.is_some_and(|at| at > index), "{}", &node.name);
            }
        }
    }

    #[test]
    fn a_recipe_reads_only_what_is_there_anyway(model in models()) {
        let step = model.training().recompute(Recompute::None).unwrap();
        for (index, node) in step.nodes.iter().enumerate().filter(|(_, n)| is_again(n)) {
            for &id in &node.inputs {
                let tensor = step.tensor(id);
                let mut later = step.nodes[index..].iter().filter(|n| !is_again(n));
                let read_later = later.any(|n| n.inputs.contains(&id));
                let there = tensor.role.is_persistent() || read_later;
                prop_assert!(there, "{} keeps {}", &node.name, &tensor.name);
            }
        }
    }

    #[test]
    fn a_recomputed_block_keeps_only_what_leaves_it(model in models()) {
        for step in levels(&model.training()) {
            for node in step.nodes.iter().filter(|n| n.phase == Phase::Forward) {
                let Some(block) = node.block else { continue };
                if block.index() >= step.num_recomputed || leaves(&step, node) {
                    continue;
                }
                let kept: Vec<&str> = kept(&step, node)
                    .map(|id| step.tensor(id).name.as_str())
                    .collect();
                prop_assert!(kept.is_empty(), "{} keeps {kept:?}", &node.name);
            }
        }
    }
}

fn small_step() -> TrainingGraph {
    differentiate(small_model::forward(), &optimizer()).unwrap()
}

#[test]
fn no_more_blocks_than_there_are() {
    let expected = GraphError::TooManyBlocks {
        asked: 3,
        blocks: 2,
    };
    let error = small_step().recompute(Recompute::Blocks(3)).unwrap_err();
    assert_eq!(error, expected);
    let message = error.to_string();
    assert_eq!(message, "cannot recompute 3 blocks: the model has 2");
}

#[test]
fn none_and_full_are_the_ends_of_the_range() {
    let base = small_step();
    let at = |choice| base.recompute(choice).unwrap();
    assert_eq!(at(Recompute::None), at(Recompute::Blocks(0)));
    assert_eq!(at(Recompute::Full), at(Recompute::Blocks(2)));
}

#[test]
fn without_recomputed_blocks_only_recipes_are_repeated() {
    let mut g = Graph::new(DType::F32);
    let init = Init::Normal { std: 0.02 };
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [11, 8], init);
    g.enter_block("block");
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let weight = g.weight("weight", [8, 8], init);
    let up = g.linear("up", x, weight, None).unwrap();
    let active = g.activation("active", up, ActivationKind::Gelu).unwrap();
    let gamma = g.small_weight("gamma", [8], Init::Ones);
    // Its backward reads what GELU made, before the one of GELU could write that.
    let norm = (NormKind::Rms, 1e-5);
    let normed = g.norm("norm", active, norm, gamma, None).unwrap();
    g.leave_block();
    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", normed, table, targets, 0.0, None)
        .unwrap();
    let step = differentiate(g, &optimizer()).unwrap();
    let step = step.recompute(Recompute::None).unwrap();
    let again = step.nodes.iter().filter(|n| is_again(n));
    let again: Vec<&str> = again.map(|n| n.op.name()).collect();
    assert_eq!(again, ["gelu"]);
}

/// A feed-forward layer between two residual norms: its gate or GELU, and the norm that it reads,
/// before which some of the branch is dropped.
fn feed_forward(gated: bool, rate: f64) -> TrainingGraph {
    let mut g = Graph::new(DType::Bf16);
    let dropout = g.dropout(rate);
    let init = Init::Normal { std: 0.02 };
    let norm = (NormKind::Layer, 1e-5);
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [11, 8], init);
    let norm_weights = |g: &mut Graph, name: &str| {
        let gamma = g.small_weight(&format!("{name}.gamma"), [8], Init::Ones);
        (
            gamma,
            g.small_weight(&format!("{name}.beta"), [8], Init::Zeros),
        )
    };
    let stream = g.embedding("embedding", tokens, table, None, None).unwrap();
    let linear = |g: &mut Graph, name: &str, x, shape: [usize; 2]| {
        let weight = g.weight(&format!("{name}.weight"), shape, init);
        g.linear(name, x, weight, None).unwrap()
    };
    let branch = linear(&mut g, "branch", stream, [8, 8]);
    let (gamma, beta) = norm_weights(&mut g, "first");
    let pair = (stream, branch);
    let out = g
        .residual_norm("first", pair, dropout, norm, gamma, Some(beta))
        .unwrap();
    let up = linear(&mut g, "up", out.normed, [16, 8]);
    let active = match gated {
        true => {
            let gate = linear(&mut g, "gate", out.normed, [16, 8]);
            g.gated("active", gate, up, ActivationKind::Silu).unwrap()
        }
        false => g
            .activation("active", up, ActivationKind::GeluTanh)
            .unwrap(),
    };
    let down = linear(&mut g, "down", active, [8, 16]);
    let (gamma, beta) = norm_weights(&mut g, "last");
    let pair = (out.stream, down);
    let out = g
        .residual_norm("last", pair, None, norm, gamma, Some(beta))
        .unwrap();
    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", out.normed, table, targets, 0.0, None)
        .unwrap();
    differentiate(g, &optimizer()).unwrap()
}

#[test]
fn a_backward_writes_the_value_that_gradients_of_weights_read() {
    for (gated, rate) in [(true, 0.0), (true, 0.1), (false, 0.0), (false, 0.1)] {
        let step = feed_forward(gated, rate)
            .recompute(Recompute::None)
            .unwrap();
        assert_eq!(verify(&step), Ok(()));
        // No recipe is left.
        assert!(!step.nodes.iter().any(is_again));
        for (backward, value, readers) in [
            ("d.active.input", "again.active", &["d.down.weight"][..]),
            (
                "d.first.input",
                "again.first",
                match gated {
                    true => &["d.gate.weight", "d.up.weight"],
                    false => &["d.up.weight"],
                },
            ),
        ] {
            let at = |name: &str| {
                step.nodes
                    .iter()
                    .position(|node| node.name == name)
                    .unwrap()
            };
            let (backward, value) = (at(backward), step.find(value).unwrap());
            assert!(step.nodes[backward].outputs.contains(&value));
            for (place, reader) in readers.iter().enumerate() {
                assert_eq!(at(reader), backward + 1 + place, "{reader}");
                assert_eq!(step.nodes[at(reader)].inputs[1], value);
            }
        }
    }
}

/// A block with an adapter of a rank beside its one layer, over a stream of 32 numbers a token.
fn adapted(rank: usize) -> TrainingGraph {
    let mut g = Graph::new(DType::F32);
    let init = Init::Normal { std: 0.02 };
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.frozen_weight("table", [11, 32], init);
    let stream = g.embedding("embedding", tokens, table, None, None).unwrap();
    let mut x = stream;
    for block in 0..2 {
        g.enter_block(format!("block.{block}"));
        let name = |part: &str| format!("{block}.{part}");
        let weight = g.frozen_weight(&name("weight"), [32, 32], init);
        let down = g.weight(&name("A"), [rank, 32], init);
        let up = g.weight(&name("B"), [32, rank], init);
        let low = g.linear(&name("low"), x, down, None).unwrap();
        let y = g.linear(&name("layer"), x, weight, None).unwrap();
        let y = g
            .linear_add(&name("sum"), (y, 0), (low, 0), up, 2.0)
            .unwrap();
        let kind = ActivationKind::Gelu;
        let active = g.activation(&name("active"), y, kind).unwrap();
        let weight = g.frozen_weight(&name("out.weight"), [32, 32], init);
        x = g.linear(&name("out"), active, weight, None).unwrap();
        g.leave_block();
    }
    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", x, table, targets, 0.0, None)
        .unwrap();
    differentiate(g, &optimizer()).unwrap()
}

#[test]
fn what_is_narrow_beside_what_leaves_a_block_is_kept() {
    for (rank, is_kept) in [(4, true), (5, false)] {
        let step = adapted(rank).recompute(Recompute::Full).unwrap();
        assert_eq!(verify(&step), Ok(()));
        let repeated = |name: &str| {
            let again = format!("again.{name}");
            step.nodes.iter().any(|node| node.name == again)
        };
        for block in 0..2 {
            assert_eq!(!repeated(&format!("{block}.low")), is_kept, "rank {rank}");
            assert!(repeated(&format!("{block}.layer")));
        }
    }
}

#[test]
fn a_recomputed_scan_keeps_no_states() {
    let states = |step: &TrainingGraph, phase| {
        let mut scans = step.nodes.iter().filter(|n| n.op.name() == "scan");
        let scan = scans.find(|n| n.phase == phase).unwrap();
        scan.outputs.len() == 2
    };
    let none = small_step().recompute(Recompute::None).unwrap();
    assert!(states(&none, Phase::Forward));
    let full = small_step().recompute(Recompute::Full).unwrap();
    assert!(!states(&full, Phase::Forward));
    assert!(states(&full, Phase::Recompute));
}
