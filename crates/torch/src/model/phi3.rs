//! Phi-3 and Phi-4 as transformers runs them.

use cinch_architecture as architecture;

use super::activation;
use super::attending::Attending;
use super::decoder::{Block, Decoder, RmsNorm, Surroundings, with_bias};
use super::decoder_lines::{Lines, lines};
use super::liger::Liger;
use super::mask::Attention;
use super::module::{Builder, Linear};
use super::replay::{Replay, Setup};
use super::rotary::rotate_half;
use crate::eager::line::at;
use crate::eager::op::{dropout, liger, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Line, Tensor};

const FILE: &str = "modeling_phi3.py";

struct Layer {
    index: u32,
    output: Linear,
    joined: Linear,
    gate_up: Linear,
    down: Linear,
    first_norm: RmsNorm,
    second_norm: RmsNorm,
    config: architecture::Phi3,
    attending: Attending,
    liger: Liger,
}

impl Layer {
    fn new(builder: &Builder, config: &architecture::Phi3, kind: Attention, index: u32) -> Layer {
        let decoder = &config.decoder;
        let (width, inner) = (decoder.width, decoder.inner);
        let queries = decoder.heads * decoder.head_width;
        let keys = decoder.key_heads * decoder.head_width;
        Layer {
            index,
            output: builder.linear("o_proj", queries, width, false),
            joined: builder.linear("qkv_proj", width, queries + 2 * keys, false),
            gate_up: builder.linear("gate_up_proj", width, 2 * inner, false),
            down: builder.linear("down_proj", inner, width, false),
            first_norm: RmsNorm::new(builder, width),
            second_norm: RmsNorm::new(builder, width),
            config: config.clone(),
            attending: Attending {
                kind,
                groups: decoder.heads / decoder.key_heads,
                dropout: decoder.attention_dropout,
                soft_cap: None,
                lines: &LINES,
            },
            liger: builder.liger,
        }
    }

    fn attend(&self, hidden: &Tensor, around: &Surroundings) -> (Tensor, Option<Tensor>) {
        let (batch, length) = (hidden.size(0), hidden.size(1));
        let config = &self.config.decoder;
        let (context, width) = (hidden.context(), config.head_width);
        context.at(&LINES.query);
        let joined = self.joined.forward(hidden);
        let part = |heads: u64| view::slice(&joined, 2, heads * width);
        let [mut query, mut key, mut value] =
            [config.heads, config.key_heads, config.key_heads].map(part);
        let split_heads = |states: &Tensor| {
            let heads = states.size(2) / width;
            view::transpose(view::view(states, [batch, length, heads, width]), 1, 2)
        };
        query = split_heads(&query);
        key = split_heads(&key);
        value = split_heads(&value);
        (query, key) = match self.liger.rope {
            true => liger::rotate(&query, &key, &around.cos, &around.sin),
            false => self.rotate(&query, &key, around),
        };
        context.at(&LINES.attend);
        let (mut out, weights) = self
            .attending
            .run(&query, &key, &value, around.mask.as_ref());
        context.at(&LINES.attention_reshape);
        out = view::contiguous(view::reshape(&out, [batch, length, config.heads * width]));
        context.at(&LINES.output);
        out = self.output.forward(&out);
        drop(joined);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }

