//! OPT as transformers runs it.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::activation;
use super::causal::{CausalLanguageModel, CausalModel};
use super::head_attention::{HeadAttention, Lines};
use super::mask::{self, Attention};
use super::module::{Builder, Embedding, LayerNorm, Linear};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{cast, creation, dropout, matmul, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_opt.py";

/// Where the loss is computed.
static LOSS: Line = Line::Source {
    file: FILE,
    number: 516,
};

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    attend: line(167),
    product: line(84),
    mask: line(86),
    softmax: line(88),
    dropout: line(89),
    mix: line(91),
    order: line(92),
};

struct Layer {
    index: u32,
    key: Linear,
    value: Linear,
    query: Linear,
    output: Linear,
    attention_norm: LayerNorm,
    first: Linear,
    second: Linear,
    feed_norm: LayerNorm,
    config: architecture::Opt,
    attention: HeadAttention,
}

impl Layer {
    fn new(builder: &Builder, config: &architecture::Opt, kind: Attention, index: u32) -> Layer {
        let (width, inner, bias) = (config.width, config.inner, config.biases);
        Layer {
            index,
            key: builder.linear("k_proj", width, width, bias),
            value: builder.linear("v_proj", width, width, bias),
            query: builder.linear("q_proj", width, width, bias),
            output: builder.linear("out_proj", width, width, bias),
            attention_norm: builder.layer_norm(width),
            first: builder.linear("fc1", width, inner, bias),
            second: builder.linear("fc2", inner, width, bias),
            feed_norm: builder.layer_norm(width),
            config: config.clone(),
            attention: HeadAttention {
                kind,
                is_causal: true,
                dropout: config.attention_dropout,
                raises_softmax: true,
                lines: &LINES,
            },
        }
    }

    /// In the order in which the module has them.
    fn linears(&self) -> [&Linear; 6] {
        [
            &self.key,
            &self.value,
            &self.query,
            &self.output,
            &self.first,
            &self.second,
        ]
    }

    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let (context, config) = (x.context(), &self.config);
        let (batch, length, width) = (x.size(0), x.size(1), config.width);
        let mut residual = x.clone();
        let mut hidden = x.clone();
        context.set_scope("attention", Some(self.index));
        if config.norm_first {
            at!(context, FILE, 215);
            hidden = self.attention_norm.forward(&hidden);
        }
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, mask);
        at!(context, FILE, 225);
        hidden = dropout::dropout(&hidden, config.dropout);
        at!(context, FILE, 226);
        hidden = pointwise::add(&residual, &hidden);
        if !config.norm_first {
            at!(context, FILE, 230);
            hidden = self.attention_norm.forward(&hidden);
        }
        context.set_scope("feed-forward", Some(self.index));
        hidden = view::reshape(&hidden, [batch * length, width]);
        residual = hidden.clone();
        if config.norm_first {
            at!(context, FILE, 239);
            hidden = self.feed_norm.forward(&hidden);
        }
        at!(context, FILE, 241);
        hidden = self.first.forward(&hidden);
        at!(context, FILE, 242);
        hidden = activation::forward(config.activation, &hidden);
        at!(context, FILE, 244);
        hidden = self.second.forward(&hidden);
        at!(context, FILE, 245);
        hidden = dropout::dropout(&hidden, config.dropout);
        at!(context, FILE, 247);
        hidden = view::view(pointwise::add(&residual, &hidden), [batch, length, width]);
        if !config.norm_first {
            at!(context, FILE, 251);
            hidden = self.feed_norm.forward(&hidden);
        }
        drop(residual);
        drop(weights);
        hidden
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let (context, heads) = (hidden.context(), self.config.heads);
        let split_heads = |states: &Tensor| {
            let states = view::view(states, [batch, length, heads, width / heads]);
            view::transpose(states, 1, 2)
        };
        at!(context, FILE, 151);
        let mut query = pointwise::mul_number(self.query.forward(hidden));
        query = split_heads(&query);
        at!(context, FILE, 154);
        let mut key = self.key.forward(hidden);
        at!(context, FILE, 155);
        let mut value = self.value.forward(hidden);
        key = split_heads(&key);
        value = split_heads(&value);
        let (mut out, weights) = self.attention.run(&query, &key, &value, mask);
        at!(context, FILE, 178);
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        at!(context, FILE, 179);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }
}

