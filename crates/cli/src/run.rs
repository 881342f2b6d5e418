//! Which run the flags mean: one answer for `cinch train`, which starts it, and for `cinch
//! check`, which looks at it before.

use std::path::{Path, PathBuf};

use cinch_config::{BatchConfig, Config, Matters, Preset, SETTINGS, Settings};
use cinch_fit::FitError;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::Resume;

use crate::args::{MemoryArguments, SettingArguments};
use crate::progress::{DataBar, shown};
use crate::rows::{Reported, Rows};
use crate::settings::{NAME_TOKENIZER, for_the_engine, refuse_foreign_tokenizer};
use crate::unfollowed::by_training;
use crate::{budget, device, overhead, resume};

/// A run that was asked for, as it would be on this machine.
pub struct AskedRun {
    pub settings: Settings,
    pub config: Config,
    pub origin: Origin,
    /// What is done otherwise than stated.
    pub notes: Vec<String>,
    /// What the budget is: the one that was given, or memory that is free.
    pub budget_name: &'static str,
    /// How long the rows of samples are. A run that goes on has the lengths it has.
    pub rows: Rows,
}

/// Where a run comes from.
pub enum Origin {
    /// Nothing was said about what to train.
    Demo,
    New,
    Checkpoint(Box<resume::Checkpoint>),
}

impl AskedRun {
    /// `from` is what `--resume` says: nothing, the run of the settings, or a folder. Before the
    /// checkpoint is chosen, `found` is told where. So many ranks train it, whatever was stated.
    pub fn new(
        flags: &SettingArguments,
        from: Option<Option<&Path>>,
        target: Target,
        num_ranks: usize,
        found: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let (mut settings, is_demo) = new_run(flags)?;
        let ranks = settings.on_ranks(num_ranks as u64)?;
        let mut origin = match is_demo {
            true => Origin::Demo,
            false => Origin::New,
        };
        if let Some(folder) = from {
            let folder = match folder {
                Some(folder) => resume::checkpoint_named(folder)?,
                None => settings.resolve()?.output.output_dir,
            };
            found(&folder)?;
            let checkpoint = resume::Checkpoint::newest_of(&folder)?;
            settings = checkpoint.settings_with(flags, num_ranks)?;
            origin = Origin::Checkpoint(Box::new(checkpoint));
        }
        let mut config = settings.resolve()?;
        for_the_engine(flags, &settings, &config)?;
        settings.refuse_mistakes(Matters::Training)?;
        let is_named = settings.is_explicit("data.tokenizer");
        if !is_named && !matches!(origin, Origin::Checkpoint(_)) {
            refuse_foreign_tokenizer(&config, NAME_TOKENIZER)?;
        }
        let rows = match origin {
            Origin::Checkpoint(_) => Rows::None,
            Origin::Demo | Origin::New => {
                Rows::settle(&mut settings, &mut config, &DataBar::default())?
            }
        };
        let mut notes = settings.notes();
        notes.extend(settings.readings().iter().filter_map(by_training));
        notes.extend(ranks.map(|stated| {
            let here = match num_ranks {
                1 => "one device".to_owned(),
                ranks => format!("{ranks} ranks"),
            };
            format!(
                "the stated {stated} GPUs are {here} here: accumulation {} keeps the global batch",
                config.batch.accumulation
            )
        }));
        if target == Target::Cpu {
            notes.extend(device::adapt_to_cpu(&mut config));
        }
        let budget_name = device::default_budget(&mut config, target).unwrap_or("budget");
        let is_new = !matches!(origin, Origin::Checkpoint(_));
        if is_new && !settings.is_explicit("output.output_dir") {
            config.output.output_dir = free_folder(&config.output.output_dir);
        }
        Ok(Self {
            settings,
            config,
            origin,
            notes,
            budget_name,
            rows,
        })
    }

    /// What samples take of the host's memory.
    pub fn samples_bytes(&self) -> u64 {
        self.rows.host_bytes()
    }

    /// The plan as data, with what is known of its rows.
    pub fn report(&self, step: &StepPlan, target: Target) -> Reported {
        self.rows
            .report(step.report(target, false), &step.config.batch)
    }

    /// The plan of the run. One that goes on keeps the settings it has; a new one within a budget
    /// gets those that `cinch fit` finds.
    pub fn plan(
        &self,
        memory: &MemoryArguments,
        target: Target,
    ) -> anyhow::Result<Result<StepPlan, FitError>> {
        match self.origin {
            Origin::Checkpoint(_) => Ok(cinch_fit::plan(&self.config, overhead::machine(target))),
            Origin::Demo | Origin::New => {
                budget::plan(&self.settings, &self.config, memory, target)
            }
        }
    }

