//! What a run meets on the disk: room for its checkpoints, its folder, its data.

use std::path::Path;

use cinch_config::{Bytes, Config};
use cinch_step::StepPlan;
use cinch_train::checkpoint::Store;
use cinch_train::{FirstWeights, described_otherwise, open_weights, test_load};

use super::{Findings, Verdict};
use crate::progress::shown;
use crate::rows::{self, Rows};
use crate::table;

/// Checkpoints on the disk at once: those that are kept, the best, and the one being written
/// before the oldest goes.
fn most_checkpoints(config: &Config) -> u64 {
    let training = &config.training;
    let written = match training.save_interval {
        0 => 1,
        interval => training.max_steps.div_ceil(interval),
    };
    let kept = match training.save_total_limit {
        0 => written,
        limit => written.min(limit as u64 + 1),
    };
    let best = u64::from(training.eval_interval > 0);
    kept + best
}

pub fn check_disk(findings: &mut Findings, step: &StepPlan) {
    let topic = "disk";
    let folder = &step.config.output.output_dir;
    let existing = folder
        .ancestors()
        .map(|folder| {
            if folder == Path::new("") {
                Path::new(".")
            } else {
                folder
            }
        })
        .find(|folder| folder.exists());
    let Some(existing) = existing else {
        let message = format!("{} has no folder above it", folder.display());
        return findings.add(topic, Verdict::Bad, message);
    };
    let (one, most) = (step.checkpoint_bytes(), most_checkpoints(&step.config));
    let needed = one.saturating_mul(most);
    let plan = format!(
        "up to {} of {} in {}",
        table::counted(most, "checkpoint"),
        Bytes::new(one),
        folder.display()
    );
    let space = match rustix::fs::statvfs(existing) {
        Ok(space) => space,
        Err(error) => {
            let message = format!("{plan}; what is free there cannot be read: {error}");
            return findings.add(topic, Verdict::Warning, message);
        }
    };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let shown = format!(
        "{plan}: {} needed, {} free",
        Bytes::new(needed),
        Bytes::new(free)
    );
    let writable = rustix::fs::access(existing, rustix::fs::Access::WRITE_OK);
    if writable.is_err() || !existing.is_dir() {
        let message = format!(
            "{} cannot be written; choose another place with --output-dir",
            existing.display()
        );
        findings.add(topic, Verdict::Bad, message);
    } else if needed > free {
        let message = format!("{shown}; fewer with --save-total-limit, or another --output-dir");
        findings.add(topic, Verdict::Bad, message);
    } else {
        findings.add(topic, Verdict::Good, shown);
    }
}

/// A folder that was named and holds a run is not written into by a new one.
pub fn check_folder(findings: &mut Findings, config: &Config) {
    let folder = &config.output.output_dir;
    let newest = Store::look(folder).and_then(|store| store.newest());
    if let Ok(Some(entry)) = newest {
        let (run, step) = (shown(folder), entry.step);
        findings.add(
            "folder",
            Verdict::Bad,
            format!(
                "{run} already holds a run (step {step}); go on with `cinch train --resume {run}`, \
                 or choose another --output-dir"
            ),
        );
    }
}

/// A test load of the files that the first weights come from: all that is needed is there, in its
/// shape, and can be read. Nothing is kept of it.
pub fn check_model(findings: &mut Findings, step: &StepPlan) {
    let topic = "model files";
    let path = match FirstWeights::of(&step.config) {
        Ok(FirstWeights::Files(path)) => path,
        Ok(FirstWeights::Initial) => {
            return findings.add(topic, Verdict::Good, "none: weights are made from the seed");
        }
        Err(error) => return findings.add(topic, Verdict::Bad, error.to_string()),
    };
    if let Some(note) = described_otherwise(&step.config) {
        findings.add(topic, Verdict::Warning, note);
    }
    let loaded = open_weights(&step.config, &path).and_then(|files| test_load(step, &files));
    match loaded {
        Ok(bytes) => {
            let (path, bytes) = (shown(&path), Bytes::new(bytes));
            let message = format!("{path}: {bytes} of weights, each in its shape and readable");
            findings.add(topic, Verdict::Good, message);
        }
        Err(error) => findings.add(topic, Verdict::Bad, error.to_string()),
    }
}

pub fn check_data(findings: &mut Findings, config: &Config, rows: &Rows) {
    let topic = "data";
    match &config.data.source {
        None => findings.add(topic, Verdict::Good, "the built-in text"),
        Some(path) if !path.exists() => findings.add(
            topic,
            Verdict::Bad,
            format!(
                "{} does not exist; name a folder or file with --data-dir, or make one with \
                 `cinch data synth FOLDER`",
                path.display()
            ),
        ),
        Some(path) => {
            let kind = if path.is_dir() { "folder" } else { "file" };
            // No token is shorter than a byte.
            let text = bytes_below(path);
            let cache = text.saturating_mul(token_bytes(config));
            let mut message = format!(
                "the {kind} {}, {} in files",
                path.display(),
                Bytes::new(text)
            );
            // Samples are kept in memory, which is counted there.
            if rows.num_samples().is_none() {
                message += &format!("; their tokens take at most {} on disk", Bytes::new(cache));
            }
            findings.add(topic, Verdict::Good, message);
            let (step, seq_len) = (config.batch.effective_batch(), config.batch.seq_len);
            // A row begins with a sample.
            let most = rows.num_samples().unwrap_or(text / seq_len as u64);
            if most < step as u64 {
                let message = format!(
                    "at most {} of {seq_len} tokens, fewer than the {step} of one step: give more \
                     text, or lower --seq-len, --batch-size or --grad-accum",
                    table::counted(most.max(1), "sequence"),
                );
                findings.add(topic, Verdict::Warning, message);
            }
        }
    }
}

/// How long the rows of samples are.
pub fn check_rows(findings: &mut Findings, rows: &Rows, step: &StepPlan) {
    let topic = "rows";
    match rows {
        Rows::None => {}
        Rows::Unread(problem) => findings.add(topic, Verdict::Bad, problem.clone()),
        Rows::Read(survey) => {
            let lines = rows::describe(survey, &step.config.batch);
            findings.add(topic, Verdict::Good, lines.join("; "));
        }
    }
}

/// What a token takes in the cache.
fn token_bytes(config: &Config) -> u64 {
    match config.model.vocab_size() {
        ..=0x1_0000 => size_of::<u16>() as u64,
        _ => size_of::<u32>() as u64,
    }
}

/// Bytes of a file, or of all files of a folder; links are not followed.
fn bytes_below(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return path.metadata().map_or(0, |metadata| metadata.len());
    };
    let entries = entries.flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        Ok(kind) if kind.is_file() => entry.metadata().map_or(0, |metadata| metadata.len()),
        _ => 0,
    });
    sizes.fold(0, u64::saturating_add)
}
