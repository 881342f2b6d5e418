//! A run before its first step: its folder, data, session and what it goes on from.

use std::path::Path;
use std::time::Instant;

use cinch_architecture::Architecture;
use cinch_config::Config;
use cinch_data::Progress;
use cinch_graph::Graph;
use cinch_weights::WeightFiles;

use super::saving::mend_best;
use super::{Pace, Resume, Run, Trainer, is_validated};
use crate::batch::Batch;
use crate::checkpoint::{self, Store};
use crate::curriculum::Course;
use crate::data::Data;
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::owner::Ownership;
use crate::pretrained::{self, FirstWeights};
use crate::rank_times::RankTimes;
use crate::ranks::Ranks;
use crate::record::RunRecord;
use crate::session::Session;
use crate::state::State;

/// What a tokenizer that was trained on the data is called in the run's folder.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

impl<'a> Trainer<'a> {
    pub(super) fn prepare(
        run: Run<'a>,
        ranks: &Ranks,
        owned: Option<Ownership>,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let config = run.plan.config.clone();
        let folder = config.output.output_dir.clone();
        let taken = match &owned {
            _ if !ranks.is_first() => None,
            Some(owned) if owned.is_of(&folder) => None,
            _ => Some(Ownership::take(&folder)?),
        };
        let ownership = [taken, owned];
        if let Some(note) = ownership.iter().flatten().find_map(Ownership::note) {
            observer.event(Event::Note(note));
        }
        let store = match ranks.is_first() {
            true => Store::open(&folder)?,
            false => Store::look(&folder)?,
        };
        if run.resume == Resume::Fresh
            && let Some(entry) = store.newest()?
        {
            return Err(TrainError::RunExists {
                folder,
                step: entry.step,
            });
        }
        // What is missing is told before the data is read.
        // A run that goes on has everything in its checkpoint but what is not trained.
        let needs_files = run.resume == Resume::Fresh || has_frozen(&run.plan.training);
        let first_weights = match needs_files.then(|| FirstWeights::of(&config)) {
            None => None,
            Some(weights) => match weights? {
                FirstWeights::Initial => None,
                FirstWeights::Files(path) => Some(WeightFiles::open(&path)?),
            },
        };
        let data = prepare_data(&config, ranks, run.progress)?;
        for note in &data.notes {
            observer.event(Event::Note(note));
        }
        observer.event(Event::Data(data.report));
        if ranks.is_first() {
            keep_tokenizer(&folder, &data)?;
        }
        let mut plan = run.plan;
        let mut course = Course::new(data.stage_steps());
        let training = &mut plan.config.training;
        training.max_steps = data.report.max_steps;
        if let Some(epochs) = training.eval_epochs {
            training.eval_interval = data.steps_of_epochs(0, epochs);
        }
        // How long epochs are is known only now, and a warm-up beyond the end has no peak.
        // Stages have warm-ups of their own.
        if course.num_stages() == 1 && training.warmup_steps > training.max_steps {
            let shorter = training.max_steps / 10;
            let note = format!(
                "the run has {} steps: its warm-up takes {shorter} of them, not {}",
                training.max_steps, training.warmup_steps
            );
            observer.event(Event::Note(&note));
            training.warmup_steps = shorter;
        }
        let config = plan.config.clone();
        let mut session = Session::of_rank(plan, run.options, ranks.clone())?;
        let frozen = match &first_weights {
            None => None,
            Some(files) => pretrained::frozen_fingerprint(&session.plan().training, files)?,
        };
        if let Some(files) = &first_weights
            && !matches!(config.model, Architecture::Naics(_))
            && let Some(note) = pretrained::unread(&session.plan().training, files)
        {
            observer.event(Event::Note(&note));
        }
        let (state, last_saved) = match run.resume {
            Resume::Fresh => {
                let seed = config.training.seed;
                match &first_weights {
                    None => session.initialize(seed)?,
                    Some(files) => session.load_pretrained(files, seed, run.progress)?,
                }
                let lora = config.tuning.lora.as_ref();
                if let Some(folder) = lora.and_then(|lora| lora.from.as_ref()) {
                    session.load_adapter(Path::new(folder))?;
                }
                let state = State {
                    format: State::FORMAT,
                    step: 0,
                    samples: 0,
                    tokens: 0,
                    seed: config.training.seed,
                    best_loss: None,
                    best_step: None,
                    first_loss: None,
                    evaluation_pending: false,
                    stage: 0,
                    stage_starts: Vec::new(),
                    evaluations_since_best: 0,
                    top: Vec::new(),
                    clusters: None,
                    corpus: data.fingerprint.clone(),
                    of_ids: data.tokenizer.is_none(),
                    frozen,
                    config: config.clone(),
                    settings: run.settings,
                };
                (state, None)
            }
            Resume::From(path) => {
                load_frozen(
                    &mut session,
                    config.training.seed,
                    first_weights.as_ref(),
                    run.progress,
                )?;
                let (mut state, note) = resume(&mut session, &path, &data, &config)?;
                if let Some(note) = note {
                    observer.event(Event::Note(&note));
                }
                // The first loss is compared with later ones of its own kind only.
                if is_validated(&data, &state.config) != is_validated(&data, &config) {
                    state.first_loss = None;
                }
                let kept = state.frozen.as_ref().zip(frozen.as_ref());
                if let Some(files) = &first_weights
                    && kept.is_some_and(|(before, now)| before != now)
                {
                    return Err(TrainError::OtherBase {
                        path,
                        base: files.path().to_owned(),
                    });
                }
                state.frozen = frozen;
                state.config = config.clone();
                state.settings = run.settings;
                if ranks.is_first() {
                    take_up(&store, &state, &path, observer)?;
                }
                ranks.barrier()?;
                let step = state.step;
                (state, Some((step, path)))
            }
        };
        course = course.begun_at(&state.stage_starts, state.stage);
        if course.max_steps() != data.report.max_steps {
            observer.event(Event::Note(&format!(
                "the run ends after step {}: stages that are over were shorter or longer",
                course.max_steps()
            )));
        }
        let mut record = match (ranks.is_first(), &last_saved) {
            (false, _) => None,
            (true, None) => Some(RunRecord::create(&folder)?),
            (true, Some(_)) => {
                let evaluated = !state.evaluation_pending;
                Some(RunRecord::resume(&folder, state.step, evaluated)?)
            }
        };
        if let Some(note) = record.as_ref().and_then(RunRecord::note) {
            observer.event(Event::Note(note));
        }
        observer.event(Event::Ready {
            plan: session.plan(),
            step: state.step,
            engine: session.engine(),
        });
        let rank_times = RankTimes::begin(
            ranks,
            &session.engine().describe(),
            session.plan().total_bytes(),
            state.step,
            record.as_mut(),
        )?;
        let sequences = config.batch.rank_batch();
        let mut trainer = Self {
            batch: Batch::of_step(session.plan(), sequences),
            course,
            session,
            data,
            store,
            record,
            ranks: ranks.clone(),
            stop: run.stop,
            state,
            last_saved,
            last_loss: None,
            loss_scale: None,
            started: Instant::now(),
            pace: Pace::new(),
            most_resident_bytes: None,
            rank_times,
            options: run.options,
            _ownership: ownership,
        };
        trainer.begin_stage();
        Ok(trainer)
    }
}

