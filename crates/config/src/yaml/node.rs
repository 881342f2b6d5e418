//! YAML as nodes with their bytes: what the parser's events say, put together.
//!
//! The parser knows the language (block and flow, anchors, multi-line scalars)
//! and tells where each token stands in characters; here tokens become bytes
//! and lose what stands before the value itself, anchors and tags.

use saphyr_parser::{Event, Parser, ScalarStyle};

use crate::outline::{Fault, MAX_DEPTH, Span};

/// How the parser says that something is nested too deep.
const PARSER_STOPS: &str = "recursion limit";

/// Brackets open at once, those in texts and comments included. The parser looks through a whole
/// line for a key before it says anything, and at each token through all that are open: without a
/// bound, a line of brackets takes the square of its length.
const MAX_OPEN_BRACKETS: usize = 10 * MAX_DEPTH;

#[derive(Debug)]
pub(super) struct Node {
    /// The bytes of the value: quotation marks and brackets included, anchor and
    /// tag not. Block maps end with their last value.
    pub span: Span,
    /// Identifies the node for aliases; 0 for none.
    pub anchor: usize,
    /// `int` of `!!int`, or a tag of the user's own as written.
    pub tag: Option<String>,
    pub content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Scalar {
        text: String,
        style: ScalarStyle,
    },
    Map {
        pairs: Vec<(Node, Node)>,
        flow: bool,
    },
    List(Vec<Node>),
    Alias(usize),
}

/// The one document of `text`; `None` if there is nothing in it.
pub(super) fn compose(text: &str) -> Result<Option<Node>, Fault> {
    check_brackets(text)?;
    let mut composer = Composer {
        text,
        offsets: text
            .char_indices()
            .map(|(offset, _)| offset)
            .chain([text.len()])
            .collect(),
        parser: Parser::new_from_str(text),
        depth: 0,
    };
    let mut document = None;
    loop {
        match composer.next()? {
            (Event::StreamEnd, _) => return Ok(document),
            (Event::DocumentStart(_), span) if document.is_some() => {
                return Err(Fault::syntax(
                    span.start,
                    "a second document begins here, but a config is one document",
                ));
            }
            (Event::DocumentStart(_), _) => {
                let event = composer.next()?;
                document = Some(composer.node(event)?);
            }
            _ => {}
        }
    }
}

fn check_brackets(text: &str) -> Result<(), Fault> {
    let mut num_open = 0_usize;
    for (offset, byte) in text.bytes().enumerate() {
        match byte {
            b'[' | b'{' => num_open += 1,
            b']' | b'}' => num_open = num_open.saturating_sub(1),
            _ => {}
        }
        if num_open > MAX_OPEN_BRACKETS {
            return Err(Fault::too_deep(offset));
        }
    }
    Ok(())
}

struct Composer<'a> {
    text: &'a str,
    /// The byte at which each character begins.
    offsets: Vec<usize>,
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    depth: usize,
}

impl<'a> Composer<'a> {
    fn byte(&self, index: usize) -> usize {
        self.offsets
            .get(index)
            .map_or(self.text.len(), |byte| *byte)
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), Fault> {
        match self.parser.next() {
            Some(Ok((event, span))) => {
                let start = self.byte(span.start.index());
                let end = self.byte(span.end.index()).max(start);
                Ok((event, start..end))
            }
            Some(Err(error)) => {
                let place = self.byte(error.marker().index());
                match error.info() {
                    message if message.contains(PARSER_STOPS) => Err(Fault::too_deep(place)),
                    message => Err(Fault::syntax(place, message)),
                }
            }
            None => Ok((Event::StreamEnd, self.text.len()..self.text.len())),
        }
    }

