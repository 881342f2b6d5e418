//! `cinch train`: plan, then train inside the plan.

use std::collections::BTreeMap;
use std::path::Path;

use cinch_config::{Bytes, Config, Settings, Source, Value};
use cinch_data::{Corpus, DataError};
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_train::{
    Ending, Event, MeasuredLoss, Observer, Ownership, Run, TrainError, TrainingOutcome, train_owned,
};
use serde_json::json;

use super::{ahead, print, print_all, print_json};
use crate::args::TrainArguments;
use crate::failure::{Interrupted, usage};
use crate::model_folder::words_of;
use crate::overhead;
use crate::progress::{DataBar, TrainBar, epochs, shown};
use crate::ranks::Rank;
use crate::run::AskedRun;
use crate::settings::refuse_unread_data;
use crate::unfollowed::before_figures;
use crate::voice::{self, tell};
use crate::{device, interrupt, resume, table};

/// The first Ctrl-C ends the run after the micro batch in progress, the second at once.
const STOPPING: &str =
    "stopping: the last whole step is saved (Ctrl-C again to stop without saving)";

pub fn run(arguments: &TrainArguments) -> anyhow::Result<()> {
    let mut rank = Rank::of_process()?;
    let target = device::train_target(arguments.device)?;
    let from = arguments.resume.as_ref().map(Option::as_deref);
    let mut owned = None;
    let mut asked = AskedRun::new(
        &arguments.settings.about(arguments.subject.as_deref())?,
        from,
        target,
        rank.num_ranks(),
        |folder| {
            if rank.is_first() {
                owned = take_run(folder)?;
            }
            Ok(())
        },
    )?;
    refuse_unread_data(&asked.settings)?;
    rank.join(&mut asked, target)?;
    let plan = rank.plan(&asked, &arguments.settings.plain.memory, target)?;
    voice::explain(&asked.settings);
    voice::aside(arguments.settings.plain.memory.board_note());
    if !arguments.json && !voice::is_quiet() {
        let report = asked.report(&plan, target).plan;
        let cut = asked.cut_note(&plan.config.batch);
        let cache = device::cache_note(target);
        let stored = device::stored_note(&plan);
        ahead(print(&asked.describe()))?;
        let unfollowed = before_figures(&asked.settings, &plan.config);
        ahead(print_all(&voice::notes(&unfollowed)))?;
        ahead(print(&table::plan(&report, asked.budget_name)))?;
        let encoders = encoders_note(&asked.config);
        let notes = asked.notes.iter().chain(&cut).chain(&cache).chain(&stored);
        ahead(print_all(&voice::notes(notes.chain(&encoders))))?;
    }
    interrupt::listen(STOPPING)?;
    interrupt::listen_for_the_cluster()?;
    let generates = cinch_model::without_generation(&asked.config.model).is_none();
    if asked.config.data.source.is_none() && asked.config.named.title.is_some() && generates {
        let note = "no --data-dir is given: this trains on the text that is built into cinch";
        voice::aside(Some(note.to_owned()));
    }
    let folder = &asked.config.output.output_dir;
    let mut kept = settings_to_keep(&asked.settings, &plan.config)?;
    if is_of_unknown_tokens(&asked) {
        kept.remove("data.tokenizer");
    }
    let run = Run {
        plan,
        settings: kept,
        resume: asked.resume(),
        options: EngineOptions {
            threads: arguments.processor.threads.or(rank.threads()),
            tf32: arguments.processor.tf32,
            deterministic: arguments.processor.deterministic,
            device: rank.device(target)?,
            other_ranks: rank.sharers(target),
        },
        stop: &interrupt::STOP,
        progress: &DataBar::until(&interrupt::STOP),
        world: rank.world(),
    };
    let mut bar = TrainBar::new();
    let outcome = train_owned(run, owned, &mut |event: Event<'_>| {
        if let Event::Ready { engine, plan, .. } = &event {
            overhead::keep_of_rank(engine, plan);
        }
        if let Event::Saved { path, .. } = &event {
            rank.saved(path);
        }
        if !voice::is_hushed() {
            bar.event(event);
        }
    });
    bar.finish();
    let outcome = match outcome {
        Err(TrainError::Data(DataError::Interrupted)) => {
            tell("stopped while the data was prepared");
            return Err(Interrupted.into());
        }
        Err(TrainError::Data(error @ DataError::SourceMissing { .. })) => {
            return Err(where_it_is_named(error, &asked.settings));
        }
        outcome => outcome?,
    };
    if voice::is_hushed() {
        // The first rank says it.
    } else if arguments.json {
        print_json(&as_json(&outcome))?;
    } else {
        let next = what_next(&asked, folder);
        print(&describe(&outcome, folder, target, next))?;
    }
    match outcome.ending {
        Ending::Finished => Ok(()),
        Ending::Interrupted => Err(Interrupted.into()),
    }
}

