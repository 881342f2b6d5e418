//! Guide 003: a model with sixteen small attentions and a large one in every layer.

use cinch_architecture::{Architecture, Mu};
use serde::Deserialize;

use super::file::{self, Figure};
use super::{GuideClaim, activations, percent, run};
use crate::TorchError;
use crate::eager::training::Precision;
use crate::eager::{AllocationCategory, Event};
use crate::model::Workload;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    /// Queries, keys and values of a layer's small attentions.
    BlockProjections(Run),
    /// Their weights.
    BlockWeights(Run),
    /// The same of its large one.
    CrossProjections(Run),
    CrossWeights(Run),
    /// All that a layer keeps.
    Layer(Run),
    Peak(Run),
    /// What remains with half of them.
    HalfTheLayers(Run),
    /// What deleting a Python name frees while autograd holds the tensor.
    DeletedName,
    EffectiveBatch(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    batch: u64,
    length: u64,
    precision: RunPrecision,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RunPrecision {
    Fp32,
    /// Under autocast.
    Fp16,
}

impl Run {
    fn workload(self) -> Workload {
        self.layered(Mu::default().layers)
    }

    fn layered(self, layers: u64) -> Workload {
        let config = Mu {
            layers,
            ..Mu::default()
        };
        let precision = match self.precision {
            RunPrecision::Fp32 => Precision::Float32,
            RunPrecision::Fp16 => Precision::AutocastFloat16,
        };
        run(Architecture::Mu(config), self.batch, self.length, precision)
    }
}

/// What the attentions of a layer make in forward.
#[derive(Clone, Copy)]
struct Attentions {
    block_projections: u64,
    block_weights: u64,
    cross_projections: u64,
    cross_weights: u64,
}

impl Attentions {
    /// Reads the first forward of the first layer: each attention is some products, then one softmax. The blocks come
    /// first, each with three projections; the last attention, over all of them, has one for all three.
    fn of(workload: &Workload) -> Result<Attentions, TorchError> {
        let events = workload.events()?;
        let forward: Vec<&Event> = events
            .iter()
            .filter(|event| {
                event.scope.layer == Some(0) && event.category == AllocationCategory::Activation
            })
            .filter(|event| !event.is_free && matches!(event.op, "mm" | "addmm" | "_softmax"))
            .collect();
        let layer: Vec<&[&Event]> = forward
            .split_inclusive(|event| event.op == "_softmax")
            .collect();
        let heaviest = |attention: &[&Event]| {
            let softmax = attention.last().map_or(0, |event| event.bytes);
            let products = attention.iter().rev().skip(1).map(|event| event.bytes);
            (
                softmax,
                products.clone().max().unwrap_or(0),
                products.sum::<u64>(),
            )
        };
        // A layer's attention with the largest weights is the one over all blocks; those before it are the blocks'.
        let first = layer.first().map_or((0, 0, 0), |part| heaviest(part));
        let cross = layer
            .iter()
            .position(|part| heaviest(part).0 > first.0)
            .unwrap_or(0);
        let (cross_weights, cross_projections, _) =
            layer.get(cross).map_or((0, 0, 0), |part| heaviest(part));
        Ok(Attentions {
            block_projections: first.2 * cross as u64,
            block_weights: first.0 * cross as u64,
            cross_projections,
            cross_weights,
        })
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    // Four claims are about the attentions of one run.
    let mut known: Option<(Run, Attentions)> = None;
    let mut attentions = |run: Run| {
        if let Some((_, attentions)) = known.filter(|(of, _)| *of == run) {
            return Ok(attentions);
        }
        let attentions = Attentions::of(&run.workload())?;
        known = Some((run, attentions));
        Ok::<_, TorchError>(attentions)
    };
    file::answer("mu.json", include_str!("mu.json"), |asked| {
        let layers = Mu::default().layers;
        Ok(match asked {
            Asked::BlockProjections(run) => Figure::bytes(attentions(run)?.block_projections),
            Asked::BlockWeights(run) => Figure::bytes(attentions(run)?.block_weights),
            Asked::CrossProjections(run) => Figure::bytes(attentions(run)?.cross_projections),
            Asked::CrossWeights(run) => Figure::bytes(attentions(run)?.cross_weights),
            Asked::Layer(run) => {
                let one_less = activations(&run.layered(layers - 1))?;
                Figure::bytes(activations(&run.workload())? - one_less)
            }
            Asked::Peak(run) => Figure::peak(&run.workload())?,
            Asked::HalfTheLayers(run) => {
                let (whole, half) = (run.workload(), run.layered(layers / 2));
                let (whole, half) = (whole.predict()?, half.predict()?);
                let share = percent(half.peak_allocated, whole.peak_allocated);
                Figure::words(format!("{share} of the tensors' peak remains"))
            }
            Asked::DeletedName => Figure::words("0 bytes"),
            Asked::EffectiveBatch(batch) => Figure::words(format!("an effective batch of {batch}")),
        })
    })
}
