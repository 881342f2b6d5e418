//! `cinch eval`: how well an embedder finds the pairs that its run held out.

use cinch_train::{Retrieval, evaluate_retrieval};
use serde_json::json;

use super::embed::TrainedRun;
use super::{print, print_json};
use crate::args::EvalArguments;
use crate::failure::usage;
use crate::model_folder::model_folder;

pub fn run(arguments: &EvalArguments) -> anyhow::Result<()> {
    if let Some(folder) = model_folder(&arguments.subject) {
        return Err(usage(format!(
            "{0} is a model's folder: `cinch eval` looks for the pairs that a run held out\n\
             hint: `cinch train --model naics --weights {0}` trains an embedder on it, `cinch \
             embed {0}` embeds with it as it is",
            cinch_files::shown(&folder)
        )));
    }
    let mut run = TrainedRun::open(&arguments.subject, &arguments.embedder, "")?;
    let model = &run.config.model;
    if !cinch_model::embeds(model) {
        return Err(usage(format!(
            "{} is a run of {}, which embeds no texts: `cinch eval` looks for the pairs that an \
             embedder's run held out\n\
             hint: `cinch report {}` shows its loss on what was held out",
            cinch_files::shown(&arguments.subject),
            model.family().title,
            cinch_files::shown(&arguments.subject)
        )));
    }
    if let Some(path) = &arguments.data_dir {
        run.config.data.source = Some(path.clone());
    }
    let mut embedder = run.embedder(&arguments.embedder)?;
    let firsts: Vec<usize> = arguments.k.iter().map(|k| k.get()).collect();
    let found = evaluate_retrieval(&run.config, &mut embedder, &firsts)?;
    let path = run.path();
    match arguments.json {
        true => print_json(&json!({
            "weights": path,
            "retrieval": found,
            "arena_bytes": embedder.arena_bytes(),
        })),
        false => print(&describe(&path, &found)),
    }
}

fn describe(path: &str, found: &Retrieval) -> String {
    let mut lines = vec![format!(
        "{path}: {} held-out pairs among {} codes",
        found.pairs, found.codes
    )];
    let recall = found.recall.iter();
    let recall = recall.map(|(k, share)| format!("recall@{k} {:.1} %", 100.0 * share));
    lines.push(recall.collect::<Vec<_>>().join(", "));
    lines.push(format!(
        "mean reciprocal rank {:.3}",
        found.mean_reciprocal_rank
    ));
    lines.join("\n")
}
