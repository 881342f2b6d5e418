//! A taxonomy of codes with texts: its file, and how codes stand to each other in the tree.
//!
//! A code stands in the tree by its digits: `1121` is below `112`. `pairs` draws anchors,
//! positives and negatives from it.

mod pairs;
mod relation;

pub use pairs::{Near, Pair, PairRules, Pairs};
pub use relation::Relation;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::synth::{self, TaxonomyShape};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::marked::EncoderTokenizer;

/// Texts of a code, in the order of a model's encoders.
pub const NUM_CHANNELS: usize = 4;

/// Their names in a file.
pub const CHANNEL_NAMES: [&str; NUM_CHANNELS] = ["title", "description", "excluded", "examples"];

/// The largest file that is read.
const LARGEST_FILE: u64 = 1 << 30;
/// Digits of the codes at the top of the tree.
const TOP_DIGITS: usize = 2;

/// A line of a taxonomy's file. A text that is not there, or null as tables write out what they do
/// not have, is empty.
#[derive(Debug, Deserialize)]
struct Line {
    code: String,
    title: Option<String>,
    description: Option<String>,
    excluded: Option<String>,
    examples: Option<String>,
}

/// A code with the tokens of its texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub code: String,
    pub channels: [Vec<i32>; NUM_CHANNELS],
}

#[derive(Debug, Clone)]
pub struct Taxonomy {
    entries: Vec<Entry>,
    path: PathBuf,
    fingerprint: String,
}

impl Taxonomy {
    /// Reads a .jsonl file of codes; texts are cut to the lengths of their channels.
    pub fn read(
        path: &Path,
        tokenizer: &Tokenizer,
        lengths: [usize; NUM_CHANNELS],
    ) -> Result<Self, DataError> {
        if path.is_dir() {
            return Err(DataError::WrongKind {
                path: path.to_owned(),
                wanted: "file of codes (.jsonl)",
                found: "a folder",
            });
        }
        let content = cinch_files::read_regular_text(path, LARGEST_FILE);
        let content = content.map_err(|source| DataError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &content, tokenizer, lengths)
    }

    /// A taxonomy that is made up, for those who have none.
    pub fn made_up(
        seed: u64,
        tokenizer: &Tokenizer,
        lengths: [usize; NUM_CHANNELS],
    ) -> Result<Self, DataError> {
        let lines = synth::taxonomy(TaxonomyShape::USUAL, seed);
        Self::parse(
            Path::new("the made-up taxonomy"),
            &lines,
            tokenizer,
            lengths,
        )
    }

