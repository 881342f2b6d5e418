use super::super::attention::{AttentionShape, Inputs as AttentionInputs, forward};
use super::super::check::{
    assert_close, assert_gradient, assert_single_close, inner_product, random, single, with_threads,
};
use super::super::columns::Columns;
use super::*;

/// Sizes of an indexer, and its numbers one after the other.
#[derive(Clone, Debug)]
struct Sample<F> {
    shape: IndexerShape,
    numbers: Vec<F>,
}

impl Sample<f64> {
    fn new(batch: usize, seq: usize, heads: usize, width: usize, rows: usize) -> Self {
        let shape = IndexerShape {
            batch,
            seq,
            heads,
            width,
            keys: seq,
            rows,
        };
        let count = Self::lengths(&shape).iter().sum();
        let numbers = random(count, 31).iter().map(|x| 1.5 * x).collect();
        Self { shape, numbers }
    }

    fn single(&self) -> Sample<f32> {
        Sample {
            shape: self.shape,
            numbers: single(&self.numbers),
        }
    }

    /// The definition, of one pair.
    fn score(&self, b: usize, t: usize, s: usize) -> f64 {
        let IndexerShape {
            seq, heads, width, ..
        } = self.shape;
        let x = self.inputs();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        (0..heads)
            .map(|j| {
                let q = &x.queries[((b * seq + t) * heads + j) * width..][..width];
                let k = &x.keys[(b * seq + s) * width..][..width];
                let z = inner_product(q, k) / (width as f64).sqrt() + x.score_bias[j];
                let w = x.weights[(b * seq + t) * heads + j] + x.weight_bias[j];
                sigmoid(w) * sigmoid(z)
            })
            .sum()
    }

    fn row(&self, b: usize, t: usize) -> Vec<f64> {
        (0..=t).map(|s| self.score(b, t, s)).collect()
    }

    fn rows(&self) -> Vec<Vec<f64>> {
        let sequences = 0..self.shape.batch;
        sequences
            .flat_map(|b| (0..self.shape.seq).map(move |t| self.row(b, t)))
            .collect()
    }
}

impl<F: Real> Sample<F> {
    fn lengths(shape: &IndexerShape) -> [usize; 5] {
        let rows = shape.num_rows();
        let (heads, width) = (shape.heads, shape.width);
        [
            rows * heads * width,
            rows * width,
            rows * heads,
            heads,
            heads,
        ]
    }

    fn inputs(&self) -> Inputs<'_, F> {
        let mut rest = &self.numbers[..];
        let parts = Self::lengths(&self.shape).map(|length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part
        });
        let [queries, keys, weights, weight_bias, score_bias] = parts;
        Inputs {
            queries,
            keys,
            weights,
            weight_bias,
            score_bias,
        }
    }

    fn select(&self, count: Count) -> (Vec<F>, Vec<i32>) {
        let shape = &self.shape;
        let seven = F::from_f64(7.0);
        let mut workspace = vec![seven; 2 * shape.table() + shape.num_rows()];
        let mut lse = vec![seven; shape.num_rows()];
        let mut bits = vec![7; shape.num_rows() * shape.seq.div_ceil(WORD)];
        let marks = (count != Count::All).then_some(&mut bits[..]);
        select(
            shape,
            &self.inputs(),
            count,
            &mut workspace,
            &mut lse,
            marks,
        );
        (lse, bits)
    }
}

/// Sizes of one position, of less than a word, and of several parts and words.
fn samples() -> [Sample<f64>; 4] {
    [
        Sample::new(1, 1, 1, 1, 1),
        Sample::new(2, 13, 3, 5, 13),
        Sample::new(2, 77, 2, 4, 32),
        Sample::new(1, 130, 4, 16, 128),
    ]
}

const ADAPTIVE: Count = Count::Adaptive {
    base: 12,
    least: 4,
    most: 16,
    temperature: 1.0,
};

/// The keys of a row, highest score first and of equal ones the lowest position.
fn best(row: &[f64], count: usize) -> Vec<usize> {
    let mut keys: Vec<usize> = (0..row.len()).collect();
    keys.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    keys.truncate(count);
    keys.sort_unstable();
    keys
}

fn keys(words: &[i32]) -> Vec<usize> {
    (0..words.len() * WORD)
        .filter(|&key| has(words, key))
        .collect()
}

