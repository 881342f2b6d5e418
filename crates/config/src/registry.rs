//! The settings there are, each declared once.
//!
//! Reading a file, reporting an unknown key, listing where values came from and
//! mapping flags all follow from this table; a new setting is one entry here
//! and one field of the typed config.
//!
//! The upper ends of ranges are far beyond any model that fits a machine. They
//! exist so that a slip of the keyboard is told here and not as an overflow.

use crate::config::{ModelKind, Precision, Schedule, StateFormat};
use crate::setting::{Meaning, Setting, same, switch};
use crate::value::{Interval, Kind};

const fn count(max: u64) -> Kind {
    Kind::Unsigned { min: 1, max }
}

const fn count_from_zero(max: u64) -> Kind {
    Kind::Unsigned { min: 0, max }
}

const MAMBA: &[ModelKind] = &[ModelKind::Mamba];
const GPT2: &[ModelKind] = &[ModelKind::Gpt2];
const MAX_TOKENS: u64 = 1 << 24;
const MAX_STEPS: u64 = 1 << 48;

/// Every setting, in the order in which they are listed.
pub static SETTINGS: &[Setting] = &[
    Setting::new(
        "model.type",
        Kind::Choice(&ModelKind::NAMES),
        "Architecture to train",
    )
    .default("mamba")
    .aliases(&[same("model.model_type")]),
    Setting::new(
        "model.size",
        Kind::Text,
        "A named size, which supplies the shape",
    )
    .default("small")
    .aliases(&[same("model.model_size")]),
    Setting::new(
        "model.d_model",
        count(1 << 16),
        "Width of the residual stream",
    )
    .aliases(&[same("model.n_embd")]),
    Setting::new("model.n_layers", count(1 << 12), "Number of blocks")
        .aliases(&[same("model.n_layer")]),
    Setting::new(
        "model.n_heads",
        count(1 << 10),
        "Attention heads; they divide d_model",
    )
    .only(GPT2)
    .aliases(&[same("model.n_head")]),
    Setting::new(
        "model.d_state",
        count(1 << 10),
        "State kept per channel of the scan",
    )
    .only(MAMBA),
    Setting::new(
        "model.expand_factor",
        count(16),
        "Inner width as a multiple of d_model",
    )
    .only(MAMBA),
    Setting::new(
        "model.d_conv",
        count_from_zero(64),
        "Width of the causal convolution; 0 for none",
    )
    .default("0")
    .only(MAMBA),
    Setting::new(
        "model.scan_chunk",
        count(1 << 16),
        "Timesteps between kept states of the scan",
    )
    .default("64")
    .only(MAMBA),
    Setting::new(
        "model.dropout",
        Kind::Float(Interval::BELOW_ONE),
        "Dropout rate",
    ),
    Setting::new(
        "model.max_seq_len",
        count(MAX_TOKENS),
        "Positions the model has",
    )
    .aliases(&[same("model.n_positions")]),
    Setting::new(
        "model.vocab_size",
        Kind::Unsigned {
            min: 2,
            max: MAX_TOKENS,
        },
        "Tokens in the vocabulary",
    ),
    Setting::new(
        "model.layer_norm_eps",
        Kind::Float(Interval::ABOVE_ZERO),
        "Added to the variance in LayerNorm",
    )
    .default("1e-5")
    .only(GPT2)
    .aliases(&[same("model.layer_norm_epsilon")]),
    Setting::new(
        "vram.budget",
        Kind::Size,
        "Memory the plan must stay within",
    ),
    Setting::new(
        "vram.batch_size",
        count(1 << 20),
        "Sequences in one pass (micro batch)",
    )
    .aliases(&[same("vram.micro_batch_size")]),
    Setting::new(
        "vram.gradient_accumulation_steps",
        count(1 << 20),
        "Passes per optimizer step",
    )
    .aliases(&[same("vram.accumulation")]),
    Setting::new(
        "vram.max_seq_len",
        count(MAX_TOKENS),
        "Tokens of a training sequence",
    )
    .aliases(&[same("vram.seq_len")]),
    Setting::new(
        "vram.precision",
        Kind::Choice(&Precision::NAMES),
        "Type of the computation",
    )
    .default("fp32")
    .aliases(&[switch("vram.use_fp16", "fp16", "fp32")]),
    Setting::new(
        "vram.checkpointing",
        Kind::ChoiceOrCount(&["auto", "none", "full"]),
        "Blocks whose activations are recomputed in backward",
    )
    .default("auto")
    .aliases(&[switch("vram.use_gradient_checkpointing", "full", "none")]),
    Setting::new(
        "vram.use_cpu_offload",
        Kind::Bool,
        "Keep optimizer state in host memory",
    )
    .default("false")
    .aliases(&[same("vram.offload")]),
    Setting::new(
        "vram.optimizer_states",
        Kind::Choice(&StateFormat::NAMES),
        "How the optimizer's two moments are kept",
    )
    .default("fp32"),
    Setting::new(
        "vram.update_in_backward",
        Kind::Bool,
        "Update each weight as soon as its gradient is complete",
    )
    .default("false"),
    Setting::new(
        "vram.loss_chunk",
        count(MAX_TOKENS),
        "Rows of logits that exist at once",
    ),
    Setting::new(
        "training.learning_rate",
        Kind::Float(Interval::ABOVE_ZERO),
        "Peak learning rate",
    )
    .default("3e-4")
    .aliases(&[same("training.lr")]),
    Setting::new(
        "training.min_learning_rate",
        Kind::Float(Interval::FROM_ZERO),
        "Where the schedule ends",
    )
    .default("0"),
    Setting::new(
        "training.schedule",
        Kind::Choice(&Schedule::NAMES),
        "Course of the learning rate after warm-up",
    )
    .default("linear")
    .aliases(&[same("training.lr_scheduler")]),
    Setting::new(
        "training.max_steps",
        count(MAX_STEPS),
        "Optimizer steps of the run",
    )
    .default("100000"),
    Setting::new(
        "training.warmup_steps",
        count_from_zero(MAX_STEPS),
        "Steps of linear warm-up",
    )
    .default("2000"),
    Setting::new(
        "training.weight_decay",
        Kind::Float(Interval::FROM_ZERO),
        "AdamW weight decay",
    )
    .default("0.1"),
    Setting::new(
        "training.adam_beta1",
        Kind::Float(Interval::BELOW_ONE),
        "Decay of the first moment",
    )
    .default("0.9")
    .aliases(&[same("training.beta1")]),
    Setting::new(
        "training.adam_beta2",
        Kind::Float(Interval::BELOW_ONE),
        "Decay of the second moment",
    )
    .default("0.95")
    .aliases(&[same("training.beta2")]),
    Setting::new(
        "training.adam_epsilon",
        Kind::Float(Interval::ABOVE_ZERO),
        "Added to Adam's divisor",
    )
    .default("1e-8")
    .aliases(&[same("training.eps")]),
    Setting::new(
        "training.max_grad_norm",
        Kind::Float(Interval::FROM_ZERO),
        "Gradients are scaled down to this norm; 0 for no clipping",
    )
    .default("1.0")
    .aliases(&[same("training.grad_clip")]),
    Setting::new(
        "training.label_smoothing",
        Kind::Float(Interval::BELOW_ONE),
        "Probability spread over the other tokens",
    )
    .default("0"),
    Setting::new(
        "training.eval_interval",
        count_from_zero(MAX_STEPS),
        "Steps between evaluations; 0 for none",
    )
    .default("1000"),
    Setting::new(
        "training.eval_batches",
        count(1 << 20),
        "Micro batches read per evaluation",
    )
    .default("20"),
    Setting::new(
        "training.save_interval",
        count_from_zero(MAX_STEPS),
        "Steps between checkpoints; 0 for only the last",
    )
    .default("5000"),
    Setting::new(
        "training.save_total_limit",
        count_from_zero(1 << 20),
        "Checkpoints kept; 0 keeps all",
    )
    .default("3"),
    Setting::new(
        "training.logging_steps",
        count(MAX_STEPS),
        "Steps between lines of the log",
    )
    .default("10"),
    Setting::new(
        "training.seed",
        count_from_zero(u64::MAX),
        "Seed of every random number",
    )
    .default("42"),
    Setting::new(
        "data.source",
        Kind::Path,
        "Folder or file to train on; without it, the built-in text",
    )
    .aliases(&[same("data.data_dir")]),
    Setting::new(
        "data.text_column",
        Kind::Text,
        "Field that holds the text, in files with fields",
    )
    .default("text"),
    Setting::new(
        "data.tokenizer",
        Kind::Text,
        "gpt2, bytes, or the path of a tokenizer",
    )
    .default("gpt2"),
    Setting::new(
        "data.val_split",
        Kind::Float(Interval::BELOW_ONE),
        "Share of the data kept for evaluation",
    )
    .default("0.05"),
    Setting::new("data.cache_dir", Kind::Path, "Where tokenised data is kept"),
    Setting::new(
        "output.output_dir",
        Kind::Path,
        "Folder of the run: log and checkpoints",
    )
    .aliases(&[same("output.dir")]),
];

