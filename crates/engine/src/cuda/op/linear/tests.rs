//! A small training step as commands: every launch has what its kernel's parameters ask for,
//! every product stays inside its tensors, and sums start over or go on as the step demands.

use std::collections::BTreeSet;

use cinch_graph::op::{ActivationKind, NormKind, Over};
use cinch_graph::{DType, Graph, Init, Storage, Target, TrainingGraph, differentiate};
use cinch_plan::{Options, Plan};

use super::*;
use crate::cuda::command::Command;
use crate::cuda::lowering::Card;
use crate::cuda::op::lower;
use crate::cuda::op::tests::OPTIMIZER;

const INIT: Init = Init::Normal { std: 0.02 };
const VOCABULARY: usize = 67;
const CHUNK: usize = 4;
const SOURCES: [(&str, &str); 7] = [
    ("activation", include_str!("../../kernels/activation.cu")),
    ("column_sum", include_str!("../../kernels/column_sum.cu")),
    (
        "cross_entropy",
        include_str!("../../kernels/cross_entropy.cu"),
    ),
    ("embedding", include_str!("../../kernels/embedding.cu")),
    (
        "gradient_narrow_tensor",
        include_str!("../../kernels/gradient_narrow_tensor.cu"),
    ),
    ("norm", include_str!("../../kernels/norm.cu")),
    ("optimizer", include_str!("../../kernels/optimizer.cu")),
];

/// Batch 2, length 5: embedding, two linear layers in a residual branch (the second reads a
/// column block), norms of both kinds, a head tied to the table.
fn step(dtype: DType, width: usize) -> TrainingGraph {
    trained(forward(dtype, width))
}

fn forward(dtype: DType, width: usize) -> Graph {
    let mut g = Graph::new(dtype);
    let tokens = g.batch("tokens", [2, 5], DType::I32);
    let table = g.weight("table", [VOCABULARY, width], INIT);
    let positions = g.weight("positions", [7, width], INIT);
    let dropout = g.dropout(0.1);
    let stream = g
        .embedding("embedding", tokens, table, Some(positions), dropout)
        .unwrap();
    let gamma = g.small_weight("first.gamma", [width], Init::Ones);
    let x = g
        .norm("first", stream, (NormKind::Rms, 1e-5), gamma, None)
        .unwrap();
    let weight = g.weight("up.weight", [3 * width, width], INIT);
    let bias = g.small_weight("up.bias", [3 * width], Init::Zeros);
    let up = g.linear("up", x, weight, Some(bias)).unwrap();
    let active = g.activation("gelu", up, ActivationKind::GeluTanh).unwrap();
    let weight = g.weight("down.weight", [width, width], INIT);
    let branch = g
        .linear_columns("down", active, width, weight, None)
        .unwrap();
    let scale = g.small_weight("scale", [width], Init::Ones);
    let squares = g
        .sum("squares", Over::Sequence, &[branch], |v| v[0].square())
        .unwrap();
    let squares = g.view("rows", squares, [2, 1, width]).unwrap();
    let dropout = g.dropout(0.1);
    let branch = g
        .map("scaled", &[branch, scale, squares], |v| {
            (&v[0] * &v[1] + &v[2]).dropout(dropout)
        })
        .unwrap();
    let gamma = g.small_weight("last.gamma", [width], Init::Ones);
    let beta = g.small_weight("last.beta", [width], Init::Zeros);
    let dropout = g.dropout(0.1);
    let normed = g
        .residual_norm(
            "last",
            (stream, branch),
            dropout,
            (NormKind::Layer, 1e-5),
            gamma,
            Some(beta),
        )
        .unwrap();
    let targets = g.batch("targets", [2, 5], DType::I32);
    g.cross_entropy("loss", normed.normed, table, targets, 0.1, Some(CHUNK))
        .unwrap();
    g
}

fn trained(graph: Graph) -> TrainingGraph {
    differentiate(graph, &OPTIMIZER).unwrap()
}

fn plan(graph: &Graph) -> Plan {
    Plan::new(graph, Options::new(Target::Cuda))
}

