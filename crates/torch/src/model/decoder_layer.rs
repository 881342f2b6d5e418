//! A layer of the gated decoder.

use cinch_architecture::{self as architecture, Activation};

use super::activation;
use super::attending::Attending;
use super::decoder::{Block, RmsNorm, Surroundings, with_bias};
use super::decoder_lines::Lines;
use super::liger::Liger;
use super::mask::Attention;
use super::module::{Builder, Linear};
use super::rotary::rotate;
use crate::eager::Tensor;
use crate::eager::op::{liger, pointwise, view};

pub(super) struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Of query and key.
    head_norms: Option<[RmsNorm; 2]>,
    gate: Linear,
    up: Linear,
    down: Linear,
    first_norm: RmsNorm,
    second_norm: RmsNorm,
    config: architecture::Decoder,
    lines: &'static Lines,
    attending: Attending,
    liger: Liger,
}

impl Layer {
    pub fn new(
        builder: &Builder,
        config: &architecture::Decoder,
        lines: &'static Lines,
        kind: Attention,
        index: u32,
    ) -> Layer {
        let (width, inner) = (config.width, config.inner);
        let (queries, keys) = (
            config.heads * config.head_width,
            config.key_heads * config.head_width,
        );
        Layer {
            index,
            query: builder.linear("q_proj", width, queries, config.attention_bias),
            key: builder.linear("k_proj", width, keys, config.attention_bias),
            value: builder.linear("v_proj", width, keys, config.attention_bias),
            output: builder.linear("o_proj", queries, width, config.output_bias),
            head_norms: config
                .head_norms
                .then(|| [0; 2].map(|_| RmsNorm::new(builder, config.head_width))),
            gate: builder.linear("gate_proj", width, inner, config.feed_bias),
            up: builder.linear("up_proj", width, inner, config.feed_bias),
            down: builder.linear("down_proj", inner, width, config.feed_bias),
            first_norm: RmsNorm::new(builder, width),
            second_norm: RmsNorm::new(builder, width),
            config: config.clone(),
            lines,
            attending: Attending {
                kind,
                groups: config.heads / config.key_heads,
                dropout: config.attention_dropout,
                soft_cap: None,
                lines,
            },
            liger: builder.liger,
        }
    }
}

impl Block for Layer {
    fn linears(&self) -> Vec<&Linear> {
        vec![
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }

    /// Its parameters in the order of their names, which is that of a file.
    fn sorted_by_name(&self) -> Vec<Tensor> {
        let mut sorted = vec![self.first_norm.weight.clone()];
        for linear in [&self.down, &self.gate, &self.up] {
            sorted.extend(with_bias(linear));
        }
        sorted.push(self.second_norm.weight.clone());
        let norms = self.head_norms.as_ref();
        sorted.extend(norms.map(|[_, key]| key.weight.clone()));
        sorted.extend(with_bias(&self.key));
        sorted.extend(with_bias(&self.output));
        sorted.extend(norms.map(|[query, _]| query.weight.clone()));
        sorted.extend(with_bias(&self.query));
        sorted.extend(with_bias(&self.value));
        sorted
    }

    fn forward(&self, x: &Tensor, around: &Surroundings) -> Tensor {
        let (context, lines) = (x.context().clone(), self.lines);
        let mut residual = x.clone();
        context.set_scope("attention", Some(self.index));
        let mut hidden = self.first_norm.forward(x, lines);
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, around);
        context.at(&lines.attention_residual);
        hidden = pointwise::add(&residual, &hidden);
        residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        hidden = self.second_norm.forward(&hidden, lines);
        hidden = self.feed(&hidden);
        context.at(&lines.feed_residual);
        hidden = pointwise::add(&residual, &hidden);
        drop(residual);
        drop(weights);
        hidden
    }
}

impl Layer {
    fn attend(&self, hidden: &Tensor, around: &Surroundings) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.head_width);
        let (context, lines) = (hidden.context(), self.lines);
        let [query_norm, key_norm] = match &self.head_norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let split_heads = |states: Tensor, heads: u64, norm: Option<&RmsNorm>| {
            let mut states = view::view(states, [batch, length, heads, width]);
            if let Some(norm) = norm {
                states = norm.forward(&states, lines);
            }
            view::transpose(states, 1, 2)
        };
        let (heads, key_heads) = (self.config.heads, self.config.key_heads);
        context.at(&lines.query);
        let mut query = split_heads(self.query.forward(hidden), heads, query_norm);
        context.at(&lines.key);
        let mut key = split_heads(self.key.forward(hidden), key_heads, key_norm);
        context.at(&lines.value);
        let value = split_heads(self.value.forward(hidden), key_heads, None);
        let rotated = match self.liger.rope {
            true => liger::rotate(&query, &key, &around.cos, &around.sin),
            false => rotate(&query, &key, &around.cos, &around.sin, lines),
        };
        (query, key) = rotated;
        context.at(&lines.attend);
        let (mut out, weights) = self
            .attending
            .run(&query, &key, &value, around.mask.as_ref());
        context.at(&lines.attention_reshape);
        out = view::contiguous(view::reshape(
            &out,
            [batch, length, self.config.heads * width],
        ));
        context.at(&lines.output);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        x.context().at(&self.lines.feed);
        let layers = [&self.gate, &self.up, &self.down];
        match self.liger.gate {
            true => liger_feed(x, layers),
            false => gated_feed(x, layers, self.config.activation),
        }
    }
}

/// `down(act(gate(x)) * up(x))`, one statement.
pub(super) fn gated_feed(x: &Tensor, layers: [&Linear; 3], activation: Activation) -> Tensor {
    let [gate, up, down] = layers;
    let gated = gate.forward(x);
    let active = activation::forward(activation, &gated);
    drop(gated);
    let product = pointwise::mul(active, up.forward(x));
    let out = down.forward(&product);
    drop(product);
    out
}

/// The same by Liger's kernel, which has both of its inputs at once.
pub(super) fn liger_feed(x: &Tensor, layers: [&Linear; 3]) -> Tensor {
    let [gate, up, down] = layers;
    let gated = gate.forward(x);
    let raised = up.forward(x);
    let product = liger::gate_mul(&gated, &raised);
    drop(gated);
    drop(raised);
    let out = down.forward(&product);
    drop(product);
    out
}
