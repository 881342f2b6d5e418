//! Meeting a budget, and saying what would meet it when nothing allowed does.

use std::fmt;

use cinch_architecture::Architecture;
use cinch_config::remedy::{Effect, RemedyKind};
use cinch_config::{Bytes, Checkpointing, Config, Precision, StateFormat};
use cinch_graph::Target;
use cinch_plan::{Breakdown, LiveTensor};
use cinch_step::{StepPlan, StepTarget};
use serde::Serialize;

use crate::FitError;

/// Ways to cut a rank's share of the effective batch, largest micro batch first, none larger than asked for. An
/// update inside the backward leaves nothing to add a second micro batch to, and a step that needs
/// the `whole` batch has no other, nor has one whose result depends on the micro batch; then there
/// is one way only.
pub(crate) fn splits(config: &Config, whole: bool) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (micro, effective) = (config.batch.batch_size, config.batch.rank_batch());
    let depends = config.model.depends_on_micro_batch().is_some();
    let whole = whole || depends || config.batch.update_in_backward;
    (1..=micro)
        .rev()
        .filter(move |&size| effective.is_multiple_of(size) && (size == micro || !whole))
        .map(move |size| (size, effective / size))
}

/// Rows of logits at once below which nothing is worth saving.
pub(crate) const FEWEST_ROWS: usize = 16;

/// Rows of logits at once to try, from what the configuration has downwards.
pub(crate) fn loss_chunks(config: &Config) -> Vec<Option<usize>> {
    match config.batch.loss_chunk {
        rows if !config.model.has_logits() => vec![rows],
        Some(rows) => vec![Some(rows)],
        None => vec![None, Some(512), Some(64), Some(FEWEST_ROWS)],
    }
}

/// The plan with the fewest recomputed blocks that fits.
pub(crate) fn fewest_blocks(
    config: &Config,
    machine: StepTarget,
    budget: u64,
) -> Result<Option<StepPlan>, FitError> {
    // The peak does not grow with the number of recomputed blocks, so the first that fits can
    // be found by halving.
    let (mut low, mut high) = (0, config.model.num_blocks());
    let mut best = StepPlan::new(config, machine, high)?;
    if best.total_bytes() > budget {
        return Ok(None);
    }
    while low < high {
        let middle = usize::midpoint(low, high);
        let step = StepPlan::new(config, machine, middle)?;
        if step.total_bytes() <= budget {
            (best, high) = (step, middle);
        } else {
            low = middle + 1;
        }
    }
    Ok(Some(best))
}

/// One change that makes the configuration fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetChange {
    pub kind: RemedyKind,
    pub effect: Effect,
    /// What to do, as flags.
    pub change: String,
    /// What it takes then.
    pub bytes: u64,
}

impl BudgetChange {
    fn new(kind: RemedyKind, change: String, step: &StepPlan) -> Self {
        Self {
            kind,
            effect: kind.effect(),
            change,
            bytes: step.total_bytes(),
        }
    }
}

/// The answer when nothing that keeps the training as asked fits the budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoesNotFit {
    pub budget_bytes: u64,
    /// With everything tried that was allowed.
    pub needed_bytes: u64,
    pub breakdown: Breakdown,
    /// Largest tensors and parts.
    pub consumers: Vec<LiveTensor>,
    pub changes: Vec<BudgetChange>,
}

const NUM_CONSUMERS: usize = 5;

impl DoesNotFit {
    pub(crate) fn new(
        config: &Config,
        smallest: &StepPlan,
        machine: StepTarget,
        budget: u64,
    ) -> Result<Self, FitError> {
        let mut best = smallest.clone();
        for loss_chunk in loss_chunks(config) {
            let mut chunked = smallest.config.clone();
            chunked.batch.loss_chunk = loss_chunk;
            let blocks = match config.batch.checkpointing {
                Checkpointing::Auto => config.model.num_blocks(),
                _ => smallest.training.num_recomputed,
            };
            let step = StepPlan::new(&chunked, machine, blocks)?;
            if step.total_bytes() < best.total_bytes() {
                best = step;
            }
        }
        let mut consumers = best.plan.alive_at_peak(&best.training);
        consumers.truncate(NUM_CONSUMERS);
        Ok(Self {
            budget_bytes: budget,
            needed_bytes: best.total_bytes(),
            breakdown: best.breakdown(),
            consumers,
            changes: changes(&best.config, machine, budget)?,
        })
    }
}

