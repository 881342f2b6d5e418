//! A Mamba language model: token and position embedding, blocks of a gated selective scan,
//! layer norm, and a head tied to the token embedding.
//!
//! Block: `x + dropout(out_proj(silu(z) · SSM(u)))` with `[z, u] = in_proj(norm(x))`. The
//! norm that opens a block is fused with the residual addition that closes the one before.

use cinch_architecture::Mamba;
use cinch_graph::op::{NormKind, ScanInputs};
use cinch_graph::{Graph, GraphError, Init, TensorId};

use crate::{Build, Builds};

const WEIGHT: Init = Init::Normal { std: 0.02 };
const NORM: (NormKind, f64) = (NormKind::Layer, 1e-5);
/// The time steps that a new model starts with, as in the original Mamba.
const TIME_STEP: Init = Init::InverseSoftplus {
    low: 0.001,
    high: 0.1,
};

impl Builds for Mamba {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
        model(graph, self, build)
    }
}

fn model(g: &mut Graph, config: &Mamba, build: &Build) -> Result<(), GraphError> {
    let d = config.width as usize;
    let tokens = build.tokens(g);
    let continued = build.continued(g);
    let vocabulary = config.vocabulary as usize;
    let table = build.weight(g, "embedding.weight", [vocabulary, d], WEIGHT);
    let shape = [config.positions as usize, d];
    let positions = build.weight(g, "positions.weight", shape, WEIGHT);
    let mut stream = build.embedding(g, [tokens, table, positions], continued, None)?;

    let (gamma, beta) = build.norm_weights(g, "blocks.0.norm", d);
    let mut normed = g.norm("blocks.0.norm", stream, NORM, gamma, Some(beta))?;
    for block in 0..config.layers {
        let name = format!("blocks.{block}");
        g.enter_block(&name);
        let branch = mixer(g, (config, build), &name, normed, continued)?;
        let next = if block + 1 < config.layers {
            format!("blocks.{}.norm", block + 1)
        } else {
            "norm".to_owned()
        };
        let (gamma, beta) = build.norm_weights(g, &next, d);
        let dropout = g.dropout(build.dropout(config.dropout));
        let out = g.residual_norm(&next, (stream, branch), dropout, NORM, gamma, Some(beta))?;
        (stream, normed) = (out.stream, out.normed);
        g.leave_block();
    }
    build.head(g, normed, table)
}

/// `out_proj(silu(z) · SSM(u))`.
fn mixer(
    g: &mut Graph,
    (config, build): (&Mamba, &Build),
    block: &str,
    x: TensorId,
    continued: Option<TensorId>,
) -> Result<TensorId, GraphError> {
    let name = |part: &str| format!("{block}.{part}");
    let (d, state) = (config.width as usize, config.states as usize);
    let (inner, rank) = (config.channels() as usize, config.rank() as usize);

    // Columns 0..inner are z, the rest u.
    let in_proj = build.weight(g, &name("in_proj.weight"), [2 * inner, d], WEIGHT);
    let zu = g.linear(&name("in_proj"), x, in_proj, None)?;
    let (u, u_column) = if config.convolution > 0 {
        let bound = 1.0 / (config.convolution as f64).sqrt();
        let init = Init::Uniform { bound };
        let shape = [inner, config.convolution as usize];
        let weight = build.small_weight(g, &name("conv.weight"), shape, init);
        let bias = build.small_weight(g, &name("conv.bias"), [inner], Init::Zeros);
        // Over one step there is no past to keep.
        let u = match continued.filter(|_| config.convolution > 1) {
            Some(positions) => {
                g.convolution_cached(&name("conv"), zu, inner, (weight, bias), positions)?
            }
            None => g.convolution(&name("conv"), zu, inner, weight, bias)?,
        };
        (u, 0)
    } else {
        (zu, inner)
    };

    let x_proj = build.weight(g, &name("x_proj.weight"), [rank + 2 * state, inner], WEIGHT);
    let p = g.linear_columns(&name("x_proj"), u, u_column, x_proj, None)?;
    let dt_weight = build.weight(g, &name("dt_proj.weight"), [inner, rank], WEIGHT);
    let dt_bias = build.small_weight(g, &name("dt_proj.bias"), [inner], TIME_STEP);
    let dt = g.linear_columns(&name("dt_proj"), p, 0, dt_weight, Some(dt_bias))?;
    let inputs = ScanInputs {
        x: u,
        x_column: u_column,
        z: zu,
        z_column: 0,
        p,
        dt,
        a_log: build.small_weight(g, &name("A_log"), [inner, state], Init::LogRange),
        d: build.small_weight(g, &name("D"), [inner], Init::Ones),
    };
    let chunk = config.scan_chunk as usize;
    let y = match continued {
        Some(positions) => g.scan_cached(&name("scan"), inputs, rank, chunk, positions)?,
        None => g.scan(&name("scan"), inputs, rank, chunk)?,
    };
    let out_proj = build.weight(g, &name("out_proj.weight"), [d, inner], WEIGHT);
    g.linear(&name("out_proj"), y, out_proj, None)
}
