//! The vision transformer as transformers runs it.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::activation;
use super::head_attention::{HeadAttention, Lines};
use super::mask;
use super::module::{Builder, LayerNorm, Linear};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::{convolution, creation, dropout, loss, pointwise, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_vit.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    attend: line(224),
    product: line(178),
    mask: line(181),
    softmax: line(183),
    dropout: line(184),
    mix: line(186),
    order: line(187),
};

struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    first_norm: LayerNorm,
    second_norm: LayerNorm,
    expand: Linear,
    contract: Linear,
    config: architecture::Vit,
    attention: HeadAttention,
}

impl Layer {
    fn new(setup: &Setup, builder: &Builder, config: &architecture::Vit, index: u32) -> Layer {
        let (width, inner, bias) = (config.width, config.inner, config.attention_bias);
        Layer {
            index,
            query: builder.linear("q_proj", width, width, bias),
            key: builder.linear("k_proj", width, width, bias),
            value: builder.linear("v_proj", width, width, bias),
            output: builder.linear("o_proj", width, width, true),
            first_norm: builder.layer_norm(width),
            second_norm: builder.layer_norm(width),
            expand: builder.linear("fc1", width, inner, true),
            contract: builder.linear("fc2", inner, width, true),
            config: config.clone(),
            attention: HeadAttention {
                kind: setup.attention,
                is_causal: false,
                dropout: config.attention_dropout,
                raises_softmax: true,
                lines: &LINES,
            },
        }
    }

    fn linears(&self) -> [&Linear; 6] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.expand,
            &self.contract,
        ]
    }

    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let (context, dropped) = (x.context(), self.config.hidden_dropout);
        context.set_scope("attention", Some(self.index));
        let mut residual = x.clone();
        at!(context, FILE, 274);
        let mut hidden = self.first_norm.forward(x);
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, mask);
        at!(context, FILE, 276);
        hidden = dropout::dropout(&hidden, dropped);
        at!(context, FILE, 277);
        hidden = pointwise::add(&hidden, &residual);
        context.set_scope("feed-forward", Some(self.index));
        residual = hidden.clone();
        at!(context, FILE, 281);
        hidden = self.second_norm.forward(&hidden);
        hidden = self.feed(&hidden);
        at!(context, FILE, 283);
        hidden = dropout::dropout(&hidden, dropped);
        at!(context, FILE, 284);
        hidden = pointwise::add(&hidden, &residual);
        drop(residual);
        drop(weights);
        hidden
    }

    fn attend(&self, hidden: &Tensor, mask: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.width);
        let (context, heads) = (hidden.context(), self.config.heads);
        let split_heads = |states: Tensor| {
            let states = view::view(states, [batch, length, heads, width / heads]);
            view::transpose(states, 1, 2)
        };
        at!(context, FILE, 216);
        let query = split_heads(self.query.forward(hidden));
        at!(context, FILE, 217);
        let key = split_heads(self.key.forward(hidden));
        at!(context, FILE, 218);
        let value = split_heads(self.value.forward(hidden));
        let (mut out, weights) = self.attention.run(&query, &key, &value, mask);
        at!(context, FILE, 235);
        out = view::contiguous(view::reshape(&out, [batch, length, width]));
        at!(context, FILE, 236);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        let context = x.context();
        at!(context, FILE, 250);
        let mut hidden = self.expand.forward(x);
        at!(context, FILE, 251);
        hidden = activation::forward(self.config.activation, &hidden);
        at!(context, FILE, 252);
        hidden = self.contract.forward(&hidden);
        hidden
    }
}

/// The token of the whole image, patches by a convolution, and learned positions.
struct Embeddings {
    whole: Tensor,
    kernel: Tensor,
    bias: Tensor,
    positions: Tensor,
    /// Adapters under checkpointing need a gradient to reach the first layer.
    patches_require_grad: bool,
}

