//! The gated decoder of LLaMA and its relatives as transformers runs it: one program, which stands
//! in a file of its own for each family.

use std::rc::Rc;

use cinch_architecture::{self as architecture, Windows};

use super::activation;
use super::decoder_lines::Lines;
use super::mask::{Attention, Masks};
use super::module::{Builder, Embedding, Linear, position_ids};
use super::replay::Setup;
use super::rotary::{Rotary, rotate};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::op::{
    attention, cast, creation, dropout, loss, matmul, pointwise, reduce, softmax, view,
};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

/// RMS norm in plain ops, in fp32.
struct RmsNorm {
    weight: Tensor,
}

impl RmsNorm {
    fn new(builder: &Builder, width: u64) -> RmsNorm {
        RmsNorm {
            weight: builder.parameter([width]),
        }
    }

    fn forward(&self, x: &Tensor, lines: &'static Lines) -> Tensor {
        let (context, dtype) = (x.context(), x.dtype());
        context.at(&lines.norm_raise);
        let mut hidden = cast::to(x, DType::Float32);
        let last = hidden.dim() - 1;
        context.at(&lines.norm_variance);
        let variance = reduce::mean(pointwise::pow_number(&hidden), &[last], true);
        context.at(&lines.norm_scale);
        hidden = pointwise::mul(&hidden, pointwise::rsqrt(pointwise::add_number(&variance)));
        context.at(&lines.norm_weight);
        let out = pointwise::mul(&self.weight, cast::to(&hidden, dtype));
        drop(hidden);
        drop(variance);
        out
    }
}

struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Of query and key.
    head_norms: Option<[RmsNorm; 2]>,
    gate: Linear,
    up: Linear,
    down: Linear,
    first_norm: RmsNorm,
    second_norm: RmsNorm,
    config: architecture::Decoder,
    lines: &'static Lines,
    kind: Attention,
}

/// What the layers are given besides their input. Freed in this order: a Python tuple goes from its end.
#[derive(Clone)]
struct Surroundings {
    mask: Option<Tensor>,
    sin: Tensor,
    cos: Tensor,
    _position_ids: Tensor,
}

impl Layer {
    fn new(
        builder: &Builder,
        config: &architecture::Decoder,
        lines: &'static Lines,
        kind: Attention,
        index: u32,
    ) -> Layer {
        let (width, inner) = (config.width, config.inner);
        let (queries, keys) = (
            config.heads * config.head_width,
            config.key_heads * config.head_width,
        );
        Layer {
            index,
            query: builder.linear("q_proj", width, queries, config.attention_bias),
            key: builder.linear("k_proj", width, keys, config.attention_bias),
            value: builder.linear("v_proj", width, keys, config.attention_bias),
            output: builder.linear("o_proj", queries, width, config.output_bias),
            head_norms: config
                .head_norms
                .then(|| [0; 2].map(|_| RmsNorm::new(builder, config.head_width))),
            gate: builder.linear("gate_proj", width, inner, config.feed_bias),
            up: builder.linear("up_proj", width, inner, config.feed_bias),
            down: builder.linear("down_proj", inner, width, config.feed_bias),
            first_norm: RmsNorm::new(builder, width),
            second_norm: RmsNorm::new(builder, width),
            config: config.clone(),
            lines,
            kind,
        }
    }

    fn linears(&self) -> [&Linear; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }

    /// Its parameters in the order of their names, which is that of a file.
    fn sorted_by_name(&self) -> Vec<Tensor> {
        let mut sorted = vec![self.first_norm.weight.clone()];
        let with_bias = |linear: &Linear| {
            let mut parameters: Vec<Tensor> = linear.parameters().collect();
            parameters.reverse();
            parameters
        };
        for linear in [&self.down, &self.gate, &self.up] {
            sorted.extend(with_bias(linear));
        }
        sorted.push(self.second_norm.weight.clone());
        let norms = self.head_norms.as_ref();
        sorted.extend(norms.map(|[_, key]| key.weight.clone()));
        sorted.extend(with_bias(&self.key));
        sorted.extend(with_bias(&self.output));
        sorted.extend(norms.map(|[query, _]| query.weight.clone()));
        sorted.extend(with_bias(&self.query));
        sorted.extend(with_bias(&self.value));
        sorted
    }

