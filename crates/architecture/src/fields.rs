//! Fields of a `config.json`: read under the names they go by, held to what a model can be, and named in errors with their
//! values.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::activation::Activation;
use crate::error::ArchitectureError;

/// The largest number of anything that a configuration may ask for: it keeps products of sizes far from overflow.
pub(crate) const LARGEST: u64 = 1 << 20;
/// The same for heads, which multiply the square of the length.
pub(crate) const MOST_HEADS: u64 = 1 << 10;
/// The same for layers, of which each costs time.
pub(crate) const MOST_LAYERS: u64 = 4096;
/// The same for states of a channel, which multiply the tokens and the channels.
pub(crate) const MOST_STATES: u64 = 1 << 10;

/// The window of Mistral and Qwen2 where the configuration does not name one.
const WINDOW: u64 = 4096;
/// Qwen2's layers that see everything, where it does not say.
const FULL_LAYERS: u64 = 28;

const ROTARY_SHARE: &str = "partial_rotary_factor";

/// The fields of a `config.json`.
#[derive(Debug)]
pub struct Fields<'a>(pub &'a Value);

impl Fields<'_> {
    pub fn problem(&self, key: &str, value: impl ToString, wanted: &str) -> ArchitectureError {
        ArchitectureError::Field {
            origin: "config.json".into(),
            key: key.into(),
            value: value.to_string(),
            wanted: wanted.into(),
        }
    }

    pub fn text(&self, key: &str) -> Result<&str, ArchitectureError> {
        match self.0.get(key) {
            Some(Value::String(text)) => Ok(text),
            other => Err(self.problem(key, other.unwrap_or(&Value::Null), "a name")),
        }
    }

    /// A whole number of a range, or what else there may be.
    pub fn whole(
        &self,
        key: &str,
        value: &Value,
        range: RangeInclusive<u64>,
        or: &str,
    ) -> Result<u64, ArchitectureError> {
        match value.as_u64() {
            Some(number) if range.contains(&number) => Ok(number),
            _ => {
                let (least, most) = range.into_inner();
                let wanted = format!("a whole number from {least} to {most}{or}");
                Err(self.problem(key, value, &wanted))
            }
        }
    }

    /// A positive number under one of the names it goes by.
    pub fn optional(&self, keys: &[&str], most: u64) -> Result<Option<u64>, ArchitectureError> {
        for key in keys {
            match self.0.get(key) {
                None | Some(Value::Null) => {}
                Some(value) => return self.whole(key, value, 1..=most, "").map(Some),
            }
        }
        Ok(None)
    }

    pub fn number(&self, keys: &[&str], default: u64) -> Result<u64, ArchitectureError> {
        Ok(self.optional(keys, LARGEST)?.unwrap_or(default))
    }

    pub fn layers(&self, keys: &[&str], default: u64) -> Result<u64, ArchitectureError> {
        Ok(self.optional(keys, MOST_LAYERS)?.unwrap_or(default))
    }

    pub fn probability(&self, key: &str, default: f64) -> Result<f64, ArchitectureError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => match value.as_f64() {
                Some(number) if (0.0..1.0).contains(&number) => Ok(number),
                _ => Err(self.problem(key, value, "a number from 0 to 1")),
            },
        }
    }

    /// A number above zero, where there is one.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, ArchitectureError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
                _ => Err(self.problem(key, value, "a positive number")),
            },
        }
    }

    pub fn activation(
        &self,
        key: &str,
        default: Activation,
    ) -> Result<Activation, ArchitectureError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => value.as_str().and_then(Activation::named).ok_or_else(|| {
                self.problem(key, value, &format!("one of {}", Activation::names()))
            }),
        }
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ArchitectureError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.problem(key, value, "true or false")),
        }
    }

    /// Settings that make another program of a model, which is not written down here.
    pub fn refuse(&self, keys: &[&str]) -> Result<(), ArchitectureError> {
        for key in keys {
            if self.flag(key, false)? {
                return Err(self.problem(key, true, "false: the replay does not have it"));
            }
        }
        Ok(())
    }

    /// The tokens that a layer looks back over; null for all of them.
    pub fn window(&self) -> Result<Option<u64>, ArchitectureError> {
        const KEY: &str = "sliding_window";
        match self.0.get(KEY) {
            None => Ok(Some(WINDOW)),
            Some(Value::Null) => Ok(None),
            Some(value) => self
                .whole(KEY, value, 1..=LARGEST, ", or null for none")
                .map(Some),
        }
    }

    /// The first layers of Qwen2 that look back over everything even where windows are on; there may be none.
    pub fn full_layers(&self) -> Result<u64, ArchitectureError> {
        const KEY: &str = "max_window_layers";
        match self.0.get(KEY) {
            None | Some(Value::Null) => Ok(FULL_LAYERS),
            Some(value) => self.whole(KEY, value, 0..=MOST_LAYERS, ""),
        }
    }

    /// The share of each head that rotary positions turn. Newer files have it with the other rotary parameters.
    pub fn rotary_share(&self) -> Result<Option<f64>, ArchitectureError> {
        for key in ["rope_parameters", "rope_scaling"] {
            let inner = self.0.get(key).filter(|value| value.is_object());
            if let Some(share) = inner.map(|inner| Fields(inner).positive(ROTARY_SHARE))
                && let Some(share) = share?
            {
                return Ok(Some(share));
            }
        }
        self.positive(ROTARY_SHARE)
    }

    /// The numbers of a head that a share of it is: an even number.
    pub fn rotary_width(&self, head_width: u64, share: f64) -> Result<u64, ArchitectureError> {
        let width = (head_width as f64 * share) as u64;
        if width == 0 || width > head_width || !width.is_multiple_of(2) {
            let wanted = format!("a share that is an even part of a head's {head_width} numbers");
            return Err(self.problem(ROTARY_SHARE, share, &wanted));
        }
        Ok(width)
    }

    /// Heads must divide the width.
    pub fn heads(&self, keys: &[&str], default: u64, width: u64) -> Result<u64, ArchitectureError> {
        let heads = self.optional(keys, MOST_HEADS)?.unwrap_or(default);
        if width.is_multiple_of(heads) {
            Ok(heads)
        } else {
            Err(self.problem(keys[0], heads, &format!("a divisor of the width {width}")))
        }
    }
}