impl Embeddings {
    fn new(setup: &Setup, builder: &Builder, config: &architecture::Vit) -> Embeddings {
        let [height, breadth] = config.patch;
        let whole = builder.parameter([1, 1, config.width]);
        let kernel = builder.parameter([config.width, config.channels, height, breadth]);
        let bias = builder.parameter([config.width]);
        let positions = builder.parameter([1, config.tokens(), config.width]);
        // `parameters()` gives a module's own before its children's.
        builder.put_before(&positions, &kernel);
        Embeddings {
            whole,
            kernel,
            bias,
            positions,
            patches_require_grad: setup.checkpoints.is_on() && builder.has_adapters(),
        }
    }

    fn forward(&self, pixels: &Tensor, config: &architecture::Vit) -> Tensor {
        let (context, batch) = (pixels.context(), pixels.size(0));
        let patches = config.tokens() - 1;
        at!(context, FILE, 69);
        let projected = convolution::patches(pixels, &self.kernel, &self.bias);
        let flat = view::view(projected, [batch, config.width, patches]);
        let mut embeddings = view::transpose(flat, 1, 2);
        if self.patches_require_grad {
            embeddings.set_requires_grad(true);
        }
        let whole = view::expand(&self.whole, [batch, 1, config.width]);
        at!(context, FILE, 147);
        embeddings = view::cat(vec![whole.clone(), embeddings.clone()], 1);
        at!(context, FILE, 157);
        embeddings = pointwise::add(&embeddings, &self.positions);
        at!(context, FILE, 159);
        embeddings = dropout::dropout(&embeddings, config.hidden_dropout);
        drop(whole);
        embeddings
    }
}

/// The classifier of images with its loss.
struct Vit {
    context: Context,
    embeddings: Embeddings,
    layers: Vec<Rc<Layer>>,
    norm: LayerNorm,
    classifier: Linear,
    config: architecture::Vit,
    checkpoints: Checkpointing,
    batch: u64,
    dtype: DType,
    trainable: Vec<Tensor>,
}

impl Vit {
    fn new(setup: &Setup, config: &architecture::Vit) -> Vit {
        let builder = &setup.builder();
        let embeddings = Embeddings::new(setup, builder, config);
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(setup, builder, config, index as u32)))
            .collect();
        let norm = builder.layer_norm(config.width);
        let classifier = builder.linear("classifier", config.width, config.labels, true);
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        Vit {
            embeddings,
            layers,
            norm,
            classifier,
            config: config.clone(),
            checkpoints: setup.checkpoints,
            batch: setup.batch[0],
            dtype: setup.dtype,
            trainable: builder.trainable(),
            context: builder.context.clone(),
        }
    }

    /// The last hidden state.
    fn transform(&self, pixels: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        let embeddings = self.embeddings.forward(pixels, &self.config);
        at!(context, FILE, 376);
        let mask = mask::bidirectional(None);
        let mut hidden = embeddings.clone();
        for layer in &self.layers {
            let (layer, mask) = (layer.clone(), mask.clone());
            hidden = self
                .checkpoints
                .run(context, &hidden, move |x| layer.forward(x, mask.as_ref()));
        }
        context.set_scope("head", None);
        at!(context, FILE, 385);
        let sequence = self.norm.forward(&hidden);
        drop(embeddings);
        drop(hidden);
        sequence
    }
}

impl Program for Vit {
    /// Labels and pixels. Pixels are made first; a Python tuple goes from its end.
    fn batch(&self) -> Vec<Tensor> {
        let [height, breadth] = self.config.image;
        let sizes = [self.batch, self.config.channels, height, breadth];
        let pixels = creation::filled(&self.context, sizes, self.dtype);
        let labels = creation::filled(&self.context, [self.batch], DType::Int64);
        vec![labels, pixels]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let context = &self.context;
        let sequence = self.transform(&batch[1]);
        let pooled = view::select(&sequence, 1);
        at!(context, FILE, 561);
        let logits = self.classifier.forward(&pooled);
        at!(context, FILE, 565);
        let labels = self.config.labels;
        let loss = loss::cross_entropy(
            view::view(&logits, [self.batch, labels]),
            view::view(&batch[0], [self.batch]),
        );
        drop(sequence);
        drop(pooled);
        drop(logits);
        loss
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::Vit {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Vit::new(setup, self))
    }
}
