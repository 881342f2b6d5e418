//! The launches of all ops that continue from a cache.

use cinch_graph::op::{
    Attention, AttentionInputs, CachedAttention, CachedScan, CachedSelection, Indexer, KeyCount,
    Scan,
};
use cinch_graph::{DType, Graph, Init, Target, TensorType};
use cinch_plan::{Options, Plan};

use crate::cuda::command::{Argument, Command, Kernel, LaunchShape};
use crate::cuda::lowering::Card;
use crate::cuda::op::lower_all;
use crate::engine::MicroBatch;

const ATTENTION: &str = include_str!("../../kernels/cached_attention.cu");
const SCAN: &str = include_str!("../../kernels/cached_scan.cu");
const SELECTION: &str = include_str!("../../kernels/cached_selection.cu");
const CONVOLUTION: &str = include_str!("../../kernels/cached_convolution.cu");

type Launch = (Kernel, LaunchShape, Vec<Argument>);

fn launches(graph: &Graph) -> Vec<Launch> {
    let plan = Plan::new(graph, Options::new(Target::Cuda));
    let lowered = lower_all(
        graph,
        &plan,
        0..graph.nodes.len(),
        MicroBatch::of_one(true),
        Card::ANY,
    );
    let commands = lowered.into_iter().flat_map(|lowered| lowered.commands);
    commands
        .filter_map(|command| match command {
            Command::Launch {
                kernel,
                shape,
                arguments,
            } => Some((kernel, shape, arguments)),
            _ => None,
        })
        .collect()
}

fn attention(batch: usize, seq: usize, slots: usize, head_dim: usize) -> Graph {
    let op = CachedAttention {
        attention: Attention {
            inputs: AttentionInputs::Packed,
            heads: 6,
            kv_heads: 2,
            head_dim,
            causal: true,
            scale: 0.125,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        },
        slots,
    };
    let mut graph = Graph::new(DType::Bf16);
    let qkv = graph.batch("qkv", [batch, seq, 10 * head_dim], DType::Bf16);
    let positions = graph.batch("positions", [batch, seq], DType::I32);
    let o = graph
        .attend_cached("attention", op, &[qkv], positions)
        .unwrap();
    graph.result = Some(o);
    graph
}

/// A selection and the attention to it.
fn selected(count: KeyCount) -> Graph {
    let (batch, seq, slots) = (2, 3, 100);
    let mut graph = Graph::new(DType::Bf16);
    let mut input = |name: &str, width: usize| graph.batch(name, [batch, seq, width], DType::Bf16);
    let [queries, keys, weights] = [("q", 48), ("k", 16), ("c", 3)].map(|(n, w)| input(n, w));
    let qkv = input("qkv", 4 * 32);
    let biases = ["b_w", "b"].map(|name| graph.batch(name, [3], DType::F32));
    let positions = graph.batch("positions", [batch, seq], DType::I32);
    let sources = [queries, keys, weights, biases[0], biases[1]];
    let op = CachedSelection {
        indexer: Indexer {
            heads: 3,
            width: 16,
        },
        count,
        slots,
    };
    let selection = graph
        .select_cached("selection", op, sources, positions)
        .unwrap();
    let op = CachedAttention {
        attention: Attention {
            inputs: AttentionInputs::Packed,
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            causal: true,
            scale: 0.125,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        },
        slots,
    };
    let o = graph
        .attend_cached_selected("attention", op, &[qkv], selection, positions)
        .unwrap();
    graph.result = Some(o);
    graph
}

const ADAPTIVE: KeyCount = KeyCount::Adaptive {
    base: 40,
    least: 8,
    most: 50,
    temperature: 1.0,
};

#[test]
fn a_selection_counts_keys_only_where_their_number_varies() {
    let names = |count| -> Vec<_> {
        let launches = launches(&selected(count)).into_iter();
        let own = launches.filter(|launch| launch.0.file == "cached_selection");
        own.map(|launch| launch.0.function).collect()
    };
    let all = [
        "cached_selection_append",
        "cached_selection_scores",
        "cached_selection_rows",
        "cached_selection_counts",
        "cached_selection_select",
    ];
    assert_eq!(names(ADAPTIVE), all);
    assert_eq!(names(KeyCount::Fixed(9)), [all[0], all[1], all[4]]);
    let graph = selected(ADAPTIVE);
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let workspace = plan.workspace(0).unwrap();
    let launched = launches(&graph);
    let counts = launched[3].2[3];
    let inside = workspace.offset..workspace.end();
    assert!(matches!(counts, Argument::Address(at) if inside.contains(&at)));
    assert_eq!(launched[4].2[2], counts);
    assert_eq!(
        launches(&selected(KeyCount::Fixed(9)))[2].2[2],
        Argument::Null
    );
    // The attention reads the bits that were written.
    let attending = launched
        .iter()
        .find(|l| l.0.function == "cached_attention_1");
    assert_eq!(attending.unwrap().2.last(), launched[4].2.get(3));
}

