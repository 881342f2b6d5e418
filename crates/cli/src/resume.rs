//! What `--resume` starts from: a checkpoint, its settings with the flags on top, and the refusal
//! of flags with which the run would be another one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cinch_architecture::{Family, trained_sizes};
use cinch_config::{Settings, Source};
use cinch_train::checkpoint::{self, CheckpointError, Store};
use cinch_train::{Difference, EFFECTIVE_BATCH, State};

use crate::args::SettingArguments;
use crate::command::open_run;
use crate::failure::usage;
use crate::progress::shown;

/// Of a shape: the negatives of each stage, which the files of a curriculum say.
const STAGES: &str = "model.stages";

/// The folder of the run that is meant by its own path, by that of its checkpoints or of one of
/// them; none where there is no run.
pub fn run_of(from: &Path) -> Option<PathBuf> {
    let from = std::fs::canonicalize(from).ok()?;
    let holds_a_run = |folder: &&Path| {
        folder.join("checkpoints").is_dir() || folder.join("metrics.jsonl").is_file()
    };
    let mut folders = from.ancestors().take(3);
    folders.find(holds_a_run).map(Path::to_owned)
}

/// The checkpoint that `DIR/step_5000` means, as other programs name theirs: step 5000 of the run
/// in DIR; any other path is itself.
pub fn checkpoint_named(from: &Path) -> anyhow::Result<PathBuf> {
    let step = from.file_name().and_then(|name| name.to_str());
    let step = step.and_then(|name| name.strip_prefix("step_")?.parse::<u64>().ok());
    let Some((step, run)) = step.zip(from.parent()).filter(|_| !from.exists()) else {
        return Ok(from.to_owned());
    };
    let saved = Store::look(run)?.list()?;
    if let Some(named) = saved.iter().find(|saved| saved.step == step) {
        return Ok(named.path.clone());
    }
    let steps: Vec<String> = saved.iter().map(|saved| saved.step.to_string()).collect();
    match steps.as_slice() {
        [] => Ok(from.to_owned()),
        steps => Err(usage(format!(
            "{} is not a checkpoint: the run in {} has those of the steps {}\n\
             hint: name one of them; --save-total-limit says how many a run keeps",
            shown(from),
            shown(run),
            steps.join(", ")
        ))),
    }
}

/// A checkpoint to go on from.
pub struct Checkpoint {
    pub path: PathBuf,
    pub state: State,
}

impl Checkpoint {
    /// The newest of a run, or the one that the folder is. A run that has none yet is told apart
    /// from a wrong path.
    pub fn newest_of(run: &Path) -> anyhow::Result<Self> {
        let path = match checkpoint::resolve(&open_run(run)?, Some(run)) {
            Err(CheckpointError::NotACheckpoint { .. } | CheckpointError::NoCheckpoint { .. })
                if run.join("metrics.jsonl").is_file() =>
            {
                let run = shown(run);
                return Err(usage(format!(
                    "the run in {run} has no checkpoint: it ended before the first one was saved\n\
                     hint: start it again with the same flags and --output-dir {run}, without \
                     --resume"
                )));
            }
            result => result?,
        };
        let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
        Ok(Self { path, state })
    }

    /// The folder of its run, which may have been moved since; none for a checkpoint that lies
    /// outside a `<run>/checkpoints`.
    fn run(&self) -> Option<&Path> {
        let checkpoints = self.path.parent()?;
        let run = match checkpoints.parent()? {
            here if here.as_os_str().is_empty() => Path::new("."),
            run => run,
        };
        checkpoints.ends_with("checkpoints").then_some(run)
    }

    /// The settings it was saved with, and the flags on top of them.
    pub fn settings_with(
        &self,
        flags: &SettingArguments,
        num_ranks: usize,
    ) -> anyhow::Result<Settings> {
        let saved = self.saved_settings()?;
        let mut together = flags.settings_over(saved.clone())?;
        together.on_ranks(num_ranks as u64)?;
        self.refuse_others(&saved, &flags.settings()?, &together)?;
        Ok(together)
    }

    fn state_file(&self) -> PathBuf {
        self.path.join(checkpoint::STATE_FILE)
    }

    fn saved_settings(&self) -> anyhow::Result<Settings> {
        let mut settings = Settings::new();
        for (key, value) in &self.state.settings {
            let source = Source::File {
                path: self.state_file(),
                line: 0,
                column: 0,
            };
            settings.set(key, value, source)?;
        }
        // How states are kept follows from no file any more: a run goes on with those it has.
        const STATES: &str = "vram.optimizer_states";
        if !self.state.settings.contains_key(STATES) {
            let source = Source::File {
                path: self.state_file(),
                line: 0,
                column: 0,
            };
            settings.set(STATES, self.state.config.batch.states.name(), source)?;
        }
        // Paths that are no text are not among the texts.
        let data = &self.state.config.data;
        for (key, path) in [
            ("data.source", &data.source),
            ("data.cache_dir", &data.cache_dir),
        ] {
            if let Some(path) = path.as_ref().filter(|path| path.to_str().is_none()) {
                let source = Source::File {
                    path: self.state_file(),
                    line: 0,
                    column: 0,
                };
                settings.set_path(key, path, source)?;
            }
        }
        if let Some(folder) = self.run() {
            let source = Source::Flag("--resume".to_owned());
            settings.set_path("output.output_dir", folder, source)?;
        }
        Ok(settings)
    }

