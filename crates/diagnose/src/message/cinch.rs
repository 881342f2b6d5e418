//! cinch's own "does not fit", with the changes that it lists: they were computed by the planner
//! or the replay that printed them.

use super::{Event, Framework, Message, OwnChange, Text};
use crate::size::{after, squeezed};

pub fn read(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    if let Some(at) = whole.find("doesnotfit:needs") {
        let rest = &whole[at..];
        let mut message = Message::new(Framework::Cinch, Event::DoesNotFit);
        // The exact figure stands in brackets, with commas.
        let exact = rest.split_once('(').and_then(|(_, inside)| {
            let (digits, _) = inside.split_once("bytes)")?;
            digits.replace(',', "").parse().ok()
        });
        message.numbers.needed = exact.or_else(|| after(rest, "needs").map(|found| found.0));
        message.numbers.limit = after(rest, "thebudgetis").map(|found| found.0);
        message.own_changes = changes(text.lines, message.numbers.needed?);
        return Some(message);
    }
    let at = whole.find("pytorchneeds")?;
    let rest = &whole[at..];
    if !rest.contains("tobesafe,andthebudgetis") {
        return None;
    }
    let mut message = Message::new(Framework::Cinch, Event::DoesNotFit);
    message.numbers.needed = after(rest, "pytorchneeds").map(|found| found.0);
    message.numbers.limit = after(rest, "thebudgetis").map(|found| found.0);
    message.own_changes = remedies(text.lines);
    Some(message)
}

/// Lines of two columns below "what would fit": flags, and what the run takes with them.
fn changes(lines: &str, needed: u64) -> Vec<OwnChange> {
    let Some((_, list)) = lines.split_once("what would fit") else {
        return Vec::new();
    };
    let change = |line: &str| {
        let line = line.trim();
        let (flags, taken) = line.rsplit_once("  ")?;
        let (bytes, _) = crate::size::size(&squeezed(taken))?;
        flags.starts_with("--").then(|| OwnChange {
            change: flags.trim().to_owned(),
            saves: needed.saturating_sub(bytes),
        })
    };
    list.lines().skip(1).map_while(change).collect()
}

/// `hint: each of these fits: NAME (CHANGE): saves A, leaves B; …`
fn remedies(lines: &str) -> Vec<OwnChange> {
    let text = lines.replace('\n', " ");
    let Some((_, list)) = text
        .split_once("each of these fits: ")
        .or_else(|| text.split_once("these save most: "))
    else {
        return Vec::new();
    };
    let change = |part: &str| {
        let (name, rest) = part.split_once(": saves ")?;
        let (saves, _) = crate::size::size(&squeezed(rest))?;
        Some(OwnChange {
            change: name.trim().to_owned(),
            saves,
        })
    };
    list.split("; ").map_while(change).collect()
}
