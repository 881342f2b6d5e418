//! Launches as the kernels expect them: arguments by number, grids that cover every step and
//! channel, workspaces of the declared size.

use cinch_graph::{DType, Graph, Target, TensorType};
use cinch_plan::{Options, Plan};

use super::*;
use crate::cuda::command::Command;
use crate::cuda::lowering::Card;
use crate::cuda::op::lower;

/// The commands of a graph of one op, and the bytes of its workspace.
pub fn lowered(op: impl Into<op::Op>, inputs: &[TensorType]) -> (Vec<Command>, u64) {
    let mut graph = Graph::new(inputs[0].dtype);
    let inputs = inputs
        .iter()
        .enumerate()
        .map(|(i, ty)| graph.batch(&format!("input{i}"), ty.shape, ty.dtype))
        .collect();
    graph.emit("node", op, inputs).expect("inputs that fit");
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let workspace = plan.workspace(0).map_or(0, |place| place.bytes);
    (
        lower(Lowering::new(&graph, &plan, 0, true, Card::ANY)),
        workspace,
    )
}

/// How many parameters the kernel has in the source; `family` is its name as the macro that
/// defines it writes it. The names of `groups` stand for several parameters each.
pub fn num_parameters(source: &str, family: &str, groups: &[(&str, usize)]) -> usize {
    let (_, rest) = source.split_once(&format!("{family}(")).expect(family);
    let (list, _) = rest.split_once(')').expect("the end of the list");
    let each = list.split(',').map(|parameter| {
        let name = parameter.trim_matches(|c: char| c.is_whitespace() || c == '\\');
        let group = groups.iter().find(|(group, _)| *group == name);
        group.map_or(1, |(_, size)| *size)
    });
    each.sum()
}

/// Launches by function name.
pub fn launches(commands: &[Command]) -> Vec<(&'static str, LaunchShape, &[Argument])> {
    commands
        .iter()
        .filter_map(|command| match command {
            Command::Launch {
                kernel,
                shape,
                arguments,
            } => Some((kernel.function, *shape, &arguments[..])),
            _ => None,
        })
        .collect()
}

const GROUPS: [(&str, usize); 2] = [("INPUTS", 6), ("SIZES", 9)];

fn check_arguments(commands: &[Command]) {
    let forward = include_str!("../../kernels/scan.cu");
    let backward = include_str!("../../kernels/scan_backward.cu");
    for (function, _, arguments) in launches(commands) {
        let source = match function.starts_with("scan_backward") {
            true => backward,
            false => forward,
        };
        let digits = function.trim_end_matches(|c: char| c.is_ascii_digit());
        let family = if digits == function {
            function.to_owned()
        } else {
            format!("{digits}##S")
        };
        let expected = num_parameters(source, &family, &GROUPS);
        assert_eq!(arguments.len(), expected, "{function}");
    }
}

fn example(inner: usize, state: usize, chunk: usize) -> op::Scan {
    op::Scan {
        inner,
        state,
        rank: 3,
        chunk,
        packed: true,
        x_column: 0,
        z_column: inner,
        keep_states: true,
    }
}

/// The types of the forward's inputs.
fn inputs(scan: &op::Scan, batch: usize, length: usize, width: usize) -> Vec<TensorType> {
    let wide = |width| TensorType::new([batch, length, width], DType::Bf16);
    vec![
        wide(width),
        wide(scan.rank + 2 * scan.state),
        wide(scan.inner),
        TensorType::new([scan.inner, scan.state], DType::F32),
        TensorType::new([scan.inner], DType::F32),
    ]
}

fn backward_inputs(scan: &op::Scan, batch: usize, length: usize, width: usize) -> Vec<TensorType> {
    let mut types = inputs(scan, batch, length, width);
    types.insert(0, types[2]);
    let chunks = length.div_ceil(scan.chunk);
    let states = [batch, chunks, scan.inner, scan.state];
    types.push(TensorType::new(states, DType::F32));
    types
}

#[test]
fn one_launch_forwards_where_there_are_channels_enough() {
    let scan = example(1024, 16, 64);
    let (commands, workspace) = lowered(scan.clone(), &inputs(&scan, 8, 1024, 2048));
    let [(function, shape, arguments)] = launches(&commands)[..] else {
        panic!("{commands:?}");
    };
    assert_eq!((function, workspace), ("scan_forward_2", 0));
    assert_eq!(shape.grid, [32, 1, 8]);
    // With a rank of 3, B and C are not in fours.
    assert_eq!(arguments.last(), Some(&Argument::U32(0)));
    check_arguments(&commands);

    let found = |batch: usize| -> Vec<_> {
        let types = backward_inputs(&scan, batch, 1024, 2048);
        let (commands, _) = lowered(op::ScanBackward(scan.clone()), &types);
        let launched = launches(&commands);
        launched
            .iter()
            .map(|(name, shape, _)| (*name, shape.grid))
            .collect()
    };
    assert_eq!(found(8)[0], ("scan_backward_2", [32, 1, 8]));
    // There is room for two segments.
    let segments = [
        ("scan_backward_local_2", [32, 1, 4]),
        ("scan_backward_2", [32, 2, 4]),
    ];
    assert_eq!(found(4)[..2], segments);
}