    fn node(&mut self, (event, span): (Event<'a>, Span)) -> Result<Node, Fault> {
        self.depth += 1;
        let opens = matches!(event, Event::SequenceStart(..) | Event::MappingStart(..));
        if opens && self.depth > MAX_DEPTH {
            return Err(Fault::too_deep(span.start));
        }
        let node = match event {
            Event::Alias(anchor) => Node {
                span,
                anchor: 0,
                tag: None,
                content: Content::Alias(anchor),
            },
            Event::Scalar(text, style, anchor, tag) => Node {
                span: self.scalar(span, style),
                anchor,
                tag: tag.map(|tag| short_tag(&tag)),
                content: Content::Scalar {
                    text: text.into_owned(),
                    style,
                },
            },
            Event::SequenceStart(anchor, tag) => {
                let start = self.without_properties(span).start;
                let mut items = Vec::new();
                let end = loop {
                    match self.next()? {
                        (Event::SequenceEnd, end) => {
                            let last = items.last().map_or(start, |item: &Node| item.span.end);
                            break if self.text[start..].starts_with('[') {
                                self.closed(&end, ']', last)
                            } else {
                                last
                            };
                        }
                        event => items.push(self.node(event)?),
                    }
                };
                Node {
                    span: start..end.max(start),
                    anchor,
                    tag: tag.map(|tag| short_tag(&tag)),
                    content: Content::List(items),
                }
            }
            Event::MappingStart(anchor, tag) => {
                let start = self.without_properties(span).start;
                let mut pairs: Vec<(Node, Node)> = Vec::new();
                let close = loop {
                    match self.next()? {
                        (Event::MappingEnd, close) => break close,
                        event => {
                            let key = self.node(event)?;
                            let event = self.next()?;
                            pairs.push((key, self.node(event)?));
                        }
                    }
                };
                let last = pairs
                    .last()
                    .map_or(start, |(key, value)| key.span.end.max(value.span.end));
                // A block may begin with a brace too: its first key's.
                let flow = self.text[start..].starts_with('{')
                    && self.text[close.start..].starts_with('}')
                    && pairs.first().is_none_or(|(key, _)| key.span.start > start);
                let end = if flow {
                    self.closed(&close, '}', last)
                } else {
                    last
                };
                Node {
                    span: start..end.max(start),
                    anchor,
                    tag: tag.map(|tag| short_tag(&tag)),
                    content: Content::Map { pairs, flow },
                }
            }
            // The parser sends nothing else between a node's start and its end.
            _ => return Err(Fault::syntax(span.start, "a value was expected here")),
        };
        self.depth -= 1;
        Ok(node)
    }

    /// The bytes of a scalar. The parser's span of a quoted one goes on over the
    /// space and the comment behind it, so the closing mark is looked for.
    fn scalar(&self, span: Span, style: ScalarStyle) -> Span {
        let span = self.without_properties(span);
        let text = &self.text[span.clone()];
        let length = match style {
            ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => quoted_length(text),
            _ => text.trim_end().len(),
        };
        span.start..span.start + length
    }

    /// The end of a flow collection whose closing bracket begins `close`, or of
    /// a block that ends with its last value.
    fn closed(&self, close: &Span, bracket: char, last: usize) -> usize {
        if self.text[close.start..].starts_with(bracket) {
            close.start + bracket.len_utf8()
        } else {
            last
        }
    }

    /// The span after `&anchor`, `!tag` and the space and comments around them.
    fn without_properties(&self, span: Span) -> Span {
        let mut start = span.start;
        loop {
            let rest = &self.text[start..span.end];
            let token = if rest.starts_with(['&', '!']) {
                rest.find(|c: char| c.is_whitespace() || matches!(c, ',' | ']' | '}'))
            } else if rest.starts_with('#') {
                rest.find('\n')
            } else if start > span.start && rest.starts_with(char::is_whitespace) {
                rest.find(|c: char| !c.is_whitespace())
            } else {
                break;
            };
            start += token.unwrap_or(rest.len());
            if start >= span.end {
                break;
            }
        }
        start..span.end
    }
}

/// How far a quoted scalar reaches: `''` and `\"` do not end it.
fn quoted_length(text: &str) -> usize {
    let mut characters = text.char_indices();
    let quote = characters.next().map_or('"', |(_, quote)| quote);
    while let Some((at, c)) = characters.next() {
        let doubled = quote == '\'' && text[at + c.len_utf8()..].starts_with('\'');
        if c == '\\' && quote == '"' || c == quote && doubled {
            characters.next();
        } else if c == quote {
            return at + c.len_utf8();
        }
    }
    text.len()
}

fn short_tag(tag: &saphyr_parser::Tag) -> String {
    if tag.is_yaml_core_schema() {
        tag.suffix.clone()
    } else {
        format!("{}{}", tag.handle, tag.suffix)
    }
}
