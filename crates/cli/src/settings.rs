//! From flags, files and environment to settings, each value with its source.

use std::path::Path;

use cinch_config::{Preset, Settings, Source};

use crate::args::SettingArguments;
use crate::failure::usage;

/// Environment variables of cinch that are not settings.
const OTHER_VARIABLES: [&str; 1] = [cinch_files::CACHE_VARIABLE];

impl SettingArguments {
    /// Whether the user said anything about what to train on which data. If not, it is the
    /// built-in example.
    pub fn asks_for_a_model(&self) -> bool {
        self.config.is_some()
            || self.model.is_some()
            || self.model_size.is_some()
            || self.memory.is_given()
            || self.vram_preset.is_some()
            || self.training_preset.is_some()
            || self.data_dir.is_some()
            || self.sets_the_model()
    }

    /// Whether `--set` says something of the model's shape.
    pub fn sets_the_model(&self) -> bool {
        self.set.iter().any(|set| set.starts_with("model."))
    }

    /// The settings: defaults, presets, file, environment, flags.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        self.settings_over(Settings::new())
    }

    /// As [`Self::settings`], on top of what `settings` holds.
    pub fn settings_over(&self, mut settings: Settings) -> anyhow::Result<Settings> {
        if let Some(name) = &self.vram_preset {
            settings.apply_preset(Preset::vram(name)?)?;
        }
        if let Some(name) = &self.training_preset {
            settings.apply_preset(Preset::training(name)?)?;
        }
        if let Some(path) = &self.config {
            settings.load_file(path)?;
        }
        let variables = std::env::vars_os()
            .filter(|(name, _)| OTHER_VARIABLES.iter().all(|other| name != *other));
        settings.load_environment(variables)?;
        for (flag, key, value) in self.flags() {
            if let Some(value) = value {
                settings.set(key, &value, Source::Flag(flag.to_owned()))?;
            }
        }
        if let Some(budget) = self.memory.budget()? {
            let source = Source::Flag(budget.flag.to_owned());
            settings.set("vram.budget", &budget.setting(), source)?;
        }
        for pair in &self.set {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(usage(format!(
                    "--set takes KEY=VALUE, not `{pair}`\nhint: for example --set model.d_state=32"
                )));
            };
            settings.set(key.trim(), value.trim(), Source::Flag("--set".to_owned()))?;
        }
        Ok(settings)
    }

    /// The flag that stands for a key.
    pub fn flag_of(&self, key: &str) -> Option<&'static str> {
        let flags = self.flags().into_iter();
        let mut flags = flags.filter(|(_, of, _)| *of == key);
        flags.next().map(|(flag, ..)| flag)
    }

    fn flags(&self) -> Vec<(&'static str, &'static str, Option<String>)> {
        let path = |path: &Option<std::path::PathBuf>| {
            path.as_deref().map(Path::to_string_lossy).map(Into::into)
        };
        vec![
            ("--model", "model.type", self.model.clone()),
            ("--model-size", "model.size", self.model_size.clone()),
            ("--dropout", "model.dropout", self.dropout.clone()),
            ("--batch-size", "vram.batch_size", self.batch_size.clone()),
            (
                "--grad-accum",
                "vram.gradient_accumulation_steps",
                self.grad_accum.clone(),
            ),
            ("--seq-len", "vram.max_seq_len", self.seq_len.clone()),
            ("--precision", "vram.precision", self.precision.clone()),
            (
                "--checkpointing",
                "vram.checkpointing",
                self.checkpointing.clone(),
            ),
            (
                "--offload",
                "vram.use_cpu_offload",
                self.offload.then(|| "true".to_owned()),
            ),
            (
                "--optimizer-states",
                "vram.optimizer_states",
                self.optimizer_states.clone(),
            ),
            (
                "--update-in-backward",
                "vram.update_in_backward",
                self.update_in_backward.then(|| "true".to_owned()),
            ),
            ("--lr", "training.learning_rate", self.lr.clone()),
            ("--max-steps", "training.max_steps", self.max_steps.clone()),
            (
                "--warmup-steps",
                "training.warmup_steps",
                self.warmup_steps.clone(),
            ),
            ("--schedule", "training.schedule", self.schedule.clone()),
            (
                "--label-smoothing",
                "training.label_smoothing",
                self.label_smoothing.clone(),
            ),
            ("--seed", "training.seed", self.seed.clone()),
            (
                "--eval-steps",
                "training.eval_interval",
                self.eval_steps.clone(),
            ),
            (
                "--save-steps",
                "training.save_interval",
                self.save_steps.clone(),
            ),
            (
                "--log-steps",
                "training.logging_steps",
                self.log_steps.clone(),
            ),
            (
                "--save-total-limit",
                "training.save_total_limit",
                self.save_total_limit.clone(),
            ),
            ("--data-dir", "data.source", path(&self.data_dir)),
            (
                "--text-column",
                "data.text_column",
                self.text_column.clone(),
            ),
            ("--tokenizer", "data.tokenizer", self.tokenizer.clone()),
            ("--val-split", "data.val_split", self.val_split.clone()),
            ("--cache-dir", "data.cache_dir", path(&self.cache_dir)),
            ("--output-dir", "output.output_dir", path(&self.output_dir)),
        ]
    }
}
