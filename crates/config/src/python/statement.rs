//! The parts of a statement: where its block begins, and where it assigns.

use super::literal::matching;
use super::token::{Placed, Token};

/// What stands behind the colon on the line that opens a block.
pub(super) fn body(tokens: &[Placed]) -> &[Placed] {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].token {
            Token::Mark(b':') => return &tokens[at + 1..],
            Token::Mark(b'(' | b'[' | b'{') => at = matching(tokens, at) + 1,
            _ => at += 1,
        }
    }
    &[]
}

/// The index of the first `=` outside brackets that assigns.
pub(super) fn assignment(tokens: &[Placed]) -> Option<usize> {
    let mark = |index: usize| tokens.get(index).map(|placed| placed.token);
    let touches = |left: usize, right: usize| {
        tokens
            .get(left)
            .zip(tokens.get(right))
            .is_some_and(|(left, right)| left.span.end == right.span.start)
    };
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].token {
            Token::Mark(b'(' | b'[' | b'{') => at = matching(tokens, at) + 1,
            Token::Mark(b'=') if mark(at + 1) == Some(Token::Mark(b'=')) && touches(at, at + 1) => {
                at += 2;
            }
            Token::Mark(b'=') => {
                let operator = at > 0
                    && touches(at - 1, at)
                    && matches!(tokens[at - 1].token, Token::Mark(mark) if b"<>!:+-*/%&|^@".contains(&mark));
                if !operator {
                    return Some(at);
                }
                at += 1;
            }
            _ => at += 1,
        }
    }
    None
}

/// `+=` and its like, directly behind the target.
pub(super) fn augmented(tokens: &[Placed]) -> bool {
    let operators = tokens
        .iter()
        .take_while(
            |placed| matches!(placed.token, Token::Mark(mark) if b"+-*/%&|^@<>".contains(&mark)),
        )
        .count();
    operators > 0 && tokens.get(operators).map(|placed| placed.token) == Some(Token::Mark(b'='))
}
