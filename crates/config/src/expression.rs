//! How a value is said under a name of some program: as it is, as one of its
//! words, or by a switch.

use crate::Bytes;
use crate::dialect::scalar::word;
use crate::document::Scalar;
use crate::setting::Meaning;
use crate::value::Value;

/// How a value is said under a name.
pub(crate) enum Expression {
    Exact(Scalar),
    /// All blocks, where some were meant and only all or none can be said, and the switch for it.
    AllBlocks(bool),
    /// The switch of another value, which must be off.
    NotThis,
}

impl Expression {
    pub(crate) fn scalar(&self) -> Scalar {
        match self {
            Expression::Exact(scalar) => scalar.clone(),
            Expression::AllBlocks(switch) => Scalar::Bool(*switch),
            Expression::NotThis => Scalar::Bool(false),
        }
    }

    pub(crate) fn remark(&self, key: &str, value: &Value) -> Option<String> {
        matches!(self, Expression::AllBlocks(_)).then(|| {
            format!(
                "`{key}` knows only all blocks or none: it recomputes all, where {value} would do; that takes less memory and more time"
            )
        })
    }
}

pub(crate) fn express(meaning: Meaning, value: &Value, old: Option<&Scalar>) -> Option<Expression> {
    let own = value.to_string();
    match meaning {
        Meaning::Same => Some(Expression::Exact(scalar(value))),
        Meaning::List => None,
        // A word that means it already stays.
        Meaning::SwitchOr { words, .. }
            if old.and_then(word).is_some_and(|old| {
                words
                    .iter()
                    .any(|(theirs, ours)| *theirs == old && *ours == own)
            }) =>
        {
            old.cloned().map(Expression::Exact)
        }
        Meaning::Switch { on, off } | Meaning::SwitchOr { on, off, .. } => match value {
            _ if own == on => Some(Expression::Exact(Scalar::Bool(true))),
            _ if own == off => Some(Expression::Exact(Scalar::Bool(false))),
            Value::Unsigned(0) if off == "none" => Some(Expression::Exact(Scalar::Bool(false))),
            Value::Unsigned(0) if on == "none" => Some(Expression::Exact(Scalar::Bool(true))),
            Value::Unsigned(_) if on == "full" => Some(Expression::AllBlocks(true)),
            Value::Unsigned(_) if off == "full" => Some(Expression::AllBlocks(false)),
            // `fp16` when bf16 is meant; a file of ours says it in one key.
            Value::Text(_) if is_precision(on) => Some(Expression::NotThis),
            _ => None,
        },
        Meaning::Words(words) => {
            let old = old.and_then(word);
            let means = |(_, ours): &&(&str, &str)| *ours == own;
            // `16` stays short and `16-mixed` long.
            let alike = |(theirs, _): &&(&str, &str)| {
                old.as_ref()
                    .is_some_and(|old| old.contains('-') == theirs.contains('-'))
            };
            let same = |(theirs, _): &&(&str, &str)| {
                old.as_ref()
                    .is_some_and(|old| old.eq_ignore_ascii_case(theirs))
            };
            let candidates = || words.iter().filter(means);
            let (theirs, _) = candidates()
                .find(same)
                .or_else(|| candidates().find(alike))
                .or_else(|| candidates().next())?;
            let number = theirs.chars().all(|c| c.is_ascii_digit());
            Some(Expression::Exact(if number {
                Scalar::Number((*theirs).to_owned())
            } else {
                Scalar::Text((*theirs).to_owned())
            }))
        }
    }
}

/// Whether a switch is one of several for the precision.
fn is_precision(on: &str) -> bool {
    on.contains("fp16") || on.contains("bf16")
}

/// A value as files hold it.
pub(crate) fn scalar(value: &Value) -> Scalar {
    match value {
        Value::Bool(value) => Scalar::Bool(*value),
        Value::Unsigned(_) | Value::Float(_) => Scalar::Number(value.to_string()),
        Value::Text(text) => Scalar::Text(text.clone()),
        Value::Size(size) => Scalar::Text(exact_size(*size)),
        Value::Path(path) => Scalar::Text(path.to_string_lossy().into_owned()),
    }
}

/// `24gb`, or bytes where the size is no whole number of anything larger.
fn exact_size(size: Bytes) -> String {
    [(Bytes::GIB, "gb"), (Bytes::MIB, "mb"), (Bytes::KIB, "kb")]
        .into_iter()
        .find(|(unit, _)| size.get() > 0 && size.get().is_multiple_of(unit.get()))
        .map_or_else(
            || format!("{}b", size.get()),
            |(unit, name)| format!("{}{name}", size.get() / unit.get()),
        )
}