    fn forward(&self, x: &Tensor, around: &Surroundings) -> Tensor {
        let (context, lines) = (x.context().clone(), self.lines);
        let mut residual = x.clone();
        context.set_scope("attention", Some(self.index));
        let mut hidden = self.first_norm.forward(x, lines);
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, around);
        context.at(&lines.attention_residual);
        hidden = pointwise::add(&residual, &hidden);
        residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        hidden = self.second_norm.forward(&hidden, lines);
        hidden = self.feed(&hidden);
        context.at(&lines.feed_residual);
        hidden = pointwise::add(&residual, &hidden);
        drop(residual);
        drop(weights);
        hidden
    }

    fn attend(&self, hidden: &Tensor, around: &Surroundings) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.head_width);
        let (context, lines) = (hidden.context(), self.lines);
        let [query_norm, key_norm] = match &self.head_norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let split_heads = |states: Tensor, heads: u64, norm: Option<&RmsNorm>| {
            let mut states = view::view(states, [batch, length, heads, width]);
            if let Some(norm) = norm {
                states = norm.forward(&states, lines);
            }
            view::transpose(states, 1, 2)
        };
        let (heads, key_heads) = (self.config.heads, self.config.key_heads);
        context.at(&lines.query);
        let mut query = split_heads(self.query.forward(hidden), heads, query_norm);
        context.at(&lines.key);
        let mut key = split_heads(self.key.forward(hidden), key_heads, key_norm);
        context.at(&lines.value);
        let value = split_heads(self.value.forward(hidden), key_heads, None);
        let rotated = rotate(&query, &key, &around.cos, &around.sin, lines);
        (query, key) = rotated;
        context.at(&lines.attend);
        let (mut out, weights) = match self.kind {
            Attention::Sdpa => (self.sdpa(&query, &key, &value, around.mask.as_ref()), None),
            Attention::Eager => {
                let (out, weights) = self.eager(&query, &key, &value, around.mask.as_ref());
                (out, Some(weights))
            }
        };
        context.at(&lines.attention_reshape);
        out = view::contiguous(view::reshape(
            &out,
            [batch, length, self.config.heads * width],
        ));
        context.at(&lines.output);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }

    fn groups(&self) -> u64 {
        self.config.heads / self.config.key_heads
    }

    fn sdpa(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let Some(mask) = mask else {
            let out = attention::scaled_dot_product(query, key, value);
            return view::contiguous(view::transpose(out, 1, 2));
        };
        // Shared keys are given to the kernel as they are, unless a mask rules that out.
        let key = attention::repeat_heads(key, self.groups());
        let value = attention::repeat_heads(value, self.groups());
        let out = attention::masked_scaled_dot_product(query, &key, &value, mask);
        let out = view::contiguous(view::transpose(out, 1, 2));
        drop(key);
        drop(value);
        out
    }

    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let (context, lines) = (query.context(), self.lines);
        context.at(&lines.eager_repeat);
        let keys = attention::repeat_heads(key, self.groups());
        let values = attention::repeat_heads(value, self.groups());
        context.at(&lines.eager_product);
        let mut weights =
            pointwise::mul_number(matmul::matmul(query, view::transpose(&keys, 2, 3)));
        if let Some(mask) = mask {
            context.at(&lines.eager_mask);
            weights = pointwise::add(&weights, mask);
        }
        context.at(&lines.eager_softmax);
        weights = cast::to(
            softmax::softmax(&weights, Some(DType::Float32)),
            query.dtype(),
        );
        context.at(&lines.eager_dropout);
        weights = dropout::dropout(&weights, self.config.attention_dropout);
        context.at(&lines.eager_mix);
        let mut out = matmul::matmul(&weights, &values);
        context.at(&lines.eager_order);
        out = view::contiguous(view::transpose(&out, 1, 2));
        drop(keys);
        drop(values);
        (out, weights)
    }

    fn feed(&self, x: &Tensor) -> Tensor {
        x.context().at(&self.lines.feed);
        let gate = self.gate.forward(x);
        let active = activation::forward(self.config.activation, &gate);
        drop(gate);
        let product = pointwise::mul(active, self.up.forward(x));
        let out = self.down.forward(&product);
        drop(product);
        out
    }
}

