//! Every op refuses inputs of the wrong number, type, rank or size.
//!
//! For each op there is one list of inputs that it takes. Each way to change one of them is
//! tried; where the op leaves something open, the case says so, and then the change must be
//! accepted.

use cinch_graph::op::{
    Activation, ActivationBackward, ActivationKind, AdamW, Add, Attention, AttentionBackward,
    AttentionEntropy, AttentionEntropyBackward, AttentionInputs, CachedAttention,
    CachedAttentionEntropy, CachedConvolution, CachedScan, CachedSelection, Convolution,
    ConvolutionBackward, CrossEntropy, Declare, Dequantise, Embedding, EmbeddingBackward, Gated,
    GatedBackward, GradientNorm, GradientSquares, Indexer, IndexerLoss, IndexerLossBackward,
    IndexerSelection, KeyCount, Linear, LinearAdd, LinearGradInput, LinearGradWeight, Logits,
    MomentFormat, Norm, NormApply, NormBackward, NormKind, Op, Quantisation, Rotary, Scan,
    ScanBackward, View,
};
use cinch_graph::{DType, Dropout, Graph, Shape, TensorType};

/// An op, inputs that it takes, and what of them is open.
struct Case {
    op: Op,
    inputs: Vec<TensorType>,
    /// Inputs that may be of any floating-point type on their own.
    any_float: &'static [usize],
    /// Inputs that may have any number of leading dimensions.
    any_rank: &'static [usize],
    /// Dimensions (input, dimension) that may be larger.
    any_size: &'static [(usize, usize)],
    any_number: bool,
}

impl Case {
    fn new(op: impl Into<Op>, inputs: Vec<TensorType>) -> Self {
        Self {
            op: op.into(),
            inputs,
            any_float: &[],
            any_rank: &[],
            any_size: &[],
            any_number: false,
        }
    }

    fn any_float(self, any_float: &'static [usize]) -> Self {
        Self { any_float, ..self }
    }

    fn any_rank(self, any_rank: &'static [usize]) -> Self {
        Self { any_rank, ..self }
    }

    fn any_size(self, any_size: &'static [(usize, usize)]) -> Self {
        Self { any_size, ..self }
    }

    fn any_number(self) -> Self {
        Self {
            any_number: true,
            ..self
        }
    }

    fn name(&self) -> &'static str {
        self.op.name()
    }

    /// Checks the op's verdict on `inputs` as changed.
    fn check(&self, inputs: &[TensorType], accepted: bool, change: &str) {
        let result = self.op.declaration().infer(inputs);
        let name = self.name();
        assert_eq!(result.is_ok(), accepted, "{name}, {change}: {result:?}");
    }

    fn check_all(&self) {
        self.check(&self.inputs, true, "as it should be");
        self.check_number();
        for (i, &input) in self.inputs.iter().enumerate() {
            let with = |ty: TensorType| {
                let mut inputs = self.inputs.clone();
                inputs[i] = ty;
                inputs
            };
            let open = self.any_float.contains(&i);
            let other = if input.dtype.is_float() {
                DType::I32
            } else {
                DType::F32
            };
            for (dtype, accepted) in [(other, false), (DType::F64, open)] {
                let changed = TensorType { dtype, ..input };
                self.check(&with(changed), accepted, &format!("input {i} as {changed}"));
            }
            for shape in other_ranks(input.shape) {
                let changed = TensorType { shape, ..input };
                let accepted = self.any_rank.contains(&i);
                self.check(&with(changed), accepted, &format!("input {i} as {changed}"));
            }
            for dim in 0..input.shape.rank() {
                let mut dims = input.shape.dims().to_vec();
                dims[dim] += 1;
                let changed = TensorType::new(Shape::new(&dims), input.dtype);
                let accepted = self.any_size.contains(&(i, dim));
                self.check(&with(changed), accepted, &format!("input {i} as {changed}"));
            }
        }
    }

    fn check_number(&self) {
        let mut more = self.inputs.clone();
        more.extend(self.inputs.last());
        self.check(&more, self.any_number, "with one input more");
        let fewer = &self.inputs[..self.inputs.len() - 1];
        self.check(fewer, self.any_number, "with one input less");
        self.check(&[], false, "without inputs");
    }
}

