//! What a running command shows: bars on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cinch_data::Progress;
use cinch_engine::Engine;
use cinch_step::StepPlan;
use cinch_train::{DataReport, Event, Observer, StepReport};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::table::{counted, scaled, thousands, wrapped};
use crate::voice::{is_quiet, tell};

/// Bytes of text read, while data is prepared.
#[derive(Default)]
pub struct DataBar {
    bar: Mutex<Option<ProgressBar>>,
    stop: Option<&'static AtomicBool>,
}

impl DataBar {
    /// A bar whose work ends early once `stop` is set.
    pub fn until(stop: &'static AtomicBool) -> Self {
        Self {
            stop: Some(stop),
            ..Self::default()
        }
    }
}

impl Progress for DataBar {
    fn begin(&self, what: &str, total_bytes: u64) {
        let style = ProgressStyle::with_template(
            "{msg} [{bar:8}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}",
        );
        let bar = match is_quiet() {
            true => ProgressBar::hidden(),
            false => ProgressBar::new(total_bytes),
        };
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        if let Ok(mut slot) = self.bar.lock() {
            *slot = Some(bar);
        }
    }

    fn advance(&self, bytes: u64) {
        if let Ok(slot) = self.bar.lock()
            && let Some(bar) = slot.as_ref()
        {
            bar.inc(bytes);
        }
    }

    fn end(&self) {
        if let Ok(mut slot) = self.bar.lock()
            && let Some(bar) = slot.take()
        {
            bar.finish_and_clear();
        }
    }

    fn is_interrupted(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }
}

/// Which share of the work is done, on a terminal.
pub struct ShareBar(ProgressBar);

impl ShareBar {
    const WHOLE: u64 = 1000;

    pub fn new(what: &'static str) -> Self {
        let bar = match std::io::stderr().is_terminal() && !is_quiet() {
            true => ProgressBar::new(Self::WHOLE),
            false => ProgressBar::hidden(),
        };
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:24}] {percent} % eta {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what);
        Self(bar)
    }

    pub fn tell(&self, share: f64) {
        self.0.set_position((share * Self::WHOLE as f64) as u64);
    }
}

impl Drop for ShareBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A sign of life on a terminal while something is computed whose length nobody knows.
pub struct Waiting(ProgressBar);

