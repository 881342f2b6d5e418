//! MU: each token is a matrix of 8 × 8 values, cut into 16 blocks of 4 that have attentions of
//! their own; a gate says how far each group of values moves in a layer.
//!
//! Layer: `z` from the blocks' attentions side by side; `z = norm(z + cross(z))`,
//! `z = norm(z + feed(z))`; `M' = M + (z − M)·s`, where `s` is made from the token's affinities and
//! from the entropy of the cross attention.
//!
//! The 64 values of a token are kept by their place in a block first, `[4, 16]`: the projections of
//! all blocks are then sums over a dimension, and what changes a block's values is read along the
//! other. The order of columns is a matter of the weights, so nothing is moved for it; only where
//! the published program's groups are asked for, which are not its blocks.

use cinch_architecture::Mu;
use cinch_graph::op::{
    Attention, AttentionEntropy, AttentionInputs, CachedAttention, CachedAttentionEntropy, Domain,
    Head, Joined, NormKind, Over, ReduceKind,
};
use cinch_graph::{Graph, GraphError, Init, Shape, TensorId};

use crate::{Build, Builds, Purpose, Rows};

const NORM: (NormKind, f64) = (NormKind::Layer, 1e-5);
/// What PyTorch's tables start with.
const TABLE: Init = Init::Normal { std: 1.0 };
const POSITIONS: Init = Init::Normal { std: 0.02 };
const BASE: Init = Init::Constant { value: 0.5 };

const BLOCKS: usize = Mu::BLOCKS as usize;
const BLOCK: usize = Mu::BLOCK as usize;
const WIDTH: usize = Mu::WIDTH as usize;

impl Builds for Mu {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
        model(graph, self, build)
    }

    fn without_generation(&self) -> Option<&'static str> {
        (!self.causal).then_some("its tokens see later ones, which a text that is written has not")
    }
}

fn model(g: &mut Graph, config: &Mu, build: &Build) -> Result<(), GraphError> {
    let tokens = build.tokens(g);
    let continued = build.continued(g);
    let vocabulary = config.vocabulary as usize;
    let table = build.weight(g, "embedding.weight", [vocabulary, WIDTH], TABLE);
    let shape = [config.positions as usize, WIDTH];
    let positions = build.weight(g, "positions.weight", shape, POSITIONS);
    let stream = build.embedding(g, [tokens, table, positions], continued, None)?;
    let mut matrix = g.view("matrix", stream, build.matrix())?;
    for index in 0..config.layers {
        let name = format!("layers.{index}");
        g.enter_block(&name);
        let layer = Layer {
            config,
            build,
            name,
            tokens,
            continued,
        };
        matrix = layer.build(g, matrix)?;
        g.leave_block();
    }
    let h = g.view("hidden", matrix, build.columns())?;
    let (gamma, beta) = build.norm_weights(g, "norm", WIDTH);
    let normed = g.norm("norm", h, NORM, gamma, Some(beta))?;
    let shape = [vocabulary, WIDTH];
    let weight = build.weight(g, "head.weight", shape, xavier(WIDTH, vocabulary));
    let bias = build.small_weight(g, "head.bias", [vocabulary], Init::Zeros);
    let bias = Some(bias);
    build.head(g, normed, Head { weight, bias })
}

impl Build {
    /// The values of all tokens: by the place in a block, then by block.
    fn matrix(&self) -> [usize; 4] {
        [self.batch, self.seq_len, BLOCK, BLOCKS]
    }

    /// The same, side by side.
    fn columns(&self) -> [usize; 3] {
        [self.batch, self.seq_len, WIDTH]
    }
}

/// Uniform, such that neither direction of a product grows.
fn xavier(inputs: usize, outputs: usize) -> Init {
    Init::Uniform {
        bound: (6.0 / (inputs + outputs) as f64).sqrt(),
    }
}

struct Layer<'a> {
    config: &'a Mu,
    build: &'a Build,
    name: String,
    tokens: TensorId,
    continued: Option<TensorId>,
}

