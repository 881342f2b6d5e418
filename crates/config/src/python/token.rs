//! Python's tokens, as far as finding constants needs them.
//!
//! Lines are joined where Python joins them: inside brackets and after a
//! backslash. Comments and blank lines disappear; every logical line ends in
//! [`Token::End`] and knows its indentation.

use crate::outline::{Fault, MAX_DEPTH, Span};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Name,
    Number,
    /// A string literal, prefix and quotation marks included.
    Text,
    /// Any other character: brackets, operators, punctuation.
    Mark(u8),
    /// The end of a logical line.
    End,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Placed {
    pub token: Token,
    pub span: Span,
}

/// A logical line: its first column, and its tokens up to and with the end.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub indent: usize,
    pub tokens: Vec<Placed>,
}

pub(super) fn lines(text: &str) -> Result<Vec<Line>, Fault> {
    let mut scanner = Scanner {
        text,
        at: 0,
        brackets: Vec::new(),
        begun: false,
    };
    let mut lines = Vec::new();
    let mut tokens = Vec::new();
    while let Some(placed) = scanner.next()? {
        let end = placed.token == Token::End;
        tokens.push(placed);
        if end {
            lines.push(line(text, std::mem::take(&mut tokens)));
        }
    }
    Ok(lines)
}

fn line(text: &str, tokens: Vec<Placed>) -> Line {
    let start = tokens.first().map_or(0, |first| first.span.start);
    let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
    // A tab reaches to the next multiple of eight, as Python counts.
    let indent = text[line_start..start].chars().fold(0, |column, c| {
        if c == '\t' {
            (column / 8 + 1) * 8
        } else {
            column + 1
        }
    });
    Line { indent, tokens }
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    /// Open brackets, with where they were opened.
    brackets: Vec<(u8, usize)>,
    /// Whether the logical line has a token already.
    begun: bool,
}

impl Scanner<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn place(&mut self, token: Token, length: usize) -> Placed {
        let span = self.at..self.at + length;
        self.at = span.end;
        Placed { token, span }
    }

    /// The next token; lines without any are skipped.
    fn next(&mut self) -> Result<Option<Placed>, Fault> {
        loop {
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return self.finish();
            };
            self.at += match first {
                '\n' if self.begun && self.brackets.is_empty() => {
                    self.begun = false;
                    return Ok(Some(self.place(Token::End, 1)));
                }
                '#' => rest.find('\n').unwrap_or(rest.len()),
                '\\' if rest[1..].trim_start_matches('\r').starts_with('\n') => {
                    rest.find('\n').unwrap_or(0) + 1
                }
                c if c.is_whitespace() => c.len_utf8(),
                _ => break,
            };
        }
        self.begun = true;
        self.token().map(Some)
    }

    fn finish(&mut self) -> Result<Option<Placed>, Fault> {
        if let Some((bracket, opened)) = self.brackets.pop() {
            let bracket = char::from(bracket);
            return Err(Fault::syntax(
                opened,
                format!("`{bracket}` is never closed"),
            ));
        }
        let begun = std::mem::take(&mut self.begun);
        Ok(begun.then(|| self.place(Token::End, 0)))
    }

    fn token(&mut self) -> Result<Placed, Fault> {
        let rest = self.rest();
        let word = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        let prefixed = word <= 2
            && rest[word..].starts_with(['"', '\''])
            && rest[..word].chars().all(|c| "rRbBuUfFtT".contains(c));
        if prefixed {
            return self.string(word);
        }
        let first = rest.chars().next().unwrap_or(' ');
        let fraction = first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit());
        if first.is_ascii_digit() || fraction {
            let length = number_length(rest);
            return Ok(self.place(Token::Number, length));
        }
        if word > 0 {
            return Ok(self.place(Token::Name, word));
        }
        let Ok(mark) = u8::try_from(first) else {
            return Err(Fault::syntax(self.at, format!("`{first}` is no Python")));
        };
        match mark {
            b'(' | b'[' | b'{' if self.brackets.len() == MAX_DEPTH => {
                return Err(Fault::too_deep(self.at));
            }
            b'(' | b'[' | b'{' => self.brackets.push((mark, self.at)),
            b')' | b']' | b'}' => {
                let open = match mark {
                    b')' => b'(',
                    b']' => b'[',
                    _ => b'{',
                };
                if self
                    .brackets
                    .pop()
                    .is_none_or(|(bracket, _)| bracket != open)
                {
                    return Err(Fault::syntax(
                        self.at,
                        format!("`{first}` closes nothing that is open"),
                    ));
                }
            }
            _ => {}
        }
        Ok(self.place(Token::Mark(mark), first.len_utf8()))
    }

    fn string(&mut self, prefix: usize) -> Result<Placed, Fault> {
        let rest = self.rest();
        let body = &rest[prefix..];
        let quote = &body[..1];
        let triple = quote.repeat(3);
        let mark = if body.starts_with(&triple) {
            triple.as_str()
        } else {
            quote
        };
        // Raw strings keep the backslash, but it still guards a quotation mark.
        let mut at = mark.len();
        while at < body.len() {
            let ahead = &body[at..];
            if ahead.starts_with(mark) {
                return Ok(self.place(Token::Text, prefix + at + mark.len()));
            }
            let c = ahead.chars().next().unwrap_or(' ');
            if c == '\n' && mark.len() == 1 {
                break;
            }
            at += c.len_utf8();
            if c == '\\' {
                let escaped = ahead[1..].chars().next();
                at += escaped.map_or(0, char::len_utf8);
                if escaped == Some('\r') && body[at..].starts_with('\n') {
                    at += 1;
                }
            }
        }
        Err(Fault::syntax(self.at, "this string is never closed"))
    }
}

