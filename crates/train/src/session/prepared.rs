//! What is prepared once of a plan: where a micro batch goes, and the parts of a step that are run.

use cinch_config::BatchConfig;
use cinch_engine::{Engine, MicroBatch, Part as GraphPart};
use cinch_graph::{Graph, Phase, Role, TensorId};
use cinch_plan::{Placement, num_micro_nodes};
use cinch_step::{StepPlan, Variant, num_micro_recordings};

use super::placement;
use crate::error::TrainError;

/// A tensor that a micro batch fills.
pub(super) struct BatchTensor {
    pub(super) name: String,
    /// With room for the longest rows.
    pub(super) place: Placement,
    /// Numbers of one sequence, by variant.
    pub(super) widths: Vec<usize>,
}

/// What micro batches fill, in the place of the longest.
pub(super) fn batch_tensors(step: &StepPlan) -> Vec<BatchTensor> {
    let mut tensors: Vec<BatchTensor> = Vec::new();
    for (index, variant) in step.variants().iter().enumerate() {
        let graph: &Graph = &variant.training;
        for id in (0..graph.tensors.len() as u32).map(TensorId) {
            let tensor = graph.tensor(id);
            if tensor.role != Role::Batch {
                continue;
            }
            let place = placement(&variant.plan, id);
            let known = tensors.iter().position(|known| known.name == tensor.name);
            let known = known.unwrap_or_else(|| {
                tensors.push(BatchTensor {
                    name: tensor.name.clone(),
                    place,
                    widths: vec![0; step.variants().len()],
                });
                tensors.len() - 1
            });
            let known = &mut tensors[known];
            known.place.bytes = known.place.bytes.max(place.bytes);
            let sequences = step.config.batch.batch_size.max(1);
            known.widths[index] = tensor.ty.shape.elements() / sequences;
        }
    }
    tensors
}

/// Where a random state lies.
pub(super) struct RandomPlace {
    pub(super) place: Placement,
    /// Rows of a micro batch that it counts.
    pub(super) rows: usize,
}

/// The random states of a variant. Rows of a shorter one count as if they had the longest length,
/// so that no two sequences of a step share their masks.
pub(super) fn random_places(variant: &Variant, config: &BatchConfig) -> Vec<RandomPlace> {
    let random = variant.training.random.iter();
    let places = random.map(|random| RandomPlace {
        place: placement(&variant.plan, random.id),
        rows: random.rows.unwrap_or(config.batch_size * config.seq_len),
    });
    places.collect()
}

/// What is run of a variant.
pub(super) struct VariantParts {
    /// Forward and backward of a micro batch; with the updates that stand among the backward, and
    /// in the last with what ranks exchange.
    pub(super) micro: MicroParts,
    pub(super) update: GraphPart,
    pub(super) evaluation: GraphPart,
}

/// What is run of a micro batch, by its place in the step.
pub(super) struct MicroParts {
    pub(super) first: GraphPart,
    pub(super) middle: GraphPart,
    pub(super) last: GraphPart,
}

impl MicroParts {
    pub(super) fn prepare(
        engine: &mut Engine,
        variant: &Variant,
        accumulation: usize,
    ) -> Result<Self, TrainError> {
        let graph: &Graph = &variant.training;
        let nodes = 0..num_micro_nodes(graph);
        let exchanges = graph.nodes[nodes.clone()]
            .iter()
            .any(|node| node.phase == Phase::Exchange);
        let recordings = num_micro_recordings(graph, accumulation);
        let mut part = |is_first, is_last| {
            let micro = MicroBatch { is_first, is_last };
            engine.prepare_micro(graph, &variant.plan, nodes.clone(), micro)
        };
        let first = part(true, accumulation == 1 || !exchanges)?;
        let last = match recordings {
            1 => first.clone(),
            _ => part(false, true)?,
        };
        // Where nothing waits for the last, it is as any later one.
        let middle = match recordings {
            3.. => part(false, false)?,
            _ => last.clone(),
        };
        Ok(Self {
            first,
            middle,
            last,
        })
    }

    pub(super) fn of(&self, index: usize, accumulation: usize) -> &GraphPart {
        match index {
            0 => &self.first,
            index if index + 1 < accumulation => &self.middle,
            _ => &self.last,
        }
    }
}

impl VariantParts {
    pub(super) fn prepare(
        engine: &mut Engine,
        variant: &Variant,
        accumulation: usize,
    ) -> Result<Self, TrainError> {
        let graph = &variant.training;
        let (micro, all) = (num_micro_nodes(graph), graph.nodes.len());
        let update = engine.prepare(graph, &variant.plan, micro..all, false)?;
        let micro = MicroParts::prepare(engine, variant, accumulation)?;
        let nodes = 0..variant.evaluation.nodes.len();
        let evaluation =
            engine.prepare(&variant.evaluation, &variant.evaluation_plan, nodes, true)?;
        Ok(Self {
            micro,
            update,
            evaluation,
        })
    }
}
