//! `cinch export`: a checkpoint as files that peft or transformers load.

use cinch_train::{Exported, State, checkpoint, export};
use serde_json::json;

use super::{open_run, print, print_json};
use crate::args::ExportArguments;
use crate::progress::shown;
use crate::table::counted;

pub fn run(arguments: &ExportArguments) -> anyhow::Result<()> {
    let store = open_run(&arguments.checkpoint)?;
    let best = match arguments.best {
        true => store.best()?.map(|best| best.path),
        false => None,
    };
    let path = match best {
        Some(path) => path,
        None => checkpoint::resolve(&store, Some(&arguments.checkpoint))?,
    };
    checkpoint::verify(&path)?;
    let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
    let exported = export(&path, &state.config, &arguments.to)?;
    let (kind, what) = match exported {
        Exported::Adapter { modules, whole } => (
            "adapter",
            match whole {
                0 => format!("adapters on {modules} layers, in peft's format"),
                _ => format!(
                    "adapters on {modules} layers and {} trained whole, in peft's format",
                    counted(whole as u64, "tensor")
                ),
            },
        ),
        Exported::Model { copied } => (
            "model",
            match copied.is_empty() {
                true => "a model, without its config.json: that was not found".to_owned(),
                false => format!("a model, with {}", copied.join(", ")),
            },
        ),
    };
    if arguments.json {
        return print_json(&json!({
            "checkpoint": shown(&path).to_string(),
            "to": shown(&arguments.to).to_string(),
            "kind": kind,
            "step": state.step,
        }));
    }
    print(&format!(
        "step {} of {} is in {}: {what}",
        state.step,
        shown(&arguments.checkpoint),
        shown(&arguments.to)
    ))
}
