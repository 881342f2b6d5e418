//! How fast the kernels other than matrix products are on this machine, each as the best of
//! several runs: `cargo bench -p cinch-engine --bench kernels`.
//!
//! Kernels that only move memory are shown with the bandwidth they reach; compare it with
//! the plain copy on the first line.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::Instant;

use cinch_engine::cpu::dropout::{Dropout, RandomState};
use cinch_engine::cpu::kernel::columns::{Columns, ColumnsMut};
use cinch_engine::cpu::kernel::{
    activation, convolution, eight_bit, embedding, expression, gated, linear, norm, optimizer, scan,
};
use cinch_engine::cpu::parallel::Accumulate;
use cinch_graph::expression::Expr;
use cinch_graph::op::{ActivationKind, NormKind, Op};
use cinch_graph::{DType, Graph};
use rayon::prelude::*;

const RUNS: usize = 30;
/// Elements that one task of the copy moves.
const BLOCK: usize = 64 * 1024;
const ROWS: usize = 256;
const INNER: usize = 1024;
const WIDTH: usize = 512;
const VOCABULARY: usize = 50_257;

fn main() {
    let large = 16 << 20;
    copy(large);
    adamw(large);
    squares(large);
    scan_passes();
    convolution_passes();
    norm_passes();
    activations();
    embedding_passes();
    adapters();
    expressions(ROWS * 2048);
}

/// Prints the best time of `RUNS` runs, and the bandwidth where `bytes` are moved.
fn measure(name: &str, bytes: Option<usize>, mut work: impl FnMut()) {
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    match bytes {
        Some(bytes) => println!(
            "{name:<28} {:>8.3} ms {:>7.1} GB/s",
            best * 1e3,
            bytes as f64 / best / 1e9
        ),
        None => println!("{name:<28} {:>8.3} ms", best * 1e3),
    }
}

/// Numbers between −1 and 1.
fn numbers(len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0)
        .collect()
}

/// The products of an adapter's first matrix, whose input is dropped in part, with the bandwidth at
/// which its wide side is read or written.
fn adapters() {
    const ROWS: usize = 2048;
    const RANK: usize = 8;
    let state = RandomState {
        key: [1, 2],
        row_offset: 0,
    };
    let dropout = Dropout::new(state, 3, 0.1);
    for width in [384, 1536] {
        let (x, w, dy) = (
            numbers(ROWS * width),
            numbers(RANK * width),
            numbers(ROWS * RANK),
        );
        let (mut y, mut dw, mut dx) = (dy.clone(), w.clone(), x.clone());
        for (name, dropout) in [(" of dropped", Some(dropout)), ("", None)] {
            let bytes = ROWS * width * size_of::<f32>();
            measure(&format!("adapter {width}{name}"), Some(bytes), || {
                let x = Columns::whole(&x, width);
                linear::forward(ROWS, x, &w, None, dropout, &mut y);
            });
            measure(&format!("grad weight {width}{name}"), Some(bytes), || {
                let (dy, x) = (Columns::whole(&dy, RANK), Columns::whole(&x, width));
                let mode = Accumulate::Overwrite;
                linear::grad_weight(ROWS, dy, x, 1.0, &mut dw, mode, dropout);
            });
            measure(
                &format!("grad input {width}{name}"),
                Some(2 * bytes),
                || {
                    let (dy, place) = (Columns::whole(&dy, RANK), (width, 0));
                    let mode = Accumulate::Add;
                    linear::grad_input(ROWS, width, dy, &w, 1.0, &mut dx, place, mode, dropout);
                },
            );
        }
    }
}

fn copy(len: usize) {
    let source = numbers(len);
    let mut target = numbers(len);
    measure("copy", Some(len * 8), || {
        let blocks = target.par_chunks_mut(BLOCK).zip(source.par_chunks(BLOCK));
        blocks.for_each(|(target, source)| target.copy_from_slice(source));
    });
}

fn adamw(len: usize) {
    let settings = optimizer::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        learning_rate: 3e-4,
        bias_correction1: 0.1,
        bias_correction2: 0.05,
        gradient_scale: 1.0,
    };
    let gradient = numbers(len);
    let (mut parameter, mut m, mut v) = (numbers(len), vec![0.0; len], vec![0.0; len]);
    measure("adamw", Some(len * 28), || {
        optimizer::adamw(&mut parameter, &gradient, &mut m, &mut v, &settings);
    });
    let (mut m, mut v) = (vec![0; len], vec![0; len]);
    let blocks = len.div_ceil(eight_bit::BLOCK);
    let (mut m_scales, mut v_scales) = (vec![0.0; blocks], vec![0.0; blocks]);
    measure("adamw, 8 bits", Some(len * 16), || {
        let m = eight_bit::Moment {
            codes: &mut m,
            scales: &mut m_scales,
        };
        let v = eight_bit::Moment {
            codes: &mut v,
            scales: &mut v_scales,
        };
        eight_bit::adamw(&mut parameter, &gradient, m, v, &settings);
    });
}