/// One leading dimension more, where there is room, and one less.
fn other_ranks(shape: Shape) -> Vec<Shape> {
    let dims = shape.dims();
    let more: Vec<usize> = [1].into_iter().chain(dims.iter().copied()).collect();
    let more = (more.len() <= Shape::MAX_RANK).then(|| Shape::new(&more));
    [Shape::new(&dims[1..])].into_iter().chain(more).collect()
}

fn f(dims: &[usize]) -> TensorType {
    TensorType::new(Shape::new(dims), DType::F32)
}

fn i(dims: &[usize]) -> TensorType {
    TensorType::new(Shape::new(dims), DType::I32)
}

fn random() -> TensorType {
    i(&[Graph::RANDOM_WORDS])
}

const DROPOUT: Option<Dropout> = Some(Dropout {
    rate: 0.1,
    stream: 0,
});

fn norm(kind: NormKind, residual: bool, dropout: Option<Dropout>) -> Norm {
    Norm {
        kind,
        epsilon: 1e-5,
        residual,
        dropout,
    }
}

/// The op's verdict names what is wrong.
fn refuses(op: Op, inputs: &[TensorType], fragment: &str) {
    let problem = op.declaration().infer(inputs).expect_err(op.name());
    assert!(problem.contains(fragment), "{}: {problem}", op.name());
}

fn attention(inputs: AttentionInputs, dropout: Option<Dropout>) -> Attention {
    Attention {
        inputs,
        heads: 2,
        kv_heads: 1,
        head_dim: 3,
        causal: true,
        scale: 1.0,
        dropout,
        padding: false,
        window: None,
        documents: false,
        selection: false,
    }
}

fn scan(packed: bool) -> Scan {
    Scan {
        inner: 4,
        state: 2,
        rank: 1,
        chunk: 2,
        packed,
        x_column: if packed { 4 } else { 0 },
        z_column: 0,
        keep_states: true,
    }
}

fn cross_entropy() -> CrossEntropy {
    CrossEntropy {
        label_smoothing: 0.1,
        chunk_rows: 2,
        gradient: true,
        weight: true,
        bias: false,
        bias_gradient: false,
        scaled: false,
    }
}

fn adamw() -> AdamW {
    AdamW {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        learning_rate_scale: 1.0,
        parameter: DType::F32,
        copy: Some(DType::Bf16),
        moments: MomentFormat::Full,
        factor: true,
    }
}

#[test]
fn embedding() {
    let op = Embedding {
        positions: true,
        dropout: DROPOUT,
    };
    Case::new(op, vec![i(&[2, 3]), f(&[7, 4]), f(&[5, 4]), random()])
        .any_size(&[(0, 0), (0, 1), (1, 0), (2, 0)])
        .check_all();
    let op = Embedding {
        positions: false,
        dropout: None,
    };
    Case::new(op, vec![i(&[2, 3]), f(&[7, 4])])
        .any_float(&[1])
        .any_size(&[(0, 0), (0, 1), (1, 0), (1, 1)])
        .check_all();
    let op = EmbeddingBackward {
        table: Some(7),
        positions: Some(5),
        dropout: DROPOUT,
    };
    Case::new(op, vec![f(&[2, 3, 4]), i(&[2, 3]), random()])
        .any_float(&[0])
        .any_size(&[(0, 2)])
        .check_all();
}

#[test]
fn norms() {
    let (x, statistic, small) = (f(&[2, 3, 4]), f(&[2, 3]), f(&[4]));
    let op = norm(NormKind::Layer, true, DROPOUT);
    Case::new(op, vec![x, x, small, small, random()]).check_all();
    Case::new(norm(NormKind::Rms, false, None), vec![x, small])
        .any_rank(&[0])
        .any_size(&[(0, 0), (0, 1)])
        .check_all();
    let kind = NormKind::Layer;
    let inputs = vec![x, statistic, statistic, small, small];
    Case::new(NormApply { kind }, inputs).check_all();
    let kind = NormKind::Rms;
    Case::new(NormApply { kind }, vec![x, statistic, small]).check_all();
    let op = NormBackward {
        kind: NormKind::Layer,
        residual_gradient: true,
        dropout: DROPOUT,
        parameters: true,
        value: false,
    };
    let inputs = vec![x, x, x, statistic, statistic, small, random()];
    Case::new(op.clone(), inputs.clone()).check_all();
    let op = NormBackward { value: true, ..op };
    Case::new(op, [inputs, vec![small]].concat()).check_all();
    let op = NormBackward {
        kind: NormKind::Rms,
        residual_gradient: false,
        dropout: None,
        parameters: false,
        value: false,
    };
    Case::new(op.clone(), vec![x, x, statistic, small]).check_all();
    let op = NormBackward { value: true, ..op };
    Case::new(op, vec![x, x, statistic, small]).check_all();
}