/// Whether a run trains on ids of another program, and nobody says of which tokenizer they are.
fn is_of_unknown_tokens(asked: &AskedRun) -> bool {
    let source = asked.config.data.source.as_deref();
    source.is_some_and(Corpus::holds_ids) && !asked.settings.is_explicit("data.tokenizer")
}

/// Data that is not there, with the file that says where it should be.
fn where_it_is_named(error: DataError, settings: &Settings) -> anyhow::Error {
    let explained = settings.explain();
    let source = explained.iter().find(|one| one.key == "data.source");
    match source.map(|one| &one.source) {
        Some(source @ (Source::File { .. } | Source::Environment(_))) => {
            usage(format!("`data.source` ({source}): {error}"))
        }
        _ => error.into(),
    }
}

/// What one would do with a trained run, and the command for it.
fn what_next(asked: &AskedRun, folder: &Path) -> Option<String> {
    let (model, run) = (&asked.config.model, shown(folder));
    if cinch_model::embeds(model) {
        return Some(format!(
            "how well it finds what was held out: cinch eval {run}"
        ));
    }
    if cinch_model::without_generation(model).is_some() {
        return None;
    }
    if asked.rows.num_samples().is_some() {
        let words = words_of(&asked.config).ok().flatten();
        return Some(
            match words.is_some_and(|words| words.template(false).is_some()) {
                true => format!("talk with it: cinch generate {run} --chat"),
                false => format!("ask it: cinch generate {run} --prompt \"as your prompts are\""),
            },
        );
    }
    let tokenizer = match is_of_unknown_tokens(asked) {
        true => " --tokenizer FILE",
        false => "",
    };
    Some(format!(
        "sample from it: cinch generate {run}{tokenizer} --prompt \"The weights\""
    ))
}

/// Encoders are frozen: what they begin with, they stay.
fn encoders_note(config: &Config) -> Option<String> {
    let are_made_up = cinch_model::embeds(&config.model) && config.weights.is_none();
    are_made_up.then(|| {
        "the frozen encoders have random weights: --weights FOLDER takes those of a BERT model, \
         such as all-MiniLM-L6-v2"
            .to_owned()
    })
}

/// Takes the run that a folder or a checkpoint is of, so that no other process adds or removes
/// checkpoints once one was chosen. A folder that cannot be taken for another reason than that it
/// is in use, such as a read-only one, can still be read.
fn take_run(from: &Path) -> anyhow::Result<Option<Ownership>> {
    let Some(run) = resume::run_of(from) else {
        return Ok(None);
    };
    match Ownership::take(&run) {
        Ok(owned) => Ok(Some(owned)),
        Err(error @ TrainError::InUse { .. }) => Err(error.into()),
        Err(_) => Ok(None),
    }
}

