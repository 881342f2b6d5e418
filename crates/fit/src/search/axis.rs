//! What a search may choose, declared: each axis names the settings it writes, its choices, and
//! whether a choice changes what is learned.
//!
//! The search itself knows none of them. A model adds its own by declaring them in its
//! description (`cinch_architecture::Family`).

use std::fmt;
use std::sync::Arc;

use cinch_architecture::{Number, Tunable};
use cinch_config::{Config, Precision, StateFormat};
use cinch_device::Card;
use cinch_graph::Target;
use serde::Serialize;

use super::request::{Permission, Request};
use crate::budget::FEWEST_ROWS;

pub(crate) const MICRO_BATCH: &str = "vram.batch_size";
pub(crate) const ACCUMULATION: &str = "vram.gradient_accumulation_steps";
pub(crate) const CHECKPOINTING: &str = "vram.checkpointing";
const LOSS_CHUNK: &str = "vram.loss_chunk";
const STATES: &str = "vram.optimizer_states";
const UPDATE_IN_BACKWARD: &str = "vram.update_in_backward";
const OFFLOAD: &str = "vram.use_cpu_offload";
const PRECISION: &str = "vram.precision";
const SEQUENCE: &str = "vram.max_seq_len";

/// Whether choosing differently trains the same model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The same gradient, up to the order of additions.
    KeepsResult,
    ChangesResult,
}

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
    /// An axis over values, each told as a choice by `choice`.
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
        self.effect = Effect::ChangesResult;
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
    Choice::new(
        format!("micro batch {micro} × {accumulation}"),
        vec![
            (MICRO_BATCH, Some(micro.to_string())),
            (ACCUMULATION, Some(accumulation.to_string())),
        ],
        move |config| {
            config.batch.batch_size = micro;
            config.batch.accumulation = accumulation;
        },
    )
}

/// The ways to cut an effective batch, given as (micro batch, accumulation).
pub(crate) fn micro_batch(
    config: &Config,
    splits: impl IntoIterator<Item = (usize, usize)>,
) -> Axis {
    let written = (config.batch.batch_size, config.batch.accumulation);
    let choice = |(micro, accumulation)| split(micro, accumulation);
    Axis::new(&[MICRO_BATCH, ACCUMULATION], written, splits, choice)
}

/// Everything but the micro batch and the recomputed blocks.
pub(crate) fn axes(request: &Request<'_>) -> Vec<Axis> {
    let config = request.config;
    let mut axes = vec![
        sequence_length(config.batch.seq_len).changing(request.permissions.sequence_length),
        states(config).changing(request.permissions.states),
        precision(request),
        loss_chunk(config, request.machine.target),
        update_in_backward(config),
    ];
    if request.machine.target == Target::Cuda {
        axes.push(offload(config));
    }
    axes.extend(config.model.family().tunables.iter().filter_map(|tunable| {
        let written = config.model.get(tunable.key)?.whole()?;
        Some(tuned(tunable, config, written))
    }));
    axes.into_iter().map(|axis| axis.settle(request)).collect()
}

/// What a switch is called when it is on and when it is off.
fn switch(
    keys: &'static [&'static str],
    written: bool,
    [on, off]: [&'static str; 2],
    set: fn(&mut Config, bool),
) -> Axis {
    Axis::new(keys, written, [false, true], |value| {
        let values = vec![(keys[0], Some(value.to_string()))];
        let description = if value { on } else { off };
        Choice::new(description, values, move |config| set(config, value))
    })
}

fn update_in_backward(config: &Config) -> Axis {
    switch(
        &[UPDATE_IN_BACKWARD],
        config.batch.update_in_backward,
        ["update inside backward", "update after backward"],
        |config, on| config.batch.update_in_backward = on,
    )
}

fn offload(config: &Config) -> Axis {
    switch(
        &[OFFLOAD],
        config.batch.offload,
        [
            "optimizer states in host memory",
            "optimizer states on the card",
        ],
        |config, on| config.batch.offload = on,
    )
}

/// Eight-bit states are close to those of 32 bits, not the same, so they are a last resort
/// unless the user allows them.
fn states(config: &Config) -> Axis {
    let choice = |format: StateFormat| {
        Choice::new(
            format!("{} optimizer states", format.name()),
            vec![(STATES, Some(format.name().to_owned()))],
            move |config| config.batch.states = format,
        )
    };
    let written = config.batch.states;
    let mut formats = [StateFormat::Fp32, StateFormat::EightBit];
    formats.sort_by_key(|&format| format != written);
    Axis::new(&[STATES], written, formats, choice)
}

/// The type of the computation: what the user stated or allows, else what the processor runs best.
fn precision(request: &Request<'_>) -> Axis {
    let stated = request.fixed.contains(&PRECISION);
    let written = request.config.batch.precision;
    let candidates = match &request.permissions.precisions {
        _ if stated => vec![written],
        Some(allowed) => allowed.clone(),
        None => vec![best_precision(request.card)],
    };
    let choice = |precision: Precision| {
        Choice::new(
            precision.name(),
            vec![(PRECISION, Some(precision.name().to_owned()))],
            move |config| config.batch.precision = precision,
        )
    };
    Axis {
        effect: Effect::ChangesResult,
        ..Axis::new(&[PRECISION], written, candidates, choice)
    }
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
    let choice = |rows: Option<usize>| {
        let description = match rows {
            Some(rows) => format!("{rows} rows of logits at once"),
            None => "as many rows of logits as run well".to_owned(),
        };
        let values = vec![(LOSS_CHUNK, rows.map(|rows| rows.to_string()))];
        Choice::new(description, values, move |config| {
            config.batch.loss_chunk = rows;
        })
    };
    let num_free = rows.len() - 1;
    Axis {
        num_free,
        ..Axis::new(&[LOSS_CHUNK], config.batch.loss_chunk, rows, choice)
    }
}

/// Halves of what was asked for, the longest first, down to what is still a sequence.
fn sequence_length(asked: usize) -> Axis {
    const SHORTEST: usize = 64;
    let halves = std::iter::successors(Some(asked), |length| {
        Some(length / 2).filter(|&half| half >= SHORTEST)
    });
    let choice = |length: usize| {
        Choice::new(
            format!("sequences of {length} tokens"),
            vec![(SEQUENCE, Some(length.to_string()))],
            move |config| config.batch.seq_len = length,
        )
    };
    Axis::new(&[SEQUENCE], asked, halves, choice)
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
