//! The text compiled into the program, so that a fresh install can train without a download.
//!
//! A primer on the memory of training, as prose, and synthetic source files of a fixed seed. It
//! is enough to see a loss fall and a sample take shape; it is not meant to make a useful model.

use crate::synth::{self, Language};

const PRIMER: &str = include_str!("../assets/primer.md");

/// Separates the documents of the primer.
const PRIMER_BREAK: &str = "\n---\n";

const SYNTHETIC_SEED: u64 = 2024;
const NUM_SYNTHETIC: u64 = 75;
const SYNTHETIC_BYTES: usize = 4096;

/// One embedded document.
pub(crate) struct Document {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// All of them, in an order that mixes the languages.
pub(crate) fn documents() -> Vec<Document> {
    let primer = PRIMER
        .split(PRIMER_BREAK)
        .enumerate()
        .map(|(index, text)| Document {
            name: format!("embedded/primer/{index}"),
            text: format!("{}\n", text.trim()),
        });
    let synthetic = (0..NUM_SYNTHETIC).map(|index| {
        let language = Language::ALL[index as usize % Language::ALL.len()];
        Document {
            name: format!("embedded/{language}/{index}"),
            text: synth::text(language, SYNTHETIC_SEED + index, SYNTHETIC_BYTES),
        }
    });
    primer.chain(synthetic).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_text_has_the_size_it_promises() {
        let documents = documents();
        let primer: usize = documents
            .iter()
            .filter(|document| document.name.contains("primer"))
            .map(|document| document.text.len())
            .sum();
        let total: usize = documents.iter().map(|document| document.text.len()).sum();
        assert!((12_000..20_000).contains(&primer), "{primer}");
        assert!((280_000..420_000).contains(&total), "{total}");
        assert!(documents.iter().all(|document| document.text.len() > 500));
    }
}
