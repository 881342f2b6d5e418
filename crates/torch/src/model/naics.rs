//! The NAICS embedder in plain PyTorch: four frozen encoders with adapters, a mixture of experts over their pooled
//! outputs, and a contrastive loss in hyperbolic space.

use cinch_architecture as architecture;

use super::adapter::{Lora, LoraLibrary};
use super::bert::Encoder;
use super::mask::Attention;
use super::module::{Builder, Linear};
use super::replay::{Replay, Setup};
use crate::eager::line::at;
use crate::eager::op::{
    cast, creation, dropout, index, loss, norm, pointwise, reduce, softmax, view,
};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

const CHANNELS: usize = architecture::Naics::CHANNELS as usize;

/// The loss of a batch, and what is trained.
pub struct Naics {
    context: Context,
    encoders: Vec<Encoder>,
    gate: Linear,
    experts: Vec<[Linear; 2]>,
    projection: Linear,
    hyperbolic: Linear,
    config: architecture::Naics,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

const DROPOUT: f64 = 0.1;

impl Naics {
    fn new(setup: &Setup, config: architecture::Naics) -> Naics {
        let (context, dtype, batch) = (&setup.context, setup.dtype, setup.batch);
        let width = config.encoder.width;
        let joined = CHANNELS as u64 * width;
        // Encoders are moved to the device in fp32 and get their adapters there; `.to(dtype)` then takes them to the
        // run's type.
        let lora = Lora {
            rank: config.adapter_rank,
            dropout: DROPOUT,
            targets: ["query", "key", "value", "dense"]
                .map(String::from)
                .to_vec(),
            whole: Vec::new(),
            whole_in_float32: false,
            in_float32: false,
            library: LoraLibrary::Plain,
        };
        let with_adapters = |builder: &Builder| {
            let encoder = Encoder::new(
                builder,
                &config.encoder,
                Attention::Sdpa,
                setup.checkpoints,
                true,
            );
            builder.add_adapters(encoder.linears());
            encoder
        };
        let made: Vec<(Encoder, Builder)> = (0..CHANNELS)
            .map(|_| {
                let builder = Builder::new(context, DType::Float32, Some(lora.clone()));
                (with_adapters(&builder), builder)
            })
            .collect();
        let in_place: Vec<(Encoder, Builder)> = if dtype == DType::Float32 {
            made
        } else {
            made.into_iter()
                .map(|(_, old)| {
                    let builder = Builder::new(context, dtype, Some(lora.clone()));
                    let builder = builder.replacing(old.parameters());
                    drop(old);
                    (with_adapters(&builder), builder)
                })
                .collect()
        };
        let mut trainable: Vec<Tensor> = Vec::new();
        let mut encoders = Vec::new();
        for (encoder, builder) in in_place {
            trainable.extend(builder.trainable());
            encoders.push(encoder);
        }
        let builder = Builder::new(context, dtype, None);
        let gate = builder.linear("gate", joined, config.experts, true);
        let experts = (0..config.experts)
            .map(|_| {
                [
                    builder.linear("0", joined, config.expert_width, true),
                    builder.linear("3", config.expert_width, joined, true),
                ]
            })
            .collect();
        let projection = builder.linear("proj", joined, width, true);
        let hyperbolic = builder.linear("hyp", width, width + 1, true);
        trainable.extend(builder.trainable());
        let context = context.clone();
        Naics {
            context,
            encoders,
            gate,
            experts,
            projection,
            hyperbolic,
            config,
            batch,
            trainable,
        }
    }

    /// Texts of the three groups: anchors, positives, negatives.
    fn groups(&self) -> [u64; 3] {
        let texts = self.batch[0];
        [texts, texts, texts * self.config.negatives]
    }

