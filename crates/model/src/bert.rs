//! A BERT encoder with frozen weights, and adapters on its linear layers where they are trained. Its
//! weights are declared once and may be applied to several chunks of texts.

use cinch_architecture::{Activation, Bert};
use cinch_graph::op::{
    ActivationKind, Attention, AttentionInputs, Domain, Joined, NormKind, Over, ReduceKind,
};
use cinch_graph::{DType, Graph, GraphError, Init, Shape, TensorId};

use crate::{Build, Embedded, ModelError, Pooling, Purpose, check_positions, input};

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
    adapters: Option<AdapterWeights>,
}

struct AdapterWeights {
    shape: LowRank,
    /// `A` of all of the layers, one below the other.
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
    /// Before the names of its nodes, with a dot, where it is one of several.
    prefix: String,
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
        adapters: Option<LowRank>,
        name: Option<&str>,
    ) -> Result<Self, GraphError> {
        let prefix = name.map_or_else(String::new, |name| format!("{name}."));
        let mut weights = Weights { g, build, adapters };
        let (d, inner) = (shape.width as usize, shape.inner as usize);
        let table = |of: &str| format!("{prefix}embeddings.{of}_embeddings.weight");
        let words = weights.matrix(&table("word"), [shape.vocabulary as usize, d]);
        let positions = weights.matrix(&table("position"), [shape.positions as usize, d]);
        let types = shape.token_types as usize;
        let mut token_type = weights.matrix(&table("token_type"), [types, d]);
        let norm = weights.norm(&format!("{prefix}embeddings.LayerNorm"), d);
        let mut layers = Vec::with_capacity(shape.layers as usize);
        for layer in 0..shape.layers {
            let layer = format!("{prefix}encoder.layer.{layer}");
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
        if name.is_some() {
            // Of a model's count, though an average over all tokens takes its place.
            weights.one_linear(format!("{prefix}pooler.dense"), d, d);
        }
        if types > 1 {
            let name = format!("{prefix}token_types");
            token_type = g.split(&name, Joined::Rows, token_type, &[1, types - 1])?[0];
        }
        let token_type = g.view(&format!("{prefix}token_type"), token_type, [d])?;
        Ok(Self {
            shape,
            build,
            prefix,
            words,
            positions,
            token_type,
            norm,
            layers,
        })
    }

    /// One vector for each text: [texts, width]. A text without tokens has zeros.
    pub fn pooled(
        &self,
        g: &mut Graph,
        texts: &Texts<'_>,
        pooling: Pooling,
    ) -> Result<TensorId, GraphError> {
        let rate = self.build.dropout(self.shape.hidden_dropout);
        let node = |part: &str| format!("{}{}.{part}", self.prefix, texts.name);
        let (tokens, tables) = (texts.tokens, (self.words, self.positions));
        let x = g.embedding(&node("words"), tokens, tables.0, Some(tables.1), None)?;
        let both = [x, self.token_type];
        let x = g.map(&node("embeddings"), &both, |v| &v[0] + &v[1])?;
        let (gamma, beta) = self.norm;
        let mut x = g.norm(
            &node("embeddings.norm"),
            x,
            self.norm_kind(),
            gamma,
            Some(beta),
        )?;
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
        // Of the first token alone, a text is as long as that.
        let counted = g.map_over(&node("lengths"), of_texts, &[texts.lengths], |v| {
            let length = v[0].max(0.0);
            match pooling {
                Pooling::Mean => length,
                Pooling::First => length.min(1.0),
            }
        })?;
        let shares = g.map_over(&node("shares"), domain, &[counted], |v| {
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
            .residual_norm(&node, (x, o), dropout, self.norm_kind(), gamma, Some(beta))?
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
        let (node, kind) = (name("norm"), self.norm_kind());
        let out = g.residual_norm(&node, (x, h), dropout, kind, gamma, Some(beta))?;
        Ok(out.normed)
    }

    fn norm_kind(&self) -> (NormKind, f64) {
        (NormKind::Layer, self.shape.norm_epsilon)
    }

    /// `x·Wᵀ + b`, with what the adapters add.
    fn apply(
        &self,
        g: &mut Graph,
        linear: &AdaptedLinear,
        texts: &Texts<'_>,
        x: TensorId,
    ) -> Result<TensorId, GraphError> {
        let name = format!("{}.{}", linear.name, texts.name);
        let Some(AdapterWeights { shape, down, up }) = &linear.adapters else {
            return g.linear(&name, x, linear.weight, Some(linear.bias));
        };
        let dropout = g.dropout(self.build.dropout(shape.dropout));
        let low = g.linear_of_dropped(&format!("{name}.lora_A"), x, *down, dropout)?;
        let mut y = g.linear(&name, x, linear.weight, Some(linear.bias))?;
        let mut column = 0;
        for (index, &up) in up.iter().enumerate() {
            let (to, from) = ((y, column), (low, index * shape.rank));
            y = g.linear_add(&format!("{name}.lora_B"), to, from, up, shape.scale)?;
            column += g.ty(up).rows();
        }
        Ok(y)
    }
}

/// Declares the weights of an encoder.
struct Weights<'a> {
    g: &'a mut Graph,
    build: &'a Build,
    adapters: Option<LowRank>,
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
        AdaptedLinear {
            name: name.to_owned(),
            weight,
            bias,
            adapters: self
                .adapters
                .map(|shape| self.adapters_of(shape, name, members, inputs)),
        }
    }

    fn adapters_of(
        &mut self,
        shape: LowRank,
        name: &str,
        members: &[(String, usize)],
        inputs: usize,
    ) -> AdapterWeights {
        let rank = shape.rank;
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
        AdapterWeights {
            shape,
            up: up.collect(),
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

/// An encoder alone, with its weights as they are: what it makes of texts of up to `length` tokens.
/// Its tensors have the names that transformers gives them.
pub fn sentence_encoder(
    shape: &Bert,
    pooling: Pooling,
    [texts, length]: [usize; 2],
    compute: DType,
) -> Result<Graph, ModelError> {
    if let Some(problem) = shape.beyond_the_engine() {
        return Err(ModelError::Beyond { problem });
    }
    check_positions(length, Some(shape.positions))?;
    let purpose = Purpose::Embed {
        what: Embedded::Points,
        frozen: true,
    };
    let build = Build::plain(texts, length, compute, purpose);
    let mut graph = Graph::new(compute);
    let encoder = Encoder::new(&mut graph, shape, &build, None, None)?;
    let [tokens, lengths] = text_inputs(&mut graph, input::SENTENCES, texts, length);
    let texts = Texts {
        name: input::SENTENCES,
        tokens,
        lengths,
    };
    graph.result = Some(encoder.pooled(&mut graph, &texts, pooling)?);
    Ok(graph)
}

/// The texts of a channel, as the loop fills them: tokens, and how many of them there are.
pub(crate) fn text_inputs(g: &mut Graph, name: &str, texts: usize, length: usize) -> [TensorId; 2] {
    let shape: Shape = [texts, length].into();
    let tokens = g.batch(&input::tokens_of(name), shape, DType::I32);
    let lengths = g.batch(&input::lengths_of(name), [texts], DType::I32);
    [tokens, lengths]
}
