//! `cinch run`: a training command, watched, and started again with a smaller batch where memory
//! runs out.

mod attempt;
mod recorder;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use cinch_supervise::{
    Batch, End, Evidence, LAUNCHER, Place, Search, SuperviseError, Supervisor, TrialResult,
    as_the_command_ended, exec_on_terminal, judge, newest_checkpoint,
};

use super::diagnose;
use crate::args::RunArguments;
use crate::failure::{self, usage};
use crate::voice;
use attempt::{Attempt, Story};
use recorder::Recorder;

/// Exit codes of shells for a command that is not there, and for one that cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUNNABLE: u8 = 126;

/// Where this process was started to become a command on a terminal of its own, becomes it.
pub fn become_a_command() -> Option<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (first, rest) = arguments.split_first()?;
    if first != LAUNCHER {
        return None;
    }
    let error = exec_on_terminal(rest);
    let program = rest.get(1).map(|word| word.to_string_lossy().into_owned());
    voice::tell(&format!(
        "cinch run: {}: {error}",
        program.unwrap_or_default()
    ));
    Some(start_code(&error))
}

fn start_code(error: &std::io::Error) -> ExitCode {
    match error.kind() {
        std::io::ErrorKind::NotFound => ExitCode::from(NOT_FOUND),
        _ => ExitCode::from(NOT_RUNNABLE),
    }
}

/// Exits as the command did.
pub fn run(arguments: &RunArguments) -> ExitCode {
    match supervise(arguments) {
        Ok(status) => ExitCode::from(as_the_command_ended(status)),
        Err(error) => match error.downcast_ref::<SuperviseError>() {
            Some(SuperviseError::Start { source, .. }) => {
                voice::tell(&format!("cinch run: {error}"));
                start_code(source)
            }
            Some(_) => failure::report(&usage(error.to_string())),
            None => failure::report(&error),
        },
    }
}

fn supervise(arguments: &RunArguments) -> anyhow::Result<ExitStatus> {
    let mut place = Place::new(&arguments.command, &arguments.set, arguments.config.clone())?;
    let mut search = first_batch(arguments, &place)?;
    let supervisor = Supervisor::new()?;
    let recorder = Recorder::start(arguments.interval, arguments.record.clone())?;
    let mut story = Story::default();
    let mut last: Option<ExitStatus> = None;
    // A trial that ended well counts more than a larger one that failed afterwards.
    let mut finished: Option<(ExitStatus, Batch)> = None;
    loop {
        let values = search.as_ref().and_then(Search::next);
        let values = values.map(|(batch, accumulation)| Batch {
            batch,
            accumulation,
        });
        // What only a trial has shown to work is run to its end.
        let largest = search.as_ref().and_then(known);
        let last_run = largest.filter(|_| values.is_none() && finished.is_none());
        let used_up = story.attempts.len() > arguments.retry as usize;
        let is_over = search.is_some() && values.is_none();
        let values = match (is_over, used_up) {
            (true, _) => last_run,
            (false, true) => None,
            (false, false) => values,
        };
        if (is_over || used_up) && values.is_none() {
            break;
        }
        if let Some(values) = values {
            place.write(values)?;
        }
        let attempt = one(
            arguments,
            &supervisor,
            &recorder,
            values,
            search.as_ref(),
            &story,
        )?;
        let (status, end, works) = (attempt.status, attempt.end.clone(), attempt.works());
        supervisor.aside(|| voice::aside(attempt.note()));
        story.attempts.push(attempt);
        last = Some(status);
        let Some(searched) = &mut search else { break };
        let Some(values) = values else { break };
        if works {
            searched.tried(values.batch, TrialResult::Works);
            if end == End::Success {
                finished = Some((status, values));
            }
        } else if matches!(end, End::OutOfMemory(_)) {
            searched.tried(values.batch, TrialResult::OutOfMemory);
        } else {
            break;
        }
        if supervisor.is_stopped() || is_over {
            break;
        }
    }
    drop(supervisor);
    recorder.stop();
    let chosen = search.as_ref().and_then(Search::largest);
    settle(
        &mut place,
        search.as_ref(),
        finished.map(|(_, values)| values),
    )?;
    story.finish(search.as_ref(), chosen);
    voice::aside(story.summary());
    if finished.is_none() {
        voice::aside(story.diagnosis());
    }
    if let Some(path) = &arguments.report {
        crate::files::replace(
            path,
            serde_json::to_string_pretty(&story.as_json())?.as_bytes(),
        )?;
    }
    finished
        .map(|(status, _)| status)
        .or(last)
        .ok_or_else(|| usage("no attempt was made"))
}