#[test]
fn linear() {
    let (dy, weight, x) = (f(&[2, 3, 6]), f(&[5, 4]), f(&[2, 3, 6]));
    let (rate, stream) = (0.1, 3);
    for dropout in [None, Some(Dropout { rate, stream })] {
        let random = dropout.map(|_| random());
        let with_random = |inputs: Vec<TensorType>| inputs.into_iter().chain(random).collect();
        let op = Linear {
            first_column: 2,
            bias: true,
            dropout,
            detached: false,
        };
        Case::new(op, with_random(vec![x, weight, f(&[5])]))
            .any_rank(&[0])
            .any_size(&[(0, 0), (0, 1), (0, 2)])
            .check_all();
        let op = LinearGradInput {
            dy_column: 1,
            scale: 2.0,
            first_column: 2,
            width: 6,
            accumulate: true,
            dropout,
        };
        Case::new(op, with_random(vec![dy, weight, x]))
            .any_size(&[(0, 2)])
            .check_all();
        let op = LinearGradWeight {
            dy_column: 1,
            outputs: 5,
            scale: 2.0,
            first_column: 2,
            inputs: 4,
            gradient: DType::F32,
            bias: false,
            dropout,
        };
        Case::new(op, with_random(vec![dy, x]))
            .any_size(&[(0, 2), (1, 2)])
            .check_all();
    }
    let op = LinearAdd {
        first_column: 2,
        y_column: 1,
        scale: 2.0,
    };
    Case::new(op, vec![dy, x, weight])
        .any_size(&[(0, 2), (1, 2)])
        .check_all();
}

#[test]
fn pointwise() {
    let (x, kind) = (f(&[2, 3, 4]), ActivationKind::Silu);
    Case::new(Activation { kind }, vec![x])
        .any_float(&[0])
        .any_rank(&[0])
        .any_size(&[(0, 0), (0, 1), (0, 2)])
        .check_all();
    for value in [false, true] {
        Case::new(ActivationBackward { kind, value }, vec![x, x]).check_all();
        Case::new(GatedBackward { kind, value }, vec![x, x, x]).check_all();
    }
    Case::new(Add, vec![x, x]).check_all();
    Case::new(Gated { kind }, vec![x, x]).check_all();
}

fn rotary() -> Rotary {
    Rotary {
        frequencies: Rotary::frequencies(10_000.0, 4),
        columns: 8,
        scale: 1.0,
        positions: false,
        inverse: false,
    }
}

#[test]
fn rotations() {
    Case::new(rotary(), vec![f(&[2, 3, 8])])
        .any_float(&[0])
        .any_size(&[(0, 0), (0, 1), (0, 2)])
        .check_all();
    let op = Rotary {
        positions: true,
        ..rotary()
    };
    let positions = TensorType::new([2, 3], DType::I32);
    Case::new(op, vec![f(&[2, 3, 8]), positions])
        .any_float(&[0])
        .any_size(&[(0, 2)])
        .check_all();
}

#[test]
fn views_and_codes() {
    let shape = [6, 4].into();
    let view = Op::from(View { shape });
    assert!(view.declaration().infer(&[f(&[2, 3, 4])]).is_ok());
    for inputs in [vec![f(&[2, 3, 5])], vec![i(&[2, 3, 4])], vec![]] {
        assert!(view.declaration().infer(&inputs).is_err(), "{inputs:?}");
    }
    for quantisation in [
        Quantisation::Nf4 { double: false },
        Quantisation::Nf4 { double: true },
        Quantisation::Int8,
    ] {
        let tensors = quantisation.tensors(&shape);
        let scales = tensors.scales.into_iter().map(|(_, ty)| ty);
        let op = Dequantise {
            quantisation,
            shape,
            dtype: DType::Bf16,
        };
        Case::new(op, [tensors.codes].into_iter().chain(scales).collect()).check_all();
    }
}

