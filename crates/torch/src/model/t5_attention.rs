//! T5's attention: distances of positions have learned biases, which the first layer of a stack makes for all.

use std::cell::RefCell;

use cinch_architecture as architecture;

use super::mask::Attention as Kind;
use super::module::{Builder, Embedding, Linear};
use super::t5_lines::Lines;
use crate::eager::op::{attention, cast, creation, dropout, matmul, pointwise, softmax, view};
use crate::eager::{Context, DType, Tensor};

/// Keys and values that the decoder keeps, in training too.
#[derive(Default)]
pub(super) struct Cache {
    own: RefCell<Vec<[Tensor; 2]>>,
    cross: RefCell<Vec<[Tensor; 2]>>,
}

impl Cache {
    /// A Python list goes from its end.
    pub fn let_go(&self) {
        for layers in [&self.own, &self.cross] {
            let mut layers = layers.borrow_mut();
            while let Some(last) = layers.pop() {
                drop(last);
            }
        }
    }

    /// `update` of a layer's first tokens: they are joined with nothing, which is a copy.
    fn update(layers: &RefCell<Vec<[Tensor; 2]>>, states: [&Tensor; 2]) -> [Tensor; 2] {
        let along_positions = 2;
        let kept = states.map(|states| view::cat(vec![states.clone()], along_positions));
        layers.borrow_mut().push(kept.clone());
        kept
    }
}

/// Whose states are attended to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Encoder,
    Decoder,
    /// The decoder looks at the encoder's result.
    Cross,
}

/// What a layer is given besides its input.
pub(super) struct Given<'a> {
    /// The encoder's result, where it is what is attended to.
    pub states: Option<&'a Tensor>,
    pub mask: Option<&'a Tensor>,
    /// Made by the stack's first layer.
    pub bias: Option<&'a Tensor>,
    pub cache: Option<&'a Cache>,
}

/// The result, the bias for the layers that follow, and the weights of eager attention.
pub(super) type Attended = (Tensor, Tensor, Option<Tensor>);

pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Biases of distances, of every head.
    distances: Option<Embedding>,
    side: Side,
    kind: Kind,
    /// Checkpointed layers ask for a gradient of the bias that is none.
    is_checkpointed: bool,
    heads: u64,
    width: u64,
    dropout: f64,
    lines: &'static Lines,
}

impl Attention {
    pub fn new(
        builder: &Builder,
        config: &architecture::T5,
        side: Side,
        is_first: bool,
        kind: Kind,
        is_checkpointed: bool,
        lines: &'static Lines,
    ) -> Attention {
        let (width, inner) = (config.width, config.heads * config.head_width);
        let has_distances = is_first && side != Side::Cross;
        Attention {
            query: builder.linear("q", width, inner, false),
            key: builder.linear("k", width, inner, false),
            value: builder.linear("v", width, inner, false),
            output: builder.linear("o", inner, width, false),
            distances: has_distances.then(|| builder.embedding(config.buckets, config.heads)),
            side,
            kind,
            is_checkpointed,
            heads: config.heads,
            width: config.head_width,
            dropout: config.dropout,
            lines,
        }
    }

    pub fn linears(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    pub fn forward(&self, hidden: &Tensor, given: &Given<'_>) -> Attended {
        let (context, lines) = (hidden.context(), self.lines);
        let (batch, length) = (hidden.size(0), hidden.size(1));
        let states = given.states.unwrap_or(hidden);
        let split_heads = |states: Tensor| {
            let length = states.size(1);
            let split = view::view(states, [batch, length, self.heads, self.width]);
            view::transpose(split, 1, 2)
        };
        context.at(&lines.query);
        let query = split_heads(self.query.forward(hidden));
        context.at(&lines.key);
        let mut key = split_heads(self.key.forward(states));
        context.at(&lines.value);
        let mut value = split_heads(self.value.forward(states));
        if let Some(cache) = given.cache {
            context.at(&lines.cache);
            let layers = match self.side {
                Side::Cross => &cache.cross,
                Side::Encoder | Side::Decoder => &cache.own,
            };
            [key, value] = Cache::update(layers, [&key, &value]);
        }
        let bias = match given.bias {
            Some(bias) => bias.clone(),
            None => self.bias(context, [length, key.size(2)], query.dtype()),
        };
        context.at(&lines.attend);
        let (mut out, weights) = match self.kind {
            Kind::Sdpa => (self.fused(&query, &key, &value, &bias), None),
            Kind::Eager => {
                let (out, weights) = self.eager(&query, &key, &value, &bias, given.mask);
                (out, Some(weights))
            }
        };
        context.at(&lines.attention_reshape);
        let joined = [batch, length, self.heads * self.width];
        out = view::contiguous(view::reshape(&out, joined));
        context.at(&lines.output);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, bias, weights)
    }

