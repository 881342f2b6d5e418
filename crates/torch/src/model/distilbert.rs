//! DistilBERT as transformers runs it.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::activation;
use super::head_attention::{HeadAttention, Lines};
use super::mask::{self, Attention};
use super::module::{Builder, Embedding, LayerNorm, Linear};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{creation, dropout, loss, matmul, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_distilbert.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    attend: line(191),
    product: line(136),
    mask: line(139),
    softmax: line(141),
    dropout: line(142),
    mix: line(144),
    order: line(145),
};

struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    attention_norm: LayerNorm,
    first: Linear,
    second: Linear,
    output_norm: LayerNorm,
    config: architecture::DistilBert,
    attention: HeadAttention,
}

impl Layer {
    fn new(
        builder: &Builder,
        config: &architecture::DistilBert,
        kind: Attention,
        index: u32,
    ) -> Layer {
        let (width, inner) = (config.width, config.inner);
        Layer {
            index,
            query: builder.linear("q_lin", width, width, true),
            key: builder.linear("k_lin", width, width, true),
            value: builder.linear("v_lin", width, width, true),
            output: builder.linear("out_lin", width, width, true),
            attention_norm: builder.layer_norm(width),
            first: builder.linear("lin1", width, inner, true),
            second: builder.linear("lin2", inner, width, true),
            output_norm: builder.layer_norm(width),
            config: config.clone(),
            attention: HeadAttention {
                kind,
                is_causal: false,
                dropout: config.attention_dropout,
                raises_softmax: false,
                lines: &LINES,
            },
        }
    }

    fn linears(&self) -> [&Linear; 6] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.first,
            &self.second,
        ]
    }

    fn forward(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let context = hidden.context();
        context.set_scope("attention", Some(self.index));
        // The layer holds the weights of eager attention until it returns.
        let (mut attended, weights) = self.attend(hidden, mask);
        at!(context, FILE, 253);
        let sum = pointwise::add(&attended, hidden);
        let normed = self.attention_norm.forward(&sum);
        drop(sum);
        attended = normed;
        context.set_scope("feed-forward", Some(self.index));
        let fed = self.feed(&attended);
        at!(context, FILE, 257);
        let sum = pointwise::add(&fed, &attended);
        let normed = self.output_norm.forward(&sum);
        drop(sum);
        if context.is_stopped() {
            // The exception that ends a recomputation leaves the names in their order.
            drop(attended);
            drop(weights);
            drop(fed);
            return normed;
        }
        drop(fed);
        drop(attended);
        drop(weights);
        normed
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let (context, heads) = (hidden.context(), self.config.heads);
        let split_heads = |states: Tensor| {
            let states = view::view(states, [batch, length, heads, width / heads]);
            view::transpose(states, 1, 2)
        };
        at!(context, FILE, 183);
        let query = split_heads(self.query.forward(hidden));
        at!(context, FILE, 184);
        let key = split_heads(self.key.forward(hidden));
        at!(context, FILE, 185);
        let value = split_heads(self.value.forward(hidden));
        let (mut out, weights) = self.attention.run(&query, &key, &value, mask);
        at!(context, FILE, 201);
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        at!(context, FILE, 202);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }

    fn feed(&self, input: &Tensor) -> Tensor {
        let context = input.context();
        at!(context, FILE, 220);
        let mut x = self.first.forward(input);
        at!(context, FILE, 221);
        x = activation::forward(self.config.activation, &x);
        at!(context, FILE, 222);
        x = self.second.forward(&x);
        at!(context, FILE, 223);
        x = dropout::dropout(&x, self.config.dropout);
        x
    }
}

/// The masked language model with its loss.
struct DistilBert {
    context: Context,
    words: Embedding,
    positions: Embedding,
    norm: LayerNorm,
    position_ids: Tensor,
    layers: Vec<Rc<Layer>>,
    transform: Linear,
    transform_norm: LayerNorm,
    head: Tensor,
    head_bias: Tensor,
    config: architecture::DistilBert,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    embeddings_require_grad: bool,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl DistilBert {
    fn new(setup: &Setup, config: &architecture::DistilBert) -> DistilBert {
        let builder = &setup.builder();
        let context = builder.context.clone();
        let words = builder.embedding(config.vocabulary, config.width);
        let positions = builder.embedding(config.positions, config.width);
        let norm = builder.layer_norm(config.width);
        let position_ids = creation::arange(&context, config.positions, DType::Int64);
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, config, setup.attention, index as u32)))
            .collect();
        let transform = builder.linear("vocab_transform", config.width, config.width, true);
        let transform_norm = builder.layer_norm(config.width);
        let own = builder.parameter([config.vocabulary, config.width]);
        let head_bias = builder.parameter([config.vocabulary]);
        let head = if config.tied {
            builder.forget(&own);
            drop(own);
            // Tying pads the bias beside the weight.
            head_bias.set_data("pad", head_bias.bytes());
            words.table.clone()
        } else {
            own
        };
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        DistilBert {
            words,
            positions,
            norm,
            position_ids: view::unsqueeze(position_ids, 0),
            layers,
            transform,
            transform_norm,
            head,
            head_bias,
            config: config.clone(),
            checkpoints: setup.checkpoints,
            embeddings_require_grad: setup.checkpoints.is_on() && builder.has_adapters(),
            batch: setup.batch,
            trainable: builder.trainable(),
            context,
        }
    }

    fn embed(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        at!(context, FILE, 99);
        let words = self.words.forward(ids);
        if self.embeddings_require_grad {
            words.set_requires_grad(true);
        }
        let position_ids = view::slice(&self.position_ids, 1, ids.size(1));
        at!(context, FILE, 113);
        let positions = self.positions.forward(&position_ids);
        at!(context, FILE, 115);
        let mut sum = pointwise::add(&words, &positions);
        at!(context, FILE, 116);
        sum = self.norm.forward(&sum);
        at!(context, FILE, 117);
        sum = dropout::dropout(&sum, self.config.dropout);
        drop(words);
        drop(positions);
        sum
    }
}

impl Program for DistilBert {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let context = &self.context;
        let embeddings = self.embed(&batch[0]);
        at!(context, FILE, 411);
        let mask = mask::bidirectional(None);
        let mut hidden = embeddings.clone();
        for layer in &self.layers {
            let (layer, mask) = (layer.clone(), mask.clone());
            hidden = self
                .checkpoints
                .run(context, &hidden, move |x| layer.forward(x, mask.as_ref()));
        }
        drop(embeddings);
        context.set_scope("head", None);
        at!(context, FILE, 510);
        let mut scores = self.transform.forward(&hidden);
        at!(context, FILE, 511);
        scores = activation::forward(self.config.activation, &scores);
        at!(context, FILE, 512);
        scores = self.transform_norm.forward(&scores);
        at!(context, FILE, 513);
        scores = matmul::linear(&scores, &self.head, Some(&self.head_bias));
        let rows = scores.numel() / self.config.vocabulary;
        at!(context, FILE, 517);
        let loss = loss::cross_entropy(
            view::view(&scores, [rows, self.config.vocabulary]),
            view::view(&batch[0], [rows]),
        );
        drop(hidden);
        drop(scores);
        loss
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::DistilBert {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(DistilBert::new(setup, self))
    }
}
