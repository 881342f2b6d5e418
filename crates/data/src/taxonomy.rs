//! A taxonomy of codes with texts, and the anchors, positives and negatives that are drawn from it.
//!
//! A code stands in the tree by its digits: `1121` is below `112`. A pair is an anchor with a code
//! that is its parent, its child or its sibling; negatives of a pair are farther from the anchor
//! than its positive is. Which negatives a pair has is a function of the seed and of how often
//! pairs were drawn before, so that a run's place in its data is one number.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::permutation::Permutation;
use crate::random::{Random, mix};
use crate::sample::TemplateTokenizer;
use crate::tokenizer::Tokenizer;

/// Texts of a code, in the order of a model's encoders.
pub const NUM_CHANNELS: usize = 4;

/// The largest file that is read.
const LARGEST_FILE: u64 = 1 << 30;
/// Digits of the codes at the top of the tree.
const TOP_DIGITS: usize = 2;

/// A line of a taxonomy's file.
#[derive(Debug, Deserialize)]
struct Line {
    code: String,
    title: String,
    description: String,
    #[serde(default)]
    excluded: String,
    #[serde(default)]
    examples: String,
}

/// A code with the tokens of its texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub code: String,
    pub channels: [Vec<i32>; NUM_CHANNELS],
}

/// An anchor and its positive, by their places in the taxonomy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    pub anchor: usize,
    pub positive: usize,
}

#[derive(Debug, Clone)]
pub struct Taxonomy {
    entries: Vec<Entry>,
    path: PathBuf,
    fingerprint: String,
}

/// The pairs of one purpose, training or validation.
#[derive(Debug, Clone)]
pub struct Pairs {
    pairs: Vec<Pair>,
    negatives: usize,
}