/// The smallest changes that fit, tried one by one and, where none does alone, on top of full
/// recomputation.
fn changes(
    config: &Config,
    machine: StepTarget,
    budget: u64,
) -> Result<Vec<BudgetChange>, FitError> {
    let mut found = Vec::new();
    let full = config.batch.checkpointing == Checkpointing::Auto
        || config.batch.checkpointing == Checkpointing::Full;
    if !full && let Some(step) = fewest_blocks(config, machine, budget)? {
        let count = step.training.num_recomputed;
        found.push(BudgetChange::new(
            RemedyKind::Recomputation,
            RemedyKind::Recomputation.flags(&[&count.to_string()]),
            &step,
        ));
    }
    let mut attempt = |kind, change: String, config: &Config| -> Result<bool, FitError> {
        let step = match StepPlan::new(config, machine, config.model.num_blocks()) {
            Err(error) if error.is_too_large() => return Ok(false),
            other => other?,
        };
        let fits = step.total_bytes() <= budget;
        if fits {
            let mut flags = vec![change];
            flags.extend((!full).then(|| RemedyKind::Recomputation.flags(&["full"])));
            found.push(BudgetChange::new(kind, flags.join(" "), &step));
        }
        Ok(fits)
    };
    let mut seq_len = config.batch.seq_len / 2;
    while seq_len > 0 {
        let mut shorter = config.clone();
        shorter.batch.seq_len = seq_len;
        let kind = RemedyKind::SequenceLength;
        if attempt(kind, kind.flags(&[&seq_len.to_string()]), &shorter)? {
            break;
        }
        seq_len /= 2;
    }
    if config.batch.states != StateFormat::EightBit {
        let mut coarser = config.clone();
        coarser.batch.states = StateFormat::EightBit;
        let kind = RemedyKind::EightBitStates;
        attempt(kind, kind.flags(&[StateFormat::EightBit.name()]), &coarser)?;
    }
    if !config.batch.update_in_backward && config.batch.world.is_alone() {
        // A gradient is complete only after the last micro batch, so there is to be one.
        let mut early = config.clone();
        early.batch.update_in_backward = true;
        early.batch.batch_size = config.batch.rank_batch();
        early.batch.accumulation = 1;
        let kind = RemedyKind::UpdateInBackward;
        let mut flags = Vec::new();
        if config.batch.accumulation > 1 {
            let micro = early.batch.batch_size.to_string();
            flags.push(RemedyKind::MicroBatch.flags(&[&micro, "1"]));
        }
        flags.push(kind.flags(&["true"]));
        attempt(kind, flags.join(" "), &early)?;
    }
    if machine.target == Target::Cuda {
        if config.batch.precision == Precision::Fp32 {
            let mut lower = config.clone();
            lower.batch.precision = Precision::Bf16;
            let kind = RemedyKind::Bf16;
            attempt(kind, kind.flags(&[Precision::Bf16.name()]), &lower)?;
        }
        if !config.batch.offload {
            let mut away = config.clone();
            away.batch.offload = true;
            let kind = RemedyKind::Offload;
            attempt(kind, kind.flags(&["true"]), &away)?;
        }
        if !config.batch.offload_frozen && config.tuning.lora.is_some() {
            let mut away = config.clone();
            away.batch.offload_frozen = true;
            let kind = RemedyKind::OffloadFrozen;
            attempt(kind, kind.flags(&["true"]), &away)?;
        }
    }
    for (name, model) in smaller_sizes(config) {
        let mut smaller = config.clone();
        let seq_len = model.positions().map_or(config.batch.seq_len, |most| {
            config.batch.seq_len.min(most as usize)
        });
        smaller.model = model;
        smaller.batch.seq_len = seq_len;
        let kind = RemedyKind::ModelSize;
        let mut flags = vec![kind.flags(&[name])];
        if seq_len < config.batch.seq_len {
            flags.push(RemedyKind::SequenceLength.flags(&[&seq_len.to_string()]));
        }
        if attempt(kind, flags.join(" "), &smaller)? {
            break;
        }
    }
    found.sort_by_key(|change| std::cmp::Reverse(change.bytes));
    Ok(found)
}

/// Named sizes of the same model with the same vocabulary, largest first.
fn smaller_sizes(config: &Config) -> Vec<(&'static str, Architecture)> {
    let family = config.model.family();
    let mut sizes: Vec<(&'static str, Architecture)> = family
        .sizes
        .iter()
        .map(|size| (size.name, (size.shape)()))
        .filter(|(_, model)| {
            model.vocabulary() == config.model.vocabulary()
                && model.layers() < config.model.layers()
        })
        .collect();
    sizes.sort_by_key(|(_, model)| std::cmp::Reverse(model.parameters()));
    sizes
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |bytes| Bytes::new(bytes).to_string();
        writeln!(
            f,
            "does not fit: needs {} ({} bytes), the budget is {}",
            show(self.needed_bytes),
            Bytes::new(self.needed_bytes).exact(),
            show(self.budget_bytes)
        )?;
        let mut parts = self.breakdown.parts();
        parts.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        f.write_str("largest parts:")?;
        for (name, bytes) in parts.iter().take(4) {
            write!(f, " {name} {},", show(*bytes))?;
        }
        writeln!(f, " …")?;
        if !self.consumers.is_empty() {
            writeln!(f, "largest tensors at the peak:")?;
        }
        for tensor in &self.consumers {
            writeln!(
                f,
                "  {:>10}  {} {}",
                show(tensor.bytes),
                tensor.name,
                tensor.r#type
            )?;
        }
        if self.changes.is_empty() {
            write!(
                f,
                "hint: no single change fits {}; the smallest budget for these settings is {}",
                show(self.budget_bytes),
                show(self.needed_bytes)
            )
        } else {
            f.write_str("what would fit, the smallest change first:")?;
            for change in &self.changes {
                write!(f, "\n  {:<40} {:>10}", change.change, show(change.bytes))?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use cinch_config::{Settings, Source};

    use super::*;

    #[test]
    fn a_whole_batch_is_not_cut() {
        let mut settings = Settings::new();
        for (key, value) in [
            ("vram.batch_size", "6"),
            ("vram.gradient_accumulation_steps", "1"),
        ] {
            let source = Source::Flag("test".to_owned());
            settings.set(key, value, source).unwrap();
        }
        let mut config = settings.resolve().unwrap();
        let cuts = |config: &Config, whole| splits(config, whole).collect::<Vec<_>>();
        assert_eq!(cuts(&config, false), [(6, 1), (3, 2), (2, 3), (1, 6)]);
        assert_eq!(cuts(&config, true), [(6, 1)]);
        config.batch.update_in_backward = true;
        assert_eq!(cuts(&config, false), [(6, 1)]);
    }
}
