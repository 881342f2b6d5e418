//! New inputs from old ones.

use std::collections::BTreeSet;

use crate::random::Random;

/// Inputs are cut here: long enough that the square of it is seen, short enough that many are read.
pub const LONGEST: usize = 16 << 10;

/// Numbers at the borders of types, and texts that some readers take for numbers.
const EXTREMES: [&str; 26] = [
    "0",
    "1",
    "-1",
    "-0",
    "127",
    "255",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "1e308",
    "1e400",
    "1e-400",
    "0x7fffffffffffffff",
    "1_000",
    "nan",
    "inf",
    "-9223372036854775808",
];

/// What opens something in one of the languages that are read, to be repeated.
const OPENINGS: [&str; 16] = [
    "[", "{", "(", "- ", "\"a\":{", "{\"a\":", "[[", "a: ", "a.", "\n ", "((", "*a ", "&a ",
    "\\\n", "'", "]",
];

/// Words that the readers may know, taken from the seeds.
pub struct Dictionary(Vec<Vec<u8>>);

impl Dictionary {
    pub fn new(seeds: &[Vec<u8>], more: impl IntoIterator<Item = String>) -> Dictionary {
        const LARGEST: usize = 1 << 14;
        let mut words: BTreeSet<Vec<u8>> = more.into_iter().map(String::into_bytes).collect();
        for seed in seeds {
            let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-./".contains(byte);
            for word in seed.chunk_by(|left, right| is_word(left) == is_word(right)) {
                if word.len() <= 64 && words.len() < LARGEST {
                    words.insert(word.to_vec());
                }
            }
        }
        Dictionary(words.into_iter().collect())
    }
}

/// Changes an input in one to eight ways, one after the other.
pub fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &Dictionary, random: &mut Random) {
    let most = 1 << random.below(4);
    for _ in 0..=random.below(most) {
        mutate_once(input, corpus, words, random);
        input.truncate(LONGEST);
    }
}

fn mutate_once(input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &Dictionary, random: &mut Random) {
    let at = random.below(input.len() + 1);
    match random.below(16) {
        0 | 1 => flip(input, random),
        2 => {
            let byte = random.next() as u8;
            input.insert(at, byte);
        }
        3 => {
            let byte = *random
                .choose(b"\0\t\r\n \"'#$%&*,-.:=?@[\\]`{|}~\x80\xff")
                .unwrap_or(&0);
            input.insert(at, byte);
        }
        4 | 5 if !input.is_empty() => {
            let range = random.range(input.len());
            input.drain(range);
        }
        6 if !input.is_empty() => {
            let chunk = input[random.range(input.len())].to_vec();
            insert(input, at, &chunk);
        }
        7 if !input.is_empty() => {
            let from = random.range(input.len());
            let moved: Vec<u8> = input.drain(from).collect();
            let at = random.below(input.len() + 1);
            insert(input, at, &moved);
        }
        8 => splice(input, corpus, random),
        9 | 10 => {
            if let Some(word) = random.choose(&words.0) {
                insert(input, at, word);
            }
        }
        11 => replace_word(input, words, random),
        12 | 13 => replace_number(input, random),
        14 => {
            let opening = random.choose(&OPENINGS).copied().unwrap_or_default();
            let times = 1 << random.below(14);
            insert(input, at, opening.repeat(times).as_bytes());
        }
        15 if !input.is_empty() => {
            let chunk = input[random.range(input.len())].to_vec();
            let times = (1 << random.below(12)).min(1 + LONGEST / chunk.len().max(1));
            insert(input, at, &chunk.repeat(times));
        }
        _ => input.truncate(at),
    }
}

fn insert(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    input.splice(at..at, bytes.iter().copied());
}

fn flip(input: &mut [u8], random: &mut Random) {
    let at = random.below(input.len());
    if let Some(byte) = input.get_mut(at) {
        *byte ^= match random.below(2) {
            0 => 1 << random.below(8),
            _ => random.next() as u8,
        };
    }
}

/// The beginning of one input and the end of another.
fn splice(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    if let Some(other) = random.choose(corpus) {
        input.truncate(random.below(input.len() + 1));
        input.extend(&other[random.below(other.len() + 1)..]);
    }
}

/// The bytes around a random place that satisfy a condition.
fn run_of(
    input: &[u8],
    random: &mut Random,
    is_part: impl Fn(u8) -> bool,
) -> Option<std::ops::Range<usize>> {
    let from = random.below(input.len());
    let start = from + input[from..].iter().position(|&byte| is_part(byte))?;
    let length = input[start..]
        .iter()
        .take_while(|&&byte| is_part(byte))
        .count();
    Some(start..start + length)
}

fn replace_word(input: &mut Vec<u8>, words: &Dictionary, random: &mut Random) {
    if let (Some(range), Some(word)) = (
        run_of(input, random, |byte| {
            byte.is_ascii_alphanumeric() || byte == b'_'
        }),
        random.choose(&words.0),
    ) {
        input.splice(range, word.iter().copied());
    }
}

/// A number as text, or eight bytes of one.
fn replace_number(input: &mut Vec<u8>, random: &mut Random) {
    if random.one_in(4) && input.len() >= 8 {
        let at = random.below(input.len() - 7);
        let number = match random.below(4) {
            0 => u64::MAX >> random.below(64),
            1 => 1 << random.below(64),
            2 => random.next() >> random.below(64),
            _ => 0,
        };
        let width = 1 << random.below(4);
        input[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
    } else if let Some(range) = run_of(input, random, |byte| byte.is_ascii_digit()) {
        let number = random.choose(&EXTREMES).copied().unwrap_or_default();
        input.splice(range, number.bytes());
    }
}
