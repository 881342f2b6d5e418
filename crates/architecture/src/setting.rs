//! The settings of a shape: each is one number of the model, declared once with its key, its
//! range, and how it is read and written.

use std::fmt;

use crate::Architecture;

/// One number or switch of a shape that a configuration file or a flag can state.
#[derive(Debug)]
pub struct ShapeSetting {
    /// As files and flags have it: `model.d_model`.
    pub key: &'static str,
    /// Other keys that mean the same.
    pub aliases: &'static [&'static str],
    pub range: Range,
    pub help: &'static str,
    /// Of the architecture it belongs to; none of another.
    pub get: fn(&Architecture) -> Option<Number>,
    /// Leaves another architecture, and a number of another kind, as it is.
    pub set: fn(&mut Architecture, Number),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Whole(u64),
    Real(f64),
    Switch(bool),
}

impl fmt::Display for Number {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => write!(formatter, "{number}"),
            Number::Real(number) => write!(formatter, "{number}"),
            Number::Switch(on) => write!(formatter, "{on}"),
        }
    }
}

impl Number {
    pub fn whole(self) -> Option<u64> {
        match self {
            Number::Whole(number) => Some(number),
            Number::Real(_) | Number::Switch(_) => None,
        }
    }

    pub fn real(self) -> Option<f64> {
        match self {
            Number::Whole(_) | Number::Switch(_) => None,
            Number::Real(number) => Some(number),
        }
    }

    pub fn switch(self) -> Option<bool> {
        match self {
            Number::Whole(_) | Number::Real(_) => None,
            Number::Switch(is_on) => Some(is_on),
        }
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Number {
        Number::Whole(number)
    }
}

impl From<bool> for Number {
    fn from(is_on: bool) -> Number {
        Number::Switch(is_on)
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Number {
        Number::Real(number)
    }
}

/// What a setting takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    Whole {
        min: u64,
        max: u64,
    },
    /// From 0 to just below 1.
    Rate,
    /// Above 0.
    Positive,
    /// On or off.
    Switch,
}

pub(crate) const fn count(max: u64) -> Range {
    Range::Whole { min: 1, max }
}

/// The most tokens of a sequence or a vocabulary: far beyond any model that fits a machine, so that
/// a slip of the keyboard is told as one and not as an overflow.
pub(crate) const MOST_TOKENS: u64 = 1 << 24;
pub(crate) const MOST_WIDTH: u64 = 1 << 16;
pub(crate) const MOST_LAYERS: u64 = 1 << 12;
pub(crate) const MOST_HEADS: u64 = 1 << 10;
pub(crate) const MOST_STEPS: u64 = 1 << 48;

/// Declares a setting that is one field of one architecture.
macro_rules! shape_setting {
    ($architecture:ident . $field:ident : $number:ident, $key:literal, [$($alias:literal),*], $range:expr, $help:literal) => {
        $crate::setting::ShapeSetting {
            key: concat!("model.", $key),
            aliases: &[$(concat!("model.", $alias)),*],
            range: $range,
            help: $help,
            get: |architecture| match architecture {
                $crate::Architecture::$architecture(shape) => Some(shape.$field.into()),
                _ => None,
            },
            set: |architecture, number| {
                if let ($crate::Architecture::$architecture(shape), Some(number)) =
                    (architecture, number.$number())
                {
                    shape.$field = number;
                }
            },
        }
    };
}
pub(crate) use shape_setting;

/// A setting of a model that changes its memory and speed but not its result.
#[derive(Debug)]
pub struct Tunable {
    /// The setting's key.
    pub key: &'static str,
    /// Values worth trying besides the configured one.
    pub candidates: &'static [u64],
    /// What a value means: "scan states every 64 steps".
    pub describe: fn(u64) -> String,
}
