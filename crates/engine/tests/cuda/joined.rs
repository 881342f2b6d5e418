//! Products that one kernel computes, against the same products one by one. Only cards that have such
//! kernels show anything.

use cinch_engine::cuda::lowering::Card;
use cinch_graph::op::{ActivationKind, LossScale, NormKind, ScanInputs};
use cinch_graph::{
    DType, Graph, GraphError, Init, Recompute, Target, TensorId, TrainingGraph, differentiate,
};
use cinch_plan::{Options, Plan, num_micro_nodes};

use crate::card::card;
use crate::device::{Device, OnCard};
use crate::emulated::{OnHost, is_possible};
use crate::numbers::random;
use crate::real::{decode, encode};
use crate::shared::OPTIMIZER;

const WEIGHT: Init = Init::Normal { std: 0.05 };
/// Long enough for sums that are cut, and no multiple of a tile.
const WIDTH: usize = 1032;
const RANK: usize = 24;
/// Two sequences, with rows that are no multiple of a tile; and so many that blocks have several tiles
/// each.
const ROWS: [usize; 2] = [2, 155];
const MANY: [usize; 2] = [7, 2053];

/// Two frozen layers with adapters: three beside each other on the first, one on the second.
fn graph(compute: DType) -> Result<TrainingGraph, GraphError> {
    layers(compute, RANK, WIDTH, WIDTH, ROWS)
}

/// The same at a rank and at widths where both products of an adapter's second matrix are one pass.
fn low_rank(compute: DType) -> Result<TrainingGraph, GraphError> {
    layers(compute, 8, 384, 1536, ROWS)
}

fn low_rank_of_many_rows(compute: DType) -> Result<TrainingGraph, GraphError> {
    layers(compute, 8, 384, 1536, MANY)
}

/// At the highest rank that products with a short sum have room for.
fn short_sums(compute: DType) -> Result<TrainingGraph, GraphError> {
    layers(compute, 16, 384, 1536, ROWS)
}

/// The first layer has three adapters of `width` columns each, the second one of `last`.
fn layers(
    compute: DType,
    rank: usize,
    width: usize,
    last: usize,
    rows: [usize; 2],
) -> Result<TrainingGraph, GraphError> {
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, width], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for (layer, each, adapters) in [("first", width, 3), ("second", last, 1)] {
        let part = |part: &str| format!("{layer}.{part}");
        let (inputs, outputs) = (g.ty(x).width(), adapters * each);
        let down = g.weight(&part("down"), [adapters * rank, inputs], WEIGHT);
        let low = g.linear(&part("low"), x, down, None)?;
        let weight = g.frozen_weight(&part("weight"), [outputs, inputs], WEIGHT);
        let bias = g.frozen_small_weight(&part("bias"), [outputs], WEIGHT);
        let mut y = g.linear(&part("base"), x, weight, Some(bias))?;
        for index in 0..adapters {
            let up = g.weight(&part(&format!("up.{index}")), [each, rank], WEIGHT);
            let name = part(&format!("adapted.{index}"));
            y = g.linear_add(&name, (y, index * each), (low, index * rank), up, 1.5)?;
        }
        x = y;
    }
    let head = g.weight("head", [50, last], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)
}

/// The inner dimension of products that are short, with columns that are no multiple of a tile; and
/// the columns between the products of a feed-forward layer.
const SHORT: [usize; 2] = [352, 800];

/// As many columns as kernels have whole rows of, and an inner dimension that is no multiple of a tile.
const WHOLE: [usize; 2] = [384, 200];
/// More rows than four multiprocessors take at once, of which the last tile is not full.
const TWICE: [usize; 2] = [3, 201];