/// The data on every rank. The first reads it before the others, who find what it left in the
/// cache.
fn prepare_data(
    config: &Config,
    ranks: &Ranks,
    progress: &dyn Progress,
) -> Result<Data, TrainError> {
    let first = match ranks.is_first() {
        true => Some(Data::prepare(config, progress)?),
        false => None,
    };
    ranks.barrier_without_limit()?;
    let data = match first {
        Some(data) => data,
        None => Data::prepare(config, progress)?,
    };
    ranks.require_same("their data", &data.fingerprint)?;
    Ok(data)
}

/// Makes a run's checkpoints those of a course that goes on from one of them.
fn take_up(
    store: &Store,
    state: &State,
    from: &Path,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    mend_best(store, state, observer)?;
    store.set_aside_after(state.step)?;
    // A kill between the save of a best checkpoint and its mark left it unmarked.
    if state.best_step == Some(state.step)
        && let Some(loss) = state.best_loss
        && from == store.path_of(state.step)
    {
        store.mark_best(state.step, loss)?;
    }
    Ok(())
}

/// Keeps a tokenizer that was trained on the data with the run: the cache may be cleared, and who
/// takes the run elsewhere has no data.
fn keep_tokenizer(folder: &Path, data: &Data) -> Result<(), TrainError> {
    let Some(from) = data
        .tokenizer
        .as_ref()
        .and_then(|of_run| of_run.trained.as_deref())
    else {
        return Ok(());
    };
    let path = folder.join(TOKENIZER_FILE);
    // It was loaded before, which limits its size.
    let keep = || cinch_files::replace(&path, &cinch_files::read_regular(from, u64::MAX)?);
    keep().map_err(|source| TrainError::KeepTokenizer {
        path: path.clone(),
        source,
    })
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
