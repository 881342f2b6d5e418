//! A diagnosis for people.

use cinch_config::Bytes;
use cinch_diagnose::{Failure, Log};

use crate::voice::{Paint, painted};

pub fn text(failures: &[Failure], log: &Log) -> String {
    if failures.is_empty() {
        return match log.lines_read() {
            1 => "no sign that memory ran out in 1 line\n".to_owned(),
            lines => format!("no sign that memory ran out in {lines} lines\n"),
        };
    }
    let mut text = self::failures(failures);
    if log.left_out() > 0 {
        text += &format!("\nand {} more failures\n", log.left_out());
    }
    text
}

/// One of each kind: ranks that failed alike are told once.
pub fn distinct(failures: &[Failure]) -> Vec<&Failure> {
    let mut told: Vec<&Failure> = Vec::new();
    for failure in failures {
        if !told.iter().any(|other| is_alike(other, failure)) {
            told.push(failure);
        }
    }
    told
}

/// Every failure; ranks that failed alike are told once.
pub fn failures(failures: &[Failure]) -> String {
    let mut text = String::new();
    for failure in distinct(failures) {
        if !text.is_empty() {
            text += "\n";
        }
        let alike: Vec<&Failure> = failures
            .iter()
            .filter(|other| is_alike(other, failure))
            .collect();
        text += &one(failure, &alike);
    }
    text
}

fn is_alike(a: &Failure, b: &Failure) -> bool {
    let key = |failure: &Failure| (failure.framework, failure.cause, failure.phase);
    key(a) == key(b) && (a.rank.is_some() && b.rank.is_some() || std::ptr::eq(a, b))
}

fn one(failure: &Failure, alike: &[&Failure]) -> String {
    let mut text = format!("{} (line {}).\n", failure.summary, failure.line);
    if alike.len() > 1 {
        let ranks: Vec<String> = alike
            .iter()
            .filter_map(|failure| failure.rank)
            .map(|rank| rank.to_string())
            .collect();
        text += &format!("the same on ranks {}\n", ranks.join(", "));
    }
    let cause = match failure.is_oom {
        true => painted(failure.cause.name(), Paint::Bad),
        false => painted(failure.cause.name(), Paint::Good),
    };
    text += &format!(
        "cause: {cause}, {}: {}\n",
        certainty(failure.confidence),
        failure.cause.said()
    );
    for line in &failure.evidence {
        text += &format!("  - {line}\n");
    }
    if !failure.fixes.is_empty() {
        text += "what to do, in order:\n";
    }
    for (index, fix) in failure.fixes.iter().enumerate() {
        let saves = fix.saves_bytes.map_or_else(String::new, |bytes| {
            format!(": saves {}", Bytes::new(bytes))
        });
        text += &format!("  {}. {}{saves}\n", index + 1, fix.what);
        for line in fix.command.iter().flat_map(|command| command.lines()) {
            text += &format!("       {}\n", painted(line, Paint::Way));
        }
    }
    if !failure.will_not_help.is_empty() {
        text += "what will not help:\n";
    }
    for line in &failure.will_not_help {
        text += &format!("  - {line}\n");
    }
    text
}

fn certainty(confidence: f64) -> String {
    let word = match confidence {
        sure if sure >= 0.9 => "sure",
        likely if likely >= 0.7 => "likely",
        possible if possible >= 0.5 => "possible",
        _ => "a guess",
    };
    format!("{word} ({:.0} %)", 100.0 * confidence)
}
