//! A Mamba language model: token and position embedding, blocks of a gated selective scan,
//! layer norm, and a head tied to the token embedding.
//!
//! Block: `x + dropout(out_proj(silu(z) · SSM(u)))` with `[z, u] = in_proj(norm(x))`. The
//! norm that opens a block is fused with the residual addition that closes the one before.

use cinch_config::MambaConfig;
use cinch_graph::op::{NormKind, ScanInputs};
use cinch_graph::{Graph, GraphError, Init, TensorId};

use crate::{Build, norm_weights};

const WEIGHT: Init = Init::Normal { std: 0.02 };
const NORM: (NormKind, f64) = (NormKind::Layer, 1e-5);
/// The time steps that a new model starts with, as in the original Mamba.
const TIME_STEP: Init = Init::InverseSoftplus {
    low: 0.001,
    high: 0.1,
};

pub(crate) fn build(g: &mut Graph, config: &MambaConfig, build: Build) -> Result<(), GraphError> {
    let d = config.d_model;
    let tokens = build.tokens(g);
    let table = g.weight("embedding.weight", [config.vocab_size, d], WEIGHT);
    let positions = g.weight("positions.weight", [config.max_seq_len, d], WEIGHT);
    let mut stream = g.embedding("embedding", tokens, table, Some(positions), None)?;

    let (gamma, beta) = norm_weights(g, "blocks.0.norm", d);
    let mut normed = g.norm("blocks.0.norm", stream, NORM, gamma, Some(beta))?;
    for block in 0..config.n_layers {
        let name = format!("blocks.{block}");
        g.enter_block(&name);
        let branch = mixer(g, config, &name, normed)?;
        let next = if block + 1 < config.n_layers {
            format!("blocks.{}.norm", block + 1)
        } else {
            "norm".to_owned()
        };
        let (gamma, beta) = norm_weights(g, &next, d);
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
    config: &MambaConfig,
    block: &str,
    x: TensorId,
) -> Result<TensorId, GraphError> {
    let name = |part: &str| format!("{block}.{part}");
    let (d, state) = (config.d_model, config.d_state);
    let inner = config.expand_factor * d;
    let rank = inner.div_ceil(16);

    // Columns 0..inner are z, the rest u.
    let in_proj = g.weight(&name("in_proj.weight"), [2 * inner, d], WEIGHT);
    let zu = g.linear(&name("in_proj"), x, in_proj, None)?;
    let (u, u_column) = if config.d_conv > 0 {
        let bound = 1.0 / (config.d_conv as f64).sqrt();
        let init = Init::Uniform { bound };
        let weight = g.small_weight(&name("conv.weight"), [inner, config.d_conv], init);
        let bias = g.small_weight(&name("conv.bias"), [inner], Init::Zeros);
        (g.convolution(&name("conv"), zu, inner, weight, bias)?, 0)
    } else {
        (zu, inner)
    };

    let x_proj = g.weight(&name("x_proj.weight"), [rank + 2 * state, inner], WEIGHT);
    let p = g.linear_columns(&name("x_proj"), u, u_column, x_proj, None)?;
    let dt_weight = g.weight(&name("dt_proj.weight"), [inner, rank], WEIGHT);
    let dt_bias = g.small_weight(&name("dt_proj.bias"), [inner], TIME_STEP);
    let dt = g.linear_columns(&name("dt_proj"), p, 0, dt_weight, Some(dt_bias))?;
    let inputs = ScanInputs {
        x: u,
        x_column: u_column,
        z: zu,
        z_column: 0,
        p,
        dt,
        a_log: g.small_weight(&name("A_log"), [inner, state], Init::LogRange),
        d: g.small_weight(&name("D"), [inner], Init::Ones),
    };
    let y = g.scan(&name("scan"), inputs, rank, config.scan_chunk)?;
    let out_proj = g.weight(&name("out_proj.weight"), [d, inner], WEIGHT);
    g.linear(&name("out_proj"), y, out_proj, None)
}
