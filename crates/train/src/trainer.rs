//! A run: data in, steps, evaluations, checkpoints and a record out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cinch_config::Config;
use cinch_data::{Corpus, DataOptions, Progress, Source, Split, Tokenizer, TokenizerSpec};
use cinch_engine::{EngineError, EngineOptions};
use cinch_graph::op::LossScale;
use cinch_step::StepPlan;
use serde::Serialize;

use crate::checkpoint::{self, Store};
use crate::error::TrainError;
use crate::event::{Event, Observer, StepReport};
use crate::record::{EventWriter, MetricsLog};
use crate::session::{Batch, Session};
use crate::state::State;
use crate::step::StepResult;

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
    /// Set from outside to end the run after the step in progress.
    pub stop: &'a AtomicBool,
    /// Shown while the data is tokenised.
    pub progress: &'a dyn Progress,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Finished,
    Interrupted,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub ending: Ending,
    pub step: u64,
    /// Before the first step of the run, or at it where no evaluation was due.
    pub first_loss: Option<f64>,
    pub last_loss: Option<f64>,
    /// Whether those two are validation losses.
    pub validated: bool,
    pub checkpoint: Option<PathBuf>,
    pub best: Option<(u64, f64)>,
    pub seconds: f64,
}

/// One line of `metrics.jsonl` for an evaluation.
#[derive(Serialize)]
struct Validation {
    validation_loss: f64,
    validation_perplexity: f64,
}

/// Trains until the last step or until told to stop.
pub fn train(run: Run<'_>, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
    let mut trainer = Trainer::prepare(run, observer)?;
    let outcome = trainer.run(observer);
    let outcome = outcome.map_err(|error| trainer.with_last_checkpoint(error));
    // What was logged is on disk even if the run failed.
    trainer.events.flush()?;
    outcome
}

struct Trainer<'a> {
    session: Session,
    data: Data,
    batch: Batch,
    store: Store,
    metrics: MetricsLog,
    events: EventWriter,
    stop: &'a AtomicBool,
    state: State,
    last_saved: Option<(u64, PathBuf)>,
    last_loss: Option<f64>,
    /// After the last step, in half precision.
    loss_scale: Option<LossScale>,
    started: Instant,
    /// Steps and time since the last log line.
    pace: Pace,
}

struct Data {
    training: Split,
    validation: Split,
    fingerprint: String,
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
    fn prepare(run: Run<'a>, observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let config = run.plan.config.clone();
        let folder = config.output.output_dir.clone();
        let store = Store::open(&folder)?;
        if run.resume == Resume::Fresh
            && let Some(entry) = store.newest()?
        {
            return Err(TrainError::RunExists {
                folder,
                step: entry.step,
            });
        }
        let data = Data::prepare(&config, run.progress, observer)?;
        let mut session = Session::new(run.plan, run.options)?;
        let (state, last_saved) = match run.resume {
            Resume::Fresh => {
                session.initialize(config.training.seed)?;
                let state = State {
                    format: State::FORMAT,
                    step: 0,
                    samples: 0,
                    tokens: 0,
                    seed: config.training.seed,
                    best_loss: None,
                    best_step: None,
                    first_loss: None,
                    corpus: data.fingerprint.clone(),
                    config: config.clone(),
                    settings: run.settings,
                };
                (state, None)
            }
            Resume::From(path) => {
                let (mut state, note) = resume(&mut session, &path, &data, &config)?;
                if let Some(note) = note {
                    observer.event(Event::Note(&note));
                }
                state.config = config.clone();
                state.settings = run.settings;
                store.set_aside_after(state.step)?;
                // A kill between the save of a best checkpoint and its mark left it unmarked.
                if state.best_step == Some(state.step)
                    && let Some(loss) = state.best_loss
                    && path == store.path_of(state.step)
                {
                    store.mark_best(state.step, loss)?;
                }
                let step = state.step;
                (state, Some((step, path)))
            }
        };
        let (metrics, events) = if last_saved.is_some() {
            (
                MetricsLog::resume(&folder, state.step)?,
                EventWriter::resume(folder.join("tensorboard"), state.step)?,
            )
        } else {
            (
                MetricsLog::create(&folder)?,
                EventWriter::create(folder.join("tensorboard"))?,
            )
        };
        observer.event(Event::Ready {
            plan: session.plan(),
            step: state.step,
            engine: session.engine(),
        });
        let sequences = config.batch.effective_batch();
        Ok(Self {
            batch: Batch::new(sequences, config.batch.seq_len),
            session,
            data,
            store,
            metrics,
            events,
            stop: run.stop,
            state,
            last_saved,
            last_loss: None,
            loss_scale: None,
            started: Instant::now(),
            pace: Pace::new(),
        })
    }

    fn config(&self) -> &Config {
        &self.session.plan().config
    }

    /// Whether the losses that the outcome names are validation losses. Where no evaluation falls
    /// into the run, there is none before it either.
    fn validated(&self) -> bool {
        let training = &self.config().training;
        !self.data.validation.is_empty()
            && (1..=training.max_steps).contains(&training.eval_interval)
    }

