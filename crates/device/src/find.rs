//! From what people call a card to its line in the catalogue.
//!
//! A name is read without its spaces and marks, as a string that has to be made up of the words
//! of a card's own name (`a100`, `sxm`, `80gb`) and of words that say nothing (`NVIDIA`,
//! `GeForce`). So `rtx4090`, `A100-SXM4-80GB` and `a100 80` are all understood, and a word that
//! no card has makes a name unknown rather than nearly right.

use crate::catalogue::{CATALOGUE, Gpu};
use crate::error::DeviceError;

/// Words that do not tell one card from another.
const EMPTY_WORDS: [&str; 14] = [
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "instinct",
    "graphics",
    "generation",
    "card",
    "gpu",
    "hbm3e",
    "hbm3",
    "hbm2e",
    "hbm2",
    "oam",
];

/// Longer texts name nothing, and are not searched.
const LONGEST_NAME: usize = 64;

/// The card of a name as a user or a driver writes it.
///
/// Cards that differ in nothing but the board (`a100 80`) are one answer: the slower one, which
/// promises nothing that the other would not keep.
pub fn find(name: &str) -> Result<&'static Gpu, DeviceError> {
    if compact(name).is_empty() {
        return Err(DeviceError::EmptyName);
    }
    let (reading, candidates) = candidates(name);
    let names = || candidates.iter().map(|gpu| gpu.name).collect();
    let name = name.to_owned();
    match single(&candidates) {
        Some(gpu) if reading > Reading::Part => Ok(gpu),
        // `3080 16gb` is a part of one name only, yet a guess.
        Some(_) => Err(DeviceError::UnknownGpu {
            name,
            nearest: names(),
        }),
        None if candidates.is_empty() => Err(DeviceError::UnknownGpu {
            nearest: nearest(&name),
            name,
        }),
        None => Err(DeviceError::AmbiguousGpu {
            name,
            candidates: names(),
        }),
    }
}

/// All cards that a name which [`find`] understands stands for: one, or the boards of one chip
/// with one memory, the one that [`find`] takes first.
pub fn find_boards(name: &str) -> Result<Vec<&'static Gpu>, DeviceError> {
    let taken = find(name)?;
    let others = candidates(name).1.into_iter();
    let others = others.filter(|gpu| gpu.name != taken.name);
    Ok([taken].into_iter().chain(others).collect())
}

/// The card that a driver found. Drivers do not put the memory into the names of GeForce cards,
/// so the total they show decides between cards of one name.
pub fn find_detected(name: &str, total_bytes: Option<u64>) -> Option<&'static Gpu> {
    let (reading, mut candidates) = candidates(name);
    if reading == Reading::Part {
        return None;
    }
    if let Some(total) = total_bytes {
        let distance = |gpu: &&Gpu| gpu.memory.shown_bytes().abs_diff(total);
        let least = candidates.iter().map(distance).min()?;
        candidates.retain(|gpu| distance(gpu) == least);
    }
    single(&candidates)
}

/// One card, or the slowest of those that are one chip with one memory on different boards.
fn single(candidates: &[&'static Gpu]) -> Option<&'static Gpu> {
    let first = candidates.first()?;
    let same = |gpu: &&&'static Gpu| {
        gpu.compute_capability == first.compute_capability
            && gpu.memory.shown_mib == first.memory.shown_mib
            && identity(gpu) == identity(first)
    };
    if candidates.iter().filter(same).count() < candidates.len() {
        return None;
    }
    candidates.iter().copied().min_by(|one, other| {
        let (one, other) = (one.peaks, other.peaks);
        (one.half_flops.total_cmp(&other.half_flops))
            .then(one.bandwidth.total_cmp(&other.bandwidth))
    })
}

/// All cards that a name can mean, by the strictest reading that has any: the whole name, the
/// name without its board, a part of the name.
fn candidates(name: &str) -> (Reading, Vec<&'static Gpu>) {
    let typed = compact(name);
    let mut best = (Reading::Part, Vec::new());
    if typed.len() > LONGEST_NAME {
        return best;
    }
    for gpu in CATALOGUE {
        // An alias is taken as it stands: `H100 80GB HBM3` is one board, `H100 80GB` any.
        let also = |alias: &&str| compact(alias) == without_maker(&typed);
        let reading = if gpu.aliases.iter().any(also) {
            Some(Reading::Whole)
        } else {
            read(&typed, gpu)
        };
        let Some(reading) = reading else { continue };
        if reading > best.0 {
            best = (reading, Vec::new());
        }
        if reading == best.0 {
            best.1.push(gpu);
        }
    }
    best
}

/// How much of a card's name was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reading {
    Part,
    WithoutBoard,
    Whole,
}

/// What a word of a card's name is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Tells the card from others: 4090, ti, a100.
    Identity,
    /// PCIe, SXM, NVL.
    Board,
    /// Often left out: RTX, and the memory.
    Optional,
}