/// The commands of the node of that name.
fn commands_of(graph: &Graph, name: &str, first_micro: bool) -> Vec<Command> {
    let plan = plan(graph);
    let index = graph.nodes.iter().position(|node| node.name == name);
    let index = index.unwrap_or_else(|| panic!("no node {name}"));
    lower(Lowering::new(graph, &plan, index, first_micro, Card::ANY))
}

fn functions(commands: &[Command]) -> Vec<&'static str> {
    let function = |command: &Command| match command {
        Command::Launch { kernel, .. } | Command::LaunchTable { kernel, .. } => kernel.function,
        Command::LaunchGenerated { kernel, .. } => kernel.function,
        Command::Product(_) => "product",
        Command::Products { .. } => "products",
        Command::Ways(_) => "ways",
        Command::Clear { .. } => "clear",
        Command::Copy { .. } => "copy",
        Command::Fetch(_) => "fetch",
        Command::Store(_) => "store",
        Command::Beside { .. } => "beside",
        Command::Await { .. } => "await",
        Command::Exchange(_) => "exchange",
    };
    commands.iter().map(function).collect()
}

fn products(commands: &[Command]) -> Vec<Product> {
    let product = |command: &Command| match command {
        Command::Product(product) => Some(*product),
        _ => None,
    };
    commands.iter().filter_map(product).collect()
}

/// The parameters of a kernel, as its source has them.
fn parameters(kernel: Kernel) -> Vec<String> {
    let (_, source) = SOURCES
        .iter()
        .find(|(file, _)| *file == kernel.file)
        .unwrap_or_else(|| panic!("no source {}", kernel.file));
    parameters_in(source, kernel.function)
}

fn parameters_in(source: &str, function: &str) -> Vec<String> {
    let opening = format!("{function}(");
    let signature = source.split("KERNEL").skip(1).find_map(|text| {
        let (before, rest) = text.split_once(&opening)?;
        let is_start = before.trim().is_empty() || before.trim().starts_with("__launch_bounds__");
        (is_start && !before.contains('{')).then_some(rest)
    });
    let (list, _) = signature.expect(function).split_once(')').unwrap();
    list.split(',').map(|p| p.trim().to_owned()).collect()
}

fn check_launch(kernel: Kernel, arguments: &[Argument], arena: u64) {
    check_arguments(kernel.function, &parameters(kernel), arguments, arena);
}

/// The table is the first parameter.
fn check_table_launch(kernel: Kernel, arguments: &[Argument], arena: u64) {
    let parameters = parameters(kernel);
    assert_eq!(parameters[0], "const __grid_constant__ Table table");
    check_arguments(kernel.function, &parameters[1..], arguments, arena);
}

fn check_arguments(kernel: &str, parameters: &[String], arguments: &[Argument], arena: u64) {
    assert_eq!(arguments.len(), parameters.len(), "{kernel}");
    for (parameter, argument) in parameters.iter().zip(arguments) {
        let fits = match argument {
            Argument::Address(address) => parameter.contains('*') && *address < arena,
            Argument::Host(_) | Argument::Null => parameter.contains('*'),
            Argument::I32(_) => parameter.starts_with("i32 "),
            Argument::U32(_) | Argument::Stream(_) => parameter.starts_with("u32 "),
            Argument::U64(_) => parameter.starts_with("u64 "),
            Argument::F32(_) => parameter.starts_with("float "),
            Argument::TensorMap(_) | Argument::MatrixMap(_) => parameter.contains("TensorMap "),
        };
        assert!(fits, "{kernel}: {argument:?} as `{parameter}`");
    }
}

/// The last byte that a matrix reaches lies in the arena, and its columns in its rows.
fn check_matrix(matrix: &MatrixAt, rows: usize, columns: usize, arena: u64) {
    let (rows, columns) = if matrix.transposed {
        (columns, rows)
    } else {
        (rows, columns)
    };
    assert!(columns <= matrix.row_stride);
    let elements = ((rows - 1) * matrix.row_stride + columns) as u64;
    assert!(matrix.address + elements * matrix.dtype.size() <= arena);
}

