//! BERT and its small relatives (MiniLM) as transformers runs them.

use std::rc::Rc;

use cinch_architecture::{self as architecture, Activation};

use super::activation;
use super::bert_embeddings::{Embeddings, Embeds};
use super::bert_lines::Lines;
use super::head_attention::{self, HeadAttention};
use super::mask::{self, Attention};
use super::module::{Builder, LayerNorm, Linear};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{creation, dropout, loss, matmul, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_bert.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    mask: line(704),
    query: line(175),
    key: line(176),
    value: line(177),
    attention: head_attention::Lines {
        attend: line(192),
        product: line(125),
        mask: line(128),
        softmax: line(130),
        dropout: line(131),
        mix: line(133),
        order: line(134),
    },
    attention_reshape: line(202),
    self_output: [line(290), line(291), line(292)],
    intermediate: line(335),
    activation: line(336),
    output: [line(348), line(349), line(350)],
    transform: line(477),
    transform_activation: line(478),
    transform_norm: line(479),
    scores: line(495),
    loss: line(975),
};

struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    intermediate: Linear,
    output: Linear,
    output_norm: LayerNorm,
    config: architecture::Bert,
    attention: HeadAttention,
    lines: &'static Lines,
}

impl Layer {
    fn new(
        builder: &Builder,
        config: &architecture::Bert,
        kind: Attention,
        lines: &'static Lines,
        index: u32,
    ) -> Layer {
        let width = config.width;
        Layer {
            index,
            query: builder.linear("query", width, width, true),
            key: builder.linear("key", width, width, true),
            value: builder.linear("value", width, width, true),
            attention_output: builder.linear("dense", width, width, true),
            attention_norm: builder.layer_norm(width),
            intermediate: builder.linear("dense", width, config.inner, true),
            output: builder.linear("dense", config.inner, width, true),
            output_norm: builder.layer_norm(width),
            config: config.clone(),
            attention: HeadAttention {
                kind,
                is_causal: false,
                dropout: config.attention_dropout,
                raises_softmax: false,
                lines: &lines.attention,
            },
            lines,
        }
    }

    fn linears(&self) -> [&Linear; 6] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.attention_output,
            &self.intermediate,
            &self.output,
        ]
    }

    fn forward(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let context = hidden.context();
        context.set_scope("attention", Some(self.index));
        // The layer holds the weights of eager attention until it returns.
        let (mut attended, weights) = self.attend(hidden, mask);
        attended = self.close(
            &self.attention_output,
            &self.attention_norm,
            &attended,
            hidden,
            &self.lines.self_output,
        );
        context.set_scope("feed-forward", Some(self.index));
        context.at(&self.lines.intermediate);
        let mut inner = self.intermediate.forward(&attended);
        context.at(&self.lines.activation);
        inner = activation::forward(self.config.activation, &inner);
        let out = self.close(
            &self.output,
            &self.output_norm,
            &inner,
            &attended,
            &self.lines.output,
        );
        drop(weights);
        drop(inner);
        drop(attended);
        out
    }

    /// Projection, dropout, and the norm of the sum with the residual.
    fn close(
        &self,
        dense: &Linear,
        norm: &LayerNorm,
        x: &Tensor,
        residual: &Tensor,
        lines: &'static [Line; 3],
    ) -> Tensor {
        let context = x.context();
        context.at(&lines[0]);
        let mut hidden = dense.forward(x);
        context.at(&lines[1]);
        hidden = dropout::dropout(&hidden, self.config.hidden_dropout);
        context.at(&lines[2]);
        let sum = pointwise::add(&hidden, residual);
        let normed = norm.forward(&sum);
        drop(sum);
        drop(hidden);
        normed
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let heads = self.config.heads;
        let context = hidden.context();
        let split_heads = |states: Tensor| {
            view::transpose(
                view::view(states, [batch, length, heads, width / heads]),
                1,
                2,
            )
        };
        context.at(&self.lines.query);
        let query = split_heads(self.query.forward(hidden));
        context.at(&self.lines.key);
        let key = split_heads(self.key.forward(hidden));
        context.at(&self.lines.value);
        let value = split_heads(self.value.forward(hidden));
        let (mut out, weights) = self.attention.run(&query, &key, &value, mask);
        context.at(&self.lines.attention_reshape);
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }
}

/// The encoder without a head: `BertModel`.
pub struct Encoder<E = Embeddings> {
    context: Context,
    embeddings: E,
    layers: Vec<Rc<Layer>>,
    pooler: Option<Linear>,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    embeddings_require_grad: bool,
    lines: &'static Lines,
}

impl Encoder {
    pub fn new(
        builder: &Builder,
        config: &architecture::Bert,
        kind: Attention,
        checkpoints: Checkpointing,
        pooler: bool,
    ) -> Encoder {
        let embeddings = Embeddings::new(builder, config);
        Encoder::of(
            builder,
            config,
            kind,
            checkpoints,
            pooler,
            embeddings,
            &LINES,
        )
    }
}

