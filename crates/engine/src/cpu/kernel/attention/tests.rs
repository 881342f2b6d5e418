use super::super::check::{
    assert_close, assert_gradient, assert_single_close, inner_product, random, single, with_threads,
};
use super::super::columns::ColumnsMut;
use super::*;
use crate::cpu::dropout::RandomState;

fn shape(
    batch: usize,
    seq: usize,
    heads: [usize; 2],
    head_dim: usize,
    causal: bool,
) -> AttentionShape {
    AttentionShape {
        batch,
        seq,
        heads: heads[0],
        kv_heads: heads[1],
        head_dim,
        causal,
        scale: 1.0 / (head_dim as f64).sqrt(),
        window: None,
    }
}

fn some_dropout(shape: &AttentionShape) -> Dropout {
    let state = RandomState {
        key: [5, 6],
        row_offset: 3 * shape.seq as u32,
    };
    Dropout::new(state, 2, 0.3)
}

/// What keeps a query from a key, besides their order.
#[derive(Clone, Copy, Debug)]
struct Mask<'a> {
    dropout: Option<Dropout>,
    lengths: Option<&'a [i32]>,
    starts: Option<&'a [i32]>,
    selection: Option<&'a [i32]>,
}

impl Mask<'static> {
    const NONE: Self = Self {
        dropout: None,
        lengths: None,
        starts: None,
        selection: None,
    };

    /// None, dropout, lengths of two sequences, and both. Some end inside a tile, some outside of
    /// what there is.
    fn all(shape: &AttentionShape) -> Vec<Self> {
        let dropouts = [None, Some(some_dropout(shape))];
        let lengths: [Option<&[i32]>; 4] = [None, Some(&[5, 1]), Some(&[99, 0]), Some(&[68, -3])];
        let lengths = lengths.map(|lengths| lengths.map(|lengths| &lengths[..shape.batch]));
        let pairs = dropouts.into_iter().flat_map(|dropout| {
            lengths.map(|lengths| Self {
                dropout,
                lengths,
                starts: None,
                selection: None,
            })
        });
        pairs.collect()
    }
}

/// Documents of 1, 4, 20, 45 and 70 positions, then the rest; the second sequence begins inside
/// the one of 20. Where they begin is not where tiles do, and the first and last entries lie
/// outside of what there is.
fn some_starts(shape: &AttentionShape) -> Vec<i32> {
    let firsts = [0, 1, 5, 25, 70, 140];
    let start = |t: usize| firsts.into_iter().filter(|&first| first <= t).max();
    let mut starts: Vec<i32> = (0..shape.rows())
        .map(|row| {
            let (b, t) = (row / shape.seq, row % shape.seq);
            (start(t + 11 * b).unwrap_or(0) as i32 - 11 * b as i32).max(0)
        })
        .collect();
    starts[0] = -5;
    starts[shape.rows() - 1] = 1000;
    starts
}

/// One packed buffer `[rows, (H + 2·KV)·Dh]` of queries, keys and values.
fn packed<'a, F>(shape: &AttentionShape, data: &'a [F], mask: Mask<'a>) -> Inputs<'a, F> {
    let (q, kv) = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    );
    let block = |offset, width| Columns {
        data,
        row_stride: q + 2 * kv,
        offset,
        width,
    };
    Inputs {
        q: block(0, q),
        k: block(q, kv),
        v: block(q + kv, kv),
        lengths: mask.lengths,
        starts: mask.starts,
        selection: mask.selection,
    }
}

fn packed_width(shape: &AttentionShape) -> usize {
    (shape.heads + 2 * shape.kv_heads) * shape.head_dim
}

