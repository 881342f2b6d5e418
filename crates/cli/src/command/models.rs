//! `cinch models`: what can be trained, what can be predicted, and which names are known.

use cinch_architecture::{
    ARCHITECTURES, Architecture, CatalogueEntry, Family, Number, catalogue, trained_sizes,
};
use cinch_config::Bytes;
use cinch_graph::DType;
use serde_json::json;

use super::{print, print_json};
use crate::args::ModelsArguments;
use crate::table;

pub fn run(arguments: &ModelsArguments) -> anyhow::Result<()> {
    match arguments.json {
        true => print_json(&as_json()),
        false => print(&describe(arguments.all)),
    }
}

/// What can be done with an entry's family.
fn ability(entry: &CatalogueEntry) -> &'static str {
    match Family::of_model_type(entry.model_type()) {
        Some(family) if is_trained(family) => "trained",
        Some(_) => "predicted",
        None => "known by name",
    }
}

fn is_trained(family: &Family) -> bool {
    let mut listed = ARCHITECTURES.iter();
    listed.any(|one| one.is_trained && one.family == family)
}

fn as_json() -> serde_json::Value {
    let whole = |model: &Architecture, key: &str| model.get(key).and_then(Number::whole);
    let sizes: Vec<serde_json::Value> = ARCHITECTURES
        .iter()
        .flat_map(|listed| listed.family.sizes.iter().map(move |size| (listed, size)))
        .map(|(listed, size)| {
            let model = (size.shape)();
            json!({
                "model": listed.family.name,
                "size": size.name,
                "aliases": size.aliases,
                "parameters": model.parameters(),
                "d_model": whole(&model, "model.d_model"),
                "n_layers": model.layers(),
                "n_heads": whole(&model, "model.n_heads"),
                "max_seq_len": model.positions(),
                "vocab_size": model.vocabulary(),
                "can": if listed.is_trained { "trained" } else { "predicted" },
            })
        })
        .collect();
    let hub = catalogue().iter().map(|entry| {
        json!({
            "ids": entry.ids,
            "names": entry.names,
            "family": entry.model_type(),
            "parameters": entry.parameters,
            "can": ability(entry),
        })
    });
    sizes.into_iter().chain(hub).collect()
}

fn describe(all: bool) -> String {
    let mut sizes = table::new(&[
        "model",
        "size",
        "parameters",
        "fp32",
        "width",
        "layers",
        "positions",
    ]);
    for (family, size) in trained_sizes() {
        let model = (size.shape)();
        let width = model.get("model.d_model").and_then(Number::whole);
        sizes.add_row([
            family.name.into(),
            size.name.into(),
            table::right(table::thousands(model.parameters())),
            table::right(Bytes::new(model.parameters() * DType::F32.size())),
            table::right(width.unwrap_or_default()),
            table::right(model.layers()),
            table::right(positions(&model)),
        ]);
    }
    // The weights' size follows from their number.
    table::settle(&mut sizes, &[3]);
    let mut text = format!(
        "trained by cinch, and predicted for PyTorch (--model NAME --model-size SIZE):\n{sizes}\n"
    );
    let predicted: Vec<&str> = ARCHITECTURES
        .iter()
        .filter(|listed| !listed.is_trained)
        .map(|listed| listed.family.title)
        .collect();
    text += &format!(
        "\npredicted for PyTorch, by hub id or config.json: {}\n",
        predicted.join(", ")
    );
    let mut hub = table::new(&["hub id", "parameters", "can be"]);
    let mut left_out = 0;
    for entry in catalogue() {
        let can = ability(entry);
        if !all && can == "known by name" {
            left_out += 1;
            continue;
        }
        let mut name = entry.ids.first().cloned().unwrap_or_default();
        if let Some(short) = entry.names.first() {
            name += &format!(" ({short})");
        }
        let others = entry.ids.len().saturating_sub(1);
        if others > 0 {
            name += &format!(" +{others}");
        }
        hub.add_row([
            name.into(),
            table::right(table::thousands(entry.parameters)),
            can.into(),
        ]);
    }
    table::settle(&mut hub, &[]);
    text += &format!("\n{hub}\n");
    if left_out > 0 {
        text += &format!(
            "{left_out} more are known by name and cannot be predicted yet: --all lists them; record\n\
             a run of one with `cinch trace --script`\n"
        );
    }
    text += "+N: as many more ids have the same shape; --json lists them\n\
             plan one: cinch plan Qwen/Qwen2.5-0.5B --batch-size 4\n";
    text
}

/// The longest row a model has positions for; rotary ones have no end.
fn positions(model: &Architecture) -> String {
    let most = model.positions();
    most.map_or_else(|| "any".to_owned(), |most| most.to_string())
}