#[test]
fn every_launch_fits_its_kernel_and_every_product_the_arena() {
    let (mut kernels, mut generated) = (BTreeSet::new(), BTreeSet::new());
    // Whole vectors, and an odd width that takes the kernels for any.
    for (dtype, width) in [(DType::Bf16, 16), (DType::F32, 7), (DType::F16, 9)] {
        let graph = step(dtype, width);
        let plan = plan(&graph);
        for index in 0..graph.nodes.len() {
            for first_micro in [true, false] {
                for command in lower(Lowering::new(&graph, &plan, index, first_micro, Card::ANY)) {
                    match command {
                        Command::Launch {
                            kernel, arguments, ..
                        } => {
                            check_launch(kernel, &arguments, plan.arena_bytes);
                            kernels.insert(kernel);
                        }
                        Command::LaunchGenerated {
                            kernel, arguments, ..
                        } => {
                            let parameters = parameters_in(&kernel.source, kernel.function);
                            let arena = plan.arena_bytes;
                            check_arguments(kernel.function, &parameters, &arguments, arena);
                            generated.insert(kernel.function);
                        }
                        Command::LaunchTable {
                            kernel, arguments, ..
                        } => {
                            check_table_launch(kernel, &arguments, plan.arena_bytes);
                            kernels.insert(kernel);
                        }
                        Command::Products { .. } | Command::Ways(_) => {
                            panic!("nothing in this step is joined")
                        }
                        Command::Product(p) => {
                            check_matrix(&p.a, p.m, p.k, plan.arena_bytes);
                            check_matrix(&p.b, p.k, p.n, plan.arena_bytes);
                            check_matrix(&p.c, p.m, p.n, plan.arena_bytes);
                            let place = plan.workspace(index).unwrap();
                            assert!(p.workspace >= place.offset);
                            assert!(p.workspace + p.workspace_bytes <= place.end());
                        }
                        Command::Clear { address, bytes } => {
                            assert!(bytes > 0 && address + bytes <= plan.arena_bytes);
                        }
                        Command::Copy { from, to, bytes } => {
                            assert!(from.max(to) + bytes <= plan.arena_bytes);
                        }
                        Command::Fetch(copies) => {
                            for copy in copies {
                                assert!(copy.from + copy.bytes <= plan.host_bytes);
                                assert!(copy.to + copy.bytes <= plan.arena_bytes);
                            }
                        }
                        Command::Store(copies) => {
                            for copy in copies {
                                assert!(copy.from + copy.bytes <= plan.arena_bytes);
                                assert!(copy.to + copy.bytes <= plan.host_bytes);
                            }
                        }
                        Command::Beside { .. } | Command::Await { .. } | Command::Exchange(_) => {}
                    }
                }
            }
        }
    }
    assert!(kernels.len() > 20, "{kernels:?}");
    assert_eq!(generated, BTreeSet::from(["map", "reduce"]));
}

#[test]
fn a_bias_is_added_in_the_type_of_the_product() {
    for (dtype, expected) in [
        (DType::F32, vec!["product"]),
        (DType::Bf16, vec!["copy_to_real", "product"]),
    ] {
        let graph = step(dtype, 16);
        let commands = commands_of(&graph, "up", true);
        assert_eq!(functions(&commands), expected);
        let product = products(&commands)[0];
        assert_eq!((product.m, product.n, product.k), (10, 48, 16));
        assert!(product.b.transposed && !product.a.transposed);
        let plan = plan(&graph);
        let place = |name: &str| plan.placement(graph.find(name).unwrap()).unwrap().offset;
        let bias = product.bias.unwrap();
        assert_eq!(bias.kept, place("up.bias"));
        let kept = bias.copied == bias.kept;
        assert_eq!(kept, dtype == DType::F32);
    }
}