    /// An error where `asked` states what would make `together` another run than the saved one.
    fn refuse_others(
        &self,
        saved: &Settings,
        asked: &Settings,
        together: &Settings,
    ) -> anyhow::Result<()> {
        let mut differences = match together.resolve() {
            Ok(config) => self.state.differences(&config),
            // Settings that do not go together may be those of two runs.
            Err(_) => stated_differences(saved, asked),
        };
        if let Some(size) = self.size_difference(saved, asked) {
            differences.insert(0, size);
        }
        if differences.is_empty() {
            return Ok(());
        }
        let mut blamed = BTreeSet::new();
        let lines: Vec<String> = differences
            .iter()
            .map(|one| {
                let sources = self.sources(&one.key, together);
                blamed.extend(sources.iter().map(culprit));
                let places: Vec<String> = sources.iter().map(Source::to_string).collect();
                match places.as_slice() {
                    [] => format!("  {one}"),
                    places => format!("  {one} ({})", places.join(", ")),
                }
            })
            .collect();
        let blamed: Vec<String> = blamed.into_iter().collect();
        let mut way_out = match blamed.as_slice() {
            [] => "resume it with the version of cinch that began it".to_owned(),
            places => format!("leave out {}", places.join(" and ")),
        };
        if let [one] = differences.as_slice()
            && one.key == EFFECTIVE_BATCH
        {
            let product = &one.saved;
            way_out += &format!(", or let --batch-size times --grad-accum be {product}");
        }
        let run = self.run().unwrap_or(&self.path);
        Err(usage(format!(
            "the run in {} cannot go on with other settings than it has\n{}\n\
             hint: {way_out}, or start a new run with another --output-dir",
            shown(run),
            lines.join("\n")
        )))
    }

    /// A size that is asked for by name says nothing where the run has its shape key by key, so
    /// names are compared too: with the size that the model has, and with the one that was named
    /// when the run began.
    fn size_difference(&self, saved: &Settings, asked: &Settings) -> Option<Difference> {
        const SIZE: &str = "model.size";
        let kind = self.state.config.model.family();
        let name_in = |settings: &Settings| {
            let size = settings.explain().into_iter().find(|one| one.key == SIZE)?;
            Some(size.value.to_string()).filter(|_| settings.is_explicit(SIZE))
        };
        let stated = name_in(asked)?;
        let wanted = size_name(kind, &stated)?;
        let has = self.state.config.model.size_name();
        let began_with = name_in(saved).and_then(|name| size_name(kind, &name));
        if has == Some(wanted) || began_with == Some(wanted) {
            return None;
        }
        Some(Difference {
            key: SIZE.to_owned(),
            saved: has.unwrap_or("a shape of its own").to_owned(),
            asked: stated,
        })
    }

    /// Where the values behind a difference were stated.
    fn sources(&self, key: &str, together: &Settings) -> Vec<Source> {
        let keys = match key {
            EFFECTIVE_BATCH => vec!["vram.batch_size", "vram.gradient_accumulation_steps"],
            STAGES => vec!["data.curriculum"],
            key => vec![key],
        };
        let explained = together.explain();
        let source_of = |key: &str| {
            let one = explained.iter().find(|one| one.key == key)?;
            // What a size supplies was asked for by naming the size.
            let is_size = |name: &String| {
                trained_sizes().any(|(family, size)| family.title_of(size) == *name)
            };
            match &one.source {
                Source::Preset(name) if is_size(name) => {
                    let size = explained.iter().find(|one| one.key == "model.size")?;
                    Some(&size.source)
                }
                source => Some(source),
            }
        };
        let state_file = self.state_file();
        let mut sources: Vec<Source> = keys
            .into_iter()
            .filter_map(source_of)
            .filter(|source| match source {
                Source::Default | Source::Derived(_) | Source::Data(_) => false,
                Source::File { path, .. } => *path != state_file,
                Source::Preset(_)
                | Source::Program(_)
                | Source::Environment(_)
                | Source::Flag(_) => true,
            })
            .cloned()
            .collect();
        sources.dedup();
        sources
    }
}

/// What to leave out so that a value is not stated.
fn culprit(source: &Source) -> String {
    match source {
        Source::File { .. } => "--config".to_owned(),
        Source::Environment(name) => format!("the variable {name}"),
        Source::Preset(name) => format!("the preset {name}"),
        other => other.to_string(),
    }
}

/// What was stated otherwise than it was saved, key by key.
fn stated_differences(saved: &Settings, asked: &Settings) -> Vec<Difference> {
    let saved = saved.explain();
    let stated = asked.explain().into_iter();
    stated
        .filter(|one| asked.is_explicit(one.key) && State::is_fixed(one.key))
        .filter_map(|one| {
            let before = saved.iter().find(|before| before.key == one.key);
            let before = before.map_or("nothing".to_owned(), |before| before.value.to_string());
            let asked = one.value.to_string();
            (before != asked).then(|| Difference {
                key: one.key.to_owned(),
                saved: before,
                asked,
            })
        })
        .collect()
}

/// The size that a user means by a name.
fn size_name(family: &Family, name: &str) -> Option<&'static str> {
    family.size(name).map(|size| size.name)
}
