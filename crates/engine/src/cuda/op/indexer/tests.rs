use cinch_graph::op::{Attention, AttentionInputs};
use cinch_graph::{Graph, Target, TensorId};
use cinch_plan::{Options, Plan};

use super::*;
use crate::cuda::command::Command;
use crate::cuda::lowering::Card;

const SOURCE: &str = include_str!("../../kernels/indexer.cu");

const INDEXER: Indexer = Indexer {
    heads: 3,
    width: 16,
};

/// Selection, loss and its backward over [batch, length], lowered node by node.
fn lower(
    dtype: DType,
    batch: usize,
    length: usize,
    count: Option<KeyCount>,
) -> (Graph, Plan, [Vec<Command>; 3]) {
    let mut graph = Graph::new(dtype);
    let sums = dtype.accumulator();
    let mut input = |name: &str, width: usize| graph.batch(name, [batch, length, width], dtype);
    let (queries, keys, weights) = (input("q", 48), input("k", 16), input("c", 3));
    let (q, k) = (input("queries", 128), input("keys", 64));
    let biases = ["b_w", "b"].map(|name| graph.batch(name, [3], sums));
    let own = [queries, keys, weights, biases[0], biases[1]];
    let (indexer_lse, selection) = graph.select_keys("select", INDEXER, own, count).unwrap();
    let lse = graph.batch("lse", [batch, 2, length], sums);
    let term = graph.indexer_term("indexer", batch * length, 1.0);
    let op = IndexerLoss {
        indexer: INDEXER,
        attention: Attention {
            inputs: AttentionInputs::Separate,
            heads: 2,
            kv_heads: 1,
            head_dim: 64,
            causal: true,
            scale: 0.125,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        },
    };
    let of = (&[q, k][..], lse, selection);
    graph
        .indexer_loss("loss", &term, op, own, indexer_lse, of)
        .unwrap();
    let Some(cinch_graph::op::Op::IndexerLoss(forward)) =
        graph.nodes.last().map(|node| node.op.clone())
    else {
        panic!("the loss is the last node")
    };
    let inputs: Vec<TensorId> = graph.nodes[1].inputs.clone();
    let backward = IndexerLossBackward {
        forward: forward.clone(),
        scaled: false,
    };
    graph.emit("backward", backward.clone(), inputs).unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let selection = IndexerSelection {
        indexer: INDEXER,
        count,
    };
    let node = |index: usize, lower: &dyn Fn(&mut Lowering<'_>)| {
        let mut x = Lowering::new(&graph, &plan, index, true, Card::ANY);
        lower(&mut x);
        x.finish()
    };
    let commands = [
        node(0, &|x| indexer_selection(x, &selection)),
        node(1, &|x| indexer_loss(x, &forward)),
        node(2, &|x| indexer_loss_backward(x, &backward)),
    ];
    (graph, plan, commands)
}

const ADAPTIVE: Option<KeyCount> = Some(KeyCount::Adaptive {
    base: 40,
    least: 8,
    most: 50,
    temperature: 1.0,
});

/// The types of a kernel's parameters, as its source has them.
fn parameters(function: &str) -> Vec<&'static str> {
    let source = SOURCE.replace('\\', " ");
    let shared = |name: &str| {
        let (_, rest) = source.split_once(&format!("#define {name} ")).unwrap();
        rest.split('#').next().unwrap().to_owned()
    };
    let (_, rest) = source.split_once(&format!(" {function}(")).unwrap();
    let (list, _) = rest.split_once(')').unwrap();
    let list = list
        .replace("INDEXER,", &format!("{},", shared("INDEXER")))
        .replace("ATTENTION,", &format!("{},", shared("ATTENTION")));
    // The shared parameters are declared together: `const real *a, const real *b`.
    let kind = |parameter: &str| match parameter.trim().trim_start_matches("const ") {
        text if text.contains('*') => "pointer",
        text if text.starts_with("u32") => "u32",
        text if text.starts_with("u64") => "u64",
        text if text.starts_with("float") => "float",
        _ => "int",
    };
    list.split(',').map(kind).collect()
}

#[test]
fn arguments_are_the_kernels_parameters() {
    for count in [None, Some(KeyCount::Fixed(9)), ADAPTIVE] {
        let (_, _, commands) = lower(DType::Bf16, 2, 100, count);
        let mut launched = 0;
        for command in commands.iter().flatten() {
            let Command::Launch {
                kernel, arguments, ..
            } = command
            else {
                continue;
            };
            if kernel.file != "indexer" {
                continue;
            }
            let given: Vec<_> = arguments
                .iter()
                .map(|argument| match argument {
                    Argument::I32(_) => "int",
                    Argument::U32(_) | Argument::Stream(_) => "u32",
                    Argument::U64(_) => "u64",
                    Argument::F32(_) => "float",
                    _ => "pointer",
                })
                .collect();
            assert_eq!(parameters(kernel.function), given, "{}", kernel.function);
            launched += 1;
        }
        assert!(launched >= 6, "{launched}");
    }
}

/// Where all scores have room they are computed once; where they have not, once more for the
/// variances.
#[test]
fn scores_are_computed_as_often_as_they_must_be() {
    let count = |batch, length, count| {
        let (_, _, [selection, ..]) = lower(DType::Bf16, batch, length, count);
        let scores = selection.iter().filter(|command| {
            matches!(command, Command::Launch { kernel, .. } if kernel.function == "indexer_scores")
        });
        scores.count()
    };
    assert_eq!(count(2, 1000, ADAPTIVE), 1);
    assert_eq!(count(2, 1000, Some(KeyCount::Fixed(9))), 1);
    // 16 MiB are eight rows of tiles of 8,192 columns: sixteen parts, twice.
    assert_eq!(count(1, 8192, ADAPTIVE), 32);
    assert_eq!(count(1, 8192, None), 16);
}

/// The products of a backward in parts go from the last rows to the first, whose keys all of the
/// later ones see.
#[test]
fn gradients_of_keys_are_written_before_they_are_added_to() {
    for (dtype, length, parts) in [(DType::Bf16, 512, 1), (DType::Bf16, 4096, 4)] {
        let (graph, plan, [.., backward]) = lower(dtype, 1, length, ADAPTIVE);
        let products: Vec<&Product> = backward
            .iter()
            .filter_map(|command| match command {
                Command::Product(product) => Some(product),
                _ => None,
            })
            .collect();
        let of_keys: Vec<_> = products.iter().filter(|p| p.a.transposed).collect();
        assert!(of_keys.len() >= parts, "{}", of_keys.len());
        assert_eq!((of_keys[0].m, of_keys[0].accumulate), (length, false));
        for pair in of_keys.windows(2) {
            assert!(pair[1].m < pair[0].m && pair[1].accumulate);
        }
        let workspace = plan.workspace(2).unwrap();
        let end = products
            .iter()
            .map(|p| p.workspace + p.workspace_bytes)
            .max();
        assert!(end.unwrap() <= workspace.offset + workspace.bytes);
        let inside = |address: u64| (workspace.offset..workspace.end()).contains(&address);
        assert!(of_keys.iter().all(|p| inside(p.a.address)));
        let dk = plan.placement(graph.nodes[2].outputs[1]).unwrap().offset;
        let apart = of_keys.len() > 1;
        assert_eq!(of_keys[0].c.address == dk, !apart);
        assert_eq!(of_keys[0].c.dtype == DType::F32, apart);
    }
}
