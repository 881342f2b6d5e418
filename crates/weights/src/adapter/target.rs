//! Which modules an adapter is put on, by peft's rules.
//!
//! A name in a list means the module of that name and every module whose name ends in `.name`; a
//! string is a regular expression for whole names; `all-linear` is every linear module but the
//! output head. Left out is what `exclude_modules` names, what lies in a module of
//! `modules_to_save`, and, of modules that a list matched by their ending, what is not in
//! `layers_to_transform`.

use std::collections::BTreeSet;

use fancy_regex::Regex;

use super::config::{AdapterConfig, Modules, Targets};
use crate::error::WeightError;

/// A module with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedModule {
    pub name: String,
    pub rank: usize,
    /// What the product of the factors is multiplied by.
    pub scale: f64,
}

impl AdapterConfig {
    /// The modules of a model that are adapted, in the order of `linear`, which has the names of
    /// all linear modules; `head` is the output head among them.
    ///
    /// peft goes on where one of several names matches nothing; here that is an error, because a
    /// misspelt name would train less than was asked for.
    pub fn adapted(
        &self,
        linear: &[impl AsRef<str>],
        head: Option<&str>,
    ) -> Result<Vec<AdaptedModule>, WeightError> {
        let names: Vec<&str> = linear.iter().map(AsRef::as_ref).collect();
        if let Targets::Modules(Modules::Names(targets)) = &self.targets {
            for target in targets {
                if !names.iter().any(|name| is_or_ends_in(name, target)) {
                    return Err(nothing_matched(target, &names));
                }
            }
        }
        let rules = Rules::of(self)?;
        let mut adapted = Vec::new();
        for &name in &names {
            if rules.take(name, head)? {
                adapted.push(AdaptedModule {
                    name: name.to_owned(),
                    rank: self.rank_of(name)?,
                    scale: self.scale_of(name)?,
                });
            }
        }
        match adapted.is_empty() {
            true => Err(nothing_matched(&self.targets_as_text(), &names)),
            false => Ok(adapted),
        }
    }

    /// The rank of a module, which a pattern may give.
    pub fn rank_of(&self, module: &str) -> Result<usize, WeightError> {
        Ok(pattern_of("rank_pattern", &self.rank_pattern, module)?.unwrap_or(self.rank))
    }

    /// What the product of a module's factors is multiplied by.
    pub fn scale_of(&self, module: &str) -> Result<f64, WeightError> {
        let alpha = pattern_of("alpha_pattern", &self.alpha_pattern, module)?;
        let rank = self.rank_of(module)? as f64;
        let divisor = if self.use_rslora { rank.sqrt() } else { rank };
        Ok(alpha.unwrap_or(self.alpha) / divisor)
    }

    fn targets_as_text(&self) -> String {
        match &self.targets {
            Targets::AllLinear => "all-linear".to_owned(),
            Targets::Modules(Modules::Pattern(pattern)) => pattern.clone(),
            Targets::Modules(Modules::Names(names)) => names.join(", "),
        }
    }
}