/// The definition, one query at a time. Padding is the absence of its positions.
fn naive(shape: &AttentionShape, data: &[f64], mask: Mask<'_>) -> (Vec<f64>, Vec<f64>) {
    let &AttentionShape {
        seq,
        heads,
        kv_heads,
        head_dim: dim,
        ..
    } = shape;
    let width = packed_width(shape);
    let mut o = vec![0.0; shape.rows() * heads * dim];
    let mut lse = vec![0.0; shape.rows() * heads];
    for b in 0..shape.batch {
        let length = mask
            .lengths
            .map_or(seq, |l| l[b].clamp(0, seq as i32) as usize);
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            for t in 0..length {
                let at = |s: usize, column: usize| data[(b * seq + s) * width + column];
                let keys = if shape.causal { t + 1 } else { length };
                let start = mask.starts.map_or(0, |s| s[b * seq + t].clamp(0, t as i32));
                let first = (0..keys)
                    .find(|s| *s >= start as usize && shape.window.is_none_or(|w| t - s < w))
                    .unwrap();
                let words = seq.div_ceil(32);
                let chosen = |s: usize| {
                    mask.selection.is_none_or(|bits| {
                        bits[(b * seq + t) * words + s / 32] >> (s % 32) & 1 == 1
                    })
                };
                let scores: Vec<f64> = (first..keys)
                    .map(|s| {
                        if !chosen(s) {
                            return f64::NEG_INFINITY;
                        }
                        let dot: f64 = (0..dim)
                            .map(|c| at(t, h * dim + c) * at(s, (heads + kv) * dim + c))
                            .sum();
                        dot * shape.scale
                    })
                    .collect();
                let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                lse[(b * heads + h) * seq + t] = sum.ln();
                for (s, score) in (first..).zip(&scores) {
                    let kept = mask.dropout.map_or(1.0, |dropout| {
                        // Three sequences of the effective batch come before this micro batch.
                        let mut state = shape.mask(dropout);
                        state.row_offset = 0;
                        let row = ((3 + b) * heads + h) * seq + t;
                        state.factor(state.row(row), s)
                    });
                    for c in 0..dim {
                        let v = at(s, (heads + kv_heads + kv) * dim + c);
                        o[(b * seq + t) * heads * dim + h * dim + c] +=
                            score.exp() / sum * kept * v;
                    }
                }
            }
        }
    }
    (o, lse)
}

fn run_forward<F: Real>(shape: &AttentionShape, data: &[F], mask: Mask<'_>) -> (Vec<F>, Vec<F>) {
    let seven = F::from_f64(7.0);
    let mut o = vec![seven; shape.rows() * shape.heads * shape.head_dim];
    let mut lse = vec![seven; shape.rows() * shape.heads];
    let inputs = packed(shape, data, mask);
    forward(shape, &inputs, mask.dropout, &mut o, &mut lse);
    (o, lse)
}

/// The gradient of `Σ o ∘ weights` in the packed layout.
fn run_backward<F: Real>(
    shape: &AttentionShape,
    data: &[F],
    weights: &[F],
    mask: Mask<'_>,
) -> Vec<F> {
    let (o, lse) = run_forward(shape, data, mask);
    let mut gradient = vec![F::from_f64(7.0); data.len()];
    let mut space = vec![F::ZERO; backward_workspace(shape)];
    let (q, kv) = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    );
    let blocks = [(0, q), (q, kv), (q + kv, kv)];
    let [dq, dk, dv] = ColumnsMut::split(&mut gradient, q + 2 * kv, blocks);
    let inputs = packed(shape, data, mask);
    backward(
        shape,
        weights,
        &inputs,
        &o,
        &lse,
        mask.dropout,
        &mut space,
        &dq,
        &dk,
        &dv,
    );
    gradient
}

#[test]
fn forward_is_the_definition() {
    for causal in [false, true] {
        for shape in [
            shape(1, 1, [1, 1], 4, causal),
            shape(2, 7, [4, 2], 5, causal),
            shape(2, 133, [4, 2], 2, causal),
            shape(1, 37, [3, 1], 16, causal),
            shape(2, 130, [2, 2], 20, causal),
        ] {
            let data = random(shape.rows() * packed_width(&shape), 1);
            for mask in Mask::all(&shape) {
                let (o, lse) = naive(&shape, &data, mask);
                let (o64, lse64) = run_forward(&shape, &data, mask);
                let (o32, lse32) = run_forward(&shape, &single(&data), mask);
                for i in 0..o.len() {
                    assert!(
                        (o64[i] - o[i]).abs() < 1e-12,
                        "{shape:?} {mask:?} {i} {} {}",
                        o64[i],
                        o[i]
                    );
                    assert!((f64::from(o32[i]) - o[i]).abs() < 1e-5);
                }
                for i in 0..lse.len() {
                    assert!((lse64[i] - lse[i]).abs() < 1e-12);
                    assert!((f64::from(lse32[i]) - lse[i]).abs() < 1e-5);
                }
            }
        }
    }
}

