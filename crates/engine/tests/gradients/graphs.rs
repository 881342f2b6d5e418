//! The graphs that gradients are checked on: the two models, and what they leave out, built
//! by hand. Sizes are odd on purpose.

use cinch_architecture::{Architecture, Gpt2, Mamba};
use cinch_graph::op::{
    ActivationKind, Attention, AttentionEntropy, AttentionInputs, Head, NormKind, Quantisation,
    Rotary, ScanInputs,
};
use cinch_graph::{DType, Graph, GraphError, Init, TensorId};
use cinch_model::{Build, Purpose, build};

use crate::shared::VOCABULARY;

#[path = "expressions.rs"]
mod expressions;

const BATCH: usize = 2;
const SEQ: usize = 13;
const WEIGHT: Init = Init::Normal { std: 0.02 };
const RMS: (NormKind, f64) = (NormKind::Rms, 1e-5);
const LAYER: (NormKind, f64) = (NormKind::Layer, 1e-5);

/// A graph in either precision.
pub type Builder = fn(DType) -> Graph;

pub const ALL: [(&str, Builder); 18] = [
    ("mamba", |compute| model(&mamba(0), compute)),
    ("mamba with convolution", |compute| {
        model(&mamba(4), compute)
    }),
    ("gpt2", |compute| model(&gpt2(), compute)),
    ("rms norms", |compute| rms_norms(compute).unwrap()),
    ("layer norms", |compute| layer_norms(compute).unwrap()),
    ("grouped heads", |compute| grouped_heads(compute).unwrap()),
    ("many consumers", |compute| many_consumers(compute).unwrap()),
    ("decoder", |compute| transformer(&DECODER, compute).unwrap()),
    ("padded encoder", |compute| {
        transformer(&ENCODER, compute).unwrap()
    }),
    ("adapters", |compute| adapters(0.2, compute).unwrap()),
    ("adapters without dropout", |compute| {
        adapters(0.0, compute).unwrap()
    }),
    ("packed decoder", |compute| {
        transformer(&PACKED, compute).unwrap()
    }),
    ("column blocks", |compute| column_blocks(compute).unwrap()),
    ("scans of wide tensors", |compute| {
        wide_scans(compute).unwrap()
    }),
    ("expressions", |compute| {
        expressions::broadcasts(compute).unwrap()
    }),
    ("functions", |compute| {
        expressions::functions(compute).unwrap()
    }),
    ("reductions", |compute| {
        expressions::reductions(compute).unwrap()
    }),
    ("entropies", |compute| entropies(compute).unwrap()),
];

pub fn mamba(d_conv: usize) -> Architecture {
    Architecture::Mamba(Mamba {
        width: 11,
        layers: 2,
        states: 4,
        expansion: 2,
        convolution: d_conv as u64,
        dropout: 0.2,
        positions: (SEQ + 2) as u64,
        vocabulary: VOCABULARY as u64,
        scan_chunk: 5,
    })
}

pub fn gpt2() -> Architecture {
    Architecture::Gpt2(Gpt2 {
        width: 10,
        layers: 2,
        heads: 2,
        residual_dropout: 0.2,
        positions: (SEQ + 2) as u64,
        vocabulary: VOCABULARY as u64,
        ..Gpt2::default()
    })
}

pub fn model(config: &Architecture, compute: DType) -> Graph {
    let purpose = Purpose::Train {
        label_smoothing: 0.1,
        loss_chunk: Some(7),
    };
    with_purpose(config, compute, purpose)
}

pub fn with_purpose(config: &Architecture, compute: DType, purpose: Purpose) -> Graph {
    build(config, &Build::plain(BATCH, SEQ, compute, purpose)).unwrap()
}

fn start(g: &mut Graph, width: usize) -> Result<TensorId, GraphError> {
    start_of(g, [BATCH, SEQ], width)
}

