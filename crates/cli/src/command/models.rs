//! `cinch models`: what can be trained, what can be predicted, and which names are known.

mod claims;

use cinch_architecture::{
    ARCHITECTURES, Architecture, CatalogueEntry, Family, Model, Number, catalogue, trained_sizes,
};
use cinch_config::Bytes;
use cinch_graph::DType;
use serde_json::{Value, json};

use super::{print, print_json};
use crate::args::ModelsArguments;
use crate::table;
use claims::{Answer, claims, trainable};

pub fn run(arguments: &ModelsArguments) -> anyhow::Result<()> {
    match arguments.json {
        true => print_json(&as_json()?),
        false => print(&describe(arguments.all)?),
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

/// What guides say of an entry's model.
fn claims_of_entry(entry: &CatalogueEntry) -> anyhow::Result<Vec<Answer>> {
    let Some(name) = entry.names.first() else {
        return Ok(Vec::new());
    };
    match Model::of_config(&entry.config, name, "config.json") {
        Ok(model) => claims(name, "", &model.architecture),
        // Known by name alone: no guide is about it.
        Err(_) => Ok(Vec::new()),
    }
}

fn as_json() -> anyhow::Result<Value> {
    let whole = |model: &Architecture, key: &str| model.get(key).and_then(Number::whole);
    let json_of = |answers: Vec<Answer>| answers.iter().map(Answer::json).collect::<Value>();
    let sizes = ARCHITECTURES
        .iter()
        .flat_map(|listed| listed.family.sizes.iter().map(move |size| (listed, size)))
        .map(|(listed, size)| {
            let model = (size.shape)();
            let trainable = listed.is_trained.then(|| trainable(&model)).transpose()?;
            Ok(json!({
                "model": listed.family.name,
                "size": size.name,
                "aliases": size.aliases,
                "parameters": model.parameters(),
                "trainable": trainable,
                "d_model": whole(&model, "model.d_model"),
                "n_layers": model.layers(),
                "n_heads": whole(&model, "model.n_heads"),
                "max_seq_len": model.positions(),
                "vocab_size": model.vocabulary(),
                "can": if listed.is_trained { "trained" } else { "predicted" },
                "claims": json_of(claims(listed.family.name, size.name, &model)?),
            }))
        });
    let hub = catalogue().iter().map(|entry| {
        Ok(json!({
            "ids": entry.ids,
            "names": entry.names,
            "family": entry.model_type(),
            "parameters": entry.parameters,
            "can": ability(entry),
            "claims": json_of(claims_of_entry(entry)?),
        }))
    });
    sizes.chain(hub).collect()
}

/// What guides say of the models, beside what is true.
fn guides() -> anyhow::Result<comfy_table::Table> {
    let mut guides = table::new(&["guide", "model", "about", "it says", "it is"]);
    let mut add = |model: &str, answers: Vec<Answer>| {
        for answer in answers {
            guides.add_row([
                answer.guide.into(),
                model.into(),
                answer.about.into(),
                table::right(answer.claimed),
                table::right(answer.computed()),
            ]);
        }
    };
    // In the order of the guides, of which one is about a model of the hub.
    let mut all = Vec::new();
    for (family, size) in trained_sizes() {
        let named = match family.name == size.name {
            true => size.name.to_owned(),
            false => family.title_of(size),
        };
        all.push((named, claims(family.name, size.name, &(size.shape)())?));
    }
    for entry in catalogue() {
        let named = entry.names.first().cloned().unwrap_or_default();
        all.push((named, claims_of_entry(entry)?));
    }
    all.sort_by_key(|(_, answers)| answers.first().map(|answer| answer.guide));
    for (model, answers) in all {
        add(&model, answers);
    }
    table::settle(&mut guides, &[]);
    Ok(guides)
}

fn describe(all: bool) -> anyhow::Result<String> {
    let mut frozen = String::new();
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
        let trained = trainable(&model)?;
        if trained < model.parameters() {
            let named = size.name;
            let trained = table::thousands(trained);
            frozen +=
                &format!("of {named}, {trained} parameters are trained; the others are frozen\n");
        }
    }
    // The weights' size follows from their number.
    table::settle(&mut sizes, &[3]);
    let mut text = format!(
        "trained by cinch, and predicted for PyTorch (--model NAME --model-size SIZE):\n{sizes}\n{frozen}"
    );
    text += &format!(
        "\nwhat guides say of these models, beside what is true (of their steps: cinch plan --engine \
         pytorch --guides):\n{}\n\
         mu's attention is that of a layer, 32 sequences of 512 tokens in fp32; where no type is \
         named, weights, gradients and states are in fp32\n",
        guides()?
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
    Ok(text)
}

/// The longest row a model has positions for; rotary ones have no end.
fn positions(model: &Architecture) -> String {
    let most = model.positions();
    most.map_or_else(|| "any".to_owned(), |most| most.to_string())
}
