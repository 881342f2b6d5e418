//! GPT-2: token and position embedding, pre-norm blocks of causal attention and a GELU
//! feed-forward, layer norm, and a head tied to the token embedding.

use cinch_architecture::Gpt2;
use cinch_graph::op::{ActivationKind, NormKind};
use cinch_graph::{Graph, GraphError, Init, TensorId};

use crate::{Build, Builds, norm_weights};

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
    let table = g.weight("embedding.weight", [config.vocabulary as usize, d], WEIGHT);
    let positions = g.weight("positions.weight", [config.positions as usize, d], WEIGHT);
    let dropout = g.dropout(rate);
    let mut stream = g.embedding("embedding", tokens, table, Some(positions), dropout)?;

    let (gamma, beta) = norm_weights(g, "blocks.0.attention_norm", d);
    let mut normed = g.norm("blocks.0.attention_norm", stream, norm, gamma, Some(beta))?;
    for block in 0..config.layers {
        let name = |part: &str| format!("blocks.{block}.{part}");
        g.enter_block(format!("blocks.{block}"));

        let branch = attention(g, config, &name, normed, rate)?;
        let (gamma, beta) = norm_weights(g, &name("mlp_norm"), d);
        let dropout = g.dropout(rate);
        let pair = (stream, branch);
        let out = g.residual_norm(&name("mlp_norm"), pair, dropout, norm, gamma, Some(beta))?;
        (stream, normed) = (out.stream, out.normed);

        let branch = feed_forward(g, config, &name, normed)?;
        let next = if block + 1 < config.layers {
            format!("blocks.{}.attention_norm", block + 1)
        } else {
            "norm".to_owned()
        };
        let (gamma, beta) = norm_weights(g, &next, d);
        let dropout = g.dropout(rate);
        let out = g.residual_norm(&next, (stream, branch), dropout, norm, gamma, Some(beta))?;
        (stream, normed) = (out.stream, out.normed);
        g.leave_block();
    }
    build.head(g, normed, table)
}

fn attention(
    g: &mut Graph,
    config: &Gpt2,
    name: &dyn Fn(&str) -> String,
    x: TensorId,
    dropout: f64,
) -> Result<TensorId, GraphError> {
    let d = config.width as usize;
    let qkv = dense(g, &name("attention.qkv"), x, 3 * d, WEIGHT)?;
    let dropout = g.dropout(dropout);
    let o = g.attention(
        &name("attention"),
        qkv,
        config.heads as usize,
        true,
        dropout,
    )?;
    dense(g, &name("attention.out"), o, d, residual_init(config))
}

fn feed_forward(
    g: &mut Graph,
    config: &Gpt2,
    name: &dyn Fn(&str) -> String,
    x: TensorId,
) -> Result<TensorId, GraphError> {
    let d = config.width as usize;
    let hidden = dense(g, &name("mlp.up"), x, 4 * d, WEIGHT)?;
    let active = g.activation(&name("mlp.gelu"), hidden, ActivationKind::GeluTanh)?;
    dense(g, &name("mlp.down"), active, d, residual_init(config))
}

/// Projections into the residual stream start smaller, so that its variance does not grow
/// with depth: each of the 2n of them adds a share.
fn residual_init(config: &Gpt2) -> Init {
    Init::Normal {
        std: 0.02 / (2.0 * config.layers as f64).sqrt(),
    }
}

fn dense(
    g: &mut Graph,
    name: &str,
    x: TensorId,
    outputs: usize,
    init: Init,
) -> Result<TensorId, GraphError> {
    let inputs = g.ty(x).width();
    let weight = g.weight(&format!("{name}.weight"), [outputs, inputs], init);
    let bias = g.small_weight(&format!("{name}.bias"), [outputs], Init::Zeros);
    g.linear(name, x, weight, Some(bias))
}
