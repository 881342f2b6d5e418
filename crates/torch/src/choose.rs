//! The settings with which a run fits a card, at the effective batch that was asked for.
//!
//! There is no model of PyTorch's speed here, so the order of preference is a rule, in three parts:
//! 1. Settings that change the result (8-bit states, bf16 weights) are used only when nothing else fits.
//! 2. Among the rest, a step costs its number of micro batches, twice as much under checkpointing. Eager PyTorch on
//!    small micro batches waits for Python, so that two of half the size take up to twice as long; recomputing every
//!    layer made measured steps 1.4 to 1.9 times as long. Checkpointing must therefore save more than half of the
//!    micro batches.
//! 3. Among equals, the run with fewest changes.
//!
//! Micro batches are divisors of the effective batch, so that it is met exactly. Memory grows with the batch, which
//! makes the largest that fits a matter of bisection; the answer and the next larger one have both been predicted.

use cinch_config::remedy::{Effect, RemedyKind};

use crate::TorchError;
use crate::change;
use crate::eager::training::Precision;
use crate::model::{Prediction, Workload};
use crate::overhead::Overhead;
use crate::remedy::{Remedy, remedies};
use crate::sharding::Division;

/// Which settings may be changed. The micro batch always may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    pub checkpointing: bool,
    pub expandable_segments: bool,
    pub fused_optimizer: bool,
    /// Changes the result slightly.
    pub optimizer_8bit: bool,
    /// Autocast for runs in fp32, then bf16 weights: changes the result.
    pub precision: bool,
}

impl Default for Permissions {
    /// Everything that leaves the result as it is.
    fn default() -> Permissions {
        Permissions {
            checkpointing: true,
            expandable_segments: true,
            fused_optimizer: true,
            optimizer_8bit: false,
            precision: false,
        }
    }
}

/// What the run must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the card that the process may take.
    pub budget_bytes: u64,
    pub overhead: Overhead,
    /// Rows of a step, on each rank: micro batch × micro batches.
    pub effective_batch: u64,
    pub may: Permissions,
    /// How several ranks divide the run; none where one runs it.
    pub division: Option<Division>,
}

impl Limits {
    /// What a card must have for a run.
    fn safe_bytes(&self, workload: &Workload, prediction: &Prediction) -> Result<u64, TorchError> {
        match self.division {
            None => Ok(self.overhead.safe_bytes(prediction)),
            Some(division) => {
                let shares = division.shares(workload)?;
                Ok(shares.safe_bytes(prediction, &self.overhead))
            }
        }
    }
}

/// A run that fits.
#[derive(Clone, Debug)]
pub struct Choice {
    pub workload: Workload,
    pub prediction: Prediction,
    pub device_bytes: u64,
    /// At most the budget.
    pub safe_bytes: u64,
    /// What differs from the run that was given, one setting a line.
    pub changes: Vec<String>,
    /// The next larger micro batch with these settings, and the safe figure that does not fit.
    pub next: Option<Next>,
}

/// A micro batch that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub batch: u64,
    /// None where the batch is larger than any replay.
    pub safe_bytes: Option<u64>,
}

impl Choice {
    pub fn micro_batches(&self) -> u32 {
        self.workload.recipe.accumulation
    }
}

/// How many micro batches without recomputation one with recomputation is worth.
const RECOMPUTATION: u64 = 2;

/// Micro batches that are replayed while searching: the first makes gradients, the second adds into them. The answer is
/// predicted with all of its own.
const SEARCHED_MICRO_BATCHES: u32 = 2;

/// Finds the preferred settings whose safe figure is within the budget.
pub fn choose(base: &Workload, limits: &Limits) -> Result<Choice, TorchError> {
    if limits.effective_batch == 0 || limits.effective_batch > u64::from(u32::MAX) {
        return Err(effective_batch_error(base, limits));
    }
    let search = Search {
        batches: divisors(limits.effective_batch),
        limits,
    };
    let mut smallest: Option<(u64, Workload)> = None;
    for group in variants(base, limits.may) {
        let mut best: Option<(u64, Candidate)> = None;
        for variant in group {
            let weight = weight(&variant.workload);
            // Only batches with which this variant would cost less than the best so far.
            let least = search.batches.iter().position(|batch| {
                let cost = limits.effective_batch / batch * weight;
                best.as_ref().is_none_or(|(best, _)| cost < *best)
            });
            let Some(least) = least else { continue };
            if let Some(index) = search.largest(&variant, least)? {
                if let Some(candidate) = search.verified(variant, index, least)? {
                    let micro_batches = limits.effective_batch / search.batches[candidate.index];
                    best = Some((micro_batches * weight, candidate));
                }
            } else if least == 0 {
                let bytes = search.glance(&variant, 0)?.unwrap_or(u64::MAX);
                if smallest.as_ref().is_none_or(|(least, _)| bytes < *least) {
                    smallest = Some((bytes, search.at(&variant, 0)));
                }
            }
        }
        if let Some((_, candidate)) = best {
            return search.choice(base, candidate);
        }
    }
    Err(does_not_fit(smallest, base, limits))
}