#[test]
fn a_column_block_is_read_and_written_where_it_lies() {
    let graph = step(DType::Bf16, 16);
    let forward = products(&commands_of(&graph, "down", true))[0];
    let plan = plan(&graph);
    let place = |name: &str| plan.placement(graph.find(name).unwrap()).unwrap().offset;
    assert_eq!(forward.a.address, place("gelu") + 16 * 2);
    assert_eq!((forward.a.row_stride, forward.k), (48, 16));
    // The other columns of the gradient are zero.
    let commands = commands_of(&graph, "d.down.input", true);
    assert_eq!(functions(&commands), ["clear", "product"]);
    let backward = products(&commands)[0];
    assert_eq!((backward.c.row_stride, backward.n), (48, 16));
    assert_eq!(backward.c.address, place("d.down.input") + 16 * 2);
}

#[test]
fn sums_start_over_in_the_first_micro_batch_only() {
    let graph = step(DType::Bf16, 16);
    for first_micro in [true, false] {
        let commands = commands_of(&graph, "d.up.weight", first_micro);
        let expected = ["product", "column_partials", "sum_partials"];
        assert_eq!(functions(&commands), expected);
        let product = products(&commands)[0];
        assert_eq!((product.m, product.n, product.k), (48, 16, 10));
        assert_eq!(product.accumulate, !first_micro);
        assert_eq!(product.c.dtype, DType::F32);
        let Command::Launch { arguments, .. } = &commands[2] else {
            panic!("{commands:?}");
        };
        assert_eq!(arguments[5], Argument::U32(u32::from(!first_micro)));
    }
}

/// All rows are in one part, no part's sums lie outside the workspace, and the sums start over in
/// the first micro batch only.
#[test]
fn a_small_matrix_of_many_rows_is_summed_in_parts() {
    for (batch, width, outputs) in [(9, 64, 256), (4, 16, 32), (5, 24, 72), (4, 64, 1024)] {
        let mut g = Graph::new(DType::F16);
        let tokens = g.batch("tokens", [batch, 513], DType::I32);
        let table = g.weight("table", [VOCABULARY, width], INIT);
        let x = g.embedding("embedding", tokens, table, None, None).unwrap();
        let weight = g.weight("weight", [outputs, width], INIT);
        let bias = g.small_weight("bias", [outputs], Init::Zeros);
        let y = g.linear("linear", x, weight, Some(bias)).unwrap();
        let head = g.weight("head", [VOCABULARY, outputs], INIT);
        let targets = g.batch("targets", [batch, 513], DType::I32);
        g.cross_entropy("loss", y, head, targets, 0.0, None)
            .unwrap();
        let graph = differentiate(g, &OPTIMIZER).unwrap();
        let arena = plan(&graph).arena_bytes;
        for first_micro in [true, false] {
            let commands = commands_of(&graph, "d.linear.weight", first_micro);
            assert_eq!(functions(&commands), ["gradient_parts", "gradient_sum"]);
            let [parts, sum] = [0, 1].map(|index| match &commands[index] {
                Command::Launch {
                    kernel,
                    shape,
                    arguments,
                } => {
                    check_launch(*kernel, arguments, arena);
                    (shape.grid, arguments.clone())
                }
                other => panic!("{other:?}"),
            });
            let number = |argument: &Argument| match argument {
                Argument::U32(number) => *number as usize,
                other => panic!("{other:?}"),
            };
            let rows = number(&parts.1[5]);
            assert_eq!(rows, batch * 513);
            let (of_part, count) = (number(&parts.1[6]), parts.0[2] as usize);
            assert!(of_part.is_multiple_of(32));
            assert!((count - 1) * of_part < rows && rows <= count * of_part);
            assert_eq!(number(&sum.1[3]), count);
            let node = graph.nodes.iter().position(|n| n.name == "d.linear.weight");
            let workspace = plan(&graph).workspace(node.unwrap()).unwrap().bytes;
            let sums = number(&sum.1[5]);
            assert_eq!(sums, outputs * width + outputs);
            assert!((count * sums * 4) as u64 <= workspace);
            let adds = Argument::U32(u32::from(!first_micro));
            assert_eq!(sum.1[7..9], [adds, adds]);
        }
    }
}