#[test]
fn attentions() {
    let (o, lse) = (f(&[2, 3, 6]), f(&[2, 2, 3]));
    let (packed, key) = (f(&[2, 3, 12]), f(&[2, 3, 3]));
    let op = attention(AttentionInputs::Packed, DROPOUT);
    Case::new(op.clone(), vec![packed, random()])
        .any_float(&[0])
        .any_size(&[(0, 0), (0, 1)])
        .check_all();
    let inputs = vec![o, packed, o, lse, random()];
    Case::new(AttentionBackward(op), inputs).check_all();
    let op = attention(AttentionInputs::Separate, None);
    Case::new(op.clone(), vec![o, key, key]).check_all();
    Case::new(AttentionBackward(op), vec![o, o, key, key, o, lse]).check_all();
    for dropout in [None, DROPOUT] {
        let random = dropout.map(|_| random());
        let with_extras = |inputs: &[TensorType]| {
            let extras = random.into_iter().chain([i(&[2])]);
            inputs.iter().copied().chain(extras).collect()
        };
        let op = Attention {
            padding: true,
            ..attention(AttentionInputs::Packed, dropout)
        };
        Case::new(op.clone(), with_extras(&[packed]))
            .any_float(&[0])
            .any_size(&[(0, 1)])
            .check_all();
        let inputs = with_extras(&[o, packed, o, lse]);
        Case::new(AttentionBackward(op), inputs).check_all();
    }
    for (padding, dropout) in [(false, None), (true, DROPOUT)] {
        let random = dropout.map(|_| random());
        let lengths = padding.then(|| i(&[2]));
        let with_extras = |inputs: &[TensorType]| {
            let extras = [random, lengths, Some(i(&[2, 3]))].into_iter().flatten();
            inputs.iter().copied().chain(extras).collect()
        };
        let op = Attention {
            padding,
            documents: true,
            window: Some(2),
            ..attention(AttentionInputs::Packed, dropout)
        };
        Case::new(op.clone(), with_extras(&[packed]))
            .any_float(&[0])
            .check_all();
        let inputs = with_extras(&[o, packed, o, lse]);
        Case::new(AttentionBackward(op), inputs).check_all();
    }
}

#[test]
fn convolutions() {
    let (x, weight, bias) = (f(&[2, 3, 6]), f(&[4, 3]), f(&[4]));
    Case::new(Convolution { first_column: 1 }, vec![x, weight, bias])
        .any_size(&[(0, 0), (0, 1), (0, 2), (1, 1)])
        .check_all();
    let op = ConvolutionBackward {
        first_column: 1,
        accumulate: true,
        parameters: true,
    };
    Case::new(op, vec![f(&[2, 3, 4]), x, weight, bias, x])
        .any_size(&[(2, 1)])
        .check_all();
}

#[test]
fn scans() {
    let (wide, narrow, p) = (f(&[2, 3, 8]), f(&[2, 3, 4]), f(&[2, 3, 5]));
    let (a_log, d, states) = (f(&[4, 2]), f(&[4]), f(&[2, 2, 4, 2]));
    Case::new(scan(true), vec![wide, p, narrow, a_log, d])
        .any_size(&[(0, 2)])
        .check_all();
    Case::new(scan(false), vec![narrow, wide, p, narrow, a_log, d])
        .any_size(&[(0, 2), (1, 2)])
        .check_all();
    let inputs = vec![narrow, wide, p, narrow, a_log, d, states];
    Case::new(ScanBackward(scan(true)), inputs)
        .any_size(&[(1, 2)])
        .check_all();
    let inputs = vec![narrow, narrow, wide, p, narrow, a_log, d, states];
    Case::new(ScanBackward(scan(false)), inputs)
        .any_size(&[(1, 2), (2, 2)])
        .check_all();
}

#[test]
fn what_continues_from_a_cache() {
    let cached = |inputs| CachedAttention {
        attention: attention(inputs, None),
        slots: 9,
    };
    let (o, packed, key) = (f(&[2, 3, 6]), f(&[2, 3, 12]), f(&[2, 3, 3]));
    let positions = i(&[2, 3]);
    Case::new(cached(AttentionInputs::Packed), vec![packed, positions])
        .any_float(&[0])
        .check_all();
    let inputs = vec![o, key, key, positions];
    Case::new(cached(AttentionInputs::Separate), inputs).check_all();
    let (x, weight, bias) = (f(&[2, 3, 6]), f(&[4, 3]), f(&[4]));
    let op = CachedConvolution { first_column: 1 };
    Case::new(op, vec![x, weight, bias, positions])
        .any_size(&[(0, 2), (1, 1)])
        .check_all();
    let (wide, narrow, p) = (f(&[2, 3, 8]), f(&[2, 3, 4]), f(&[2, 3, 5]));
    let (a_log, d) = (f(&[4, 2]), f(&[4]));
    let cached = |packed| {
        CachedScan(Scan {
            keep_states: false,
            ..scan(packed)
        })
    };
    Case::new(cached(true), vec![wide, p, narrow, a_log, d, positions])
        .any_size(&[(0, 2)])
        .check_all();
    let inputs = vec![narrow, wide, p, narrow, a_log, d, positions];
    Case::new(cached(false), inputs)
        .any_size(&[(0, 2), (1, 2)])
        .check_all();
}

