//! What is joined, what is not, and launches as the kernels expect them.

use cinch_graph::op::ScanInputs;
use cinch_graph::{Init, Target, TrainingGraph, differentiate};
use cinch_plan::{Options, Plan};

use super::*;
use crate::cuda::lowering::Card;
use crate::cuda::op::lower_all;
use crate::cuda::op::scan::tests::num_parameters;
use crate::cuda::op::tests::OPTIMIZER;
use crate::engine::MicroBatch;

const BATCH: usize = 2;
const LENGTH: usize = 150;

/// The step of one scan with its projections.
fn step(compute: DType, inner: usize, rank: usize) -> TrainingGraph {
    let mut g = Graph::new(compute);
    let state = (WIDTH - RANK) / 2;
    let tokens = g.batch("tokens", [BATCH, LENGTH], DType::I32);
    let weight = |g: &mut Graph, name: &str, shape: [usize; 2]| g.weight(name, shape, Init::Ones);
    let table = weight(&mut g, "table", [50, 64]);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let inwards = weight(&mut g, "in", [2 * inner, 64]);
    let zu = g.linear("zu", x, inwards, None).unwrap();
    let to_p = weight(&mut g, "to_p", [rank + 2 * state, inner]);
    let p = g.linear_columns("p", zu, inner, to_p, None).unwrap();
    let to_dt = weight(&mut g, "to_dt", [inner, rank]);
    let bias = g.small_weight("bias", [inner], Init::Ones);
    let dt = g.linear_columns("dt", p, 0, to_dt, Some(bias)).unwrap();
    let inputs = ScanInputs {
        x: zu,
        x_column: inner,
        z: zu,
        z_column: 0,
        p,
        dt,
        a_log: g.small_weight("A_log", [inner, state], Init::Ones),
        d: g.small_weight("D", [inner], Init::Ones),
    };
    let y = g.scan("scan", inputs, rank, 32).unwrap();
    let out = weight(&mut g, "out", [64, inner]);
    let y = g.linear("y", y, out, None).unwrap();
    let targets = g.batch("targets", [BATCH, LENGTH], DType::I32);
    g.cross_entropy("loss", y, table, targets, 0.0, None)
        .unwrap();
    differentiate(g, &OPTIMIZER).unwrap()
}

/// What may run at once, and the same one by one.
fn joined(graph: &Graph, micro: MicroBatch, card: Card) -> Vec<(Vec<Command>, Vec<Command>)> {
    let plan = Plan::new(graph, Options::new(Target::Cuda));
    let lowered = lower_all(graph, &plan, 0..graph.nodes.len(), micro, card);
    let commands = lowered.into_iter().flat_map(|lowered| lowered.commands);
    let both = commands.filter_map(|command| match command {
        Command::Ways(ways) => <[Vec<Command>; 2]>::try_from(ways).ok(),
        _ => None,
    });
    let is_ours = |command: &Command| match command {
        Command::Launch { kernel, .. } => kernel.file == "projection_hopper",
        _ => false,
    };
    let together = both.filter(|[_, together]| together.iter().all(is_ours));
    together.map(Into::into).collect()
}

fn launches(commands: &[Command]) -> Vec<(&'static str, LaunchShape, Vec<Argument>)> {
    let launch = |command: &Command| match command {
        Command::Launch {
            kernel,
            shape,
            arguments,
        } => (kernel.function, *shape, arguments.clone()),
        other => panic!("{other:?}"),
    };
    commands.iter().map(launch).collect()
}

#[test]
fn projections_are_a_pass_each_way() {
    let graph = step(DType::Bf16, INNER, RANK);
    for (micro, adds) in [(true, 0), (false, 1)] {
        let joined = joined(&graph, MicroBatch::of_one(micro), Card::HOPPER);
        let [forward, backward] = &joined[..] else {
            panic!("{joined:?}");
        };
        let rows = BATCH * LENGTH;
        let source = include_str!("../../kernels/projection_hopper.cu");
        let forward = launches(&forward.1);
        let [("projections", shape, arguments)] = &forward[..] else {
            panic!("{forward:?}");
        };
        assert_eq!(arguments.len(), num_parameters(source, "projections", &[]));
        assert_eq!(shape.grid, [5, 1, 1]);
        assert_eq!(shape.shared_bytes, 186_368);
        let sizes = [rows, INNER, 2 * INNER].map(size);
        assert_eq!(arguments[6..], sizes);

        // Two parts of rows, of four blocks each.
        let launches = launches(&backward.1);
        let [
            ("projections_low_gradients", low, low_arguments),
            ("projections_wide_gradients", wide, wide_arguments),
            ("projections_sum", sums, sum_arguments),
        ] = &launches[..]
        else {
            panic!("{launches:?}");
        };
        for (function, _, arguments) in &launches {
            assert_eq!(arguments.len(), num_parameters(source, function, &[]));
        }
        assert_eq!((low.grid, low.shared_bytes), ([8, 1, 1], 202_752));
        assert_eq!((wide.grid, wide.shared_bytes), ([8, 1, 1], 205_312));
        assert_eq!(low_arguments[3], wide_arguments[2]);
        assert_eq!(low_arguments[4], sum_arguments[0]);
        assert_eq!(wide_arguments[4], sum_arguments[0]);
        assert_eq!(sums.grid, [1288, 1, 1]);
        let flags = [size(2), size(INNER), size(adds), size(adds), size(adds)];
        assert_eq!(sum_arguments[4..], flags);
        // One by one it is four products or what stands for them.
        assert!(backward.0.len() >= 4, "{:?}", backward.0);
    }
}

#[test]
fn other_cards_and_sizes_go_one_by_one() {
    let first = MicroBatch::of_one(true);
    let is_none = |graph: &Graph, card| joined(graph, first, card).is_empty();
    assert!(is_none(&step(DType::Bf16, INNER, RANK), Card::ANY));
    assert!(is_none(&step(DType::F32, INNER, RANK), Card::HOPPER));
    assert!(is_none(&step(DType::Bf16, 512, RANK), Card::HOPPER));
    assert!(is_none(&step(DType::Bf16, INNER, 16), Card::HOPPER));
    assert!(!is_none(&step(DType::F16, INNER, RANK), Card::HOPPER));
}

#[test]
fn what_is_written_at_once_has_a_place_of_its_own() {
    let place = |offset, bytes| Placement {
        offset,
        bytes,
        residence: Residence::Arena,
    };
    let reads = [place(0, 256), place(256, 256)];
    assert!(are_apart(&reads, &[place(512, 256), place(768, 256)]));
    assert!(!are_apart(&reads, &[place(255, 16)]));
    assert!(!are_apart(&reads, &[place(512, 256), place(600, 16)]));
    let elsewhere = Placement {
        residence: Residence::Host,
        ..place(4096, 256)
    };
    assert!(!are_apart(&[elsewhere], &[place(512, 256)]));
}
