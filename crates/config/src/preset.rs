//! Named sets of values: the demo, the VRAM settings and the training presets.
//!
//! A preset is only a list of (key, value). It fills the layer between defaults
//! and files, so whatever the user states outweighs it.

use crate::ConfigError;
use crate::{Bytes, Checkpointing};
use cinch_architecture::nearest_name;

/// Any preset that can be applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Preset {
    /// A model that learns something visible within a minute on a laptop.
    Demo,
    Vram(&'static VramPreset),
    Training(&'static TrainingPreset),
}

/// What the memory guide recommends for a card of a given size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VramPreset {
    pub name: &'static str,
    pub memory: Bytes,
    pub batch_size: usize,
    pub accumulation: usize,
    pub seq_len: usize,
    pub checkpointing: Checkpointing,
    pub offload: bool,
    /// The model size it is made for, where it is made for one.
    pub size: Option<&'static str>,
}

impl VramPreset {
    const fn new(
        name: &'static str,
        gib: u64,
        batch_size: usize,
        accumulation: usize,
        seq_len: usize,
    ) -> Self {
        VramPreset {
            name,
            memory: Bytes::from_gib(gib),
            batch_size,
            accumulation,
            seq_len,
            // Below 24 GB the guide trades compute for memory.
            checkpointing: if gib < 24 {
                Checkpointing::Full
            } else {
                Checkpointing::None
            },
            offload: false,
            size: None,
        }
    }
}

/// From the smallest card to the largest.
pub static VRAM_PRESETS: &[VramPreset] = &[
    VramPreset::new("8gb", 8, 1, 16, 256),
    VramPreset::new("12gb", 12, 2, 8, 512),
    VramPreset::new("16gb", 16, 2, 8, 512),
    VramPreset {
        offload: true,
        size: Some("medium"),
        ..VramPreset::new("16gb-medium", 16, 1, 16, 256)
    },
    VramPreset::new("24gb", 24, 4, 4, 1024),
    VramPreset::new("32gb", 32, 8, 2, 1024),
    VramPreset::new("48gb", 48, 12, 2, 2048),
];

/// How long and how fast to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingPreset {
    pub name: &'static str,
    pub learning_rate: f64,
    pub max_steps: u64,
    pub warmup_steps: u64,
    pub eval_interval: u64,
    pub save_interval: u64,
}

pub static TRAINING_PRESETS: &[TrainingPreset] = &[
    TrainingPreset {
        name: "default",
        learning_rate: 3e-4,
        max_steps: 100_000,
        warmup_steps: 2000,
        eval_interval: 1000,
        save_interval: 5000,
    },
    TrainingPreset {
        name: "fast",
        learning_rate: 5e-4,
        max_steps: 50_000,
        warmup_steps: 1000,
        eval_interval: 500,
        save_interval: 2500,
    },
    TrainingPreset {
        name: "careful",
        learning_rate: 1e-4,
        max_steps: 200_000,
        warmup_steps: 5000,
        eval_interval: 2000,
        save_interval: 10_000,
    },
];

const DEMO: &[(&str, &str)] = &[
    ("model.type", "mamba"),
    ("model.size", "tiny"),
    ("model.dropout", "0.0"),
    ("data.tokenizer", "bytes"),
    ("vram.batch_size", "8"),
    ("vram.gradient_accumulation_steps", "1"),
    ("vram.max_seq_len", "256"),
    ("vram.precision", "fp32"),
    ("training.learning_rate", "3e-3"),
    ("training.warmup_steps", "20"),
    ("training.max_steps", "150"),
    ("training.eval_interval", "50"),
    ("training.save_interval", "50"),
    ("training.logging_steps", "10"),
];

impl Preset {
    /// Every preset, for a listing.
    pub fn all() -> impl Iterator<Item = Preset> {
        std::iter::once(Preset::Demo)
            .chain(VRAM_PRESETS.iter().map(Preset::Vram))
            .chain(TRAINING_PRESETS.iter().map(Preset::Training))
    }

    /// The VRAM preset of that name: `8gb`, `16gb-medium`.
    pub fn vram(name: &str) -> Result<Preset, ConfigError> {
        find("vram", VRAM_PRESETS, |preset| preset.name, name).map(Preset::Vram)
    }

    /// The training preset of that name: `default`, `fast`, `careful`.
    pub fn training(name: &str) -> Result<Preset, ConfigError> {
        find("training", TRAINING_PRESETS, |preset| preset.name, name).map(Preset::Training)
    }

    /// "vram 8gb": unique among all presets.
    pub fn title(&self) -> String {
        match self {
            Preset::Demo => "demo".to_owned(),
            Preset::Vram(preset) => format!("vram {}", preset.name),
            Preset::Training(preset) => format!("training {}", preset.name),
        }
    }

    /// What it sets, in the words a user would type.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        match self {
            Preset::Demo => DEMO
                .iter()
                .map(|&(key, value)| (key, value.to_owned()))
                .collect(),
            Preset::Vram(preset) => {
                let checkpointed = preset.checkpointing == Checkpointing::Full;
                let mut values = vec![
                    ("vram.batch_size", preset.batch_size.to_string()),
                    (
                        "vram.gradient_accumulation_steps",
                        preset.accumulation.to_string(),
                    ),
                    ("vram.max_seq_len", preset.seq_len.to_string()),
                    ("vram.use_fp16", "true".to_owned()),
                    ("vram.use_gradient_checkpointing", checkpointed.to_string()),
                    ("vram.use_cpu_offload", preset.offload.to_string()),
                ];
                values.extend(preset.size.map(|size| ("model.size", size.to_owned())));
                values
            }
            Preset::Training(preset) => vec![
                ("training.learning_rate", preset.learning_rate.to_string()),
                ("training.max_steps", preset.max_steps.to_string()),
                ("training.warmup_steps", preset.warmup_steps.to_string()),
                ("training.eval_interval", preset.eval_interval.to_string()),
                ("training.save_interval", preset.save_interval.to_string()),
            ],
        }
    }
}

fn find<T>(
    family: &'static str,
    presets: &'static [T],
    name_of: impl Fn(&T) -> &'static str,
    name: &str,
) -> Result<&'static T, ConfigError> {
    let wanted = name.trim().replace('_', "-");
    presets
        .iter()
        .find(|preset| name_of(preset).eq_ignore_ascii_case(&wanted))
        .ok_or_else(|| {
            let names: Vec<&str> = presets.iter().map(&name_of).collect();
            ConfigError::UnknownPreset {
                family,
                name: name.to_owned(),
                suggestion: nearest_name(name, names.iter().copied()).map(str::to_owned),
                known: names.join(", "),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_found_or_suggested() {
        assert_eq!(
            Preset::vram("16GB_medium").unwrap().title(),
            "vram 16gb-medium"
        );
        let message = Preset::training("carefull").unwrap_err().to_string();
        assert_eq!(
            message,
            "there is no training preset \"carefull\"; did you mean \"careful\"?\nhint: training presets are default, fast, careful"
        );
    }
}