impl Taxonomy {
    /// Reads a .jsonl file of codes; texts are cut to the lengths of their channels.
    pub fn read(
        path: &Path,
        tokenizer: &Tokenizer,
        lengths: [usize; NUM_CHANNELS],
    ) -> Result<Self, DataError> {
        let content = cinch_files::read_regular_text(path, LARGEST_FILE);
        let content = content.map_err(|source| DataError::Read {
            path: path.to_owned(),
            source,
        })?;
        let special = TemplateTokenizer::new(tokenizer);
        let [first, last] = ["[CLS]", "[SEP]"].map(|token| special.id(token));
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen = BTreeMap::new();
        let mut filled = [false; NUM_CHANNELS];
        for (number, text) in (1..).zip(content.lines()) {
            if text.trim().is_empty() {
                continue;
            }
            let bad = |problem: String| DataError::BadJsonLine {
                path: path.to_owned(),
                line: number,
                problem,
            };
            let line: Line = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
            let is_code = line.code.len() >= TOP_DIGITS
                && line.code.bytes().all(|digit| digit.is_ascii_digit());
            if !is_code {
                return Err(bad(format!(
                    "the code `{}` is not {TOP_DIGITS} or more digits",
                    line.code
                )));
            }
            if let Some(earlier) = seen.insert(line.code.clone(), number) {
                return Err(bad(format!(
                    "the code {} is in line {earlier} already",
                    line.code
                )));
            }
            for (name, text) in [("title", &line.title), ("description", &line.description)] {
                if text.trim().is_empty() {
                    return Err(bad(format!("the {name} of {} is empty", line.code)));
                }
            }
            let texts = [line.title, line.description, line.excluded, line.examples];
            let mut channels = [const { Vec::new() }; NUM_CHANNELS];
            for (index, (text, length)) in texts.iter().zip(lengths).enumerate() {
                filled[index] |= !text.trim().is_empty();
                let ids = tokenizer.encode(text)?.into_iter();
                let around = usize::from(first.is_some()) + usize::from(last.is_some());
                let ids = ids.take(length.saturating_sub(around));
                let ids = first.into_iter().chain(ids).chain(last).take(length);
                channels[index] = ids.map(u32::cast_signed).collect();
            }
            entries.push(Entry {
                code: line.code,
                channels,
            });
        }
        let names = ["title", "description", "excluded", "examples"];
        let empty = names.iter().zip(filled).find(|(_, filled)| !filled);
        if let Some((channel, _)) = empty.filter(|_| !entries.is_empty()) {
            return Err(DataError::EmptyChannel {
                path: path.to_owned(),
                channel,
            });
        }
        let digest = Sha256::digest(content.as_bytes());
        Ok(Self {
            fingerprint: format!("taxonomy-{digest:x}-{}", tokenizer.fingerprint()),
            path: path.to_owned(),
            entries,
        })
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The same for two taxonomies exactly when they give the same tokens.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Steps between two codes in the tree.
    pub fn distance(&self, a: usize, b: usize) -> usize {
        let [a, b] = [a, b].map(|index| self.entries[index].code.as_bytes());
        let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        // Codes of different sectors meet in the root, above the first level.
        let depth = |digits: usize| (digits + 1).saturating_sub(TOP_DIGITS);
        depth(a.len()) + depth(b.len()) - 2 * depth(common)
    }

    fn is_related(&self, a: usize, b: usize) -> bool {
        let [longer, shorter] = match self.entries[a].code.len() >= self.entries[b].code.len() {
            true => [a, b],
            false => [b, a],
        };
        let [longer, shorter] = [longer, shorter].map(|index| &self.entries[index].code);
        let is_below = longer.starts_with(shorter.as_str()) && longer.len() == shorter.len() + 1;
        let parent = longer.len() - 1;
        let is_sibling = longer.len() == shorter.len()
            && parent >= TOP_DIGITS
            && longer[..parent] == shorter[..parent];
        a != b && (is_below || is_sibling)
    }

    /// Codes that may be negatives of a pair.
    fn candidates(&self, pair: Pair) -> Vec<usize> {
        let near = self.distance(pair.anchor, pair.positive);
        let others = 0..self.entries.len();
        let farther = others.filter(|&other| self.distance(pair.anchor, other) > near);
        farther.collect()
    }

    /// Training and validation pairs: of each anchor at most `positives`, of which a share is held
    /// out. Every pair has at least as many possible negatives as are asked for.
    pub fn pairs(
        &self,
        (positives, negatives): (usize, usize),
        held_out: f64,
        seed: u64,
    ) -> Result<(Pairs, Pairs), DataError> {
        let mut pairs = Vec::new();
        for anchor in 0..self.entries.len() {
            let others = 0..self.entries.len();
            let related: Vec<usize> = others.filter(|&b| self.is_related(anchor, b)).collect();
            let order = Permutation::new(related.len() as u64, mix(seed) ^ anchor as u64);
            let taken = (0..related.len().min(positives) as u64).map(|n| order.apply(n));
            pairs.extend(taken.map(|place| Pair {
                anchor,
                positive: related[place as usize],
            }));
        }
        for &pair in &pairs {
            let found = self.candidates(pair).len();
            if found < negatives {
                return Err(DataError::TooFewNegatives {
                    path: self.path.clone(),
                    code: self.entries[pair.anchor].code.clone(),
                    asked: negatives,
                    found,
                });
            }
        }
        if pairs.is_empty() {
            return Err(DataError::NoPairs {
                path: self.path.clone(),
            });
        }
        let order = Permutation::new(pairs.len() as u64, mix(seed ^ 1));
        let wanted = match held_out > 0.0 && pairs.len() > 1 {
            true => ((pairs.len() as f64 * held_out).round() as usize).clamp(1, pairs.len() - 1),
            false => 0,
        };
        let mixed = (0..pairs.len() as u64).map(|place| pairs[order.apply(place) as usize]);
        let mut validation: Vec<Pair> = mixed.collect();
        let training = validation.split_off(wanted);
        let of = |pairs| Pairs { pairs, negatives };
        Ok((of(training), of(validation)))
    }
}

impl Pairs {
    pub fn len(&self) -> u64 {
        self.pairs.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// The texts of what is drawn `sample`-th: anchor, positive, negatives. With a seed, each epoch
    /// has every pair once in an order of its own, and other negatives; without, all stays as it
    /// is, and what is beyond the end begins anew.
    pub fn draw(&self, taxonomy: &Taxonomy, sample: u64, seed: Option<u64>) -> Vec<usize> {
        let len = self.len().max(1);
        let (place, stream) = match seed {
            Some(seed) => {
                let (epoch, place) = (sample / len, sample % len);
                let order = Permutation::new(len, mix(seed) ^ epoch);
                (order.apply(place), mix(seed ^ mix(sample)))
            }
            None => (sample % len, sample % len),
        };
        let Some(&pair) = self.pairs.get(place as usize) else {
            return Vec::new();
        };
        let mut candidates = taxonomy.candidates(pair);
        let mut random = Random::new(stream, place);
        let mut texts = vec![pair.anchor, pair.positive];
        for _ in 0..self.negatives.min(candidates.len()) {
            let chosen = random.below(candidates.len());
            texts.push(candidates.swap_remove(chosen));
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerSpec;
    use crate::synth::{self, TaxonomyShape};

    fn read(lines: &str) -> Result<Taxonomy, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codes.jsonl");
        std::fs::write(&path, lines).unwrap();
        let tokenizer = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        Taxonomy::read(&path, &tokenizer, [4, 8, 8, 8])
    }

    fn made_up() -> Taxonomy {
        let shape = TaxonomyShape {
            sectors: 3,
            children: 2,
            digits: 4,
        };
        read(&synth::taxonomy(shape, 1)).unwrap()
    }

    #[test]
    fn negatives_are_farther_than_the_positive_and_differ() {
        let taxonomy = made_up();
        assert_eq!(taxonomy.entries().len(), 3 * (1 + 2 + 4));
        let (training, validation) = taxonomy.pairs((2, 5), 0.2, 7).unwrap();
        assert!(!validation.is_empty());
        for sample in 0..3 * training.len() {
            let texts = training.draw(&taxonomy, sample, Some(7));
            assert_eq!(texts, training.draw(&taxonomy, sample, Some(7)));
            assert_eq!(texts.len(), 7);
            let near = taxonomy.distance(texts[0], texts[1]);
            for (place, &negative) in texts.iter().enumerate().skip(2) {
                assert!(taxonomy.distance(texts[0], negative) > near);
                assert!(!texts[..place].contains(&negative));
            }
        }
        let held_out = validation.pairs().iter();
        assert!(
            held_out
                .clone()
                .all(|pair| !training.pairs().contains(pair))
        );
    }

    #[test]
    fn what_cannot_be_trained_on_is_told() {
        let few = made_up().pairs((2, 50), 0.1, 7).unwrap_err().to_string();
        assert!(
            few.contains("50 negatives") && few.contains("hint:"),
            "{few}"
        );
        let line = |excluded: &str, title: &str| {
            format!(
                "{{\"code\":\"11\",\"title\":\"{title}\",\"description\":\"d\",\
                 \"excluded\":\"{excluded}\",\"examples\":\"e\"}}\n"
            )
        };
        let channel = read(&line("", "t")).unwrap_err().to_string();
        assert!(channel.contains("`excluded` is empty"), "{channel}");
        let title = read(&line("x", " ")).unwrap_err().to_string();
        assert!(
            title.contains("line 1: the title of 11 is empty"),
            "{title}"
        );
        let twice = read(&line("x", "t").repeat(2)).unwrap_err().to_string();
        assert!(
            twice.contains("line 2: the code 11 is in line 1"),
            "{twice}"
        );
    }
}
