//! A run: data in, steps, evaluations, checkpoints and a record out.

mod origin;
mod preparing;
mod saving;

pub use preparing::TOKENIZER_FILE;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cinch_architecture::{Architecture, Naics};
use cinch_config::Config;
use cinch_data::Progress;
use cinch_device::resident_bytes;
use cinch_engine::EngineOptions;
use cinch_graph::op::LossScale;
use cinch_model::{embeds, stage_phase, without_generation};
use cinch_ranks::SharedWorld;
use cinch_step::StepPlan;

use self::saving::{mend_best, rank_lost};
use crate::batch::Batch;
use crate::checkpoint::Store;
use crate::cluster;
use crate::curriculum::Course;
use crate::data::Data;
use crate::error::TrainError;
use crate::event::{Event, MemoryUse, Observer, StepReport};
use crate::outcome::{Ending, MeasuredLoss, TrainingOutcome};
use crate::owner::Ownership;
use crate::rank_times::RankTimes;
use crate::ranks::Ranks;
use crate::record::RunRecord;
use crate::sample::sample;
use crate::session::Session;
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
        self.tell_of_no_samples(observer);
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

    /// Says, once, that a model writes no texts where the settings ask for some.
    fn tell_of_no_samples(&self, observer: &mut dyn Observer) {
        let config = self.config();
        let reason = without_generation(&config.model).filter(|_| !embeds(&config.model));
        if let Some(reason) = reason.filter(|_| config.training.sample_tokens > 0) {
            observer.event(Event::Note(&format!("no texts are written: {reason}")));
        }
    }

    /// Shows a text that the model writes, where the settings ask for one. What goes wrong with it
    /// is told, and keeps no run from going on; the loss of a rank does.
    fn write_sample(&self, observer: &mut dyn Observer) -> Result<(), TrainError> {
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

    /// What this rank uses of a GPU's memory. A card that cannot be asked keeps no run from going on.
    fn device_used_bytes(&self) -> Option<u64> {
        self.session.engine().cuda()?.own_used_bytes().ok()
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

/// Whether the losses that the outcome names are validation losses. Where no evaluation falls
/// into the run, there is none before it either.
fn is_validated(data: &Data, config: &Config) -> bool {
    let training = &config.training;
    data.num_validation() > 0 && (1..=training.max_steps).contains(&training.eval_interval)
}