/// Sections that mark a file as a config of another system, and that system's
/// name. A file with one of them is reported as a whole, not key by key.
pub(crate) const FOREIGN_SECTIONS: [(&str, &str); 3] =
    [("gsa", "gsa"), ("lora", "qwen2"), ("data_loader", "naics")];

/// The setting a key or alias names.
pub fn find(key: &str) -> Option<(&'static Setting, Meaning)> {
    SETTINGS.iter().find_map(|setting| {
        if setting.key == key {
            return Some((setting, Meaning::Same));
        }
        setting
            .aliases
            .iter()
            .find(|alias| alias.key == key)
            .map(|alias| (setting, alias.meaning))
    })
}

/// Every key and alias.
pub fn keys() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().flat_map(|setting| {
        std::iter::once(setting.key).chain(setting.aliases.iter().map(|alias| alias.key))
    })
}

/// The section names, in listing order.
pub fn sections() -> Vec<&'static str> {
    let mut sections: Vec<&'static str> = SETTINGS.iter().map(Setting::section).collect();
    sections.dedup();
    sections
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn keys_are_unique_and_dotted() {
        let mut seen = BTreeSet::new();
        for key in keys() {
            assert!(seen.insert(key), "{key} is declared twice");
            assert_eq!(key.split('.').count(), 2, "{key}");
        }
    }

    #[test]
    fn variables_of_two_keys_never_collide() {
        let names: BTreeSet<String> = keys().map(|key| key.replace('.', "_")).collect();
        assert_eq!(names.len(), keys().count());
    }

    #[test]
    fn defaults_and_switches_pass_their_own_type() {
        for setting in SETTINGS {
            if let Some(default) = setting.default {
                assert!(setting.kind.parse(default).is_ok(), "{}", setting.key);
            }
            for alias in setting.aliases {
                if let Meaning::Switch { on, off } = alias.meaning {
                    assert!(setting.kind.parse(on).is_ok(), "{}", alias.key);
                    assert!(setting.kind.parse(off).is_ok(), "{}", alias.key);
                }
            }
        }
    }

    #[test]
    fn sections_stand_together() {
        assert_eq!(sections(), ["model", "vram", "training", "data", "output"]);
    }
}
