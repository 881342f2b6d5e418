//! What a setting is: key, type, default, the models that have it, and the
//! other names it goes by.

use crate::config::ModelKind;
use crate::value::Kind;

/// One setting: its dotted key is its name everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub key: &'static str,
    pub kind: Kind,
    pub help: &'static str,
    /// In the words a user would type; `None` when there is no value unless
    /// given, or when a model size or another setting supplies it.
    pub default: Option<&'static str>,
    /// The models that have it; empty means all.
    pub models: &'static [ModelKind],
    pub aliases: &'static [Alias],
}

/// Another key for the same setting.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    pub key: &'static str,
    pub meaning: Meaning,
}

/// How an alias's value translates.
#[derive(Clone, Copy, Debug)]
pub enum Meaning {
    /// The same type and value.
    Same,
    /// A switch that stands for one of two values.
    Switch { on: &'static str, off: &'static str },
    /// Words of another program, each with ours.
    Words(&'static [(&'static str, &'static str)]),
}

impl Setting {
    pub fn section(&self) -> &'static str {
        self.key
            .split_once('.')
            .map_or(self.key, |(section, _)| section)
    }

    pub fn belongs_to(&self, model: ModelKind) -> bool {
        self.models.is_empty() || self.models.contains(&model)
    }

    pub(crate) const fn new(key: &'static str, kind: Kind, help: &'static str) -> Self {
        Setting {
            key,
            kind,
            help,
            default: None,
            models: &[],
            aliases: &[],
        }
    }

    pub(crate) const fn default(mut self, default: &'static str) -> Self {
        self.default = Some(default);
        self
    }

    pub(crate) const fn only(mut self, models: &'static [ModelKind]) -> Self {
        self.models = models;
        self
    }

    pub(crate) const fn aliases(mut self, aliases: &'static [Alias]) -> Self {
        self.aliases = aliases;
        self
    }
}

pub(crate) const fn same(key: &'static str) -> Alias {
    Alias {
        key,
        meaning: Meaning::Same,
    }
}

pub(crate) const fn switch(key: &'static str, on: &'static str, off: &'static str) -> Alias {
    Alias {
        key,
        meaning: Meaning::Switch { on, off },
    }
}