    /// `apply_rotary_pos_emb`: a part of each head is turned, and joined with the rest, of which there may be nothing.
    fn rotate(&self, query: &Tensor, key: &Tensor, around: &Surroundings) -> (Tensor, Tensor) {
        let context = query.context();
        let cos = view::unsqueeze(&around.cos, 1);
        let sin = view::unsqueeze(&around.sin, 1);
        let (turned, last) = (self.config.rotary_width, 3);
        let parts = |states: &Tensor| view::cut_at(states, last, turned);
        let (query_turned, query_rest) = parts(query);
        let (key_turned, key_rest) = parts(key);
        let turn = |states: &Tensor, rest: &Tensor, line: &'static Line| {
            context.at(line);
            let straight = pointwise::mul(states, &cos);
            let half = rotate_half(states, &LINES);
            context.at(line);
            let sum = pointwise::add(straight, pointwise::mul(half, &sin));
            view::cat(vec![sum, rest.clone()], last)
        };
        let query = turn(&query_turned, &query_rest, &LINES.rotate_query);
        let key = turn(&key_turned, &key_rest, &LINES.rotate_key);
        (query, key)
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        let (context, inner) = (x.context(), self.config.decoder.inner);
        context.at(&LINES.feed);
        let both = self.gate_up.forward(x);
        let mut parts = view::split(&both, &[inner, inner], 2).into_iter();
        drop(both);
        let (Some(gate), Some(mut up)) = (parts.next(), parts.next()) else {
            unreachable!("a split in two has two parts")
        };
        at!(context, FILE, 62);
        up = match self.liger.gate {
            true => liger::gate_mul(&gate, &up),
            false => pointwise::mul(
                &up,
                activation::forward(self.config.decoder.activation, &gate),
            ),
        };
        at!(context, FILE, 64);
        let out = self.down.forward(&up);
        drop(up);
        drop(gate);
        out
    }
}

impl Block for Layer {
    const POSITION_IDS_FIRST: bool = true;

    fn forward(&self, x: &Tensor, around: &Surroundings) -> Tensor {
        let context = x.context().clone();
        let dropped = self.config.residual_dropout;
        let mut residual = x.clone();
        context.set_scope("attention", Some(self.index));
        let mut hidden = self.first_norm.forward(x, &LINES);
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, around);
        context.at(&LINES.attention_residual);
        hidden = pointwise::add(&residual, dropout::dropout(&hidden, dropped));
        residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        hidden = self.second_norm.forward(&hidden, &LINES);
        hidden = self.feed(&hidden);
        context.at(&LINES.feed_residual);
        hidden = pointwise::add(&residual, dropout::dropout(&hidden, dropped));
        drop(residual);
        drop(weights);
        hidden
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.output, &self.joined, &self.gate_up, &self.down]
    }

    fn sorted_by_name(&self) -> Vec<Tensor> {
        let mut sorted = vec![self.first_norm.weight.clone()];
        sorted.extend(with_bias(&self.down));
        sorted.extend(with_bias(&self.gate_up));
        sorted.push(self.second_norm.weight.clone());
        sorted.extend(with_bias(&self.output));
        sorted.extend(with_bias(&self.joined));
        sorted
    }
}

impl Replay for architecture::Phi3 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let (kind, rotary) = (setup.attention, self.rotary_width);
        let layer = |builder: &Builder, index| Layer::new(builder, self, kind, index);
        Box::new(Decoder::program_of(
            setup,
            &self.decoder,
            rotary,
            &LINES,
            layer,
        ))
    }

    fn can_be_quantised(&self) -> bool {
        true
    }

    fn liger(&self, wanted: Liger) -> Liger {
        wanted
    }
}

static LINES: Lines = lines! { "modeling_phi3.py":
    embed 385,
    position_ids 392,
    mask 396,
    sliding_mask 396,
    rotary_frequencies 111,
    rotary_positions 113,
    rotary_angles 118,
    rotary_doubled 119,
    rotary_cos 120,
    rotary_sin 121,
    rotary_cast 123,
    norm_raise 278,
    norm_variance 279,
    norm_scale 280,
    norm_weight 281,
    query 229,
    key 236,
    value 237,
    rotate_query 195,
    half_first 128,
    half_second 129,
    half_joined 130,
    rotate_key 196,
    attend 249,
    eager_repeat 142,
    eager_product 158,
    eager_mask 160,
    eager_softmax 162,
    eager_dropout 163,
    eager_mix 164,
    eager_order 165,
    attention_reshape 261,
    output 262,
    attention_residual 321,
    feed 59,
    feed_residual 326,
    logits 484,
    loss 488,
};