#[test]
fn gradients_are_finite_differences() {
    for causal in [false, true] {
        for shape in [
            shape(1, 1, [1, 1], 4, causal),
            shape(2, 7, [4, 2], 5, causal),
            shape(1, 70, [2, 1], 4, causal),
            shape(1, 70, [2, 1], 12, causal),
        ] {
            let data = random(shape.rows() * packed_width(&shape), 1);
            let weights = random(shape.rows() * shape.heads * shape.head_dim, 2);
            for mask in Mask::all(&shape) {
                let ours = run_backward(&shape, &data, &weights, mask);
                let loss = |data: &[f64]| -> f64 {
                    let (o, _) = run_forward(&shape, data, mask);
                    o.iter().zip(&weights).map(|(o, r)| o * r).sum()
                };
                assert_gradient("q, k, v", &data, &ours, loss);
            }
        }
    }
}

/// Windows shorter than a tile, than the sequence, and longer; documents; both, with padding and
/// dropout.
fn bounded(shape: AttentionShape, mut check: impl FnMut(AttentionShape, Mask<'_>)) {
    let starts = some_starts(&shape);
    let lengths = &[shape.seq as i32 - 2, shape.seq as i32][..shape.batch];
    for window in [None, Some(1), Some(6), Some(70), Some(1000)] {
        for starts in [None, Some(&starts[..])] {
            let shape = AttentionShape { window, ..shape };
            let plain = Mask {
                starts,
                ..Mask::NONE
            };
            check(shape, plain);
            let both = Mask {
                dropout: Some(some_dropout(&shape)),
                lengths: Some(lengths),
                starts,
                selection: None,
            };
            check(shape, both);
        }
    }
}

#[test]
fn windows_and_documents_are_the_definition() {
    for shape in [shape(2, 7, [4, 2], 5, true), shape(2, 200, [2, 1], 8, true)] {
        let data = random(shape.rows() * packed_width(&shape), 1);
        bounded(shape, |shape, mask| {
            let (o, lse) = naive(&shape, &data, mask);
            let (o64, lse64) = run_forward(&shape, &data, mask);
            for (ours, exact) in o64.iter().zip(&o).chain(lse64.iter().zip(&lse)) {
                assert!((ours - exact).abs() < 1e-12, "{shape:?} {mask:?}");
            }
        });
    }
}

#[test]
fn gradients_in_windows_and_documents_are_finite_differences() {
    for shape in [shape(2, 7, [4, 2], 5, true), shape(1, 75, [2, 1], 2, true)] {
        let data = random(shape.rows() * packed_width(&shape), 1);
        let weights = random(shape.rows() * shape.heads * shape.head_dim, 2);
        bounded(shape, |shape, mask| {
            let ours = run_backward(&shape, &data, &weights, mask);
            let loss = |data: &[f64]| -> f64 {
                let (o, _) = run_forward(&shape, data, mask);
                o.iter().zip(&weights).map(|(o, r)| o * r).sum()
            };
            assert_gradient("q, k, v", &data, &ours, loss);
        });
    }
}

/// What is cut off from the rest by starts is what it would be alone.
#[test]
fn a_document_is_what_it_is_alone() {
    let whole = shape(1, 150, [2, 1], 8, true);
    let alone = shape(1, 80, [2, 1], 8, true);
    let data = random(whole.rows() * packed_width(&whole), 8);
    let weights = random(whole.rows() * whole.heads * whole.head_dim, 9);
    let starts: Vec<i32> = (0..150).map(|t| if t < 70 { 0 } else { 70 }).collect();
    let mask = Mask {
        starts: Some(&starts),
        ..Mask::NONE
    };
    let (width, o_width) = (packed_width(&whole), whole.heads * whole.head_dim);
    let ours = run_backward(&whole, &data, &weights, mask);
    let expected = run_backward(
        &alone,
        &data[70 * width..],
        &weights[70 * o_width..],
        Mask::NONE,
    );
    for (ours, expected) in ours[70 * width..].iter().zip(&expected) {
        assert!((ours - expected).abs() < 1e-12);
    }
}

#[test]
fn f32_gradients_are_close_and_threads_do_not_change_a_bit() {
    let shape = shape(2, 150, [4, 2], 24, true);
    let mask = Mask {
        dropout: Some(some_dropout(&shape)),
        lengths: Some(&[90, 150]),
        starts: None,
        selection: None,
    };
    let data = random(shape.rows() * packed_width(&shape), 3);
    let weights = random(shape.rows() * shape.heads * shape.head_dim, 4);
    let exact = run_backward(&shape, &data, &weights, mask);
    let (data, weights) = (single(&data), single(&weights));
    let on = |threads| {
        with_threads(threads, || {
            let (o, lse) = run_forward(&shape, &data, mask);
            (o, lse, run_backward(&shape, &data, &weights, mask))
        })
    };
    let one = on(1);
    for (ours, exact) in one.2.iter().zip(&exact) {
        assert!((f64::from(*ours) - exact).abs() < 1e-4 * exact.abs().max(1.0));
    }
    assert_eq!(one, on(2));
}

#[test]
fn large_scores_do_not_overflow() {
    let shape = AttentionShape {
        scale: 40.0,
        ..shape(1, 80, [1, 1], 8, true)
    };
    let data = single(&random(shape.rows() * packed_width(&shape), 5));
    let (o, lse) = run_forward(&shape, &data, Mask::NONE);
    assert!(o.iter().chain(&lse).all(|x| x.is_finite()));
}

/// Padding may hold anything: not even a NaN gets out of it.
#[test]
fn what_lies_beyond_a_length_is_never_read() {
    for causal in [false, true] {
        let shape = shape(1, 140, [2, 1], 8, causal);
        let mask = Mask {
            lengths: Some(&[70]),
            ..Mask::NONE
        };
        let mut data = random(shape.rows() * packed_width(&shape), 6);
        let mut weights = random(shape.rows() * shape.heads * shape.head_dim, 7);
        let (o, lse) = run_forward(&shape, &data, mask);
        let gradient = run_backward(&shape, &data, &weights, mask);
        data[70 * packed_width(&shape)..].fill(f64::NAN);
        weights[70 * shape.heads * shape.head_dim..].fill(f64::INFINITY);
        assert_eq!(run_forward(&shape, &data, mask), (o, lse));
        assert_eq!(run_backward(&shape, &data, &weights, mask), gradient);
    }
}

/// Each query sees its own key and, of those before, about one in three; one query of the second
/// sequence sees nothing but the first key, several tiles away.
fn some_selection(shape: &AttentionShape) -> Vec<i32> {
    let words = shape.seq.div_ceil(WORD);
    let mut bits = vec![0_i32; shape.rows() * words];
    for (row, words) in bits.chunks_exact_mut(words).enumerate() {
        let t = row % shape.seq;
        for s in 0..=t {
            let chosen = match row {
                _ if row + 1 == shape.rows() => s == 0,
                _ => s == t || (s * 7 + row * 3) % 11 < 4,
            };
            words[s / WORD] |= i32::from(chosen) << (s % WORD);
        }
    }
    bits
}

#[test]
fn selected_keys_are_all_that_a_query_sees() {
    for (seq, dim) in [(1, 4), (13, 5), (150, 8)] {
        let shape = shape(2, seq, [4, 2], dim, true);
        let bits = some_selection(&shape);
        for dropout in [None, Some(some_dropout(&shape))] {
            let mask = Mask {
                dropout,
                selection: Some(&bits),
                ..Mask::NONE
            };
            let data = random(shape.rows() * packed_width(&shape), 21);
            let (o, lse) = run_forward(&shape, &data, mask);
            let (expected_o, expected_lse) = naive(&shape, &data, mask);
            assert_close("o", &o, &expected_o, 1e-12);
            assert_close("lse", &lse, &expected_lse, 1e-12);
            let exact = run_forward(&shape, &single(&data), mask);
            assert_single_close("o in f32", &exact.0, &expected_o, 1e-5);
        }
    }
}

#[test]
fn gradients_by_selected_keys_are_finite_differences() {
    let shape = shape(2, 70, [2, 1], 2, true);
    let bits = some_selection(&shape);
    let mask = Mask {
        selection: Some(&bits),
        ..Mask::NONE
    };
    let data = random(shape.rows() * packed_width(&shape), 22);
    let weights = random(shape.rows() * shape.heads * shape.head_dim, 23);
    let gradient = run_backward(&shape, &data, &weights, mask);
    assert_gradient("qkv", &data, &gradient, |data| {
        inner_product(&naive(&shape, data, mask).0, &weights)
    });
}
