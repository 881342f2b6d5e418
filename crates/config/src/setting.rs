//! What a setting is: key, type, default, the models that have it, and the
//! other names it goes by.

use cinch_architecture::Family;

use crate::value::Kind;

/// One setting: its dotted key is its name everywhere.
#[derive(Clone, Debug)]
pub struct Setting {
    pub key: &'static str,
    pub kind: Kind,
    pub help: &'static str,
    /// In the words a user would type; `None` when there is no value unless
    /// given, or when a model size or another setting supplies it.
    pub default: Option<&'static str>,
    /// The families that have it; empty means all.
    pub families: Vec<&'static Family>,
    pub aliases: Vec<Alias>,
    /// Other words for its values: `half` for `fp16`.
    pub synonyms: &'static [(&'static str, &'static str)],
    /// How it is given on a command line.
    pub flag: Option<Flag>,
}

/// A setting as a flag.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Without the dashes.
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    /// What its value is called in help; none for a switch.
    pub value: Option<&'static str>,
    pub heading: &'static str,
    /// In place of the setting's own, where a command line needs more words.
    pub help: Option<&'static str>,
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
    /// A switch that may be a word too.
    SwitchOr {
        on: &'static str,
        off: &'static str,
        words: &'static [(&'static str, &'static str)],
    },
    /// A list of texts, kept here as one text with commas.
    List,
}

impl Meaning {
    /// Every value of ours that it can lead to.
    #[cfg(test)]
    pub(crate) fn values(self) -> Vec<&'static str> {
        let ours = |words: &'static [(&'static str, &'static str)]| {
            words.iter().map(|(_, own)| *own).collect::<Vec<_>>()
        };
        match self {
            Meaning::Same | Meaning::List => Vec::new(),
            Meaning::Switch { on, off } => vec![on, off],
            Meaning::Words(words) => ours(words),
            Meaning::SwitchOr { on, off, words } => [vec![on, off], ours(words)].concat(),
        }
    }
}

impl Setting {
    pub fn section(&self) -> &'static str {
        self.key
            .split_once('.')
            .map_or(self.key, |(section, _)| section)
    }

    /// The value that a word stands for.
    pub(crate) fn plain_word<'a>(&self, word: &'a str) -> &'a str {
        let mut synonyms = self.synonyms.iter();
        let found = synonyms.find(|(synonym, _)| synonym.eq_ignore_ascii_case(word.trim()));
        found.map_or(word, |(_, plain)| plain)
    }

    pub fn belongs_to(&self, family: &Family) -> bool {
        self.families.is_empty() || self.families.contains(&family)
    }

    pub(crate) fn new(key: &'static str, kind: Kind, help: &'static str) -> Self {
        Setting {
            key,
            kind,
            help,
            default: None,
            families: Vec::new(),
            aliases: Vec::new(),
            synonyms: &[],
            flag: None,
        }
    }

    pub(crate) fn default(mut self, default: &'static str) -> Self {
        self.default = Some(default);
        self
    }

    pub(crate) fn synonyms(mut self, synonyms: &'static [(&'static str, &'static str)]) -> Self {
        self.synonyms = synonyms;
        self
    }

    /// A flag with a value.
    pub(crate) fn flag(mut self, name: &'static str, value: &'static str) -> Self {
        let heading = match self.section() {
            "pytorch" => "PyTorch",
            "lora" => "Adapters",
            _ => "Settings",
        };
        self.flag = Some(Flag {
            name,
            aliases: &[],
            value: Some(value),
            heading,
            help: None,
        });
        self
    }

    /// A flag that is there or not.
    pub(crate) fn switch_flag(mut self, name: &'static str) -> Self {
        self = self.flag(name, "");
        if let Some(flag) = &mut self.flag {
            flag.value = None;
        }
        self
    }

    pub(crate) fn flag_aliases(mut self, aliases: &'static [&'static str]) -> Self {
        if let Some(flag) = &mut self.flag {
            flag.aliases = aliases;
        }
        self
    }

    pub(crate) fn flag_help(mut self, help: &'static str) -> Self {
        if let Some(flag) = &mut self.flag {
            flag.help = Some(help);
        }
        self
    }

    pub(crate) fn aliases(mut self, aliases: &[Alias]) -> Self {
        self.aliases = aliases.to_vec();
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
