//! Writing the recommended settings into the user's files, and taking that back.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

use cinch_config::{Application, Explained, FileChange, Settings, Source, config_files};
use cinch_fit::search::SettingValue;
use serde::Serialize;
use serde_json::json;

use crate::args::FitArguments;
use crate::command::{ahead, print, print_all, print_raw};
use crate::failure::usage;
use crate::voice;

/// The error that no file was named.
pub fn no_file() -> anyhow::Error {
    usage(
        "which file should hold the settings?\n\
         hint: name it first (cinch fit FILE --apply), or several with --config-path FOLDER",
    )
}

/// The files that `--undo` means.
fn files(arguments: &FitArguments) -> anyhow::Result<Vec<PathBuf>> {
    let plain = &arguments.settings.plain;
    let subject = arguments.subject.as_ref().map(PathBuf::from);
    match (
        &plain.config_path,
        plain.config.as_ref().or(subject.as_ref()),
    ) {
        (Some(path), _) => Ok(config_files(path)?),
        (None, Some(path)) if path.is_dir() => Ok(config_files(path)?),
        (None, Some(file)) => Ok(vec![file.clone()]),
        (None, None) => Err(no_file()),
    }
}

/// What became of `--apply`.
#[derive(Debug, Serialize)]
pub struct Written {
    pub written: bool,
    files: Vec<WrittenFile>,
    diff: String,
    remarks: Vec<String>,
    /// Keys for which the files have no place.
    #[serde(skip)]
    left: Vec<String>,
}

impl Written {
    /// Whether the files hold a recommended value by now.
    pub fn holds(&self, key: &str) -> bool {
        self.written && !self.left.iter().any(|left| left == key)
    }
}

#[derive(Debug, Serialize)]
struct WrittenFile {
    path: String,
    backup: Option<String>,
}

/// Shows the difference, asks, and writes all files or none.
pub fn apply(
    arguments: &FitArguments,
    files: &[PathBuf],
    settings: &Settings,
    values: &[SettingValue],
) -> anyhow::Result<Written> {
    let explained = settings.explain();
    let mut changes = Vec::new();
    for one in values {
        let Some(value) = &one.value else { continue };
        let change = FileChange::parse(one.key, value)?;
        if !holds_already(&explained, &change) {
            changes.push(change);
        }
    }
    // What of a folder was not read is not written to.
    let is_read = |file: &&PathBuf| {
        let mut readings = settings.readings().iter();
        readings.any(|reading| reading.path == **file)
    };
    let files: Vec<PathBuf> = files.iter().filter(is_read).cloned().collect();
    let application = Application::prepare_with(&files, &changes, arguments.add_keys)?;
    refuse_half_a_batch(&application)?;
    let remarks: Vec<String> = application
        .unplaced()
        .iter()
        .map(|one| format!("{} = {} is not written: {}", one.key, one.value, one.reason))
        .chain(application.remarks().iter().cloned())
        .collect();
    let left = application.unplaced().iter();
    let left = left.map(|one| one.key.to_string()).collect();
    let diff = application.diff();
    let mut outcome = Written {
        written: false,
        files: Vec::new(),
        diff,
        remarks,
        left,
    };
    let say = |text: &str| match arguments.json {
        true => Ok(()),
        false => ahead(print(text)),
    };
    if !arguments.json {
        ahead(print_all(&voice::notes(&outcome.remarks)))?;
    }
    if application.is_empty() {
        say("the files say so already: nothing to write")?;
        return Ok(outcome);
    }
    if !arguments.json {
        // Its lines are those of the file, however long.
        let diff = format!("\n{}", voice::diff(&outcome.diff));
        ahead(print_raw(diff.as_bytes()))?;
    }
    if !arguments.yes && !confirmed()? {
        say("nothing was written")?;
        return Ok(outcome);
    }
    let report = application.commit()?;
    for file in &report.files {
        let backup = file.backup.as_deref();
        let backup = backup.map_or_else(String::new, |backup| {
            format!(" (before: {})", backup.display())
        });
        say(&format!("wrote {}{backup}", file.path.display()))?;
    }
    say("--undo in place of --apply takes it back")?;
    outcome.written = true;
    outcome.files = report
        .files
        .into_iter()
        .map(|file| WrittenFile {
            path: file.path.display().to_string(),
            backup: file.backup.map(|backup| backup.display().to_string()),
        })
        .collect();
    Ok(outcome)
}

/// A micro batch without its accumulation would be another effective batch.
fn refuse_half_a_batch(application: &Application) -> anyhow::Result<()> {
    const PAIR: [&str; 2] = ["vram.batch_size", "vram.gradient_accumulation_steps"];
    let written = |key: &str| application.applied().iter().any(|one| one.key == key);
    for (key, other) in [(PAIR[0], PAIR[1]), (PAIR[1], PAIR[0])] {
        let unplaced = application.unplaced().iter().find(|one| one.key == key);
        if let Some(one) = unplaced.filter(|_| written(other)) {
            return Err(usage(format!(
                "nothing was written: {} = {} has no place ({}), and without it the effective \
                 batch would change\n\
                 hint: --add-keys adds the key if your program reads it; or change both by hand",
                one.key, one.value, one.reason
            )));
        }
    }
    Ok(())
}

/// Whether the files give a setting that value without a word more: they say it, or it is the
/// default, or it follows from the model.
fn holds_already(explained: &[Explained], change: &FileChange) -> bool {
    let stays = |source: &Source| match source {
        Source::Default | Source::Data(_) | Source::File { .. } => true,
        Source::Derived(from) => from.starts_with("model."),
        _ => false,
    };
    let mut settings = explained.iter();
    settings.any(|one| one.key == change.key && one.value == change.value && stays(&one.source))
}

/// Puts back what the files held before the last `--apply`.
pub fn undo(arguments: &FitArguments) -> anyhow::Result<()> {
    let restored = cinch_config::undo(&files(arguments)?, arguments.force)?;
    let paths: Vec<String> = restored
        .files
        .iter()
        .map(|file| file.path.display().to_string())
        .collect();
    if arguments.json {
        return crate::command::print_json(&json!({ "restored": paths }));
    }
    print(&format!("restored {}", paths.join(", ")))
}

/// Asks on a terminal. A script has nobody to ask.
fn confirmed() -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(usage(
            "nobody is there to confirm the changes\nhint: --yes writes without asking",
        ));
    }
    let mut out = std::io::stderr();
    write!(out, "write these changes? [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
