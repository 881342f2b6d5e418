//! What a search answers, as data with stable names: `cinch fit --json`.

use std::collections::BTreeMap;

use cinch_config::remedy::{Effect, RemedyKind};
use cinch_config::{Bytes, Config};
use cinch_model::compute_type;
use cinch_plan::Breakdown;
use cinch_step::{CheckpointingReport, StepPlan};
use serde::Serialize;

use super::request::Request;

/// Everything there is to say about a configuration on a card.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitReport {
    pub model: String,
    pub size: Option<String>,
    pub parameters: u64,
    pub card: String,
    pub memory_bytes: u64,
    pub budget_bytes: u64,
    /// Whether a measured step stands behind the predicted times.
    pub is_calibrated: bool,
    pub recommended: FitOutcome,
    /// Every setting that the search decided, as the user would write it.
    pub values: Vec<SettingValue>,
    /// What differs from what the user wrote, and why.
    pub changes: Vec<SettingChange>,
    pub ladder: Vec<Rung>,
    /// Memory against speed: each takes more than the one before and is faster. The
    /// recommendation is one of them; what is above the budget still fits the card.
    pub front: Vec<FitOutcome>,
    pub techniques: Vec<Technique>,
    /// What had to be given up, in sentences.
    pub notes: Vec<String>,
    /// How many points were looked at, and how many of them planned in full.
    pub looked_at: usize,
    pub planned: usize,
}

/// Settings with what they take and give.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitOutcome {
    pub settings: FitSettings,
    /// Arena and overhead.
    pub total_bytes: u64,
    /// Optimizer states in host memory.
    pub host_bytes: u64,
    pub breakdown: Breakdown,
    pub share_of_card: f64,
    pub share_of_budget: f64,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    /// Of the card's rate of matrix products, counting no recomputation.
    pub matrix_share: f64,
    /// What the network takes, and how much of it a step waits for.
    pub network_seconds: f64,
    pub network_exposed_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitSettings {
    pub batch_size: usize,
    pub accumulation: usize,
    pub effective_batch: usize,
    pub seq_len: usize,
    pub precision: &'static str,
    pub checkpointing: CheckpointingReport,
    /// Rows of logits at once; none where the planner chooses.
    pub loss_chunk: Option<usize>,
    pub optimizer_states: &'static str,
    pub update_in_backward: bool,
    pub offload: bool,
    pub offload_frozen: bool,
    /// Recomputed blocks with activations in host memory.
    pub offload_activations: usize,
    /// Those that train together, on how many machines, and what each keeps only a part of.
    pub ranks: usize,
    pub nodes: usize,
    pub shard: &'static str,
    /// What only this model has, by key.
    pub model: BTreeMap<&'static str, u64>,
}

/// One setting, as the user would write it; none for what is left to the planner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SettingValue {
    pub key: &'static str,
    pub value: Option<String>,
}

/// A setting, or some that go together, that the recommendation has otherwise than the user.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SettingChange {
    pub from: String,
    pub to: String,
    pub values: Vec<SettingValue>,
    pub effect: Effect,
    pub reason: String,
}

/// A share of the card, and the best that can be had in it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rung {
    pub name: &'static str,
    pub share: f64,
    pub budget_bytes: u64,
    /// None where nothing fits.
    pub outcome: Option<FitOutcome>,
}

/// One change from the recommended settings, and what it alone does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Technique {
    pub change: String,
    pub values: Vec<SettingValue>,
    pub effect: Effect,
    /// What it adds to the peak; less than zero where it saves.
    pub bytes: i64,
    pub host_bytes: i64,
    /// Change of tokens per second, as a share: −0.06 is 6 % slower.
    pub speed: f64,
    pub fits: bool,
}

impl Technique {
    /// "recompute 3 of 8 blocks: −2.10 GiB, −6.0 %"; what it takes of the host is told with it.
    pub fn text(&self) -> String {
        let sign = |negative| if negative { "−" } else { "+" };
        let bytes = Bytes::new(self.bytes.unsigned_abs());
        let percent = 100.0 * self.speed;
        let host = match u64::try_from(self.host_bytes) {
            Ok(more) if more > 0 => format!(" and {} of host memory", Bytes::new(more)),
            _ => String::new(),
        };
        format!(
            "{}: {}{bytes}{host}, {}{:.1} %",
            self.change,
            sign(self.bytes < 0),
            sign(percent < 0.0),
            percent.abs()
        )
    }
}