    fn bias(&self, context: &Context, [queries, keys]: [u64; 2], dtype: DType) -> Tensor {
        let lines = self.lines;
        let Some(distances) = &self.distances else {
            context.at(&lines.no_bias);
            let none = creation::filled(context, [1, self.heads, queries, keys], dtype);
            if self.is_checkpointed {
                none.set_requires_grad(true);
            }
            return none;
        };
        context.at(&lines.query_positions);
        let range = creation::arange(context, queries, DType::Int64);
        let query = pointwise::add_number(view::unsqueeze(range, 1));
        context.at(&lines.key_positions);
        let key = view::unsqueeze(creation::arange(context, keys, DType::Int64), 0);
        context.at(&lines.distances);
        let distance = pointwise::compare(&key, &query, DType::Int64);
        let bucket = self.bucket(&distance);
        context.at(&lines.bias);
        let values = distances.forward(&bucket);
        drop(query);
        drop(key);
        drop(distance);
        view::unsqueeze(view::permute(values, &[2, 0, 1]), 0)
    }

    /// `_relative_position_bucket`: small distances each have their own, larger ones share by their logarithms. An encoder tells
    /// what comes before from what comes after.
    fn bucket(&self, distance: &Tensor) -> Tensor {
        let (context, lines) = (distance.context(), self.lines);
        let long = DType::Int64;
        let (after, distance) = if self.side == Side::Encoder {
            context.at(&lines.bucket_side);
            let after = pointwise::apply(distance, "gt", DType::Bool);
            let after = pointwise::add_number(pointwise::mul_number(cast::to(after, long)));
            context.at(&lines.bucket_distance);
            (Some(after), pointwise::apply(distance, "abs", long))
        } else {
            context.at(&lines.bucket_past);
            let zeros = pointwise::apply(distance, "zeros_like", long);
            let least = pointwise::apply(distance, "minimum", long);
            drop(zeros);
            (None, pointwise::apply(least, "neg", long))
        };
        context.at(&lines.bucket_small);
        let is_small = pointwise::apply(&distance, "lt", DType::Bool);
        context.at(&lines.bucket_logarithm);
        let exact = pointwise::mul_number(cast::to(&distance, DType::Float32));
        let logarithm = pointwise::mul_number(pointwise::mul_number(pointwise::log(exact)));
        context.at(&lines.bucket_whole);
        let whole = cast::to(logarithm, long);
        context.at(&lines.bucket_large);
        let mut large = pointwise::add_number(whole);
        context.at(&lines.bucket_most);
        let most = pointwise::apply(&large, "full_like", long);
        context.at(&lines.bucket_bounded);
        let bounded = pointwise::apply(&large, "minimum", long);
        drop(most);
        large = bounded;
        context.at(&lines.bucket_chosen);
        let chosen = pointwise::apply(&distance, "where", long);
        let bucket = match after {
            // Added in place.
            Some(after) => {
                drop(chosen);
                after
            }
            None => pointwise::add_number(chosen),
        };
        drop(distance);
        drop(is_small);
        drop(large);
        bucket
    }

    /// Through PyTorch's fused function, whose mask the bias is. Later tokens are hidden by a mask that is made for it.
    fn fused(&self, query: &Tensor, key: &Tensor, value: &Tensor, bias: &Tensor) -> Tensor {
        let context = query.context();
        let bias = match self.side {
            Side::Decoder => {
                let queries = creation::arange(context, query.size(2), DType::Int64);
                let keys = creation::arange(context, key.size(2), DType::Int64);
                let (rows, columns) = (view::unsqueeze(queries, 1), view::unsqueeze(keys, 0));
                let earlier = pointwise::compare(rows, columns, DType::Bool);
                pointwise::where_else_number(&earlier, bias)
            }
            Side::Encoder | Side::Cross => bias.clone(),
        };
        let out = attention::biased_scaled_dot_product(query, key, value, &bias, self.dropout);
        view::contiguous(view::transpose(out, 1, 2))
    }

    /// Op by op; also the weights, which are returned.
    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        bias: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let (context, lines) = (query.context(), self.lines);
        context.at(&lines.eager_product);
        let mut weights = pointwise::mul_number(matmul::matmul(query, view::transpose(key, 2, 3)));
        context.at(&lines.eager_bias);
        weights = pointwise::add(&weights, bias);
        if let Some(mask) = mask {
            context.at(&lines.eager_mask);
            weights = pointwise::add(&weights, mask);
        }
        context.at(&lines.eager_softmax);
        weights = softmax::softmax(&weights, None);
        context.at(&lines.eager_dropout);
        weights = dropout::dropout(&weights, self.dropout);
        context.at(&lines.eager_mix);
        let mut out = matmul::matmul(&weights, value);
        context.at(&lines.eager_order);
        out = view::contiguous(view::transpose(&out, 1, 2));
        (out, weights)
    }
}