fn squares(len: usize) {
    let x = numbers(len);
    let mut partials = vec![0.0; optimizer::partials_len(len)];
    measure("sum of squares", Some(len * 4), || {
        optimizer::squares(&x, &mut partials);
        std::hint::black_box(&partials);
    });
}

fn scan_passes() {
    let shape = scan::ScanShape {
        batch: 1,
        seq: ROWS,
        inner: INNER,
        state: 16,
        rank: 64,
        chunk: 64,
    };
    let packed = numbers(ROWS * 2 * INNER);
    let dt = numbers(ROWS * INNER);
    let projection = numbers(ROWS * shape.projection());
    let a_log = numbers(INNER * 16);
    let skip = numbers(INNER);
    let half = |offset| Columns {
        data: &packed,
        row_stride: 2 * INNER,
        offset,
        width: INNER,
    };
    let inputs = scan::Inputs {
        x: half(0),
        gate: Some(half(INNER)),
        dt: &dt,
        projection: &projection,
        a_log: &a_log,
        skip: &skip,
    };
    let mut y = numbers(ROWS * INNER);
    let mut states = vec![0.0; shape.states_len()];
    measure("scan forward", None, || {
        scan::forward(shape, &inputs, &mut y, Some(&mut states));
    });
    let mut workspace = vec![0.0; scan::backward_workspace(shape)];
    let (mut dpacked, mut ddt) = (packed.clone(), dt.clone());
    let mut dprojection = projection.clone();
    let (mut da_log, mut dskip) = (a_log.clone(), skip.clone());
    measure("scan backward", None, || {
        let blocks = [(0, INNER), (INNER, INNER)];
        let [x, gate] = ColumnsMut::split(&mut dpacked, 2 * INNER, blocks);
        let gradients = scan::Gradients {
            x,
            gate: Some(gate),
            dt: &mut ddt,
            projection: &mut dprojection,
            a_log: (&mut da_log, Accumulate::Overwrite),
            skip: (&mut dskip, Accumulate::Overwrite),
        };
        scan::backward(shape, &inputs, &states, &y, &mut workspace, gradients);
    });
}

fn convolution_passes() {
    let shape = convolution::ConvolutionShape {
        batch: 1,
        seq: ROWS,
        channels: INNER,
        width: 4,
    };
    let x = numbers(ROWS * INNER);
    let columns = Columns::whole(&x, INNER);
    let (w, b) = (numbers(INNER * 4), numbers(INNER));
    let mut y = x.clone();
    measure("convolution forward", Some(x.len() * 8), || {
        convolution::forward(shape, columns, &w, &b, &mut y);
    });
    let (mut dx, mut dw, mut db) = (x.clone(), w.clone(), b.clone());
    measure("convolution backward", Some(x.len() * 16), || {
        let dx = ColumnsMut::whole(&mut dx, INNER);
        let dw = (&mut dw[..], Accumulate::Overwrite);
        let db = (&mut db[..], Accumulate::Overwrite);
        convolution::backward(shape, &y, columns, &w, &b, &dx, Some([dw, db]));
    });
}

fn dropout() -> Dropout {
    let state = RandomState {
        key: [1, 2],
        row_offset: 0,
    };
    Dropout::new(state, 0, 0.1)
}