/// The causal language model.
struct Opt {
    context: Context,
    tokens: Embedding,
    positions: Embedding,
    project_out: Option<Linear>,
    project_in: Option<Linear>,
    final_norm: Option<LayerNorm>,
    layers: Vec<Rc<Layer>>,
    head: Tensor,
    config: architecture::Opt,
    kind: Attention,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    embeddings_require_grad: bool,
}

impl Opt {
    fn new(setup: &Setup, builder: &Builder, config: &architecture::Opt) -> Opt {
        let (width, outer) = (config.width, config.embedding_width);
        let tokens = builder.embedding(config.vocabulary, outer);
        let positions = builder.embedding(config.positions + architecture::Opt::OFFSET, width);
        let is_projected = config.is_projected();
        let project_out = is_projected.then(|| builder.linear("project_out", width, outer, false));
        let project_in = is_projected.then(|| builder.linear("project_in", outer, width, false));
        let final_norm = config.final_norm.then(|| builder.layer_norm(width));
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, config, setup.attention, index as u32)))
            .collect();
        let head = builder.tied_head(&tokens.table, config.tied);
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        Opt {
            context: builder.context.clone(),
            tokens,
            positions,
            project_out,
            project_in,
            final_norm,
            layers,
            head,
            config: config.clone(),
            kind: setup.attention,
            checkpoints: setup.checkpoints,
            embeddings_require_grad: setup.checkpoints.is_on() && builder.has_adapters(),
        }
    }
}

impl CausalModel for Opt {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.config.vocabulary
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        at!(context, FILE, 338);
        let mut embeddings = self.tokens.forward(ids);
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        at!(context, FILE, 347);
        let padding = creation::filled(context, ids.sizes(), DType::Float32);
        at!(context, FILE, 351);
        let counted = pointwise::apply(&padding, "cumsum", DType::Float32);
        at!(context, FILE, 352);
        let products = pointwise::compare(&counted, &padding, DType::Float32);
        let position_ids = cast::to(pointwise::add_number(products), DType::Int64);
        drop(counted);
        at!(context, FILE, 356);
        let mask = mask::causal_with_padding(&embeddings, &padding, self.kind);
        at!(context, FILE, 70);
        let shifted = pointwise::add_number(&position_ids);
        let positions = self.positions.forward(&shifted);
        drop(shifted);
        if let Some(project) = &self.project_in {
            at!(context, FILE, 366);
            embeddings = project.forward(&embeddings);
        }
        at!(context, FILE, 368);
        let mut hidden = pointwise::add(&embeddings, &positions);
        for layer in &self.layers {
            let (layer, mask, position_ids) = (layer.clone(), mask.clone(), position_ids.clone());
            hidden = self.checkpoints.run(context, &hidden, move |x| {
                let _given = &position_ids;
                layer.forward(x, mask.as_ref())
            });
        }
        context.set_scope("head", None);
        if let Some(norm) = &self.final_norm {
            at!(context, FILE, 388);
            hidden = norm.forward(&hidden);
        }
        if let Some(project) = &self.project_out {
            at!(context, FILE, 391);
            hidden = project.forward(&hidden);
        }
        drop(padding);
        drop(embeddings);
        drop(position_ids);
        drop(mask);
        drop(positions);
        hidden
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        at!(self.context, FILE, 512);
        matmul::linear(view::alias(hidden), &self.head, None)
    }

    fn loss_line(&self) -> &'static Line {
        &LOSS
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }
}

impl Replay for architecture::Opt {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let model = Opt::new(setup, builder, self);
        Box::new(CausalLanguageModel::new(model, builder, setup.batch))
    }
}
