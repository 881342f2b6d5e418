//! T5 and mT5 as transformers runs them.

use std::rc::Rc;

use cinch_architecture::{self as architecture, T5Variant};

use super::activation;
use super::mask::{self, Attention as Kind};
use super::module::{Builder, Linear};
use super::replay::{Replay, Setup};
use super::t5_attention::{Attended, Attention, Cache, Given, Side};
use super::t5_lines::{self, Lines};
use super::workload::Workload;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::op::{cast, creation, dropout, embedding, loss, matmul, pointwise, reduce, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

/// `T5LayerNorm`: an RMS norm whose input is raised for the variance alone.
struct Norm {
    weight: Tensor,
    lines: &'static Lines,
}

impl Norm {
    fn new(builder: &Builder, width: u64, lines: &'static Lines) -> Norm {
        let weight = builder.parameter([width]);
        Norm { weight, lines }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let (context, lines) = (x.context(), self.lines);
        let last = x.dim() - 1;
        context.at(&lines.norm_variance);
        let raised = cast::to(x, DType::Float32);
        let variance = reduce::mean(pointwise::pow_number(raised), &[last], true);
        context.at(&lines.norm_scale);
        let mut hidden = pointwise::mul(x, pointwise::rsqrt(pointwise::add_number(&variance)));
        if self.weight.dtype().is_half() {
            context.at(&lines.norm_cast);
            hidden = cast::to(&hidden, self.weight.dtype());
        }
        context.at(&lines.norm_weight);
        let out = pointwise::mul(&self.weight, &hidden);
        drop(hidden);
        drop(variance);
        out
    }
}

/// Attention with the norm before it and the residual after it.
struct AttentionLayer {
    attention: Attention,
    norm: Norm,
    dropout: f64,
}

impl AttentionLayer {
    fn forward(&self, hidden: &Tensor, given: &Given<'_>) -> Attended {
        let (context, lines) = (hidden.context(), self.norm.lines);
        let normed = self.norm.forward(hidden);
        let (mut out, bias, weights) = self.attention.forward(&normed, given);
        if given.states.is_none() {
            context.at(&lines.attention_residual);
            out = pointwise::add(hidden, dropout::dropout(&out, self.dropout));
            drop(normed);
            return (out, bias, weights);
        }
        context.at(&lines.cross_residual);
        let result = pointwise::add(hidden, dropout::dropout(&out, self.dropout));
        drop(normed);
        drop(out);
        (result, bias, weights)
    }
}

/// The feed-forward layer, with a gate or without.
struct FeedLayer {
    gate: Option<Linear>,
    into: Linear,
    out_of: Linear,
    norm: Norm,
    config: architecture::T5,
}

impl FeedLayer {
    fn new(builder: &Builder, config: &architecture::T5, lines: &'static Lines) -> FeedLayer {
        let (width, inner) = (config.width, config.inner);
        let gate = config
            .gated
            .then(|| builder.linear("wi_0", width, inner, false));
        let name = if config.gated { "wi_1" } else { "wi" };
        FeedLayer {
            gate,
            into: builder.linear(name, width, inner, false),
            out_of: builder.linear("wo", inner, width, false),
            norm: Norm::new(builder, width, lines),
            config: config.clone(),
        }
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.gate.iter().chain([&self.into, &self.out_of])
    }

    fn forward(&self, hidden: &Tensor) -> Tensor {
        let (context, lines) = (hidden.context(), self.norm.lines);
        let mut fed = self.norm.forward(hidden);
        fed = match &self.gate {
            Some(gate) => self.feed_gated(gate, &fed),
            None => self.feed(&fed),
        };
        context.at(&lines.feed_residual);
        let out = pointwise::add(hidden, dropout::dropout(&fed, self.config.dropout));
        drop(fed);
        out
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        let (context, lines) = (x.context(), self.norm.lines);
        context.at(&lines.feed_in);
        let mut hidden = self.into.forward(x);
        context.at(&lines.feed_activation);
        hidden = activation::forward(self.config.activation, &hidden);
        context.at(&lines.feed_dropout);
        hidden = dropout::dropout(&hidden, self.config.dropout);
        // Under autocast it is raised to the weight's type, and lowered again by the product.
        context.at(&lines.feed_cast);
        hidden = cast::to(&hidden, self.out_of.weight().dtype());
        context.at(&lines.feed_out);
        hidden = self.out_of.forward(&hidden);
        hidden
    }

    fn feed_gated(&self, gate: &Linear, x: &Tensor) -> Tensor {
        let (context, lines) = (x.context(), self.norm.lines);
        context.at(&lines.gate);
        let gated = gate.forward(x);
        let active = activation::forward(self.config.activation, &gated);
        drop(gated);
        context.at(&lines.gated_in);
        let linear = self.into.forward(x);
        context.at(&lines.gated_product);
        let mut hidden = pointwise::mul(&active, &linear);
        context.at(&lines.gated_dropout);
        hidden = dropout::dropout(&hidden, self.config.dropout);
        context.at(&lines.gated_cast);
        hidden = cast::to(&hidden, self.out_of.weight().dtype());
        context.at(&lines.gated_out);
        hidden = self.out_of.forward(&hidden);
        drop(active);
        drop(linear);
        hidden
    }
}

struct Block {
    index: u32,
    own: AttentionLayer,
    cross: Option<AttentionLayer>,
    feed: FeedLayer,
}

/// What a block is given besides its input, as Python's partial holds it.
#[derive(Clone)]
struct Surroundings {
    mask: Option<Tensor>,
    bias: Option<Tensor>,
    encoded: Option<Tensor>,
    cross_bias: Option<Tensor>,
    cache: Option<Rc<Cache>>,
}

impl Block {
    fn new(
        setup: &Setup,
        builder: &Builder,
        config: &architecture::T5,
        side: Side,
        lines: &'static Lines,
        index: u64,
    ) -> Block {
        let checkpointed = setup.checkpoints.is_on();
        let attention = |side| AttentionLayer {
            attention: Attention::new(
                builder,
                config,
                side,
                index == 0,
                setup.attention,
                checkpointed,
                lines,
            ),
            norm: Norm::new(builder, config.width, lines),
            dropout: config.dropout,
        };
        Block {
            index: index as u32,
            own: attention(side),
            cross: (side == Side::Decoder).then(|| attention(Side::Cross)),
            feed: FeedLayer::new(builder, config, lines),
        }
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let attentions = std::iter::once(&self.own).chain(&self.cross);
        attentions
            .flat_map(|layer| layer.attention.linears())
            .chain(self.feed.linears())
    }

    /// The result, and the biases that the next block is given.
    fn forward(&self, x: &Tensor, around: &Surroundings) -> (Tensor, Tensor, Option<Tensor>) {
        let context = x.context().clone();
        context.set_scope("attention", Some(self.index));
        let given = Given {
            states: None,
            mask: around.mask.as_ref(),
            bias: around.bias.as_ref(),
            cache: around.cache.as_deref(),
        };
        // The block holds the weights of eager attention until others take their place.
        let (mut hidden, bias, mut weights) = self.own.forward(x, &given);
        let mut cross_bias = None;
        if let Some(cross) = &self.cross {
            context.set_scope("cross-attention", Some(self.index));
            let given = Given {
                states: around.encoded.as_ref(),
                mask: None,
                bias: around.cross_bias.as_ref(),
                cache: around.cache.as_deref(),
            };
            let (out, made, looked) = cross.forward(&hidden, &given);
            hidden = out;
            cross_bias = Some(made);
            weights = looked;
        }
        context.set_scope("feed-forward", Some(self.index));
        hidden = self.feed.forward(&hidden);
        drop(weights);
        (hidden, bias, cross_bias)
    }
}

/// `T5Stack`: the encoder, or the decoder.
struct Stack {
    blocks: Vec<Rc<Block>>,
    norm: Norm,
    side: Side,
    kind: Kind,
    checkpoints: Checkpointing,
    dropout: f64,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    embeddings_require_grad: bool,
}

impl Stack {
    fn forward(
        &self,
        tokens: &Tensor,
        ids: &Tensor,
        encoded: Option<&Tensor>,
        cache: Option<&Rc<Cache>>,
    ) -> Tensor {
        let (context, lines) = (ids.context(), self.norm.lines);
        context.set_scope("embedding", None);
        context.at(&lines.embed);
        let embeddings = embedding::embedding(ids, tokens);
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        context.at(&lines.causal_mask);
        let mask = match self.side {
            Side::Decoder => mask::causal_without_positions(&embeddings, self.kind),
            Side::Encoder | Side::Cross => mask::bidirectional(None),
        };
        context.at(&lines.embedding_dropout);
        let mut hidden = dropout::dropout(&embeddings, self.dropout);
        let (mut bias, mut cross_bias) = (None, None);
        for block in &self.blocks {
            let around = Surroundings {
                mask: mask.clone(),
                bias: bias.take(),
                encoded: encoded.cloned(),
                cross_bias: cross_bias.take(),
                cache: cache.cloned(),
            };
            let block = block.clone();
            let (out, made, made_across) =
                self.checkpoints
                    .run_several(context, &hidden, move |x| block.forward(x, &around));
            hidden = out;
            bias = Some(made);
            cross_bias = made_across;
        }
        context.set_scope("head", None);
        context.at(&lines.final_norm);
        hidden = self.norm.forward(&hidden);
        context.at(&lines.final_dropout);
        hidden = dropout::dropout(&hidden, self.dropout);
        drop(mask);
        drop(embeddings);
        drop(bias);
        drop(cross_bias);
        hidden
    }
}

/// The encoder and the decoder with their loss.
struct T5 {
    context: Context,
    tokens: Tensor,
    encoder: Stack,
    decoder: Stack,
    head: Tensor,
    config: architecture::T5,
    lines: &'static Lines,
    checkpoints: Checkpointing,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl T5 {
    fn new(setup: &Setup, config: &architecture::T5) -> T5 {
        let builder = &setup.builder();
        let lines = match config.variant {
            T5Variant::Original => &t5_lines::T5,
            T5Variant::Multilingual => &t5_lines::MT5,
        };
        let table = || builder.parameter([config.vocabulary, config.width]);
        let stack = |side, layers| {
            // Each stack has a table of its own until the model is whole.
            let own = table();
            builder.forget(&own);
            let blocks: Vec<Rc<Block>> = (0..layers)
                .map(|index| Rc::new(Block::new(setup, builder, config, side, lines, index)))
                .collect();
            let stack = Stack {
                blocks,
                norm: Norm::new(builder, config.width, lines),
                side,
                kind: setup.attention,
                checkpoints: setup.checkpoints,
                dropout: config.dropout,
                embeddings_require_grad: setup.checkpoints.is_on() && builder.has_adapters(),
            };
            (stack, own)
        };
        let tokens = table();
        let (encoder, encoders_table) = stack(Side::Encoder, config.layers);
        let (decoder, decoders_table) = stack(Side::Decoder, config.decoder_layers);
        let own = table();
        builder.forget(&own);
        drop(own);
        drop(encoders_table);
        drop(decoders_table);
        // A head of its own comes with the weights that are loaded.
        let head = if config.tied { tokens.clone() } else { table() };
        let blocks = encoder.blocks.iter().chain(&decoder.blocks);
        builder.add_adapters(blocks.flat_map(|block| block.linears()));
        T5 {
            tokens,
            encoder,
            decoder,
            head,
            config: config.clone(),
            lines,
            checkpoints: setup.checkpoints,
            batch: setup.batch,
            trainable: builder.trainable(),
            context: builder.context.clone(),
        }
    }

    /// `_shift_right`: the labels, one place later, are what the decoder reads.
    fn shift_right(&self, labels: &Tensor) -> Tensor {
        let (context, lines) = (&self.context, self.lines);
        let [batch, length] = self.batch;
        context.at(&lines.shift_zeros);
        let shifted = creation::filled(context, labels.sizes(), labels.dtype());
        context.at(&lines.shift_copy);
        drop(creation::filled(
            context,
            [batch, length - 1],
            labels.dtype(),
        ));
        context.at(&lines.shift_fill);
        drop(pointwise::apply(&shifted, "eq", DType::Bool));
        shifted
    }
}

impl Program for T5 {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let (context, lines, ids) = (&self.context, self.lines, &batch[0]);
        let encoded = self.encoder.forward(&self.tokens, ids, None, None);
        let shifted = self.shift_right(ids);
        // Checkpointing turns the cache off.
        let keeps = self.config.caches && !self.checkpoints.is_on();
        let cache = keeps.then(|| Rc::new(Cache::default()));
        let decoded = self
            .decoder
            .forward(&self.tokens, &shifted, Some(&encoded), cache.as_ref());
        let mut sequence = decoded.clone();
        if self.config.scales_result() {
            context.at(&lines.scale);
            sequence = pointwise::mul_number(&sequence);
        }
        context.at(&lines.logits);
        let logits = matmul::linear(&sequence, &self.head, None);
        let rows = logits.numel() / self.config.vocabulary;
        context.at(&lines.loss);
        let loss = loss::cross_entropy(
            view::view(&logits, [rows, self.config.vocabulary]),
            view::view(ids, [rows]),
        );
        drop(shifted);
        drop(decoded);
        drop(sequence);
        drop(logits);
        if let Some(cache) = cache {
            cache.let_go();
        }
        drop(encoded);
        loss
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.clone()]
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::T5 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(T5::new(setup, self))
    }

    fn refuses(&self, workload: &Workload) -> Option<String> {
        if workload.recipe.precision.weights() == DType::Float16 {
            return Some(
                "T5 with weights in fp16 is not computed (transformers keeps its layers wo in fp32 then); bf16, or fp16 by autocast over fp32, is"
                    .into(),
            );
        }
        (workload.checkpoints == Checkpointing::Reentrant).then(|| {
            "T5 checkpointed with use_reentrant=True is not computed; use_reentrant=False is".into()
        })
    }
}
