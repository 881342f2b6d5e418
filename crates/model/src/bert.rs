//! A BERT encoder with frozen weights and trained adapters on its linear layers. Its weights are
//! declared once and may be applied to several chunks of texts.

use cinch_architecture::{Activation, Bert};
use cinch_graph::op::{
    ActivationKind, Attention, AttentionInputs, Domain, Joined, NormKind, Over, ReduceKind,
};
use cinch_graph::{DType, Graph, GraphError, Init, Shape, TensorId};

use crate::Build;

const NORM: (NormKind, f64) = (NormKind::Layer, 1e-12);
const INITIAL_STD: f64 = 0.02;

/// Adapters of low rank on every linear layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowRank {
    pub rank: usize,
    pub scale: f64,
    pub dropout: f64,
}

/// Linear layers that read the same tensor, as one product, and their adapters.
struct AdaptedLinear {
    name: String,
    weight: TensorId,
    bias: TensorId,
    /// `A` of all of them, one below the other.
    down: TensorId,
    /// `B` of each.
    up: Vec<TensorId>,
}

struct Layer {
    name: String,
    projection: AdaptedLinear,
    output: AdaptedLinear,
    attention_norm: (TensorId, TensorId),
    widening: AdaptedLinear,
    narrowing: AdaptedLinear,
    norm: (TensorId, TensorId),
}

/// The weights of an encoder in a graph.
pub(crate) struct Encoder<'a> {
    shape: &'a Bert,
    build: &'a Build,
    adapters: LowRank,
    name: String,
    words: TensorId,
    positions: TensorId,
    /// What the first of the token types adds, the only one in a text of one piece.
    token_type: TensorId,
    norm: (TensorId, TensorId),
    layers: Vec<Layer>,
}

/// A chunk of texts of one channel.
pub(crate) struct Texts<'a> {
    /// Tells the chunk's nodes from those of others.
    pub name: &'a str,
    /// i32 [texts, length].
    pub tokens: TensorId,
    /// i32 [texts].
    pub lengths: TensorId,
}

impl<'a> Encoder<'a> {
    pub fn new(
        g: &mut Graph,
        shape: &'a Bert,
        build: &'a Build,
        adapters: LowRank,
        name: &str,
    ) -> Result<Self, GraphError> {
        let mut weights = Weights { g, build, adapters };
        let (d, inner) = (shape.width as usize, shape.inner as usize);
        let table = |of: &str| format!("{name}.embeddings.{of}_embeddings.weight");
        let words = weights.matrix(&table("word"), [shape.vocabulary as usize, d]);
        let positions = weights.matrix(&table("position"), [shape.positions as usize, d]);
        let types = shape.token_types as usize;
        let mut token_type = weights.matrix(&table("token_type"), [types, d]);
        let norm = weights.norm(&format!("{name}.embeddings.LayerNorm"), d);
        let mut layers = Vec::with_capacity(shape.layers as usize);
        for layer in 0..shape.layers {
            let layer = format!("{name}.encoder.layer.{layer}");
            let part = |name: &str| format!("{layer}.{name}");
            let sources = ["query", "key", "value"].map(|of| part(&format!("attention.self.{of}")));
            let projected = sources.map(|source| (source, d));
            layers.push(Layer {
                projection: weights.linear(&part("attention.self.qkv"), &projected, d),
                output: weights.one_linear(part("attention.output.dense"), d, d),
                attention_norm: weights.norm(&part("attention.output.LayerNorm"), d),
                widening: weights.one_linear(part("intermediate.dense"), inner, d),
                narrowing: weights.one_linear(part("output.dense"), d, inner),
                norm: weights.norm(&part("output.LayerNorm"), d),
                name: layer,
            });
        }
        // Part of the files and of the count, though an average over all tokens takes its place.
        weights.one_linear(format!("{name}.pooler.dense"), d, d);
        if types > 1 {
            let name = format!("{name}.token_types");
            token_type = g.split(&name, Joined::Rows, token_type, &[1, types - 1])?[0];
        }
        let token_type = g.view(&format!("{name}.token_type"), token_type, [d])?;
        Ok(Self {
            shape,
            build,
            adapters,
            name: name.to_owned(),
            words,
            positions,
            token_type,
            norm,
            layers,
        })
    }

