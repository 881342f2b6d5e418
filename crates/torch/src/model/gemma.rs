//! Gemma 2 and Gemma 3 as transformers runs them: one program, which stands in a file of its own for each.

use std::rc::Rc;

use cinch_architecture::{self as architecture, SlidingLayers, Windows};

use super::attending::Attending;
use super::causal::{CausalLanguageModel, CausalModel};
use super::decoder::with_bias;
use super::decoder_layer::{gated_feed, liger_feed};
use super::decoder_lines::Lines;
use super::liger::Liger;
use super::mask::{Attention, Masks};
use super::module::{Builder, Embedding, Linear, position_ids};
use super::replay::Setup;
use super::rotary::{Rotary, rotate};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::op::liger::{self, NormGradient};
use crate::eager::op::{cast, matmul, pointwise, reduce, view};
use crate::eager::{Context, DType, Line, Tensor};

/// The statements of one file, besides those that all decoders have.
pub(super) struct GemmaLines {
    pub common: Lines,
    pub norm_cast: Line,
    pub score_cap: [Line; 3],
    pub logits_cap: [Line; 3],
}

/// RMS norm whose weight is kept less one, in fp32 until its end.
struct Norm {
    weight: Tensor,
    lines: &'static GemmaLines,
    by_liger: bool,
}

