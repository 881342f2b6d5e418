//! Every op on the GPU against the CPU: each node of real training graphs gets the CPU's inputs,
//! rounded to its element types, and must give what the CPU gives for those. Tests that need the
//! GPU are ignored by default: `-- --include-ignored` runs them.
#![expect(clippy::print_stderr, reason = "a failed test says where")]

mod attention;
#[path = "../card/mod.rs"]
mod card;
mod device;
mod dropped;
mod embed;
mod emulated;
#[path = "../gradients/graphs.rs"]
mod graphs;
mod joined;
mod node;
mod norms;
#[path = "../gradients/numbers.rs"]
mod numbers;
mod real;
#[path = "../gradients/shared.rs"]
mod shared;

use std::collections::BTreeSet;

use cinch_architecture::{
    Activation, Architecture, Decoder, Gpt2, Gsa, Mamba, Mistral, Mu, Qwen3, RotaryPositions,
    RotaryScaling, Windows,
};
use cinch_engine::cuda::lowering::Card;
use cinch_graph::op::{ActivationKind, Indexer, KeyCount, Op};
use cinch_graph::{DType, Graph, Init};
use cinch_model::{Build, Purpose, build};

use card::card;
use graphs::Transformer;
use node::{Report, compare, compare_as, compare_emulated, granted, training};

/// The precisions, each with the largest relative error of an output: norm of the difference over
/// norm of the expected values. It covers the rounding of the output itself (up to 2⁻⁸ in bf16,
/// 2⁻¹¹ in fp16) and of what a kernel hands to the matrix units in between. An output that its inputs'
/// rounding moves by more is given that much: see [`node::Report`].
const PRECISIONS: [(DType, f64); 3] = [
    (DType::F32, 2e-5),
    (DType::Bf16, 1.5e-2),
    (DType::F16, 3e-3),
];

/// Compares a graph on both executors in every precision.
fn check(what: &str, make: impl Fn(DType) -> Graph) {
    check_by(what, make, compare);
}

/// The same without timing: of several ways the second is taken.
fn check_second_way(what: &str, make: impl Fn(DType) -> Graph) {
    check_by(what, make, |what, reference, tested| {
        compare_as(what, reference, tested, true)
    });
}

fn check_by(
    what: &str,
    make: impl Fn(DType) -> Graph,
    compare: impl Fn(&str, Graph, Graph) -> Vec<Report>,
) {
    let _card = card();
    assert_within(|dtype| compare(what, make(DType::F32), make(dtype)));
}

/// The same with the host in place of both kinds of cards, by every way that there is to something.
/// Where there is no NVRTC this says so.
fn check_emulated(what: &str, make: impl Fn(DType) -> Graph) {
    if !emulated::is_possible() {
        eprintln!("skipped: no NVRTC");
        return;
    }
    for card in [Card::HOPPER, Card::ANY] {
        assert_within(|dtype| compare_emulated(what, card, &make, dtype));
    }
}

fn assert_within(reports: impl Fn(DType) -> Vec<Report>) {
    let mut failures = Vec::new();
    for (dtype, tolerance) in PRECISIONS {
        let outside = reports(dtype).into_iter();
        failures.extend(outside.filter(|report| !report.is_within(tolerance)));
    }
    for failure in &failures {
        eprintln!("{failure}");
    }
    assert!(failures.is_empty(), "{} outputs differ", failures.len());
}

