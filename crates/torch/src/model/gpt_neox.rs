//! GPT-NeoX and Pythia as transformers runs them.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::activation;
use super::causal::{CausalLanguageModel, CausalModel};
use super::decoder_lines::{Lines, lines};
use super::head_attention::{self, HeadAttention};
use super::mask::{self, Attention};
use super::module::{Builder, Embedding, LayerNorm, Linear, position_ids};
use super::replay::{Replay, Setup};
use super::rotary::{Rotary, rotate_half};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{dropout, matmul, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Context, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_gpt_neox.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static ATTENTION: head_attention::Lines = head_attention::Lines {
    attend: line(221),
    product: line(164),
    mask: line(167),
    softmax: line(169),
    dropout: line(171),
    mix: line(172),
    order: line(175),
};

/// What the layers are given besides their input. Freed in this order: a Python tuple goes from its end.
#[derive(Clone)]
struct Surroundings {
    mask: Option<Tensor>,
    _position_ids: Tensor,
    sin: Tensor,
    cos: Tensor,
}

struct Layer {
    index: u32,
    first_norm: LayerNorm,
    second_norm: LayerNorm,
    joined: Linear,
    output: Linear,
    expand: Linear,
    contract: Linear,
    config: architecture::GptNeoX,
    attention: HeadAttention,
}

impl Layer {
    fn new(
        builder: &Builder,
        config: &architecture::GptNeoX,
        kind: Attention,
        index: u32,
    ) -> Layer {
        let (width, inner) = (config.width, config.inner);
        let bias = config.attention_bias;
        Layer {
            index,
            first_norm: builder.layer_norm(width),
            second_norm: builder.layer_norm(width),
            joined: builder.linear("query_key_value", width, 3 * width, bias),
            output: builder.linear("dense", width, width, bias),
            expand: builder.linear("dense_h_to_4h", width, inner, true),
            contract: builder.linear("dense_4h_to_h", inner, width, true),
            config: config.clone(),
            attention: HeadAttention {
                kind,
                is_causal: true,
                dropout: config.attention_dropout,
                raises_softmax: true,
                lines: &ATTENTION,
            },
        }
    }

    fn linears(&self) -> [&Linear; 4] {
        [&self.joined, &self.output, &self.expand, &self.contract]
    }

    fn forward(&self, x: &Tensor, around: &Surroundings) -> Tensor {
        let (context, dropped) = (x.context(), self.config.hidden_dropout);
        context.set_scope("attention", Some(self.index));
        at!(context, FILE, 261);
        let normed = self.first_norm.forward(x);
        // The layer holds the weights of eager attention until it returns.
        let (mut attended, weights) = self.attend(&normed, around);
        drop(normed);
        at!(context, FILE, 269);
        attended = dropout::dropout(&attended, dropped);
        let out;
        let mut fed;
        if self.config.parallel {
            context.set_scope("feed-forward", Some(self.index));
            at!(context, FILE, 272);
            let normed = self.second_norm.forward(x);
            fed = self.feed(&normed);
            drop(normed);
            at!(context, FILE, 273);
            fed = dropout::dropout(&fed, dropped);
            at!(context, FILE, 274);
            out = pointwise::add(pointwise::add(&fed, &attended), x);
        } else {
            at!(context, FILE, 276);
            attended = pointwise::add(&attended, x);
            context.set_scope("feed-forward", Some(self.index));
            at!(context, FILE, 277);
            let normed = self.second_norm.forward(&attended);
            fed = self.feed(&normed);
            drop(normed);
            at!(context, FILE, 278);
            fed = dropout::dropout(&fed, dropped);
            at!(context, FILE, 279);
            out = pointwise::add(&fed, &attended);
        }
        drop(attended);
        drop(weights);
        drop(fed);
        out
    }

    fn attend(&self, hidden: &Tensor, around: &Surroundings) -> (Tensor, Option<Tensor>) {
        let (batch, length, heads) = (hidden.size(0), hidden.size(1), self.config.heads);
        let (context, width) = (hidden.context(), self.config.width / heads);
        at!(context, FILE, 206);
        let joined = self.joined.forward(hidden);
        let joined = view::view(joined, [batch, length, heads, 3 * width]);
        let joined = view::transpose(joined, 1, 2);
        let mut parts = view::split(&joined, &[width; 3], 3).into_iter();
        let (Some(mut query), Some(mut key), Some(value)) =
            (parts.next(), parts.next(), parts.next())
        else {
            unreachable!("a split in three has three parts")
        };
        (query, key) = self.rotate(&query, &key, around);
        let (mut out, weights) = self
            .attention
            .run(&query, &key, &value, around.mask.as_ref());
        at!(context, FILE, 233);
        out = view::contiguous(view::reshape(&out, [batch, length, heads * width]));
        at!(context, FILE, 234);
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
        let last = 3;
        let parts = |states: &Tensor| view::cut_at(states, last, self.config.rotary_width);
        let (query_turned, query_rest) = parts(query);
        let (key_turned, key_rest) = parts(key);
        let turn = |states: &Tensor, line: &'static Line| {
            context.at(line);
            let straight = pointwise::mul(states, &cos);
            let half = rotate_half(states, &LINES);
            context.at(line);
            pointwise::add(straight, pointwise::mul(half, &sin))
        };
        let mut query = turn(&query_turned, &LINES.rotate_query);
        let mut key = turn(&key_turned, &LINES.rotate_key);
        at!(context, FILE, 149);
        query = view::cat(vec![query.clone(), query_rest.clone()], last);
        at!(context, FILE, 150);
        key = view::cat(vec![key.clone(), key_rest.clone()], last);
        (query, key)
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        let context = x.context();
        at!(context, FILE, 46);
        let mut hidden = self.expand.forward(x);
        at!(context, FILE, 47);
        hidden = activation::forward(self.config.activation, &hidden);
        at!(context, FILE, 48);
        hidden = self.contract.forward(&hidden);
        hidden
    }
}