#[test]
fn segments_of_time_where_there_are_few_channels() {
    let scan = example(64, 20, 64);
    let types = backward_inputs(&scan, 1, 777, 130);
    let (commands, workspace) = lowered(op::ScanBackward(scan.clone()), &types);
    check_arguments(&commands);
    assert!(matches!(commands[0], Command::Clear { .. }));
    let found: Vec<_> = launches(&commands)
        .iter()
        .map(|(function, shape, _)| (*function, shape.grid))
        .collect();
    let sums = (777 * 43_u32).div_ceil(256) + (64 * 21_u32).div_ceil(256);
    let expected = [
        ("scan_backward_local_4", [2, 12, 1]),
        ("scan_backward_4", [2, 13, 1]),
        ("scan_backward_sums", [sums, 1, 1]),
    ];
    assert_eq!(found, expected);
    let parts = op::ScanBackward(scan.clone()).cuda_parts(&types[1]);
    assert_eq!(workspace, parts.iter().sum::<u64>());
    let (commands, _) = lowered(scan.clone(), &inputs(&scan, 1, 777, 130));
    assert_eq!(launches(&commands).len(), 2);
    check_arguments(&commands);
}

#[test]
fn columns_that_are_not_multiples_of_four_are_read_one_by_one() {
    let scan = op::Scan {
        x_column: 1,
        z_column: 40,
        ..example(32, 16, 5)
    };
    let (commands, _) = lowered(scan.clone(), &inputs(&scan, 2, 9, 72));
    for (_, _, arguments) in launches(&commands) {
        assert_eq!(arguments.last(), Some(&Argument::U32(0)));
    }
    let scan = op::Scan {
        rank: 4,
        x_column: 4,
        ..scan
    };
    let (commands, _) = lowered(scan.clone(), &inputs(&scan, 2, 9, 72));
    for (_, _, arguments) in launches(&commands) {
        assert_eq!(arguments.last(), Some(&Argument::U32(1)));
    }
}

/// What the kernels rely on.
#[test]
fn partitions_cover_time_in_whole_chunks() {
    for length in [1, 2, 15, 16, 17, 64, 100, 777, 1024, 5000] {
        for chunk in [1, 3, 7, 16, 50, 64, 1000, 100_000] {
            for (batch, inner, state) in [(1, 32, 4), (1, 100, 16), (3, 64, 33), (8, 1024, 16)] {
                let scan = example(inner, state, chunk);
                let x = TensorType::new([batch, length, 2 * inner], DType::Bf16);
                let cut = scan.cuda_partition(&x);
                let case = format!("{length} steps, chunk {chunk}, {batch}x{inner}: {cut:?}");
                assert!(cut.span.is_multiple_of(cut.chunk), "{case}");
                for (segment, segments) in [
                    (cut.segment, cut.segments),
                    (cut.backward_segment, cut.backward_segments),
                ] {
                    assert!(segment.is_multiple_of(cut.span), "{case}");
                    assert!(segments * segment >= length, "{case}");
                    assert!((segments - 1) * segment < length, "{case}");
                }
                assert!(8 * cut.states_per_lane >= state, "{case}");
                let tile = ScanPartition::tile(cut.states_per_lane);
                assert!(
                    (cut.boundaries + 1) * tile >= cut.span.min(length),
                    "{case}"
                );
                // Kept states are found by the chunk that the kernel is told.
                assert_eq!(length.div_ceil(cut.chunk), length.div_ceil(chunk), "{case}");
            }
        }
    }
}

/// A multiprocessor has 228 KiB, of which each block takes one for itself.
#[test]
fn shared_memory_leaves_room_for_as_many_blocks_as_registers_do() {
    let room = (228 / ScanPartition::BACKWARD_RESIDENT as u32 - 1) * 1024;
    for states_per_lane in [2, 4, 8] {
        for element_bytes in [2, 4] {
            assert!(backward_shared_bytes(states_per_lane, element_bytes) <= room);
        }
    }
}