/// Two tests for each graph, so that they can be chosen by name: on a card, and in a module of its own
/// with the host in its place, which may be left out where it takes long.
macro_rules! on_both {
    ($emulated:ident: $($(#[$long:meta])? $test:ident: $make:expr;)*) => {
        $(
            #[test]
            #[ignore = "needs a GPU"]
            fn $test() {
                crate::check(stringify!($test), $make);
            }
        )*

        mod $emulated {
            use super::*;

            $(
                #[test]
                $(#[$long])?
                fn $test() {
                    crate::check_emulated(stringify!($test), $make);
                }
            )*
        }
    };
}
pub(crate) use on_both;

macro_rules! graphs {
    ($($test:ident: $what:literal,)*) => {
        const TESTED: &[&str] = &[$($what),*];

        on_both! {
            emulated_graphs: $($test: {
                let graph = graphs::ALL.into_iter().find(|(what, _)| *what == $what);
                graph.expect("a graph of this name").1
            };)*
        }
    };
}

graphs! {
    mamba: "mamba",
    mamba_with_convolution: "mamba with convolution",
    gpt2: "gpt2",
    rms_norms: "rms norms",
    layer_norms: "layer norms",
    grouped_heads: "grouped heads",
    many_consumers: "many consumers",
    decoder: "decoder",
    padded_encoder: "padded encoder",
    adapters: "adapters",
    adapters_without_dropout: "adapters without dropout",
    packed_decoder: "packed decoder",
    column_blocks: "column blocks",
    scans_of_wide_tensors: "scans of wide tensors",
    expressions: "expressions",
    functions: "functions",
    reductions: "reductions",
    entropies: "entropies",
}

#[test]
fn every_graph_has_its_test() {
    let graphs = graphs::ALL.map(|(what, _)| what);
    assert_eq!(graphs.as_slice(), TESTED);
}

/// What backward nodes write again is among what is compared: of every op that can, and of norms of
/// both kinds and both kernels.
#[test]
fn values_that_are_written_again_are_compared() {
    let mut found = BTreeSet::new();
    for (_, make) in graphs::ALL {
        let graph = training(make(DType::Bf16));
        for node in &graph.nodes {
            let width = || graph.ty(node.inputs[0]).width();
            found.extend(match &node.op {
                Op::ActivationBackward(op) if op.value => Some("activation".to_owned()),
                Op::GatedBackward(op) if op.value => Some("gated".to_owned()),
                Op::NormBackward(op) if op.value => {
                    let vectors = width().is_multiple_of(8);
                    Some(format!("{:?} norm, vectors {vectors}", op.kind))
                }
                _ => None,
            });
        }
    }
    let expected = [
        "Layer norm, vectors false",
        "Layer norm, vectors true",
        "Rms norm, vectors false",
        "Rms norm, vectors true",
        "activation",
        "gated",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
}

/// The models with widths and lengths of real ones, odd ones, and one row.
macro_rules! models {
    ($($(#[$long:meta])? $test:ident: $config:expr, $batch:literal x $seq_len:literal;)*) => {
        on_both! {
            emulated_models: $($(#[$long])? $test: {
                let config: Architecture = $config.into();
                move |compute| model(&config, $batch, $seq_len, compute)
            };)*
        }
    };
}

models! {
    mamba_64_of_128_tokens: mamba_of(64, 16, 0, 64), 2 x 128;
    #[ignore = "takes minutes without a card"]
    mamba_72_of_777_tokens: mamba_of(72, 16, 4, 64), 1 x 777;
    mamba_33_of_37_tokens_with_3_states: mamba_of(33, 3, 0, 16), 3 x 37;
    mamba_64_of_one_token: mamba_of(64, 16, 0, 64), 1 x 1;
    #[ignore = "takes minutes without a card"]
    gpt2_head_64_of_256_tokens: gpt2_of(128, 2, 61), 2 x 256;
    #[ignore = "takes minutes without a card"]
    gpt2_head_64_of_777_tokens: gpt2_of(192, 3, 1001), 1 x 777;
    gpt2_head_32_of_100_tokens: gpt2_of(96, 3, 61), 3 x 100;
    #[ignore = "takes minutes without a card"]
    gpt2_head_128_of_200_tokens: gpt2_of(256, 2, 61), 2 x 200;
    gpt2_head_20_of_65_tokens: gpt2_of(60, 3, 61), 2 x 65;
    gpt2_head_64_of_one_token: gpt2_of(64, 1, 61), 1 x 1;
    #[ignore = "takes minutes without a card"]
    gpt2_of_60001_words: gpt2_of(64, 1, 60_001), 1 x 5;
    #[ignore = "takes minutes without a card"]
    mu_of_100_tokens: mu_of(true, false), 2 x 100;
    #[ignore = "takes minutes without a card"]
    mu_of_512_tokens_in_five_rows: mu_of(true, false), 5 x 512;
    #[ignore = "takes minutes without a card"]
    mu_of_450_tokens_seeing_all: mu_of(false, false), 1 x 450;
    mu_of_37_tokens_as_published: mu_of(false, true), 3 x 37;
}

/// An indexer with its selection and its fit: heads that tensor cores take and others, more rows
/// than a tile has, a fixed number of keys, and the warm-up, where attention is dense.
macro_rules! sparse {
    ($($(#[$long:meta])? $test:ident: $config:expr, $batch:literal x $seq_len:literal;)*) => {
        on_both! {
            emulated_sparse: $($(#[$long])? $test: {
                let config = Architecture::Gsa($config);
                move |compute| model(&config, $batch, $seq_len, compute)
            };)*
        }
    };
}

sparse! {
    #[ignore = "takes minutes without a card"]
    gsa_head_64_of_300_tokens: gsa_of(64, 64), 2 x 300;
    #[ignore = "takes minutes without a card"]
    gsa_head_32_of_130_tokens: Gsa { adaptive_keys: false, ..gsa_of(32, 16) }, 3 x 130;
    gsa_head_20_of_65_tokens: gsa_of(20, 5), 2 x 65;
    #[ignore = "takes minutes without a card"]
    gsa_head_128_of_200_tokens: gsa_of(128, 80), 1 x 200;
    gsa_head_64_of_one_token: gsa_of(64, 64), 1 x 1;
    #[ignore = "takes minutes without a card"]
    gsa_head_64_of_200_dense_tokens: Gsa { indexer_warmup: 1, ..gsa_of(64, 64) }, 2 x 200;
    #[ignore = "takes minutes without a card"]
    gsa_without_a_trained_indexer: Gsa { train_indexer: false, ..gsa_of(64, 32) }, 2 x 100;
    #[ignore = "takes minutes without a card"]
    gsa_of_2500_tokens: Gsa { width: 32, heads: 1, key_heads: 1, ..gsa_of(32, 16) }, 2 x 2500;
}

/// Queries of zeros: every key of a row has the same score, and there are more of them than a
/// block has threads. Those at lower positions are selected.
fn equal_scores(compute: DType) -> Graph {
    const INDEXER: Indexer = Indexer { heads: 3, width: 8 };
    let mut graph = Graph::new(compute);
    let tokens = graph.batch("tokens", [2, 300], DType::I32);
    let init = Init::Normal { std: 1.0 };
    let table = graph.weight("embedding.weight", [shared::VOCABULARY, 16], init);
    let x = graph
        .embedding("embedding", tokens, table, None, None)
        .unwrap();
    let mut project = |name: &str, outputs: usize| {
        let weight = graph.weight(&format!("{name}.weight"), [outputs, 16], init);
        graph.linear(name, x, weight, None).unwrap()
    };
    let [q, k, c] = [("q", 24), ("k", 8), ("c", 3)].map(|(name, width)| project(name, width));
    let zeros = graph
        .map("zeros", &[q], |v| v[0].min(0.0).max(0.0))
        .unwrap();
    let biases = ["b_w", "b"].map(|name| graph.small_weight(name, [3], Init::Zeros));
    let sources = [zeros, k, c, biases[0], biases[1]];
    let count = Some(KeyCount::Fixed(40));
    let (lse, _) = graph
        .select_keys("selection", INDEXER, sources, count)
        .unwrap();
    graph.result = Some(lse);
    graph
}

#[test]
#[ignore = "needs a GPU"]
fn of_equal_scores_the_first_are_selected() {
    check("equal scores", equal_scores);
}

/// What continues from a cache, over odd numbers of tokens and one. The rows of a batch begin at
/// different positions, one of them at 0.
macro_rules! continued {
    ($($(#[$long:meta])? $test:ident: $config:expr, $batch:literal x $seq_len:literal of $context:literal;)*) => {
        on_both! {
            emulated_continued: $($(#[$long])? $test: {
                let config = $config;
                move |compute| continuing(&config, $batch, $seq_len, $context, compute)
            };)*
        }
    };
}

continued! {
    mamba_continues_with_13_tokens: mamba_of(33, 5, 4, 16), 2 x 13 of 50;
    mamba_continues_with_2_tokens: mamba_of(64, 40, 16, 16), 3 x 2 of 50;
    gpt2_continues_with_13_tokens: gpt2_of(192, 3, 61), 2 x 13 of 777;
    gpt2_continues_with_2_tokens: gpt2_of(256, 2, 61), 3 x 2 of 777;
    gpt2_continues_with_heads_of_20: gpt2_of(60, 3, 61), 3 x 2 of 30;
    qwen3_continues_with_13_tokens: Qwen3(decoder_of(None, true)).into(), 2 x 13 of 64;
    mu_continues_with_13_tokens: mu_of(true, false), 2 x 13 of 64;
    gsa_continues_with_13_tokens: few_keys(gsa_of(64, 64)), 2 x 13 of 64;
    gsa_continues_with_2_tokens: few_keys(gsa_of(20, 5)), 3 x 2 of 30;
    #[ignore = "takes minutes without a card"]
    gsa_continues_with_200_tokens: Architecture::Gsa(gsa_of(32, 16)), 2 x 200 of 300;
    gsa_continues_with_a_fixed_number_of_keys: few_keys(Gsa {
        adaptive_keys: false,
        ..gsa_of(128, 80)
    }), 2 x 13 of 64;
    mistral_continues_in_a_window: Mistral(decoder_of(Some(5), false)).into(), 2 x 13 of 64;
}

/// Rotary positions, grouped heads, gates and padding, at the widths that tensor cores take and
/// others.
macro_rules! transformers {
    ($($(#[$long:meta])? $test:ident: $shape:expr;)*) => {
        on_both! {
            emulated_transformers: $($(#[$long])? $test: {
                let shape = $shape;
                move |compute| graphs::transformer(&shape, compute).unwrap()
            };)*
        }
    };
}

const PADDED: Transformer = Transformer {
    batch: 4,
    seq: 200,
    head_dim: 64,
    padding: true,
    ..graphs::DECODER
};

transformers! {
    #[ignore = "takes minutes without a card"]
    decoder_head_64_of_200_tokens_padded: PADDED;
    #[ignore = "takes minutes without a card"]
    decoder_head_64_of_777_tokens: Transformer {
        batch: 1,
        seq: 777,
        padding: false,
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    encoder_head_32_of_300_tokens_padded: Transformer {
        seq: 300,
        head_dim: 32,
        gate: ActivationKind::Gelu,
        batch: 4,
        ..graphs::ENCODER
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_128_of_260_tokens_padded: Transformer {
        batch: 2,
        seq: 260,
        heads: 2,
        kv_heads: 1,
        head_dim: 128,
        dropout: 0.1,
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_64_of_777_tokens_in_windows: Transformer {
        batch: 1,
        seq: 777,
        padding: false,
        window: Some(150),
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_64_of_400_tokens_packed: Transformer {
        seq: 400,
        documents: true,
        dropout: 0.1,
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_128_of_500_tokens_packed_in_windows: Transformer {
        batch: 2,
        seq: 500,
        heads: 6,
        head_dim: 128,
        padding: false,
        documents: true,
        window: Some(70),
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_32_of_333_tokens_packed_in_windows: Transformer {
        batch: 3,
        seq: 333,
        head_dim: 32,
        documents: true,
        window: Some(100),
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_20_of_130_tokens_packed_in_windows: Transformer {
        batch: 3,
        seq: 130,
        head_dim: 20,
        documents: true,
        window: Some(41),
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_8_of_600_tokens: Transformer {
        batch: 2,
        seq: 600,
        head_dim: 8,
        padding: false,
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    decoder_head_8_of_512_tokens_with_dropout: Transformer {
        batch: 2,
        seq: 512,
        head_dim: 8,
        padding: false,
        dropout: 0.1,
        ..PADDED
    };
    decoder_head_2_of_one_token: Transformer {
        batch: 2,
        seq: 1,
        head_dim: 2,
        padding: false,
        ..PADDED
    };
    decoder_head_4_of_130_tokens_with_dropout: Transformer {
        batch: 3,
        seq: 130,
        heads: 6,
        head_dim: 4,
        padding: false,
        dropout: 0.1,
        ..PADDED
    };
    #[ignore = "takes minutes without a card"]
    encoder_head_2_of_257_tokens: Transformer {
        batch: 3,
        seq: 257,
        head_dim: 2,
        padding: false,
        ..graphs::ENCODER
    };
    #[ignore = "takes minutes without a card"]
    encoder_head_32_of_512_tokens_padded: Transformer {
        seq: 512,
        heads: 3,
        kv_heads: 3,
        head_dim: 32,
        gate: ActivationKind::Gelu,
        batch: 4,
        dropout: 0.1,
        ..graphs::ENCODER
    };
    encoder_head_20_of_65_tokens_padded: Transformer {
        batch: 4,
        seq: 65,
        head_dim: 20,
        gate: ActivationKind::Relu,
        ..graphs::ENCODER
    };
}

/// What is granted beyond the tolerance is the exception, or the tolerances would mean nothing.
#[test]
fn hardly_any_output_needs_more_than_the_tolerance() {
    let models = [
        (mamba_of(64, 16, 0, 64), 1, 1),
        (gpt2_of(64, 1, 61), 1, 1),
        (mu_of(true, false), 2, 37),
    ];
    for (dtype, tolerance) in PRECISIONS {
        // An entropy is a small difference of large logarithms: most of its outputs need more.
        let all = graphs::ALL.iter().filter(|(name, _)| *name != "entropies");
        let all = all.map(|(_, make)| (make(DType::F32), make(dtype)));
        let of_models = models.iter().map(|(config, batch, tokens)| {
            let graph = |compute| model(config, *batch, *tokens, compute);
            (graph(DType::F32), graph(dtype))
        });
        let cached = [
            mamba_of(33, 5, 4, 16),
            Mistral(decoder_of(Some(5), false)).into(),
        ];
        let cached = cached.iter().map(|config| {
            let graph = |compute| continuing(config, 2, 13, 64, compute);
            (graph(DType::F32), graph(dtype))
        });
        for (reference, tested) in all.chain(of_models).chain(cached) {
            let outputs = granted(reference, tested);
            let num_outputs = outputs.len();
            let more: Vec<_> = outputs
                .into_iter()
                .filter(|(_, granted)| *granted > tolerance)
                .collect();
            assert!(more.len() * 30 <= num_outputs, "{dtype}: {more:?}");
        }
    }
}

fn continuing(
    config: &Architecture,
    batch: usize,
    seq_len: usize,
    context: usize,
    compute: DType,
) -> Graph {
    let purpose = Purpose::Generate {
        context,
        longest_run: seq_len,
    };
    build(config, &Build::plain(batch, seq_len, compute, purpose)).unwrap()
}

/// A decoder that is small in all but the width of its heads.
fn decoder_of(window: Option<u64>, head_norms: bool) -> Decoder {
    Decoder {
        vocabulary: shared::VOCABULARY as u64,
        width: 40,
        inner: 24,
        layers: 1,
        heads: 6,
        key_heads: 2,
        head_width: 128,
        attention_bias: true,
        output_bias: false,
        feed_bias: false,
        head_norms,
        attention_dropout: 0.0,
        activation: Activation::Silu,
        tied: true,
        windows: Windows::Shared { window },
        rotary: RotaryPositions {
            base: 10_000.0,
            scaling: RotaryScaling::None,
        },
        norm_epsilon: 1e-6,
        initial_std: 0.02,
    }
}

fn mamba_of(d_model: usize, d_state: usize, d_conv: usize, chunk: usize) -> Architecture {
    Architecture::Mamba(Mamba {
        width: d_model as u64,
        layers: 2,
        states: d_state as u64,
        expansion: 2,
        convolution: d_conv as u64,
        dropout: 0.1,
        positions: 1024,
        vocabulary: shared::VOCABULARY as u64,
        scan_chunk: chunk as u64,
    })
}

/// Sparse from the first step on.
fn gsa_of(head_dim: u64, indexer_width: u64) -> Gsa {
    Gsa {
        vocabulary: shared::VOCABULARY as u64,
        width: 4 * head_dim,
        layers: 1,
        heads: 4,
        key_heads: 2,
        inner: 40,
        indexer_heads: 3,
        indexer_width,
        base_keys: 40,
        least_keys: 8,
        most_keys: 50,
        indexer_warmup: 0,
        ..Gsa::default()
    }
}

/// Selects among a handful of keys.
fn few_keys(config: Gsa) -> Architecture {
    Architecture::Gsa(Gsa {
        base_keys: 5,
        least_keys: 2,
        most_keys: 7,
        ..config
    })
}

fn mu_of(causal: bool, published_order: bool) -> Architecture {
    Architecture::Mu(Mu {
        vocabulary: 61,
        layers: 2,
        positions: 1024,
        causal,
        published_order,
        ..Mu::default()
    })
}

fn gpt2_of(d_model: usize, n_heads: usize, vocab_size: usize) -> Architecture {
    Architecture::Gpt2(Gpt2 {
        width: d_model as u64,
        layers: 1,
        heads: n_heads as u64,
        residual_dropout: 0.1,
        positions: 1024,
        vocabulary: vocab_size as u64,
        ..Gpt2::default()
    })
}

fn model(config: &Architecture, batch: usize, seq_len: usize, compute: DType) -> Graph {
    let purpose = Purpose::Train {
        label_smoothing: 0.1,
        loss_chunk: Some(100),
    };
    build(config, &Build::plain(batch, seq_len, compute, purpose)).unwrap()
}
