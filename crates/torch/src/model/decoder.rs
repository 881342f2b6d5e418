//! The gated decoder of LLaMA and its relatives as transformers runs it: one program, which stands
//! in a file of its own for each family.

use std::rc::Rc;

use cinch_architecture::{self as architecture, Windows};

use super::causal::{CausalLanguageModel, CausalModel};
use super::decoder_layer::Layer;
use super::decoder_lines::Lines;
use super::mask::{Attention, Masks};
use super::module::{Builder, Embedding, Linear, position_ids};
use super::replay::Setup;
use super::rotary::Rotary;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::op::liger::{self, NormGradient};
use crate::eager::op::{cast, matmul, pointwise, reduce, view};
use crate::eager::{Context, DType, Line, Tensor};

/// RMS norm in plain ops, in fp32.
pub(super) struct RmsNorm {
    pub weight: Tensor,
    by_liger: bool,
}

impl RmsNorm {
    pub fn new(builder: &Builder, width: u64) -> RmsNorm {
        RmsNorm {
            weight: builder.parameter([width]),
            by_liger: builder.liger.rms_norm,
        }
    }

    pub fn forward(&self, x: &Tensor, lines: &'static Lines) -> Tensor {
        if self.by_liger {
            return liger::rms_norm(x, &self.weight, NormGradient::InPlace);
        }
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

/// What the layers are given besides their input. Freed in this order: a Python tuple goes from its end.
#[derive(Clone)]
pub(super) struct Surroundings {
    pub mask: Option<Tensor>,
    /// Where they are given before cosines and sines.
    _first_position_ids: Option<Tensor>,
    pub sin: Tensor,
    pub cos: Tensor,
    _position_ids: Option<Tensor>,
}

/// A layer of a decoder.
pub(super) trait Block: 'static {
    /// Whether the model's loop names position ids before cosines and sines.
    const POSITION_IDS_FIRST: bool = false;

    fn forward(&self, x: &Tensor, around: &Surroundings) -> Tensor;

    /// In the order in which adapters are put on them.
    fn linears(&self) -> Vec<&Linear>;

    /// Its parameters in the order of their names, which is that of a file.
    fn sorted_by_name(&self) -> Vec<Tensor>;
}

/// A linear layer's parameters in the order of their names.
pub(super) fn with_bias(linear: &Linear) -> Vec<Tensor> {
    let mut parameters: Vec<Tensor> = linear.parameters().collect();
    parameters.reverse();
    parameters
}

/// The causal language model.
pub(super) struct Decoder<B> {
    context: Context,
    tokens: Embedding,
    layers: Vec<Rc<B>>,
    norm: RmsNorm,
    rotary: Rotary,
    head: Tensor,
    /// What stays beside the copies that are trained in their place.
    _originals: Vec<Tensor>,
    _scalar: Tensor,
    config: architecture::Decoder,
    lines: &'static Lines,
    kind: Attention,
    checkpoints: Checkpointing,
    /// Adapters under checkpointing need a gradient to reach the first layer: the embeddings are made to ask for one.
    embeddings_require_grad: bool,
}

impl Decoder<Layer> {
    pub fn program(
        setup: &Setup,
        config: &architecture::Decoder,
        lines: &'static Lines,
    ) -> CausalLanguageModel<Decoder<Layer>> {
        let kind = setup.attention;
        Decoder::program_of(setup, config, config.head_width, lines, |builder, index| {
            Layer::new(builder, config, lines, kind, index)
        })
    }
}

impl<B: Block> Decoder<B> {
    /// A decoder of any layers; `rotary_width`: how many numbers of a head are turned.
    pub fn program_of(
        setup: &Setup,
        config: &architecture::Decoder,
        rotary_width: u64,
        lines: &'static Lines,
        layer: impl Fn(&Builder, u32) -> B,
    ) -> CausalLanguageModel<Decoder<B>> {
        let builder = &setup.builder();
        let (kind, checkpoints) = (setup.attention, setup.checkpoints);
        let context = builder.context.clone();
        let mut tokens = builder.embedding(config.vocabulary, config.width);
        let layers: Vec<Rc<B>> = (0..config.layers)
            .map(|index| Rc::new(layer(builder, index as u32)))
            .collect();
        let norm = RmsNorm::new(builder, config.width);
        let made = match builder.loader() {
            None => Some(context.no_grad(|| Rotary::new(&context, rotary_width))),
            Some(_) => None,
        };
        let (mut head, scalar) = builder.head(&tokens.table, config.tied);
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
            None => Rotary::loaded(&context, rotary_width),
        };
        builder.add_adapters(layers.iter().flat_map(|layer| layer.linears()));
        let copies = [("embed_tokens", &tokens.table), ("lm_head", &head)]
            .map(|(module, weight)| builder.copy_of(module, weight));
        for copy in copies.iter().flatten() {
            if copy.dtype() != tokens.table.dtype() {
                copy.set_data("_to_copy", copy.bytes());
            }
        }
        let [table, own_head] = copies;
        let mut originals = Vec::new();
        if let Some(table) = table {
            builder.put_first(&table);
            originals.push(std::mem::replace(&mut tokens.table, table));
        }
        if let Some(own) = own_head {
            builder.put_last(&own);
            originals.push(std::mem::replace(&mut head, own));
        }
        let decoder = Decoder {
            context,
            tokens,
            layers,
            norm,
            rotary,
            head,
            _originals: originals,
            _scalar: scalar,
            config: config.clone(),
            lines,
            kind,
            checkpoints,
            embeddings_require_grad: checkpoints.is_on() && builder.has_adapters(),
        };
        CausalLanguageModel::new(decoder, builder, setup.batch)
    }
}

impl<B: Block> CausalModel for Decoder<B> {
    fn context(&self) -> &Context {
        &self.context
    }

    fn vocabulary(&self) -> u64 {
        self.config.vocabulary
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
        for (index, layer) in self.layers.iter().enumerate() {
            let around = Surroundings {
                mask: masks.of_layer(windows, index as u64).cloned(),
                _first_position_ids: B::POSITION_IDS_FIRST.then(|| position_ids.clone()),
                sin: sin.clone(),
                cos: cos.clone(),
                _position_ids: (!B::POSITION_IDS_FIRST).then(|| position_ids.clone()),
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

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.context.at(&self.lines.logits);
        matmul::linear(view::alias(hidden), &self.head, None)
    }

    fn head(&self) -> Option<&Tensor> {
        Some(&self.head)
    }

    fn loss_line(&self) -> &'static Line {
        &self.lines.loss
    }

    fn embeddings(&self) -> Vec<Tensor> {
        vec![self.tokens.table.clone()]
    }
}