fn scan_and_convolution() -> Graph {
    let (batch, seq, inner, state, rank) = (2, 3, 20, 5, 4);
    let mut graph = Graph::new(DType::Bf16);
    let wide = |width: usize| TensorType::new([batch, seq, width], DType::Bf16);
    let mut input =
        |name: &str, width| graph.add_tensor(name, wide(width), cinch_graph::Role::Batch);
    let (zu, p, dt) = (
        input("zu", 2 * inner),
        input("p", rank + 2 * state),
        input("dt", inner),
    );
    let positions = graph.batch("positions", [batch, seq], DType::I32);
    let weight = graph.small_weight("weight", [inner, 4], Init::Zeros);
    let bias = graph.small_weight("bias", [inner], Init::Zeros);
    let u = graph
        .convolution_cached("conv", zu, inner, (weight, bias), positions)
        .unwrap();
    let inputs = cinch_graph::op::ScanInputs {
        x: u,
        x_column: 0,
        z: zu,
        z_column: 0,
        p,
        dt,
        a_log: graph.small_weight("A_log", [inner, state], Init::LogRange),
        d: graph.small_weight("D", [inner], Init::Ones),
    };
    let y = graph
        .scan_cached("scan", inputs, rank, 16, positions)
        .unwrap();
    graph.result = Some(y);
    graph
}

/// The types of a kernel's parameters, from its source.
fn parameters(kernel: Kernel) -> Vec<String> {
    let source = match kernel.file {
        "cached_attention" => ATTENTION,
        "cached_scan" => SCAN,
        "cached_selection" => SELECTION,
        _ => CONVOLUTION,
    };
    let source = source.replace('\\', " ");
    let name = match kernel.function.rsplit_once('_') {
        Some((stem, width)) if width.parse::<u32>().is_ok() => format!(" {stem}_##E("),
        _ => format!(" {}(", kernel.function),
    };
    let (_, rest) = source.split_once(&name).unwrap();
    let (list, _) = rest.split_once(')').unwrap();
    list.split(',')
        .map(|parameter| match parameter.contains('*') {
            true => "pointer".to_owned(),
            false => parameter.trim().split(' ').next().unwrap().to_owned(),
        })
        .collect()
}

#[test]
fn arguments_are_the_kernels_parameters() {
    let graphs = [
        attention(1, 1, 4096, 128),
        attention(2, 9, 16, 20),
        scan_and_convolution(),
        selected(ADAPTIVE),
        selected(KeyCount::Fixed(9)),
    ];
    for (kernel, _, arguments) in graphs.iter().flat_map(launches) {
        let given: Vec<_> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Address(_) | Argument::Host(_) | Argument::Null => "pointer",
                Argument::I32(_) => "int",
                Argument::U32(_) | Argument::Stream(_) => "u32",
                Argument::U64(_) => "u64",
                Argument::F32(_) => "float",
                Argument::TensorMap(_) | Argument::MatrixMap(_) => "map",
            })
            .collect();
        assert_eq!(parameters(kernel), given, "{}", kernel.function);
    }
}

#[test]
fn a_single_query_has_several_blocks_and_a_chunk_one_each() {
    let names = |launches: &[Launch]| -> Vec<_> { launches.iter().map(|l| l.0.function).collect() };
    let single = launches(&attention(1, 1, 4096, 128));
    let expected = [
        "cached_attention_append",
        "cached_attention_4",
        "cached_attention_combine",
    ];
    assert_eq!(names(&single), expected);
    // 4096 keys are worth 64 blocks.
    assert_eq!(single[1].1.grid, [6, 64, 1]);
    let chunk = launches(&attention(1, 256, 4096, 128));
    assert_eq!(names(&chunk), expected[..2]);
    assert_eq!(chunk[1].1.grid, [6 * 256, 1, 1]);
    assert_eq!(chunk[1].2[5], Argument::Null);
}

#[test]
fn the_workspace_holds_what_the_blocks_leave() {
    let graph = attention(1, 1, 4096, 128);
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let workspace = plan.workspace(0).unwrap();
    assert!(workspace.bytes >= 6 * 64 * 130 * 4);
    let launched = launches(&graph);
    assert_eq!(launched[1].2[5], Argument::Address(workspace.offset));
    assert_eq!(launched[2].2[0], Argument::Address(workspace.offset));
}

#[test]
fn sizes_in_kernels_are_those_of_the_declarations() {
    let says = |source: &str, name: &str, value: usize| {
        assert!(
            source.contains(&format!("constexpr int {name} = {value};")),
            "{name}"
        );
    };
    says(ATTENTION, "WARPS", CachedAttention::CUDA_WARPS);
    says(SCAN, "LANES", CachedScan::CUDA_LANES);
    says(SCAN, "CHANNELS", CachedScan::CUDA_CHANNELS);
    says(SCAN, "STATES", Scan::MAX_STATE / CachedScan::CUDA_LANES);
    says(CONVOLUTION, "MOST", cinch_graph::op::Convolution::MAX_WIDTH);
    assert!(ATTENTION.contains(&format!(
        "CACHED_ATTENTION_KERNEL({})",
        CachedAttention::MOST_COLUMNS / 32
    )));
}
