//! GPT-2 as transformers runs it.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::activation;
use super::causal::{CausalLanguageModel, CausalModel};
use super::mask::{self, Attention};
use super::module::{Builder, Embedding, LayerNorm, position_ids};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::attention::{self, Attend};
use crate::eager::op::{cast, dropout, matmul, pointwise, softmax, view};
use crate::eager::training::Program;
use crate::eager::{Context, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_gpt2.py";

/// Where the loss is computed.
static LOSS: Line = Line::Source {
    file: FILE,
    number: 702,
};

/// `Conv1D`: a linear layer whose weight is stored transposed.
struct Conv1d {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1d {
    fn new(builder: &Builder, output: u64, input: u64) -> Conv1d {
        Conv1d {
            weight: builder.parameter([input, output]),
            bias: builder.parameter([output]),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let mut sizes = x.sizes();
        let last = sizes.len() - 1;
        sizes.as_mut_slice()[last] = self.weight.size(1);
        let flat = view::view(x, [x.numel() / x.sizes().last(), x.sizes().last()]);
        view::view(matmul::addmm(&self.bias, flat, &self.weight), sizes)
    }
}

struct Block {
    index: u32,
    first_norm: LayerNorm,
    attention: Conv1d,
    projection: Conv1d,
    second_norm: LayerNorm,
    inner: Conv1d,
    outer: Conv1d,
    config: architecture::Gpt2,
    kind: Attention,
}

impl Block {
    fn new(builder: &Builder, config: &architecture::Gpt2, kind: Attention, index: u32) -> Block {
        let inner = config.inner();
        Block {
            index,
            first_norm: builder.layer_norm(config.width),
            attention: Conv1d::new(builder, 3 * config.width, config.width),
            projection: Conv1d::new(builder, config.width, config.width),
            second_norm: builder.layer_norm(config.width),
            inner: Conv1d::new(builder, inner, config.width),
            outer: Conv1d::new(builder, config.width, inner),
            config: config.clone(),
            kind,
        }
    }

    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let context = x.context().clone();
        let residual = x.clone();
        context.set_scope("attention", Some(self.index));
        at!(context, FILE, 273);
        let mut hidden = self.first_norm.forward(x);
        // The block holds the weights of eager attention until it returns.
        let (attended, weights) = self.attend(&hidden, mask);
        at!(context, FILE, 282);
        hidden = pointwise::add(&attended, &residual);
        drop(residual);
        let residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        at!(context, FILE, 304);
        hidden = self.second_norm.forward(&hidden);
        let fed = self.feed(&hidden);
        at!(context, FILE, 307);
        hidden = pointwise::add(&residual, &fed);
        drop(residual);
        drop(attended);
        drop(weights);
        drop(fed);
        hidden
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let heads = self.config.heads;
        let context = hidden.context();
        at!(context, FILE, 185);
        let parts = view::split(self.attention.forward(hidden), &[width; 3], 2);
        let split_heads = |part: &Tensor| {
            view::transpose(
                view::view(part, [batch, length, heads, width / heads]),
                1,
                2,
            )
        };
        at!(context, FILE, 187);
        let key = split_heads(&parts[1]);
        at!(context, FILE, 188);
        let value = split_heads(&parts[2]);
        at!(context, FILE, 191);
        let query = split_heads(&parts[0]);
        drop(parts);
        let (mut out, weights) = match self.kind {
            Attention::Sdpa => {
                at!(context, FILE, 211);
                let how = Attend {
                    is_causal: true,
                    dropout: self.config.attention_dropout(),
                };
                let out = attention::scaled_dot_product(&query, &key, &value, how);
                (view::contiguous(view::transpose(out, 1, 2)), None)
            }
            Attention::Eager => {
                let (out, weights) = self.eager(&query, &key, &value, mask);
                (out, Some(weights))
            }
        };
        at!(context, FILE, 222);
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        at!(context, FILE, 223);
        out = self.projection.forward(&out);
        at!(context, FILE, 224);
        out = dropout::dropout(&out, self.config.residual_dropout);
        drop((query, key, value));
        (out, weights)
    }

    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let context = query.context();
        at!(context, FILE, 58);
        let transposed = view::transpose(key, 2, 3);
        let mut weights = pointwise::mul_number(matmul::matmul(query, transposed));
        if let Some(mask) = mask {
            at!(context, FILE, 61);
            weights = pointwise::add(&weights, mask);
        }
        at!(context, FILE, 63);
        weights = softmax::softmax(&weights, None);
        at!(context, FILE, 66);
        weights = cast::to(&weights, value.dtype());
        at!(context, FILE, 67);
        weights = dropout::dropout(&weights, self.config.attention_dropout());
        at!(context, FILE, 69);
        let out = matmul::matmul(&weights, value);
        at!(context, FILE, 70);
        (view::transpose(out, 1, 2), weights)
    }

    fn feed(&self, hidden: &Tensor) -> Tensor {
        let context = hidden.context().clone();
        at!(context, FILE, 239);
        let mut hidden = self.inner.forward(hidden);
        at!(context, FILE, 240);
        hidden = activation::forward(self.config.activation, &hidden);
        at!(context, FILE, 241);
        hidden = self.outer.forward(&hidden);
        at!(context, FILE, 242);
        dropout::dropout(hidden, self.config.residual_dropout)
    }
}

/// The causal language model with its loss.
pub struct Gpt2 {
    context: Context,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Rc<Block>>,
    norm: LayerNorm,
    head: Tensor,
    _scalar: Tensor,
    config: architecture::Gpt2,
    kind: Attention,
    checkpoints: Checkpointing,
}

impl Gpt2 {
    pub fn new(
        builder: &Builder,
        config: architecture::Gpt2,
        kind: Attention,
        checkpoints: Checkpointing,
    ) -> Gpt2 {
        let tokens = builder.embedding(config.vocabulary, config.width);
        let positions = builder.embedding(config.positions, config.width);
        let blocks = (0..config.layers)
            .map(|index| Rc::new(Block::new(builder, &config, kind, index as u32)))
            .collect();
        let norm = builder.layer_norm(config.width);
        let (head, scalar) = builder.head(&tokens.table, config.tied);
        builder.add_adapters(std::iter::empty());
        let context = builder.context.clone();
        Gpt2 {
            context,
            tokens,
            positions,
            blocks,
            norm,
            head,
            _scalar: scalar,
            config,
            kind,
            checkpoints,
        }
    }
}

impl CausalModel for Gpt2 {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.config.vocabulary
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        at!(context, FILE, 569);
        let embeddings = self.tokens.forward(ids);
        at!(context, FILE, 573);
        let position_ids = position_ids(context, ids.size(1));
        at!(context, FILE, 576);
        let position_embeddings = self.positions.forward(&position_ids);
        at!(context, FILE, 577);
        let mut hidden = pointwise::add(&embeddings, &position_embeddings);
        at!(context, FILE, 583);
        let mask = mask::causal(&embeddings, &position_ids, self.kind);
        at!(context, FILE, 603);
        hidden = dropout::dropout(&hidden, self.config.embedding_dropout());
        for block in &self.blocks {
            let (block, mask, ids) = (block.clone(), mask.clone(), position_ids.clone());
            hidden = self.checkpoints.run(context, &hidden, move |x| {
                // Python's partial holds the position ids too.
                let _held = &ids;
                block.forward(x, mask.as_ref())
            });
        }
        context.set_scope("head", None);
        at!(context, FILE, 619);
        hidden = self.norm.forward(&hidden);
        drop(embeddings);
        drop(position_ids);
        drop(position_embeddings);
        hidden
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        at!(self.context, FILE, 697);
        matmul::linear(view::alias(hidden), &self.head, None)
    }

    fn loss_line(&self) -> &'static Line {
        &LOSS
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone(), self.positions.table.clone()]
    }
}

impl Replay for architecture::Gpt2 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let model = Gpt2::new(builder, self.clone(), setup.attention, setup.checkpoints);
        Box::new(CausalLanguageModel::new(model, builder, setup.batch))
    }
}