    /// The lines of a file, which `path` names in messages.
    pub fn parse(
        path: &Path,
        content: &str,
        tokenizer: &Tokenizer,
        lengths: [usize; NUM_CHANNELS],
    ) -> Result<Self, DataError> {
        let marked = EncoderTokenizer::new(tokenizer);
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen = BTreeMap::new();
        let mut filled = [false; NUM_CHANNELS];
        for (number, text) in (1..).zip(content.lines()) {
            if text.trim().is_empty() {
                continue;
            }
            let bad = |problem: String| DataError::BadCode {
                path: path.to_owned(),
                line: number,
                problem,
            };
            let mut line: Line =
                serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
            if let Some(first) = relation::of_range(&line.code) {
                line.code = first.to_owned();
            }
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
            let texts = [line.title, line.description, line.excluded, line.examples];
            let texts = texts.map(Option::unwrap_or_default);
            for (name, text) in CHANNEL_NAMES.iter().zip(&texts).take(2) {
                if text.trim().is_empty() {
                    return Err(bad(format!("the {name} of {} is empty", line.code)));
                }
            }
            for (filled, text) in filled.iter_mut().zip(&texts) {
                *filled |= !text.trim().is_empty();
            }
            let mut channels = [const { Vec::new() }; NUM_CHANNELS];
            for ((ids, text), length) in channels.iter_mut().zip(&texts).zip(lengths) {
                *ids = marked.encode(text, length)?.ids;
            }
            entries.push(Entry {
                code: line.code,
                channels,
            });
        }
        let empty = CHANNEL_NAMES.iter().zip(filled).find(|(_, filled)| !filled);
        if let Some((channel, _)) = empty.filter(|_| !entries.is_empty()) {
            return Err(DataError::EmptyChannel {
                path: path.to_owned(),
                channel,
            });
        }
        let digest = Sha256::digest(content.as_bytes());
        Ok(Self {
            fingerprint: format!(
                "taxonomy-{digest:x}-{}{}",
                tokenizer.fingerprint(),
                marked.fingerprint()
            ),
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

    /// How two codes stand to each other.
    pub fn relation(&self, a: usize, b: usize) -> Relation {
        Relation::of(&self.entries[a].code, &self.entries[b].code)
    }

    /// Codes right above codes that have none below them: as many groups as the leaves are in.
    pub fn num_groups(&self) -> usize {
        let codes: BTreeSet<&str> = self
            .entries
            .iter()
            .map(|entry| entry.code.as_str())
            .collect();
        let above = codes.iter().map(|code| &code[..code.len() - 1]);
        let parents: BTreeSet<&str> = above.clone().collect();
        let leaves = codes.iter().zip(above);
        let leaves = leaves.filter(|(code, _)| !parents.contains(**code));
        let groups: BTreeSet<&str> = leaves.map(|(_, above)| above).collect();
        groups.len()
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
    fn a_sector_of_several_numbers_may_be_called_by_its_range() {
        let line = |code: &str| {
            let others = r#""title":"t","description":"d","excluded":"x","examples":"e""#;
            format!(r#"{{"code":"{code}",{others}}}"#)
        };
        let taxonomy = read(&[line("31-33"), line("334")].join("\n")).unwrap();
        assert_eq!(taxonomy.entries()[0].code, "31");
        assert_eq!(taxonomy.relation(0, 1).distance(), 1);
        let twice = read(&[line("31"), line("31-33")].join("\n")).unwrap_err();
        assert!(
            twice.to_string().contains("31 is in line 1 already"),
            "{twice}"
        );
        let other = read(&line("31-32")).unwrap_err();
        assert!(other.to_string().contains("`31-32`"), "{other}");
    }

    #[test]
    fn negatives_are_farther_than_the_positive_and_differ() {
        let taxonomy = made_up();
        assert_eq!(taxonomy.entries().len(), 3 * (1 + 2 + 4));
        let (training, validation) = taxonomy.pairs(&PairRules::plain(2, 5), 0.2, 7).unwrap();
        assert!(!validation.is_empty());
        for sample in 0..3 * training.len() {
            let texts = training.draw(&taxonomy, sample, Some(7));
            assert_eq!(texts, training.draw(&taxonomy, sample, Some(7)));
            assert_eq!(texts.len(), 7);
            let distance = |other| taxonomy.relation(texts[0], other).distance();
            for (place, &negative) in texts.iter().enumerate().skip(2) {
                assert!(distance(negative) > distance(texts[1]));
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
    fn a_stage_draws_what_it_allows() {
        let taxonomy = made_up();
        let rules = PairRules {
            anchor_levels: Some(vec![3]),
            positive: Near {
                relations: Some(vec![1]),
                levels: Some(vec![4]),
                distances: None,
            },
            negative: Near {
                relations: Some(vec![99]),
                ..Near::default()
            },
            distance_margins: Some(vec![3, 4]),
            ..PairRules::plain(8, 2)
        };
        let (training, _) = taxonomy.pairs(&rules, 0.0, 7).unwrap();
        // Of six codes of three digits, each has two below it.
        assert_eq!(training.len(), 12);
        for sample in 0..training.len() {
            let texts = training.draw(&taxonomy, sample, Some(7));
            assert_eq!(texts.len(), 4);
            assert_eq!(
                [texts[0], texts[1]].map(|text| taxonomy.level(text)),
                [3, 4]
            );
            for &negative in &texts[2..] {
                let relation = taxonomy.relation(texts[0], negative);
                assert_eq!(relation.number(), 99);
                assert!([4, 5].contains(&relation.distance()), "{relation:?}");
            }
        }
        assert_eq!(training.epoch_of(11), 0);
        assert_eq!(training.epoch_of(12), 1);
    }

    /// Whatever a stage draws, no pair that one holds out is trained on in another.
    #[test]
    fn what_one_stage_holds_out_no_other_trains_on() {
        let taxonomy = made_up();
        let narrow = PairRules {
            anchor_levels: Some(vec![2, 3]),
            ..PairRules::plain(9, 4)
        };
        let (_, held_out) = taxonomy.pairs(&narrow, 0.3, 7).unwrap();
        let (training, _) = taxonomy.pairs(&PairRules::plain(9, 4), 0.3, 7).unwrap();
        assert!(held_out.len() > 2);
        for pair in held_out.pairs() {
            assert!(!training.pairs().contains(pair), "{pair:?}");
        }
    }

    #[test]
    fn groups_are_the_codes_above_the_leaves() {
        assert_eq!(made_up().num_groups(), 6);
    }

    #[test]
    fn what_cannot_be_trained_on_is_told() {
        let rules = PairRules {
            name: "02_stage".to_owned(),
            ..PairRules::plain(2, 50)
        };
        let few = made_up().pairs(&rules, 0.1, 7).unwrap_err().to_string();
        for part in ["50 negatives", "02_stage", "hint:"] {
            assert!(few.contains(part), "{few}");
        }
        let rules = PairRules {
            anchor_levels: Some(vec![6]),
            ..PairRules::plain(2, 5)
        };
        let none = made_up().pairs(&rules, 0.1, 7).unwrap_err().to_string();
        assert!(none.contains("no pairs"), "{none}");
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
        let null = line("x", "t").replace("\"d\"", "null");
        let null = read(&null).unwrap_err().to_string();
        assert!(null.contains("the description of 11 is empty"), "{null}");
        let twice = read(&line("x", "t").repeat(2)).unwrap_err().to_string();
        assert!(
            twice.contains("line 2: the code 11 is in line 1"),
            "{twice}"
        );
        assert!(twice.contains("hint: each line has a code"), "{twice}");
        let alone = [line("x", "t"), line("y", "t").replace("11", "111")].concat();
        let alone = read(&alone).unwrap();
        let alone = alone.pairs(&PairRules::plain(2, 5), 0.0, 7).unwrap_err();
        let alone = alone.to_string();
        assert!(alone.ends_with("hint: add codes"), "{alone}");
    }

    #[test]
    fn a_text_that_is_null_or_not_there_is_empty() {
        let full = r#"{"code":"11","title":"a","description":"b","excluded":"c","examples":"d"}"#;
        let rest = [
            r#"{"code":"111","title":"a","description":"b","excluded":"","examples":""}"#,
            r#"{"code":"111","title":"a","description":"b","excluded":null,"examples":null}"#,
            r#"{"code":"111","title":"a","description":"b"}"#,
        ];
        let [empty, null, absent] = rest.map(|line| read(&format!("{full}\n{line}\n")).unwrap());
        assert!(empty.entries()[1].channels[2].is_empty());
        assert_eq!(null.entries(), empty.entries());
        assert_eq!(absent.entries(), empty.entries());
    }
}
