//! What a search may choose: each axis is a change that `cinch_config::remedy` declares (the
//! settings it writes, what it does to the result, what is preferred to what) with its choices.
//!
//! The search itself knows none of them. A model adds its own by declaring them in its
//! description (`cinch_architecture::Family`).

use std::fmt;
use std::sync::Arc;

use cinch_architecture::{Number, Tunable};
use cinch_config::remedy::{Effect, PRECISION, REMEDIES, RemedyKind};
use cinch_config::{Config, Precision, ShardedPart, StateFormat};
use cinch_device::Card;
use cinch_graph::Target;

use super::request::{Permission, Request};
use crate::budget::FEWEST_ROWS;

/// One setting, or a few that go together, and what it may be.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The keys of the registry that it writes.
    pub keys: &'static [&'static str],
    pub effect: Effect,
    /// What the configuration has.
    pub written: Choice,
    pub choices: Vec<Choice>,
    /// So many of the choices are taken wherever they are best; those behind them are last
    /// resorts, each only where nothing before it fits.
    pub num_free: usize,
}

/// One value of an axis.
#[derive(Clone)]
pub struct Choice {
    /// What it means: "micro batch 4 × 4".
    pub description: String,
    /// As the user would write it, key by key; no value for what is left to the planner.
    pub values: Vec<(&'static str, Option<String>)>,
    write: Arc<dyn Fn(&mut Config) + Send + Sync>,
}

impl Choice {
    pub fn new(
        description: impl Into<String>,
        values: Vec<(&'static str, Option<String>)>,
        write: impl Fn(&mut Config) + Send + Sync + 'static,
    ) -> Self {
        Self {
            description: description.into(),
            values,
            write: Arc::new(write),
        }
    }

    /// A value of a declared change; none for each key that is left to the planner.
    fn of(
        kind: RemedyKind,
        values: Vec<Option<String>>,
        write: impl Fn(&mut Config) + Send + Sync + 'static,
    ) -> Self {
        let said: Vec<&str> = values.iter().filter_map(Option::as_deref).collect();
        let description = kind.said(&said);
        let keys = kind.declaration().keys.iter().copied();
        Self::new(description, keys.zip(values).collect(), write)
    }

    pub fn write(&self, config: &mut Config) {
        (self.write)(config);
    }

    /// Whether the configuration has this already.
    pub fn is_in(&self, config: &Config) -> bool {
        let mut written = config.clone();
        self.write(&mut written);
        written == *config
    }
}

impl fmt::Debug for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

impl Axis {
    /// A declared change over values, each told as a choice by `choice`.
    fn of<T>(
        kind: RemedyKind,
        written: T,
        values: impl IntoIterator<Item = T>,
        choice: impl Fn(T) -> Choice,
    ) -> Self {
        let axis = Self::new(kind.declaration().keys, written, values, choice);
        Self {
            effect: kind.effect(),
            ..axis
        }
    }

    /// An axis over values that keep the result.
    fn new<T>(
        keys: &'static [&'static str],
        written: T,
        values: impl IntoIterator<Item = T>,
        choice: impl Fn(T) -> Choice,
    ) -> Self {
        let written = choice(written);
        let choices: Vec<Choice> = values.into_iter().map(choice).collect();
        Self {
            keys,
            effect: Effect::KeepsResult,
            written,
            num_free: choices.len(),
            choices,
        }
    }

    /// Choices but the first change the result, and are as free as the user says.
    fn changing(mut self, permission: Permission) -> Self {
        match permission {
            Permission::Never => self.choices.truncate(1),
            Permission::LastResort => self.num_free = self.num_free.min(1),
            Permission::Free => {}
        }
        self
    }

