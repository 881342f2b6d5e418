//! The update as commands: which parameters are in which launch, and what a table holds.

use cinch_graph::op::{GradientFormat, LossScale};
use cinch_graph::{DType, Graph, Init, Optimizer, Target, TrainingGraph, differentiate};
use cinch_plan::{Options, Plan, num_micro_nodes};

use super::*;
use crate::cuda::command::Command;
use crate::cuda::lowering::Card;
use crate::cuda::op::{Lowered, lower_all};
use crate::engine::MicroBatch;

const SOURCE: &str = include_str!("../../kernels/optimizer.cu");

/// What the learning rate of layers is multiplied by, that of the table and of biases is not.
const LAYER_RATE: f64 = 10.0;

/// A chain of square layers, every second one with a bias, which does not decay.
fn step(dtype: DType, layers: usize) -> TrainingGraph {
    step_with(dtype, layers, MomentFormat::Full)
}

fn step_with(dtype: DType, layers: usize, moments: MomentFormat) -> TrainingGraph {
    step_of(Graph::new(dtype), layers, (moments, GradientFormat::Full))
}

/// As [`step_with`], of weights that are kept as they are read.
fn step_as_read(layers: usize, formats: (MomentFormat, GradientFormat)) -> TrainingGraph {
    let mut g = Graph::new(DType::Bf16);
    g.masters = false;
    step_of(g, layers, formats)
}

fn step_of(mut g: Graph, layers: usize, formats: (MomentFormat, GradientFormat)) -> TrainingGraph {
    const INIT: Init = Init::Normal { std: 0.02 };
    let tokens = g.batch("tokens", [2, 5], DType::I32);
    let table = g.weight("table", [3001, 9], INIT);
    let mut x = g.embedding("embedding", tokens, table, None, None).unwrap();
    for layer in 0..layers {
        let weight = g.weight(&format!("{layer}.weight"), [9, 9], INIT);
        g.scale_learning_rate(LAYER_RATE);
        let bias =
            (layer % 2 == 1).then(|| g.small_weight(&format!("{layer}.bias"), [9], Init::Zeros));
        x = g.linear(&layer.to_string(), x, weight, bias).unwrap();
    }
    differentiated(g, x, table, formats)
}

fn differentiated(
    mut g: Graph,
    x: TensorId,
    head: TensorId,
    (moments, gradients): (MomentFormat, GradientFormat),
) -> TrainingGraph {
    let targets = g.batch("targets", [2, 5], DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)
        .unwrap();
    let optimizer = Optimizer {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_norm: Some(1.0),
        moments,
        gradients,
    };
    differentiate(g, &optimizer).unwrap()
}

fn update(graph: &Graph, plan: &Plan) -> Vec<Lowered> {
    let nodes = num_micro_nodes(graph)..graph.nodes.len();
    lower_all(graph, plan, nodes, MicroBatch::of_one(false), Card::ANY)
}

fn plan(graph: &Graph) -> Plan {
    Plan::new(graph, Options::new(Target::Cuda))
}

/// Blocks, number of entries and table of each launch.
fn tables(commands: &[Command]) -> Vec<(usize, usize, &[u32])> {
    let table = |command| match command {
        &Command::LaunchTable {
            shape,
            ref table,
            ref arguments,
            ..
        } => {
            let Argument::U32(entries) = arguments[0] else {
                panic!("{arguments:?}");
            };
            (shape.grid[0] as usize, entries as usize, &table[..])
        }
        other => panic!("{other:?}"),
    };
    commands.iter().map(table).collect()
}