#[test]
fn a_cache_is_refused_for_what_it_cannot_hold() {
    let op = CachedAttention {
        attention: attention(AttentionInputs::Packed, None),
        slots: 9,
    };
    let with = |change: &dyn Fn(&mut CachedAttention)| {
        let mut op = op.clone();
        change(&mut op);
        let width = 4 * op.attention.head_dim;
        let inputs = [f(&[2, 3, width]), i(&[2, 3])];
        Op::from(op).declaration().infer(&inputs)
    };
    assert!(with(&|_| {}).is_ok());
    assert!(with(&|op| op.attention.causal = false).is_err());
    assert!(with(&|op| op.attention.padding = true).is_err());
    assert!(with(&|op| op.attention.head_dim = 513).is_err());
    let error = with(&|op| op.slots = 2).unwrap_err();
    assert!(
        error.contains("3 tokens at once do not fit 2 slots"),
        "{error}"
    );
    let one_step = [f(&[2, 3, 6]), f(&[4, 1]), f(&[4]), i(&[2, 3])];
    let op = Op::from(CachedConvolution { first_column: 1 });
    assert!(op.declaration().infer(&one_step).is_err());
}

#[test]
fn losses() {
    let (h, weight) = (f(&[2, 3, 4]), f(&[7, 4]));
    let inputs = vec![h, weight, i(&[2, 3]), f(&[1]), f(&[1])];
    Case::new(cross_entropy(), inputs.clone())
        .any_size(&[(1, 0)])
        .check_all();
    let scaled = CrossEntropy {
        scaled: true,
        ..cross_entropy()
    };
    Case::new(scaled.clone(), [inputs.clone(), vec![f(&[4])]].concat())
        .any_size(&[(1, 0)])
        .check_all();
    let biased = CrossEntropy {
        bias: true,
        bias_gradient: true,
        ..scaled
    };
    Case::new(biased, [inputs, vec![f(&[7]), f(&[4])]].concat()).check_all();
    Case::new(Logits { bias: false }, vec![h, weight, i(&[2])])
        .any_size(&[(0, 1), (1, 0)])
        .check_all();
    Case::new(Logits { bias: true }, vec![h, weight, i(&[2]), f(&[7])])
        .any_size(&[(0, 1)])
        .check_all();
}

#[test]
fn entropies() {
    let op = AttentionEntropy {
        heads: 2,
        head_dim: 3,
        causal: true,
        scale: 0.5,
        keep_means: true,
    };
    let (qkv, rows) = (f(&[2, 5, 18]), f(&[2, 2, 5]));
    Case::new(op.clone(), vec![qkv, rows]).check_all();
    let backward = AttentionEntropyBackward(op.clone());
    Case::new(backward, vec![f(&[2, 5, 1]), qkv, rows, rows]).check_all();
    let inputs = vec![qkv, f(&[2, 2, 9, 3]), i(&[2, 5])];
    Case::new(CachedAttentionEntropy(op.clone()), inputs.clone())
        .any_size(&[(1, 2)])
        .check_all();
    let many = Op::from(AttentionEntropy {
        heads: 17,
        ..op.clone()
    });
    let error = many.declaration().infer(&[f(&[2, 5, 153]), f(&[2, 17, 5])]);
    assert!(error.unwrap_err().contains("at most 16 heads"));
    let seeing_all = AttentionEntropy {
        causal: false,
        ..op
    };
    let cached = Op::from(CachedAttentionEntropy(seeing_all));
    let error = cached.declaration().infer(&inputs).unwrap_err();
    assert!(error.contains("without a causal order"), "{error}");
}