fn start_of(g: &mut Graph, rows: [usize; 2], width: usize) -> Result<TensorId, GraphError> {
    let tokens = g.batch("tokens", rows, DType::I32);
    let table = g.weight("table", [VOCABULARY, width], WEIGHT);
    g.embedding("embedding", tokens, table, None, None)
}

/// The loss, with a head of its own.
fn finish(g: &mut Graph, h: TensorId) -> Result<(), GraphError> {
    let ty = g.ty(h);
    let head = g.weight("head", [VOCABULARY, ty.width()], WEIGHT);
    let targets = g.batch("targets", ty.shape.without_width(), DType::I32);
    g.cross_entropy("loss", h, head, targets, 0.1, None)?;
    Ok(())
}

fn linear(g: &mut Graph, name: &str, x: TensorId, outputs: usize) -> Result<TensorId, GraphError> {
    let inputs = g.ty(x).width();
    linear_columns(g, name, x, 0..inputs, outputs)
}

fn linear_columns(
    g: &mut Graph,
    name: &str,
    x: TensorId,
    columns: std::ops::Range<usize>,
    outputs: usize,
) -> Result<TensorId, GraphError> {
    let weight = g.weight(&format!("{name}.weight"), [outputs, columns.len()], WEIGHT);
    let bias = g.small_weight(&format!("{name}.bias"), [outputs], Init::Zeros);
    g.linear_columns(name, x, columns.start, weight, Some(bias))
}

fn gamma(g: &mut Graph, name: &str, x: TensorId) -> TensorId {
    let width = g.ty(x).width();
    g.small_weight(&format!("{name}.gamma"), [width], Init::Ones)
}

/// `x + dropout(branch)` and its RMS norm.
fn rms_sum(
    g: &mut Graph,
    name: &str,
    (x, branch): (TensorId, TensorId),
    dropout: f64,
) -> Result<(TensorId, TensorId), GraphError> {
    let gamma = gamma(g, name, x);
    let dropout = g.dropout(dropout);
    let out = g.residual_norm(name, (x, branch), dropout, RMS, gamma, None)?;
    Ok((out.stream, out.normed))
}

/// RMS norm alone and over a sum, with and without dropout, and three activations.
fn rms_norms(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let mut stream = start(&mut g, 9)?;
    let first = gamma(&mut g, "norm", stream);
    let mut normed = g.norm("norm", stream, RMS, first, None)?;
    let layers = [
        ("gelu", ActivationKind::Gelu, 0.0),
        ("silu", ActivationKind::Silu, 0.2),
        ("relu", ActivationKind::Relu, 0.0),
    ];
    for (name, kind, dropout) in layers {
        g.enter_block(name);
        let part = |part: &str| format!("{name}.{part}");
        let hidden = linear(&mut g, &part("up"), normed, 15)?;
        let active = g.activation(&part("activation"), hidden, kind)?;
        let branch = linear(&mut g, &part("down"), active, 9)?;
        (stream, normed) = rms_sum(&mut g, &part("norm"), (stream, branch), dropout)?;
        g.leave_block();
    }
    finish(&mut g, normed)?;
    Ok(g)
}

/// Layer norm over sums without dropout, of rows that are whole vectors and of others: what its
/// backward writes again is read by gradients of weights.
fn layer_norms(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let mut x = start(&mut g, 9)?;
    for (block, width) in [16, 9].into_iter().enumerate() {
        g.enter_block(format!("blocks.{block}"));
        let name = |part: &str| format!("blocks.{block}.{part}");
        let stream = linear(&mut g, &name("in"), x, width)?;
        let branch = linear(&mut g, &name("branch"), x, width)?;
        let scale = gamma(&mut g, &name("norm"), stream);
        let shift = g.small_weight(&name("norm.beta"), [width], Init::Zeros);
        let pair = (stream, branch);
        let out = g.residual_norm(&name("norm"), pair, None, LAYER, scale, Some(shift))?;
        let hidden = linear(&mut g, &name("up"), out.normed, 15)?;
        let active = g.activation(&name("active"), hidden, ActivationKind::GeluTanh)?;
        let branch = linear(&mut g, &name("down"), active, width)?;
        let scale = gamma(&mut g, &name("last"), stream);
        let shift = g.small_weight(&name("last.beta"), [width], Init::Zeros);
        let pair = (out.stream, branch);
        let out = g.residual_norm(&name("last"), pair, None, LAYER, scale, Some(shift))?;
        x = out.normed;
        g.leave_block();
    }
    let x = linear(&mut g, "out", x, 9)?;
    finish(&mut g, x)?;
    Ok(g)
}

