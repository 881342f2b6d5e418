//! Reads the constants of a Python module without running it: assignments at
//! the top level, class attributes, and what dictionaries and calls with
//! keyword arguments hold.
//!
//! Only literals are values. Whatever Python would have to compute is seen as
//! an expression, kept as it is, and never guessed at. What happens inside
//! functions is not configuration, except for the calls that `call` knows; what
//! happens under a condition makes the name's value uncertain, so such names
//! are not edited.
//!
//! A keyword of such a call may be a name that was given a literal once: its
//! value is then that literal, where it stands.

mod call;
mod literal;
mod names;
mod statement;
mod token;

use call::{Arguments, arguments_of, is_class};
use literal::{Literal, interpret, split};
use names::torch_name;
use statement::{assignment, augmented, body};
use token::{Line, Placed, Token, lines};

use std::collections::{BTreeMap, HashMap};

use crate::document::Scalar;
use crate::outline::{Fault, Hold, KeyPath, Layout, Leaf, MAX_DEPTH, Member, Outline, Span, Table};

/// Reads `text`, which has no byte order mark.
pub(crate) fn outline(text: &str) -> Result<Outline, Fault> {
    let lines = lines(text)?;
    if lines.is_empty() {
        return Err(Fault::Empty);
    }
    let mut reader = Reader {
        text,
        outline: Outline::default(),
        tables: HashMap::new(),
        leaves: HashMap::new(),
        uncertain: HashMap::new(),
        names: BTreeMap::new(),
        follows_names: false,
    };
    reader.open_table(Vec::new(), Layout::Lines { opened: 0 });
    reader.module(&lines);
    reader.mark_uncertain();
    reader.calls(&lines);
    // Calls were read last; a file's values are told as they stand.
    reader.outline.leaves.sort_by_key(|leaf| leaf.name.start);
    if reader.outline.leaves.is_empty() && reader.outline.tables.len() == 1 {
        return Err(Fault::NotSections);
    }
    Ok(reader.outline)
}

/// What an indented block belongs to.
struct Scope {
    /// The indentation of the line that opened it.
    indent: usize,
    path: KeyPath,
    kind: ScopeKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ScopeKind {
    Settings,
    /// Runs only sometimes.
    Conditional,
    /// Functions, and what only runs as a script.
    Hidden,
}

struct Reader<'a> {
    text: &'a str,
    outline: Outline,
    /// The last table of each path.
    tables: HashMap<KeyPath, usize>,
    /// Of each path the first leaf, and whether there is another.
    leaves: HashMap<KeyPath, (usize, bool)>,
    /// Paths that are set again somewhere we cannot follow, and where first.
    uncertain: HashMap<KeyPath, usize>,
    /// Names without a dot that are set in any scope, with the literal where there is one and it
    /// is the only one.
    names: BTreeMap<String, Option<(Scalar, Span)>>,
    /// Whether a name stands for the literal it was given.
    follows_names: bool,
}

