//! A made-up taxonomy of codes with texts, whose words tell which branch a code is in.

use std::fmt::Write;

use crate::random::Random;

const SYLLABLES: [&str; 20] = [
    "ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "qui", "ro", "su",
    "ta", "ve", "wi", "xo", "zu",
];

/// Words of a text that come from the levels of its code, the deepest most often.
const WORDS: usize = 6;

/// How large a taxonomy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaxonomyShape {
    /// Codes of two digits, at most 89.
    pub sectors: usize,
    /// Codes below each other code, at most 9.
    pub children: usize,
    /// Digits of the longest codes.
    pub digits: usize,
}

impl TaxonomyShape {
    /// A hundred codes: enough for the negatives of an ordinary run.
    pub const USUAL: Self = Self {
        sectors: 8,
        children: 3,
        digits: 4,
    };
}

/// The lines of a .jsonl file.
pub fn taxonomy(shape: TaxonomyShape, seed: u64) -> String {
    let mut random = Random::new(seed, 4);
    let mut lines = String::new();
    for sector in 0..shape.sectors.min(89) {
        let words = vec![words(&mut random)];
        branch(
            &mut lines,
            &format!("{}", 11 + sector),
            &words,
            shape,
            &mut random,
        );
    }
    lines
}

/// Words that only the texts of one branch have.
fn words(random: &mut Random) -> Vec<String> {
    let word = |random: &mut Random| {
        let syllables = (0..3).map(|_| SYLLABLES[random.below(SYLLABLES.len())]);
        syllables.collect::<String>()
    };
    (0..WORDS).map(|_| word(random)).collect()
}

fn branch(
    lines: &mut String,
    code: &str,
    path: &[Vec<String>],
    shape: TaxonomyShape,
    random: &mut Random,
) {
    let mut text = |count: usize| {
        let word = |random: &mut Random| {
            let level = &path[random.below(path.len())];
            level[random.below(level.len())].as_str()
        };
        let words: Vec<&str> = (0..count).map(|_| word(random)).collect();
        words.join(" ")
    };
    let entry = serde_json::json!({
        "code": code,
        "title": text(3),
        "description": text(10),
        "excluded": text(5),
        "examples": text(8),
    });
    // Writing to a string does not fail.
    let _ = writeln!(lines, "{entry}");
    if code.len() >= shape.digits {
        return;
    }
    for child in 1..=shape.children.min(9) {
        let mut path = path.to_vec();
        path.push(words(random));
        branch(lines, &format!("{code}{child}"), &path, shape, random);
    }
}