/// Four query heads on two key heads in three tensors that look both ways, then three on one
/// in one tensor, causal and no further than five positions back.
fn grouped_heads(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let stream = start(&mut g, 12)?;
    g.enter_block("separate");
    let q = linear(&mut g, "q", stream, 12)?;
    // Without a bias: it would shift all scores of a row alike, and have no gradient.
    let k_weight = g.weight("k.weight", [6, 12], WEIGHT);
    let k = g.linear("k", stream, k_weight, None)?;
    let v = linear(&mut g, "v", stream, 6)?;
    let op = Attention {
        inputs: AttentionInputs::Separate,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        causal: false,
        scale: 0.7,
        dropout: g.dropout(0.2),
        padding: false,
        window: None,
        documents: false,
        selection: false,
    };
    let branch = g.attend("separate", op, &[q, k, v], None, None)?;
    let (stream, normed) = rms_sum(&mut g, "separate.norm", (stream, branch), 0.0)?;
    g.leave_block();
    g.enter_block("packed");
    let qkv = linear(&mut g, "qkv", normed, 20)?;
    let op = Attention {
        inputs: AttentionInputs::Packed,
        heads: 3,
        kv_heads: 1,
        head_dim: 4,
        causal: true,
        scale: 0.5,
        dropout: None,
        padding: false,
        window: Some(5),
        documents: false,
        selection: false,
    };
    let branch = g.attend("packed", op, &[qkv], None, None)?;
    let (_, normed) = rms_sum(&mut g, "packed.norm", (stream, branch), 0.2)?;
    g.leave_block();
    finish(&mut g, normed)?;
    Ok(g)
}

/// A transformer of the later kind: rotary positions, grouped heads, gated feed-forward layers.
#[derive(Clone, Copy)]
pub struct Transformer {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub causal: bool,
    /// Whether sequences have lengths of their own.
    pub padding: bool,
    pub window: Option<usize>,
    /// Whether several documents follow one another in a sequence.
    pub documents: bool,
    pub dropout: f64,
    pub gate: ActivationKind,
}

pub const DECODER: Transformer = Transformer {
    batch: BATCH,
    seq: SEQ,
    heads: 4,
    kv_heads: 2,
    head_dim: 6,
    causal: true,
    padding: false,
    window: None,
    documents: false,
    dropout: 0.0,
    gate: ActivationKind::Silu,
};

/// Packed documents, in windows that the longer ones exceed.
pub const PACKED: Transformer = Transformer {
    padding: true,
    window: Some(4),
    documents: true,
    dropout: 0.2,
    ..DECODER
};

pub const ENCODER: Transformer = Transformer {
    heads: 2,
    causal: false,
    padding: true,
    dropout: 0.2,
    gate: ActivationKind::GeluTanh,
    ..DECODER
};

