//! `cinch merge`: adapters added to the weights they were trained on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use cinch_data::Progress;
use cinch_train::ADAPTER_FOLDER;
use cinch_weights::{ADAPTER_CONFIG_FILE, Adapter, WeightError, WeightFiles, find_folder, merge};
use serde_json::json;

use super::{print, print_all, print_json};
use crate::args::MergeArguments;
use crate::failure::{Interrupted, usage};
use crate::interrupt;
use crate::model_folder::hub_folders;
use crate::progress::{DataBar, shown};
use crate::voice::{self, tell};

pub fn run(arguments: &MergeArguments) -> anyhow::Result<()> {
    let adapter = Adapter::open(&adapter_folder(&arguments.adapter)?)?;
    let folders = hub_folders();
    let named = arguments
        .base
        .as_ref()
        .map(|base| base.display().to_string());
    let Some(base) = named.or_else(|| adapter.config.base_model.clone()) else {
        return Err(usage(
            "the adapter does not say which model it belongs to\nhint: give its folder with --base"
                .to_owned(),
        ));
    };
    let base = find_folder(&base, "config.json", &folders)?;
    let mut files = WeightFiles::open(&base)?;
    interrupt::listen("stopping: nothing is kept (Ctrl-C again to stop at once)")?;
    let bar = DataBar::until(&interrupt::STOP);
    bar.begin("merging", files.num_bytes());
    let mut done = 0;
    let merged = merge(&mut files, &adapter, &arguments.to, None, &mut |progress| {
        bar.advance(progress.bytes_done.saturating_sub(done));
        done = progress.bytes_done;
        match interrupt::STOP.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    bar.end();
    let merged = match merged {
        Err(WeightError::Stopped { .. }) => {
            tell("stopped: nothing was written");
            return Err(Interrupted.into());
        }
        merged => merged?,
    };
    print_all(&voice::notes(merged.notes.iter()))?;
    if arguments.json {
        return print_json(&json!({
            "base": shown(&base).to_string(),
            "to": shown(&arguments.to).to_string(),
            "modules": merged.num_modules,
        }));
    }
    print(&format!(
        "adapters of {} layers were added to {} and are in {}",
        merged.num_modules,
        shown(&base),
        shown(&arguments.to)
    ))
}

/// The folder of an adapter; a run's folder stands for the adapters of its newest checkpoint.
fn adapter_folder(path: &Path) -> anyhow::Result<PathBuf> {
    if path.join(ADAPTER_CONFIG_FILE).exists() {
        return Ok(path.to_owned());
    }
    let of_run = path.join(ADAPTER_FOLDER);
    if of_run.is_dir() {
        return Ok(of_run);
    }
    if path.join("checkpoints").is_dir() {
        return Err(usage(format!(
            "{0} has trained all weights or saved nothing yet: there are no adapters to add\n\
             hint: `cinch export {0} --to FOLDER` writes the files of a model that was trained whole",
            shown(path)
        )));
    }
    // What is missing is told when it is opened.
    Ok(path.to_owned())
}
