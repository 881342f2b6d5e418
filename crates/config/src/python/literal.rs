//! What an expression is, if it is a literal.

use crate::document::Scalar;
use crate::number;
use crate::outline::Span;

use super::token::{Placed, Token};

pub(super) enum Literal<'t> {
    Scalar(Scalar, Span),
    /// The tokens from brace to brace.
    Dictionary(&'t [Placed]),
    Call {
        /// The last name before the bracket.
        callee: &'t str,
        /// The tokens from bracket to bracket.
        arguments: &'t [Placed],
    },
    Expression,
}

pub(super) fn interpret<'t>(text: &'t str, tokens: &'t [Placed]) -> Literal<'t> {
    let word = |placed: &Placed| &text[placed.span.clone()];
    let (Some(first), Some(last)) = (tokens.first(), tokens.last()) else {
        return Literal::Expression;
    };
    let span = first.span.start..last.span.end;
    let closed = matches!(first.token, Token::Mark(b'(' | b'[' | b'{'))
        && matching(tokens, 0) == tokens.len() - 1;
    match (first.token, tokens) {
        (Token::Mark(b'{'), _) if closed => {
            let inner = &tokens[1..tokens.len() - 1];
            let items = split(inner, b',');
            let set = items.iter().any(|item| {
                let unpacked = item
                    .first()
                    .is_some_and(|one| one.token == Token::Mark(b'*'));
                !unpacked && split(item, b':').len() < 2
            });
            if set {
                Literal::Scalar(Scalar::Composite("a set"), span)
            } else {
                Literal::Dictionary(tokens)
            }
        }
        (Token::Mark(b'['), _) if closed => {
            let items = split(&tokens[1..tokens.len() - 1], b',').into_iter();
            let items = items.filter(|item| !item.is_empty());
            let items = items.map(|item| match interpret(text, item) {
                Literal::Scalar(scalar, _) => scalar,
                _ => Scalar::Composite("an expression"),
            });
            Literal::Scalar(Scalar::list(items.collect()), span)
        }
        (Token::Mark(b'('), _) if closed => {
            let inner = &tokens[1..tokens.len() - 1];
            let comma = inner.iter().any(|one| one.token == Token::Mark(b','));
            if split(inner, b',').len() == 1 && !inner.is_empty() && !comma {
                interpret(text, inner)
            } else {
                Literal::Scalar(Scalar::Composite("a tuple"), span)
            }
        }
        (Token::Number, [only]) => number_literal(word(only), span),
        (Token::Mark(sign @ (b'-' | b'+')), [_, digits]) if digits.token == Token::Number => {
            let signed = format!("{}{}", char::from(sign), word(digits));
            number_literal(&signed, span)
        }
        (Token::Name, [only]) => match word(only) {
            "True" => Literal::Scalar(Scalar::Bool(true), span),
            "False" => Literal::Scalar(Scalar::Bool(false), span),
            "None" => Literal::Scalar(Scalar::Null, span),
            _ => Literal::Expression,
        },
        (Token::Text, _) => {
            let parts = tokens.iter().map(|part| match part.token {
                Token::Text => decode(word(part)),
                _ => None,
            });
            parts
                .collect::<Option<Vec<String>>>()
                .map_or(Literal::Expression, |parts| {
                    Literal::Scalar(Scalar::Text(parts.concat()), span)
                })
        }
        (Token::Name, _) => call(text, tokens).unwrap_or(Literal::Expression),
        _ => Literal::Expression,
    }
}

fn number_literal(text: &str, span: Span) -> Literal<'static> {
    let scalar = number::canonical(text).map(Scalar::Number);
    Literal::Scalar(
        scalar.unwrap_or(Scalar::Composite("a complex number")),
        span,
    )
}

/// `module.function(…)` and nothing behind it.
fn call<'t>(text: &'t str, tokens: &'t [Placed]) -> Option<Literal<'t>> {
    let open = tokens
        .iter()
        .position(|placed| placed.token == Token::Mark(b'('))?;
    let dotted = tokens[..open].iter().enumerate().all(|(index, placed)| {
        if index % 2 == 0 {
            placed.token == Token::Name
        } else {
            placed.token == Token::Mark(b'.')
        }
    });
    let callee = tokens[..open].last()?;
    (dotted && callee.token == Token::Name && matching(tokens, open) == tokens.len() - 1).then(
        || Literal::Call {
            callee: &text[callee.span.clone()],
            arguments: &tokens[open..],
        },
    )
}

/// The index of the bracket that closes the one at `open`.
pub(super) fn matching(tokens: &[Placed], open: usize) -> usize {
    let mut depth = 0_usize;
    for (index, placed) in tokens.iter().enumerate().skip(open) {
        match placed.token {
            Token::Mark(b'(' | b'[' | b'{') => depth += 1,
            Token::Mark(b')' | b']' | b'}') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return index;
                }
            }
            _ => {}
        }
    }
    tokens.len().saturating_sub(1)
}

/// The parts between marks that stand outside brackets; empty parts left out.
pub(super) fn split(tokens: &[Placed], mark: u8) -> Vec<&[Placed]> {
    let mut parts = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < tokens.len() {
        match tokens[at].token {
            Token::Mark(b'(' | b'[' | b'{') => at = matching(tokens, at),
            Token::Mark(found) if found == mark => {
                parts.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    parts.push(&tokens[start.min(tokens.len())..]);
    parts.retain(|part| !part.is_empty());
    parts
}

/// The text a string literal stands for; `None` for f-strings and bytes.
pub(super) fn decode(literal: &str) -> Option<String> {
    let quote = literal.find(['"', '\''])?;
    let (prefix, body) = literal.split_at(quote);
    let prefix = prefix.to_ascii_lowercase();
    if prefix.contains(['f', 'b', 't']) {
        return None;
    }
    let mark = &body[..1];
    let triple = mark.repeat(3);
    let width = if body.len() >= 6 && body.starts_with(&triple) {
        3
    } else {
        1
    };
    let inner = body.get(width..body.len() - width)?;
    if prefix.contains('r') {
        return Some(inner.to_owned());
    }
    let mut decoded = String::new();
    let mut rest = inner;
    while let Some(at) = rest.find('\\') {
        decoded.push_str(&rest[..at]);
        let (text, length) = escape(&rest[at + 1..]);
        decoded.push_str(&text);
        rest = &rest[at + 1 + length..];
    }
    decoded.push_str(rest);
    Some(decoded)
}

/// What a backslash and the text behind it stand for, and how much of that text
/// it takes. Python keeps the backslash of escapes that do not exist.
fn escape(rest: &str) -> (String, usize) {
    let coded = |digits: usize| {
        let code = rest.get(1..=digits)?;
        let character = char::from_u32(u32::from_str_radix(code, 16).ok()?)?;
        Some((character.to_string(), digits + 1))
    };
    let known = match rest.chars().next() {
        Some('n') => Some(("\n".to_owned(), 1)),
        Some('t') => Some(("\t".to_owned(), 1)),
        Some('r') => Some(("\r".to_owned(), 1)),
        Some('0') => Some(("\0".to_owned(), 1)),
        Some(same @ ('\\' | '\'' | '"')) => Some((same.to_string(), 1)),
        Some('\n') => Some((String::new(), 1)),
        Some('x') => coded(2),
        Some('u') => coded(4),
        Some('U') => coded(8),
        _ => None,
    };
    known.unwrap_or_else(|| ("\\".to_owned(), 0))
}