/// Two frozen layers with adapters that read what is dropped in part, and GELU between them, twice:
/// where nobody reads its input again it is written in that one's place. What the second adapter
/// makes of GELU's result follows it. Their input is added to what they give, dropped in part or not,
/// before a norm, so that its gradient adds to what is there.
fn encoder(
    [width, inner]: [usize; 2],
    rows: [usize; 2],
    compute: DType,
) -> Result<TrainingGraph, GraphError> {
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, width], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for block in ["first", "second"] {
        g.enter_block(block);
        let stream = x;
        for (layer, outputs) in [("wide", inner), ("narrow", width)] {
            let part = |part: &str| format!("{block}.{layer}.{part}");
            let inputs = g.ty(x).width();
            let down = g.weight(&part("down"), [8, inputs], WEIGHT);
            let dropout = g.dropout(0.25);
            let low = g.linear_of_dropped(&part("low"), x, down, dropout)?;
            let weight = g.frozen_weight(&part("weight"), [outputs, inputs], WEIGHT);
            let bias = g.frozen_small_weight(&part("bias"), [outputs], WEIGHT);
            let y = g.linear(&part("base"), x, weight, Some(bias))?;
            let up = g.weight(&part("up"), [outputs, 8], WEIGHT);
            x = g.linear_add(&part("adapted"), (y, 0), (low, 0), up, 1.5)?;
            if layer == "wide" {
                x = g.activation(&part("gelu"), x, ActivationKind::Gelu)?;
            }
        }
        let [gamma, beta] = ["gamma", "beta"]
            .map(|part| g.frozen_small_weight(&format!("{block}.{part}"), [width], WEIGHT));
        let name = format!("{block}.norm");
        let norm = (NormKind::Layer, 1e-5);
        let dropout = g.dropout(if block == "first" { 0.25 } else { 0.0 });
        x = g
            .residual_norm(&name, (stream, x), dropout, norm, gamma, Some(beta))?
            .normed;
        g.leave_block();
    }
    let head = g.weight("head", [50, width], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)?.recompute(Recompute::Blocks(1))
}

/// Frozen layers of the widths of an embedder's, with adapters that read what is dropped in part: three
/// beside each other, and of three layers that follow the one of each. Of all of them what both matrices
/// have in the backward is one pass.
fn dropped_low_rank(rows: [usize; 2], compute: DType) -> Result<TrainingGraph, GraphError> {
    const WIDTH: usize = 384;
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, WIDTH], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for (layer, each, adapters) in [
        ("three", WIDTH, 3),
        ("back", WIDTH, 0),
        ("one", WIDTH, 1),
        ("wide", 4 * WIDTH, 1),
        ("narrow", WIDTH, 1),
    ] {
        let part = |part: &str| format!("{layer}.{part}");
        let (inputs, outputs) = (g.ty(x).width(), adapters.max(1) * each);
        let weight = g.frozen_weight(&part("weight"), [outputs, inputs], WEIGHT);
        if adapters == 0 {
            x = g.linear(&part("base"), x, weight, None)?;
            continue;
        }
        let down = g.weight(&part("down"), [adapters * 8, inputs], WEIGHT);
        let dropout = g.dropout(0.25);
        let low = g.linear_of_dropped(&part("low"), x, down, dropout)?;
        let mut y = g.linear(&part("base"), x, weight, None)?;
        for index in 0..adapters {
            let up = g.weight(&part(&format!("up.{index}")), [each, 8], WEIGHT);
            let name = part(&format!("adapted.{index}"));
            y = g.linear_add(&name, (y, index * each), (low, index * 8), up, 1.5)?;
        }
        x = y;
    }
    let head = g.weight("head", [50, WIDTH], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)
}

/// Columns of feed-forward layers whose products are long, and no multiple of a tile.
const WIDE: usize = 520;
const LONG: usize = 1096;

/// What stands between the products of a feed-forward layer.
#[derive(Clone, Copy)]
enum Between {
    Function(ActivationKind),
    Gate,
}