/// The largest batch that works, as far as is known.
fn known(search: &Search) -> Option<Batch> {
    let batch = search.largest()?;
    Some(Batch {
        batch,
        accumulation: search.effective() / batch,
    })
}

/// Leaves the files with the values that worked, or as they were.
fn settle(
    place: &mut Place,
    search: Option<&Search>,
    finished: Option<Batch>,
) -> Result<(), SuperviseError> {
    match finished.or(search.and_then(known)) {
        Some(values) => place.write(values),
        None => place.restore(),
    }
}

/// The batches to try; `None` where the command holds no batch and nothing is to be tried again.
fn first_batch(arguments: &RunArguments, place: &Place) -> anyhow::Result<Option<Search>> {
    if !place.can_change() {
        return match arguments.retry {
            0 => Ok(None),
            _ => Err(SuperviseError::NoBatch.into()),
        };
    }
    let stated = place.stated()?;
    let effective = arguments.effective_batch;
    let batch = arguments
        .batch
        .or(stated.map(|stated| stated.batch))
        .or(effective);
    let batch = batch.ok_or(SuperviseError::UnknownBatch)?;
    let product = stated.and_then(|stated| stated.batch.checked_mul(stated.accumulation));
    let effective = effective.or(product).unwrap_or(batch);
    let search = Search::new(effective, batch, arguments.largest.is_some());
    let search = search.ok_or(SuperviseError::NotAMultiple { effective, batch })?;
    Ok(Some(search))
}

/// One attempt, in a process of its own.
fn one(
    arguments: &RunArguments,
    supervisor: &Supervisor,
    recorder: &Recorder,
    values: Option<Batch>,
    search: Option<&Search>,
    story: &Story,
) -> anyhow::Result<Attempt> {
    // The first attempt is the user's own; later ones go on from what it has saved.
    let checkpoint: Option<PathBuf> = match story.attempts.is_empty() {
        true => None,
        false => arguments.checkpoints.as_deref().and_then(newest_checkpoint),
    };
    let mut words = arguments.command.clone();
    if checkpoint.is_some() {
        words.extend(arguments.resume_with.iter().map(OsString::from));
    }
    let command = Place::command(
        &words,
        values,
        checkpoint.as_ref().map(|path| path.as_os_str()),
    );
    let goes_on = search
        .zip(values)
        .is_some_and(|(search, values)| search.goes_on_after(values.batch));
    let probe = arguments
        .largest
        .filter(|_| goes_on)
        .map(Duration::from_secs_f64);
    recorder.begin();
    let mut ended = supervisor.run(&command, probe, |pid| recorder.watch(pid))?;
    let end = match ended.is_probe {
        true => End::Success,
        false => judge(
            ended.status,
            ended.capture.log(),
            ended.kernel_kills,
            supervisor.is_stopped(),
        ),
    };
    if let End::OutOfMemory(Evidence::KilledByKernel(count)) = end {
        ended.capture.note_kernel_kills(count);
    }
    // The file has the values of this attempt now.
    let diagnosis = match end {
        End::Success => Vec::new(),
        _ => diagnose::of_output(ended.capture.log(), arguments.config.as_deref()),
    };
    Ok(Attempt {
        number: story.attempts.len() + 1,
        values,
        checkpoint,
        status: ended.status,
        end,
        is_probe: ended.is_probe,
        seconds: ended.seconds,
        output_bytes: ended.capture.num_bytes(),
        peaks: recorder.peaks(),
        diagnosis,
    })
}
