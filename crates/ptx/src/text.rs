//! PTX as tokens, with the line of each.

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// Names, opcodes, directives, numbers.
    Word(String),
    Mark(char),
}

impl Token {
    pub fn is(&self, mark: char) -> bool {
        *self == Self::Mark(mark)
    }

    pub fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            Self::Mark(_) => None,
        }
    }
}

fn is_part_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$' | '%')
}

/// Comments are left out; a string is a word with its quotes.
pub(crate) fn tokens(text: &str) -> Vec<(Token, u32)> {
    let mut tokens = Vec::new();
    let mut in_comment = false;
    for (line, text) in (1..).zip(text.lines()) {
        let mut rest = text;
        loop {
            if in_comment {
                let Some(end) = rest.find("*/") else { break };
                rest = &rest[end + 2..];
                in_comment = false;
            }
            rest = rest.trim_start();
            let Some(first) = rest.chars().next() else {
                break;
            };
            if rest.starts_with("//") {
                break;
            }
            if rest.starts_with("/*") {
                in_comment = true;
                rest = &rest[2..];
            } else if first == '"' {
                let end = rest[1..].find('"').map_or(rest.len(), |end| end + 2);
                tokens.push((Token::Word(rest[..end].to_owned()), line));
                rest = &rest[end..];
            } else if is_part_of_word(first) {
                let end = end_of_word(rest);
                tokens.push((Token::Word(rest[..end].to_owned()), line));
                rest = &rest[end..];
            } else {
                tokens.push((Token::Mark(first), line));
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    tokens
}

/// Two colons belong to an opcode, one ends a label.
fn end_of_word(text: &str) -> usize {
    let mut end = 0;
    while end < text.len() {
        let rest = &text[end..];
        if rest.starts_with("::") {
            end += 2;
        } else if rest.starts_with(is_part_of_word) {
            end += 1;
        } else {
            break;
        }
    }
    end
}