    /// The average of the last layer's output over the tokens of each text: [texts, width]. A text
    /// without tokens has zeros.
    pub fn pooled(&self, g: &mut Graph, texts: &Texts<'_>) -> Result<TensorId, GraphError> {
        let rate = self.build.dropout(self.shape.hidden_dropout);
        let node = |part: &str| format!("{}.{}.{part}", self.name, texts.name);
        let (tokens, tables) = (texts.tokens, (self.words, self.positions));
        let x = g.embedding(&node("words"), tokens, tables.0, Some(tables.1), None)?;
        let both = [x, self.token_type];
        let x = g.map(&node("embeddings"), &both, |v| &v[0] + &v[1])?;
        let (gamma, beta) = self.norm;
        let mut x = g.norm(&node("embeddings.norm"), x, NORM, gamma, Some(beta))?;
        if let Some(dropout) = g.dropout(rate) {
            x = g.map(&node("embeddings.dropout"), &[x], |v| {
                v[0].dropout(Some(dropout))
            })?;
        }
        for layer in &self.layers {
            x = self.layer(g, layer, texts, x)?;
        }
        let dims = g.ty(texts.tokens).shape;
        let domain = Domain {
            shape: dims,
            dtype: g.compute.accumulator(),
        };
        // A length for each text and a share for each token, said to be that: where there are as
        // many texts as tokens, they would be read by column.
        let of_texts = Domain {
            shape: [dims.rows(), 1].into(),
            ..domain
        };
        let lengths = g.map_over(&node("lengths"), of_texts, &[texts.lengths], |v| {
            v[0].max(0.0)
        })?;
        let shares = g.map_over(&node("shares"), domain, &[lengths], |v| {
            v[0].column().where_less(&v[0], 1.0 / v[0].max(1.0), 0.0)
        })?;
        let by_token = [dims.rows(), dims.width(), 1];
        let shares = g.view(&node("shares.tokens"), shares, by_token)?;
        let sum = (ReduceKind::Sum, Over::Sequence, g.compute);
        g.reduce(&node("pooled"), sum, &[x, shares], |v| &v[0] * &v[1])
    }

    fn layer(
        &self,
        g: &mut Graph,
        layer: &Layer,
        texts: &Texts<'_>,
        x: TensorId,
    ) -> Result<TensorId, GraphError> {
        let shape = self.shape;
        let name = |part: &str| format!("{}.{}.{part}", layer.name, texts.name);
        let rate = self.build.dropout(shape.hidden_dropout);
        let (heads, width) = (shape.heads as usize, shape.width as usize);
        let head_dim = width.checked_div(heads).unwrap_or(0);
        let qkv = self.apply(g, &layer.projection, texts, x)?;
        let op = Attention {
            inputs: AttentionInputs::Packed,
            heads,
            kv_heads: heads,
            head_dim,
            causal: false,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout: {
                let rate = self.build.dropout(shape.attention_dropout);
                g.dropout(rate)
            },
            padding: true,
            window: None,
            documents: false,
            selection: false,
        };
        let o = g.attend(&name("attention"), op, &[qkv], Some(texts.lengths), None)?;
        let o = self.apply(g, &layer.output, texts, o)?;
        let dropout = g.dropout(rate);
        let (gamma, beta) = layer.attention_norm;
        let node = name("attention.norm");
        let x = g
            .residual_norm(&node, (x, o), dropout, NORM, gamma, Some(beta))?
            .normed;
        let h = self.apply(g, &layer.widening, texts, x)?;
        let kind = match shape.activation {
            Activation::Relu => ActivationKind::Relu,
            Activation::Silu => ActivationKind::Silu,
            Activation::GeluNew => ActivationKind::GeluTanh,
            // The description says of others that they are not there.
            _ => ActivationKind::Gelu,
        };
        let h = g.activation(&name("activation"), h, kind)?;
        let h = self.apply(g, &layer.narrowing, texts, h)?;
        let dropout = g.dropout(rate);
        let (gamma, beta) = layer.norm;
        let out = g.residual_norm(&name("norm"), (x, h), dropout, NORM, gamma, Some(beta))?;
        Ok(out.normed)
    }

