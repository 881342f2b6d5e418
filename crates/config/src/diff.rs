//! Unified diffs: what an application would change, for people to read and for
//! `patch` to take.
//!
//! The shortest edit script by Myers' algorithm, in O((n + m)·d) steps for d
//! changed lines, and d is small here.

/// Unchanged lines shown around a change.
const CONTEXT: usize = 3;

/// One line of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line<'a> {
    Same(&'a str),
    Removed(&'a str),
    Added(&'a str),
}

impl Line<'_> {
    fn sign(self) -> char {
        match self {
            Line::Same(_) => ' ',
            Line::Removed(_) => '-',
            Line::Added(_) => '+',
        }
    }
}

/// The unified diff of two texts; empty if they are equal.
pub(crate) fn unified(name: &str, before: &str, after: &str) -> String {
    if before == after {
        return String::new();
    }
    let old: Vec<&str> = before.split_inclusive('\n').collect();
    let new: Vec<&str> = after.split_inclusive('\n').collect();
    let script = script(&old, &new);
    let mut diff = format!("--- {name}\n+++ {name}\n");
    for (start, end) in hunks(&script) {
        let count = |lines: &[Line<'_>], skip: char| {
            lines.iter().filter(|line| line.sign() != skip).count()
        };
        let (shown, earlier) = (&script[start..end], &script[..start]);
        diff += &format!(
            "@@ -{} +{} @@\n",
            range(count(earlier, '+'), count(shown, '+')),
            range(count(earlier, '-'), count(shown, '-'))
        );
        for line in shown {
            let (Line::Same(text) | Line::Removed(text) | Line::Added(text)) = line;
            diff.push(line.sign());
            diff += text;
            if !text.ends_with('\n') {
                diff += "\n\\ No newline at end of file\n";
            }
        }
    }
    diff
}

/// `start,count` as diff counts: from one, or the line before if there is none.
fn range(before: usize, count: usize) -> String {
    match count {
        0 => format!("{before},0"),
        1 => format!("{}", before + 1),
        _ => format!("{},{count}", before + 1),
    }
}

/// Runs of the script to show: changes with their context, joined where the
/// contexts meet.
fn hunks(script: &[Line<'_>]) -> Vec<(usize, usize)> {
    let mut hunks: Vec<(usize, usize)> = Vec::new();
    for (index, line) in script.iter().enumerate() {
        if matches!(line, Line::Same(_)) {
            continue;
        }
        let start = index.saturating_sub(CONTEXT);
        let end = (index + 1 + CONTEXT).min(script.len());
        match hunks.last_mut() {
            Some(last) if start <= last.1 => last.1 = end,
            _ => hunks.push((start, end)),
        }
    }
    hunks
}

/// Myers: `furthest[k]` is how far into `old` one gets on the diagonal k = x − y
/// with d changes; the way back through the kept rounds is the script.
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<Line<'a>> {
    let (n, m) = (old.len() as isize, new.len() as isize);
    let offset = n + m + 1;
    let mut furthest = vec![0_isize; (2 * offset + 1) as usize];
    let mut rounds: Vec<Vec<isize>> = Vec::new();
    let step = |furthest: &[isize], d: isize, k: isize| {
        let at = |k: isize| furthest[(k + offset) as usize];
        // Down, an added line, or right, a removed one.
        if k == -d || (k != d && at(k - 1) < at(k + 1)) {
            (k + 1, at(k + 1))
        } else {
            (k - 1, at(k - 1) + 1)
        }
    };
    'search: for d in 0..=n + m {
        rounds.push(furthest.clone());
        for k in (-d..=d).step_by(2) {
            let mut x = step(&furthest, d, k).1;
            while x < n && x - k < m && old[x as usize] == new[(x - k) as usize] {
                x += 1;
            }
            furthest[(k + offset) as usize] = x;
            if x >= n && x - k >= m {
                break 'search;
            }
        }
    }
    let (mut x, mut y) = (n, m);
    let mut lines = Vec::new();
    for (d, furthest) in rounds.iter().enumerate().rev() {
        let (from, start) = step(furthest, d as isize, x - y);
        // Round 0 starts at the origin; there is no step before it.
        let (start, floor) = if d == 0 {
            (0, 0)
        } else {
            (start, start - (x - y))
        };
        while x > start && y > floor {
            x -= 1;
            y -= 1;
            lines.push(Line::Same(old[x as usize]));
        }
        if d > 0 {
            if from > x - y {
                y -= 1;
                lines.push(Line::Added(new[y as usize]));
            } else {
                x -= 1;
                lines.push(Line::Removed(old[x as usize]));
            }
        }
    }
    lines.reverse();
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_change_is_shown_with_three_lines_around_it() {
        let before: String = (1..=12).map(|line| format!("line {line}\n")).collect();
        let after = before.replace("line 6\n", "line six\n");
        assert_eq!(
            unified("a.txt", &before, &after),
            "--- a.txt\n+++ a.txt\n@@ -3,7 +3,7 @@\n line 3\n line 4\n line 5\n-line 6\n+line six\n line 7\n line 8\n line 9\n"
        );
        assert_eq!(unified("a.txt", &before, &before), "");
    }

    #[test]
    fn ends_of_files_are_told() {
        assert_eq!(
            unified("a", "x: 1", "x: 2"),
            "--- a\n+++ a\n@@ -1 +1 @@\n-x: 1\n\\ No newline at end of file\n+x: 2\n\\ No newline at end of file\n"
        );
        assert_eq!(
            unified("a", "x\r\n", "x\r\ny\r\n"),
            "--- a\n+++ a\n@@ -1 +1,2 @@\n x\r\n+y\r\n"
        );
    }

    /// Applies a diff as `patch` would, checking every line it claims.
    fn patch(before: &str, diff: &str) -> String {
        let old: Vec<&str> = before.split_inclusive('\n').collect();
        let mut new = String::new();
        let mut at = 0;
        let mut lines = diff.split_inclusive('\n').skip(2).peekable();
        while let Some(line) = lines.next() {
            if let Some(header) = line.strip_prefix("@@ -") {
                let range = header.split(' ').next().unwrap();
                let (start, count) = range.split_once(',').unwrap_or((range, "1"));
                let start: usize = start.parse().unwrap();
                let first = if count == "0" { start } else { start - 1 };
                new.extend(old[at..first].iter().copied());
                at = first;
                continue;
            }
            let bare = lines.next_if(|next| next.starts_with('\\')).is_some();
            let text = if bare {
                &line[1..line.len() - 1]
            } else {
                &line[1..]
            };
            if !line.starts_with('+') {
                assert_eq!(old[at], text);
                at += 1;
            }
            if !line.starts_with('-') {
                new += text;
            }
        }
        new.extend(old[at..].iter().copied());
        new
    }

    proptest! {
        #[test]
        fn a_diff_leads_from_one_text_to_the_other(
            before in "([abc]\n){0,30}[ab]?",
            after in "([abc]\n){0,30}[ab]?",
        ) {
            let diff = unified("f", &before, &after);
            if before != after {
                prop_assert_eq!(patch(&before, &diff), after);
            }
        }
    }
}
