//! The MU system in plain PyTorch: a matrix of 8×8 per token, attention inside its sixteen blocks and across them, and a
//! gate that decides how far each block moves.

use cinch_architecture as architecture;

use super::module::{Builder, Embedding, LayerNorm, Linear, next_token_loss};
use super::multihead::MultiheadAttention;
use super::replay::{Replay, Setup};
use crate::eager::line::at;
use crate::eager::op::{creation, dropout, pointwise, reduce, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

const BLOCKS: u64 = architecture::Mu::BLOCKS;
const BLOCK: u64 = architecture::Mu::BLOCK;
const WIDTH: u64 = architecture::Mu::WIDTH;

struct Layer {
    index: u32,
    blocks: Vec<MultiheadAttention>,
    cross: MultiheadAttention,
    first_norm: LayerNorm,
    second_norm: LayerNorm,
    feed: [Linear; 2],
    affinity: Embedding,
    sensitivity: [Linear; 2],
    base: Tensor,
    dropout: f64,
}

impl Layer {
    fn new(builder: &Builder, config: &architecture::Mu, index: u32) -> Layer {
        let dropout = config.dropout;
        Layer {
            index,
            blocks: (0..BLOCKS)
                .map(|_| MultiheadAttention::new(builder, BLOCK, 2, dropout))
                .collect(),
            cross: MultiheadAttention::new(builder, WIDTH, config.heads, dropout),
            first_norm: builder.layer_norm(WIDTH),
            second_norm: builder.layer_norm(WIDTH),
            feed: [
                builder.linear("0", WIDTH, 4 * WIDTH, true),
                builder.linear("3", 4 * WIDTH, WIDTH, true),
            ],
            affinity: builder.embedding(config.vocabulary, BLOCKS),
            sensitivity: [
                builder.linear("0", BLOCKS + 1, 32, true),
                builder.linear("3", 32, BLOCKS, true),
            ],
            base: builder.parameter([BLOCKS]),
            dropout,
        }
    }

    fn parameters(&self) -> Vec<Tensor> {
        let mut list = vec![self.base.clone()];
        list.extend(
            self.blocks
                .iter()
                .chain([&self.cross])
                .flat_map(MultiheadAttention::parameters),
        );
        list.extend(self.first_norm.parameters());
        list.extend(self.second_norm.parameters());
        list.extend(self.feed.iter().flat_map(Linear::parameters));
        list.push(self.affinity.table.clone());
        list.extend(self.sensitivity.iter().flat_map(Linear::parameters));
        list
    }

    fn forward(&self, matrix: &Tensor, ids: &Tensor) -> Tensor {
        let context = matrix.context();
        context.set_scope("layer", Some(self.index));
        let (batch, length) = (ids.size(0), ids.size(1));
        let flat_sizes = [batch, length, BLOCKS, BLOCK];
        at!(context, "blocks = M as sixteen 2×2");
        let blocks = {
            let seen = view::view(matrix, [batch, length, 4, 2, 4, 2]);
            view::reshape(view::permute(seen, &[0, 1, 2, 4, 3, 5]), flat_sizes)
        };
        at!(context, "z = [attention_i(block_i)]");
        let parts = self
            .blocks
            .iter()
            .map(|attention| {
                let [query, key, value] = [0, 1, 2].map(|_| view::select(&blocks, 2));
                let (out, weights) = attention.attend_three(&query, &key, &value);
                drop(weights);
                out
            })
            .collect();
        let mut z = view::cat(parts, 2);
        at!(context, "c, a = cross(z)");
        let (crossed, attention) = self.cross.attend_self(&z);
        at!(context, "z = norm(z + c)");
        z = {
            let sum = pointwise::add(&z, &crossed);
            self.first_norm.forward(&sum)
        };
        at!(context, "z = norm(z + feed(z))");
        z = {
            let sum = pointwise::add(&z, self.feed_forward(&z));
            self.second_norm.forward(&sum)
        };
        at!(context, "e = −Σ a · log(a + ε)");
        let entropy = {
            let logarithm = pointwise::log(pointwise::add_number(&attention));
            pointwise::neg(reduce::sum(
                pointwise::mul(&attention, logarithm),
                &[2],
                true,
            ))
        };
        at!(context, "g = sense([affinity[ids], e]) · base");
        let gate = {
            let joined = view::cat(vec![self.affinity.forward(ids), entropy.clone()], 2);
            pointwise::mul(self.sense(joined), &self.base)
        };
        at!(context, "flat = M as sixteen blocks");
        let flat = view::reshape(matrix, flat_sizes);
        at!(context, "M = flat + (z − flat) · g");
        let moved = {
            let difference = pointwise::sub(view::view(&z, flat_sizes), &flat);
            pointwise::add(&flat, pointwise::mul(difference, view::unsqueeze(&gate, 3)))
        };
        let out = view::reshape(moved, [batch, length, 8, 8]);
        drop((blocks, z, crossed, attention, entropy, gate, flat));
        out
    }

    /// Linear, GELU, dropout, linear, dropout.
    fn feed_forward(&self, z: &Tensor) -> Tensor {
        let mut x = self.feed[0].forward(z);
        x = pointwise::gelu(&x);
        x = dropout::dropout(&x, self.dropout);
        x = self.feed[1].forward(&x);
        dropout::dropout(x, self.dropout)
    }

    /// Linear, GELU, dropout, linear, sigmoid.
    fn sense(&self, joined: Tensor) -> Tensor {
        let mut x = self.sensitivity[0].forward(&joined);
        x = pointwise::gelu(&x);
        x = dropout::dropout(&x, self.dropout);
        x = self.sensitivity[1].forward(&x);
        x = pointwise::sigmoid(&x);
        drop(joined);
        x
    }
}

/// The language model with its loss.
pub struct Mu {
    context: Context,
    tokens: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
    positions: Tensor,
    vocabulary: u64,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl Mu {
    pub fn new(builder: &Builder, config: &architecture::Mu, batch: [u64; 2]) -> Mu {
        let tokens = builder.embedding(config.vocabulary, WIDTH);
        let layers: Vec<Layer> = (0..config.layers)
            .map(|index| Layer::new(builder, config, index as u32))
            .collect();
        let norm = builder.layer_norm(WIDTH);
        let head = builder.linear("head", WIDTH, config.vocabulary, true);
        let positions = builder.parameter([1, batch[1], WIDTH]);
        let mut order = vec![positions.clone(), tokens.table.clone()];
        order.extend(layers.iter().flat_map(Layer::parameters));
        order.extend(norm.parameters());
        order.extend(head.parameters());
        builder.set_order(order);
        Mu {
            context: builder.context.clone(),
            tokens,
            layers,
            norm,
            head,
            positions,
            vocabulary: config.vocabulary,
            batch,
            trainable: builder.trainable(),
        }
    }

    fn logits(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        let (batch, length) = (ids.size(0), ids.size(1));
        at!(context, "M = tokens[ids] + positions");
        let sum = pointwise::add(self.tokens.forward(ids), view::alias(&self.positions));
        let mut matrix = view::view(sum, [batch, length, 8, 8]);
        for layer in &self.layers {
            matrix = layer.forward(&matrix, ids);
        }
        context.set_scope("head", None);
        at!(context, "logits = Wh norm(M)");
        let normed = self
            .norm
            .forward(&view::reshape(&matrix, [batch, length, WIDTH]));
        let logits = self.head.forward(&normed);
        drop(normed);
        drop(matrix);
        logits
    }
}

impl Program for Mu {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        next_token_loss(self.logits(&batch[0]), &batch[0], self.vocabulary)
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::Mu {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Mu::new(&setup.builder(), self, setup.batch))
    }
}