fn weight(workload: &Workload) -> u64 {
    if workload.checkpoints.is_on() {
        RECOMPUTATION
    } else {
        1
    }
}

/// A set of settings, before the batch is chosen.
struct Variant {
    workload: Workload,
    changes: Vec<String>,
}

impl Variant {
    /// The variant with one more change, where it applies.
    fn with(&self, kind: RemedyKind) -> Option<Variant> {
        let workload = change::apply(kind, &self.workload)?;
        let mut changes = self.changes.clone();
        changes.push(change::describe(kind, &self.workload, &workload));
        Some(Variant { workload, changes })
    }
}

/// Groups of settings. A later group is looked at only when nothing of the earlier ones fits; within a group the fewest
/// changes come first.
fn variants(base: &Workload, may: Permissions) -> Vec<Vec<Variant>> {
    let mut starts = vec![Variant {
        // Under a limit the replay would end where memory does; what is asked here is how much it takes.
        workload: Workload {
            memory_limit: None,
            ..base.clone()
        },
        changes: Vec::new(),
    }];
    let result_changes = [
        (may.optimizer_8bit, RemedyKind::EightBitStates),
        (may.precision, RemedyKind::Bf16),
        (may.precision, RemedyKind::Bf16Weights),
    ];
    for (allowed, change) in result_changes {
        // Autocast is a step down from fp32 only.
        let useful = change != RemedyKind::Bf16 || base.recipe.precision == Precision::Float32;
        let last = starts.last().filter(|_| allowed && useful);
        if let Some(next) = last.and_then(|last| last.with(change)) {
            starts.push(next);
        }
    }
    starts
        .into_iter()
        .map(|start| {
            let mut group = vec![start];
            let free = [
                (may.fused_optimizer, RemedyKind::FusedOptimizer),
                (may.expandable_segments, RemedyKind::ExpandableSegments),
                (may.checkpointing, RemedyKind::Recomputation),
            ];
            for (_, change) in free.into_iter().filter(|(allowed, _)| *allowed) {
                let more: Vec<Variant> = group.iter().filter_map(|v| v.with(change)).collect();
                group.extend(more);
            }
            group.sort_by_key(|variant| (weight(&variant.workload), variant.changes.len()));
            group
        })
        .collect()
}

/// A variant with the largest batch that fits.
struct Candidate {
    variant: Variant,
    /// The batch's place among those that are searched.
    index: usize,
    safe_bytes: u64,
    prediction: Prediction,
}

struct Search<'a> {
    /// Divisors of the effective batch.
    batches: Vec<u64>,
    limits: &'a Limits,
}

