//! A run: data in, steps, evaluations, checkpoints and a record out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cinch_architecture::{Architecture, Naics};
use cinch_config::Config;
use cinch_data::Progress;
use cinch_device::resident_bytes;
use cinch_engine::{EngineError, EngineOptions};
use cinch_graph::Graph;
use cinch_graph::op::LossScale;
use cinch_model::{embeds, stage_phase, without_generation};
use cinch_ranks::{RanksError, SharedWorld};
use cinch_step::StepPlan;
use cinch_weights::WeightFiles;

use crate::batch::Batch;
use crate::checkpoint::{self, CheckpointError, Store};
use crate::cluster;
use crate::curriculum::Course;
use crate::data::Data;
use crate::error::TrainError;
use crate::event::{Event, MemoryUse, Observer, StepReport};
use crate::export::keep_adapters;
use crate::outcome::{Ending, MeasuredLoss, TrainingOutcome};
use crate::owner::Ownership;
use crate::pretrained::FirstWeights;
use crate::rank_times::RankTimes;
use crate::ranks::Ranks;
use crate::record::RunRecord;
use crate::sample::sample;
use crate::session::Session;
use crate::share::Share;
use crate::state::{Clusters, State};
use crate::step::StepResult;
use crate::terms::Evaluation;

/// Where a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// From initial weights; the folder must hold no other run.
    Fresh,
    /// From a checkpoint folder.
    From(PathBuf),
}

/// What a run needs to know.
pub struct Run<'a> {
    pub plan: StepPlan,
    /// The settings as asked for, for the checkpoint.
    pub settings: BTreeMap<String, String>,
    pub resume: Resume,
    pub options: EngineOptions,
    /// Set from outside to end the run after the micro batch in progress.
    pub stop: &'a AtomicBool,
    /// Shown while the data is tokenised.
    pub progress: &'a dyn Progress,
    /// The other ranks that train with this one, each by a run like this. The first of them writes
    /// what there is one of.
    pub world: Option<SharedWorld>,
}

/// Trains until the last step or until told to stop.
pub fn train(run: Run<'_>, observer: &mut dyn Observer) -> Result<TrainingOutcome, TrainError> {
    train_owned(run, None, observer)
}

/// The same, by whoever took the run's folder before: what a resumed run goes on from must not
/// change between the choice of it and its use.
pub fn train_owned(
    run: Run<'_>,
    owned: Option<Ownership>,
    observer: &mut dyn Observer,
) -> Result<TrainingOutcome, TrainError> {
    let ranks = Ranks::new(run.world.clone());
    let last = match &run.resume {
        Resume::Fresh => None,
        Resume::From(path) => Some(path.clone()),
    };
    let outcome = match Trainer::prepare(run, &ranks, owned, observer) {
        Err(error) => Err(rank_lost(error, &ranks, 0, last)),
        Ok(mut trainer) => {
            let outcome = trainer.run(observer);
            let outcome = outcome.map_err(|error| trainer.with_last_checkpoint(error));
            // What was logged is on disk even if the run failed.
            let flushed = trainer.record.as_mut().map_or(Ok(()), RunRecord::flush);
            flushed.map_err(TrainError::from).and(outcome)
        }
    };
    match &outcome {
        Err(TrainError::RankLost { .. }) => {}
        Err(error) => ranks.fail(&error.to_string()),
        Ok(_) => ranks.leave()?,
    }
    outcome
}

struct Trainer<'a> {
    session: Session,
    data: Data,
    batch: Batch,
    course: Course,
    store: Store,
    /// Of the first rank.
    record: Option<RunRecord>,
    ranks: Ranks,
    stop: &'a AtomicBool,
    state: State,
    last_saved: Option<(u64, PathBuf)>,
    last_loss: Option<MeasuredLoss>,
    /// After the last step, in half precision.
    loss_scale: Option<LossScale>,
    started: Instant,
    /// Steps and time since the last log line.
    pace: Pace,
    most_resident_bytes: Option<u64>,
    rank_times: RankTimes,
    options: EngineOptions,
    /// Held until nothing more is written: fields are dropped in their order. The folder that a
    /// run goes on from may be another than the one it writes.
    _ownership: [Option<Ownership>; 2],
}