/// "recompute 3 of 8 blocks".
pub fn recomputation_text(recomputed: usize, blocks: usize) -> String {
    let values = [recomputed, blocks].map(|count| count.to_string());
    RemedyKind::Recomputation.said(&values.each_ref().map(String::as_str))
}

impl FitSettings {
    pub fn new(config: &Config, recomputed: usize) -> Self {
        let batch = &config.batch;
        let model = config.model.family().tunables.iter();
        let model = model.filter_map(|t| Some((t.key, config.model.get(t.key)?.whole()?)));
        Self {
            batch_size: batch.batch_size,
            accumulation: batch.accumulation,
            effective_batch: batch.effective_batch(),
            seq_len: batch.seq_len,
            precision: batch.precision.name(),
            checkpointing: CheckpointingReport {
                blocks: recomputed,
                of: config.model.num_blocks(),
            },
            loss_chunk: batch.loss_chunk,
            optimizer_states: batch.states.name(),
            update_in_backward: batch.update_in_backward,
            offload: batch.offload,
            offload_frozen: batch.offload_frozen,
            offload_activations: batch.offload_activations.min(recomputed),
            ranks: batch.world.ranks,
            nodes: batch.world.nodes,
            shard: batch.world.shard.name(),
            model: model.collect(),
        }
    }

    /// One line: "micro batch 4 × 4, 1024 tokens, bf16, recompute 3 of 8 blocks".
    pub fn text(&self) -> String {
        let mut parts = vec![
            format!("micro batch {} × {}", self.batch_size, self.accumulation),
            format!("{} tokens", self.seq_len),
            self.precision.to_owned(),
            recomputation_text(self.checkpointing.blocks, self.checkpointing.of),
        ];
        parts.extend(self.loss_chunk.map(|rows| format!("{rows} rows of logits")));
        if self.optimizer_states != cinch_config::StateFormat::default().name() {
            parts.push(format!("{} states", self.optimizer_states));
        }
        if self.update_in_backward {
            parts.push("update inside backward".to_owned());
        }
        if self.offload {
            parts.push("states in host memory".to_owned());
        }
        if self.offload_frozen {
            parts.push("frozen weights in host memory".to_owned());
        }
        if self.offload_activations > 0 {
            let (stored, blocks) = (self.offload_activations, self.checkpointing.blocks);
            parts.push(format!(
                "activations of {stored} of these {blocks} blocks in host memory"
            ));
        }
        if self.ranks > 1 {
            parts.push(match self.shard {
                "none" => format!("{} ranks with everything on each", self.ranks),
                part => format!("{} ranks, {part} cut", self.ranks),
            });
        }
        parts.join(", ")
    }
}

impl FitOutcome {
    /// A plan, predicted for the card of a request.
    pub fn new(step: &StepPlan, request: &Request<'_>) -> Self {
        let (config, card) = (&step.config, request.card);
        let precision = config.batch.precision;
        let kind = config.model.name();
        let factor = request.calibration.factor(&card.name, kind, precision);
        let predicted = step.predict(card, request.tf32);
        let seconds = predicted.seconds * factor;
        let tokens = config.batch.effective_batch() as f64 * config.batch.seq_len as f64;
        let rate = card.matrix_flops(compute_type(precision), request.tf32);
        let total = step.total_bytes();
        let share = |of: u64| total as f64 / of.max(1) as f64;
        Self {
            settings: FitSettings::new(config, step.training.num_recomputed),
            total_bytes: total,
            host_bytes: step.plan.host_bytes,
            breakdown: step.breakdown(),
            share_of_card: share(request.memory_bytes),
            share_of_budget: share(request.budget_bytes),
            step_seconds: seconds,
            tokens_per_second: tokens / seconds,
            matrix_share: step.useful_flops() as f64 / seconds / rate,
            network_seconds: predicted.network.seconds * factor,
            network_exposed_seconds: predicted.network.exposed() * factor,
        }
    }
}