/// Digits, letters, underscores and dots, and a sign after an exponent's `e`.
fn number_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let decimal = !rest.starts_with("0x") && !rest.starts_with("0X");
    let mut length = 0;
    while let Some(byte) = bytes.get(length) {
        let sign = matches!(byte, b'+' | b'-')
            && decimal
            && length > 0
            && matches!(bytes[length - 1], b'e' | b'E');
        if !(byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.') || sign) {
            break;
        }
        length += 1;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, Vec<&str>)> {
        lines(text)
            .unwrap()
            .into_iter()
            .map(|line| {
                let tokens = line.tokens.iter().filter(|one| one.token != Token::End);
                (
                    line.indent,
                    tokens.map(|one| &text[one.span.clone()]).collect(),
                )
            })
            .collect()
    }

    #[test]
    fn lines_join_as_python_joins_them() {
        let text = "# head\n\nA = 4 # four\nB = (\n  1,  # one\n\n  2)\nif x:\n\tC = 1 + \\\n  2\n\nD='''a\nb'''";
        assert_eq!(
            texts(text),
            [
                (0, vec!["A", "=", "4"]),
                (0, vec!["B", "=", "(", "1", ",", "2", ")"]),
                (0, vec!["if", "x", ":"]),
                (8, vec!["C", "=", "1", "+", "2"]),
                (0, vec!["D", "=", "'''a\nb'''"]),
            ]
        );
    }

    #[test]
    fn strings_and_numbers_are_one_token() {
        for literal in [
            "'a'",
            "\"a\\\"b\"",
            "r'\\''",
            "rb\"x\"",
            "f'{a}'",
            "'''a'b\n'''",
            "''",
            "\"\"\"\"\"\"",
            "1_000",
            "0xFFe",
            "1e-4",
            "1.5E+10",
            ".5",
            "5.",
            "1j",
            "'é'",
        ] {
            assert_eq!(texts(literal), [(0, vec![literal])], "{literal}");
        }
        assert_eq!(texts("0xe+1"), [(0, vec!["0xe", "+", "1"])]);
        assert_eq!(texts("a.b"), [(0, vec!["a", ".", "b"])]);
    }

    #[test]
    fn what_is_left_open_is_told_where() {
        for (text, offset) in [
            ("a = (1", 4),
            ("a = 'x\n'", 4),
            ("a = 1)", 5),
            ("(]", 1),
            ("a = \"\"\"x", 4),
        ] {
            match lines(text) {
                Err(Fault::Syntax { offset: found, .. }) => assert_eq!(found, offset, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