impl Norm {
    fn new(builder: &Builder, width: u64, lines: &'static GemmaLines) -> Norm {
        Norm {
            weight: builder.parameter([width]),
            lines,
            by_liger: builder.liger.rms_norm,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        if self.by_liger {
            return liger::rms_norm(x, &self.weight, NormGradient::Apart);
        }
        let (context, lines) = (x.context(), &self.lines.common);
        context.at(&lines.norm_raise);
        let raised = cast::to(x, DType::Float32);
        let last = raised.dim() - 1;
        context.at(&lines.norm_variance);
        let variance = reduce::mean(pointwise::pow_number(&raised), &[last], true);
        let scale = pointwise::rsqrt(pointwise::add_number(variance));
        let mut out = pointwise::mul(&raised, scale);
        drop(raised);
        context.at(&lines.norm_weight);
        out = pointwise::mul(
            &out,
            pointwise::add_number(cast::to(&self.weight, DType::Float32)),
        );
        context.at(&self.lines.norm_cast);
        cast::to(out, x.dtype())
    }
}

/// What the layers are given besides their input. Freed in this order: a Python tuple goes from its end.
#[derive(Clone)]
struct Surroundings {
    mask: Option<Tensor>,
    sin: Tensor,
    cos: Tensor,
    _position_ids: Tensor,
}

struct Layer {
    index: u32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Of query and key.
    head_norms: Option<[Norm; 2]>,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Before and after attention, before and after the feed-forward part.
    norms: [Norm; 4],
    config: architecture::Decoder,
    attending: Attending,
    lines: &'static GemmaLines,
    liger: Liger,
}

impl Layer {
    fn new(
        builder: &Builder,
        shape: &architecture::Gemma,
        kind: Attention,
        lines: &'static GemmaLines,
        index: u32,
    ) -> Layer {
        let config = &shape.decoder;
        let (width, inner) = (config.width, config.inner);
        let queries = config.heads * config.head_width;
        let keys = config.key_heads * config.head_width;
        let norm = |width| Norm::new(builder, width, lines);
        Layer {
            index,
            query: builder.linear("q_proj", width, queries, config.attention_bias),
            key: builder.linear("k_proj", width, keys, config.attention_bias),
            value: builder.linear("v_proj", width, keys, config.attention_bias),
            output: builder.linear("o_proj", queries, width, config.output_bias),
            head_norms: config.head_norms.then(|| [config.head_width; 2].map(norm)),
            gate: builder.linear("gate_proj", width, inner, false),
            up: builder.linear("up_proj", width, inner, false),
            down: builder.linear("down_proj", inner, width, false),
            norms: [width; 4].map(norm),
            attending: Attending {
                kind,
                groups: config.heads / config.key_heads,
                dropout: config.attention_dropout,
                soft_cap: shape.caps_scores.then_some(&lines.score_cap),
                lines: &lines.common,
            },
            config: config.clone(),
            lines,
            liger: builder.liger,
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
        let [before_attention, after_attention, before_feed, after_feed] = &self.norms;
        let mut sorted = vec![before_attention.weight.clone()];
        for linear in [&self.down, &self.gate, &self.up] {
            sorted.extend(with_bias(linear));
        }
        for norm in [after_attention, after_feed, before_feed] {
            sorted.push(norm.weight.clone());
        }
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
        let (context, lines) = (x.context().clone(), &self.lines.common);
        let [before_attention, after_attention, before_feed, after_feed] = &self.norms;
        let mut residual = x.clone();
        context.set_scope("attention", Some(self.index));
        let mut hidden = before_attention.forward(x);
        // The layer holds the weights of eager attention until it returns.
        let weights;
        (hidden, weights) = self.attend(&hidden, around);
        hidden = after_attention.forward(&hidden);
        context.at(&lines.attention_residual);
        hidden = pointwise::add(&residual, &hidden);
        residual = hidden.clone();
        context.set_scope("feed-forward", Some(self.index));
        hidden = before_feed.forward(&hidden);
        context.at(&lines.feed);
        let layers = [&self.gate, &self.up, &self.down];
        hidden = match self.liger.gate {
            true => liger_feed(&hidden, layers),
            false => gated_feed(&hidden, layers, self.config.activation),
        };
        hidden = after_feed.forward(&hidden);
        context.at(&lines.feed_residual);
        hidden = pointwise::add(&residual, &hidden);
        drop(residual);
        drop(weights);
        hidden
    }

    fn attend(&self, hidden: &Tensor, around: &Surroundings) -> (Tensor, Option<Tensor>) {
        let (batch, length, width) = (hidden.size(0), hidden.size(1), self.config.head_width);
        let (context, lines) = (hidden.context(), &self.lines.common);
        let split_heads = |states: Tensor| {
            let heads = states.size(2) / width;
            view::transpose(view::view(states, [batch, length, heads, width]), 1, 2)
        };
        context.at(&lines.query);
        let mut query = split_heads(self.query.forward(hidden));
        context.at(&lines.key);
        let mut key = split_heads(self.key.forward(hidden));
        context.at(&lines.value);
        let value = split_heads(self.value.forward(hidden));
        if let Some([query_norm, key_norm]) = &self.head_norms {
            query = query_norm.forward(&query);
            key = key_norm.forward(&key);
        }
        let rotated = match self.liger.rope {
            true => liger::rotate(&query, &key, &around.cos, &around.sin),
            false => rotate(&query, &key, &around.cos, &around.sin, lines),
        };
        (query, key) = rotated;
        context.at(&lines.attend);
        let (mut out, weights) = self
            .attending
            .run(&query, &key, &value, around.mask.as_ref());
        context.at(&lines.attention_reshape);
        let queries = self.config.heads * width;
        out = view::contiguous(view::reshape(&out, [batch, length, queries]));
        context.at(&lines.output);
        out = self.output.forward(&out);
        drop(query);
        drop(key);
        drop(value);
        (out, weights)
    }
}

/// The causal language model with its loss.
pub(super) struct Gemma {
    context: Context,
    tokens: Embedding,
    /// The number that embeddings are multiplied by.
    scale: Tensor,
    layers: Vec<Rc<Layer>>,
    norm: Norm,
    /// Of layers that see everything and of those with a window; one for both in Gemma 2.
    rotaries: Vec<Rotary>,
    head: Tensor,
    _scalar: Tensor,
    shape: architecture::Gemma,
    lines: &'static GemmaLines,
    kind: Attention,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer: the embeddings are made to ask for one.
    embeddings_require_grad: bool,
}

impl Gemma {
    /// `rotary_of_each`: whether each kind of layer has rotary positions of its own.
    pub fn program(
        setup: &Setup,
        shape: &architecture::Gemma,
        rotary_of_each: bool,
        lines: &'static GemmaLines,
    ) -> CausalLanguageModel<Gemma> {
        let builder = &setup.builder();
        let (config, context) = (&shape.decoder, builder.context.clone());
        let (kind, checkpoints) = (setup.attention, setup.checkpoints);
        let tokens = builder.embedding(config.vocabulary, config.width);
        let made_scale = match builder.loader() {
            None => Some(context.empty("embed_scale", [], builder.dtype)),
            Some(_) => None,
        };
        let layers: Vec<Rc<Layer>> = (0..config.layers)
            .map(|index| Rc::new(Layer::new(builder, shape, kind, lines, index as u32)))
            .collect();
        let norm = Norm::new(builder, config.width, lines);
        let kinds = [false, true].map(|slides| shape.slides.contains(&slides));
        let rotaries = match rotary_of_each {
            true => kinds.into_iter().filter(|&is_there| is_there).count(),
            false => 1,
        };
        let made: Option<Vec<Rotary>> = builder.loader().is_none().then(|| {
            let new = |_| context.no_grad(|| Rotary::new(&context, config.head_width));
            (0..rotaries).map(new).collect()
        });
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
        let scale = made_scale.unwrap_or_else(|| context.empty("embed_scale", [], DType::Float32));
        let rotaries = match made {
            Some(made) => made
                .into_iter()
                .map(|one| one.cast(builder.dtype))
                .collect(),
            None => (0..rotaries)
                .map(|_| Rotary::loaded(&context, config.head_width))
                .collect(),
        };
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        let gemma = Gemma {
            tokens,
            scale,
            layers,
            norm,
            rotaries,
            head,
            _scalar: scalar,
            shape: shape.clone(),
            lines,
            kind,
            checkpoints,
            embeddings_require_grad: checkpoints.is_on() && builder.has_adapters(),
            context,
        };
        CausalLanguageModel::new(gemma, builder, setup.batch)
    }
}

impl CausalModel for Gemma {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.shape.decoder.vocabulary
    }