    /// `x·Wᵀ + b`, with what the adapters add.
    fn apply(
        &self,
        g: &mut Graph,
        linear: &AdaptedLinear,
        texts: &Texts<'_>,
        x: TensorId,
    ) -> Result<TensorId, GraphError> {
        let LowRank {
            rank,
            scale,
            dropout,
        } = self.adapters;
        let name = format!("{}.{}", linear.name, texts.name);
        let dropout = g.dropout(self.build.dropout(dropout));
        let low = g.linear_of_dropped(&format!("{name}.lora_A"), x, linear.down, dropout)?;
        let mut y = g.linear(&name, x, linear.weight, Some(linear.bias))?;
        let mut column = 0;
        for (index, &up) in linear.up.iter().enumerate() {
            let (to, from) = ((y, column), (low, index * rank));
            y = g.linear_add(&format!("{name}.lora_B"), to, from, up, scale)?;
            column += g.ty(up).rows();
        }
        Ok(y)
    }
}

/// Declares the weights of an encoder.
struct Weights<'a> {
    g: &'a mut Graph,
    build: &'a Build,
    adapters: LowRank,
}

impl Weights<'_> {
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> TensorId {
        let init = Init::Normal { std: INITIAL_STD };
        self.g.frozen_weight(name, shape, init)
    }

    fn norm(&mut self, name: &str, width: usize) -> (TensorId, TensorId) {
        let mut small = |kind: &str, init| {
            let name = format!("{name}.{kind}");
            self.g.frozen_small_weight(&name, [width], init)
        };
        (small("weight", Init::Ones), small("bias", Init::Zeros))
    }

    fn one_linear(&mut self, name: String, outputs: usize, inputs: usize) -> AdaptedLinear {
        let members = [(name.clone(), outputs)];
        self.linear(&name, &members, inputs)
    }

    /// The members' weights one below the other, and their adapters.
    fn linear(&mut self, name: &str, members: &[(String, usize)], inputs: usize) -> AdaptedLinear {
        let parts = |kind: &str| {
            let part = |(name, rows): &(String, usize)| (format!("{name}.{kind}"), *rows);
            members.iter().map(part).collect::<Vec<_>>()
        };
        let rows = members.iter().map(|(_, rows)| rows).sum();
        let weight = self.matrix(&format!("{name}.weight"), [rows, inputs]);
        self.g.name_parts(parts("weight"));
        let bias = format!("{name}.bias");
        let bias = self.g.frozen_small_weight(&bias, [rows], Init::Zeros);
        self.g.name_parts(parts("bias"));
        let rank = self.adapters.rank;
        // What peft starts with: uniform over ±1/√K.
        let bound = 1.0 / (inputs as f64).sqrt();
        let down = self.adapter(
            &format!("{name}.lora_A.weight"),
            [members.len() * rank, inputs],
            Init::Uniform { bound },
        );
        let part = |(name, _): &(String, usize)| (format!("{name}.lora_A.weight"), rank);
        self.g.name_parts(members.iter().map(part));
        let up = members.iter().map(|(name, rows)| {
            let name = format!("{name}.lora_B.weight");
            self.adapter(&name, [*rows, rank], Init::Zeros)
        });
        AdaptedLinear {
            up: up.collect(),
            name: name.to_owned(),
            weight,
            bias,
            down,
        }
    }

    fn adapter(&mut self, name: &str, shape: [usize; 2], init: Init) -> TensorId {
        match self.build.trains() {
            true => self.g.weight(name, shape, init),
            false => self.g.frozen_weight(name, shape, init),
        }
    }
}

/// The texts of a channel, as the loop fills them: tokens, and how many of them there are.
pub(crate) fn text_inputs(g: &mut Graph, name: &str, texts: usize, length: usize) -> [TensorId; 2] {
    let shape: Shape = [texts, length].into();
    let tokens = g.batch(&crate::input::tokens_of(name), shape, DType::I32);
    let lengths = g.batch(&crate::input::lengths_of(name), [texts], DType::I32);
    [tokens, lengths]
}