/// Tokens per second over the last steps.
struct Pace {
    since: Instant,
    tokens: u64,
    rate: f64,
}

impl Pace {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            tokens: 0,
            rate: 0.0,
        }
    }

    /// Counts a step; the rate is over the steps since it was last reset.
    fn step(&mut self, tokens: u64) {
        self.tokens += tokens;
        self.rate = self.tokens as f64 / self.since.elapsed().as_secs_f64().max(1e-9);
    }

    fn reset(&mut self) {
        self.since = Instant::now();
        self.tokens = 0;
    }
}

impl<'a> Trainer<'a> {
    fn prepare(
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
        let (state, last_saved) = match run.resume {
            Resume::Fresh => {
                let seed = config.training.seed;
                match &first_weights {
                    None => session.initialize(seed)?,
                    Some(files) => session.load_pretrained(files, seed, run.progress)?,
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
        course = course.begun_at(&state.stage_starts);
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

    /// Has the session follow the stage that is trained.
    fn begin_stage(&mut self) {
        if self.course.num_stages() > 1 {
            self.state.stage_starts = self.course.starts().to_vec();
        }
        let mut phases = Vec::new();
        if let Architecture::Naics(shape) = &self.session.plan().config.model {
            for (stage, _) in shape.stretches() {
                phases.push((stage_phase(stage), self.course.span(stage).0));
            }
        }
        let span = self.course.span(self.state.stage);
        self.session.begin_stage(span, &phases);
    }

    /// Whether nothing has become better for as long as the settings say.
    fn is_tired(&self) -> bool {
        let patience = self.config().training.patience;
        patience > 0 && self.state.evaluations_since_best >= patience
    }

    /// Goes on to the next stage where the present one is over; false where none follows. Losses
    /// of two stages are of different pairs and not compared.
    fn advance(&mut self, observer: &mut dyn Observer) -> bool {
        let (step, stage) = (self.state.step, self.state.stage);
        let (_, end) = self.course.span(stage);
        if step < end && !self.is_tired() {
            return true;
        }
        if step < end {
            let patience = self.config().training.patience;
            let note = format!(
                "stopped early at step {step}: the last {patience} evaluations were no better than \
                 the best"
            );
            observer.event(Event::Note(&note));
            self.course.end_stage(stage, step);
        }
        if stage + 1 >= self.course.num_stages() {
            return false;
        }
        self.state.stage += 1;
        self.state.best_loss = None;
        self.state.best_step = None;
        self.state.evaluations_since_best = 0;
        self.state.top.clear();
        self.begin_stage();
        let (first, end) = self.course.span(self.state.stage);
        let name = self.data.stage_name(self.state.stage).unwrap_or_default();
        let note = format!("stage {name}: steps {} to {end}", first + 1);
        observer.event(Event::Note(&note));
        true
    }

    /// Sequences of the stage that were seen.
    fn stage_samples(&self) -> u64 {
        let (first, _) = self.course.span(self.state.stage);
        let steps = self.state.step.saturating_sub(first);
        steps * self.config().batch.effective_batch() as u64
    }

    /// Finds clusters anew with each epoch from the one on that the settings name.
    fn find_clusters(&mut self) -> Result<(), TrainError> {
        let (stage, config) = (self.state.stage, self.config());
        let epoch = self.data.epochs_of(stage, self.stage_samples()) as u64;
        let from = config.data.cluster_epoch;
        if from == 0 || epoch < from {
            self.state.clusters = None;
            return Ok(());
        }
        let known = self.state.clusters.as_ref();
        if known.is_some_and(|known| (known.stage, known.epoch) == (stage, epoch)) {
            return Ok(());
        }
        let (Some(taxonomy), Architecture::Naics(shape)) = (self.data.taxonomy(), &config.model)
        else {
            return Ok(());
        };
        let count = config.data.clusters.unwrap_or(taxonomy.num_groups());
        let lengths = shape.channel_lengths(config.batch.seq_len as u64);
        let lengths = lengths.map(|length| length as usize);
        let width = shape.embedding_width() as usize;
        let texts = taxonomy.entries().iter().map(|entry| &entry.channels[..]);
        let points = self.session.embed(&Naics::CHANNEL_NAMES, &lengths, texts)?;
        if let Some(points) = points {
            let vectors = cluster::tangents(&points, width);
            let found = cluster::clusters(&vectors, width - 1, count).into_iter();
            // Cards of two kinds may compute points in other last bits: all ranks leave out the
            // negatives that the first finds.
            let mut found: Vec<i32> = found.map(u32::cast_signed).collect();
            self.ranks.broadcast(&mut found)?;
            self.state.clusters = Some(Clusters {
                stage,
                epoch,
                of_texts: found.into_iter().map(i32::cast_unsigned).collect(),
            });
        }
        Ok(())
    }

    fn config(&self) -> &Config {
        &self.session.plan().config
    }

    fn is_told_to_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The same on all ranks; where there are several, a step asks them itself.
    fn stops_before_a_step(&self) -> bool {
        !self.ranks.are_several() && self.is_told_to_stop()
    }

    fn run(&mut self, observer: &mut dyn Observer) -> Result<TrainingOutcome, TrainError> {
        let training = self.config().training.clone();
        let validated = is_validated(&self.data, self.config());
        if validated && (self.state.evaluation_pending || self.state.step == 0) {
            let Some(loss) = self.evaluate(observer)? else {
                return self.end(Ending::Interrupted, observer);
            };
            if self.state.step == 0 {
                self.state.first_loss = Some(loss);
            }
        }
        self.state.evaluation_pending = false;
        self.pace.reset();
        while self.advance(observer) {
            if self.stops_before_a_step() || !self.step(observer)? {
                return self.end(Ending::Interrupted, observer);
            }
            let (step, last) = (self.state.step, self.state.step == self.course.max_steps());
            if self.has_ended_an_epoch() || last {
                self.write_sample(observer)?;
            }
            let (first, end) = self.course.span(self.state.stage);
            let due =
                |interval: u64, from: u64| interval > 0 && (step - from).is_multiple_of(interval);
            let interval = match training.eval_epochs {
                Some(epochs) => self.data.steps_of_epochs(self.state.stage, epochs),
                None => training.eval_interval,
            };
            if validated
                && (due(interval, first) || step == end)
                && self.evaluate(observer)?.is_none()
            {
                self.state.evaluation_pending = true;
                return self.end(Ending::Interrupted, observer);
            }
            if due(training.save_interval, 0) || last {
                self.save(observer)?;
            }
        }
        self.end(Ending::Finished, observer)
    }

    /// One step; false where it was cut off and nothing has changed.
    fn step(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let begun = Instant::now();
        let waited = self.ranks.waited();
        self.find_clusters()?;
        let at = (self.state.stage, self.stage_samples());
        let config = &self.session.plan().config;
        let (max_steps, interval) = (self.course.max_steps(), config.training.logging_steps);
        let clusters = self.state.clusters.as_ref();
        let clusters = clusters.map(|clusters| &clusters.of_texts[..]);
        let share = self.ranks.share();
        self.data
            .fill_training(at, share, clusters, config, &mut self.batch)?;
        let (batch, step, told) = (&self.batch, self.state.step, self.stop);
        let stop = &mut || told.load(Ordering::Relaxed);
        let Some(result) = self.session.train_step_unless(batch, step, stop)? else {
            return Ok(false);
        };
        if result.has_diverged(self.loss_scale) {
            return Err(TrainError::Diverged {
                step: self.state.step + 1,
                loss: result.loss,
                learning_rate: result.learning_rate,
                last: self.last_saved.as_ref().map(|(_, path)| path.clone()),
            });
        }
        self.loss_scale = result.loss_scale;
        let tokens = result.tokens;
        self.state.step += 1;
        self.state.samples += self.config().batch.effective_batch() as u64;
        self.state.tokens += tokens;
        if !is_validated(&self.data, self.config()) {
            self.state.first_loss.get_or_insert(result.loss);
            self.last_loss = Some(MeasuredLoss {
                step: self.state.step,
                loss: result.loss,
            });
        }
        self.pace.step(tokens);
        let step = self.state.step;
        let log = interval > 0 && (step.is_multiple_of(interval) || step == max_steps);
        let mut report = self.report(&result, max_steps, tokens);
        report.step_seconds = begun.elapsed().as_secs_f64();
        self.most_resident_bytes = self.most_resident_bytes.max(report.memory.resident_bytes);
        let waited = (self.ranks.waited() - waited).as_secs_f64();
        let resident = report.memory.resident_bytes;
        self.rank_times.step(report.step_seconds, waited, resident);
        if log {
            report.memory.device_used_bytes = self.device_used_bytes();
            let used = report.memory.device_used_bytes;
            self.rank_times
                .logged(&self.ranks, step, used, self.record.as_mut())?;
            if let Some(record) = &mut self.record {
                record.step(&report)?;
            }
            self.pace.reset();
        }
        observer.event(Event::Step { report, log });
        Ok(true)
    }

    /// Whether the last step was the last of a pass over the data.
    fn has_ended_an_epoch(&self) -> bool {
        let report = &self.data.report;
        let passes = |samples: u64| samples / report.training.max(1);
        let before = self.state.samples.saturating_sub(report.step_sequences);
        passes(before) < passes(self.state.samples)
    }

    /// Shows a text that the model writes, where the settings ask for one. What goes wrong with it
    /// is told, and keeps no run from going on; the loss of a rank does.
    fn write_sample(&self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let config = self.config();
        let reason = without_generation(&config.model).filter(|_| !embeds(&config.model));
        if let Some(reason) = reason.filter(|_| config.training.sample_tokens > 0) {
            observer.event(Event::Note(&format!("no text was written: {reason}")));
        }
        let of_run = self.data.tokenizer.as_ref();
        let planned = self.session.plan().sample();
        let (Some(of_run), Some(planned)) = (of_run, planned) else {
            return Ok(());
        };
        let step = self.state.step;
        let together = (&self.ranks, planned);
        match sample(&self.session, together, &of_run.tokenizer, self.options)? {
            None => {}
            Some(Ok(text)) => observer.event(Event::Sample { step, text: &text }),
            Some(Err(error)) => {
                observer.event(Event::Note(&format!("no text was written: {error}")));
            }
        }
        Ok(())
    }

    /// What is used of a GPU's memory. A card that cannot be asked keeps no run from going on.
    fn device_used_bytes(&self) -> Option<u64> {
        self.session.engine().cuda()?.used_bytes().ok()
    }

    /// A GPU that fails in the middle of a run takes everything since the last checkpoint with
    /// it, so the message says which one that is.
    fn with_last_checkpoint(&self, error: TrainError) -> TrainError {
        let last = self.last_checkpoint();
        let step = self.state.step + 1;
        let error = device_failed(error, step, last.clone());
        rank_lost(error, &self.ranks, step, last)
    }

    /// Where to go on from. Whoever was cut off while saving may have completed the checkpoint.
    fn last_checkpoint(&self) -> Option<PathBuf> {
        let entries = self.store.list().unwrap_or_default().into_iter();
        let mut of_this_step = entries.filter(|entry| entry.step == self.state.step);
        let last_saved = self.last_saved.as_ref().map(|(_, path)| path.clone());
        of_this_step.next().map(|entry| entry.path).or(last_saved)
    }

    fn report(&self, result: &StepResult, max_steps: u64, step_tokens: u64) -> StepReport {
        let left = (max_steps - self.state.step) * step_tokens;
        StepReport {
            step: self.state.step,
            max_steps,
            loss: result.loss,
            terms: match result.terms.len() {
                0 | 1 => Vec::new(),
                _ => result.terms.to_vec(),
            },
            learning_rate: result.learning_rate,
            gradient_norm: result.gradient_norm,
            loss_scale: result.loss_scale.map(|state| f64::from(state.scale)),
            skipped_steps: result.loss_scale.map(|state| state.skipped_steps as u64),
            tokens_per_second: self.pace.rate,
            tokens: self.state.tokens,
            epoch: self.epoch(),
            step_seconds: 0.0,
            memory: MemoryUse {
                arena_bytes: self.session.plan().arena_bytes(),
                planned_bytes: self.session.plan().total_bytes(),
                resident_bytes: resident_bytes(),
                device_used_bytes: None,
            },
            seconds_left: left as f64 / self.pace.rate.max(1e-9),
        }
    }

    /// Passes over the rows of the stage that is trained.
    fn epoch(&self) -> f64 {
        self.data.epochs_of(self.state.stage, self.stage_samples())
    }

    /// The mean loss over the stage's validation rows that the settings ask for; None where it was
    /// cut off. A new best is saved and marked.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<Option<f64>, TrainError> {
        let stage = self.state.stage;
        let config = self.config();
        let (micro, seq_len) = (config.batch.batch_size, config.batch.seq_len);
        let all = self.data.validation_of(stage).div_ceil(micro as u64);
        let batches = match config.training.eval_batches as u64 {
            0 => all,
            limit => all.min(limit),
        };
        // The stage's own graph: at its end the next step is in another.
        let (first, end) = self.course.span(stage);
        let phase = match self.course.num_stages() {
            1 => self.state.step,
            _ => self
                .state
                .step
                .clamp(first, end.saturating_sub(1).max(first)),
        };
        let mut batch = Batch::of_step(self.session.plan(), micro);
        let mut evaluation = Evaluation::default();
        let share = self.ranks.share();
        // All ranks run together, the last time also those for which nothing is left.
        for round in 0..batches.div_ceil(share.ranks as u64) {
            let told_to_stop = self.is_told_to_stop();
            if !self.ranks.are_several() && told_to_stop {
                return Ok(None);
            }
            let index = share.micro(round as usize) as u64;
            let number = index.min(batches - 1);
            self.data
                .fill_validation((stage, number * micro as u64), seq_len, &mut batch)?;
            let part = self.session.evaluate_at(&batch, phase)?;
            let own = (index < batches).then_some(&part);
            let Some(parts) = part.of_all(own, &self.ranks, told_to_stop)? else {
                return Ok(None);
            };
            parts.into_iter().for_each(|part| evaluation.add(part));
        }
        let loss = evaluation.loss();
        let step = self.state.step;
        self.last_loss = Some(MeasuredLoss { step, loss });
        let best = step > 0 && self.state.best_loss.is_none_or(|best| loss < best);
        observer.event(Event::Evaluated { step, loss, best });
        if let Some(record) = &mut self.record {
            record.evaluation(step, loss, &evaluation.means())?;
        }
        if step > 0 {
            self.state.evaluations_since_best = match best {
                true => 0,
                false => self.state.evaluations_since_best + 1,
            };
        }
        let is_among_top = step > 0 && self.enter_top(step, loss);
        if is_among_top && !best {
            self.save(observer)?;
        }
        if best && loss.is_finite() {
            self.state.best_loss = Some(loss);
            self.state.best_step = Some(step);
            self.save(observer)?;
            if self.ranks.is_first() {
                self.store.mark_best(step, loss)?;
            }
        }
        self.pace.reset();
        Ok(Some(loss))
    }

    /// Takes an evaluation among the lowest ones, if it is one of them and its checkpoint is kept.
    fn enter_top(&mut self, step: u64, loss: f64) -> bool {
        let count = self.config().training.save_top;
        let top = &mut self.state.top;
        if count == 0 || !loss.is_finite() || top.iter().any(|&(known, _)| known == step) {
            return false;
        }
        top.push((step, loss));
        top.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        top.truncate(count);
        top.iter().any(|&(known, _)| known == step)
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let step = self.state.step;
        // A run that was taken up from a checkpoint elsewhere has none of its own yet.
        let target = self.store.path_of(step);
        if self.last_saved == Some((step, target)) {
            return Ok(());
        }
        if self.ranks.is_first() {
            if let Some(record) = &mut self.record {
                record.sync()?;
            }
            mend_best(&self.store, &self.state, observer)?;
        }
        let path = self.write_checkpoint()?;
        if self.ranks.is_first() {
            self.tidy_checkpoints(&path, observer)?;
        }
        // Nobody goes on, or tells of a checkpoint, before it is there.
        self.ranks.barrier()?;
        observer.event(Event::Saved { step, path: &path });
        self.last_saved = Some((step, path));
        self.pace.reset();
        Ok(())
    }

    /// Writes weights, states and position: the first rank what all have alike, or all ranks
    /// together what they have in parts.
    fn write_checkpoint(&self) -> Result<PathBuf, TrainError> {
        let step = self.state.step;
        let state = self.state.to_json().map_err(|error| TrainError::State {
            path: self.store.path_of(step),
            problem: error.to_string(),
        })?;
        let (weights, states) = (self.session.weights(), self.session.states());
        if let Some(world) = self.ranks.world().filter(|_| self.session.is_cut()) {
            let Share { rank, ranks } = self.ranks.share();
            let parts = [weights.parts(rank, ranks), states.parts(rank, ranks)];
            let [weights, states] = &parts;
            let mut world = world.lock();
            let path = self
                .store
                .save_shared(step, weights, states, &state, &mut world)?;
            return Ok(path);
        }
        if !self.ranks.is_first() {
            return Ok(self.store.path_of(step));
        }
        let (weights, states) = (weights.views(), states.views());
        Ok(self.store.save(step, &weights, &states, &state)?)
    }

    /// What follows a save: adapters where other programs look for them, and old checkpoints gone.
    fn tidy_checkpoints(&self, path: &Path, observer: &mut dyn Observer) -> Result<(), TrainError> {
        if let Some(lora) = &self.config().tuning.lora {
            let config = self.config();
            keep_adapters(&config.output.output_dir, config, lora, path)?;
        }
        let training = &self.config().training;
        // Those with the lowest losses and the last, or the newest.
        let limit = match training.save_top {
            0 => training.save_total_limit,
            _ => 1,
        };
        if limit > 0 {
            let top: Vec<u64> = self.state.top.iter().map(|&(step, _)| step).collect();
            // Once more: writing large tensors takes long enough for the mark to change.
            mend_best(&self.store, &self.state, observer)?;
            self.store.prune_but(limit, &top)?;
        }
        Ok(())
    }

    fn end(
        &mut self,
        ending: Ending,
        observer: &mut dyn Observer,
    ) -> Result<TrainingOutcome, TrainError> {
        self.rank_times
            .collect(&self.ranks, self.state.step, self.record.as_mut())?;
        if self.state.step > 0 {
            self.save(observer)?;
        }
        if self.ranks.is_first() {
            mend_best(&self.store, &self.state, observer)?;
        }
        let best = match self.ranks.is_first() {
            true => self.store.best()?,
            false => None,
        };
        let validated = is_validated(&self.data, self.config());
        let first_loss = self.state.first_loss.map(|loss| MeasuredLoss {
            step: u64::from(!validated),
            loss,
        });
        Ok(TrainingOutcome {
            ending,
            step: self.state.step,
            max_steps: self.course.max_steps(),
            epoch: self.epoch(),
            first_loss,
            last_loss: self.last_loss,
            validated,
            checkpoint: self.last_saved.as_ref().map(|(_, path)| path.clone()),
            best: best.map(|best| MeasuredLoss {
                step: best.step,
                loss: best.metric,
            }),
            seconds: self.started.elapsed().as_secs_f64(),
            planned_bytes: self.session.plan().total_bytes(),
            most_resident_bytes: self.most_resident_bytes,
            ranks: self.rank_times.table(),
        })
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

/// What a tokenizer that was trained on the data is called in the run's folder.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

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

/// Whether the losses that the outcome names are validation losses. Where no evaluation falls
/// into the run, there is none before it either.
fn is_validated(data: &Data, config: &Config) -> bool {
    let training = &config.training;
    data.num_validation() > 0 && (1..=training.max_steps).contains(&training.eval_interval)
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

/// Sets a damaged mark of the best checkpoint aside: the run does not need it, and knows itself
/// which one is the best, unless that was removed or is another run's.
fn mend_best(store: &Store, state: &State, observer: &mut dyn Observer) -> Result<(), TrainError> {
    let Some(aside) = store.set_aside_damaged_best()? else {
        return Ok(());
    };
    let mut note = format!(
        "the mark of the best checkpoint was damaged and is kept as {}",
        cinch_files::shown(&aside)
    );
    if let (Some(step), Some(loss)) = (state.best_step, state.best_loss)
        && is_saved_best(&store.path_of(step), step, loss)
        && store.mark_best(step, loss).is_ok()
    {
        note += &format!("; step {step} is marked again");
    }
    observer.event(Event::Note(&note));
    Ok(())
}

/// Whether the checkpoint at `path` was saved as the best, with this loss.
fn is_saved_best(path: &Path, step: u64, loss: f64) -> bool {
    let Ok(saved) = checkpoint::load_state(path) else {
        return false;
    };
    State::from_json(path, saved)
        .is_ok_and(|saved| (saved.best_step, saved.best_loss) == (Some(step), Some(loss)))
}

/// The loss of another rank with the step it came in and the checkpoint to go on from; any other
/// error as it is.
fn rank_lost(error: TrainError, ranks: &Ranks, step: u64, last: Option<PathBuf>) -> TrainError {
    match error {
        TrainError::Ranks(RanksError::Lost(loss))
        | TrainError::Engine(EngineError::Ranks(RanksError::Lost(loss)))
        | TrainError::Checkpoint(CheckpointError::Ranks(RanksError::Lost(loss))) => {
            TrainError::RankLost {
                loss: Box::new(loss),
                num_ranks: ranks.share().ranks,
                step,
                last,
            }
        }
        other => other,
    }
}

/// The failure of a GPU with the step it came in and the checkpoint to go on from; any other
/// error as it is.
fn device_failed(error: TrainError, step: u64, last: Option<PathBuf>) -> TrainError {
    match error {
        TrainError::Engine(problem @ EngineError::Cuda { .. })
        | TrainError::Checkpoint(CheckpointError::Engine(problem @ EngineError::Cuda { .. })) => {
            TrainError::DeviceFailed {
                step,
                problem: Box::new(problem),
                last,
            }
        }
        other => other,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> TrainError {
        TrainError::Engine(EngineError::Cuda {
            action: "finish the step".to_owned(),
            problem: "CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure".to_owned(),
        })
    }

    #[test]
    fn a_failed_gpu_names_the_checkpoint_to_go_on_from() {
        let last = PathBuf::from("runs/a/checkpoints/step-00000500");
        let message = device_failed(lost(), 731, Some(last)).to_string();
        for part in [
            "at step 731",
            "CUDA_ERROR_LAUNCH_FAILED",
            "hint:",
            "--resume runs/a/checkpoints/step-00000500",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_failed_gpu_before_the_first_checkpoint_has_a_way_out_too() {
        let message = device_failed(lost(), 3, None).to_string();
        assert!(message.contains("nothing was saved"), "{message}");
        assert!(!message.contains("--resume"), "{message}");
    }

    #[test]
    fn other_errors_stay_what_they_are() {
        let error = device_failed(TrainError::NoTargets { step: 4 }, 9, None);
        assert!(matches!(error, TrainError::NoTargets { step: 4 }));
    }
}