fn norm_passes() {
    let shape = norm::NormShape {
        kind: NormKind::Layer,
        rows: ROWS,
        width: WIDTH,
    };
    let (x, branch) = (numbers(ROWS * WIDTH), numbers(ROWS * WIDTH));
    let (gamma, beta) = (numbers(WIDTH), numbers(WIDTH));
    let (mut x_new, mut y) = (x.clone(), x.clone());
    let (mut mean, mut rstd) = (vec![0.0; ROWS], vec![0.0; ROWS]);
    for (name, dropout) in [
        ("norm forward", None),
        ("norm forward, dropout", Some(dropout())),
    ] {
        measure(name, Some(x.len() * 16), || {
            let args = norm::Forward {
                x: Some(&x),
                branch: Some((&branch, dropout)),
                gamma: &gamma,
                beta: Some(&beta),
                x_new: Some(&mut x_new),
                y: &mut y,
                mean: Some(&mut mean),
                rstd: &mut rstd,
            };
            norm::forward(shape, 1e-5, args);
        });
    }
    let (mut dx, mut dgamma, mut dbeta) = (x.clone(), gamma.clone(), beta.clone());
    measure("norm backward", Some(x.len() * 24), || {
        let args = norm::Backward {
            dy: Some(&y),
            residual: norm::Residual::At(&x),
            x_new: &x_new,
            mean: Some(&mean),
            rstd: &rstd,
            gamma: &gamma,
            dx: &mut dx,
            dbranch: None,
            dgamma: Some((&mut dgamma, Accumulate::Overwrite)),
            dbeta: Some((&mut dbeta, Accumulate::Overwrite)),
        };
        norm::backward(shape, args);
    });
}

fn activations() {
    let x = numbers(ROWS * 4 * WIDTH);
    let (mut y, mut dx) = (x.clone(), x.clone());
    for kind in [
        ActivationKind::GeluTanh,
        ActivationKind::Gelu,
        ActivationKind::Silu,
        ActivationKind::Relu,
    ] {
        measure(&format!("{kind:?} forward"), Some(x.len() * 8), || {
            activation::forward(kind, Some(&x), &mut y);
        });
        measure(&format!("{kind:?} backward"), Some(x.len() * 12), || {
            activation::backward(kind, Some(&y), &x, &mut dx);
        });
    }
}

fn embedding_passes() {
    let tokens: Vec<i32> = (0..ROWS).map(|i| (i * 7919 % VOCABULARY) as i32).collect();
    let table = numbers(VOCABULARY * WIDTH);
    let positions = numbers(ROWS * WIDTH);
    let mut y = numbers(ROWS * WIDTH);
    let forward = Some(y.len() * 12);
    measure("embedding forward", forward, || {
        let dropout = Some(dropout());
        embedding::forward(&tokens, ROWS, &table, Some(&positions), dropout, &mut y)
            .expect("tokens are inside the table");
    });
    let mut dtable = table.clone();
    for (name, mode) in [
        ("embedding backward, add", Accumulate::Add),
        ("embedding backward, overwrite", Accumulate::Overwrite),
    ] {
        measure(name, None, || {
            let target = Some((&mut dtable[..], mode));
            embedding::backward(&tokens, ROWS, &y, None, target, None)
                .expect("tokens are inside the table");
        });
    }
}

/// The expression of a map over `numbers(len)` twice, and its output.
fn expression_pass(name: &str, len: usize, write: impl FnOnce(&[Expr]) -> Expr) {
    let mut graph = Graph::new(DType::F32);
    let inputs = ["x", "y"].map(|name| graph.batch(name, [len / WIDTH, WIDTH], DType::F32));
    graph.map(name, &inputs, write).expect("an expression");
    let Op::Map(op) = &graph.nodes[0].op else {
        return;
    };
    let data = [numbers(len), numbers(len)];
    let reads = op.pointwise.reads.iter().zip(&data);
    let sources: Vec<_> = reads
        .map(|(read, data)| expression::Source {
            numbers: expression::Numbers::Real(data),
            broadcast: read.broadcast,
        })
        .collect();
    let places = expression::Places {
        expression: &op.pointwise.expression,
        sources: &sources,
        random: None,
        rows: len / WIDTH,
        width: WIDTH,
    };
    let mut output = vec![0.0; len];
    let bytes = (sources.len() + 1) * len * 4;
    measure(name, Some(bytes), || {
        let mut outputs = [(&mut output[..], Accumulate::Overwrite)];
        expression::map(&places, &mut outputs);
    });
}

fn expressions(len: usize) {
    expression_pass("expression: x + y", len, |v| &v[0] + &v[1]);
    expression_pass("expression: gelu", len, |v| v[0].gelu_tanh());
    expression_pass("expression: swiglu", len, |v| v[0].silu() * &v[1]);
    let (x, y) = (numbers(len), numbers(len));
    let mut output = vec![0.0; len];
    measure("add", Some(len * 12), || {
        activation::add(Some(&x), &y, &mut output);
    });
    measure("gelu_tanh", Some(len * 8), || {
        activation::forward(ActivationKind::GeluTanh, Some(&x), &mut output);
    });
    measure("swiglu", Some(len * 12), || {
        gated::forward(ActivationKind::Silu, Some(&x), Some(&y), &mut output);
    });
}