#[test]
fn a_selection_is_the_highest_scores() {
    for sample in samples() {
        let words = sample.shape.seq.div_ceil(WORD);
        for count in [1, 5, 40, 1000] {
            let (lse, bits) = sample.select(Count::Fixed(count));
            for (index, row) in sample.rows().iter().enumerate() {
                let expected = best(row, count);
                assert_eq!(keys(&bits[index * words..][..words]), expected);
                let sum: f64 = expected.iter().map(|&key| row[key].exp()).sum();
                assert!((lse[index] - sum.ln()).abs() < 1e-12);
            }
        }
        let (lse, _) = sample.select(Count::All);
        for (lse, row) in lse.iter().zip(sample.rows()) {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            assert!((lse - sum.ln()).abs() < 1e-12);
        }
    }
}

#[test]
fn rows_that_vary_less_select_more_keys() {
    let sample = Sample::new(2, 77, 2, 4, 32);
    let (rows, seq) = (sample.rows(), 77.0);
    let variances: Vec<f64> = rows
        .iter()
        .map(|row| {
            let mean = row.iter().sum::<f64>() / seq;
            let hidden = (seq - row.len() as f64) * mean * mean;
            let seen: f64 = row.iter().map(|x| (x - mean).powi(2)).sum();
            (seen + hidden) / (seq - 1.0)
        })
        .collect();
    let mean = variances.iter().sum::<f64>() / variances.len() as f64;
    let (_, bits) = sample.select(ADAPTIVE);
    let words = 77_usize.div_ceil(WORD);
    let mut counts = std::collections::BTreeSet::new();
    for (index, (row, variance)) in rows.iter().zip(&variances).enumerate() {
        let ratio = variance / (mean + 1e-8);
        let wanted = (12.0 * (0.5 + 1.0 / (1.0 + ratio))).clamp(4.0, 16.0);
        let count = wanted.min(row.len() as f64) as usize;
        let found = keys(&bits[index * words..][..words]);
        assert_eq!(found, best(row, count), "row {index}");
        counts.insert(count);
    }
    assert!(counts.len() > 5 && counts.contains(&16), "{counts:?}");
}

#[test]
fn of_equal_scores_lower_positions_are_selected() {
    let mut sample = Sample::new(1, 70, 1, 2, 70);
    sample.numbers.fill(0.0);
    let (_, bits) = sample.select(Count::Fixed(40));
    assert_eq!(keys(&bits[69 * 3..]), (0..40).collect::<Vec<_>>());
    assert_eq!(keys(&bits[20 * 3..21 * 3]), (0..21).collect::<Vec<_>>());
}

#[test]
fn neither_parts_nor_threads_change_a_bit() {
    let sample = Sample::new(2, 77, 2, 4, 77).single();
    let whole = sample.select(ADAPTIVE);
    for (rows, threads) in [(32, 1), (77, 2), (16, 2)] {
        let mut other = sample.clone();
        other.shape.rows = rows;
        assert!(with_threads(threads, || other.select(ADAPTIVE)) == whole);
    }
}

/// An attention over the same positions.
struct Attended<F> {
    shape: AttentionShape,
    qkv: Vec<F>,
    lse: Vec<F>,
    bits: Option<Vec<i32>>,
}

fn sources<'a, F>(
    shape: &AttentionShape,
    data: &'a [F],
    selection: Option<&'a [i32]>,
) -> AttentionInputs<'a, F> {
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
    AttentionInputs {
        q: block(0, q),
        k: block(q, kv),
        v: block(q + kv, kv),
        lengths: None,
        starts: None,
        selection,
    }
}

impl<F: Real> Attended<F> {
    fn new(sample: &Sample<F>, bits: Option<Vec<i32>>) -> Self {
        let shape = AttentionShape {
            batch: sample.shape.batch,
            seq: sample.shape.seq,
            heads: 4,
            kv_heads: 2,
            head_dim: 3,
            causal: true,
            scale: 0.8,
            window: None,
        };
        let rows = sample.shape.num_rows();
        let numbers = random(rows * 24, 47);
        let qkv: Vec<F> = numbers.iter().map(|&x| F::from_f64(2.0 * x)).collect();
        let mut o = vec![F::ZERO; rows * 12];
        let mut lse = vec![F::ZERO; rows * 4];
        let inputs = sources(&shape, &qkv, bits.as_deref());
        forward(&shape, &inputs, None, &mut o, &mut lse);
        Self {
            shape,
            qkv,
            lse,
            bits,
        }
    }