impl Layer<'_> {
    fn build(&self, g: &mut Graph, matrix: TensorId) -> Result<TensorId, GraphError> {
        let z = self.blocks(g, matrix)?;
        let (c, entropy) = self.cross(g, z)?;
        let z = self.residual_norm(g, "cross_norm", (z, c), 0.0)?;
        let branch = self.feed_forward(g, z)?;
        let z = self.residual_norm(g, "feed_norm", (z, branch), self.config.dropout)?;
        let gate = self.gate(g, entropy)?;
        let z = g.view(&self.part("z"), z, self.build.matrix())?;
        let base = self.small(g, "gate.base", [BLOCKS], BASE);
        g.map(&self.part("mix"), &[matrix, z, gate, base], |v| {
            &v[0] + (&v[1] - &v[0]) * v[2].sigmoid() * &v[3]
        })
    }

    /// The attentions of the blocks, side by side.
    fn blocks(&self, g: &mut Graph, matrix: TensorId) -> Result<TensorId, GraphError> {
        let x = match self.config.published_order {
            true => self.cut_into_blocks(g, matrix)?,
            false => matrix,
        };
        // Of each block's three projections, drawn as one matrix.
        let init = xavier(BLOCK, 3 * BLOCK);
        let mut sources = Vec::with_capacity(3);
        for which in ["query", "key", "value"] {
            sources.push(self.project_blocks(g, which, x, init)?);
        }
        let heads = BLOCKS * Mu::BLOCK_HEADS as usize;
        let op = self.attention(g, AttentionInputs::Separate, heads);
        let rows = Rows {
            continued: self.continued,
            ..Rows::default()
        };
        let name = self.part("blocks.attention");
        let o = self.build.attend(g, &name, op, &sources, rows)?;
        self.join_blocks(g, o)
    }

    /// `y[block, o] = Σ_j W[j, (block, o)]·x[j, block] + b`: the blocks' values come out side by
    /// side, which are heads of two.
    fn project_blocks(
        &self,
        g: &mut Graph,
        which: &str,
        x: TensorId,
        init: Init,
    ) -> Result<TensorId, GraphError> {
        let name = format!("blocks.{which}");
        let weight = self.weight(g, &format!("{name}.weight"), [BLOCK, WIDTH], init);
        let bias = self.small(g, &format!("{name}.bias"), [WIDTH], Init::Zeros);
        let domain = self.products(g);
        let sum = (ReduceKind::Sum, Over::Sequence);
        g.reduce_over(&self.part(&name), sum, domain, &[x, weight, bias], |v| {
            // The bias is in each of the summands.
            &v[0] * &v[1] + &v[2] * (1.0 / BLOCK as f64)
        })
    }

    /// `y[j, block] = Σ_o W[j, (block, o)]·x[block, o] + b`.
    fn join_blocks(&self, g: &mut Graph, o: TensorId) -> Result<TensorId, GraphError> {
        let Build { batch, seq_len, .. } = *self.build;
        let name = "blocks.out";
        let init = xavier(BLOCK, BLOCK);
        let weight = self.weight(g, "blocks.out.weight", [BLOCK, WIDTH], init);
        let bias = self.small(g, "blocks.out.bias", [BLOCK, BLOCKS], Init::Zeros);
        let rows = [batch, seq_len, 1, WIDTH];
        let o = g.view(&self.part("blocks.joined"), o, rows)?;
        let domain = self.products(g);
        let sum = (ReduceKind::Sum, Over::Groups(BLOCK));
        let y = g.reduce_over(&self.part(name), sum, domain, &[o, weight], |v| {
            &v[0] * &v[1]
        })?;
        let name = self.part("blocks.biased");
        let y = g.map(&name, &[y, bias], |v| &v[0] + &v[1])?;
        g.view(&self.part("blocks.z"), y, self.build.columns())
    }

    /// All pairs of a block's values.
    fn products(&self, g: &Graph) -> Domain {
        let Build { batch, seq_len, .. } = *self.build;
        Domain {
            shape: Shape::new(&[batch, seq_len, BLOCK, WIDTH]),
            dtype: g.compute,
        }
    }

    /// The blocks' values, where the matrix is kept by the published program's groups of four
    /// neighbours in a row. Of the row's and the column's bits it has `c₁c₀ r₂r₁r₀c₂`, and the
    /// blocks need `r₀c₀ r₂r₁c₂c₁`.
    fn cut_into_blocks(&self, g: &mut Graph, matrix: TensorId) -> Result<TensorId, GraphError> {
        let Build { batch, seq_len, .. } = *self.build;
        let half = WIDTH / 2;
        let name = |part: &str| self.part(&format!("order.{part}"));
        let columns = g.view(&name("columns"), matrix, self.build.columns())?;
        let halves = g.split(&name("halves"), Joined::Columns, columns, &[half, half])?;
        let mut parts = Vec::with_capacity(2);
        for part in halves {
            parts.push(g.view(&name("half"), part, [batch, seq_len, half, 1])?);
        }
        let pairs = g.concat(&name("pairs"), Joined::Columns, &parts)?;
        let eight = [batch, seq_len, WIDTH / 8, 8];
        let eights = g.view(&name("eights"), pairs, eight)?;
        let rows = g.split(&name("rows"), Joined::Columns, eights, &[4, 4])?;
        let mut parts = Vec::with_capacity(2);
        for part in rows {
            parts.push(g.view(&name("row"), part, [batch, seq_len, half])?);
        }
        let blocks = g.concat(&name("blocks"), Joined::Columns, &parts)?;
        g.view(&name("matrix"), blocks, self.build.matrix())
    }

    /// Attention across the blocks, and its entropy.
    fn cross(&self, g: &mut Graph, z: TensorId) -> Result<(TensorId, TensorId), GraphError> {
        let qkv = self.dense(g, "cross.qkv", z, 3 * WIDTH)?;
        let heads = self.config.heads as usize;
        let op = self.attention(g, AttentionInputs::Packed, heads);
        let entropy = AttentionEntropy {
            heads,
            head_dim: op.head_dim,
            causal: op.causal,
            scale: op.scale,
            keep_means: true,
        };
        let (name, of_entropy) = (self.part("cross"), self.part("entropy"));
        let (o, entropy) = match (self.build.purpose, self.continued) {
            (Purpose::Generate { context, .. }, Some(positions)) => {
                let op = CachedAttention {
                    attention: op,
                    slots: context,
                };
                let [o, keys] = g.attend_cached_with_keys(&name, op, &[qkv], positions)?;
                let entropy = AttentionEntropy {
                    keep_means: false,
                    ..entropy
                };
                let op = CachedAttentionEntropy(entropy);
                let entropy = g.emit(of_entropy, op, vec![qkv, keys, positions])?[0];
                (o, entropy)
            }
            _ => {
                let random = op.dropout.map(|_| g.random_state());
                let inputs = [qkv].into_iter().chain(random).collect();
                let outputs = g.emit(name, op, inputs)?;
                let entropy = g.attention_entropy(&of_entropy, entropy, qkv, outputs[1])?;
                (outputs[0], entropy)
            }
        };
        let c = self.dense(g, "cross.out", o, WIDTH)?;
        Ok((c, entropy))
    }

    fn attention(&self, g: &mut Graph, inputs: AttentionInputs, heads: usize) -> Attention {
        let head_dim = WIDTH / heads;
        Attention {
            inputs,
            heads,
            kv_heads: heads,
            head_dim,
            causal: self.config.causal,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout: g.dropout(self.build.dropout(self.config.dropout)),
            padding: false,
            window: None,
            documents: false,
            selection: false,
        }
    }

    fn feed_forward(&self, g: &mut Graph, z: TensorId) -> Result<TensorId, GraphError> {
        let hidden = self.dense(g, "feed.up", z, 4 * WIDTH)?;
        let dropout = g.dropout(self.build.dropout(self.config.dropout));
        let name = self.part("feed.gelu");
        let active = g.map(&name, &[hidden], |v| v[0].gelu().dropout(dropout))?;
        self.dense(g, "feed.down", active, WIDTH)
    }

    /// What each group of values moves by, before the sigmoid: [B, T, 1, 16].
    fn gate(&self, g: &mut Graph, entropy: TensorId) -> Result<TensorId, GraphError> {
        let Build { batch, seq_len, .. } = *self.build;
        let inner = Mu::SENSITIVITY as usize;
        let shape = [self.config.vocabulary as usize, BLOCKS];
        let table = self.weight(g, "affinity.weight", shape, TABLE);
        let affinity = g.embedding(&self.part("affinity"), self.tokens, table, None, None)?;
        // The entropy is one more input, whose column is apart: the product stays even.
        let init = xavier(BLOCKS + 1, inner);
        let weight = self.weight(g, "gate.hidden.weight", [inner, BLOCKS], init);
        let of_entropy = self.small(g, "gate.entropy.weight", [inner], init);
        let bias = self.small(g, "gate.hidden.bias", [inner], Init::Zeros);
        let hidden = g.linear(&self.part("gate.hidden"), affinity, weight, None)?;
        let dropout = g.dropout(self.build.dropout(self.config.dropout));
        let read = [hidden, entropy, of_entropy, bias];
        let active = g.map(&self.part("gate.gelu"), &read, |v| {
            let sum = &v[0] + &v[1] * &v[2] + &v[3];
            sum.gelu().dropout(dropout)
        })?;
        let gate = self.dense(g, "gate.out", active, BLOCKS)?;
        g.view(&self.part("gate"), gate, [batch, seq_len, 1, BLOCKS])
    }

    fn residual_norm(
        &self,
        g: &mut Graph,
        part: &str,
        pair: (TensorId, TensorId),
        rate: f64,
    ) -> Result<TensorId, GraphError> {
        let name = self.part(part);
        let (gamma, beta) = self.build.norm_weights(g, &name, WIDTH);
        let dropout = g.dropout(self.build.dropout(rate));
        let out = g.residual_norm(&name, pair, dropout, NORM, gamma, Some(beta))?;
        Ok(out.normed)
    }

    fn dense(
        &self,
        g: &mut Graph,
        part: &str,
        x: TensorId,
        outputs: usize,
    ) -> Result<TensorId, GraphError> {
        let inputs = g.ty(x).width();
        let init = xavier(inputs, outputs);
        let weight = self.weight(g, &format!("{part}.weight"), [outputs, inputs], init);
        let bias = self.small(g, &format!("{part}.bias"), [outputs], Init::Zeros);
        g.linear(&self.part(part), x, weight, Some(bias))
    }

    fn part(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }

    fn weight(&self, g: &mut Graph, part: &str, shape: [usize; 2], init: Init) -> TensorId {
        self.build.weight(g, &self.part(part), shape, init)
    }

    fn small(&self, g: &mut Graph, part: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.build.small_weight(g, &self.part(part), shape, init)
    }
}
