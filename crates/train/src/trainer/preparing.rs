//! A run before its first step: its folder, data and session.

use std::path::Path;
use std::time::Instant;

use cinch_config::{Config, TrainingConfig};
use cinch_data::Progress;
use cinch_step::StepPlan;

use super::origin::{Base, Origin};
use super::saving::{mend_best, remove_old};
use super::{Pace, Resume, Run, Trainer};
use crate::batch::Batch;
use crate::checkpoint::Store;
use crate::curriculum::Course;
use crate::data::Data;
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::owner::Ownership;
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
        let folder = run.plan.config.output.output_dir.clone();
        let ownership = take_folder(&folder, ranks, owned, observer)?;
        let store = open_store(&folder, ranks, &run.resume)?;
        // What is missing is told before the data is read.
        let base = Base::open(&run, observer)?;
        let data = prepare_data(&run.plan.config, ranks, run.progress)?;
        for note in &data.notes {
            observer.event(Event::Note(note));
        }
        observer.event(Event::Data(data.report));
        if ranks.is_first() {
            keep_tokenizer(&folder, &data)?;
        }
        let course = Course::new(data.stage_steps());
        let plan = with_lengths_of(&data, &course, run.plan, observer);
        let config = plan.config.clone();
        let mut session = Session::of_rank(plan, run.options, ranks.clone())?;
        let origin = Origin {
            base: base.seen_by(session.plan(), observer)?,
            data: &data,
            config: &config,
            settings: run.settings,
            progress: run.progress,
        };
        let (state, last_saved) = match run.resume {
            Resume::Fresh => (origin.begin(&mut session)?, None),
            Resume::From(path) => {
                let state = origin.go_on(&mut session, &path, observer)?;
                if ranks.is_first() {
                    take_up(&store, &config.training, &state, &path, observer)?;
                }
                ranks.barrier()?;
                let step = state.step;
                (state, Some((step, path)))
            }
        };
        let course = course.begun_at(&state.stage_starts, state.stage);
        if course.max_steps() != data.report.max_steps {
            observer.event(Event::Note(&format!(
                "the run ends after step {}: stages that are over were shorter or longer",
                course.max_steps()
            )));
        }
        let goes_on = last_saved.is_some();
        let mut record = open_record(&folder, ranks, &state, goes_on, observer)?;
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

/// Takes the run's folder, beside one that was taken before.
fn take_folder(
    folder: &Path,
    ranks: &Ranks,
    owned: Option<Ownership>,
    observer: &mut dyn Observer,
) -> Result<[Option<Ownership>; 2], TrainError> {
    let taken = match &owned {
        _ if !ranks.is_first() => None,
        Some(owned) if owned.is_of(folder) => None,
        _ => Some(Ownership::take(folder)?),
    };
    let ownership = [taken, owned];
    if let Some(note) = ownership.iter().flatten().find_map(Ownership::note) {
        observer.event(Event::Note(note));
    }
    Ok(ownership)
}

/// The checkpoints of the folder. A run that begins there must find none.
fn open_store(folder: &Path, ranks: &Ranks, resume: &Resume) -> Result<Store, TrainError> {
    let store = match ranks.is_first() {
        true => Store::open(folder)?,
        false => Store::look(folder)?,
    };
    let newest = match resume {
        Resume::Fresh => store.newest()?,
        Resume::From(_) => None,
    };
    match newest {
        Some(entry) => Err(TrainError::RunExists {
            folder: folder.to_owned(),
            step: entry.step,
        }),
        None => Ok(store),
    }
}

fn open_record(
    folder: &Path,
    ranks: &Ranks,
    state: &State,
    goes_on: bool,
    observer: &mut dyn Observer,
) -> Result<Option<RunRecord>, TrainError> {
    if !ranks.is_first() {
        return Ok(None);
    }
    let record = match goes_on {
        false => RunRecord::create(folder)?,
        true => RunRecord::resume(folder, state.step, !state.evaluation_pending)?,
    };
    if let Some(note) = record.note() {
        observer.event(Event::Note(note));
    }
    Ok(Some(record))
}

/// The plan of a run whose steps, epochs and stages are known.
fn with_lengths_of(
    data: &Data,
    course: &Course,
    mut plan: StepPlan,
    observer: &mut dyn Observer,
) -> StepPlan {
    let training = &mut plan.config.training;
    training.max_steps = data.report.max_steps;
    if let Some(epochs) = training.eval_epochs {
        training.eval_interval = data.steps_of_epochs(0, epochs);
    }
    training.warmup_steps = training.warmup_of(training.max_steps);
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
    plan
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
    training: &TrainingConfig,
    state: &State,
    from: &Path,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    mend_best(store, state, observer)?;
    store.set_aside_after(state.step)?;
    // A kill between a save and what follows it left what was to be removed. A checkpoint that is
    // marked is past that, and another one was the best then.
    let is_marked = store.best()?.is_some_and(|best| best.step == state.step);
    if from == store.path_of(state.step) && !is_marked {
        remove_old(store, training, state)?;
    }
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