/// The value of the first pattern that matches a module's name or its end.
fn pattern_of<T: Copy>(
    key: &'static str,
    patterns: &[(String, T)],
    module: &str,
) -> Result<Option<T>, WeightError> {
    for (pattern, value) in patterns {
        let regex = compile(key, pattern, &format!(r"\A(.*\.)?({pattern})\z"))?;
        if matches(key, pattern, &regex, module)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// The patterns of a configuration, compiled.
struct Rules<'a> {
    config: &'a AdapterConfig,
    target: Option<Regex>,
    exclude: Option<Regex>,
    saved: Vec<Regex>,
    /// Each finds the number of a layer.
    layers: Vec<Regex>,
}

impl<'a> Rules<'a> {
    fn of(config: &'a AdapterConfig) -> Result<Rules<'a>, WeightError> {
        let whole = |key, modules: Option<&Modules>| match modules {
            Some(Modules::Pattern(pattern)) => {
                compile(key, pattern, &format!(r"\A(?:{pattern})\z")).map(Some)
            }
            _ => Ok(None),
        };
        let target = match &config.targets {
            Targets::Modules(modules) => Some(modules),
            Targets::AllLinear => None,
        };
        let saved = config.modules_to_save.iter().map(|module| {
            let pattern = format!(r"\A(?:.*\.)?{module}(?:\..*)?\z");
            compile("modules_to_save", module, &pattern)
        });
        // The first number that follows a name counts, not that of an expert further on.
        let layers = match config.layers_pattern.is_empty() {
            true => vec![compile("layers_pattern", "", r"\A.*?\.[^.]*\.(\d+)\.")?],
            false => {
                let patterns = config.layers_pattern.iter().map(|name| {
                    let pattern = format!(r"\A(?:.*?\.)?{name}\.(\d+)\.");
                    compile("layers_pattern", name, &pattern)
                });
                patterns.collect::<Result<_, _>>()?
            }
        };
        Ok(Rules {
            config,
            target: whole("target_modules", target)?,
            exclude: whole("exclude_modules", config.exclude.as_ref())?,
            saved: saved.collect::<Result<_, _>>()?,
            layers,
        })
    }

    fn take(&self, name: &str, head: Option<&str>) -> Result<bool, WeightError> {
        let excluded = match &self.config.exclude {
            Some(Modules::Names(names)) => names.iter().any(|end| is_or_ends_in(name, end)),
            _ => self.is_match("exclude_modules", self.exclude.as_ref(), name)?,
        };
        if excluded {
            return Ok(false);
        }
        for saved in &self.saved {
            if matches("modules_to_save", saved.as_str(), saved, name)? {
                return Ok(false);
            }
        }
        match &self.config.targets {
            Targets::AllLinear => Ok(head != Some(name)),
            Targets::Modules(Modules::Pattern(_)) => {
                self.is_match("target_modules", self.target.as_ref(), name)
            }
            Targets::Modules(Modules::Names(names)) => {
                if names.iter().any(|target| target == name) {
                    return Ok(true);
                }
                let ends = names.iter().any(|target| is_or_ends_in(name, target));
                Ok(ends && self.is_in_layers(name)?)
            }
        }
    }

    fn is_match(
        &self,
        key: &'static str,
        regex: Option<&Regex>,
        name: &str,
    ) -> Result<bool, WeightError> {
        regex.map_or(Ok(false), |regex| matches(key, regex.as_str(), regex, name))
    }

    fn is_in_layers(&self, name: &str) -> Result<bool, WeightError> {
        if self.config.layers.is_empty() {
            return Ok(true);
        }
        for regex in &self.layers {
            let found = regex
                .captures(name)
                .map_err(|error| wrong("layers_pattern", regex.as_str(), &error))?;
            if let Some(number) = found.and_then(|found| found.get(1)) {
                let layer = number.as_str().parse::<usize>();
                return Ok(layer.is_ok_and(|layer| self.config.layers.contains(&layer)));
            }
        }
        Ok(false)
    }
}

fn is_or_ends_in(name: &str, end: &str) -> bool {
    name == end
        || name
            .strip_suffix(end)
            .is_some_and(|before| before.ends_with('.'))
}

fn compile(key: &'static str, written: &str, pattern: &str) -> Result<Regex, WeightError> {
    Regex::new(pattern).map_err(|error| wrong(key, written, &error))
}

fn matches(
    key: &'static str,
    written: &str,
    regex: &Regex,
    name: &str,
) -> Result<bool, WeightError> {
    regex
        .is_match(name)
        .map_err(|error| wrong(key, written, &error))
}

fn wrong(key: &'static str, pattern: &str, error: &fancy_regex::Error) -> WeightError {
    WeightError::Pattern {
        key,
        pattern: pattern.to_owned(),
        problem: error.to_string(),
    }
}

fn nothing_matched(target: &str, names: &[&str]) -> WeightError {
    let ends: BTreeSet<&str> = names
        .iter()
        .filter_map(|name| name.rsplit('.').next())
        .collect();
    WeightError::NoTarget {
        target: target.to_owned(),
        ends: ends.into_iter().map(str::to_owned).collect(),
        example: names.first().map(|&name| name.to_owned()),
    }
}