#[test]
fn all_parameters_are_updated_in_one_launch() {
    for dtype in [DType::F32, DType::Bf16] {
        let graph = step(dtype, 6);
        let plan = plan(&graph);
        let lowered = update(&graph, &plan);
        let ops: Vec<&str> = lowered.iter().map(|entry| entry.op).collect();
        assert_eq!(ops, ["gradient_norm", "adamw"]);
        assert_eq!(lowered[1].node, "table.update and 9 more");
        let tables = tables(&lowered[1].commands);
        assert_eq!(tables.len(), 1);
        let (blocks, count, words) = tables[0];
        assert_eq!((count, words.len()), (10, TABLE_ENTRIES * ENTRY_WORDS));
        // 27009 elements are 4 blocks, each of the others is one.
        assert_eq!(blocks, 4 + 9);
        let (entries, _) = words.as_chunks::<ENTRY_WORDS>();
        let mut first_block = 0;
        for (entry, parameter) in entries.iter().zip(&graph.parameters) {
            let place = |id| (plan.placement(id).unwrap().offset / 256) as u32;
            let [m, v] = parameter.moments.unwrap();
            assert_eq!(entry[0], place(parameter.master));
            assert_eq!(entry[1], place(parameter.gradient.unwrap()));
            assert_eq!((entry[2], entry[3]), (place(m), place(v)));
            let copied = parameter.compute != parameter.master;
            let copy = if copied {
                place(parameter.compute)
            } else {
                u32::MAX
            };
            assert_eq!(entry[4], copy);
            let elements = graph.ty(parameter.master).shape.elements();
            assert_eq!(entry[5] as usize, elements);
            assert_eq!(entry[6] as usize, first_block);
            let decay = if parameter.decay { 0.1_f32 } else { 0.0 };
            assert_eq!(entry[7], 0);
            assert_eq!(f32::from_bits(entry[8]), decay);
            let rate = parameter.learning_rate_scale as f32;
            assert_eq!(f32::from_bits(entry[9]), rate);
            first_block += elements.div_ceil(8192);
        }
        assert!(
            entries[count..]
                .iter()
                .all(|entry| *entry == [0; ENTRY_WORDS])
        );
    }
}

#[test]
fn more_parameters_than_a_table_holds_are_several_launches() {
    let graph = step(DType::Bf16, 200);
    let plan = plan(&graph);
    let lowered = update(&graph, &plan);
    assert_eq!(lowered.len(), 2);
    let tables = tables(&lowered[1].commands);
    let counts: Vec<usize> = tables.iter().map(|&(_, count, _)| count).collect();
    assert_eq!(counts, [96, 96, 96, 13]);
    // Each counts its own blocks.
    assert!(tables.iter().all(|&(_, _, words)| words[6] == 0));
    let arguments = TABLE_ENTRIES * ENTRY_WORDS * 4 + 48;
    assert!(arguments < 4096, "{arguments}");
}

#[test]
fn other_settings_are_another_launch() {
    let mut graph = (*step(DType::F32, 4)).clone();
    let last = graph.nodes.last_mut().unwrap();
    if let Op::AdamW(op) = &mut last.op {
        op.beta2 = 0.5;
    }
    let nodes = num_micro_nodes(&graph);
    assert_eq!(num_together(&graph.nodes[nodes..]), 0);
    assert_eq!(num_together(&graph.nodes[nodes + 1..]), 6);
    assert_eq!(num_together(&graph.nodes[nodes + 7..]), 1);
    assert_eq!(num_together(&[]), 0);
}

#[test]
fn only_half_precision_has_a_loss_scale() {
    for (dtype, scaled) in [(DType::F32, false), (DType::F16, true)] {
        let graph = step(dtype, 2);
        let plan = plan(&graph);
        let place = |name| plan.placement(graph.find(name)?);
        let expected = place("loss_scale").map_or(Argument::Null, |place| {
            assert_eq!(place.bytes, 16);
            Argument::Address(place.offset)
        });
        assert_eq!(expected != Argument::Null, scaled);
        let all = lower_all(
            &graph,
            &plan,
            0..graph.nodes.len(),
            MicroBatch::of_one(true),
            Card::ANY,
        );
        let arguments = |function: &str| {
            let launches = all.iter().flat_map(|lowered| &lowered.commands);
            let mut found = launches.filter_map(|command| match command {
                Command::Launch {
                    kernel, arguments, ..
                } if kernel.function == function => Some(arguments),
                _ => None,
            });
            found.next().unwrap()
        };
        assert_eq!(arguments("gradient_norm")[2], expected);
        assert_eq!(arguments("cross_entropy_rows")[6], expected);
    }
}

/// The parameters of a kernel, as they are declared.
fn parameters(function: &str) -> Vec<&'static str> {
    let start = SOURCE.find(&format!("\n{function}(")).expect(function);
    let list = &SOURCE[start..];
    let list = &list[list.find('(').unwrap() + 1..list.find(") {").unwrap()];
    list.split(',').map(str::trim).collect()
}