#[test]
fn optimizers() {
    for scaled in [false, true] {
        let op = GradientNorm {
            max_norm: None,
            scaled,
            from_squares: false,
        };
        Case::new(op, vec![f(&[4, 3]), f(&[4])])
            .any_rank(&[0, 1])
            .any_size(&[(0, 0), (0, 1), (1, 0)])
            .any_number()
            .check_all();
    }
    let squares = GradientSquares { first: 6, total: 7 };
    Case::new(squares, vec![f(&[4, 3])])
        .any_float(&[0])
        .any_rank(&[0])
        .any_size(&[(0, 0), (0, 1)])
        .check_all();
    for moments in [
        MomentFormat::Full,
        MomentFormat::AsKept,
        MomentFormat::EightBit,
    ] {
        for factor in [false, true] {
            let op = AdamW {
                moments,
                factor,
                ..adamw()
            };
            let mut inputs = vec![f(&[4, 3]), f(&[3])];
            inputs.extend(factor.then(|| f(&[2])));
            Case::new(op, inputs)
                .any_rank(&[0])
                .any_size(&[(0, 0), (0, 1)])
                .check_all();
        }
    }
}

/// Settings of an op that no inputs can fit.
#[test]
fn settings_out_of_range() {
    let (x, small) = (f(&[2, 3, 4]), f(&[4]));
    for rate in [1.0, 1.5, -0.1, f64::NAN] {
        let dropout = Some(Dropout { rate, stream: 0 });
        let op = norm(NormKind::Rms, true, dropout);
        refuses(op.into(), &[x, x, small, random()], "dropout rate");
        let op = attention(AttentionInputs::Packed, dropout);
        refuses(op.into(), &[f(&[2, 3, 12]), random()], "dropout rate");
    }
    let op = norm(NormKind::Rms, false, DROPOUT);
    refuses(op.into(), &[x, small, random()], "without a branch");

    let packed = f(&[2, 3, 12]);
    for (heads, kv_heads, head_dim) in [(0, 0, 3), (0, 1, 3), (2, 0, 3), (3, 2, 3), (2, 1, 0)] {
        let op = Attention {
            heads,
            kv_heads,
            head_dim,
            ..attention(AttentionInputs::Packed, None)
        };
        refuses(op.into(), &[packed], "heads");
    }
    let op = Attention {
        heads: usize::MAX,
        head_dim: usize::MAX,
        ..attention(AttentionInputs::Packed, None)
    };
    refuses(op.into(), &[packed], "a source is");
    let op = Attention {
        window: Some(0),
        ..attention(AttentionInputs::Packed, None)
    };
    refuses(op.into(), &[packed], "window of 0");
    for (window, documents) in [(Some(2), false), (None, true)] {
        let op = Attention {
            window,
            documents,
            causal: false,
            ..attention(AttentionInputs::Packed, None)
        };
        let starts = documents.then(|| i(&[2, 3]));
        let inputs: Vec<_> = [packed].into_iter().chain(starts).collect();
        refuses(op.into(), &inputs, "causal order");
    }

    for head_dim in [0, 1, 16, 6, 1024] {
        let op = Rotary {
            frequencies: Rotary::frequencies(10_000.0, head_dim),
            ..rotary()
        };
        refuses(op.into(), &[f(&[2, 3, 12])], "head");
    }
    for base in [0.0, f64::NAN] {
        let op = Rotary {
            frequencies: Rotary::frequencies(base, 4),
            ..rotary()
        };
        refuses(op.into(), &[f(&[2, 3, 12])], "finite");
    }
    let op = Rotary {
        columns: 16,
        ..rotary()
    };
    refuses(op.into(), &[f(&[2, 3, 12])], "columns");

    let op = Linear {
        first_column: usize::MAX,
        ..Linear::default()
    };
    refuses(op.into(), &[x, f(&[5, 4])], "columns");
    let op = Convolution {
        first_column: usize::MAX,
    };
    refuses(op.into(), &[x, f(&[4, 3]), small], "columns");
    let op = Convolution { first_column: 0 };
    refuses(op.into(), &[x, f(&[4, 0]), small], "no steps");

    let inputs = [f(&[2, 3, 8]), f(&[2, 3, 5]), x, f(&[4, 2]), small];
    let op = Scan {
        chunk: 0,
        ..scan(true)
    };
    refuses(op.into(), &inputs, "zero steps");
    let op = Scan {
        x_column: 3,
        ..scan(true)
    };
    refuses(op.into(), &inputs, "share some");

    let inputs = [x, f(&[7, 4]), i(&[2, 3]), f(&[1]), f(&[1])];
    for label_smoothing in [-0.1, 1.0, f64::NAN] {
        let op = CrossEntropy {
            label_smoothing,
            ..cross_entropy()
        };
        refuses(op.into(), &inputs, "label smoothing");
    }
    let op = CrossEntropy {
        chunk_rows: 0,
        ..cross_entropy()
    };
    refuses(op.into(), &inputs, "zero rows");
    let op = CrossEntropy {
        gradient: false,
        ..cross_entropy()
    };
    refuses(op.into(), &inputs, "only along with");

    let op = AdamW {
        copy: Some(DType::I32),
        ..adamw()
    };
    refuses(op.into(), &[x, f(&[3]), f(&[2])], "a copy in i32");
    let op = AdamW {
        learning_rate_scale: -1.0,
        ..adamw()
    };
    refuses(
        op.into(),
        &[x, f(&[3]), f(&[2])],
        "a learning rate times -1",
    );
    let op = GradientNorm {
        max_norm: None,
        scaled: false,
        from_squares: true,
    };
    let sums = TensorType::new([7], DType::F64);
    let accepted = Op::from(op.clone()).declaration().infer(&[sums]);
    assert!(accepted.is_ok(), "{accepted:?}");
    refuses(op.clone().into(), &[f(&[7])], "f32, expected f64");
    refuses(op.clone().into(), &[sums, sums], "takes 1 inputs");
    refuses(op.into(), &[TensorType::new([7, 1], DType::F64)], "a list");
    let op = GradientSquares { first: 2, total: 2 };
    refuses(op.into(), &[f(&[5])], "writes 1 sums from 2 on");
}

