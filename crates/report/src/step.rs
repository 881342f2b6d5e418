//! What a picture of a step is drawn from: plain figures, whoever has planned or measured them.

use std::collections::BTreeMap;

use cinch_graph::{Graph, Phase};
use cinch_plan::{BytesByCategory, Category, Plan};

/// The memory of one training step, moment by moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPicture {
    pub title: String,
    /// The settings, in a line.
    pub subtitle: String,
    pub budget_bytes: Option<u64>,
    /// The memory of the card.
    pub capacity_bytes: Option<u64>,
    /// Outside the arena, over the whole step.
    pub overhead_bytes: u64,
    /// What is allocated; the live bytes of a moment are within it.
    pub arena_bytes: u64,
    /// How often forward and backward run before the update.
    pub micro_batches: u64,
    /// In the order of execution.
    pub moments: Vec<Moment>,
    /// What is alive at the peak besides weights, gradients and states, largest first.
    pub largest: Vec<Held>,
    /// What the budget must hold, where that is more than what is allocated.
    pub safe_bytes: Option<u64>,
    pub words: Words,
}

/// What the figures are called that belong to no category: those of cinch's own plan, unless the
/// picture is of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// What lies outside the arena.
    pub outside: &'static str,
    /// What is allocated and holds no tensor at the peak.
    pub unused: &'static str,
    /// All of it.
    pub total: &'static str,
    /// What that is, below the figure.
    pub meaning: &'static str,
    /// What the axis counts, where it is not nodes: a whole caption.
    pub axis: Option<String>,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            outside: "outside the arena",
            unused: "between tensors",
            total: "total",
            meaning: "allocated for the step",
            axis: None,
        }
    }
}

/// The memory while one node runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    pub name: String,
    pub phase: Phase,
    /// The repeated part of the model that the node belongs to.
    pub block: Option<usize>,
    /// How long the node runs, if that is known.
    pub seconds: Option<f64>,
    pub bytes: BytesByCategory,
}

/// A tensor and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    pub name: String,
    pub bytes: u64,
}

impl Moment {
    /// Live bytes of the arena.
    pub fn total(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, &b| sum.saturating_add(b))
    }
}

impl StepPicture {
    /// The moments of a planned graph. Title, budget and times are the caller's to add.
    pub fn of_plan(graph: &Graph, plan: &Plan) -> Self {
        let moments = graph.nodes.iter().zip(plan.timeline_by_category(graph));
        let moments = moments.map(|(node, bytes)| Moment {
            name: node.name.clone(),
            phase: node.phase,
            block: node.block.map(cinch_graph::BlockId::index),
            seconds: None,
            bytes,
        });
        let largest = match graph.nodes.is_empty() {
            true => Vec::new(),
            false => plan.alive_at_peak(graph),
        };
        let largest = largest.into_iter().map(|tensor| Held {
            name: tensor.name,
            bytes: tensor.bytes,
        });
        Self {
            overhead_bytes: plan.options.overhead_bytes,
            arena_bytes: plan.arena_bytes,
            micro_batches: 1,
            moments: moments.collect(),
            largest: largest.collect(),
            ..Self::default()
        }
    }

    /// The first moment with the most live bytes.
    pub fn peak(&self) -> Option<usize> {
        let most = self.moments.iter().map(Moment::total).max()?;
        self.moments.iter().position(|m| m.total() == most)
    }

    /// Live bytes and overhead at the peak.
    pub fn peak_bytes(&self) -> u64 {
        let peak = self.peak().map_or(0, |index| self.moments[index].total());
        peak.saturating_add(self.overhead_bytes)
    }

    /// What the device must have: the arena and the overhead.
    pub fn planned_bytes(&self) -> u64 {
        let arena = self.arena_bytes.saturating_add(self.overhead_bytes);
        arena.max(self.peak_bytes())
    }

    /// Where each moment begins and ends on an axis from 0 to 1: by time if every moment has
    /// one, else each moment is as long as the others.
    pub(crate) fn spans(&self) -> Vec<(f64, f64)> {
        let total = self.total_seconds();
        let equal = 1.0 / self.moments.len() as f64;
        let length = |moment: &Moment| match total {
            Some(total) => moment.seconds.unwrap_or(0.0) / total,
            None => equal,
        };
        let mut end: f64 = 0.0;
        let span = |moment| {
            let start = end;
            end = (start + length(moment)).min(1.0);
            (start, end)
        };
        self.moments.iter().map(span).collect()
    }

