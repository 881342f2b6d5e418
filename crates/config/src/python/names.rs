//! What names stand for, and the calls whose keywords may be such names.
//!
//! A name is followed where it is given one literal in the whole file, in whichever scope: then
//! there is nothing else that it could be.

use super::call::{Arguments, arguments_of, calls};
use super::literal::{Literal, interpret, split};
use super::statement::{assignment, augmented, body};
use super::token::{Line, Placed, Token};
use super::{Reader, span_of};
use crate::document::Scalar;
use crate::outline::{KeyPath, Layout, Span};

impl Reader<'_> {
    /// Remembers what names are set to, in whichever scope.
    pub(super) fn note_names(&mut self, tokens: &[Placed], outside_class: bool) {
        for statement in split(tokens, b';') {
            let [name, rest @ ..] = statement else {
                continue;
            };
            if name.token != Token::Name || !outside_class {
                continue;
            }
            let value = match assignment(rest) {
                Some(equals) if equals == 0 || rest[0].token == Token::Mark(b':') => {
                    &rest[equals + 1..]
                }
                None if augmented(rest) => &[],
                // Several names at once: none of them is followed.
                Some(equals) if rest[0].token == Token::Mark(b',') => {
                    let several = statement[..=equals].iter();
                    let several = several.filter(|one| one.token == Token::Name);
                    let several = several.map(|one| (self.text[one.span.clone()].to_owned(), None));
                    self.names.extend(several);
                    continue;
                }
                _ => continue,
            };
            let literal = match interpret(self.text, value) {
                Literal::Scalar(scalar, span) => Some((scalar, span)),
                _ => torch_name(self.text, value).map(|text| (text, span_of(value))),
            };
            let again = self.names.contains_key(self.word(name));
            let name = self.word(name).to_owned();
            self.names.insert(name, literal.filter(|_| !again));
        }
    }

    /// Parameters and loop variables have values that only a run knows.
    pub(super) fn note_bound_names(&mut self, tokens: &[Placed]) {
        let head = tokens.len() - body(tokens).len();
        let binds = matches!(
            tokens.first().map(|first| self.word(first)),
            Some("def" | "async" | "for" | "with")
        );
        let names = tokens[..head]
            .iter()
            .filter(|one| binds && one.token == Token::Name);
        let names: Vec<String> = names.map(|name| self.word(name).to_owned()).collect();
        self.names
            .extend(names.into_iter().map(|name| (name, None)));
    }

    /// The calls that `call` knows, in every scope.
    pub(super) fn calls(&mut self, lines: &[Line]) {
        self.follows_names = true;
        for line in lines {
            let tokens = &line.tokens[..line.tokens.len() - 1];
            for call in calls(self.text, tokens, line.indent > 0) {
                let path = vec![call.section.to_owned()];
                let Arguments { named, others } = arguments_of(call.arguments);
                // A model that is loaded again later is the same one.
                let again = call.first.is_some() && self.tables.contains_key(&path);
                if (named.is_empty() && call.first.is_none()) || again {
                    continue;
                }
                let brackets = span_of(call.arguments);
                let layout = Layout::Arguments {
                    open: brackets.start + 1,
                    close: brackets.end - 1,
                };
                let table = self.open_table(path.clone(), layout);
                if let (Some(name), Some(first)) = (call.first, others.first()) {
                    let mut path = path.clone();
                    path.push(name.to_owned());
                    self.value(path, span_of(first), first, 0);
                }
                for (key, value) in named {
                    let keyword = self.word(key).to_owned();
                    self.member(&path, table, keyword, key.span.clone(), value, 0);
                }
            }
        }
    }

    /// What a name was given, where that is one literal and certain.
    pub(super) fn followed(&self, tokens: &[Placed]) -> Option<(Scalar, Span)> {
        let (names, length) = self.target(tokens).filter(|_| self.follows_names)?;
        if length != tokens.len() {
            return None;
        }
        let path: KeyPath = names.into_iter().map(|(name, _)| name).collect();
        if let [name] = path.as_slice() {
            return self.names.get(name)?.clone();
        }
        let (index, again) = *self.leaves.get(&path)?;
        let leaf = &self.outline.leaves[index];
        let certain = leaf.hold.is_none() && !again && !leaf.scalar.is_composite();
        certain.then(|| (leaf.scalar.clone(), leaf.value.clone()))
    }
}

/// `torch.bfloat16` and its like, as the text that they are.
pub(super) fn torch_name(text: &str, tokens: &[Placed]) -> Option<Scalar> {
    let [torch, dot, name] = tokens else {
        return None;
    };
    let is_name = torch.token == Token::Name && name.token == Token::Name;
    (is_name && dot.token == Token::Mark(b'.') && &text[torch.span.clone()] == "torch")
        .then(|| Scalar::Text(text[span_of(tokens)].to_owned()))
}