    /// Leaves only what the configuration has, where the user stated it.
    fn settle(mut self, request: &Request<'_>) -> Self {
        if self.keys.iter().any(|key| request.fixed.contains(key)) {
            self.choices = vec![self.written.clone()];
        }
        self.num_free = self.num_free.min(self.choices.len());
        self
    }
}

/// One way to cut an effective batch.
pub(crate) fn split(micro: usize, accumulation: usize) -> Choice {
    let values = [micro, accumulation].map(|count| Some(count.to_string()));
    Choice::of(RemedyKind::MicroBatch, values.into(), move |config| {
        config.batch.batch_size = micro;
        config.batch.accumulation = accumulation;
    })
}

/// The ways to cut an effective batch, given as (micro batch, accumulation).
pub(crate) fn micro_batch(
    config: &Config,
    splits: impl IntoIterator<Item = (usize, usize)>,
) -> Axis {
    let written = (config.batch.batch_size, config.batch.accumulation);
    let choice = |(micro, accumulation)| split(micro, accumulation);
    Axis::of(RemedyKind::MicroBatch, written, splits, choice)
}

/// Everything but the micro batch and the recomputed blocks: the changes that weigh most first,
/// then what the model itself has.
pub(crate) fn axes(request: &Request<'_>) -> Vec<Axis> {
    let config = request.config;
    let declared = REMEDIES.iter().rev();
    let mut axes: Vec<Axis> = declared
        .filter_map(|declared| axis(declared.kind, request))
        .collect();
    axes.extend(config.model.family().tunables.iter().filter_map(|tunable| {
        let written = config.model.get(tunable.key)?.whole()?;
        Some(tuned(tunable, config, written))
    }));
    axes.into_iter().map(|axis| axis.settle(request)).collect()
}

/// The axis of a change; none where the engine or the machine has none.
fn axis(kind: RemedyKind, request: &Request<'_>) -> Option<Axis> {
    let config = request.config;
    let permissions = &request.permissions;
    let is_cuda = request.machine.target == Target::Cuda;
    Some(match kind {
        RemedyKind::SequenceLength => {
            sequence_length(config.batch.seq_len).changing(permissions.sequence_length)
        }
        RemedyKind::EightBitStates => states(config).changing(permissions.states),
        RemedyKind::Bf16 => precision(request),
        RemedyKind::LossChunk if config.model.has_logits() => {
            loss_chunk(config, request.machine.target)
        }
        RemedyKind::Shard if !config.batch.world.is_alone() => shard(config),
        RemedyKind::UpdateInBackward if config.batch.world.is_alone() => {
            switch(kind, config.batch.update_in_backward, |config, on| {
                config.batch.update_in_backward = on;
            })
        }
        RemedyKind::Offload if is_cuda => switch(kind, config.batch.offload, |config, on| {
            config.batch.offload = on;
        }),
        RemedyKind::OffloadFrozen if is_cuda && config.tuning.lora.is_some() => {
            switch(kind, config.batch.offload_frozen, |config, on| {
                config.batch.offload_frozen = on;
            })
        }
        _ => return None,
    })
}

/// What each rank keeps only a part of.
fn shard(config: &Config) -> Axis {
    let kind = RemedyKind::Shard;
    let written = config.batch.world.shard;
    Axis::of(kind, written, ShardedPart::ALL, |part| {
        let values = vec![Some(part.word().to_owned())];
        Choice::of(kind, values, move |config| config.batch.world.shard = part)
    })
}

/// A setting that is on or off.
fn switch(kind: RemedyKind, written: bool, set: fn(&mut Config, bool)) -> Axis {
    Axis::of(kind, written, [false, true], |value| {
        let values = vec![Some(value.to_string())];
        Choice::of(kind, values, move |config| set(config, value))
    })
}

/// Eight-bit states are close to those of 32 bits, not the same, so they are a last resort
/// unless the user allows them.
fn states(config: &Config) -> Axis {
    let kind = RemedyKind::EightBitStates;
    let choice = |format: StateFormat| {
        let values = vec![Some(format.name().to_owned())];
        Choice::of(kind, values, move |config| config.batch.states = format)
    };
    let written = config.batch.states;
    let others = [StateFormat::Fp32, StateFormat::EightBit];
    let others = others.into_iter().filter(|&format| format != written);
    let formats = [written].into_iter().chain(others);
    Axis::of(kind, written, formats, choice)
}

/// The type of the computation: what the user stated or allows, else what the processor runs best.
fn precision(request: &Request<'_>) -> Axis {
    let kind = RemedyKind::Bf16;
    let stated = request.fixed.contains(&PRECISION);
    let written = request.config.batch.precision;
    let candidates = match &request.permissions.precisions {
        _ if stated => vec![written],
        Some(allowed) => allowed.clone(),
        None => vec![best_precision(request.card)],
    };
    let choice = |precision: Precision| {
        let values = vec![Some(precision.name().to_owned())];
        Choice::of(kind, values, move |config| {
            config.batch.precision = precision;
        })
    };
    Axis::of(kind, written, candidates, choice)
}

/// bf16 has the range of fp32 and needs no loss scale, so it goes before fp16.
pub fn best_precision(card: &Card) -> Precision {
    match card.target {
        Target::Cpu => Precision::Fp32,
        Target::Cuda if card.bf16_flops.is_some() => Precision::Bf16,
        Target::Cuda => Precision::Fp16,
    }
}

/// Rows of logits at once: what the configuration has, the planner's own choice, and fewer, at
/// the price of reading and writing the vocabulary's gradient more often. A card needs a thousand
/// rows to be filled, a CPU some dozens; still fewer are a last resort.
fn loss_chunk(config: &Config, target: Target) -> Axis {
    let fewer = match target {
        Target::Cpu => 64,
        Target::Cuda => 1024,
    };
    let mut rows = vec![
        config.batch.loss_chunk,
        None,
        Some(fewer),
        Some(FEWEST_ROWS),
    ];
    rows.dedup();
    let kind = RemedyKind::LossChunk;
    let choice = |rows: Option<usize>| {
        let values = vec![rows.map(|rows| rows.to_string())];
        Choice::of(kind, values, move |config| {
            config.batch.loss_chunk = rows;
        })
    };
    let num_free = rows.len() - 1;
    Axis {
        num_free,
        ..Axis::of(kind, config.batch.loss_chunk, rows, choice)
    }
}

/// Halves of what was asked for, the longest first, down to what is still a sequence.
fn sequence_length(asked: usize) -> Axis {
    const SHORTEST: usize = 64;
    let halves = std::iter::successors(Some(asked), |length| {
        Some(length / 2).filter(|&half| half >= SHORTEST)
    });
    let choice = |length: usize| {
        let values = vec![Some(length.to_string())];
        Choice::of(RemedyKind::SequenceLength, values, move |config| {
            config.batch.seq_len = length;
        })
    };
    Axis::of(RemedyKind::SequenceLength, asked, halves, choice)
}

fn tuned(tunable: &'static Tunable, config: &Config, written: u64) -> Axis {
    let others = tunable.candidates.iter().copied();
    // Beyond the sequence a value means the same as the sequence's length.
    let useful = |value: &u64| *value != written && *value <= config.batch.seq_len as u64;
    let values = std::iter::once(written).chain(others.filter(useful));
    let keys = std::slice::from_ref(&tunable.key);
    Axis::new(keys, written, values, |value| {
        let values = vec![(tunable.key, Some(value.to_string()))];
        Choice::new((tunable.describe)(value), values, move |config| {
            config.model.set(tunable.key, Number::Whole(value));
        })
    })
}