/// Feed-forward layers with adapters whose gradients read again what is between. Of two blocks the
/// first is computed again.
fn feed_forward(between: Between, compute: DType) -> Result<TrainingGraph, GraphError> {
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", ROWS, DType::I32);
    let table = g.weight("table", [50, WIDE], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for block in ["first", "second"] {
        g.enter_block(block);
        let adapted = |g: &mut Graph, layer: &str, x: TensorId, outputs: usize| {
            let part = |part: &str| format!("{block}.{layer}.{part}");
            let inputs = g.ty(x).width();
            let down = g.weight(&part("down"), [RANK, inputs], WEIGHT);
            let low = g.linear(&part("low"), x, down, None)?;
            let weight = g.frozen_weight(&part("weight"), [outputs, inputs], WEIGHT);
            let bias = g.frozen_small_weight(&part("bias"), [outputs], WEIGHT);
            let y = g.linear(&part("base"), x, weight, Some(bias))?;
            let up = g.weight(&part("up"), [outputs, RANK], WEIGHT);
            g.linear_add(&part("adapted"), (y, 0), (low, 0), up, 1.5)
        };
        let name = format!("{block}.between");
        let wide = adapted(&mut g, "wide", x, LONG)?;
        let inner = match between {
            Between::Function(kind) => g.activation(&name, wide, kind)?,
            Between::Gate => {
                let up = adapted(&mut g, "up", x, LONG)?;
                g.gated(&name, wide, up, ActivationKind::Silu)?
            }
        };
        x = adapted(&mut g, "narrow", inner, WIDE)?;
        g.leave_block();
    }
    let head = g.weight("head", [50, WIDE], WEIGHT);
    let targets = g.batch("targets", ROWS, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)?.recompute(Recompute::Blocks(1))
}

/// Selective scans with projections of a width that a pass each way takes: x and z in one tensor, or
/// x by itself, after a convolution.
fn selective(rows: [usize; 2], compute: DType) -> Result<TrainingGraph, GraphError> {
    const INNER: usize = 1024;
    const STATE: usize = 16;
    const SELECTED: usize = 64;
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [50, 64], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for (block, convolved) in [("first", false), ("second", true)] {
        let part = |part: &str| format!("{block}.{part}");
        // What a scan multiplies with each other is of about 1: products of what is much less are
        // below what halves of five bits' exponent have.
        let gamma = g.small_weight(&part("gamma"), [64], Init::Ones);
        x = g.norm(&part("norm"), x, (NormKind::Rms, 1e-5), gamma, None)?;
        let weight = g.weight(&part("in"), [2 * INNER, 64], WEIGHT);
        let zu = g.linear(&part("zu"), x, weight, None)?;
        let (u, u_column) = if convolved {
            let weight = g.small_weight(&part("conv.weight"), [INNER, 4], WEIGHT);
            let bias = g.small_weight(&part("conv.bias"), [INNER], WEIGHT);
            (g.convolution(&part("conv"), zu, INNER, weight, bias)?, 0)
        } else {
            (zu, INNER)
        };
        let to_p = g.weight(&part("to_p"), [SELECTED + 2 * STATE, INNER], WEIGHT);
        let p = g.linear_columns(&part("p"), u, u_column, to_p, None)?;
        let to_dt = g.weight(&part("to_dt"), [INNER, SELECTED], WEIGHT);
        let bias = g.small_weight(&part("dt_bias"), [INNER], WEIGHT);
        let dt = g.linear_columns(&part("dt"), p, 0, to_dt, Some(bias))?;
        let inputs = ScanInputs {
            x: u,
            x_column: u_column,
            z: zu,
            z_column: 0,
            p,
            dt,
            a_log: g.small_weight(&part("A_log"), [INNER, STATE], WEIGHT),
            d: g.small_weight(&part("D"), [INNER], Init::Ones),
        };
        let y = g.scan(&part("scan"), inputs, SELECTED, 32)?;
        let out = g.weight(&part("out"), [64, INNER], WEIGHT);
        x = g.linear(&part("y"), y, out, None)?;
    }
    let head = g.weight("head", [50, 64], WEIGHT);
    let targets = g.batch("targets", rows, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)
}

/// Gradients of narrow weights over rows so many that their sums are cut: of one layer, or of so many
/// that theirs are one launch.
fn long_sums(layers: usize, compute: DType) -> Result<TrainingGraph, GraphError> {
    const ROWS: [usize; 2] = [3, 669];
    let mut g = Graph::new(compute);
    let tokens = g.batch("tokens", ROWS, DType::I32);
    let table = g.weight("table", [50, 72], WEIGHT);
    let mut x = g.embedding("embedding", tokens, table, None, None)?;
    for layer in 0..layers {
        let widths = [g.ty(x).width(), [136, 72][layer % 2]];
        let weight = g.weight(&format!("weight.{layer}"), [widths[1], widths[0]], WEIGHT);
        x = g.linear(&format!("layer.{layer}"), x, weight, None)?;
    }
    let head = g.weight("head", [50, g.ty(x).width()], WEIGHT);
    let targets = g.batch("targets", ROWS, DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)?;
    differentiate(g, &OPTIMIZER)
}

/// A step's gradients after two micro batches, the second of which adds to the first, where each
/// part has `nodes` nodes at most. Weights are what `dtype` has of them.
fn gradients<D: Device>(
    graph: &TrainingGraph,
    nodes: usize,
    dtype: DType,
    device: impl FnOnce(u64) -> D,
) -> (Vec<(TensorId, Vec<f32>)>, D) {
    let plan = Plan::new(graph, Options::new(Target::Cuda));
    let mut device = device(plan.arena_bytes);
    let end = num_micro_nodes(graph);
    let mut parts_of = |first: bool| -> Vec<usize> {
        let mut prepare = |start: usize| {
            let nodes = start..end.min(start.saturating_add(nodes));
            device.prepare(graph, &plan, nodes, first)
        };
        (0..end).step_by(nodes).map(&mut prepare).collect()
    };
    let parts = [parts_of(true), parts_of(false)];
    let place = |id| plan.placement(id).unwrap();
    for (index, parameter) in graph.parameters.iter().enumerate() {
        let values = random(parameter.shape.elements(), index as u64 + 1);
        let middle = match parameter.init {
            Init::Ones => 1.0,
            _ => 0.0,
        };
        let values: Vec<f32> = values.iter().map(|&x| middle + 0.1 * x as f32).collect();
        let values = decode(&encode(&values, dtype), dtype);
        let mut ids = vec![parameter.master, parameter.compute];
        ids.dedup();
        for id in ids {
            let bytes = encode(&values, graph.ty(id).dtype);
            device.write(place(id), &bytes);
        }
    }
    // Behind two scans gradients are below what halves of five bits' exponent have.
    let scale = LossScale {
        scale: 1024.0,
        ..LossScale::START
    };
    if let Some(id) = graph.loss_scale {
        let values = scale.values().map(f32::to_le_bytes);
        device.write(place(id), values.as_flattened());
    }
    if let Some(random) = graph.find("random") {
        let words = [0x1234_5678_u32, 0x9abc_def0, 3, 0].map(u32::to_le_bytes);
        device.write(place(random), words.as_flattened());
    }
    for name in ["tokens", "targets"] {
        let id = graph.find(name).unwrap();
        let tokens = 0..graph.ty(id).shape.elements();
        let tokens = tokens.flat_map(|i| ((i * 7 % 50) as i32).to_le_bytes());
        device.write(place(id), &tokens.collect::<Vec<u8>>());
    }
    let term = graph.terms[0].inputs;
    device.write(place(term.inverse_count), &0.01_f32.to_le_bytes());
    device.write(place(term.weight), &1.0_f32.to_le_bytes());
    for &part in parts.iter().flatten() {
        device.run(graph, &plan, part);
    }
    let trained = graph
        .parameters
        .iter()
        .filter_map(|parameter| parameter.gradient);
    let factor = graph.loss_scale.map_or(1.0, |_| scale.scale);
    let mut read = |id| {
        let values = decode(&device.read(place(id)), graph.ty(id).dtype);
        values.iter().map(|value| value / factor).collect()
    };
    let gradients = trained.map(|id| (id, read(id))).collect();
    (gradients, device)
}

#[test]
#[ignore = "needs a GPU"]
fn joined_products_give_what_they_give_one_by_one() {
    compare(graph);
}

#[test]
#[ignore = "needs a GPU"]
fn joined_products_of_a_low_rank_give_what_they_give_one_by_one() {
    compare(low_rank);
    compare(low_rank_of_many_rows);
}

#[test]
#[ignore = "needs a GPU"]
fn both_matrices_of_a_low_rank_that_is_dropped_give_what_they_give_one_by_one() {
    compare(|compute| dropped_low_rank(ROWS, compute));
    compare(|compute| dropped_low_rank(MANY, compute));
}

#[test]
#[ignore = "needs a GPU"]
fn joined_products_with_short_sums_give_what_they_give_one_by_one() {
    compare(short_sums);
}

#[test]
#[ignore = "needs a GPU"]
fn what_follows_products_gives_the_same_in_their_kernel() {
    compare(|compute| encoder(SHORT, ROWS, compute));
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_whole_rows_give_what_they_give_one_by_one() {
    compare(|compute| encoder(WHOLE, TWICE, compute));
    compare(|compute| encoder(WHOLE, MANY, compute));
}

#[test]
#[ignore = "needs a GPU"]
fn functions_after_long_products_give_the_same_in_their_kernel() {
    compare(|compute| feed_forward(Between::Function(ActivationKind::Gelu), compute));
    compare(|compute| feed_forward(Between::Function(ActivationKind::GeluTanh), compute));
}

#[test]
#[ignore = "needs a GPU"]
fn gates_after_long_products_give_the_same_in_their_kernel() {
    compare(|compute| feed_forward(Between::Gate, compute));
}

#[test]
#[ignore = "needs a GPU"]
fn projections_of_scans_give_what_they_give_one_by_one() {
    compare(|compute| selective(ROWS, compute));
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_that_are_cut_give_what_they_give_whole() {
    compare(|compute| long_sums(1, compute));
    compare(|compute| long_sums(3, compute));
}

/// A vocabulary whose last words may be a product of their own.
#[test]
#[ignore = "needs a GPU"]
fn the_loss_of_an_odd_vocabulary() {
    let make = |compute| {
        let mut g = Graph::new(compute);
        let tokens = g.batch("tokens", [2, 45], DType::I32);
        let table = g.weight("table", [4139, 64], WEIGHT);
        let x = g.embedding("embedding", tokens, table, None, None).unwrap();
        let targets = g.batch("targets", [2, 45], DType::I32);
        let chunk = Some(40);
        g.cross_entropy("loss", x, table, targets, 0.0, chunk)
            .unwrap();
        g
    };
    crate::check("loss of 4139 words", make);
    crate::check_second_way("loss of 4139 words, cut", make);
}

type Make = fn(DType) -> Result<TrainingGraph, GraphError>;

/// The types, each with how far a gradient may be from the exact one.
const HALVES: [(DType, f64); 2] = [(DType::Bf16, 1.5e-2), (DType::F16, 3e-3)];

/// Products in one kernel round less often than one by one, each in its own way: neither may be
/// further from what fp32 gives of the same weights than rounding takes them.
fn compare(make: Make) {
    let _card = card();
    let on_card = |arena_bytes| OnCard::new(arena_bytes, true);
    for (dtype, tolerance) in HALVES {
        let exact = gradients(&make(DType::F32).unwrap(), 1, dtype, on_card).0;
        let graph = make(dtype).unwrap();
        let apart = gradients(&graph, 1, dtype, on_card).0;
        let joined = gradients(&graph, usize::MAX, dtype, on_card).0;
        assert_as_near(&graph, &exact, &apart, &joined, tolerance);
    }
}

/// The same with the host in place of a card, by every way that there is.
fn compare_emulated(make: Make, types: &[(DType, f64)], multiprocessors: usize) {
    if !is_possible() {
        eprintln!("skipped: no NVRTC");
        return;
    }
    let card = Card {
        multiprocessors,
        ..Card::HOPPER
    };
    let way = |way| move |arena_bytes| OnHost::new(arena_bytes, card, way);
    for &(dtype, tolerance) in types {
        let exact = gradients(&make(DType::F32).unwrap(), 1, dtype, way(0)).0;
        let graph = make(dtype).unwrap();
        let apart = gradients(&graph, 1, dtype, way(0)).0;
        for number in 0.. {
            let (joined, device) = gradients(&graph, usize::MAX, dtype, way(number));
            assert!(device.conflicts.is_empty(), "{:#?}", device.conflicts);
            assert_as_near(&graph, &exact, &apart, &joined, tolerance);
            if !device.has_more_ways(number + 1) {
                break;
            }
        }
    }
}

fn assert_as_near(
    graph: &TrainingGraph,
    exact: &[(TensorId, Vec<f32>)],
    apart: &[(TensorId, Vec<f32>)],
    joined: &[(TensorId, Vec<f32>)],
    tolerance: f64,
) {
    for (((id, apart), (_, joined)), (_, exact)) in apart.iter().zip(joined).zip(exact) {
        let norm = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
        };
        let distance =
            |to: &[f32]| norm(&mut exact.iter().zip(to).map(|(exact, other)| exact - other));
        let size = norm(&mut exact.iter().copied());
        let name = &graph.tensor(*id).name;
        assert!(size > 0.0, "{name} is zero");
        let (apart, joined) = (distance(apart) / size, distance(joined) / size);
        // Rounding one by one alone takes a gradient behind two scans 1.23 times as far.
        assert!(
            apart <= 3.0 * tolerance && joined <= (1.3 * apart).max(tolerance),
            "{} {name}: {joined} joined, {apart} one by one",
            graph.compute
        );
    }
}

mod emulated {
    use super::*;

    /// Of a few tiles, one of which ends inside.
    const FEW: [usize; 2] = [1, 140];

    /// So few that blocks have several tiles each, as they have of many rows on a whole card.
    const MULTIPROCESSORS: usize = 8;

    fn few_rows(make: Make) {
        compare_emulated(make, &HALVES[..1], MULTIPROCESSORS);
    }

    fn all_rows(make: Make) {
        compare_emulated(make, &HALVES, MULTIPROCESSORS);
    }

    #[test]
    fn what_follows_products_of_few_rows() {
        few_rows(|compute| encoder(SHORT, FEW, compute));
    }

    #[test]
    fn products_of_whole_rows_of_bf16() {
        compare_emulated(|compute| encoder(WHOLE, TWICE, compute), &HALVES[..1], 4);
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn products_of_whole_rows() {
        compare_emulated(|compute| encoder(WHOLE, TWICE, compute), &HALVES, 4);
    }

    #[test]
    fn low_ranks_of_few_rows() {
        few_rows(|compute| layers(compute, 8, 384, 768, FEW));
    }

    /// So many on one multiprocessor that its blocks go more than once through their stages, and warps
    /// that read have two tiles, but the last of them.
    const STREAMED: [usize; 2] = [1, 266];

    #[test]
    fn dropped_low_ranks_of_few_rows() {
        compare_emulated(
            |compute| dropped_low_rank(STREAMED, compute),
            &HALVES[..1],
            1,
        );
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn dropped_low_ranks() {
        compare_emulated(|compute| dropped_low_rank(STREAMED, compute), &HALVES, 1);
        compare_emulated(|compute| dropped_low_rank(ROWS, compute), &HALVES[..1], 2);
    }

    #[test]
    fn projections_of_scans_of_few_rows() {
        few_rows(|compute| selective(FEW, compute));
    }

    #[test]
    fn gradients_that_are_cut() {
        all_rows(|compute| long_sums(1, compute));
        all_rows(|compute| long_sums(3, compute));
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn joined_products() {
        all_rows(graph);
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn low_ranks() {
        all_rows(low_rank);
    }

    /// Each width of which both products of an adapter's second matrix are one pass has its kernels.
    #[test]
    #[ignore = "takes minutes without a card"]
    fn low_ranks_of_every_width() {
        few_rows(|compute| layers(compute, 8, 128, 256, FEW));
        few_rows(|compute| layers(compute, 8, 512, 768, FEW));
        few_rows(|compute| layers(compute, 8, 1024, 1536, FEW));
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn sums_that_are_short() {
        all_rows(short_sums);
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn what_follows_products() {
        all_rows(|compute| encoder(SHORT, ROWS, compute));
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn functions_after_long_products() {
        all_rows(|compute| feed_forward(Between::Function(ActivationKind::Gelu), compute));
        all_rows(|compute| feed_forward(Between::Function(ActivationKind::GeluTanh), compute));
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn gates_after_long_products() {
        all_rows(|compute| feed_forward(Between::Gate, compute));
    }

    #[test]
    #[ignore = "takes minutes without a card"]
    fn projections_of_scans() {
        all_rows(|compute| selective(ROWS, compute));
    }
}
