//! A line without what terminals and launchers put around it: colours, frames, timestamps, and
//! the names of ranks and workers.

use memchr::memchr;
use memchr::memmem;

/// Who wrote a line, as far as its prefix says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// No prefix.
    #[default]
    Unnamed,
    Rank(u32),
    /// A process that is known by its number alone.
    Process(u64),
}

impl Source {
    pub fn rank(self) -> Option<u32> {
        match self {
            Self::Rank(rank) => Some(rank),
            _ => None,
        }
    }
}

/// How syslog writes the escape character.
const ESCAPED: &[u8] = b"#033[";
/// The bars of boxes that rich draws around tracebacks.
const BARS: [&str; 3] = ["\u{2502}", "\u{2503}", "\u{2551}"];

/// The line as a person would read it; `scratch` holds it where it had to be copied.
pub fn plain<'a>(line: &'a [u8], scratch: &'a mut Vec<u8>) -> &'a [u8] {
    let is_colored = memchr(0x1b, line).is_some();
    let is_escaped = memchr(b'#', line).is_some() && memmem::find(line, ESCAPED).is_some();
    let line = match is_colored || is_escaped {
        true => {
            without_escapes(line, scratch);
            scratch.as_slice()
        }
        false => line,
    };
    without_bars(line.trim_ascii_end())
}

fn without_escapes(line: &[u8], out: &mut Vec<u8>) {
    out.clear();
    let mut rest = line;
    while let Some((&byte, after)) = rest.split_first() {
        if rest.starts_with(ESCAPED) {
            rest = after_control(&rest[ESCAPED.len()..]);
        } else if byte == 0x1b {
            rest = match after.split_first() {
                Some((b'[', after)) => after_control(after),
                Some((b']', after)) => after_title(after),
                Some((_, after)) => after,
                None => after,
            };
        } else {
            out.push(byte);
            rest = after;
        }
    }
}

/// After a sequence that began with `ESC [`: it ends with a letter.
fn after_control(rest: &[u8]) -> &[u8] {
    let end = rest.iter().position(|byte| (0x40..0x7f).contains(byte));
    end.map_or(&[], |end| &rest[end + 1..])
}

/// After a title or a link, which a bell or `ESC \` ends; an open one ends with the line.
fn after_title(rest: &[u8]) -> &[u8] {
    let end = rest.iter().position(|byte| matches!(byte, 0x07 | 0x1b));
    match end {
        Some(end) if rest[end] == 0x1b => rest.get(end + 2..).unwrap_or_default(),
        Some(end) => &rest[end + 1..],
        None => &[],
    }
}

fn without_bars(line: &[u8]) -> &[u8] {
    let mut line = line;
    for bar in BARS {
        if let Some(inner) = line.trim_ascii_start().strip_prefix(bar.as_bytes()) {
            line = inner;
        }
        if let Some(inner) = line.strip_suffix(bar.as_bytes()) {
            line = inner.trim_ascii_end();
        }
    }
    line
}

/// Prefixes that stand one after the other, at most.
const MOST_PREFIXES: usize = 6;

/// Takes the prefixes off: who wrote the line, and what it says. Spaces that indent it stay.
pub fn unprefixed(line: &[u8]) -> (Source, &[u8]) {
    let mut source = Source::Unnamed;
    let mut rest = line;
    for _ in 0..MOST_PREFIXES {
        let start = rest.trim_ascii_start();
        // What begins with a letter has no prefix, and most lines do.
        let Some(first) = start.first().filter(|first| is_prefix_start(**first)) else {
            break;
        };
        let found = match first {
            b'[' => bracketed(start),
            b'(' => worker(start),
            _ => numbered(start),
        };
        let Some((named, after)) = found else { break };
        if named != Source::Unnamed {
            source = named;
        }
        rest = after.strip_prefix(b" ").unwrap_or(after);
    }
    (source, rest)
}

fn is_prefix_start(byte: u8) -> bool {
    byte == b'[' || byte == b'(' || byte.is_ascii_digit()
}

type Prefix<'a> = Option<(Source, &'a [u8])>;

/// `[rank3]:`, `[default3]:`, `[Rank 3]`, `[1,3]<stderr>:`, `[3]:`, `[2024-05-11 14:10:52,241 …]`.
fn bracketed(line: &[u8]) -> Prefix<'_> {
    const LONGEST: usize = 64;
    let window = &line[..line.len().min(LONGEST)];
    let end = memchr(b']', window)?;
    let (inside, after) = (&line[1..end], &line[end + 1..]);
    if let Some(rank) = named_rank(inside) {
        return Some((
            Source::Rank(rank),
            after.strip_prefix(b":").unwrap_or(after),
        ));
    }
    if let Some(digits) = inside.strip_prefix(b"1,") {
        let rank = whole(digits)?;
        let stream = after
            .strip_prefix(b"<stderr>:")
            .or(after.strip_prefix(b"<stdout>:"))?;
        return Some((Source::Rank(rank), stream));
    }
    if let (Some(rank), Some(after)) = (whole(inside), after.strip_prefix(b":")) {
        return Some((Source::Rank(rank), after));
    }
    is_time(inside).then_some((Source::Unnamed, after))
}

