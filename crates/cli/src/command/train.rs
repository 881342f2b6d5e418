//! `cinch train`: plan, then train inside the plan.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use cinch_config::{Preset, Settings, Source, Value};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_train::checkpoint::{self, CheckpointError};
use cinch_train::{Ending, Event, Observer, Outcome, Resume, Run, State, train};
use serde_json::json;

use super::{open_run, print, print_json};
use crate::args::{SettingArguments, TrainArguments};
use crate::failure::{tell, usage};
use crate::overhead::{self, Measured};
use crate::progress::{DataBar, TrainBar, shown};
use crate::{device, table};

static STOP: AtomicBool = AtomicBool::new(false);

pub fn run(arguments: &TrainArguments) -> anyhow::Result<()> {
    let target = device::train_target(arguments.device)?;
    let (settings, resume) = settings(arguments)?;
    let mut config = settings.resolve()?;
    let mut notes = settings.notes();
    if target == Target::Cpu {
        notes.extend(device::adapt_to_cpu(&mut config));
    }
    notes.extend(device::default_budget(&mut config, target));
    if resume == Resume::Fresh && !settings.is_explicit("output.output_dir") {
        config.output.output_dir = free_folder(&config.output.output_dir)?;
    }
    let plan = cinch_fit::plan(&config, overhead::machine(target))?;
    let say = |text: &str| if arguments.json { Ok(()) } else { print(text) };
    say(&table::plan(&plan.report(target, false)))?;
    for note in notes {
        say(&format!("note: {note}"))?;
    }
    if plan.config.batch.batch_size != config.batch.batch_size {
        say(&format!(
            "note: micro batch {} × {} instead of {} × {}, to stay within the budget",
            plan.config.batch.batch_size,
            plan.config.batch.accumulation,
            config.batch.batch_size,
            config.batch.accumulation
        ))?;
    }
    stop_on_ctrl_c()?;
    let asked = asked_for(&settings, &config.output.output_dir);
    let run = Run {
        plan,
        settings: asked,
        resume,
        options: EngineOptions {
            threads: arguments.threads,
            tf32: arguments.tf32,
            deterministic: arguments.deterministic,
        },
        stop: &STOP,
        progress: &DataBar::default(),
    };
    let mut bar = TrainBar::new();
    let outcome = train(run, &mut |event: Event<'_>| {
        if let Event::Ready { engine, .. } = &event
            && let Ok(Some(measured)) = Measured::read(engine)
        {
            overhead::keep(&measured);
        }
        bar.event(event);
    });
    bar.finish();
    let outcome = outcome?;
    if arguments.json {
        print_json(&as_json(&outcome))
    } else {
        print(&describe(&outcome, &config.output.output_dir))
    }
}

/// The settings of a new run, or those of the checkpoint that is resumed with the flags on
/// top.
fn settings(arguments: &TrainArguments) -> anyhow::Result<(Settings, Resume)> {
    let flags = &arguments.settings;
    let Some(from) = &arguments.resume else {
        return Ok((flags.settings_over(new_run(flags)?)?, Resume::Fresh));
    };
    let run = match from {
        Some(folder) => folder.clone(),
        None => {
            let settings = flags.settings_over(new_run(flags)?)?;
            settings.resolve()?.output.output_dir
        }
    };
    let path = newest_checkpoint(&run)?;
    let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
    let mut settings = Settings::new();
    let file = path.join(checkpoint::STATE_FILE);
    for (key, value) in &state.settings {
        let source = Source::File {
            path: file.clone(),
            line: 0,
            column: 0,
        };
        settings.set(key, value, source)?;
    }
    // The run goes on in the folder it is found in, which may have been moved since.
    if let Some(folder) = run_of(&path) {
        let source = Source::Flag("--resume".to_owned());
        settings.set("output.output_dir", &folder.to_string_lossy(), source)?;
    }
    Ok((flags.settings_over(settings)?, Resume::From(path)))
}

/// The checkpoint that `--resume` means. A run that has none yet is told apart from a wrong path.
fn newest_checkpoint(run: &Path) -> anyhow::Result<PathBuf> {
    match checkpoint::resolve(&open_run(run)?, Some(run)) {
        Err(CheckpointError::NotACheckpoint { .. } | CheckpointError::NoCheckpoint { .. })
            if run.join("metrics.jsonl").is_file() =>
        {
            let run = shown(run);
            Err(usage(format!(
                "the run in {run} has no checkpoint: it ended before the first one was saved\n\
                 hint: start it again with the same flags and --output-dir {run}, without --resume"
            )))
        }
        result => Ok(result?),
    }
}