/// A step with moments in eight bits of what is large enough, wherever they lie.
#[test]
fn moments_in_eight_bits_have_launches_of_their_own() {
    for offload_states in [false, true] {
        let graph = step_with(DType::Bf16, 3, MomentFormat::EightBit);
        let options = Options {
            offload_states,
            ..Options::new(Target::Cuda)
        };
        let plan = Plan::new(&graph, options);
        let lowered = update(&graph, &plan);
        // The table by itself, and the small ones together.
        let nodes: Vec<&str> = lowered.iter().map(|entry| entry.node.as_str()).collect();
        assert_eq!(
            nodes,
            [
                "gradient_norm",
                "table.update",
                "0.weight.update and 3 more"
            ]
        );
        let [
            Command::Launch {
                shape, arguments, ..
            },
        ] = &lowered[1].commands[..]
        else {
            panic!("{:?}", lowered[1]);
        };
        // 27009 elements are 106 blocks of 256, eight to a block of threads.
        assert_eq!((shape.grid[0], shape.block[0]), (14, UPDATE_THREADS));
        let table = &graph.parameters[0];
        let [scales, moments] = [table.scales, table.moments].map(Option::unwrap);
        for (position, id) in [
            (2, moments[0]),
            (3, moments[1]),
            (4, scales[0]),
            (5, scales[1]),
        ] {
            let offset = plan.placement(id).unwrap().offset;
            let expected = if offload_states {
                Argument::Host(offset)
            } else {
                Argument::Address(offset)
            };
            assert_eq!(arguments[position], expected);
        }
        let declared = parameters("adamw_8bit");
        assert_eq!(declared.len(), arguments.len());
        for (parameter, argument) in declared.iter().zip(arguments) {
            let fits = match argument {
                Argument::U64(_) => parameter.starts_with("u64 "),
                Argument::F32(_) => parameter.starts_with("float ") && !parameter.contains('*'),
                _ => parameter.contains('*'),
            };
            assert!(fits, "{argument:?} as `{parameter}`");
        }
        // The others find their moments from the start of the same memory.
        let Command::LaunchTable { arguments, .. } = &lowered[2].commands[0] else {
            panic!("{:?}", lowered[2]);
        };
        let states = if offload_states {
            Argument::Host(0)
        } else {
            Argument::Address(0)
        };
        assert_eq!(arguments[2], states);
    }
}

/// Updates inside the backward: sums of squares where they belong, and no factor without a norm.
#[test]
fn updates_inside_the_backward_are_lowered() {
    let graph = step(DType::F32, 2).update_in_backward();
    let plan = plan(&graph);
    let all = lower_all(
        &graph,
        &plan,
        0..graph.nodes.len(),
        MicroBatch::of_one(true),
        Card::ANY,
    );
    let sums = plan
        .placement(graph.find("gradient_squares").unwrap())
        .unwrap();
    let mut filled = Vec::new();
    for lowered in all
        .iter()
        .filter(|lowered| lowered.op == "gradient_squares")
    {
        let [
            Command::Launch {
                shape, arguments, ..
            },
        ] = &lowered.commands[..]
        else {
            panic!("{lowered:?}");
        };
        let Argument::Address(address) = arguments[1] else {
            panic!("{arguments:?}");
        };
        filled
            .extend((0..shape.grid[0]).map(|block| (address - sums.offset) / 8 + u64::from(block)));
    }
    filled.sort_unstable();
    let total = sums.bytes / 8;
    assert_eq!(filled, (0..total).collect::<Vec<_>>());
    let norm = all
        .iter()
        .find(|lowered| lowered.op == "gradient_norm")
        .unwrap();
    let [Command::Launch { arguments, .. }] = &norm.commands[..] else {
        panic!("{norm:?}");
    };
    assert_eq!(arguments[0], Argument::Address(sums.offset));
    assert_eq!(arguments[3], Argument::U32(total as u32));
}

/// Launches of all kinds, by the kernel's name, in order.
fn launched(lowered: &[Lowered]) -> Vec<&'static str> {
    let commands = lowered.iter().flat_map(|lowered| &lowered.commands);
    commands
        .filter_map(|command| match command {
            Command::Launch { kernel, .. } | Command::LaunchTable { kernel, .. } => {
                Some(kernel.function)
            }
            _ => None,
        })
        .collect()
}