    fn run(&mut self, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        let training = self.config().training.clone();
        let validated = self.validated();
        if self.state.step == 0 && validated {
            let loss = self.evaluate(observer)?;
            self.state.first_loss = Some(loss);
            self.last_loss = Some(loss);
        }
        self.pace.reset();
        while self.state.step < training.max_steps {
            if self.stop.load(Ordering::Relaxed) {
                return self.end(Ending::Interrupted, validated, observer);
            }
            self.step(observer)?;
            let (step, last) = (self.state.step, self.state.step == training.max_steps);
            let due = |interval: u64| interval > 0 && step.is_multiple_of(interval);
            if validated && (due(training.eval_interval) || last) {
                let loss = self.evaluate(observer)?;
                self.last_loss = Some(loss);
            }
            if due(training.save_interval) || last {
                self.save(observer)?;
            }
        }
        self.end(Ending::Finished, validated, observer)
    }

    fn step(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let config = self.config();
        let (seed, seq_len) = (config.training.seed, config.batch.seq_len);
        let (max_steps, interval) = (config.training.max_steps, config.training.logging_steps);
        self.data
            .fill_training(self.state.samples, seed, seq_len, &mut self.batch);
        let result = self.session.train_step(&self.batch, self.state.step)?;
        if result.has_diverged(self.loss_scale) {
            return Err(TrainError::Diverged {
                step: self.state.step + 1,
                loss: result.loss,
                learning_rate: result.learning_rate,
                last: self.last_saved.as_ref().map(|(_, path)| path.clone()),
            });
        }
        self.loss_scale = result.loss_scale;
        let tokens = self.batch.tokens.len() as u64;
        self.state.step += 1;
        self.state.samples += tokens / seq_len as u64;
        self.state.tokens += tokens;
        self.state.first_loss.get_or_insert(result.loss);
        if !self.validated() {
            self.last_loss = Some(result.loss);
        }
        self.pace.step(tokens);
        let report = self.report(&result, max_steps, tokens);
        let log =
            interval > 0 && (report.step.is_multiple_of(interval) || report.step == max_steps);
        if log {
            self.record(&report)?;
            self.pace.reset();
        }
        observer.event(Event::Step { report, log });
        Ok(())
    }

    /// A GPU that fails in the middle of a run takes everything since the last checkpoint with
    /// it, so the message says which one that is.
    fn with_last_checkpoint(&self, error: TrainError) -> TrainError {
        let last = self.last_saved.as_ref().map(|(_, path)| path.clone());
        device_failed(error, self.state.step + 1, last)
    }

    fn report(&self, result: &StepResult, max_steps: u64, step_tokens: u64) -> StepReport {
        let left = (max_steps - self.state.step) * step_tokens;
        StepReport {
            step: self.state.step,
            max_steps,
            loss: result.loss,
            learning_rate: result.learning_rate,
            gradient_norm: result.gradient_norm,
            loss_scale: result.loss_scale.map(|state| f64::from(state.scale)),
            skipped_steps: result.loss_scale.map(|state| state.skipped_steps as u64),
            tokens_per_second: self.pace.rate,
            tokens: self.state.tokens,
            seconds_left: left as f64 / self.pace.rate.max(1e-9),
        }
    }

    fn record(&mut self, report: &StepReport) -> Result<(), TrainError> {
        self.metrics.append(report.step, report)?;
        for (tag, value) in [
            ("train/loss", report.loss),
            ("train/learning_rate", report.learning_rate),
            ("train/gradient_norm", report.gradient_norm),
            ("train/tokens_per_second", report.tokens_per_second),
        ] {
            self.events.scalar(tag, report.step, value as f32)?;
        }
        if let Some(scale) = report.loss_scale {
            self.events
                .scalar("train/loss_scale", report.step, scale as f32)?;
        }
        self.events.flush()?;
        Ok(())
    }

