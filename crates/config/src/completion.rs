//! The layers while they are being completed: access by type, and the notes
//! that gather on the way.

use std::path::PathBuf;

use crate::Bytes;
use crate::error::{ConfigError, Stated};
use crate::settings::Settings;
use crate::source::Layer;
use crate::value::Value;

/// The layers while they are being completed.
pub(crate) struct Completion {
    pub settings: Settings,
    pub notes: Vec<String>,
}

impl Completion {
    pub(crate) fn new(given: &Settings) -> Self {
        Completion {
            settings: given.clone(),
            notes: Vec::new(),
        }
    }

    pub(crate) fn relation(
        &self,
        first: &'static str,
        second: &'static str,
        rule: &'static str,
        hint: String,
    ) -> ConfigError {
        ConfigError::Relation {
            first: Box::new(self.stated(first)),
            second: Box::new(self.stated(second)),
            rule,
            hint,
        }
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.settings
            .effective(key)
            .map(|assignment| &assignment.value)
    }

    /// The accessors below ask for a type the registry declares and a value it,
    /// a size or a rule above supplies: anything else is a bug in this crate.
    pub(crate) fn stated(&self, key: &'static str) -> Stated {
        match self.settings.effective(key) {
            Some(assignment) => Stated {
                key,
                value: assignment.value.clone(),
                source: assignment.source.clone(),
            },
            None => unreachable!("{key} has no value"),
        }
    }

    pub(crate) fn unsigned(&self, key: &'static str) -> u64 {
        match self.value(key) {
            Some(Value::Unsigned(number)) => *number,
            other => unreachable!("{key} is {other:?}, not an integer"),
        }
    }

    /// An integer whose declared range fits `usize` on every target.
    pub(crate) fn count(&self, key: &'static str) -> usize {
        self.unsigned(key) as usize
    }

    pub(crate) fn float(&self, key: &'static str) -> f64 {
        match self.value(key) {
            Some(Value::Float(number)) => *number,
            other => unreachable!("{key} is {other:?}, not a number"),
        }
    }

    pub(crate) fn text(&self, key: &'static str) -> String {
        match self.value(key) {
            Some(Value::Text(text)) => text.clone(),
            other => unreachable!("{key} is {other:?}, not a text"),
        }
    }

    pub(crate) fn path(&self, key: &str) -> Option<PathBuf> {
        match self.value(key) {
            Some(Value::Path(path)) => Some(path.clone()),
            _ => None,
        }
    }

    /// Whether a flag or the environment gives it.
    pub(crate) fn is_typed(&self, key: &str) -> bool {
        self.settings
            .effective(key)
            .is_some_and(|given| matches!(given.layer, Layer::Flag | Layer::Environment))
    }

    pub(crate) fn budget(&self) -> Option<Bytes> {
        match self.value("vram.budget") {
            Some(Value::Size(size)) => Some(*size),
            _ => None,
        }
    }
}
