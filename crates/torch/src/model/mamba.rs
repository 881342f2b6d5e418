//! The Mamba system in plain PyTorch: a selective scan that runs timestep by timestep in Python.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::module::{Builder, Embedding, LayerNorm, Linear, next_token_loss};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{creation, dropout, index, matmul, pointwise, reduce, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

struct Block {
    index: u32,
    norm: LayerNorm,
    input: Linear,
    selection: Linear,
    steps: Linear,
    output: Linear,
    decay: Tensor,
    skip: Tensor,
    states: u64,
    dropout: f64,
}

impl Block {
    fn new(builder: &Builder, config: &architecture::Mamba, index: u32) -> Block {
        let inner = config.expansion * config.width;
        let rank = inner.div_ceil(16);
        Block {
            index,
            norm: builder.layer_norm(config.width),
            input: builder.linear("inp", config.width, 2 * inner, false),
            selection: builder.linear("xp", inner, rank + 2 * config.states, false),
            steps: builder.linear("dt", rank, inner, true),
            output: builder.linear("out", inner, config.width, false),
            decay: builder.parameter([inner, config.states]),
            skip: builder.parameter([inner]),
            states: config.states,
            dropout: config.dropout,
        }
    }

    fn parameters(&self) -> Vec<Tensor> {
        let mut list = vec![self.decay.clone(), self.skip.clone()];
        list.extend(self.norm.parameters());
        for linear in [&self.input, &self.selection, &self.steps, &self.output] {
            list.extend(linear.parameters());
        }
        list
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let context = x.context();
        context.set_scope("block", Some(self.index));
        let residual = x.clone();
        at!(context, "x1, x2 = Wi norm(x)");
        let normed = self.norm.forward(x);
        let both = self.input.forward(&normed);
        drop(normed);
        let inner = both.sizes().last() / 2;
        let mut halves = view::split(both, &[inner, inner], 2);
        let (Some(second), Some(first)) = (halves.pop(), halves.pop()) else {
            unreachable!("two halves")
        };
        at!(context, "out = r + drop(Wo (silu(x1) · scan(x2)))");
        let active = pointwise::silu(&first);
        let scanned = self.scan(&second);
        at!(context, "out = r + drop(Wo (silu(x1) · scan(x2)))");
        let product = pointwise::mul(active, scanned);
        let projected = self.output.forward(&product);
        drop(product);
        let out = pointwise::add(&residual, dropout::dropout(projected, self.dropout));
        drop(residual);
        drop(first);
        drop(second);
        out
    }

    /// h ← h·exp(Δ·A) + x·Δ·B;  y = h·C, one timestep after the other; then y + x·D.
    fn scan(&self, x: &Tensor) -> Tensor {
        let context = x.context();
        let (batch, length, inner) = (x.size(0), x.size(1), x.size(2));
        at!(context, "dt, B, C = Wx x");
        let selected = self.selection.forward(x);
        let rank = selected.sizes().last() - 2 * self.states;
        let mut parts = view::split(&selected, &[rank, self.states, self.states], 2);
        let (Some(c), Some(b), Some(mut step)) = (parts.pop(), parts.pop(), parts.pop()) else {
            unreachable!("three parts")
        };
        at!(context, "dt = softplus(Wdt dt)");
        step = pointwise::softplus(self.steps.forward(&step));
        at!(context, "A = −exp(A_log)");
        let decay = pointwise::neg(pointwise::exp(&self.decay));
        at!(context, "h = 0");
        let mut state = creation::filled(context, [batch, inner, self.states], x.dtype());
        at!(context, "y = 0");
        let y = creation::filled(context, [batch, length, inner], x.dtype());
        let (mut factor, mut entering): (Option<Tensor>, Option<Tensor>);
        (factor, entering) = (None, None);
        for _ in 0..length {
            if context.is_stopped() {
                break;
            }
            at!(context, "dA = exp(dt[t] · A)");
            let next_factor = pointwise::exp(pointwise::mul(view::timestep(&step, 2), &decay));
            drop(factor.replace(next_factor.clone()));
            at!(context, "dB = dt[t] · B[t]");
            let next_entering = pointwise::mul(view::timestep(&step, 2), view::timestep(&b, 1));
            drop(entering.replace(next_entering.clone()));
            at!(context, "h = h · dA + x[t] · dB");
            let kept = pointwise::mul(&state, &next_factor);
            state = pointwise::add(kept, pointwise::mul(view::timestep(x, 2), &next_entering));
            drop((next_factor, next_entering));
            at!(context, "y[t] = Σ h · C[t]");
            let read = reduce::sum(pointwise::mul(&state, view::timestep(&c, 1)), &[2], false);
            index::set_slice(&y, read);
        }
        at!(context, "y + x · D");
        let out = pointwise::add(&y, pointwise::mul(x, &self.skip));
        drop(selected);
        drop((step, b, c));
        drop(decay);
        drop(state);
        drop(y);
        drop((factor, entering));
        out
    }
}

/// The language model with its loss.
pub struct Mamba {
    context: Context,
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Rc<Block>>,
    norm: LayerNorm,
    vocabulary: u64,
    checkpoints: Checkpointing,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl Mamba {
    pub fn new(
        builder: &Builder,
        config: &architecture::Mamba,
        checkpoints: Checkpointing,
        batch: [u64; 2],
    ) -> Mamba {
        // The model is built on the host; these are the moves to the device.
        let tokens = builder.embedding(config.vocabulary, config.width);
        let blocks: Vec<Rc<Block>> = (0..config.layers)
            .map(|index| Rc::new(Block::new(builder, config, index as u32)))
            .collect();
        let norm = builder.layer_norm(config.width);
        let positions = builder.parameter([1, config.positions.max(batch[1]), config.width]);
        let mut order = vec![positions.clone(), tokens.table.clone()];
        order.extend(blocks.iter().flat_map(|block| block.parameters()));
        order.extend(norm.parameters());
        builder.set_order(order);
        Mamba {
            context: builder.context.clone(),
            tokens,
            positions,
            blocks,
            norm,
            vocabulary: config.vocabulary,
            checkpoints,
            batch,
            trainable: builder.trainable(),
        }
    }

    fn logits(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        at!(context, "x = tokens[ids] + positions");
        let mut x = pointwise::add(
            self.tokens.forward(ids),
            view::slice(&self.positions, 1, ids.size(1)),
        );
        for block in &self.blocks {
            let block = block.clone();
            x = self.checkpoints.run(context, &x, move |x| block.forward(x));
        }
        context.set_scope("head", None);
        at!(context, "logits = tokens norm(x)");
        let logits = matmul::linear(self.norm.forward(&x), &self.tokens.table, None);
        drop(x);
        logits
    }
}

impl Program for Mamba {
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

impl Replay for architecture::Mamba {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Mamba::new(
            &setup.builder(),
            self,
            setup.checkpoints,
            setup.batch,
        ))
    }
}
