//! Mamba as transformers runs it where the kernels of mamba-ssm are not installed: the selective scan is a loop over
//! timesteps in Python.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::causal::{CausalLanguageModel, CausalModel};
use super::module::{Builder, Embedding, Linear};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{cast, convolution, creation, matmul, pointwise, reduce, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_mamba.py";

/// Where the loss is computed.
static LOSS: Line = Line::Source {
    file: FILE,
    number: 793,
};

/// RMS norm in plain ops, in fp32.
struct RmsNorm {
    weight: Tensor,
}

impl RmsNorm {
    fn forward(&self, x: &Tensor) -> Tensor {
        let (context, dtype) = (x.context(), x.dtype());
        at!(context, FILE, 495);
        let mut hidden = cast::to(x, DType::Float32);
        let last = hidden.dim() - 1;
        at!(context, FILE, 496);
        let variance = reduce::mean(pointwise::pow_number(&hidden), &[last], true);
        at!(context, FILE, 497);
        hidden = pointwise::mul(&hidden, pointwise::rsqrt(pointwise::add_number(&variance)));
        at!(context, FILE, 498);
        let out = pointwise::mul(&self.weight, cast::to(&hidden, dtype));
        drop(hidden);
        drop(variance);
        out
    }
}

/// `nn.Conv1d` with a group for each channel.
struct Convolution {
    /// [channels, 1, kernel]
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Convolution {
    /// `causal_conv1d_fn`: the convolution of [batch, channels, length] padded on both sides, without what looks ahead.
    fn forward(&self, x: &Tensor) -> Tensor {
        let (context, length) = (x.context(), x.size(2));
        // The weight is given as a matrix and made a kernel again: for autocast a view, whose cast is not cached.
        let weight = view::squeeze(&self.weight, 1);
        let padding = self.weight.size(2) - 1;
        at!(context, FILE, 92);
        let input = cast::to(x, weight.dtype());
        at!(context, FILE, 91);
        let kernel = view::unsqueeze(&weight, 1);
        let mut out = convolution::depthwise(input, kernel, self.bias.as_ref(), padding);
        out = view::slice(&out, 2, length);
        at!(context, FILE, 99);
        out = pointwise::silu(&out);
        at!(context, FILE, 100);
        cast::to(out, x.dtype())
    }
}

/// `MambaBlock` with its mixer.
struct Layer {
    index: u32,
    norm: RmsNorm,
    convolution: Convolution,
    input: Linear,
    selection: Linear,
    steps: Linear,
    output: Linear,
    /// log(−A), [channels, states].
    decay: Tensor,
    skip: Tensor,
    config: architecture::HuggingFaceMamba,
}

/// What a timestep of the scan is made of.
struct Selected {
    /// Step sizes before their bias, [batch, channels, length].
    step: Tensor,
    /// [batch, length, states]
    entering: Tensor,
    leaving: Tensor,
    bias: Tensor,
}

impl Layer {
    fn new(builder: &Builder, config: &architecture::HuggingFaceMamba, index: u32) -> Layer {
        let (width, inner, states, rank) = (config.width, config.inner, config.states, config.rank);
        let norm = RmsNorm {
            weight: builder.parameter([width]),
        };
        let convolution = Convolution {
            weight: builder.parameter([inner, 1, config.kernel]),
            bias: config.convolution_bias.then(|| builder.parameter([inner])),
        };
        Layer {
            index,
            norm,
            convolution,
            input: builder.linear("in_proj", width, 2 * inner, config.projection_bias),
            selection: builder.linear("x_proj", inner, rank + 2 * states, false),
            steps: builder.linear("dt_proj", rank, inner, true),
            decay: builder.parameter([inner, states]),
            skip: builder.parameter([inner]),
            output: builder.linear("out_proj", inner, width, config.projection_bias),
            config: config.clone(),
        }
    }

    fn linears(&self) -> [&Linear; 4] {
        [&self.input, &self.selection, &self.steps, &self.output]
    }

    /// In the order of `parameters()`: a module's own come before those of its children.
    fn parameters(&self) -> Vec<Tensor> {
        let mut list = vec![
            self.norm.weight.clone(),
            self.decay.clone(),
            self.skip.clone(),
            self.convolution.weight.clone(),
        ];
        list.extend(self.convolution.bias.clone());
        list.extend(self.linears().into_iter().flat_map(Linear::parameters));
        list
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let context = x.context();
        context.set_scope("block", Some(self.index));
        let mut residual = x.clone();
        at!(context, FILE, 521);
        let lowered = cast::to(x, self.norm.weight.dtype());
        let mut hidden = self.norm.forward(&lowered);
        drop(lowered);
        if self.config.residual_in_float32 {
            at!(context, FILE, 523);
            residual = cast::to(&residual, DType::Float32);
        }
        hidden = self.mix(&hidden);
        at!(context, FILE, 526);
        hidden = pointwise::add(&residual, &hidden);
        drop(residual);
        hidden
    }

    /// `MambaMixer.forward`.
    fn mix(&self, x: &Tensor) -> Tensor {
        let (context, inner) = (x.context(), self.config.inner);
        at!(context, FILE, 371);
        let projected = view::transpose(self.input.forward(x), 1, 2);
        at!(context, FILE, 373);
        let decay = pointwise::neg(pointwise::exp(cast::to(&self.decay, DType::Float32)));
        self.offer_to_kernel();
        let mut halves = view::split(&projected, &[inner, inner], 1);
        let (Some(gate), Some(mut hidden)) = (halves.pop(), halves.pop()) else {
            unreachable!("two halves")
        };
        hidden = self.convolution.forward(&hidden);
        hidden = view::transpose(&hidden, 1, 2);
        let selected = self.select(&hidden);
        at!(context, FILE, 464);
        let skip = cast::to(&self.skip, DType::Float32);
        let scanned = scan(
            &view::transpose(&hidden, 1, 2),
            &selected,
            &decay,
            skip,
            &gate,
        );
        at!(context, FILE, 480);
        let turned = cast::to(view::transpose(&scanned, 1, 2), x.dtype());
        let out = self.output.forward(&turned);
        drop(turned);
        drop((projected, decay, hidden, gate));
        drop((selected.step, selected.entering, selected.leaving));
        drop(selected.bias);
        drop(scanned);
        out
    }

    /// The arguments of the fused kernel are made before it turns out that there is none.
    fn offer_to_kernel(&self) {
        let context = self.skip.context();
        let in_float32 = |tensor: &Tensor| cast::to(tensor, DType::Float32);
        at!(context, FILE, 382);
        let output_bias = self.output.bias().as_ref().map(in_float32);
        at!(context, FILE, 386);
        let skip = in_float32(&self.skip);
        at!(context, FILE, 387);
        let step_bias = self.steps.bias().as_ref().map(in_float32);
        drop(skip);
        drop(output_bias);
        drop(step_bias);
    }

    /// Step sizes, what enters the states and what is read of them, from [batch, length, channels].
    fn select(&self, hidden: &Tensor) -> Selected {
        let (rank, states) = (self.config.rank, self.config.states);
        let context = hidden.context();
        at!(context, FILE, 432);
        let mut parts = view::split(self.selection.forward(hidden), &[rank, states, states], 2);
        let (Some(leaving), Some(entering), Some(low)) = (parts.pop(), parts.pop(), parts.pop())
        else {
            unreachable!("three parts")
        };
        let (weight, bias) = (self.steps.weight(), self.steps.bias());
        at!(context, FILE, 437);
        let step = matmul::matrix_by_batch(weight, view::transpose(&low, 1, 2));
        drop(low);
        let Some(bias) = &bias else {
            unreachable!("step sizes have a bias")
        };
        at!(context, FILE, 438);
        Selected {
            step,
            entering,
            leaving,
            bias: cast::to(bias, DType::Float32),
        }
    }
}

/// `mamba_selective_scan` over x [batch, channels, length]: with Δ = softplus(step + bias) for every timestep at once
/// exp(A·Δ) and Δ·B·x, each [batch, channels, length, states]; then h ← exp(A·Δ)·h + Δ·B·x and y = h·C one timestep after
/// the other; then (y + x·D)·silu(gate).
fn scan(x: &Tensor, selected: &Selected, decay: &Tensor, skip: Tensor, gate: &Tensor) -> Tensor {
    let (context, dtype) = (x.context(), x.dtype());
    let (batch, channels, length) = (x.size(0), x.size(1), x.size(2));
    let states = decay.size(1);
    at!(context, FILE, 204);
    let bias = cast::to(&selected.bias, selected.step.dtype());
    let mut step = pointwise::add(&selected.step, view::unsqueeze(bias, 1));
    at!(context, FILE, 206);
    step = pointwise::softplus(&step);
    at!(context, FILE, 213);
    let factor = pointwise::exp(pointwise::mul(
        view::unsqueeze(view::unsqueeze(decay, 0), 2),
        view::unsqueeze(&step, 3),
    ));
    at!(context, FILE, 214);
    let entering = cast::to(view::unsqueeze(&selected.entering, 1), DType::Float32);
    let entering = pointwise::mul(view::unsqueeze(&step, 3), entering);
    at!(context, FILE, 215);
    let driven = pointwise::mul(&entering, cast::to(view::unsqueeze(x, 3), DType::Float32));
    at!(context, FILE, 251);
    let mut state = creation::filled(context, [batch, channels, states], dtype);
    let mut outputs = Vec::with_capacity(length as usize);
    for _ in 0..length {
        at!(context, FILE, 262);
        let kept = pointwise::mul(view::select(&factor, 2), &state);
        state = pointwise::add(kept, view::select(&driven, 2));
        at!(context, FILE, 265);
        let rows = cast::to(&state, dtype);
        let read = matmul::bmm(rows, view::timestep(&selected.leaving, 2));
        at!(context, FILE, 266);
        outputs.push(view::select(read, 2));
    }
    at!(context, FILE, 267);
    let mut out = view::stack(&outputs, 2);
    at!(context, FILE, 270);
    let skipped = pointwise::mul(x, view::unsqueeze(view::unsqueeze(&skip, 0), 2));
    out = pointwise::add(&out, skipped);
    at!(context, FILE, 273);
    out = pointwise::mul(&out, pointwise::silu(gate));
    drop(step);
    drop((factor, entering));
    drop(driven);
    drop(state);
    while let Some(last) = outputs.pop() {
        drop(last);
    }
    drop(skip);
    out
}

/// The causal language model with its loss.
pub struct HuggingFaceMamba {
    context: Context,
    tokens: Embedding,
    layers: Vec<Rc<Layer>>,
    norm: RmsNorm,
    head: Tensor,
    _scalar: Tensor,
    vocabulary: u64,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer: the embeddings are made to ask for one.
    embeddings_require_grad: bool,
}

impl HuggingFaceMamba {
    pub fn new(
        builder: &Builder,
        config: &architecture::HuggingFaceMamba,
        checkpoints: Checkpointing,
    ) -> HuggingFaceMamba {
        let tokens = builder.embedding(config.vocabulary, config.width);
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, config, index as u32)))
            .collect();
        let norm = RmsNorm {
            weight: builder.parameter([config.width]),
        };
        let (head, scalar) = builder.head(&tokens.table, config.tied);
        let mut order = vec![tokens.table.clone()];
        order.extend(layers.iter().flat_map(|layer| layer.parameters()));
        order.push(norm.weight.clone());
        if !config.tied {
            order.push(head.clone());
        }
        builder.set_order(order);
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        HuggingFaceMamba {
            context: builder.context.clone(),
            tokens,
            layers,
            norm,
            head,
            _scalar: scalar,
            vocabulary: config.vocabulary,
            checkpoints,
            embeddings_require_grad: checkpoints.is_on() && builder.has_adapters(),
        }
    }
}

impl CausalModel for HuggingFaceMamba {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        self.context.set_scope("embedding", None);
        at!(self.context, FILE, 667);
        let embeddings = self.tokens.forward(ids);
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        let mut hidden = embeddings.clone();
        for layer in &self.layers {
            let layer = layer.clone();
            hidden = self
                .checkpoints
                .run(&self.context, &hidden, move |x| layer.forward(x));
        }
        self.context.set_scope("head", None);
        hidden = self.norm.forward(&hidden);
        drop(embeddings);
        hidden
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        at!(self.context, FILE, 789);
        let lowered = cast::to(view::alias(hidden), self.head.dtype());
        cast::to(matmul::linear(lowered, &self.head, None), DType::Float32)
    }

    fn loss_line(&self) -> &'static Line {
        &LOSS
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }
}

impl Replay for architecture::HuggingFaceMamba {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let model = HuggingFaceMamba::new(builder, self, setup.checkpoints);
        Box::new(CausalLanguageModel::new(model, builder, setup.batch))
    }
}