/// The table is the head's weight too: the loss writes its gradient first, chunk after chunk,
/// and the embedding adds to that.
#[test]
fn a_tied_table_is_written_by_the_loss_and_added_to_by_the_embedding() {
    let graph = step(DType::Bf16, 16);
    let loss = products(&commands_of(&graph, "loss", true));
    let rows: Vec<usize> = loss.iter().step_by(3).map(|p| p.m).collect();
    assert_eq!(rows, [4, 4, 2]);
    let adds: Vec<bool> = loss
        .iter()
        .skip(1)
        .step_by(3)
        .map(|p| p.accumulate)
        .collect();
    assert_eq!(adds, [false, true, true]);
    assert!(loss.iter().step_by(3).all(|p| p.c.row_stride == 128));
    // Only positions that no sequence reaches are cleared: 2 of 7, and the counts.
    let commands = commands_of(&graph, "d.embedding.table", true);
    let cleared: Vec<u64> = commands
        .iter()
        .filter_map(|command| match command {
            Command::Clear { bytes, .. } => Some(*bytes),
            _ => None,
        })
        .collect();
    assert_eq!(cleared, [4 * (VOCABULARY as u64 + 1), 2 * 16 * 4]);
}

#[test]
fn gradients_that_follow_each_other_are_one_launch() {
    let graph = step(DType::Bf16, 9);
    let commands = commands_of(&graph, "gradient_norm", true);
    assert_eq!(functions(&commands), ["gradient_squares", "gradient_norm"]);
    let Command::Launch { arguments, .. } = &commands[0] else {
        panic!("{commands:?}");
    };
    let plan = plan(&graph);
    let gradients: Vec<_> = graph
        .parameters
        .iter()
        .filter_map(|p| plan.placement(p.gradient?))
        .collect();
    let start = gradients.iter().map(|place| place.offset).min().unwrap();
    let end = gradients.iter().map(|place| place.end()).max().unwrap();
    assert_eq!(arguments[0], Argument::Address(start));
    assert_eq!(arguments[2], Argument::U64((end - start) / 4));
}

#[test]
fn a_norm_that_is_not_trained_has_no_sums() {
    let commands = commands_of(&step(DType::Bf16, 16), "d.last.input", true);
    assert_eq!(functions(&commands)[0], "norm_backward_sums");
    let mut graph = forward(DType::Bf16, 16);
    for index in 0..graph.parameters.len() {
        if graph
            .tensor(graph.parameters[index].master)
            .name
            .starts_with("last.")
        {
            graph.parameters[index].storage = Storage::Frozen;
        }
    }
    let graph = trained(graph);
    let commands = commands_of(&graph, "d.last.input", true);
    assert_eq!(functions(&commands), ["norm_backward"]);
    let [
        Command::Launch {
            kernel, arguments, ..
        },
    ] = &commands[..]
    else {
        panic!("{commands:?}");
    };
    check_launch(*kernel, arguments, plan(&graph).arena_bytes);
}

/// Large rows on a large card: the widths of GPT-2 fill blocks of about 512 threads.
#[test]
fn rows_of_a_norm_share_blocks() {
    for (dtype, width, expected) in [
        (DType::Bf16, 16, ("norm_forward", [32, 8, 1])),
        (DType::Bf16, 384, ("norm_forward_warp_3", [32, 8, 1])),
        (DType::Bf16, 768, ("norm_forward", [96, 5, 1])),
        (DType::F32, 768, ("norm_forward", [192, 2, 1])),
        (DType::Bf16, 8192, ("norm_forward", [1024, 1, 1])),
        (DType::Bf16, 8200, ("norm_forward_any", [256, 1, 1])),
        (DType::Bf16, 100, ("norm_forward_any", [256, 1, 1])),
    ] {
        let graph = step(dtype, width);
        let commands = commands_of(&graph, "last", true);
        let [Command::Launch { kernel, shape, .. }] = &commands[..] else {
            panic!("{commands:?}");
        };
        assert_eq!((kernel.function, shape.block), expected);
    }
}