/// The settings of the run, key by key, so that a resumed one starts from the same. A value that
/// a rule put in the place of another (half of a preset's batch, say) is one of them: what it was
/// worked out from is not known later.
fn settings_to_keep(
    settings: &Settings,
    config: &Config,
) -> anyhow::Result<BTreeMap<String, String>> {
    let output_dir = &config.output.output_dir;
    let mut kept: BTreeMap<String, String> = settings
        .explain()
        .into_iter()
        .filter(|one| match &one.source {
            Source::Default => false,
            // A share is one of the run as long as it is then.
            Source::Derived(from) if from == "training.warmup_ratio" => false,
            Source::Derived(_) => !one.overridden.is_empty(),
            _ => true,
        })
        .filter_map(|one| Some((one.key.to_owned(), exact(&one.value)?)))
        .collect();
    // A folder that is no text is in the configuration, and a run that goes on is in its own.
    match output_dir.to_str() {
        Some(folder) => kept.insert("output.output_dir".to_owned(), folder.to_owned()),
        None => kept.remove("output.output_dir"),
    };
    // Who goes on with it keeps the effective batch, on any number of ranks.
    let batch = &config.batch;
    if !batch.world.is_alone() {
        for (key, number) in [
            ("world.ranks", batch.world.ranks),
            ("vram.batch_size", batch.batch_size),
            ("vram.gradient_accumulation_steps", batch.accumulation),
        ] {
            kept.insert(key.to_owned(), number.to_string());
        }
    }
    // The stages as they are trained, whatever chose among them.
    if !config.data.curriculum.is_empty() {
        let stages = serde_json::to_string(&config.data.curriculum)?;
        kept.insert("data.curriculum".to_owned(), stages);
        kept.remove("data.stage");
    }
    Ok(kept)
}

/// A value as text that reads back the same: sizes are shown rounded elsewhere, paths escaped. None
/// for a path that is no text.
fn exact(value: &Value) -> Option<String> {
    match value {
        Value::Size(size) => Some(format!("{}b", size.get())),
        Value::Path(path) => path.to_str().map(str::to_owned),
        other => Some(other.to_string()),
    }
}

/// What was measured of the loss, and when.
fn losses(outcome: &TrainingOutcome) -> Option<String> {
    let last = outcome.last_loss?;
    let first = outcome.first_loss.filter(|first| first.step != last.step);
    let at = |one: MeasuredLoss| match one.step {
        0 => format!("{:.4} before", one.loss),
        step => format!("{:.4} at step {step}", one.loss),
    };
    let mut text = match outcome.validated {
        true => "validation loss ".to_owned(),
        false => "training loss ".to_owned(),
    };
    if let Some(first) = first {
        text += &format!("{}, ", at(first));
    }
    text += &match (outcome.validated, last.step) {
        (true, step) if step > 0 && step == outcome.step => {
            format!("{:.4} after {}", last.loss, table::counted(step, "step"))
        }
        _ => at(last),
    };
    if let Some(best) = outcome.best.filter(|_| outcome.validated) {
        text += &format!(" (best {:.4} at step {})", best.loss, best.step);
    }
    Some(text)
}

fn describe(
    outcome: &TrainingOutcome,
    folder: &Path,
    target: Target,
    next: Option<String>,
) -> String {
    let mut lines = Vec::from_iter(losses(outcome));
    lines.push(format!(
        "{} and {} in {:.1} s",
        table::counted(outcome.step, "step"),
        epochs(outcome.epoch),
        outcome.seconds
    ));
    // On a GPU the process holds other memory than the plan's.
    let of_ranks = outcome.ranks.iter().flat_map(|table| &table.rows);
    let most = of_ranks.map(|row| row.most_bytes).max().flatten();
    if let Some(most) = outcome
        .most_resident_bytes
        .max(most)
        .filter(|_| target == Target::Cpu)
    {
        let each = outcome.ranks.as_ref();
        let each = each.map_or_else(String::new, |table| {
            format!(" on each of {} ranks", table.rows.len())
        });
        lines.push(format!(
            "memory: {} planned{each}, {} in use at most",
            Bytes::new(outcome.planned_bytes),
            Bytes::new(most)
        ));
    }
    if let Some(table) = &outcome.ranks
        && let Some(slowest) = table.slowest().filter(|slowest| slowest.is_clear)
    {
        lines.push(table.told(&slowest));
    }
    let run = shown(folder);
    if let Some(path) = &outcome.checkpoint {
        lines.push(format!("checkpoint: {}", shown(path)));
    }
    match outcome.ending {
        Ending::Finished => {
            lines.extend(next);
            lines.push(format!("curves: tensorboard --logdir {run}/tensorboard"));
        }
        Ending::Interrupted if outcome.checkpoint.is_none() => {
            lines.push("stopped before the first step: there is nothing to resume".to_owned());
        }
        Ending::Interrupted => lines.push(format!(
            "stopped after step {} of {}; go on with: cinch train --resume {run}",
            outcome.step, outcome.max_steps
        )),
    }
    lines.join("\n")
}

