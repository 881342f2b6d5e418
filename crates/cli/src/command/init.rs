//! `cinch init`: a configuration for a model and a card, with settings that fit, as a file that
//! explains itself.

mod text;

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::Context;
use cinch_config::{Bytes, Explained, SETTINGS, Settings, Value};
use cinch_fit::search::SettingValue;

use super::{fit, print};
use crate::args::{Engine, FitArguments, InitArguments};
use crate::failure::usage;
use crate::memory::Budget;
use crate::progress::shown;
use crate::pytorch;
use crate::settings::{Asked, for_the_engine};
use text::{Entry, Language};

/// Settings of a training run that are worth a look before it starts.
const TRAINING: [&str; 7] = [
    "training.learning_rate",
    "training.warmup_steps",
    "training.max_steps",
    "training.eval_interval",
    "training.save_interval",
    "training.seed",
    "data.tokenizer",
];

/// What was found to fit.
pub struct Fitting {
    pub values: Vec<SettingValue>,
    pub budget: Budget,
    /// What the run takes.
    pub bytes: u64,
}

pub fn run(arguments: &InitArguments) -> anyhow::Result<()> {
    let path = &arguments.output;
    let language = Language::of(path)?;
    // Before the search, so that nothing is computed for a file that cannot be written.
    if path.exists() {
        return Err(exists(path));
    }
    let subject = arguments.subject.as_deref();
    let asked = Asked::read(&arguments.settings, subject, None)?;
    let fit_arguments = FitArguments {
        subject: arguments.subject.clone(),
        settings: arguments.settings.clone(),
        ..FitArguments::default()
    };
    let (fitting, trains) = match asked.engine {
        Engine::Pytorch => (pytorch::chosen::fitting(&fit_arguments, &asked)?, false),
        Engine::Cinch => {
            for_the_engine(&arguments.settings, &asked.settings, &asked.config)?;
            (fit::fitting(&fit_arguments, &asked)?, true)
        }
    };
    let entries = entries(&asked, &fitting, trains);
    let heading = heading(&asked, &fitting, trains, path);
    write_new(path, &language.write(&heading, &entries))?;
    print(&format!(
        "wrote {}: {}, {} of {}\nnext: cinch {} {}",
        shown(path),
        asked.config.model_title(),
        Bytes::new(fitting.bytes),
        Bytes::new(fitting.budget.bytes),
        if trains { "train" } else { "plan" },
        shown(path),
    ))
}

fn exists(path: &Path) -> anyhow::Error {
    usage(format!(
        "{} is there already, and is left as it is\nhint: name another file with --output, or \
         change this one with `cinch fit {} --apply`",
        path.display(),
        path.display()
    ))
}

/// Makes a file that was not there before.
fn write_new(path: &Path, text: &str) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = match file {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(exists(path)),
        other => other.with_context(|| format!("{} cannot be written", path.display()))?,
    };
    file.write_all(text.as_bytes())
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// What the file opens with: what it is for, and what to do with it.
fn heading(asked: &Asked, fitting: &Fitting, trains: bool, path: &Path) -> Vec<String> {
    let budget = &fitting.budget;
    let card = match budget.gpu.as_ref().is_some_and(|rates| rates.is_known) {
        true => budget.whose.clone(),
        false => format!("{} of {}", budget.whose, Bytes::new(budget.capacity)),
    };
    let program = match trains {
        true => "cinch",
        false => "PyTorch",
    };
    let mut lines = vec![
        format!(
            "{} on {card}: {program} takes {} of the budget of {}.",
            asked.config.model_title(),
            Bytes::new(fitting.bytes),
            Bytes::new(budget.bytes)
        ),
        format!("See what it needs: cinch plan {}", shown(path)),
    ];
    if trains {
        lines.push(format!("Train with it:     cinch train {}", shown(path)));
        lines.push(
            "Without data.source, a folder or a file, it trains on built-in text.".to_owned(),
        );
    }
    lines
}

/// The model, what fits, and what a run besides is made of.
fn entries(asked: &Asked, fitting: &Fitting, trains: bool) -> Vec<Entry> {
    let explained = asked.settings.explain();
    let value_of = |key: &str| value(&explained, key);
    let mut entries: Vec<Entry> = Vec::new();
    let mut add = |key: &'static str, value: Option<Value>| {
        let is_new = entries.iter().all(|entry: &Entry| entry.key != key);
        if let Some(value) = value.filter(|_| is_new) {
            entries.push(Entry::new(key, value));
        }
    };
    add("model.type", value_of("model.type"));
    add("model.size", value_of("model.size"));
    for one in &explained {
        if is_stated(&asked.settings, one) {
            add(one.key, Some(one.value.clone()));
        }
    }
    // Rounded down to what a person reads, so that the budget stays one.
    let budget = Bytes::new(fitting.budget.bytes >> 20 << 20);
    add("vram.budget", Some(Value::Size(budget)));
    for one in &fitting.values {
        add(one.key, one.value.clone().map(Value::Text));
    }
    if trains {
        for key in TRAINING {
            add(key, value_of(key));
        }
    }
    let place = |entry: &Entry| SETTINGS.iter().position(|one| one.key == entry.key);
    entries.sort_by_key(place);
    entries
}

/// Whether the user gave a setting; the budget is written as it was worked out.
fn is_stated(settings: &Settings, one: &Explained) -> bool {
    settings.is_explicit(one.key) && one.key != "vram.budget"
}

fn value(explained: &[Explained], key: &str) -> Option<Value> {
    let found = explained.iter().find(|one| one.key == key);
    found.map(|one| one.value.clone())
}