impl Reader<'_> {
    fn word(&self, placed: &Placed) -> &str {
        &self.text[placed.span.clone()]
    }

    fn open_table(&mut self, path: KeyPath, layout: Layout) -> usize {
        let index = self.outline.tables.len();
        self.tables.insert(path.clone(), index);
        self.outline.tables.push(Table {
            path,
            layout,
            members: Vec::new(),
            hold: None,
        });
        index
    }

    fn module(&mut self, lines: &[Line]) {
        let mut scopes: Vec<Scope> = Vec::new();
        for line in lines {
            while scopes
                .last()
                .is_some_and(|scope| line.indent <= scope.indent)
            {
                scopes.pop();
            }
            let (path, kind) = scopes
                .last()
                .map_or((Vec::new(), ScopeKind::Settings), |scope| {
                    (scope.path.clone(), scope.kind)
                });
            let tokens = &line.tokens[..line.tokens.len() - 1];
            let Some(opened) = self.compound(tokens) else {
                self.note_names(tokens, path.is_empty() || kind == ScopeKind::Hidden);
                self.statements(tokens, &path, kind);
                continue;
            };
            self.note_bound_names(tokens);
            let mut inner = Scope {
                indent: line.indent,
                path,
                kind: match (kind, &opened) {
                    (ScopeKind::Hidden, _) | (_, Opened::Function) => ScopeKind::Hidden,
                    (kind, Opened::Class(_)) => kind,
                    (_, Opened::Branch) => ScopeKind::Conditional,
                },
            };
            let body = body(tokens);
            if let Opened::Class(name) = opened {
                inner.path.push(self.text[name].to_owned());
                // Whose attributes are no settings then.
                if Fault::of_section(&inner.path, line.indent).is_err() {
                    inner.path.clear();
                    inner.kind = ScopeKind::Hidden;
                }
                if inner.kind == ScopeKind::Settings {
                    let opened = tokens.last().map_or(0, |last| last.span.end);
                    self.open_table(inner.path.clone(), Layout::Lines { opened });
                }
            }
            self.statements(body, &inner.path, inner.kind);
            scopes.push(inner);
        }
    }

    /// Whether a line opens a block, and of which kind.
    fn compound(&self, tokens: &[Placed]) -> Option<Opened> {
        let word = |index: usize| {
            tokens
                .get(index)
                .filter(|placed| placed.token == Token::Name)
                .map(|placed| self.word(placed))
        };
        let ends_in_colon = tokens.last().map(|last| last.token) == Some(Token::Mark(b':'));
        match word(0)? {
            "class" => {
                word(1)?;
                Some(Opened::Class(tokens[1].span.clone()))
            }
            "def" | "async" => Some(Opened::Function),
            "if" if word(1) == Some("__name__") => Some(Opened::Function),
            "if" | "elif" | "else" | "for" | "while" | "with" | "try" | "except" | "finally" => {
                Some(Opened::Branch)
            }
            // Words of the language only in this place.
            "match" | "case" if ends_in_colon => Some(Opened::Branch),
            _ => None,
        }
    }

    fn statements(&mut self, tokens: &[Placed], path: &KeyPath, kind: ScopeKind) {
        if kind == ScopeKind::Hidden {
            return;
        }
        for statement in split(tokens, b';') {
            self.statement(statement, path, kind);
        }
    }

    fn statement(&mut self, tokens: &[Placed], scope: &KeyPath, kind: ScopeKind) {
        let Some((target, after)) = self.target(tokens) else {
            return;
        };
        let mut path = scope.clone();
        path.extend(target.iter().map(|(name, _)| name.clone()));
        let Some((_, name)) = target.last().cloned() else {
            return;
        };
        let rest = &tokens[after..];
        let Some(equals) = assignment(rest) else {
            if augmented(rest) {
                self.uncertain.entry(path).or_insert(name.start);
            }
            return;
        };
        let annotated = equals > 0;
        if annotated && rest[0].token != Token::Mark(b':') {
            return;
        }
        if kind == ScopeKind::Conditional {
            self.uncertain.entry(path).or_insert(name.start);
            return;
        }
        let value = &rest[equals + 1..];
        let (Some(first), Some(last)) = (value.first(), value.last()) else {
            return;
        };
        let span = first.span.start..last.span.end;
        if let [_] = target.as_slice() {
            // Classes and the module list what stands on lines of its own.
            if let Some(table) = self.tables.get(scope) {
                self.outline.tables[*table].members.push(Member {
                    name: name.clone(),
                    value: span.clone(),
                });
            }
        }
        if assignment(value).is_some() {
            self.leaf(
                path,
                name,
                span,
                Scalar::Composite("a chained assignment"),
                None,
            );
        } else {
            self.value(path, name, value, 0);
        }
    }

    /// `NAME`, `config.name` or `CONFIG["name"]["name"]`: the names with their
    /// places, and how many tokens they take.
    fn target(&self, tokens: &[Placed]) -> Option<(Vec<(String, Span)>, usize)> {
        let first = tokens.first().filter(|first| first.token == Token::Name)?;
        let mut names = vec![(self.word(first).to_owned(), first.span.clone())];
        let mut at = 1;
        loop {
            if names.len() > MAX_DEPTH {
                return None;
            }
            match tokens.get(at..).unwrap_or(&[]) {
                [dot, name, ..] if dot.token == Token::Mark(b'.') && name.token == Token::Name => {
                    names.push((self.word(name).to_owned(), name.span.clone()));
                    at += 2;
                }
                [open, key, close, ..]
                    if open.token == Token::Mark(b'[')
                        && key.token == Token::Text
                        && close.token == Token::Mark(b']') =>
                {
                    let name = literal::decode(self.word(key))?;
                    names.push((name, key.span.clone()));
                    at += 3;
                }
                _ => return Some((names, at)),
            }
        }
    }

    fn value(&mut self, path: KeyPath, name: Span, tokens: &[Placed], depth: usize) {
        let span = span_of(tokens);
        let is_section = depth < MAX_DEPTH && Fault::of_section(&path, span.start).is_ok();
        match interpret(self.text, tokens) {
            Literal::Scalar(scalar, span) => {
                let several_lines = self.text[span.clone()].contains('\n');
                let hold = several_lines.then_some(Hold::Unwritable("a text of several lines"));
                self.leaf(path, name, span, scalar, hold);
            }
            Literal::Dictionary(inner) if is_section => {
                let span = span_of(inner);
                let layout = Layout::Brackets {
                    open: span.start + 1,
                    close: span.end - 1,
                };
                let table = self.open_table(path.clone(), layout);
                for item in split(&inner[1..inner.len() - 1], b',') {
                    self.dictionary_item(&path, table, item, depth);
                }
            }
            Literal::Call { callee, arguments } if is_section => {
                self.call(path, name, span, callee, arguments, depth);
            }
            _ => match (self.followed(tokens), torch_name(self.text, tokens)) {
                (Some((scalar, literal)), _) => {
                    let hold = match &scalar {
                        Scalar::Text(text) if text.starts_with("torch.") => Some(A_NAME),
                        _ => None,
                    };
                    self.leaf(path, name, literal, scalar, hold);
                }
                (None, Some(scalar)) => self.leaf(path, name, span, scalar, Some(A_NAME)),
                (None, None) => {
                    self.leaf(path, name, span, Scalar::Composite("an expression"), None);
                }
            },
        }
    }

    fn dictionary_item(&mut self, path: &KeyPath, table: usize, item: &[Placed], depth: usize) {
        let [key, colon, value @ ..] = item else {
            return;
        };
        if key.token != Token::Text || colon.token != Token::Mark(b':') || value.is_empty() {
            return;
        }
        let Some(name) = literal::decode(self.word(key)) else {
            return;
        };
        self.member(path, table, name, key.span.clone(), value, depth);
    }

    fn member(
        &mut self,
        path: &KeyPath,
        table: usize,
        name: String,
        name_span: Span,
        value: &[Placed],
        depth: usize,
    ) {
        self.outline.tables[table].members.push(Member {
            name: name_span.clone(),
            value: span_of(value),
        });
        let mut inner = path.clone();
        inner.push(name);
        self.value(inner, name_span, value, depth + 1);
    }

    /// `dict(a=1)` and `TrainingArguments(a=1)` are sections; `field(default=1)`
    /// of a dataclass is its default.
    fn call(
        &mut self,
        path: KeyPath,
        name: Span,
        span: Span,
        callee: &str,
        arguments: &[Placed],
        depth: usize,
    ) {
        let Arguments {
            named: keywords,
            others,
        } = arguments_of(arguments);
        if is_class(callee) && !keywords.is_empty() {
            // Read with the calls of every scope.
            return;
        }
        if callee == "from_pretrained" {
            self.leaf(path, name, span, Scalar::Composite("an expression"), None);
            return;
        }
        if matches!(callee, "field" | "Field") {
            let default = keywords.iter().find(|(key, _)| self.word(key) == "default");
            let positional = others.first().filter(|_| callee == "Field").copied();
            if let Some(value) = default.map(|(_, value)| *value).or(positional) {
                self.value(path, name, value, depth + 1);
                return;
            }
        } else if callee == "dict" || !keywords.is_empty() {
            let brackets = span_of(arguments);
            let layout = Layout::Arguments {
                open: brackets.start + 1,
                close: brackets.end - 1,
            };
            let table = self.open_table(path.clone(), layout);
            for (key, value) in keywords {
                let keyword = self.word(key).to_owned();
                self.member(&path, table, keyword, key.span.clone(), value, depth);
            }
            return;
        }
        self.leaf(path, name, span, Scalar::Composite("an expression"), None);
    }

    fn leaf(&mut self, path: KeyPath, name: Span, value: Span, scalar: Scalar, hold: Option<Hold>) {
        let index = self.outline.leaves.len();
        let known = self.leaves.entry(path.clone());
        known
            .and_modify(|(_, again)| *again = true)
            .or_insert((index, false));
        self.outline.leaves.push(Leaf {
            path,
            name,
            value,
            scalar,
            hold,
        });
    }

    fn mark_uncertain(&mut self) {
        for leaf in &mut self.outline.leaves {
            let sections = (0..=leaf.path.len()).map(|length| &leaf.path[..length]);
            let again = sections.filter_map(|path| self.uncertain.get(path)).min();
            if let Some(offset) = again {
                leaf.hold = Some(Hold::Conditional(*offset));
            }
        }
    }
}

enum Opened {
    Class(Span),
    Function,
    Branch,
}

/// A name of torch, which stands for itself and cannot be written as a text.
const A_NAME: Hold = Hold::Unwritable("a name of the program");

fn span_of(tokens: &[Placed]) -> Span {
    match (tokens.first(), tokens.last()) {
        (Some(first), Some(last)) => first.span.start..last.span.end,
        _ => 0..0,
    }
}

#[cfg(test)]
mod tests;