pub fn transformer(shape: &Transformer, compute: DType) -> Result<Graph, GraphError> {
    const BASE: f64 = 100.0;
    let mut g = Graph::new(compute);
    let width = shape.heads * shape.head_dim;
    let kv_width = shape.kv_heads * shape.head_dim;
    let mut stream = start_of(&mut g, [shape.batch, shape.seq], width)?;
    let lengths = shape
        .padding
        .then(|| g.batch("lengths", [shape.batch], DType::I32));
    let starts = shape
        .documents
        .then(|| g.batch("starts", [shape.batch, shape.seq], DType::I32));
    let first = gamma(&mut g, "norm", stream);
    let mut normed = g.norm("norm", stream, RMS, first, None)?;
    for layer in ["first", "second"] {
        g.enter_block(layer);
        let part = |part: &str| format!("{layer}.{part}");
        let q = linear(&mut g, &part("q"), normed, width)?;
        let k = linear(&mut g, &part("k"), normed, kv_width)?;
        let v = linear(&mut g, &part("v"), normed, kv_width)?;
        let frequencies = Rotary::frequencies(BASE, shape.head_dim);
        let q = g.rotary(&part("q.rotary"), q, &frequencies, None)?;
        let k = g.rotary(&part("k.rotary"), k, &frequencies, None)?;
        let op = Attention {
            inputs: AttentionInputs::Separate,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            causal: shape.causal,
            scale: 1.0 / (shape.head_dim as f64).sqrt(),
            dropout: g.dropout(shape.dropout),
            padding: shape.padding,
            window: shape.window,
            documents: shape.documents,
            selection: false,
        };
        let attended = g.attend(&part("attention"), op, &[q, k, v], lengths, starts)?;
        let branch = linear(&mut g, &part("o"), attended, width)?;
        let name = part("attention.norm");
        (stream, normed) = rms_sum(&mut g, &name, (stream, branch), 0.0)?;
        let gate = linear(&mut g, &part("gate"), normed, 2 * width + 1)?;
        let up = linear(&mut g, &part("up"), normed, 2 * width + 1)?;
        let hidden = g.gated(&part("gated"), gate, up, shape.gate)?;
        let branch = linear(&mut g, &part("down"), hidden, width)?;
        (stream, normed) = rms_sum(&mut g, &part("norm"), (stream, branch), 0.0)?;
        g.leave_block();
    }
    finish(&mut g, normed)?;
    Ok(g)
}

/// Frozen and quantised weights under adapters: one that adds to columns of a packed projection,
/// two that share their first product, heads normed one by one, positions that are given.
pub fn adapters(dropout: f64, compute: DType) -> Result<Graph, GraphError> {
    const HEADS: usize = 3;
    const HEAD: usize = 4;
    const RANK: usize = 2;
    let width = HEADS * HEAD;
    let mut g = Graph::new(compute);
    let mut stream = start_of(&mut g, [BATCH, SEQ], width)?;
    let positions = g.batch("positions", [BATCH, SEQ], DType::I32);
    let frequencies = Rotary::frequencies(100.0, HEAD);
    let first = gamma(&mut g, "norm", stream);
    let mut normed = g.norm("norm", stream, RMS, first, None)?;
    for layer in ["first", "second"] {
        g.enter_block(layer);
        let part = |part: &str| format!("{layer}.{part}");
        let weight = g.frozen_weight(&part("qkv.weight"), [3 * width, width], WEIGHT);
        let bias = g.frozen_small_weight(&part("qkv.bias"), [3 * width], Init::Zeros);
        let mut qkv = g.linear(&part("qkv"), normed, weight, Some(bias))?;
        let down = g.weight(&part("down"), [2 * RANK, width], WEIGHT);
        let drop = g.dropout(dropout);
        let low = g.linear_of_dropped(&part("low"), normed, down, drop)?;
        for (index, column) in [0, 2 * width].into_iter().enumerate() {
            let up = g.weight(&part(&format!("up.{index}")), [width, RANK], WEIGHT);
            let name = part(&format!("adapted.{index}"));
            let from = (low, index * RANK);
            qkv = g.linear_add(&name, (qkv, column), from, up, 1.5)?;
        }
        let op = Rotary {
            frequencies: frequencies.clone(),
            columns: 2 * width,
            scale: 1.25,
            positions: true,
            inverse: false,
        };
        let qkv = g.emit(part("rotary"), op, vec![qkv, positions])?[0];
        let o = g.attention(&part("attention"), qkv, HEADS, true, None)?;
        let heads = g.view(&part("heads"), o, [BATCH, SEQ, HEADS, HEAD])?;
        let scale = gamma(&mut g, &part("heads"), heads);
        let heads = g.norm(&part("heads.norm"), heads, RMS, scale, None)?;
        let o = g.view(&part("joined"), heads, [BATCH, SEQ, width])?;
        let quantisation = match layer {
            "first" => Quantisation::Nf4 { double: true },
            _ => Quantisation::Int8,
        };
        let name = part("out.weight");
        let weight = g.quantised_weight(&name, [width, width], WEIGHT, quantisation)?;
        let mut branch = g.linear(&part("out"), o, weight, None)?;
        let down = g.weight(&part("out.down"), [RANK, width], WEIGHT);
        let drop = g.dropout(dropout);
        let low = g.linear_of_dropped(&part("out.low"), o, down, drop)?;
        let up = g.weight(&part("out.up"), [width, RANK], WEIGHT);
        branch = g.linear_add(&part("out.adapted"), (branch, 0), (low, 0), up, 0.5)?;
        (stream, normed) = rms_sum(&mut g, &part("norm"), (stream, branch), 0.0)?;
        g.leave_block();
    }
    finish(&mut g, normed)?;
    Ok(g)
}