impl Search<'_> {
    fn at(&self, variant: &Variant, index: usize) -> Workload {
        let mut workload = variant.workload.clone();
        workload.batch = self.batches[index];
        // At most the effective batch, which is in range.
        workload.recipe.accumulation = (self.limits.effective_batch / workload.batch) as u32;
        workload
    }

    fn predict(&self, workload: &Workload) -> Result<(u64, Prediction), TorchError> {
        let prediction = workload.predict()?;
        Ok((self.limits.safe_bytes(workload, &prediction)?, prediction))
    }

    /// A step that is cut short.
    fn short(&self, variant: &Variant, index: usize) -> Workload {
        let mut workload = self.at(variant, index);
        let micro_batches = &mut workload.recipe.accumulation;
        *micro_batches = SEARCHED_MICRO_BATCHES.min(*micro_batches);
        workload
    }

    /// The safe figure of a step that is cut short; none where the batch is larger than any replay.
    fn glance(&self, variant: &Variant, index: usize) -> Result<Option<u64>, TorchError> {
        match self.predict(&self.short(variant, index)) {
            Ok((bytes, _)) => Ok(Some(bytes)),
            Err(TorchError::TooLarge { .. }) if index > 0 => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the same is within the budget. The replay ends as soon as tensors alone are above it.
    fn fits(&self, variant: &Variant, index: usize) -> Result<bool, TorchError> {
        let (overhead, budget) = (&self.limits.overhead, self.limits.budget_bytes);
        if self.limits.division.is_some() {
            let bytes = self.glance(variant, index)?;
            return Ok(bytes.is_some_and(|bytes| bytes <= budget));
        }
        let most = overhead.most_reserved(budget);
        match self.short(variant, index).predict_within(most) {
            Ok(prediction) => Ok(prediction.is_some_and(|p| overhead.safe_bytes(&p) <= budget)),
            Err(TorchError::TooLarge { .. }) if index > 0 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The largest batch from `least` on that fits, by bisection.
    fn largest(&self, variant: &Variant, least: usize) -> Result<Option<usize>, TorchError> {
        if !self.fits(variant, least)? {
            return Ok(None);
        }
        // Invariant: `low` fits; `high` does not, or is past the end.
        let (mut low, mut high) = (least, self.batches.len());
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.fits(variant, middle)? {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(Some(low))
    }

    /// The run predicted with all its micro batches, which can move segments about; a smaller one where it then does
    /// not fit.
    fn verified(
        &self,
        variant: Variant,
        index: usize,
        least: usize,
    ) -> Result<Option<Candidate>, TorchError> {
        for index in (least..=index).rev() {
            let (safe_bytes, prediction) = self.predict(&self.at(&variant, index))?;
            if safe_bytes <= self.limits.budget_bytes {
                return Ok(Some(Candidate {
                    variant,
                    index,
                    safe_bytes,
                    prediction,
                }));
            }
        }
        Ok(None)
    }

    /// All that is told of the best candidate.
    fn choice(&self, base: &Workload, candidate: Candidate) -> Result<Choice, TorchError> {
        let Candidate {
            variant,
            index,
            safe_bytes,
            prediction,
        } = candidate;
        let next = match self.batches.get(index + 1) {
            Some(batch) => Some(Next {
                batch: *batch,
                safe_bytes: self.glance(&variant, index + 1)?,
            }),
            None => None,
        };
        let workload = self.at(&variant, index);
        let mut changes = variant.changes;
        changes.extend(batch_changes(base, &workload));
        Ok(Choice {
            device_bytes: self.limits.overhead.device_bytes(&prediction),
            safe_bytes,
            workload,
            prediction,
            changes,
            next,
        })
    }
}

fn batch_changes(base: &Workload, chosen: &Workload) -> Vec<String> {
    let pairs = [
        ("batch", base.batch, chosen.batch),
        (
            "accumulation",
            u64::from(base.recipe.accumulation),
            u64::from(chosen.recipe.accumulation),
        ),
    ];
    let differing = pairs.iter().filter(|(_, before, after)| before != after);
    differing
        .map(|(name, before, after)| format!("{name} {before} → {after}"))
        .collect()
}

/// All divisors, smallest first.
fn divisors(number: u64) -> Vec<u64> {
    let mut small: Vec<u64> = (1..=number.isqrt())
        .filter(|divisor| number.is_multiple_of(*divisor))
        .collect();
    let large: Vec<u64> = small
        .iter()
        .rev()
        .map(|divisor| number / divisor)
        .filter(|divisor| divisor * divisor > number)
        .collect();
    small.extend(large);
    small
}

fn effective_batch_error(base: &Workload, limits: &Limits) -> TorchError {
    if limits.effective_batch == 0 {
        return TorchError::EmptyRun {
            batch: 0,
            length: base.length,
            accumulation: base.recipe.accumulation,
        };
    }
    TorchError::TooLarge {
        what: "effective batch",
        value: limits.effective_batch,
        most: u64::from(u32::MAX),
    }
}

/// The least that any permitted settings need, and what would bring it down most.
fn does_not_fit(smallest: Option<(u64, Workload)>, base: &Workload, limits: &Limits) -> TorchError {
    let (needed, workload) = smallest.unwrap_or((u64::MAX, base.clone()));
    let remedies = match limits.division {
        // They are of a run on one card.
        Some(_) => Ok(Vec::new()),
        None => remedies(&workload, &limits.overhead),
    };
    let remedy = remedies
        .ok()
        .and_then(|remedies| {
            let mut saving = remedies
                .into_iter()
                .filter(|remedy| remedy.device < 0 && remedy.kind.effect() != Effect::ChangesModel);
            let first = saving.next()?;
            // The mildest that is enough on its own; if none is, the largest.
            let enough = |remedy: &Remedy| remedy.totals.safe <= limits.budget_bytes;
            let best = saving.rfind(enough).unwrap_or(first);
            Some(format!(
                "{} ({}) brings it to {}{}",
                best.name,
                best.change,
                gibibytes(best.totals.safe),
                if enough(&best) {
                    ""
                } else {
                    ", which is not enough alone"
                }
            ))
        })
        .unwrap_or_else(|| match limits.division {
            None => "no single remedy makes it smaller".into(),
            Some(_) => {
                "more ranks, or a scheme that divides more, would make each one's part smaller"
                    .into()
            }
        });
    TorchError::DoesNotFit {
        budget: limits.budget_bytes,
        needed,
        batch: workload.batch,
        length: workload.length,
        remedy,
    }
}

/// A size for a sentence.
pub(crate) fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