    /// The time of all moments, if it is known of each.
    pub(crate) fn total_seconds(&self) -> Option<f64> {
        let seconds = self.moments.iter().map(|moment| moment.seconds);
        let valid = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        let known: Option<Vec<f64>> = seconds.map(|s| s.filter(|&s| valid(s))).collect();
        let total = known?.into_iter().sum::<f64>();
        (total.is_finite() && total > 0.0).then_some(total)
    }

    /// What is alive at the peak, with tensors of the same kind and size in different blocks as
    /// one: `15 × mlp.up`. Largest first.
    pub(crate) fn largest_kinds(&self) -> Vec<Held> {
        let mut kinds: BTreeMap<(String, u64), Vec<&str>> = BTreeMap::new();
        for held in &self.largest {
            let names = kinds.entry((kind(&held.name), held.bytes)).or_default();
            names.push(&held.name);
        }
        let together = |((kind, bytes), names): ((String, u64), Vec<&str>)| Held {
            name: match &names[..] {
                [name] => (*name).to_owned(),
                names => format!("{} × {}", names.len(), without_block(&kind)),
            },
            bytes: bytes.saturating_mul(names.len() as u64),
        };
        let mut kinds: Vec<Held> = kinds.into_iter().map(together).collect();
        kinds.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        kinds
    }

    /// The categories that occur, in the order of the stack: what never changes lies below what
    /// comes and goes.
    pub(crate) fn stack(&self) -> Vec<Category> {
        const ORDER: [Category; 11] = [
            Category::Weights,
            Category::ComputeCopies,
            Category::Optimizer,
            Category::Gradients,
            Category::Cache,
            Category::Other,
            Category::Batch,
            Category::Staged,
            Category::Exchanged,
            Category::Activations,
            Category::Workspace,
        ];
        let occurs = |c: &Category| self.moments.iter().any(|m| m.bytes[c.index()] > 0);
        ORDER.into_iter().filter(occurs).collect()
    }
}

/// A name without its numbers: those between dots count blocks.
fn kind(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let part = |part| if is_number(part) { "*" } else { part };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// A kind without the part that says that it is of a block: it is of many.
fn without_block(kind: &str) -> &str {
    kind.split_once(".*.").map_or(kind, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_one_kind_are_counted_together() {
        let held = |name: &str, bytes| Held {
            name: name.to_owned(),
            bytes,
        };
        let picture = StepPicture {
            largest: vec![
                held("loss (workspace)", 25),
                held("blocks.0.mlp.up", 10),
                held("blocks.1.mlp.up", 10),
                held("blocks.12.mlp.up", 10),
                held("blocks.13.mlp.up", 7),
                held("blocks.0.mlp.h4", 10),
            ],
            ..StepPicture::default()
        };
        let expected = [
            held("3 × mlp.up", 30),
            held("loss (workspace)", 25),
            held("blocks.0.mlp.h4", 10),
            held("blocks.13.mlp.up", 7),
        ];
        assert_eq!(picture.largest_kinds(), expected);
    }

    /// Without a time for each moment all are alike; with one, the axis is time.
    #[test]
    fn moments_lie_on_the_axis_by_time_or_by_number() {
        let moment = |seconds| Moment {
            name: String::new(),
            phase: Phase::Forward,
            block: None,
            seconds,
            bytes: BytesByCategory::default(),
        };
        let spans = |seconds: [Option<f64>; 2]| {
            let moments = seconds.map(moment).to_vec();
            let picture = StepPicture {
                moments,
                ..StepPicture::default()
            };
            picture.spans()
        };
        assert_eq!(spans([Some(1.0), Some(3.0)]), [(0.0, 0.25), (0.25, 1.0)]);
        for unknown in [None, Some(f64::NAN), Some(-1.0), Some(f64::INFINITY)] {
            assert_eq!(spans([Some(1.0), unknown]), [(0.0, 0.5), (0.5, 1.0)]);
        }
        assert_eq!(spans([Some(0.0), Some(0.0)]), [(0.0, 0.5), (0.5, 1.0)]);
    }
}