/// One tensor read by three activations, a norm and a product: its gradient is a sum of five.
/// The entropies of two attentions, one of them causal, and a head with a bias.
fn entropies(compute: DType) -> Result<Graph, GraphError> {
    let mut graph = Graph::new(compute);
    let g = &mut graph;
    let mut x = start(g, 12)?;
    for (block, causal) in [true, false].into_iter().enumerate() {
        g.enter_block(format!("blocks.{block}"));
        let name = |part: &str| format!("blocks.{block}.{part}");
        let qkv = linear(g, &name("qkv"), x, 36)?;
        let op = Attention {
            inputs: AttentionInputs::Packed,
            heads: 4,
            kv_heads: 4,
            head_dim: 3,
            causal,
            // Far from uniform, so that there is an entropy to differentiate.
            scale: 20.0,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        let entropy = AttentionEntropy {
            heads: op.heads,
            head_dim: op.head_dim,
            causal,
            scale: op.scale,
            keep_means: true,
        };
        let attended = g.emit(name("attention"), op, vec![qkv])?;
        let entropy = g.attention_entropy(&name("entropy"), entropy, qkv, attended[1])?;
        let base = g.small_weight(&name("base"), [12], Init::Ones);
        let inputs = [x, attended[0], entropy, base];
        x = g.map(&name("mix"), &inputs, |v| {
            &v[0] + (&v[1] - &v[0]) * (&v[2] * &v[3]).sigmoid()
        })?;
        g.leave_block();
    }
    let weight = g.weight("head", [VOCABULARY, 12], WEIGHT);
    let bias = Some(g.small_weight("head.bias", [VOCABULARY], Init::Zeros));
    let targets = g.batch("targets", [BATCH, SEQ], DType::I32);
    g.cross_entropy("loss", x, Head { weight, bias }, targets, 0.1, Some(7))?;
    Ok(graph)
}

fn many_consumers(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let x = start(&mut g, 9)?;
    g.enter_block("shared");
    let h = linear(&mut g, "shared", x, 9)?;
    let gelu = g.activation("gelu", h, ActivationKind::Gelu)?;
    let silu = g.activation("silu", h, ActivationKind::Silu)?;
    let relu = g.activation("relu", h, ActivationKind::Relu)?;
    let (_, first) = rms_sum(&mut g, "first", (gelu, silu), 0.0)?;
    let (stream, second) = rms_sum(&mut g, "second", (first, relu), 0.2)?;
    g.leave_block();
    g.enter_block("joined");
    let product = linear(&mut g, "product", h, 9)?;
    let third = linear(&mut g, "third", second, 9)?;
    let (joined, normed) = rms_sum(&mut g, "joined", (product, third), 0.0)?;
    let fourth = linear(&mut g, "fourth", normed, 9)?;
    let (stream, normed) = rms_sum(&mut g, "sum", (stream, fourth), 0.0)?;
    let fifth = linear(&mut g, "fifth", normed, 9)?;
    let (_, normed) = rms_sum(&mut g, "both", (joined, fifth), 0.0)?;
    let (_, normed) = rms_sum(&mut g, "with h", (h, normed), 0.0)?;
    // The same tensor as stream and as branch.
    let sixth = linear(&mut g, "sixth", normed, 9)?;
    let (_, twice) = rms_sum(&mut g, "twice", (sixth, sixth), 0.0)?;
    let (_, normed) = rms_sum(&mut g, "end", (stream, twice), 0.0)?;
    g.leave_block();
    finish(&mut g, normed)?;
    Ok(g)
}

/// Products and a convolution over columns of one tensor: apart, overlapping, and with a
/// column that nobody reads.
fn column_blocks(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let x = start(&mut g, 8)?;
    g.enter_block("columns");
    let wide = linear(&mut g, "wide", x, 23)?;
    let a = linear_columns(&mut g, "a", wide, 0..7, 8)?;
    let b = linear_columns(&mut g, "b", wide, 5..14, 8)?;
    let weight = g.small_weight("conv.weight", [8, 3], Init::Uniform { bound: 0.5 });
    let bias = g.small_weight("conv.bias", [8], Init::Zeros);
    let c = g.convolution("conv", wide, 14, weight, bias)?;
    let (scale, shift) = (
        g.small_weight("ab.gamma", [8], Init::Ones),
        g.small_weight("ab.beta", [8], Init::Zeros),
    );
    let ab = g.residual_norm("ab", (a, b), None, LAYER, scale, Some(shift))?;
    g.leave_block();
    g.enter_block("alone");
    // Reads less than all of a tensor that has no other reader.
    let alone = linear_columns(&mut g, "alone", ab.normed, 2..6, 8)?;
    let (_, normed) = rms_sum(&mut g, "abc", (c, alone), 0.2)?;
    g.leave_block();
    finish(&mut g, normed)?;
    Ok(g)
}

/// A scan whose x and z are columns of one tensor wider than both, and one whose x and z are
/// columns of two.
fn wide_scans(compute: DType) -> Result<Graph, GraphError> {
    const INNER: usize = 6;
    const STATE: usize = 3;
    const RANK: usize = 1;
    let mut g = Graph::new(compute);
    let mut stream = start(&mut g, INNER)?;
    let mut normed = stream;
    for name in ["packed", "apart"] {
        g.enter_block(name);
        let part = |part: &str| format!("{name}.{part}");
        let x = linear(&mut g, &part("x"), normed, 2 * INNER + 3)?;
        let z = match name {
            "packed" => x,
            _ => linear(&mut g, &part("z"), normed, 2 * INNER + 1)?,
        };
        let p = linear_columns(&mut g, &part("p"), x, 2..7, RANK + 2 * STATE)?;
        let dt_weight = g.weight(&part("dt.weight"), [INNER, RANK], WEIGHT);
        let time_step = Init::InverseSoftplus {
            low: 0.001,
            high: 0.1,
        };
        let dt_bias = g.small_weight(&part("dt.bias"), [INNER], time_step);
        let inputs = ScanInputs {
            x,
            x_column: 1,
            z,
            z_column: INNER + 1,
            p,
            dt: g.linear_columns(&part("dt"), p, 0, dt_weight, Some(dt_bias))?,
            a_log: g.small_weight(&part("A_log"), [INNER, STATE], Init::LogRange),
            d: g.small_weight(&part("D"), [INNER], Init::Ones),
        };
        let branch = g.scan(&part("scan"), inputs, RANK, 4)?;
        (stream, normed) = rms_sum(&mut g, &part("norm"), (stream, branch), 0.0)?;
        g.leave_block();
    }
    finish(&mut g, normed)?;
    Ok(g)
}