/// The causal language model with its loss.
pub struct Decoder {
    context: Context,
    tokens: Embedding,
    layers: Vec<Rc<Layer>>,
    norm: RmsNorm,
    rotary: Rotary,
    head: Tensor,
    _scalar: Tensor,
    config: architecture::Decoder,
    lines: &'static Lines,
    kind: Attention,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer: the embeddings are made to ask for one.
    embeddings_require_grad: bool,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl Decoder {
    pub fn new(setup: &Setup, config: &architecture::Decoder, lines: &'static Lines) -> Decoder {
        let builder = &setup.builder();
        let (kind, checkpoints) = (setup.attention, setup.checkpoints);
        let context = builder.context.clone();
        let tokens = builder.embedding(config.vocabulary, config.width);
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, config, lines, kind, index as u32)))
            .collect();
        let norm = RmsNorm::new(builder, config.width);
        let made = match builder.loader() {
            None => Some(context.no_grad(|| Rotary::new(&context, config.head_width))),
            Some(_) => None,
        };
        let (head, scalar) = builder.head(&tokens.table, config.tied);
        if let Some(loader) = builder.loader() {
            let mut names = Vec::new();
            if !config.tied {
                names.push(head.clone());
            }
            names.push(tokens.table.clone());
            names.extend(layers.iter().flat_map(|layer| layer.sorted_by_name()));
            names.push(norm.weight.clone());
            loader.load(&context, &names);
        }
        let rotary = match made {
            Some(rotary) => rotary.cast(builder.dtype),
            None => Rotary::loaded(&context, config.head_width),
        };
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        let trainable = builder.trainable();
        Decoder {
            context,
            tokens,
            layers,
            norm,
            rotary,
            head,
            _scalar: scalar,
            config: config.clone(),
            lines,
            kind,
            checkpoints,
            embeddings_require_grad: checkpoints.is_on() && builder.has_adapters(),
            batch: setup.batch,
            trainable,
        }
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        let (context, lines) = (&self.context, self.lines);
        context.set_scope("embedding", None);
        context.at(&lines.embed);
        let embeddings = self.tokens.forward(ids);
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        context.at(&lines.position_ids);
        let position_ids = position_ids(context, ids.size(1));
        let windows = self.config.windows;
        let lines_of_masks = [&lines.mask, &lines.sliding_mask];
        let masks = Masks::make(
            windows,
            &embeddings,
            &position_ids,
            self.kind,
            lines_of_masks,
        );
        let mut hidden = embeddings.clone();
        let (cos, sin) = self.rotary.forward(hidden.dtype(), &position_ids, lines);
        for layer in &self.layers {
            let around = Surroundings {
                mask: masks.of_layer(windows, layer.index.into()).cloned(),
                sin: sin.clone(),
                cos: cos.clone(),
                _position_ids: position_ids.clone(),
            };
            let layer = layer.clone();
            hidden = self
                .checkpoints
                .run(context, &hidden, move |x| layer.forward(x, &around));
        }
        context.set_scope("head", None);
        hidden = self.norm.forward(&hidden, lines);
        // Arguments go before what the function made; a mapping of masks is made from arguments that hold these two.
        match windows {
            Windows::Shared { .. } => {
                drop(position_ids);
                drop(embeddings);
                drop(masks);
            }
            Windows::ByKind { .. } => {
                drop(masks);
                drop(embeddings);
                drop(position_ids);
            }
        }
        drop(sin);
        drop(cos);
        hidden
    }
}

impl Decoder {
    /// Loss and logits.
    fn run(&self, ids: &Tensor, labels: &Tensor, items: Option<&Tensor>) -> (Tensor, Tensor) {
        let (context, lines) = (&self.context, self.lines);
        let hidden = self.transform(ids);
        context.at(&lines.logits);
        let logits = matmul::linear(view::alias(&hidden), &self.head, None);
        context.at(&lines.loss);
        let loss = loss::causal_language_model(&logits, labels, self.config.vocabulary, items);
        drop(hidden);
        (loss, logits)
    }
}

impl Program for Decoder {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        self.run(&batch[0], &batch[0], None).0
    }

    fn outputs(
        &self,
        ids: &Tensor,
        labels: &Tensor,
        items: Option<&Tensor>,
    ) -> Option<(Tensor, Tensor)> {
        Some(self.run(ids, labels, items))
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}
