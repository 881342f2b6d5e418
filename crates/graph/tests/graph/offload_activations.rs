//! Activations in host memory: the backward reads the same values, what is stored is what takes
//! longest to make again, and nothing is overwritten or read before its copy is there.

use cinch_graph::op::{ActivationKind, Joined, NormKind, Op};
use cinch_graph::{
    DType, Graph, Init, Node, Phase, Recompute, Role, TrainingGraph, differentiate, verify,
};
use proptest::prelude::*;

use crate::random_model::{cases, models, optimizer};
use crate::values::Values;

/// The step with each number of its recomputed blocks in host memory, all being recomputed.
fn levels(base: &TrainingGraph) -> Vec<TrainingGraph> {
    let counts = 0..=base.blocks.len();
    counts
        .map(|count| base.recompute_and_offload(Recompute::Full, count).unwrap())
        .collect()
}

fn positions(graph: &Graph, which: impl Fn(&Op) -> bool) -> Vec<usize> {
    let nodes = 0..graph.nodes.len();
    nodes.filter(|&at| which(&graph.nodes[at].op)).collect()
}

fn stores(graph: &Graph) -> Vec<usize> {
    positions(graph, |op| matches!(op, Op::Store(_)))
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn every_level_is_well_formed(model in models()) {
        for step in levels(&model.training()) {
            prop_assert_eq!(verify(&step), Ok(()));
            prop_assert_eq!(stores(&step).len(), step.num_offloaded);
            prop_assert_eq!(verify(&step.update_in_backward()), Ok(()));
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

    #[test]
    fn what_is_stored_is_not_made_again(model in models()) {
        let levels = levels(&model.training());
        let work: Vec<u128> = levels.iter().map(|step| step.micro_flops()).collect();
        prop_assert!(work.iter().rev().is_sorted(), "{:?}", work);
        for step in &levels {
            prop_assert_eq!(step.useful_flops(), levels[0].useful_flops());
        }
    }

    /// The sources of a copy are named once more by a node that waits for it; two copies at most
    /// are under way when another begins, and none behind the last block.
    #[test]
    fn copies_are_waited_for(model in models()) {
        for step in levels(&model.training()) {
            let waits = positions(&step, |op| matches!(op, Op::Await(_)));
            let wait_of = |store: &Node| {
                waits.iter().copied().find(|&at| step.nodes[at].inputs == store.inputs)
            };
            let stores = stores(&step);
            let in_blocks = |n: &Node| n.phase == Phase::Forward && n.block.is_some();
            let last = step.nodes.iter().rposition(in_blocks).unwrap_or(0);
            for (number, &at) in stores.iter().enumerate() {
                let wait = wait_of(&step.nodes[at]);
                prop_assert!(wait.is_some_and(|wait| wait > at));
                let next = stores.get(number + 2).copied();
                prop_assert!(wait.is_some_and(|wait| next.is_none_or(|next| wait < next)));
                let behind = &step.nodes[last + 1..];
                let behind = behind.iter().take_while(|n| matches!(n.op, Op::Await(_)));
                prop_assert!(wait.is_some_and(|wait| wait <= last + behind.count()));
            }
        }
    }
}

/// Blocks of a norm, a product that widens, an activation and a product that narrows.
fn chain(blocks: usize) -> TrainingGraph {
    let mut graph = Graph::new(DType::F32);
    let mut x = graph.batch("x", [4, 64], DType::F32);
    let init = Init::Ones;
    for block in 0..blocks {
        graph.enter_block(format!("block.{block}"));
        let gamma = graph.small_weight(&format!("gamma{block}"), [64], init);
        let kind = (NormKind::Rms, 1e-5);
        let normed = graph
            .norm(&format!("norm{block}"), x, kind, gamma, None)
            .unwrap();
        let weight = graph.weight(&format!("up{block}.weight"), [256, 64], init);
        let wide = graph
            .linear(&format!("up{block}"), normed, weight, None)
            .unwrap();
        let active = graph
            .activation(&format!("gelu{block}"), wide, ActivationKind::Gelu)
            .unwrap();
        let weight = graph.weight(&format!("down{block}.weight"), [64, 256], init);
        x = graph
            .linear(&format!("down{block}"), active, weight, None)
            .unwrap();
        graph.leave_block();
    }
    let weight = graph.weight("head.weight", [16, 64], init);
    let targets = graph.batch("targets", [4], DType::I32);
    graph
        .cross_entropy("loss", x, weight, targets, 0.0, None)
        .unwrap();
    differentiate(graph, &optimizer()).unwrap()
}

fn stored_names(step: &TrainingGraph) -> Vec<&str> {
    let stored = step
        .tensors
        .iter()
        .filter(|t| t.role == Role::HostActivation);
    stored.map(|tensor| tensor.name.as_str()).collect()
}

/// A product takes longest for its bytes; the norm and the activation are made again.
#[test]
fn products_are_stored_and_the_rest_is_made_again() {
    let step = chain(4).recompute_and_offload(Recompute::Full, 2).unwrap();
    assert_eq!(step.num_offloaded, 2);
    assert_eq!(stored_names(&step), ["up0.stored", "up2.stored"]);
    let again = |name: &str| step.nodes.iter().any(|node| node.name == name);
    assert!(again("again.up1") && again("again.norm1"));
    assert!(!again("again.up0") && !again("again.up2"));
}

/// Blocks of an adapted layer that pass on little: what its adapter reads is stored of all of them, as
/// soon as anything is stored.
#[test]
fn what_is_narrow_goes_along() {
    let init = Init::Ones;
    let mut graph = Graph::new(DType::F32);
    let x = graph.batch("x", [64, 64], DType::F32);
    let mut results = Vec::new();
    for block in 0..3 {
        graph.enter_block(format!("block.{block}"));
        let mut weight = |name: &str, shape: [usize; 2]| {
            graph.weight(&format!("{name}{block}.weight"), shape, init)
        };
        let weights = [
            weight("first", [64, 64]),
            weight("down", [4, 64]),
            weight("base", [64, 64]),
            weight("up", [64, 4]),
            weight("last", [1, 64]),
        ];
        let mut linear = |name: &str, x, weight: usize| {
            let name = format!("{name}{block}");
            graph.linear(&name, x, weights[weight], None).unwrap()
        };
        let first = linear("first", x, 0);
        let low = linear("low", first, 1);
        let base = linear("base", first, 2);
        let name = format!("adapted{block}");
        let y = graph.linear_add(&name, (base, 0), (low, 0), weights[3], 1.0);
        let name = format!("last{block}");
        results.push(graph.linear(&name, y.unwrap(), weights[4], None).unwrap());
        graph.leave_block();
    }
    let x = graph.concat("all", Joined::Columns, &results).unwrap();
    let weight = graph.weight("head.weight", [16, 3], init);
    let targets = graph.batch("targets", [64], DType::I32);
    graph
        .cross_entropy("loss", x, weight, targets, 0.0, None)
        .unwrap();
    let step = differentiate(graph, &optimizer()).unwrap();
    let names = |offloaded| {
        let step = step.recompute_and_offload(Recompute::Full, offloaded);
        let step = step.unwrap();
        assert_eq!(step.num_offloaded, offloaded);
        let names = stored_names(&step).into_iter().map(str::to_owned);
        names.collect::<Vec<String>>()
    };
    assert!(names(0).is_empty());
    let lows: Vec<String> = names(1);
    for block in 0..3 {
        assert!(lows.contains(&format!("low{block}.stored")), "{lows:?}");
    }
    let wide = |name: &&String| !name.starts_with("low");
    assert!(
        lows.iter().filter(wide).all(|name| name.contains('0')),
        "{lows:?}"
    );
    assert!(lows.iter().any(|name| wide(&name)), "{lows:?}");
}

/// What comes back is asked for where the block behind begins its backward.
#[test]
fn a_block_comes_back_while_the_one_behind_runs() {
    let step = chain(4).recompute_and_offload(Recompute::Full, 2).unwrap();
    for fetch in positions(&step, |op| matches!(op, Op::Fetch(_))) {
        let node = &step.nodes[fetch];
        let reads = |n: &Node| n.inputs.iter().any(|id| node.outputs.contains(id));
        let first_use = step.nodes.iter().position(reads).unwrap();
        let own = step.nodes[first_use].block.unwrap();
        let behind = &step.nodes[fetch..first_use];
        assert!(
            behind
                .iter()
                .any(|n| n.block == Some(cinch_graph::BlockId(own.0 + 1)))
        );
        assert!(
            behind
                .iter()
                .all(|n| n.block.is_some_and(|block| block.0 <= own.0 + 1))
        );
    }
}

/// More than are recomputed are all that are.
#[test]
fn only_recomputed_blocks_are_stored() {
    let base = chain(4);
    let some = base.recompute_and_offload(Recompute::Blocks(2), 9).unwrap();
    assert_eq!(some.num_offloaded, 2);
    assert_eq!(stored_names(&some), ["up0.stored", "up1.stored"]);
    let none = base.recompute_and_offload(Recompute::None, 9).unwrap();
    assert_eq!(none.num_offloaded, 0);
    assert!(stored_names(&none).is_empty());
}
