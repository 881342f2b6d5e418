//! What a value of another program's file says: whether it is one at all, and the same as one of a
//! setting here.

use crate::document::Scalar;
use crate::setting::{Meaning, Setting};
use crate::settings::interpret;
use crate::value::Value;

pub(super) fn is_minus_one(scalar: &Scalar) -> bool {
    matches!(scalar, Scalar::Number(text) if text == "-1")
}

/// Other programs write -1 where a count is not set, and leave texts empty.
pub(crate) fn unset(scalar: &Scalar) -> bool {
    match scalar {
        Scalar::Null => true,
        Scalar::Number(text) => text == "-1",
        Scalar::Text(text) => text.trim().is_empty(),
        Scalar::List(items) => items.is_empty(),
        _ => false,
    }
}

pub(crate) fn switched_off(scalar: &Scalar) -> bool {
    match scalar {
        Scalar::Bool(on) => !on,
        Scalar::Number(text) => matches!(text.as_str(), "0" | "0.0"),
        Scalar::Text(text) => matches!(
            text.to_ascii_lowercase().as_str(),
            "false" | "none" | "no" | "off" | "0" | ""
        ),
        other => unset(other),
    }
}

/// A value that the program finds out when it runs.
pub(crate) fn is_auto(scalar: &Scalar) -> bool {
    matches!(scalar, Scalar::Text(text) if text.eq_ignore_ascii_case("auto"))
}

/// A word as another program would read it: `precision: 16` is the word `16`.
pub(crate) fn word(scalar: &Scalar) -> Option<String> {
    match scalar {
        Scalar::Text(text) | Scalar::Number(text) => Some(text.clone()),
        // YAML reads accelerate's `no` as a switch.
        Scalar::Bool(false) => Some("no".to_owned()),
        Scalar::Bool(true) => Some("yes".to_owned()),
        _ => None,
    }
}

/// The names of a list; a text has commas between them, and may be a list as Python writes it:
/// `'[q_proj,v_proj]'`, which programs built on `fire` take.
pub(super) fn items(scalar: &Scalar) -> Vec<String> {
    let Some(text) = word(scalar) else {
        return match scalar {
            Scalar::List(items) => items.iter().filter_map(word).collect(),
            _ => Vec::new(),
        };
    };
    let bare = text.trim();
    let inside = bare
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let marks: &[char] = match inside {
        Some(_) => &['\'', '"'],
        None => &[],
    };
    let parts = inside.unwrap_or(bare).split(',');
    let parts = parts.map(|part| part.trim().trim_matches(marks).to_owned());
    match inside {
        Some(_) => parts.filter(|part| !part.is_empty()).collect(),
        None => parts.collect(),
    }
}

/// The value that a foreign key gives a setting; none where it says nothing that is known.
pub(super) fn value_of(setting: &Setting, meaning: Meaning, scalar: &Scalar) -> Option<Value> {
    match meaning {
        Meaning::List => {
            let items = items(scalar);
            (!items.is_empty()).then(|| Value::Text(items.join(",")))
        }
        Meaning::Words(_) | Meaning::SwitchOr { .. } | Meaning::Switch { .. } => {
            interpret(setting, meaning, |kind| match (meaning, scalar) {
                (Meaning::Words(_), scalar) => {
                    word(scalar).map(Value::Text).ok_or_else(Default::default)
                }
                (_, scalar @ Scalar::Bool(_)) => kind.read(scalar),
                (_, scalar) => word(scalar).map(Value::Text).ok_or_else(Default::default),
            })
            .ok()
        }
        Meaning::Same => match scalar {
            Scalar::Text(text) | Scalar::Number(text) => {
                setting.kind.parse(setting.plain_word(text)).ok()
            }
            scalar => setting.kind.read(scalar).ok(),
        },
    }
}