/// Weights without masters, and biases in single precision, are in one launch; each entry says
/// what of it is in which type.
#[test]
fn weights_without_masters_share_the_launch() {
    use {GradientFormat as G, MomentFormat as M};
    for (formats, layer, table) in [
        ((M::Full, G::Full), 1, 1),
        // The table is read twice, so that its gradient is a sum in single precision.
        ((M::Full, G::AsKept), 1 | 2, 1),
        // The layers are so small that their moments stay in single precision.
        ((M::AsKept, G::Full), 1, 1 | 4),
        ((M::AsKept, G::AsKept), 1 | 2, 1 | 4),
    ] {
        let graph = step_as_read(3, formats);
        let plan = plan(&graph);
        let lowered = update(&graph, &plan);
        let squares: &[&str] = match formats.1 {
            G::Full => &["gradient_squares"],
            // Those of one type are side by side.
            G::AsKept => &["gradient_squares", "gradient_squares_real"],
        };
        let expected = [squares, &["gradient_norm", "adamw"]].concat();
        assert_eq!(launched(&lowered), expected);
        let (_, count, words) = tables(&lowered[1].commands)[0];
        assert_eq!(count, 5);
        let (entries, _) = words.as_chunks::<ENTRY_WORDS>();
        for (entry, parameter) in entries.iter().zip(&graph.parameters) {
            let name = &graph.tensor(parameter.master).name;
            let kept = match name.as_str() {
                "table" => table,
                name if name.ends_with("bias") => 0,
                _ => layer,
            };
            assert_eq!(
                (entry[4], entry[7]),
                (NO_COPY, kept),
                "{name} with {formats:?}"
            );
        }
    }
}

#[test]
fn eight_bit_updates_have_a_kernel_for_each_type() {
    for (masters, function) in [(true, "adamw_8bit"), (false, "adamw_8bit_as_read")] {
        let mut g = Graph::new(DType::Bf16);
        g.masters = masters;
        let formats = (MomentFormat::EightBit, GradientFormat::AsKept);
        let graph = step_of(g, 1, formats);
        let found = launched(&update(&graph, &plan(&graph)));
        assert!(found.contains(&function), "{found:?}");
    }
    // A weight of one layer alone has its gradient in its type.
    let mut g = Graph::new(DType::Bf16);
    g.masters = false;
    let x = g.batch("x", [2, 5, 64], DType::Bf16);
    let weight = g.weight("wide", [128, 64], Init::Zeros);
    let h = g.linear("wide", x, weight, None).unwrap();
    let head = g.frozen_weight("head", [61, 128], Init::Zeros);
    let formats = (MomentFormat::EightBit, GradientFormat::AsKept);
    let graph = differentiated(g, h, head, formats);
    let found = launched(&update(&graph, &plan(&graph)));
    assert!(found.contains(&"adamw_8bit_all_as_read"), "{found:?}");
    for function in ["adamw_8bit_as_read", "adamw_8bit_all_as_read"] {
        assert_eq!(parameters(function).len(), parameters("adamw_8bit").len());
    }
}

/// The kernel repeats what the graph and the lowering say.
#[test]
fn constants_are_those_of_the_kernel() {
    let (small, large) = (LossScale::SMALLEST, LossScale::LARGEST);
    let interval = LossScale::INTERVAL;
    for line in [
        format!("SMALLEST_SCALE = {small:.1}f, LARGEST_SCALE = {large:.1}f"),
        format!("SCALE_INTERVAL = {interval}.0f"),
        format!("ENTRIES = {TABLE_ENTRIES};"),
        format!(
            "PARAMETER_AS_READ = {PARAMETER_AS_READ}, GRADIENT_AS_READ = {GRADIENT_AS_READ}, \
             MOMENTS_AS_READ = {MOMENTS_AS_READ};"
        ),
        format!("UNIT = {ALIGNMENT}, NO_COPY = {NO_COPY:#x}u"),
        format!("SHARE = {SHARE}, UPDATE_THREADS = {UPDATE_THREADS};"),
        format!("__launch_bounds__({UPDATE_THREADS})\nadamw("),
        format!("__launch_bounds__({UPDATE_THREADS})\nadamw_8bit("),
        format!(
            "CODE_BLOCK = {}, LANE_CODES = {}, BLOCKS_PER_LAUNCH_BLOCK = {CODE_BLOCKS};",
            MomentFormat::BLOCK,
            MomentFormat::BLOCK / 32
        ),
    ] {
        assert!(SOURCE.contains(&line), "{line}");
    }
}