/// What a new run starts from: nothing, or the built-in example where no model was asked for.
fn new_run(flags: &SettingArguments) -> anyhow::Result<Settings> {
    let mut settings = Settings::new();
    if !flags.asks_for_a_model() {
        settings.apply_preset(Preset::Demo)?;
    }
    Ok(settings)
}

/// `<run>` of `<run>/checkpoints/step-…`; none for a checkpoint that lies elsewhere.
fn run_of(checkpoint: &Path) -> Option<&Path> {
    let checkpoints = checkpoint.parent()?;
    let run = match checkpoints.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        run => run,
    };
    checkpoints.ends_with("checkpoints").then_some(run)
}

/// The settings of the run, key by key, so that a resumed one starts from the same. A value that
/// a rule put in the place of another (half of a preset's batch, say) is one of them: what it was
/// worked out from is not known later.
fn asked_for(settings: &Settings, output_dir: &Path) -> BTreeMap<String, String> {
    let mut asked: BTreeMap<String, String> = settings
        .explain()
        .into_iter()
        .filter(|one| match one.source {
            Source::Default => false,
            Source::Derived(_) => !one.overridden.is_empty(),
            _ => true,
        })
        .map(|one| (one.key.to_owned(), exact(&one.value)))
        .collect();
    let folder = output_dir.to_string_lossy().into_owned();
    asked.insert("output.output_dir".to_owned(), folder);
    asked
}

/// A value as text that reads back the same: sizes are shown rounded elsewhere.
fn exact(value: &Value) -> String {
    match value {
        Value::Size(size) => format!("{}b", size.get()),
        other => other.to_string(),
    }
}

/// The folder itself, or the first of `folder-2`, `folder-3`, … that holds no run.
fn free_folder(folder: &Path) -> anyhow::Result<PathBuf> {
    for number in 1_u32.. {
        let candidate = if number == 1 {
            folder.to_owned()
        } else {
            PathBuf::from(format!("{}-{number}", folder.display()))
        };
        if !candidate.exists() {
            return Ok(candidate);
        }
    }
    Ok(folder.to_owned())
}

/// The first Ctrl-C ends the run after the step in progress, the second at once.
fn stop_on_ctrl_c() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::Relaxed) {
            #[expect(clippy::exit, reason = "the user asked twice")]
            std::process::exit(130);
        }
        tell("\nfinishing the step, then saving (Ctrl-C again to stop at once)");
    })
    .context("cannot listen for Ctrl-C")
}

fn describe(outcome: &Outcome, folder: &Path) -> String {
    let mut text = String::new();
    let kind = if outcome.validated {
        "validation"
    } else {
        "training"
    };
    if let (Some(first), Some(last)) = (outcome.first_loss, outcome.last_loss) {
        text += &format!(
            "{kind} loss {first:.4} before, {last:.4} after {} steps",
            outcome.step
        );
        if let Some((step, loss)) = outcome.best {
            text += &format!(" (best {loss:.4} at step {step})");
        }
        text.push('\n');
    }
    text += &format!("took {:.1} s\n", outcome.seconds);
    let run = shown(folder);
    if let Some(path) = &outcome.checkpoint {
        text += &format!("checkpoint: {}\n", shown(path));
    }
    match outcome.ending {
        Ending::Finished => {
            text += &format!(
                "sample from it: cinch generate {run} --prompt \"The memory of a training step\"\n\
                 curves: tensorboard --logdir {run}/tensorboard\n"
            );
        }
        Ending::Interrupted if outcome.checkpoint.is_none() => {
            text += "stopped before the first step: there is nothing to resume\n";
        }
        Ending::Interrupted => {
            text += &format!("stopped; go on with: cinch train --resume {run}\n");
        }
    }
    text
}

fn as_json(outcome: &Outcome) -> serde_json::Value {
    json!({
        "finished": outcome.ending == Ending::Finished,
        "step": outcome.step,
        "first_loss": outcome.first_loss,
        "last_loss": outcome.last_loss,
        "validated": outcome.validated,
        "best_step": outcome.best.map(|(step, _)| step),
        "best_loss": outcome.best.map(|(_, loss)| loss),
        "checkpoint": outcome.checkpoint,
        "seconds": outcome.seconds,
        "peak_resident_bytes": cinch_train::peak_resident_bytes(),
    })
}
