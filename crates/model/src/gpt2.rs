//! GPT-2: token and position embedding, pre-norm blocks of causal attention and a GELU
//! feed-forward, layer norm, and a head tied to the token embedding.

use cinch_architecture::Gpt2;
use cinch_graph::op::{ActivationKind, Attention, AttentionInputs, NormKind};
use cinch_graph::{Graph, GraphError, Init, TensorId};

use crate::{Build, Builds, Rows};

const WEIGHT: Init = Init::Normal { std: 0.02 };

impl Builds for Gpt2 {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
        model(graph, self, build)
    }
}

fn model(g: &mut Graph, config: &Gpt2, build: &Build) -> Result<(), GraphError> {
    let d = config.width as usize;
    let norm = (NormKind::Layer, config.norm_epsilon);
    let rate = build.dropout(config.residual_dropout);
    let tokens = build.tokens(g);
    let continued = build.continued(g);
    let vocabulary = config.vocabulary as usize;
    let table = build.weight(g, "embedding.weight", [vocabulary, d], WEIGHT);
    let shape = [config.positions as usize, d];
    let positions = build.weight(g, "positions.weight", shape, WEIGHT);
    let dropout = g.dropout(rate);
    let mut stream = build.embedding(g, [tokens, table, positions], continued, dropout)?;

    let (gamma, beta) = build.norm_weights(g, "blocks.0.attention_norm", d);
    let mut normed = g.norm("blocks.0.attention_norm", stream, norm, gamma, Some(beta))?;
    for block in 0..config.layers {
        let name = |part: &str| format!("blocks.{block}.{part}");
        g.enter_block(format!("blocks.{block}"));

        let part = Part {
            config,
            build,
            name: &name,
        };
        let branch = part.attention(g, normed, continued)?;
        let (gamma, beta) = build.norm_weights(g, &name("mlp_norm"), d);
        let dropout = g.dropout(rate);
        let pair = (stream, branch);
        let out = g.residual_norm(&name("mlp_norm"), pair, dropout, norm, gamma, Some(beta))?;
        (stream, normed) = (out.stream, out.normed);

        let branch = part.feed_forward(g, normed)?;
        let next = if block + 1 < config.layers {
            format!("blocks.{}.attention_norm", block + 1)
        } else {
            "norm".to_owned()
        };
        let (gamma, beta) = build.norm_weights(g, &next, d);
        let dropout = g.dropout(rate);
        let out = g.residual_norm(&next, (stream, branch), dropout, norm, gamma, Some(beta))?;
        (stream, normed) = (out.stream, out.normed);
        g.leave_block();
    }
    build.head(g, normed, table)
}

/// What the parts of a block are built with.
struct Part<'a> {
    config: &'a Gpt2,
    build: &'a Build,
    /// Of something in the block.
    name: &'a dyn Fn(&str) -> String,
}

impl Part<'_> {
    fn attention(
        &self,
        g: &mut Graph,
        x: TensorId,
        continued: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let (d, heads) = (self.config.width as usize, self.config.heads as usize);
        let qkv = self.dense(g, "attention.qkv", x, 3 * d, WEIGHT)?;
        // Of no heads, nothing: the op refuses them.
        let head_dim = d.checked_div(heads).unwrap_or(0);
        let op = Attention {
            inputs: AttentionInputs::Packed,
            heads,
            kv_heads: heads,
            head_dim,
            causal: true,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout: {
                let rate = self.build.dropout(self.config.residual_dropout);
                g.dropout(rate)
            },
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        let rows = Rows {
            continued,
            ..Rows::default()
        };
        let name = (self.name)("attention");
        let o = self.build.attend(g, &name, op, &[qkv], rows)?;
        self.dense(g, "attention.out", o, d, residual_init(self.config))
    }

    fn feed_forward(&self, g: &mut Graph, x: TensorId) -> Result<TensorId, GraphError> {
        let d = self.config.width as usize;
        let hidden = self.dense(g, "mlp.up", x, 4 * d, WEIGHT)?;
        let active = g.activation(&(self.name)("mlp.gelu"), hidden, ActivationKind::GeluTanh)?;
        self.dense(g, "mlp.down", active, d, residual_init(self.config))
    }

    fn dense(
        &self,
        g: &mut Graph,
        part: &str,
        x: TensorId,
        outputs: usize,
        init: Init,
    ) -> Result<TensorId, GraphError> {
        let (name, inputs) = ((self.name)(part), g.ty(x).width());
        let shape = [outputs, inputs];
        let weight = self.build.weight(g, &format!("{name}.weight"), shape, init);
        let bias = format!("{name}.bias");
        let bias = self.build.small_weight(g, &bias, [outputs], Init::Zeros);
        g.linear(&name, x, weight, Some(bias))
    }
}

/// Projections into the residual stream start smaller, so that its variance does not grow
/// with depth: each of the 2n of them adds a share.
fn residual_init(config: &Gpt2) -> Init {
    Init::Normal {
        std: 0.02 / (2.0 * config.layers as f64).sqrt(),
    }
}