    fn inputs<'a>(&'a self, indexer: Inputs<'a, F>, indexer_lse: &'a [F]) -> LossInputs<'a, F> {
        LossInputs {
            indexer,
            indexer_lse,
            attention: self.shape,
            sources: sources(&self.shape, &self.qkv, self.bits.as_deref()),
            lse: &self.lse,
        }
    }

    /// KL of every query, with the log-sum-exp of the scores over what is selected.
    fn loss(&self, sample: &Sample<F>) -> Vec<F> {
        let lse = self.indexer_lse(sample);
        let length = 3 * sample.shape.table() + sample.shape.num_rows();
        let mut workspace = vec![F::from_f64(7.0); length];
        let inputs = self.inputs(sample.inputs(), &lse);
        loss(&sample.shape, &inputs, &mut workspace).to_vec()
    }

    fn indexer_lse(&self, sample: &Sample<F>) -> Vec<F> {
        sample
            .select(match self.bits {
                Some(_) => Count::Fixed(FEW),
                None => Count::All,
            })
            .0
    }

    fn gradients(&self, sample: &Sample<F>) -> Vec<F> {
        let lse = self.indexer_lse(sample);
        let shape = &sample.shape;
        let tables = 3 * shape.table() + shape.num_rows() * shape.heads;
        let mut workspace = vec![F::from_f64(7.0); tables];
        let mut all = vec![F::from_f64(7.0); sample.numbers.len()];
        let mut rest = &mut all[..];
        let parts = Sample::<F>::lengths(shape).map(|length| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            part
        });
        let [queries, keys, weights, weight_bias, score_bias] = parts;
        score_bias.fill(F::ZERO);
        let gradients = Gradients {
            queries,
            keys,
            weights,
            weight_bias: (weight_bias, Accumulate::Overwrite),
            score_bias: (score_bias, Accumulate::Add),
        };
        let inputs = self.inputs(sample.inputs(), &lse);
        let gradient = F::from_f64(WEIGHT);
        loss_backward(shape, gradient, &inputs, &mut workspace, gradients);
        all
    }
}

/// What KL counts for in the loss.
const WEIGHT: f64 = 0.3;

/// Keys that a selected attention here has.
const FEW: usize = 7;

fn attended(sample: &Sample<f64>) -> [Attended<f64>; 2] {
    let bits = sample.select(Count::Fixed(FEW)).1;
    [
        Attended::new(sample, None),
        Attended::new(sample, Some(bits)),
    ]
}

#[test]
fn the_loss_is_the_definition() {
    for sample in samples() {
        let words = sample.shape.seq.div_ceil(WORD);
        for attended in attended(&sample) {
            let shape = &attended.shape;
            for (index, kl) in attended.loss(&sample).into_iter().enumerate() {
                let (b, t) = (index / shape.seq, index % shape.seq);
                let seen: Vec<usize> = match &attended.bits {
                    None => (0..=t).collect(),
                    Some(bits) => keys(&bits[index * words..][..words]),
                };
                let softmax = |scores: Vec<f64>| {
                    let sum: f64 = scores.iter().map(|x| x.exp()).sum();
                    scores.into_iter().map(move |x| x.exp() / sum)
                };
                let mut p = vec![0.0; seen.len()];
                for h in 0..shape.heads {
                    let at = |s: usize, column: usize| {
                        &attended.qkv[(b * shape.seq + s) * 24 + column..][..3]
                    };
                    let q = at(t, h * 3);
                    let score = |&s: &usize| inner_product(q, at(s, 12 + h / 2 * 3)) * shape.scale;
                    for (p, x) in p.iter_mut().zip(softmax(seen.iter().map(score).collect())) {
                        *p += x / 4.0;
                    }
                }
                let score = |&s: &usize| sample.score(b, t, s);
                let pi = softmax(seen.iter().map(score).collect());
                let expected: f64 = p.iter().zip(pi).map(|(p, pi)| p * (p / pi).ln()).sum();
                assert!((kl - expected).abs() < 1e-10, "{kl} for {expected}");
                assert!(kl > -1e-12);
            }
        }
    }
}

#[test]
fn gradients_of_the_loss_are_finite_differences() {
    for sample in [Sample::new(2, 13, 3, 5, 13), Sample::new(1, 40, 2, 3, 16)] {
        for attended in attended(&sample) {
            let gradient = attended.gradients(&sample);
            assert_gradient("indexer", &sample.numbers, &gradient, |numbers| {
                let moved = Sample {
                    shape: sample.shape,
                    numbers: numbers.to_vec(),
                };
                WEIGHT * attended.loss(&moved).iter().sum::<f64>()
            });
        }
    }
}

