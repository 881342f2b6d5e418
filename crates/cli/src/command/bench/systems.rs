//! The systems that `cinch bench --all` measures: one of each kind of model, at a size that two
//! cores run in seconds.

use cinch_config::{Settings, Source};

use crate::args::SettingArguments;
use crate::failure::usage;

/// What a value of a system was given by.
const FLAG: &str = "--all";

/// A model with its settings. What a flag says besides is taken for all of them.
pub struct System {
    pub name: &'static str,
    settings: &'static [(&'static str, &'static str)],
}

pub const SYSTEMS: [System; 5] = [
    System {
        name: "Mamba small",
        settings: &[
            ("model.type", "mamba"),
            ("model.size", "small"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "256"),
        ],
    },
    System {
        name: "sparse attention",
        settings: &[
            ("model.type", "gsa"),
            ("model.size", "512m-low-memory"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "256"),
        ],
    },
    System {
        name: "Qwen2.5 0.5B, LoRA",
        settings: &[
            ("model.type", "Qwen/Qwen2.5-0.5B"),
            ("lora.rank", "16"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "256"),
        ],
    },
    System {
        name: "MU",
        settings: &[
            ("model.type", "mu"),
            ("vram.batch_size", "4"),
            ("vram.max_seq_len", "256"),
        ],
    },
    System {
        name: "text embedder",
        settings: &[
            ("model.type", "naics"),
            ("model.n_negatives", "2"),
            ("vram.batch_size", "1"),
        ],
    },
];

impl System {
    pub fn settings(&self, arguments: &SettingArguments) -> anyhow::Result<Settings> {
        let mut settings = arguments.settings()?;
        if settings.is_explicit("model.type") {
            return Err(usage(
                "--all measures every system, and --model names one\nhint: give one of them",
            ));
        }
        let accumulation = ("vram.gradient_accumulation_steps", "1");
        for &(key, value) in self.settings.iter().chain([&accumulation]) {
            if !settings.is_explicit(key) {
                settings.set(key, value, Source::Flag(FLAG.to_owned()))?;
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use cinch_graph::Target;

    use super::*;

    /// Every system is one that the engine trains, each of another family, and plans.
    #[test]
    fn every_system_plans() {
        let mut families = Vec::new();
        for system in SYSTEMS {
            let mut settings = Settings::new();
            for &(key, value) in system.settings {
                let source = Source::Flag(FLAG.to_owned());
                settings.set(key, value, source).unwrap();
            }
            let mut config = settings.resolve().unwrap();
            crate::device::adapt_to_cpu(&mut config);
            let machine = crate::overhead::machine(Target::Cpu);
            let plan = cinch_fit::plan(&config, machine).unwrap();
            assert!(plan.useful_flops() > 0, "{}", system.name);
            families.push(config.model.family().title);
        }
        families.sort_unstable();
        families.dedup();
        assert_eq!(families.len(), SYSTEMS.len());
    }
}