/// The causal language model.
struct GptNeoX {
    context: Context,
    tokens: Embedding,
    layers: Vec<Rc<Layer>>,
    norm: LayerNorm,
    rotary: Rotary,
    head: Tensor,
    config: architecture::GptNeoX,
    kind: Attention,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    embeddings_require_grad: bool,
}

impl GptNeoX {
    fn new(setup: &Setup, builder: &Builder, config: &architecture::GptNeoX) -> GptNeoX {
        let context = builder.context.clone();
        let tokens = builder.embedding(config.vocabulary, config.width);
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, config, setup.attention, index as u32)))
            .collect();
        let norm = builder.layer_norm(config.width);
        let rotary = context.no_grad(|| Rotary::new(&context, config.rotary_width));
        let head = builder.tied_head(&tokens.table, config.tied);
        let rotary = rotary.cast(builder.dtype);
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        GptNeoX {
            tokens,
            layers,
            norm,
            rotary,
            head,
            config: config.clone(),
            kind: setup.attention,
            checkpoints: setup.checkpoints,
            embeddings_require_grad: setup.checkpoints.is_on() && builder.has_adapters(),
            context,
        }
    }
}

impl CausalModel for GptNeoX {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.config.vocabulary
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        context.at(&LINES.embed);
        let embeddings = self.tokens.forward(ids);
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        context.at(&LINES.position_ids);
        let position_ids = position_ids(context, ids.size(1));
        context.at(&LINES.mask);
        let mask = mask::causal(&embeddings, &position_ids, self.kind);
        at!(context, FILE, 355);
        let mut hidden = dropout::dropout(&embeddings, self.config.hidden_dropout);
        let (cos, sin) = self.rotary.forward(hidden.dtype(), &position_ids, &LINES);
        for layer in &self.layers {
            let around = Surroundings {
                mask: mask.clone(),
                _position_ids: position_ids.clone(),
                sin: sin.clone(),
                cos: cos.clone(),
            };
            let layer = layer.clone();
            hidden = self
                .checkpoints
                .run(context, &hidden, move |x| layer.forward(x, &around));
        }
        context.set_scope("head", None);
        at!(context, FILE, 368);
        hidden = self.norm.forward(&hidden);
        drop(position_ids);
        drop(embeddings);
        drop(mask);
        drop(sin);
        drop(cos);
        hidden
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.context.at(&LINES.logits);
        matmul::linear(view::alias(hidden), &self.head, None)
    }

    fn loss_line(&self) -> &'static Line {
        &LINES.loss
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }
}

impl Replay for architecture::GptNeoX {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let model = GptNeoX::new(setup, builder, self);
        Box::new(CausalLanguageModel::new(model, builder, setup.batch))
    }
}

/// The norms are one op each, and keys are not repeated: those names have the statement in which the op stands.
static LINES: Lines = lines! { "modeling_gpt_neox.py":
    embed 337,
    position_ids 344,
    mask 347,
    sliding_mask 347,
    rotary_frequencies 96,
    rotary_positions 98,
    rotary_angles 103,
    rotary_doubled 104,
    rotary_cos 105,
    rotary_sin 106,
    rotary_cast 108,
    norm_raise 261,
    norm_variance 261,
    norm_scale 261,
    norm_weight 261,
    query 206,
    key 206,
    value 206,
    rotate_query 145,
    half_first 113,
    half_second 114,
    half_joined 115,
    rotate_key 146,
    attend 221,
    eager_repeat 164,
    eager_product 164,
    eager_mask 167,
    eager_softmax 169,
    eager_dropout 171,
    eager_mix 172,
    eager_order 175,
    attention_reshape 233,
    output 234,
    attention_residual 274,
    feed 46,
    feed_residual 274,
    logits 456,
    loss 460,
};