    /// Points in hyperbolic space of one group's texts; `channels` are pairs of ids and mask.
    ///
    /// Each text takes its best experts. Which ones depends on the data: texts that encoders fresh from their initialisation
    /// have read look alike, so all of them take the same, and the other experts have no rows and are passed over.
    fn embed(&self, channels: &[Tensor]) -> Tensor {
        let context = &self.context;
        let mut pooled = Vec::new();
        let (mut hidden, mut weight): (Option<Tensor>, Option<Tensor>) = (None, None);
        for (encoder, pair) in self.encoders.iter().zip(channels.chunks(2)) {
            let (ids, mask) = (&pair[0], &pair[1]);
            let state = encoder.forward(ids, Some(mask));
            drop(hidden.replace(state.clone()));
            at!(context, "w = float(mask)");
            let present = cast::to(view::unsqueeze(mask, 2), state.dtype());
            drop(weight.replace(present.clone()));
            at!(context, "pooled = Σ h · w / max(Σ w, 1)");
            let total = reduce::sum(pointwise::mul(&state, &present), &[1], false);
            let count = pointwise::clamp(reduce::sum(&present, &[1], false));
            pooled.push(pointwise::div(total, count));
        }
        context.set_scope("experts", None);
        at!(context, "x = [pooled of each channel]");
        let x = view::cat(pooled.clone(), 1);
        let texts = x.size(0);
        at!(context, "gates = Wg x");
        let logits = self.gate.forward(&x);
        at!(context, "values, choices = topk(gates)");
        let (values, choices) = index::topk(&logits, self.config.chosen);
        at!(context, "weights = softmax(values)");
        let shares = softmax::softmax(&values, None);
        at!(context, "y = 0");
        let mut mixed = creation::filled(context, x.sizes(), x.dtype());
        // Names of a loop's body keep their values until they are bound again.
        let (mut hit, mut rows): (Option<Tensor>, Option<Tensor>) = (None, None);
        for (expert, number) in self.experts.iter().zip(0..) {
            at!(context, "rows = texts whose choices hold e");
            let chosen = pointwise::apply(&choices, "eq", DType::Bool);
            drop(hit.replace(chosen.clone()));
            let takers = if number < self.config.chosen {
                texts
            } else {
                0
            };
            let any = reduce::plain(&chosen, &[1], false, DType::Bool);
            let taken = view::squeeze(index::nonzero(any, takers), 1);
            drop(rows.replace(taken.clone()));
            if takers == 0 {
                continue;
            }
            at!(context, "w = Σ weights · hit");
            let share = {
                let summed = reduce::sum(pointwise::mul(&shares, &chosen), &[1], false);
                view::unsqueeze(index::rows(summed, &taken), 1)
            };
            drop(weight.replace(share.clone()));
            at!(context, "y[rows] += expert_e(x[rows]) · w");
            let source = pointwise::mul(self.expert(expert, index::rows(&x, &taken)), &share);
            let source = cast::to(source, mixed.dtype());
            mixed = index::index_add(&mixed, &taken, source);
        }
        at!(context, "v = float(Wh Wp y)");
        let projected = self.projection.forward(&mixed);
        let velocity = self.hyperbolic.forward(&projected);
        drop(projected);
        let velocity = cast::to(velocity, DType::Float32);
        at!(context, "n = max(|v|, ε)");
        let length = pointwise::clamp(norm::row_norm(&velocity));
        at!(context, "point = [cosh(n), sinh(n) · v / n]");
        let time = pointwise::cosh(&length);
        let space = pointwise::div(pointwise::mul(pointwise::sinh(&length), &velocity), &length);
        let point = view::cat(vec![time, space], 1);
        drop(pooled);
        drop((hidden, weight, x, logits, values, choices, shares, mixed));
        drop((hit, rows, velocity, length));
        point
    }

    /// Linear, ReLU, dropout, linear.
    fn expert(&self, layers: &[Linear; 2], input: Tensor) -> Tensor {
        let mut x = layers[0].forward(&input);
        x = pointwise::relu(&x);
        x = dropout::dropout(&x, DROPOUT);
        x = layers[1].forward(&x);
        drop(input);
        x
    }
}

/// The distance of points on the hyperboloid.
fn lorentz(a: &Tensor, b: &Tensor) -> Tensor {
    let (context, last) = (a.context(), a.dim() - 1);
    let width = a.sizes().last();
    let product = |length: u64| {
        let (a, b) = (view::slice(a, last, length), view::slice(b, last, length));
        reduce::sum(pointwise::mul(a, b), &[last], false)
    };
    at!(context, "d = −⟨a, b⟩ of time + ⟨a, b⟩ of space");
    let time = pointwise::neg(product(1));
    let inner = pointwise::add(time, product(width - 1));
    at!(context, "distance = acosh(max(−d, 1 + ε))");
    pointwise::acosh(pointwise::clamp(pointwise::neg(&inner)))
}

impl Program for Naics {
    fn batch(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        for texts in self.groups() {
            for channel in 0..CHANNELS {
                let length = if channel == 0 {
                    self.config.title_length
                } else {
                    self.batch[1]
                };
                for _ in ["ids", "mask"] {
                    tensors.push(creation::filled(
                        &self.context,
                        [texts, length],
                        DType::Int64,
                    ));
                }
            }
        }
        tensors
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        let texts = self.batch[0];
        let groups: Vec<Tensor> = batch
            .chunks(2 * CHANNELS)
            .map(|channels| self.embed(channels))
            .collect();
        let context = &self.context;
        context.set_scope("loss", None);
        let near = view::unsqueeze(lorentz(&groups[0], &groups[1]), 1);
        let far = {
            let anchors = view::unsqueeze(&groups[0], 1);
            let width = groups[2].sizes().last();
            lorentz(
                &anchors,
                &view::view(&groups[2], [texts, self.config.negatives, width]),
            )
        };
        at!(context, "scores = −[near, far] / temperature");
        let scores = pointwise::mul_number(pointwise::neg(view::cat(
            vec![near.clone(), far.clone()],
            1,
        )));
        at!(context, "loss = cross_entropy(scores, 0)");
        let targets = creation::filled(&self.context, [texts], DType::Int64);
        let loss = loss::cross_entropy(scores, targets);
        drop(groups);
        drop((near, far));
        loss
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::Naics {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Naics::new(setup, self.clone()))
    }
}
