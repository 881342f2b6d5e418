//! `cinch diagnose`: why memory ran out, from a message or a log.

mod run;
mod show;
mod together;
mod wording;

use std::collections::HashSet;
use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use cinch_diagnose::{Failure, Log, diagnose};
use serde_json::json;

use super::{print, print_json, print_raw};
use crate::args::{DiagnoseArguments, SettingArguments};
use crate::failure::{RanOut, usage};
use crate::interrupt;
use crate::voice;

/// Bytes that are read at once.
const BUFFER: usize = 1 << 18;
/// How often a file that grows is looked at, and how often it must be found at rest before a
/// message that has no end yet is taken for whole.
const INTERVAL: Duration = Duration::from_millis(100);
const LOOKS_AT_REST: u32 = 5;

pub fn run(arguments: &DiagnoseArguments) -> anyhow::Result<()> {
    let path = arguments
        .file
        .as_deref()
        .filter(|path| *path != Path::new("-"));
    if arguments.follow {
        let Some(path) = path else {
            return Err(usage(
                "--follow needs a file\nhint: standard input is read as it comes, to its end",
            ));
        };
        return follow(arguments, path);
    }
    let mut log = Log::new();
    match path {
        Some(path) => feed(&mut log, &mut open(path)?, path)?,
        None if std::io::stdin().is_terminal() => {
            return Err(usage(
                "there is nothing to read\n\
                 hint: name a log, `cinch diagnose train.log`, or pipe one: `python train.py 2>&1 | cinch diagnose`",
            ));
        }
        None => feed(
            &mut log,
            &mut std::io::stdin().lock(),
            Path::new("standard input"),
        )?,
    }
    log.finish();
    let failures = told(arguments, &log)?;
    // Errors go to the other stream, which a pipe does not take.
    if path.is_none() && failures.is_empty() {
        voice::aside(Some(
            "what was piped has no failure in it; `2>&1` before the pipe brings error messages too"
                .to_owned(),
        ));
    }
    match arguments.json {
        true => print_json(&json!({ "failures": failures }))?,
        false => print(&show::text(&failures, &log))?,
    }
    verdict(&failures)
}

fn told(arguments: &DiagnoseArguments, log: &Log) -> anyhow::Result<Vec<Failure>> {
    let run = run::of(arguments, log)?;
    Ok(diagnose(log, run.as_ref()))
}

/// What a command's output tells. A configuration for which nothing can be computed leaves the
/// savings out: the run that it is about has ended already.
pub fn of_output(log: &Log, config: Option<&Path>) -> Vec<Failure> {
    let mut settings = SettingArguments::default();
    settings.plain.config = config.map(Path::to_owned);
    let arguments = DiagnoseArguments {
        file: None,
        settings,
        engine: None,
        follow: false,
        json: false,
    };
    told(&arguments, log).unwrap_or_else(|error| {
        let reason = error.to_string();
        let reason = reason.lines().next().unwrap_or_default();
        voice::aside(Some(format!("savings are not computed: {reason}")));
        diagnose(log, None)
    })
}

/// A whole log.
pub fn read(path: &Path) -> anyhow::Result<Log> {
    let mut log = Log::new();
    feed(&mut log, &mut open(path)?, path)?;
    log.finish();
    Ok(log)
}

/// One of each kind: ranks that failed alike are told once.
pub fn distinct(failures: &[Failure]) -> Vec<&Failure> {
    show::distinct(failures)
}

/// A diagnosis for people.
pub fn text_of(failures: &[Failure]) -> String {
    show::failures(failures)
}

fn verdict(failures: &[Failure]) -> anyhow::Result<()> {
    match failures.iter().any(|failure| failure.is_oom) {
        true => Err(RanOut.into()),
        false => Ok(()),
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    let shown = cinch_files::shown(path);
    let file = File::open(path).map_err(|error| {
        usage(format!(
            "{shown} cannot be read: {error}\n\
             hint: name a log or a file with the message, or pipe it: `python train.py 2>&1 | cinch diagnose`"
        ))
    })?;
    let is_folder = file.metadata().is_ok_and(|metadata| metadata.is_dir());
    match is_folder {
        true => Err(usage(format!(
            "{shown} is a folder\nhint: name the log in it"
        ))),
        false => Ok(file),
    }
}

fn feed(log: &mut Log, from: &mut impl Read, path: &Path) -> anyhow::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => log.feed(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("{} cannot be read", cinch_files::shown(path)));
            }
        }
    }
}

/// Reads a file while it grows. One that becomes shorter was begun anew.
fn follow(arguments: &DiagnoseArguments, path: &Path) -> anyhow::Result<()> {
    interrupt::listen("stopped reading")?;
    let mut file = open(path)?;
    let mut log = Log::new();
    // Failures of several ranks need not end in the order of their lines.
    let mut shown = HashSet::new();
    let mut all = Vec::new();
    let mut at_rest = 0;
    if !arguments.json && !voice::is_quiet() {
        voice::tell(&format!(
            "reading {} as it grows; Ctrl-C ends",
            cinch_files::shown(path)
        ));
    }
    loop {
        let place = file.stream_position()?;
        feed(&mut log, &mut file, path)?;
        let grew = file.stream_position()? > place;
        at_rest = if grew { 0 } else { at_rest + 1 };
        let stops = interrupt::STOP.load(Ordering::Relaxed);
        if stops {
            log.finish();
        } else if at_rest == LOOKS_AT_REST {
            log.settle();
        }
        let places: Vec<u64> = log
            .incidents()
            .iter()
            .map(|incident| incident.line)
            .collect();
        if places.iter().any(|place| !shown.contains(place)) {
            all = told(arguments, &log)?;
            let is_new = |failure: &&Failure| !shown.contains(&failure.line);
            let new: Vec<Failure> = all.iter().filter(is_new).cloned().collect();
            match arguments.json {
                true => print_raw(serde_json::to_string(&json!({ "failures": new }))?.as_bytes())?,
                false => print(&show::text(&new, &log))?,
            }
            shown.extend(places);
        }
        if stops {
            return verdict(&all);
        }
        if file.metadata()?.len() < file.stream_position()? {
            file.seek(SeekFrom::Start(0))?;
            log = Log::new();
            shown.clear();
        }
        if !grew {
            std::thread::sleep(INTERVAL);
        }
    }
}
