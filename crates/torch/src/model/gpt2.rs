//! GPT-2 as transformers runs it.

use std::rc::Rc;

use super::mask::{self, Attention};
use super::module::{Builder, Embedding, LayerNorm, causal_loss, position_ids};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::op::{attention, creation, dropout, matmul, pointwise, softmax, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

/// `GPT2Config`, as far as memory depends on it.
#[derive(Clone, Debug)]
pub struct Gpt2Config {
    pub vocabulary: u64,
    pub positions: u64,
    pub width: u64,
    pub layers: u64,
    pub heads: u64,
    /// Of the feed-forward part; four times the width unless given.
    pub inner: Option<u64>,
    pub residual_dropout: f64,
    pub embedding_dropout: f64,
    pub attention_dropout: f64,
    pub tied: bool,
}

impl Default for Gpt2Config {
    fn default() -> Gpt2Config {
        Gpt2Config {
            vocabulary: 50257,
            positions: 1024,
            width: 768,
            layers: 12,
            heads: 12,
            inner: None,
            residual_dropout: 0.1,
            embedding_dropout: 0.1,
            attention_dropout: 0.1,
            tied: true,
        }
    }
}

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
    config: Gpt2Config,
    kind: Attention,
}

impl Block {
    fn new(builder: &Builder, config: &Gpt2Config, kind: Attention, index: u32) -> Block {
        let inner = config.inner.unwrap_or(4 * config.width);
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
        let mut hidden = self.first_norm.forward(x);
        let attended = self.attend(&hidden, mask);
        hidden = pointwise::add(&attended, &residual);
        drop(residual);
        let residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        hidden = self.second_norm.forward(&hidden);
        let fed = self.feed(&hidden);
        hidden = pointwise::add(&residual, &fed);
        drop(residual);
        drop(attended);
        drop(fed);
        hidden
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let heads = self.config.heads;
        let parts = view::split(self.attention.forward(hidden), &[width; 3], 2);
        let split_heads = |part: &Tensor| {
            view::transpose(
                view::view(part, [batch, length, heads, width / heads]),
                1,
                2,
            )
        };
        let key = split_heads(&parts[1]);
        let value = split_heads(&parts[2]);
        let query = split_heads(&parts[0]);
        drop(parts);
        let (mut out, weights) = match self.kind {
            Attention::Sdpa => {
                let out = attention::scaled_dot_product(&query, &key, &value);
                (view::contiguous(view::transpose(out, 1, 2)), None)
            }
            Attention::Eager => {
                let (out, weights) = self.eager(&query, &key, &value, mask);
                (out, Some(weights))
            }
        };
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        out = self.projection.forward(&out);
        out = dropout::dropout(&out, self.config.residual_dropout);
        drop((query, key, value));
        drop(weights);
        out
    }

    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let transposed = view::transpose(key, 2, 3);
        let mut weights = pointwise::mul_number(matmul::matmul(query, transposed));
        if let Some(mask) = mask {
            weights = pointwise::add(&weights, mask);
        }
        weights = softmax::softmax(&weights, None);
        weights = crate::eager::op::cast::to(&weights, value.dtype());
        weights = dropout::dropout(&weights, self.config.attention_dropout);
        let out = matmul::matmul(&weights, value);
        (view::transpose(out, 1, 2), weights)
    }

    fn feed(&self, hidden: &Tensor) -> Tensor {
        let mut hidden = self.inner.forward(hidden);
        hidden = gelu_new(&hidden);
        hidden = self.outer.forward(&hidden);
        dropout::dropout(hidden, self.config.residual_dropout)
    }
}

/// `0.5 * x * (1 + tanh(√(2/π) * (x + 0.044715 * x³)))`, op by op.
fn gelu_new(x: &Tensor) -> Tensor {
    let half = pointwise::mul_number(x);
    let cubed = pointwise::mul_number(pointwise::pow_number(x));
    let inner = pointwise::mul_number(pointwise::add(x, cubed));
    pointwise::mul(half, pointwise::add_number(pointwise::tanh(inner)))
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
    config: Gpt2Config,
    kind: Attention,
    checkpoints: Checkpointing,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl Gpt2 {
    pub fn new(
        builder: &Builder,
        config: Gpt2Config,
        kind: Attention,
        checkpoints: Checkpointing,
        batch: [u64; 2],
    ) -> Gpt2 {
        let tokens = builder.embedding(config.vocabulary, config.width);
        let positions = builder.embedding(config.positions, config.width);
        let blocks = (0..config.layers)
            .map(|index| Rc::new(Block::new(builder, &config, kind, index as u32)))
            .collect();
        let norm = builder.layer_norm(config.width);
        let (head, scalar) = builder.head(&tokens.table, config.tied);
        builder.add_adapters(std::iter::empty());
        let trainable = builder.trainable();
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
            batch,
            trainable,
        }
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        self.context.set_scope("embedding", None);
        let embeddings = self.tokens.forward(ids);
        let position_ids = position_ids(&self.context, ids.size(1));
        let position_embeddings = self.positions.forward(&position_ids);
        let mut hidden = pointwise::add(&embeddings, &position_embeddings);
        let mask = mask::causal(&embeddings, &position_ids, self.kind);
        hidden = dropout::dropout(&hidden, self.config.embedding_dropout);
        for block in &self.blocks {
            let (block, mask, ids) = (block.clone(), mask.clone(), position_ids.clone());
            hidden = self.checkpoints.run(&self.context, &hidden, move |x| {
                // Python's partial holds the position ids too.
                let _held = &ids;
                block.forward(x, mask.as_ref())
            });
        }
        self.context.set_scope("head", None);
        hidden = self.norm.forward(&hidden);
        drop(embeddings);
        drop(position_ids);
        drop(position_embeddings);
        hidden
    }
}

impl Program for Gpt2 {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let hidden = self.transform(&batch[0]);
        causal_loss(hidden, &self.head, &batch[0], self.config.vocabulary)
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}