/// The words of a card, each with the ways to write it, longest first.
fn words(gpu: &Gpu) -> Vec<(Role, Vec<String>)> {
    let memory = format!("{}gb", gpu.memory.marketed_gb);
    let mut words: Vec<(Role, Vec<String>)> = gpu
        .name
        .split_whitespace()
        .map(compact)
        .filter(|word| *word != memory)
        .map(|word| match word.as_str() {
            "rtx" => (Role::Optional, vec![word]),
            "pcie" | "nvl" => (Role::Board, vec![word]),
            "laptop" => (Role::Identity, vec!["laptop".into(), "mobile".into()]),
            _ if word.starts_with("sxm") => (Role::Board, vec![word, "sxm".into()]),
            _ => (Role::Identity, vec![word]),
        })
        .collect();
    let gb = gpu.memory.marketed_gb;
    let units = ["gib", "gb", "g", ""].map(|unit| format!("{gb}{unit}"));
    words.push((Role::Optional, units.into()));
    words
}

/// Whether what was typed is made up of words of this card, and how much of its name that is.
fn read(typed: &str, gpu: &Gpu) -> Option<Reading> {
    let words = words(gpu);
    let mut best = None;
    cover(typed, &words, &mut vec![false; words.len()], &mut best);
    best
}

/// Tries every way to cut `rest` into words, each word of the card at most once, and keeps the
/// strictest reading. A part must hold at least one word of identity: `24gb` names no card.
fn cover(
    rest: &str,
    words: &[(Role, Vec<String>)],
    used: &mut Vec<bool>,
    best: &mut Option<Reading>,
) {
    if rest.is_empty() {
        let said = |role| {
            words
                .iter()
                .zip(used.iter())
                .filter(move |((own, _), _)| *own == role)
        };
        if !said(Role::Identity).any(|(_, used)| *used) {
            return;
        }
        let all = |role| said(role).all(|(_, used)| *used);
        let reading = match (all(Role::Identity), all(Role::Board)) {
            (true, true) => Reading::Whole,
            (true, false) => Reading::WithoutBoard,
            (false, _) => Reading::Part,
        };
        *best = (*best).max(Some(reading));
        return;
    }
    for word in EMPTY_WORDS {
        if let Some(rest) = rest.strip_prefix(word) {
            cover(rest, words, used, best);
        }
    }
    for (index, (_, spellings)) in words.iter().enumerate() {
        if used[index] {
            continue;
        }
        for spelling in spellings {
            if let Some(rest) = rest.strip_prefix(spelling.as_str()) {
                used[index] = true;
                cover(rest, words, used, best);
                used[index] = false;
            }
        }
    }
}

/// What tells this card from all that are not the same chip with the same memory.
fn identity(gpu: &Gpu) -> Vec<String> {
    let words = words(gpu).into_iter();
    words
        .filter(|(role, _)| *role == Role::Identity)
        .filter_map(|(_, spellings)| spellings.into_iter().next())
        .collect()
}

/// Lower case, letters and digits only.
fn compact(text: &str) -> String {
    text.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|letter| letter.to_ascii_lowercase())
        .collect()
}

fn without_maker(compact: &str) -> &str {
    let mut rest = compact;
    for maker in ["nvidia", "geforce", "tesla"] {
        rest = rest.trim_start_matches(maker);
    }
    rest
}

/// Cards that a wrong name may mean, at most four: those of the name without one of its words,
/// which finds the card where its memory is wrong; else those whose names are the fewest
/// changes away, and not far.
fn nearest(name: &str) -> Vec<&'static str> {
    if name.len() > LONGEST_NAME {
        return Vec::new();
    }
    let mut names = without_a_word(name);
    if names.is_empty() {
        names = by_distance(name);
    }
    names.truncate(4);
    names
}

fn without_a_word(name: &str) -> Vec<&'static str> {
    let marks = |letter: char| !letter.is_ascii_alphanumeric();
    let words: Vec<&str> = name.split(marks).filter(|word| !word.is_empty()).collect();
    // From the end, where the memory stands.
    let shorter = (0..words.len()).rev().map(|left_out| {
        let kept = words.iter().enumerate();
        let kept = kept.filter(|(index, _)| *index != left_out);
        kept.map(|(_, word)| *word).collect::<String>()
    });
    let found = shorter.map(|name| candidates(&name).1);
    let found = found.into_iter().find(|found| !found.is_empty());
    found.map_or_else(Vec::new, |found| found.iter().map(|gpu| gpu.name).collect())
}

fn by_distance(name: &str) -> Vec<&'static str> {
    // `rtx` is left out on both sides: it would make all names of GeForce cards alike.
    let essential = |text: &str| {
        let remove = |text: String, word| text.replace(word, "");
        EMPTY_WORDS
            .into_iter()
            .chain(["rtx"])
            .fold(compact(text), remove)
    };
    let typed = essential(name);
    let farthest = (typed.len() / 3).max(1);
    let distance = |gpu: &Gpu| {
        let whole = strsim::damerau_levenshtein(&typed, &essential(gpu.name));
        whole.min(strsim::damerau_levenshtein(&typed, &identity(gpu).concat()))
    };
    let mut least = farthest;
    let mut names = Vec::new();
    for gpu in CATALOGUE {
        let distance = distance(gpu);
        if distance < least {
            least = distance;
            names.clear();
        }
        if distance == least {
            names.push(gpu.name);
        }
    }
    names
}

#[cfg(test)]
mod tests;