impl<E: Embeds> Encoder<E> {
    pub(super) fn of(
        builder: &Builder,
        config: &architecture::Bert,
        kind: Attention,
        checkpoints: Checkpointing,
        pooler: bool,
        embeddings: E,
        lines: &'static Lines,
    ) -> Encoder<E> {
        Encoder {
            context: builder.context.clone(),
            embeddings,
            layers: (0..config.layers)
                .map(|index| Rc::new(Layer::new(builder, config, kind, lines, index as u32)))
                .collect(),
            pooler: pooler.then(|| builder.linear("dense", config.width, config.width, true)),
            checkpoints,
            embeddings_require_grad: checkpoints.is_on() && builder.has_adapters(),
            lines,
        }
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers
            .iter()
            .flat_map(|layer| layer.linears())
            .chain(&self.pooler)
    }

    pub fn words(&self) -> &Tensor {
        self.embeddings.words()
    }

    /// The last hidden state. Where there is a pooler it runs, and its result goes with the output object.
    pub fn forward(&self, ids: &Tensor, padding: Option<&Tensor>) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        let embeddings = self.embeddings.forward(ids, self.embeddings_require_grad);
        context.at(&self.lines.mask);
        let mask = mask::bidirectional(padding);
        let mut hidden = embeddings.clone();
        for layer in &self.layers {
            let (layer, mask) = (layer.clone(), mask.clone());
            hidden = self
                .checkpoints
                .run(context, &hidden, move |x| layer.forward(x, mask.as_ref()));
        }
        context.set_scope("head", None);
        if let Some(pooler) = &self.pooler {
            at!(context, FILE, 461);
            let mut pooled = pooler.forward(&view::select(&hidden, 1));
            at!(context, FILE, 462);
            pooled = pointwise::tanh(&pooled);
            drop(pooled);
        }
        drop(embeddings);
        hidden
    }
}

/// The masked language model with its loss.
pub(super) struct MaskedModel<E> {
    context: Context,
    encoder: Encoder<E>,
    transform: Linear,
    transform_norm: LayerNorm,
    head: Tensor,
    head_bias: Tensor,
    _scalar: Option<Tensor>,
    activation: Activation,
    vocabulary: u64,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl<E: Embeds> MaskedModel<E> {
    /// `leaves_number`: whether its construction leaves one behind, as in the first measurements.
    pub fn new(
        builder: &Builder,
        config: &architecture::Bert,
        encoder: Encoder<E>,
        batch: [u64; 2],
        leaves_number: bool,
    ) -> MaskedModel<E> {
        let transform = builder.linear("dense", config.width, config.width, true);
        let transform_norm = builder.layer_norm(config.width);
        let own = builder.parameter([config.vocabulary, config.width]);
        let own_bias = builder.parameter([config.vocabulary]);
        let head_bias = builder.parameter([config.vocabulary]);
        let scalar = leaves_number.then(|| builder.context.empty("scalar", [], builder.dtype));
        builder.forget(&own_bias);
        let head = if config.tied {
            builder.forget(&own);
            drop(own);
            // Tying pads the bias beside the weight, and then the one that takes its place.
            own_bias.set_data("pad", own_bias.bytes());
            drop(own_bias);
            head_bias.set_data("pad", head_bias.bytes());
            encoder.words().clone()
        } else {
            own
        };
        builder.put_before(&head_bias, transform.weight());
        builder.add_adapters(encoder.linears().chain([&transform]));
        MaskedModel {
            context: builder.context.clone(),
            encoder,
            transform,
            transform_norm,
            head,
            head_bias,
            _scalar: scalar,
            activation: config.activation,
            vocabulary: config.vocabulary,
            batch,
            trainable: builder.trainable(),
        }
    }
}

impl<E: Embeds> Program for MaskedModel<E> {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let context = &self.context;
        let sequence = self.encoder.forward(&batch[0], None);
        context.at(&self.encoder.lines.transform);
        let mut hidden = self.transform.forward(&sequence);
        context.at(&self.encoder.lines.transform_activation);
        hidden = activation::forward(self.activation, &hidden);
        context.at(&self.encoder.lines.transform_norm);
        hidden = self.transform_norm.forward(&hidden);
        context.at(&self.encoder.lines.scores);
        let scores = matmul::linear(&hidden, &self.head, Some(&self.head_bias));
        drop(hidden);
        let rows = scores.numel() / self.vocabulary;
        context.at(&self.encoder.lines.loss);
        let loss = loss::cross_entropy(
            view::view(&scores, [rows, self.vocabulary]),
            view::view(&batch[0], [rows]),
        );
        drop(sequence);
        drop(scores);
        loss
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::Bert {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let encoder = Encoder::new(builder, self, setup.attention, setup.checkpoints, false);
        Box::new(MaskedModel::new(builder, self, encoder, setup.batch, true))
    }
}
