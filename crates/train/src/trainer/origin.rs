//! What a run starts from: first weights, or a checkpoint and what no checkpoint holds.

use std::collections::BTreeMap;
use std::path::Path;

use cinch_architecture::Architecture;
use cinch_config::Config;
use cinch_data::Progress;
use cinch_graph::Graph;
use cinch_step::StepPlan;
use cinch_weights::WeightFiles;

use super::{Resume, Run, is_validated};
use crate::checkpoint;
use crate::data::Data;
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::pretrained::{self, FirstWeights};
use crate::session::Session;
use crate::state::State;

/// The files that weights come from which no checkpoint of the run holds.
#[derive(Default)]
pub(super) struct Base {
    files: Option<WeightFiles>,
    /// Of those that are not trained.
    fingerprint: Option<String>,
}

impl Base {
    /// A run that goes on has everything in its checkpoint but what is not trained.
    pub fn open(run: &Run<'_>, observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let config = &run.plan.config;
        if run.resume != Resume::Fresh && !has_frozen(&run.plan.training) {
            return Ok(Self::default());
        }
        let FirstWeights::Files(path) = FirstWeights::of(config)? else {
            return Ok(Self::default());
        };
        let files = pretrained::open_weights(config, &path)?;
        if let Some(note) = pretrained::described_otherwise(config) {
            observer.event(Event::Note(&note));
        }
        Ok(Self {
            files: Some(files),
            fingerprint: None,
        })
    }

    /// With what the planned model has of them, and what it has no place for told.
    pub fn seen_by(self, plan: &StepPlan, observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let Some(files) = self.files else {
            return Ok(self);
        };
        pretrained::check_tied_head(pretrained::has_tied_head(&plan.training), &files)?;
        let fingerprint = pretrained::frozen_fingerprint(&plan.training, &files)?;
        if !matches!(plan.config.model, Architecture::Naics(_))
            && let Some(note) = pretrained::unread(&plan.training, &files)
        {
            observer.event(Event::Note(&note));
        }
        Ok(Self {
            files: Some(files),
            fingerprint,
        })
    }
}

/// What a run starts from, whether it begins or goes on.
pub(super) struct Origin<'r> {
    pub base: Base,
    pub data: &'r Data,
    pub config: &'r Config,
    pub settings: BTreeMap<String, String>,
    pub progress: &'r dyn Progress,
}

impl Origin<'_> {
    /// Fills the session with first weights.
    pub fn begin(self, session: &mut Session) -> Result<State, TrainError> {
        let seed = self.config.training.seed;
        match &self.base.files {
            None => session.initialize(seed)?,
            Some(files) => session.load_pretrained(files, seed, self.progress)?,
        }
        let lora = self.config.tuning.lora.as_ref();
        if let Some(folder) = lora.and_then(|lora| lora.from.as_ref()) {
            session.load_adapter(Path::new(folder))?;
        }
        Ok(State {
            format: State::FORMAT,
            step: 0,
            samples: 0,
            tokens: 0,
            seed,
            best_loss: None,
            best_step: None,
            first_loss: None,
            evaluation_pending: false,
            stage: 0,
            stage_starts: Vec::new(),
            evaluations_since_best: 0,
            top: Vec::new(),
            clusters: None,
            corpus: self.data.fingerprint.clone(),
            of_ids: self.data.tokenizer.is_none(),
            frozen: self.base.fingerprint,
            config: self.config.clone(),
            settings: self.settings,
        })
    }

    /// Fills the session from a checkpoint, and from the base what no checkpoint holds.
    pub fn go_on(
        self,
        session: &mut Session,
        path: &Path,
        observer: &mut dyn Observer,
    ) -> Result<State, TrainError> {
        let files = self.base.files.as_ref();
        load_frozen(session, self.config.training.seed, files, self.progress)?;
        let (mut state, note) = resume(session, path, self.data, self.config)?;
        if let Some(note) = note {
            observer.event(Event::Note(&note));
        }
        // The first loss is compared with later ones of its own kind only.
        if is_validated(self.data, &state.config) != is_validated(self.data, self.config) {
            state.first_loss = None;
        }
        let kept = state.frozen.as_ref().zip(self.base.fingerprint.as_ref());
        if let Some(files) = files
            && kept.is_some_and(|(before, now)| before != now)
        {
            return Err(TrainError::OtherBase {
                path: path.to_owned(),
                base: files.path().to_owned(),
            });
        }
        state.of_ids = self.data.tokenizer.is_none();
        state.frozen = self.base.fingerprint;
        state.config = self.config.clone();
        state.settings = self.settings;
        Ok(state)
    }
}

/// Loads weights, states and position from a checkpoint, and checks that they belong here. The
/// second is what is worth saying about it.
fn resume(
    session: &mut Session,
    path: &Path,
    data: &Data,
    config: &Config,
) -> Result<(State, Option<String>), TrainError> {
    let loaded = checkpoint::load(path)?;
    let state = State::from_json(path, loaded.state.clone())?;
    let differences = state.differences(config);
    if !differences.is_empty() {
        return Err(TrainError::OtherSettings {
            path: path.to_owned(),
            differences,
        });
    }
    if state.corpus != data.fingerprint {
        let source = config.data.source.as_ref();
        return Err(TrainError::OtherData {
            path: path.to_owned(),
            saved: state.corpus,
            now: data.fingerprint.clone(),
            source_name: source.map_or_else(
                || "the embedded text".to_owned(),
                |source| cinch_files::shown(&source).to_string(),
            ),
        });
    }
    let note = session
        .load(&loaded.model, &loaded.optimizer)
        .map_err(|problem| TrainError::OtherModel {
            path: path.to_owned(),
            problem,
        })?;
    let rows = rows_that_meet(&session.plan().training, &state.config, config);
    let notes: Vec<String> = note.into_iter().chain(rows).collect();
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    Ok((state, note))
}

/// What to say where an op has the mean of what ranks run at a time, and that is another number of
/// sequences than before.
fn rows_that_meet(graph: &Graph, saved: &Config, now: &Config) -> Option<String> {
    let mut nodes = graph.nodes.iter();
    let node = nodes.find(|node| node.op.declaration().is_mean_of_ranks())?;
    let at_a_time = |config: &Config| config.batch.batch_size * config.batch.world.ranks;
    let (before, after) = (at_a_time(saved), at_a_time(now));
    let exact = before / now.batch.world.ranks.max(1);
    let hint = match before.is_multiple_of(now.batch.world.ranks.max(1)) {
        true => format!(": --batch-size {exact} goes on exactly as before"),
        false => String::new(),
    };
    let node = &node.name;
    (before != after).then(|| {
        format!("`{node}` is the mean over {after} sequences at a time, before over {before}{hint}")
    })
}

/// Whether there are weights that are not trained.
fn has_frozen(graph: &Graph) -> bool {
    let mut parameters = graph.parameters.iter();
    parameters.any(|parameter| !parameter.is_trained())
}

/// What a checkpoint does not hold, because it is not trained.
fn load_frozen(
    session: &mut Session,
    seed: u64,
    files: Option<&WeightFiles>,
    progress: &dyn Progress,
) -> Result<(), TrainError> {
    match (has_frozen(&session.plan().training), files) {
        (false, _) => Ok(()),
        (true, None) => session.initialize(seed),
        (true, Some(files)) => session.load_frozen(files, progress),
    }
}
