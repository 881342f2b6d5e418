//! What a run in PyTorch takes, as one set of figures for tables and JSON.

use std::time::Instant;

use cinch_torch::TorchError;
use cinch_torch::eager::checkpoint::Checkpointing;
use cinch_torch::eager::optimizer::{Execution, Optimizer};
use cinch_torch::eager::training::{Precision, ReadingPoint};
use cinch_torch::model::mask::Attention;
use cinch_torch::model::{Prediction, Workload};
use cinch_torch::overhead::Overhead;
use serde_json::{Value, json};

use crate::memory::Budget;

/// Where a replay ends: more than any card has, and room for what several share.
const MOST_BYTES: u64 = 16 << 40;

/// A prediction with what the card loses besides.
pub struct Estimate {
    pub prediction: Prediction,
    pub overhead: Overhead,
    pub device_bytes: u64,
    /// The figure to plan with.
    pub safe_bytes: u64,
    pub milliseconds: f64,
}

impl Estimate {
    pub fn new(workload: &Workload, overhead: Overhead) -> Result<Self, TorchError> {
        let start = Instant::now();
        let limited = Workload {
            memory_limit: workload.memory_limit.or(Some(MOST_BYTES)),
            ..workload.clone()
        };
        let prediction = limited.predict()?;
        if workload.memory_limit.is_none()
            && let Some(asked) = prediction.out_of_memory
        {
            return Err(TorchError::TooLarge {
                what: "what it holds, in bytes,",
                value: prediction.peak_reserved.saturating_add(asked),
                most: MOST_BYTES,
            });
        }
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Ok(Self {
            device_bytes: overhead.device_bytes(&prediction),
            safe_bytes: overhead.safe_bytes(&prediction),
            prediction,
            overhead,
            milliseconds,
        })
    }

    /// What the allocator holds beyond the tensors when it holds the most.
    pub fn fragmentation_bytes(&self) -> u64 {
        let prediction = &self.prediction;
        prediction
            .peak_reserved
            .saturating_sub(prediction.peak_allocated)
    }

    /// Context, kernels and libraries.
    pub fn outside_bytes(&self) -> u64 {
        self.overhead.bytes(self.prediction.libraries)
    }

    /// Where the peak is first reached.
    pub fn peak_phase(&self) -> ReadingPoint {
        let peak = self.prediction.peak_allocated;
        let mut readings = self.prediction.readings.iter();
        readings
            .find(|reading| reading.peak_allocated == peak)
            .map_or(ReadingPoint::Model, |reading| reading.phase)
    }

    pub fn memory_json(&self) -> Value {
        json!({
            "allocated_bytes": self.prediction.peak_allocated,
            "reserved_bytes": self.prediction.peak_reserved,
            "fragmentation_bytes": self.fragmentation_bytes(),
            "outside_allocator_bytes": self.outside_bytes(),
            "outside_allocator_measured": self.overhead.measured,
            "device_bytes": self.device_bytes,
            "safe_bytes": self.safe_bytes,
        })
    }
}

/// What a card loses before any tensor: of the budget's card where it was named or found, else
/// of a card that nothing is known of.
pub fn overhead(budget: Option<&Budget>) -> Overhead {
    let card = budget.and_then(Budget::known_card);
    let overhead = Overhead::of(card.and_then(|card| card.generation));
    match budget.is_some_and(|budget| budget.margin_is_stated) {
        true => overhead.without_margin(),
        false => overhead,
    }
}

/// A phase in words.
pub fn phase_text(phase: ReadingPoint, accumulation: u32) -> String {
    match phase {
        ReadingPoint::Model => "while the model is built".to_owned(),
        ReadingPoint::Forward(step) => format!("in the forward of step {}", step + 1),
        ReadingPoint::Backward(step) => format!("in the backward of step {}", step + 1),
        ReadingPoint::Clip(step) if accumulation > 1 => {
            format!(
                "in a later micro batch of step {}, or while clipping",
                step + 1
            )
        }
        ReadingPoint::Clip(step) => format!("while gradients are clipped in step {}", step + 1),
        ReadingPoint::Optimizer(step) => format!("in the optimizer of step {}", step + 1),
        ReadingPoint::End(step) => format!("at the end of step {}", step + 1),
    }
}

/// As the flag takes it.
pub fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Float32 => "fp32",
        Precision::AutocastBFloat16 => "amp_bf16",
        Precision::AutocastFloat16 => "amp_fp16",
        Precision::BFloat16 => "bf16",
        Precision::BFloat16UnderAutocast => "bf16_amp",
        Precision::Float16UnderAutocast => "fp16_amp",
        Precision::Float16 => "fp16",
    }
}

/// As the flag takes it.
pub fn optimizer_name(optimizer: Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Adam(Execution::Foreach) => "adamw",
        Optimizer::Adam(Execution::Fused) => "adamw_fused",
        Optimizer::Adam(Execution::Loop) => "adamw_loop",
        Optimizer::Adam8Bit => "adamw_8bit",
        Optimizer::PagedAdam { eight_bit: true } => "paged_adamw_8bit",
        Optimizer::PagedAdam { eight_bit: false } => "paged_adamw_32bit",
        Optimizer::Lion8Bit => "lion_8bit",
        Optimizer::Adafactor => "adafactor",
        Optimizer::Sgd {
            momentum: false, ..
        } => "sgd",
        Optimizer::Sgd { momentum: true, .. } => "sgdm",
    }
}

/// As the flag takes it; none of models that have no such choice.
fn attention_name(workload: &Workload) -> Option<&'static str> {
    if !workload.architecture.family().chooses_attention {
        return None;
    }
    Some(match workload.attention {
        Attention::Sdpa => "sdpa",
        Attention::Eager => "eager",
    })
}

/// As a setting has it.
pub fn checkpointing_name(checkpoints: Checkpointing) -> &'static str {
    match checkpoints.is_on() {
        true => "full",
        false => "none",
    }
}

pub fn settings_json(workload: &Workload, alloc_conf: &str) -> Value {
    let recipe = &workload.recipe;
    json!({
        "batch_size": workload.batch,
        "accumulation": recipe.accumulation,
        "effective_batch": workload.batch * u64::from(recipe.accumulation),
        "seq_len": workload.length,
        "precision": precision_name(recipe.precision),
        "optimizer": optimizer_name(recipe.optimizer),
        "checkpointing": checkpointing_name(workload.checkpoints),
        "attention": attention_name(workload),
        "lora_rank": workload.lora.as_ref().map(|lora| lora.rank),
        "liger": workload.liger_in_effect().is_on(),
        "alloc_conf": alloc_conf,
    })
}

/// The settings in a line.
pub fn settings_text(workload: &Workload, alloc_conf: &str) -> String {
    let recipe = &workload.recipe;
    let mut text = format!(
        "batch {} × {} = {} sequences of {} tokens, {}, {}",
        workload.batch,
        recipe.accumulation,
        workload.batch * u64::from(recipe.accumulation),
        workload.length,
        precision_name(recipe.precision),
        optimizer_name(recipe.optimizer),
    );
    if let Some(attention) = attention_name(workload) {
        text += &format!(", {attention} attention");
    }
    text += match workload.checkpoints.is_on() {
        true => ", checkpointing",
        false => ", no checkpointing",
    };
    if workload.liger_in_effect().is_on() {
        text += ", Liger's kernels";
    }
    if let Some(lora) = &workload.lora {
        text += &format!(", LoRA of rank {}", lora.rank);
    }
    if !alloc_conf.is_empty() {
        text += &format!(", {alloc_conf}");
    }
    text
}
