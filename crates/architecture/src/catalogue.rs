//! Well-known hub ids with their shapes: each entry is what its `config.json` says.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

/// One shape, and the ids that have it.
#[derive(Clone, Debug, Deserialize)]
pub struct Entry {
    /// The original uploader's ids, the best known first.
    pub ids: Vec<String>,
    /// Short names that cinch takes besides.
    #[serde(default)]
    pub names: Vec<String>,
    /// Counted from the shape.
    pub parameters: u64,
    pub config: Value,
}

impl Entry {
    pub fn model_type(&self) -> &str {
        self.config
            .get("model_type")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }
}

/// How names of re-uploads lead to the original's.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Naming {
    /// Endings that leave the shape as it is.
    pub revision_suffixes: Vec<String>,
    /// Owners of re-uploads whose names are those of the originals.
    pub reupload_owners: Vec<String>,
    /// Endings that name a quantisation.
    pub quantised_suffixes: std::collections::BTreeMap<String, String>,
    /// Re-uploads with names of their own.
    pub aliases: std::collections::BTreeMap<String, String>,
    /// Re-uploads whose shape is not that of the name: no rule leads to them.
    pub shape_exceptions: Vec<String>,
}

const FILES: &[&str] = &[include_str!("../data/models.json")];
const NAMING: &str = include_str!("../data/naming.json");

static CATALOGUE: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    // A test reads every file, so that a mistake in one is found before it is shipped.
    FILES
        .iter()
        .flat_map(|text| serde_json::from_str::<Vec<Entry>>(text).unwrap_or_default())
        .collect()
});

static NAMES: LazyLock<Naming> = LazyLock::new(|| serde_json::from_str(NAMING).unwrap_or_default());

/// Every entry.
pub fn catalogue() -> &'static [Entry] {
    &CATALOGUE
}

pub(crate) fn naming() -> &'static Naming {
    &NAMES
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::model::Model;
    use crate::{Family, Quantization};

    #[test]
    fn every_file_is_read() {
        for text in FILES {
            serde_json::from_str::<Vec<Entry>>(text).unwrap();
        }
        serde_json::from_str::<Naming>(NAMING).unwrap();
    }

    #[test]
    fn ids_are_unique() {
        let mut seen = BTreeSet::new();
        for entry in catalogue() {
            for name in entry.ids.iter().chain(&entry.names) {
                assert!(seen.insert(name.to_lowercase()), "{name}");
            }
        }
    }

    #[test]
    fn parameters_follow_from_the_shape() {
        let mut counted = 0;
        for entry in catalogue() {
            let Some(family) = Family::of_model_type(entry.model_type()) else {
                continue;
            };
            // Weights that are saved without a head are trained with one here.
            let class = entry.config["architectures"][0].as_str();
            if class != family.classes.first().copied() {
                continue;
            }
            let id = &entry.ids[0];
            let model = match Model::of_config(&entry.config, id, id) {
                Ok(model) => model,
                // Another head is another program, and is refused.
                Err(problem) if problem.to_string().contains("another head") => continue,
                Err(problem) => panic!("{id}: {problem}"),
            };
            assert_eq!(model.architecture.parameters(), entry.parameters, "{id}");
            assert!(
                !matches!(model.quantization, Some(Quantization::Other(ref name)) if name.is_empty())
            );
            counted += 1;
        }
        assert!(counted > 0);
    }
}