/// The builder's own arithmetic comes before the op can refuse.
#[test]
fn attention_over_no_heads_is_an_error() {
    let mut graph = Graph::new(DType::F32);
    let qkv = graph.batch("qkv", [2, 3, 12], DType::F32);
    for heads in [0, 5, usize::MAX] {
        let problem = graph.attention("attend", qkv, heads, true, None);
        let message = problem.unwrap_err().to_string();
        assert!(message.contains("`attend`"), "{message}");
    }
}

#[test]
fn a_window_leaves_out_the_pairs_beyond_it() {
    let flops = |window, length| {
        let op = Op::from(Attention {
            window,
            ..attention(AttentionInputs::Packed, None)
        });
        let inputs = [f(&[1, length, 12])];
        let outputs = op.declaration().infer(&inputs).unwrap();
        op.declaration().flops(&inputs, &outputs)
    };
    // Five queries of two heads of three columns: 1 + 2 + 3 + 3 + 3 pairs in a window of three.
    assert_eq!(flops(Some(3), 5), 12 * 2 * 3 * 4);
    assert_eq!(flops(Some(5), 5), flops(None, 5));
    assert_eq!(flops(Some(usize::MAX), 5), flops(None, 5));
    assert_eq!(flops(Some(1), 5), 5 * 2 * 3 * 4);
}