    fn transform(&self, ids: &Tensor) -> Tensor {
        let (context, lines) = (&self.context, &self.lines.common);
        context.set_scope("embedding", None);
        context.at(&lines.embed);
        let found = self.tokens.forward(ids);
        let embeddings = pointwise::mul(found, cast::to(&self.scale, self.tokens.table.dtype()));
        if self.embeddings_require_grad {
            embeddings.set_requires_grad(true);
        }
        context.at(&lines.position_ids);
        let position_ids = position_ids(context, ids.size(1));
        let sliding = SlidingLayers {
            window: self.shape.window,
            first: 0,
        };
        let masks = Masks::make(
            Windows::ByKind {
                sliding: Some(sliding),
            },
            &embeddings,
            &position_ids,
            self.kind,
            [&lines.mask, &lines.sliding_mask],
        );
        let mut hidden = embeddings.clone();
        let turns: Vec<(Tensor, Tensor)> = self
            .rotaries
            .iter()
            .map(|rotary| rotary.forward(hidden.dtype(), &position_ids, lines))
            .collect();
        for (layer, &slides) in self.layers.iter().zip(&self.shape.slides) {
            // The second is of those with a window, where there are two.
            let (cos, sin) = &turns[usize::from(slides).min(turns.len() - 1)];
            let around = Surroundings {
                mask: masks.of_kind(slides).cloned(),
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
        hidden = self.norm.forward(&hidden);
        // The mapping of masks, then the arguments they were made from.
        drop(masks);
        drop(embeddings);
        drop(position_ids);
        for (cos, sin) in turns {
            drop(sin);
            drop(cos);
        }
        hidden
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        let context = &self.context;
        context.at(&self.lines.common.logits);
        let mut logits = matmul::linear(view::alias(hidden), &self.head, None);
        if self.shape.caps_logits {
            let [divide, bend, multiply] = &self.lines.logits_cap;
            context.at(divide);
            logits = pointwise::mul_number(&logits);
            context.at(bend);
            logits = pointwise::tanh(&logits);
            context.at(multiply);
            logits = pointwise::mul_number(&logits);
        }
        logits
    }

    fn head(&self) -> Option<&Tensor> {
        Some(&self.head)
    }

    fn loss_line(&self) -> &'static Line {
        &self.lines.common.loss
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }
}
