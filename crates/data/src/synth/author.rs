//! Invents programs: picks a subject, then adds functions about it, each with checks.
//!
//! The forms the functions are written in are in `forms`.

use super::program::{Check, Function, Kind, Name, Program};
use crate::random::Random;

/// Words that are no keyword in any of the languages; each record with its plural.
const RECORDS: [(&str, &str); 20] = [
    ("parcel", "parcels"),
    ("account", "accounts"),
    ("sensor", "sensors"),
    ("ticket", "tickets"),
    ("planet", "planets"),
    ("recipe", "recipes"),
    ("student", "students"),
    ("vehicle", "vehicles"),
    ("invoice", "invoices"),
    ("turbine", "turbines"),
    ("garden", "gardens"),
    ("buffer", "buffers"),
    ("tensor", "tensors"),
    ("layer", "layers"),
    ("kernel", "kernels"),
    ("worker", "workers"),
    ("station", "stations"),
    ("bridge", "bridges"),
    ("player", "players"),
    ("order", "orders"),
];
const FIELDS: [&str; 20] = [
    "weight", "height", "price", "score", "age", "depth", "speed", "stock", "rating", "distance",
    "duration", "cost", "width", "charge", "load", "altitude", "pressure", "voltage", "priority",
    "quantity",
];
const PLACES: [&str; 8] = [
    "report", "ledger", "summary", "registry", "planner", "survey", "monitor", "catalog",
];
const ORDINALS: [&str; 6] = ["second", "third", "fourth", "fifth", "sixth", "seventh"];

/// A form's result before it gets its final name: function, and a range for each integer.
pub(super) struct Draft {
    pub(super) function: Function,
    pub(super) ranges: Vec<(i64, i64)>,
}

pub(super) struct Author {
    pub(super) random: Random,
    pub(super) program: Program,
}

/// A program of `num_functions` functions.
pub(super) fn write(seed: u64, num_functions: usize) -> Program {
    let mut random = Random::new(seed, 0x5EED);
    let (record, records) = RECORDS[random.below(RECORDS.len())];
    let mut fields: Vec<Name> = Vec::new();
    let num_fields = random.between(2, 4) as usize;
    while fields.len() < num_fields {
        let name = random.pick(&FIELDS);
        if !fields.iter().any(|f| f == name) {
            fields.push(name.to_owned());
        }
    }
    let num_samples = random.between(2, 5);
    let samples = (0..num_samples)
        .map(|_| fields.iter().map(|_| random.between(1, 60)).collect())
        .collect();
    let place = random.pick(&PLACES);
    let purpose = match random.below(3) {
        0 => format!("Keeps a {place} of {records} and answers questions about them."),
        1 => format!(
            "A small {place} of {records}: {} for each one.",
            list_words(&fields)
        ),
        _ => format!("Functions for the {place} of {records}, with a few helpers for integers."),
    };
    let mut author = Author {
        random,
        program: Program {
            module: format!("{record}_{place}"),
            purpose,
            record: record.to_owned(),
            records: records.to_owned(),
            fields,
            samples,
            functions: Vec::new(),
            checks: Vec::new(),
        },
    };
    for _ in 0..num_functions {
        author.add_function();
    }
    author.program
}

/// "a parcel", "an age".
pub(super) fn with_article(word: &str) -> String {
    let article = if word.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    };
    format!("{article} {word}")
}

/// "a, b and c".
pub(super) fn list_words(words: &[Name]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

impl Author {
    fn add_function(&mut self) {
        let mut draft = self.any_form();
        draft.function.name = self.unused(&draft.function.name);
        let name = draft.function.name.clone();
        let parameters = draft.function.parameters.clone();
        self.program.functions.push(draft.function);
        for _ in 0..self.random.between(1, 3) {
            let mut ranges = draft.ranges.iter();
            let arguments: Vec<Option<i64>> = parameters
                .iter()
                .map(|parameter| match parameter.kind {
                    Kind::List => None,
                    Kind::Integer => ranges
                        .next()
                        .map(|&(low, high)| self.random.between(low, high)),
                })
                .collect();
            let repeated = self
                .program
                .checks
                .iter()
                .any(|c| c.function == name && c.arguments == arguments);
            if let Some(expected) = self.program.call(&name, &arguments)
                && !repeated
            {
                self.program.checks.push(Check {
                    function: name.clone(),
                    arguments,
                    expected,
                });
            }
        }
    }

    fn unused(&self, name: &str) -> Name {
        let taken = |name: &str| self.program.functions.iter().any(|f| f.name == name);
        let ordinals = ORDINALS.iter().map(|ordinal| format!("{name}_{ordinal}"));
        let numbers = (8..).map(|number| format!("{name}_{number}"));
        std::iter::once(name.to_owned())
            .chain(ordinals)
            .chain(numbers)
            .find(|candidate| !taken(candidate))
            .unwrap_or_default()
    }
}