fn as_json(outcome: &TrainingOutcome) -> serde_json::Value {
    let loss = |one: Option<MeasuredLoss>| one.map(|one| one.loss);
    let step = |one: Option<MeasuredLoss>| one.map(|one| one.step);
    json!({
        "finished": outcome.ending == Ending::Finished,
        "step": outcome.step,
        "max_steps": outcome.max_steps,
        "epoch": outcome.epoch,
        "first_loss": loss(outcome.first_loss),
        "first_loss_step": step(outcome.first_loss),
        "last_loss": loss(outcome.last_loss),
        "last_loss_step": step(outcome.last_loss),
        "validated": outcome.validated,
        "best_step": step(outcome.best),
        "best_loss": loss(outcome.best),
        "checkpoint": outcome.checkpoint.as_deref().map(|path| cinch_files::shown(path).to_string()),
        "seconds": outcome.seconds,
        "planned_bytes": outcome.planned_bytes,
        "peak_resident_bytes": cinch_train::peak_resident_bytes(),
        "ranks": outcome.ranks,
        "slowest_rank": outcome.ranks.as_ref().and_then(|table| table.slowest()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, loss: f64) -> Option<MeasuredLoss> {
        Some(MeasuredLoss { step, loss })
    }

    fn outcome() -> TrainingOutcome {
        TrainingOutcome {
            ending: Ending::Interrupted,
            step: 37,
            max_steps: 150,
            epoch: 0.25,
            first_loss: at(0, 5.5),
            last_loss: None,
            validated: true,
            checkpoint: None,
            best: None,
            seconds: 1.0,
            planned_bytes: 1 << 20,
            most_resident_bytes: None,
            ranks: None,
        }
    }

    #[test]
    fn only_losses_that_were_measured_are_told() {
        let told = |change: &dyn Fn(&mut TrainingOutcome)| {
            let mut outcome = outcome();
            change(&mut outcome);
            losses(&outcome).unwrap_or_default()
        };
        assert_eq!(told(&|_| ()), "");
        let before = told(&|outcome| outcome.last_loss = at(0, 5.5));
        assert_eq!(before, "validation loss 5.5000 before");
        let earlier = told(&|outcome| outcome.last_loss = at(30, 4.0));
        assert_eq!(earlier, "validation loss 5.5000 before, 4.0000 at step 30");
        let now = told(&|outcome| {
            outcome.last_loss = at(37, 3.0);
            outcome.best = at(37, 3.0);
        });
        assert_eq!(
            now,
            "validation loss 5.5000 before, 3.0000 after 37 steps (best 3.0000 at step 37)"
        );
        // The loss of a step is that of the weights before it.
        let training = told(&|outcome| {
            outcome.validated = false;
            outcome.first_loss = at(1, 5.0);
            outcome.last_loss = at(37, 3.0);
        });
        assert_eq!(
            training,
            "training loss 5.0000 at step 1, 3.0000 at step 37"
        );
        let single = told(&|outcome| {
            outcome.validated = false;
            outcome.first_loss = at(1, 5.0);
            outcome.last_loss = at(1, 5.0);
        });
        assert_eq!(single, "training loss 5.0000 at step 1");
    }

    #[test]
    fn the_end_fits_eighty_columns() {
        let mut outcome = outcome();
        outcome.ending = Ending::Finished;
        outcome.last_loss = at(37, 3.0);
        outcome.most_resident_bytes = Some(1 << 30);
        outcome.checkpoint = Some("runs/mamba-tiny/checkpoints/step-00000037".into());
        let text = describe(&outcome, Path::new("runs/mamba-tiny"), Target::Cpu, None);
        assert!(text.contains("37 steps and 0.25 epochs in 1.0 s"), "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
    }
}