fn named_rank(inside: &[u8]) -> Option<u32> {
    let names: [&[u8]; 4] = [b"rank", b"default", b"gpu", b"local_rank"];
    let matched = names.iter().find(|name| {
        inside.len() > name.len() && inside[..name.len()].eq_ignore_ascii_case(name)
    })?;
    let digits = &inside[matched.len()..];
    whole(
        digits
            .trim_ascii_start()
            .strip_prefix(b":")
            .unwrap_or(digits)
            .trim_ascii(),
    )
}

/// `(RayTrainWorker pid=1234, ip=10.0.0.1)`, `(pid=1234)`, `(VllmWorker rank=1 pid=1234)`, `(raylet)`.
fn worker(line: &[u8]) -> Prefix<'_> {
    const LONGEST: usize = 96;
    let window = &line[..line.len().min(LONGEST)];
    let end = memchr(b')', window)?;
    let (inside, after) = (&line[1..end], &line[end + 1..]);
    let number = |name: &[u8]| {
        let at = memmem::find(inside, name)? + name.len();
        let digits = inside[at..].iter().take_while(|byte| byte.is_ascii_digit());
        whole_long(&inside[at..at + digits.count()])
    };
    if let Some(rank) = number(b"rank=").and_then(|rank| u32::try_from(rank).ok()) {
        return Some((Source::Rank(rank), after));
    }
    if let Some(process) = number(b"pid=") {
        return Some((Source::Process(process), after));
    }
    (inside == b"raylet").then_some((Source::Unnamed, after))
}

/// `12: ` of srun, or a date and time.
fn numbered(line: &[u8]) -> Prefix<'_> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits <= 4
        && let Some(after) = line[digits..].strip_prefix(b": ")
    {
        return Some((Source::Rank(whole(&line[..digits])?), after));
    }
    if !is_time(line) {
        return None;
    }
    let is_part = |byte: &u8| byte.is_ascii_digit() || b"-:.,TZ+/ ".contains(byte);
    let end = line
        .iter()
        .take(40)
        .take_while(|byte| is_part(byte))
        .count();
    Some((Source::Unnamed, &line[end..]))
}

/// Whether it begins with a date and a time: `2024-05-11 14:10:52`, `2024-05-11T14:10`, `14:10:52`.
fn is_time(text: &[u8]) -> bool {
    let shape = |pattern: &[u8]| {
        text.len() >= pattern.len()
            && pattern.iter().zip(text).all(|(want, byte)| match want {
                b'0' => byte.is_ascii_digit(),
                b'-' => matches!(byte, b'-' | b'/'),
                b' ' => matches!(byte, b' ' | b'T'),
                other => other == byte,
            })
    };
    shape(b"0000-00-00 00:00") || shape(b"00-00-0000 00:00") || shape(b"00:00:00")
}

fn whole(digits: &[u8]) -> Option<u32> {
    whole_long(digits).and_then(|number| u32::try_from(number).ok())
}

fn whole_long(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> (Source, String) {
        let mut scratch = Vec::new();
        let (source, rest) = unprefixed(plain(line.as_bytes(), &mut scratch));
        (source, String::from_utf8_lossy(rest).into_owned())
    }

    #[test]
    fn prefixes_say_who_wrote_a_line() {
        for (line, source, rest) in [
            ("[rank3]: Traceback", Source::Rank(3), "Traceback"),
            ("[rank3]:   File \"x\"", Source::Rank(3), "  File \"x\""),
            ("[Rank 12] loss", Source::Rank(12), "loss"),
            ("[default1]:step", Source::Rank(1), "step"),
            ("[1,5]<stderr>:step", Source::Rank(5), "step"),
            (
                "(RayTrainWorker pid=77, ip=10.0.0.2) x",
                Source::Process(77),
                "x",
            ),
            ("(VllmWorker rank=1 pid=77) x", Source::Rank(1), "x"),
            ("10: x", Source::Rank(10), "x"),
            ("2024-05-11 14:10:52.224 x", Source::Unnamed, "x"),
            ("[2024-08-25 19:21:02,241] [rank2]: x", Source::Rank(2), "x"),
            ("\u{1b}[36m(pid=5)\u{1b}[0m x", Source::Process(5), "x"),
            ("#033[2m#033[33m(raylet)#033[0m x", Source::Unnamed, "x"),
            ("\u{1b}]0;title\u{7}x", Source::Unnamed, "x"),
            (
                "\u{2502}  x.py:3 in f   \u{2502}",
                Source::Unnamed,
                "  x.py:3 in f",
            ),
            ("3 items", Source::Unnamed, "3 items"),
            ("(no worker) x", Source::Unnamed, "(no worker) x"),
            ("[INFO] x", Source::Unnamed, "[INFO] x"),
            ("99999999999: x", Source::Unnamed, "99999999999: x"),
        ] {
            assert_eq!(read(line), (source, rest.to_owned()), "{line}");
        }
    }

    #[test]
    fn sequences_that_do_not_end_end_with_the_line() {
        for line in ["x\u{1b}[31", "x\u{1b}]8;;http", "x\u{1b}", "x#033[12"] {
            assert_eq!(read(line).1, "x", "{line:?}");
        }
    }
}