impl Waiting {
    pub fn new(what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() || is_quiet() {
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
    /// On a terminal, once steps begin.
    bar: Option<ProgressBar>,
    data: Option<DataReport>,
}

impl TrainBar {
    pub fn new() -> Self {
        Self {
            bar: None,
            data: None,
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            _ if is_quiet() => {}
            Some(bar) => bar.println(text),
            None => tell(text),
        }
    }

    fn step(&self, report: &StepReport, log: bool) {
        let pace = format!(
            "{}tok/s  eta {:#}",
            scaled(report.tokens_per_second),
            eta(report)
        );
        let epoch = fraction(report.epoch);
        let StepReport {
            loss,
            gradient_norm,
            learning_rate,
            ..
        } = report;
        let scale = format!("{}{}", terms(report), loss_scale(report));
        if let Some(bar) = &self.bar {
            bar.set_message(format!(
                "epoch {epoch}  loss {loss:.4}  |g| {gradient_norm:.2}  {scale}{pace}"
            ));
            bar.set_position(report.step);
        } else if log {
            self.line(&format!(
                "step {}/{}  epoch {epoch}  loss {loss:.4}  lr {learning_rate:.1e}  \
                 |g| {gradient_norm:.2}  {scale}{pace}",
                report.step, report.max_steps
            ));
        }
    }

    fn begin(&mut self, plan: &StepPlan, step: u64, engine: &Engine) {
        let max_steps = plan.config.training.max_steps;
        if step >= max_steps {
            return self.line(&format!(
                "step {step} of {max_steps} is done already: a larger --max-steps goes on"
            ));
        }
        let passes = self.data.map_or_else(String::new, |data| {
            format!(", {} over the data", epochs(data.epochs()))
        });
        self.line(&format!(
            "training steps {} to {max_steps} on {}{passes}",
            step + 1,
            engine.describe()
        ));
        if std::io::stderr().is_terminal() && !is_quiet() {
            let bar = ProgressBar::new(max_steps);
            // A message that is too long for the terminal is cut, not wrapped.
            let style = ProgressStyle::with_template("step {pos}/{len} [{bar:8}] {wide_msg}");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_position(step);
            self.bar = Some(bar);
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// What there is to train on.
fn describe_data(data: &DataReport) -> String {
    format!(
        "data: {} in {}{}\n      {} to train on, {} to validate, of {} each",
        counted(data.tokens, "token"),
        counted(data.documents, "document"),
        if data.cached { " (from the cache)" } else { "" },
        counted(data.training, "sequence"),
        thousands(data.validation),
        counted(data.seq_len, "token"),
    )
}

/// Columns of a message on standard error, which may go to a file.
const WIDTH: usize = 80;

/// What is to be expected of very little data, and what to do.
fn small_data_warning(data: &DataReport) -> Option<String> {
    if !data.is_small() {
        return None;
    }
    let meaning = if data.is_less_than_a_step() {
        format!(
            "A step takes {}: it repeats the same text",
            counted(data.step_sequences, "sequence")
        )
    } else {
        "That is about a page".to_owned()
    };
    let warning = format!(
        "warning: the data has {}, {} of {} to train on. {meaning}, and the model will learn it \
         by heart.",
        counted(data.tokens, "token"),
        counted(data.training, "sequence"),
        counted(data.seq_len, "token"),
    );
    let hint = "hint: give more text with --data-dir, or shorter and fewer sequences a step with \
                --seq-len, --batch-size and --grad-accum";
    Some(format!(
        "{}\n{}",
        wrapped(&warning, "warning: ".len(), WIDTH),
        wrapped(hint, "hint: ".len(), WIDTH)
    ))
}

/// A number of passes: enough digits to see it change.
fn fraction(passes: f64) -> String {
    match passes {
        10.0.. => format!("{passes:.1}"),
        0.1.. => format!("{passes:.2}"),
        _ => format!("{passes:.4}"),
    }
}

/// `0.25 epochs`.
pub fn epochs(passes: f64) -> String {
    let text = fraction(passes);
    let plural = if text == "1.00" { "" } else { "s" };
    format!("{text} epoch{plural}")
}

/// The terms of the loss, where there are several. The one that language models have is named for
/// what it is: what they add up to is the loss.
fn terms(report: &StepReport) -> String {
    let terms = report.terms.iter().map(|term| {
        let name = match &*term.name {
            "loss" => "cross entropy",
            name => name,
        };
        format!("{name} {:.4}  ", term.value)
    });
    terms.collect()
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
    cinch_files::shown(path).to_string()
}

/// A text of the model on one line, nothing of which a terminal takes for more than text.
fn quoted(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect()
}

impl Observer for TrainBar {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Data(data) => {
                self.line(&describe_data(&data));
                if let Some(warning) = small_data_warning(&data) {
                    self.line(&warning);
                }
                self.data = Some(data);
            }
            Event::Ready { plan, step, engine } => self.begin(plan, step, engine),
            Event::Step { report, log } => self.step(&report, log),
            Event::Evaluated { step, loss, best } => self.line(&format!(
                "step {step}: validation loss {loss:.4}, perplexity {:.2}{}",
                loss.exp(),
                if best { " (best so far)" } else { "" }
            )),
            Event::Sample { step, text } => {
                self.line(&format!("step {step} writes: {}", quoted(text)))
            }
            Event::Saved { step, path } => {
                self.line(&format!("step {step}: saved {}", shown(path)));
            }
            Event::Note(text) => self.line(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: DataReport = DataReport {
        tokens: 340,
        documents: 1,
        training: 1,
        validation: 0,
        cached: false,
        seq_len: 256,
        step_sequences: 8,
        max_steps: 100,
    };

    #[test]
    fn little_data_is_warned_of_with_a_way_out() {
        let warning = small_data_warning(&DATA).unwrap();
        for part in ["340 tokens", "1 sequence of 256", "8 sequences", "hint:"] {
            assert!(warning.contains(part), "no {part} in {warning}");
        }
        assert!(warning.lines().all(|line| line.len() <= WIDTH), "{warning}");
        let page = DataReport {
            step_sequences: 1,
            ..DATA
        };
        let warning = small_data_warning(&page).unwrap();
        assert!(!warning.contains("A step takes"), "{warning}");
        let enough = DataReport {
            tokens: 100_000,
            training: 380,
            ..DATA
        };
        assert_eq!(small_data_warning(&enough), None);
    }

    #[test]
    fn epochs_have_the_digits_that_change() {
        assert_eq!(epochs(1.0), "1.00 epoch");
        assert_eq!(epochs(0.25), "0.25 epochs");
        assert_eq!(epochs(0.001), "0.0010 epochs");
        assert_eq!(epochs(123.456), "123.5 epochs");
    }
}