    /// The mean loss over the validation windows that the settings ask for. A new best is
    /// saved and marked.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<f64, TrainError> {
        let config = self.config();
        let (micro, seq_len) = (config.batch.batch_size, config.batch.seq_len);
        let all = self.data.validation.len().div_ceil(micro as u64);
        let batches = match config.training.eval_batches as u64 {
            0 => all,
            limit => all.min(limit),
        };
        let mut batch = Batch::new(micro, seq_len);
        let (mut loss, mut targets) = (0.0, 0);
        for index in 0..batches {
            self.data
                .fill_validation(index * micro as u64, seq_len, &mut batch);
            let (batch_loss, batch_targets) = self.session.evaluate(&batch)?;
            loss += batch_loss;
            targets += batch_targets;
        }
        let loss = loss / targets.max(1) as f64;
        let step = self.state.step;
        let best = step > 0 && self.state.best_loss.is_none_or(|best| loss < best);
        observer.event(Event::Evaluated { step, loss, best });
        self.metrics.append(
            step,
            &Validation {
                validation_loss: loss,
                validation_perplexity: loss.exp(),
            },
        )?;
        self.events.scalar("validation/loss", step, loss as f32)?;
        self.events.flush()?;
        if best && loss.is_finite() {
            self.state.best_loss = Some(loss);
            self.state.best_step = Some(step);
            self.save(observer)?;
            self.store.mark_best(step, loss)?;
        }
        self.pace.reset();
        Ok(loss)
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let step = self.state.step;
        if self
            .last_saved
            .as_ref()
            .is_some_and(|(saved, _)| *saved == step)
        {
            return Ok(());
        }
        self.metrics.sync()?;
        self.events.flush()?;
        let state = self.state.to_json().map_err(|error| TrainError::State {
            path: self.store.path_of(step),
            problem: error.to_string(),
        })?;
        let (weights, states) = (self.session.weights()?, self.session.states()?);
        let path = self
            .store
            .save(step, &weights.views(), &states.views(), &state)?;
        observer.event(Event::Saved { step, path: &path });
        self.last_saved = Some((step, path));
        let limit = self.config().training.save_total_limit;
        if limit > 0 {
            self.store.prune(limit)?;
        }
        self.pace.reset();
        Ok(())
    }

    fn end(
        &mut self,
        ending: Ending,
        validated: bool,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        if self.state.step > 0 {
            self.save(observer)?;
        }
        let best = self.store.best()?;
        Ok(Outcome {
            ending,
            step: self.state.step,
            first_loss: self.state.first_loss,
            last_loss: self.last_loss,
            validated,
            checkpoint: self.last_saved.as_ref().map(|(_, path)| path.clone()),
            best: best.map(|best| (best.step, best.metric)),
            seconds: self.started.elapsed().as_secs_f64(),
        })
    }
}

impl Data {
    fn prepare(
        config: &Config,
        progress: &dyn Progress,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let spec: TokenizerSpec = match config.data.tokenizer.parse() {
            Ok(spec) => spec,
            Err(never) => match never {},
        };
        let tokenizer = Tokenizer::load(&spec)?;
        let vocabulary = config.model.vocab_size();
        if tokenizer.vocab_size() > vocabulary {
            return Err(TrainError::Vocabulary {
                tokenizer: config.data.tokenizer.clone(),
                tokens: tokenizer.vocab_size(),
                vocabulary,
            });
        }
        let source = match &config.data.source {
            None => Source::Embedded,
            Some(path) if path.is_file() => Source::File(path.clone()),
            Some(path) => Source::Folder(path.clone()),
        };
        let options = DataOptions {
            source,
            tokenizer: spec,
            text_column: config.data.text_column.clone(),
            cache_dir: config.data.cache_dir.clone(),
        };
        let corpus = Corpus::prepare(&options, &tokenizer, progress)?;
        let windows = corpus.windows(config.batch.seq_len)?;
        let (training, validation) = windows.split(config.data.val_split, config.training.seed);
        observer.event(Event::Data {
            tokens: corpus.num_tokens(),
            documents: corpus.num_documents(),
            training: training.len(),
            validation: validation.len(),
            cached: corpus.was_cached(),
        });
        Ok(Self {
            training,
            validation,
            fingerprint: corpus.fingerprint().to_owned(),
        })
    }

    fn fill_training(&self, samples: u64, seed: u64, seq_len: usize, batch: &mut Batch) {
        let tokens = batch.tokens.chunks_exact_mut(seq_len);
        let targets = batch.targets.chunks_exact_mut(seq_len);
        for (sample, (tokens, targets)) in (samples..).zip(tokens.zip(targets)) {
            self.training.fill(sample, seed, tokens, targets);
        }
    }

    fn fill_validation(&self, first: u64, seq_len: usize, batch: &mut Batch) {
        let tokens = batch.tokens.chunks_exact_mut(seq_len);
        let targets = batch.targets.chunks_exact_mut(seq_len);
        for (index, (tokens, targets)) in (first..).zip(tokens.zip(targets)) {
            self.validation.fill_in_order(index, tokens, targets);
        }
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
    if state.corpus != data.fingerprint {
        let source = config.data.source.as_ref();
        return Err(TrainError::OtherData {
            path: path.to_owned(),
            saved: state.corpus,
            now: data.fingerprint.clone(),
            source_name: source.map_or_else(
                || "the embedded text".to_owned(),
                |source| source.display().to_string(),
            ),
        });
    }
    let note = session
        .load(&loaded.model, &loaded.optimizer)
        .map_err(|problem| TrainError::OtherModel {
            path: path.to_owned(),
            problem,
        })?;
    Ok((state, note))
}

/// The failure of a GPU with the step it came in and the checkpoint to go on from; any other
/// error as it is.
fn device_failed(error: TrainError, step: u64, last: Option<PathBuf>) -> TrainError {
    match error {
        TrainError::Engine(problem @ EngineError::Cuda { .. }) => TrainError::DeviceFailed {
            step,
            problem,
            last,
        },
        other => other,
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