/// An indexer of two heads over [2, 3], with or without a selection of keys.
#[test]
fn an_indexer_and_its_loss_take_what_fits_together() {
    let indexer = Indexer { heads: 2, width: 4 };
    let own = [
        f(&[2, 3, 8]),
        f(&[2, 3, 4]),
        f(&[2, 3, 2]),
        f(&[2]),
        f(&[2]),
    ];
    let adaptive = KeyCount::Adaptive {
        base: 4,
        least: 2,
        most: 6,
        temperature: 1.0,
    };
    for count in [None, Some(KeyCount::Fixed(3)), Some(adaptive)] {
        let op = IndexerSelection { indexer, count };
        let outputs = op.infer(&own).unwrap();
        assert_eq!(outputs[0], f(&[2, 3]));
        assert_eq!(outputs.get(1).copied(), count.map(|_| i(&[2, 3, 1])));
        Case::new(op, own.to_vec()).check_all();
    }
    // From a cache of 40 slots, whose bits are two words.
    let continued = own.iter().copied().chain([i(&[2, 3])]);
    let continued: Vec<TensorType> = continued.collect();
    for count in [KeyCount::Fixed(3), adaptive] {
        let op = CachedSelection {
            indexer,
            count,
            slots: 40,
        };
        let mut expected = vec![i(&[2, 3, 2]), f(&[2, 40, 4])];
        if op.is_adaptive() {
            expected.push(f(&[2, 40, 2]));
        }
        assert_eq!(op.infer(&continued).unwrap(), expected);
        Case::new(op, continued.clone()).check_all();
    }
    let (packed, o, key) = (f(&[2, 3, 20]), f(&[2, 3, 12]), f(&[2, 3, 4]));
    let of_selected = CachedAttention {
        attention: Attention {
            heads: 3,
            kv_heads: 1,
            head_dim: 4,
            causal: true,
            selection: true,
            ..attention(AttentionInputs::Packed, None)
        },
        slots: 40,
    };
    let inputs = vec![packed, i(&[2, 3, 2]), i(&[2, 3])];
    assert_eq!(of_selected.infer(&inputs).unwrap()[0], o);
    Case::new(of_selected, inputs).any_float(&[0]).check_all();
    let (rows, lse, term) = (f(&[2, 3]), f(&[2, 3, 3]), f(&[1]));
    for selection in [None, Some(i(&[2, 3, 1]))] {
        for inputs in [AttentionInputs::Packed, AttentionInputs::Separate] {
            let sources = match inputs {
                AttentionInputs::Packed => vec![packed],
                AttentionInputs::Separate => vec![o, key],
            };
            let attention = Attention {
                heads: 3,
                kv_heads: 1,
                head_dim: 4,
                causal: true,
                selection: selection.is_some(),
                ..attention(inputs, None)
            };
            let op = IndexerLoss { indexer, attention };
            let all = own.iter().copied().chain([rows]).chain(sources);
            let all = all.chain([lse]).chain(selection).chain([term, term]);
            let all: Vec<TensorType> = all.collect();
            Case::new(op.clone(), all.clone()).check_all();
            let backward = IndexerLossBackward {
                forward: op,
                scaled: false,
            };
            assert_eq!(backward.infer(&all).unwrap(), own);
            Case::new(backward, all).check_all();
        }
    }
}

#[test]
fn an_indexer_that_cannot_be_is_refused() {
    let own = [
        f(&[2, 3, 8]),
        f(&[2, 3, 4]),
        f(&[2, 3, 2]),
        f(&[2]),
        f(&[2]),
    ];
    let indexer = Indexer { heads: 2, width: 4 };
    let adaptive = |least, most, temperature| {
        Some(KeyCount::Adaptive {
            base: 4,
            least,
            most,
            temperature,
        })
    };
    for (count, problem) in [
        (Some(KeyCount::Fixed(0)), "0 keys"),
        (adaptive(7, 6, 1.0), "at least 7 and at most 6"),
        (adaptive(0, 6, 1.0), "at least 0"),
        (adaptive(2, 6, f64::NAN), "temperature"),
    ] {
        let op = IndexerSelection { indexer, count };
        refuses(op.into(), &own, problem);
    }
    let continued: Vec<TensorType> = own.iter().copied().chain([i(&[2, 3])]).collect();
    for (count, slots, problem) in [
        (KeyCount::Fixed(0), 40, "0 keys"),
        (KeyCount::Fixed(4), 2, "do not fit 2 slots"),
    ] {
        let op = CachedSelection {
            indexer,
            count,
            slots,
        };
        refuses(op.into(), &continued, problem);
    }
    for (heads, width, problem) in [(0, 4, "0 heads"), (65, 4, "65 heads"), (2, 0, "no columns")] {
        let indexer = Indexer { heads, width };
        let op = IndexerSelection {
            indexer,
            count: None,
        };
        refuses(op.into(), &own, problem);
    }
}

/// A selection stands last, behind what else keeps a query from a key.
#[test]
fn attention_to_selected_keys_takes_their_bits() {
    let (o, lse) = (f(&[2, 3, 6]), f(&[2, 3, 3]));
    let key = f(&[2, 3, 2]);
    for dropout in [None, DROPOUT] {
        let random = dropout.map(|_| random());
        let op = Attention {
            heads: 3,
            kv_heads: 1,
            head_dim: 2,
            causal: true,
            selection: true,
            ..attention(AttentionInputs::Separate, dropout)
        };
        let extras = || random.into_iter().chain([i(&[2, 3, 1])]);
        let inputs = [o, key, key].into_iter().chain(extras());
        Case::new(op.clone(), inputs.collect()).check_all();
        let inputs = [o, o, key, key, o, lse].into_iter().chain(extras());
        Case::new(AttentionBackward(op.clone()), inputs.collect()).check_all();
        let around = Attention {
            causal: false,
            ..op
        };
        let inputs: Vec<_> = [o, key, key].into_iter().chain(extras()).collect();
        refuses(around.into(), &inputs, "without a causal order");
    }
}
