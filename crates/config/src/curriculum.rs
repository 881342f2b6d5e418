//! The stages of a curriculum: which pairs each trains on, and with how many negatives.
//!
//! A stage is a file of its own, `text_curriculum/01_stage.yaml`, beside the main one. All of them
//! together are the setting `data.curriculum`, so that a run that goes on has the stages that it
//! began with.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::document::{Document, Scalar};

/// One stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    pub name: String,
    /// Positives of each anchor at most; none leaves it to the other settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_positives: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_negatives: Option<u64>,
    /// What pairs and negatives are limited to, by the names that files have for it.
    #[serde(flatten)]
    pub limits: BTreeMap<String, Vec<String>>,
}

impl Stage {
    /// The keys that limit what a stage draws.
    pub const LIMITS: [&'static str; 9] = [
        "anchor_level",
        "positive_level",
        "positive_relation",
        "positive_distance",
        "negative_level",
        "negative_relation",
        "negative_distance",
        "relation_margin",
        "distance_margin",
    ];

    /// The stage that a file describes, where it describes one: it says how many positives or
    /// negatives there are, at its top.
    pub(crate) fn of(document: &Document) -> Option<Stage> {
        let entries = document.entries.iter();
        let mut top = entries.filter_map(|entry| match &entry.path[..] {
            [key] => Some((key.as_str(), &entry.scalar)),
            _ => None,
        });
        let number = |scalar: &Scalar| match scalar {
            Scalar::Number(text) | Scalar::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        let stem = document.path.file_stem();
        let stem = stem.map(|stem| stem.to_string_lossy().into_owned());
        let mut stage = Stage {
            name: stem.unwrap_or_default(),
            ..Stage::default()
        };
        top.by_ref().for_each(|(key, scalar)| match (key, scalar) {
            ("name", Scalar::Text(name)) => stage.name = name.clone(),
            ("n_positives", scalar) => stage.n_positives = number(scalar),
            ("n_negatives", scalar) => stage.n_negatives = number(scalar),
            (key, scalar) if Self::LIMITS.contains(&key) => {
                if let Some(words) = words_of(scalar) {
                    stage.limits.insert(key.to_owned(), words);
                }
            }
            _ => {}
        });
        (stage.n_positives.is_some() || stage.n_negatives.is_some()).then_some(stage)
    }

    /// Whether a word names it: all of the name, or what it begins with, such as `01`.
    pub(crate) fn is_called(&self, word: &str) -> bool {
        let rest = self.name.strip_prefix(word);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
    }
}

/// A list, or one value as a list of one; null is no limit. What is neither is kept as it stands,
/// for the one who reads it to refuse.
fn words_of(scalar: &Scalar) -> Option<Vec<String>> {
    match scalar {
        Scalar::Number(text) | Scalar::Text(text) => Some(vec![text.clone()]),
        Scalar::List(items) => Some(items.iter().filter_map(words_of).flatten().collect()),
        Scalar::Bool(_) | Scalar::Composite(_) => Some(vec![scalar.to_string()]),
        Scalar::Null => None,
    }
}