#[test]
fn single_precision_is_close_and_threads_do_not_change_a_bit() {
    let sample = Sample::new(2, 77, 2, 4, 32);
    let narrow = sample.single();
    for (double, selected) in attended(&sample).into_iter().zip([false, true]) {
        let bits = selected.then(|| narrow.select(Count::Fixed(FEW)).1);
        assert_eq!(bits, double.bits);
        let attended = Attended::new(&narrow, bits);
        assert_single_close("KL", &attended.loss(&narrow), &double.loss(&sample), 1e-4);
        let on = |threads| with_threads(threads, || attended.gradients(&narrow));
        let (one, two) = (on(1), on(2));
        assert!(one == two);
        let one: Vec<f64> = one.iter().map(|&x| f64::from(x)).collect();
        let exact = double.gradients(&sample);
        assert_close("gradients", &one, &exact, 1e-4);
    }
}

/// Some tokens of a sample of one sequence.
fn tokens<'a>(sample: &'a Sample<f64>, range: std::ops::Range<usize>) -> Inputs<'a, f64> {
    let IndexerShape { heads, width, .. } = sample.shape;
    let x = sample.inputs();
    let of =
        |numbers: &'a [f64], columns: usize| &numbers[range.start * columns..range.end * columns];
    Inputs {
        queries: of(x.queries, heads * width),
        keys: of(x.keys, width),
        weights: of(x.weights, heads),
        ..x
    }
}

/// Bits of the tokens of a sample, read in runs of `length`.
fn selected_in_runs(sample: &Sample<f64>, count: Count, length: usize, slots: usize) -> Vec<i32> {
    let IndexerShape { seq, width, .. } = sample.shape;
    // What a cache held before does not matter.
    let (mut keys, mut sums) = (vec![7.0; slots * width], vec![-3.0; slots * 2]);
    let adaptive = matches!(count, Count::Adaptive { .. });
    let row_words = slots.div_ceil(WORD);
    let mut bits = vec![-1; seq * row_words];
    for first in (0..seq).step_by(length) {
        let run = first..seq.min(first + length);
        let shape = IndexerShape {
            seq: run.len(),
            keys: run.len(),
            rows: 3.min(run.len()),
            ..sample.shape
        };
        let mut workspace = vec![0.0; 2 * shape.rows * slots + shape.rows];
        let cache = Cache {
            keys: &mut keys,
            sums: adaptive.then_some(&mut sums[..]),
            slots,
        };
        select_cached(
            &shape,
            &tokens(sample, run.clone()),
            (&[first], count),
            cache,
            &mut workspace,
            &mut bits[run.start * row_words..run.end * row_words],
        );
    }
    bits
}

#[test]
fn a_token_selects_as_the_last_of_its_text() {
    let sample = Sample::new(1, 45, 3, 5, 4);
    let adaptive = Count::Adaptive {
        base: 12,
        least: 3,
        most: 40,
        temperature: 1.0,
    };
    for count in [Count::Fixed(7), adaptive] {
        let slots = 50;
        let row_words = slots / WORD + 1;
        let at_once = selected_in_runs(&sample, count, 45, slots);
        for length in [1, 4, 7] {
            assert_eq!(selected_in_runs(&sample, count, length, slots), at_once);
        }
        let mut numbers = Vec::new();
        for t in 0..45 {
            let shape = IndexerShape {
                seq: t + 1,
                keys: t + 1,
                rows: 4.min(t + 1),
                ..sample.shape
            };
            let words = (t + 1).div_ceil(WORD);
            let (mut lse, mut bits) = (vec![0.0; t + 1], vec![0; (t + 1) * words]);
            let mut workspace = vec![0.0; 2 * shape.rows * (t + 1) + t + 1];
            let inputs = tokens(&sample, 0..t + 1);
            select(
                &shape,
                &inputs,
                count,
                &mut workspace,
                &mut lse,
                Some(&mut bits),
            );
            let mut expected = bits[t * words..].to_vec();
            expected.resize(row_words, 0);
            let ours = &at_once[t * row_words..][..row_words];
            assert_eq!(ours, expected, "{count:?}, token {t}");
            numbers.push(expected.iter().map(|word| word.count_ones()).sum::<u32>());
        }
        // Some tokens see more than they select, and not always as many.
        let last = &numbers[20..];
        assert!(last.iter().all(|&keys| keys < 20), "{last:?}");
        let varies = last.iter().any(|&keys| keys != last[0]);
        assert_eq!(varies, matches!(count, Count::Adaptive { .. }), "{last:?}");
    }
}
