//! What a running command shows: bars on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use cinch_config::Bytes;
use cinch_data::Progress;
use cinch_train::{Event, Observer, StepReport, resident_bytes};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::failure::tell;
use crate::table::{scaled, thousands};

/// Bytes of text read, while data is prepared.
#[derive(Default)]
pub struct DataBar(Mutex<Option<ProgressBar>>);

impl Progress for DataBar {
    fn begin(&self, what: &str, total_bytes: u64) {
        let style = ProgressStyle::with_template(
            "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}",
        );
        let bar = ProgressBar::new(total_bytes);
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        if let Ok(mut slot) = self.0.lock() {
            *slot = Some(bar);
        }
    }

    fn advance(&self, bytes: u64) {
        if let Ok(slot) = self.0.lock()
            && let Some(bar) = slot.as_ref()
        {
            bar.inc(bytes);
        }
    }

    fn end(&self) {
        if let Ok(mut slot) = self.0.lock()
            && let Some(bar) = slot.take()
        {
            bar.finish_and_clear();
        }
    }
}

/// A sign of life on a terminal while something is computed whose length nobody knows.
pub struct Waiting(ProgressBar);

impl Waiting {
    pub fn new(what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The progress of a training run, on standard error.
pub struct TrainBar {
    bar: ProgressBar,
    live: bool,
    planned: u64,
    budget: Option<u64>,
    on_gpu: bool,
}

impl TrainBar {
    pub fn new() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            live: std::io::stderr().is_terminal(),
            planned: 0,
            budget: None,
            on_gpu: false,
        }
    }

    fn line(&self, text: &str) {
        if self.live {
            self.bar.println(text);
        } else {
            tell(text);
        }
    }

    fn describe(&self, report: &StepReport) -> String {
        // On a GPU the arena is all there is: what was planned is what is used.
        let resident = resident_bytes().filter(|_| !self.on_gpu);
        let memory = resident.unwrap_or(self.planned);
        let budget = self.budget.unwrap_or(self.planned);
        format!(
            "loss {:.4}  lr {:.2e}  |g| {:.2}  {}{}tok/s  mem {}/{}",
            report.loss,
            report.learning_rate,
            report.gradient_norm,
            loss_scale(report),
            scaled(report.tokens_per_second),
            Bytes::new(memory),
            Bytes::new(budget)
        )
    }

    fn step(&self, report: &StepReport, log: bool) {
        let text = self.describe(report);
        if self.live {
            self.bar.set_position(report.step);
            self.bar.set_message(format!("{text}  eta {}", eta(report)));
        }
        if log && !self.live {
            self.line(&format!(
                "step {}/{}  {text}  eta {}",
                report.step,
                report.max_steps,
                eta(report)
            ));
        }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// In half precision, what the loss is multiplied by, and how often that was too much.
fn loss_scale(report: &StepReport) -> String {
    let (Some(scale), Some(skipped)) = (report.loss_scale, report.skipped_steps) else {
        return String::new();
    };
    match skipped {
        0 => format!("scale {scale}  "),
        1 => format!("scale {scale} (1 step skipped)  "),
        _ => format!("scale {scale} ({skipped} steps skipped)  "),
    }
}

fn eta(report: &StepReport) -> HumanDuration {
    let seconds = report.seconds_left.clamp(0.0, 1e9);
    HumanDuration(Duration::from_secs_f64(seconds))
}

/// A path as a user would type it: relative where it can be.
pub fn shown(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let path = path.strip_prefix(&here).unwrap_or(path);
    path.display().to_string()
}

impl Observer for TrainBar {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Data {
                tokens,
                documents,
                training,
                validation,
                cached,
            } => self.line(&format!(
                "data: {} tokens in {} documents{}, {} sequences to train on, {} to validate",
                thousands(tokens),
                thousands(documents),
                if cached { " (from the cache)" } else { "" },
                thousands(training),
                thousands(validation)
            )),
            Event::Ready { plan, step, engine } => {
                self.on_gpu = engine.cuda().is_some();
                self.planned = plan.total_bytes();
                self.budget = plan.config.batch.budget.map(Bytes::get);
                let max_steps = plan.config.training.max_steps;
                if step >= max_steps {
                    self.line(&format!(
                        "step {step} of {max_steps} is done already: a larger --max-steps goes on"
                    ));
                    return;
                }
                self.line(&format!(
                    "training steps {} to {max_steps} on {}",
                    step + 1,
                    engine.describe()
                ));
                if self.live {
                    self.bar = ProgressBar::new(max_steps);
                    let style = ProgressStyle::with_template(
                        "step {pos}/{len} [{bar:20}] {msg} [{elapsed}]",
                    );
                    if let Ok(style) = style {
                        self.bar.set_style(style.progress_chars("=> "));
                    }
                    self.bar.set_position(step);
                }
            }
            Event::Step { report, log } => self.step(&report, log),
            Event::Evaluated { step, loss, best } => self.line(&format!(
                "step {step}: validation loss {loss:.4}, perplexity {:.2}{}",
                loss.exp(),
                if best { " (best so far)" } else { "" }
            )),
            Event::Saved { step, path } => {
                self.line(&format!("step {step}: saved {}", shown(path)));
            }
            Event::Note(text) => self.line(text),
        }
    }
}