    /// Which run it is, in a line.
    pub fn describe(&self) -> String {
        let folder = shown(&self.config.output.output_dir);
        match &self.origin {
            Origin::Demo => format!("run: the built-in demo, in {folder}"),
            Origin::New => format!("run: a new one, in {folder}"),
            Origin::Checkpoint(checkpoint) => format!(
                "run: the one in {folder}, from step {}",
                checkpoint.state.step
            ),
        }
    }

    pub fn resume(&self) -> Resume {
        match &self.origin {
            Origin::Demo | Origin::New => Resume::Fresh,
            Origin::Checkpoint(checkpoint) => Resume::From(checkpoint.path.clone()),
        }
    }

    /// What to say where the plan cuts the effective batch otherwise than asked, or than the run
    /// did before.
    pub fn cut_note(&self, planned: &BatchConfig) -> Option<String> {
        let cut = |batch: &BatchConfig| format!("{} × {}", batch.batch_size, batch.accumulation);
        let before = match &self.origin {
            Origin::Checkpoint(checkpoint) => Some(&checkpoint.state.config.batch),
            Origin::Demo | Origin::New => None,
        };
        let is_other = |batch: &&BatchConfig| batch.batch_size != planned.batch_size;
        if let Some(before) = before.filter(is_other) {
            let otherwise = match self.config.model.depends_on_micro_batch() {
                Some(why) => format!(
                    "another run than an uninterrupted one, because {why}; --batch-size {} goes on as before",
                    before.batch_size
                ),
                None => "rounding differs from that of an uninterrupted run".to_owned(),
            };
            let (now, before) = (cut(planned), cut(before));
            return Some(format!("micro batch {now}, before {before}: {otherwise}"));
        }
        let asked = Some(&self.config.batch).filter(is_other)?;
        Some(format!(
            "micro batch {} instead of {}, to stay within the {}",
            cut(planned),
            cut(asked),
            self.budget_name
        ))
    }
}

/// The settings of a new run; those of the built-in demo where the user said nothing about what
/// to train on which data.
fn new_run(flags: &SettingArguments) -> anyhow::Result<(Settings, bool)> {
    let mut settings = flags.settings()?;
    let is_demo = !asks_for_a_model(flags, &settings);
    if is_demo {
        settings.apply_preset(Preset::Demo)?;
    }
    Ok((settings, is_demo))
}

/// Whether a file, a preset, a variable or a flag says something of the model, the data or the
/// memory. A rate such as dropout may be stated for the demo too.
fn asks_for_a_model(flags: &SettingArguments, settings: &Settings) -> bool {
    let says_what = |key: &str| {
        (key.starts_with("model.") && key != "model.dropout")
            || ["data.source", "vram.budget"].contains(&key)
    };
    let plain = &flags.plain;
    plain.config.is_some()
        || plain.config_path.is_some()
        || plain.vram_preset.is_some()
        || plain.training_preset.is_some()
        || SETTINGS
            .iter()
            .any(|setting| says_what(setting.key) && settings.is_explicit(setting.key))
}

/// The folder itself, or the first of `folder-2`, `folder-3`, … that is free.
fn free_folder(folder: &Path) -> PathBuf {
    let numbered = |number: u32| match number {
        1 => folder.to_owned(),
        _ => {
            let mut name = folder.as_os_str().to_owned();
            name.push(format!("-{number}"));
            PathBuf::from(name)
        }
    };
    let mut names = (1..).map(numbered);
    let free = names.find(|candidate| !candidate.exists());
    free.unwrap_or_else(|| folder.to_owned())
}

#[cfg(test)]
mod tests {
    use cinch_config::Source;

    use super::*;

    fn asks(key: &str, value: &str) -> bool {
        let mut settings = Settings::new();
        let source = Source::Environment("CINCH_TEST".to_owned());
        settings.set(key, value, source).unwrap();
        asks_for_a_model(&SettingArguments::default(), &settings)
    }

    #[test]
    fn a_word_about_the_model_in_any_place_makes_it_no_demo() {
        assert!(asks("model.size", "small"));
        assert!(asks("data.source", "my_code"));
        assert!(asks("vram.budget", "8gb"));
        assert!(!asks("model.dropout", "0.1"));
        assert!(!asks("training.max_steps", "10"));
        let mut presets = SettingArguments::default();
        presets.plain.vram_preset = Some("8gb".to_owned());
        assert!(asks_for_a_model(&presets, &Settings::new()));
    }

    #[test]
    fn a_folder_that_is_taken_gets_a_number() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("run");
        assert_eq!(free_folder(&folder), folder);
        for name in ["run", "run-2"] {
            std::fs::create_dir(home.path().join(name)).unwrap();
        }
        assert_eq!(free_folder(&folder), home.path().join("run-3"));
    }
}
