//! One chat template: Jinja as transformers runs it, with the tag that marks what a model says.
//!
//! `{% generation %}` is an extension of transformers which this engine has no tag for. It is
//! rewritten to a `with` block that prints a mark where the span begins and ends; the marks are
//! taken out of the text again and become its spans.

use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::date::Moment;
use super::json;
use crate::error::DataError;

const NAME: &str = "chat_template";

/// Instructions that one rendering may run: a long conversation takes some ten thousand, and a
/// template that never ends must not stop a run.
const MOST_INSTRUCTIONS: u64 = 5_000_000;

/// Noncharacters, which Unicode keeps for uses such as this and which no text may hold.
const SPAN_BEGINS: char = '\u{FDD0}';
const SPAN_ENDS: char = '\u{FDD1}';

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// The bytes that the template marks as said by the model; empty for a template that has no
    /// `{% generation %}`.
    pub generated: Vec<Range<usize>>,
}

/// A template that failed: what it said, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateProblem {
    pub problem: String,
    pub line: Option<usize>,
}

impl TemplateProblem {
    fn new(error: &Error) -> Self {
        // The words of `raise_exception` are the template's own, and need no kind before them.
        let problem = match (error.kind(), error.detail()) {
            (ErrorKind::OutOfFuel, _) => {
                format!("it ran more than {MOST_INSTRUCTIONS} instructions")
            }
            (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        Self {
            problem,
            line: error.line(),
        }
    }
}

/// A compiled template. Rendering may be called from any number of threads.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    path: PathBuf,
    marks_generation: bool,
}

impl Template {
    /// Compiles `source`, which was read from `path`; `moment` is what `strftime_now` writes.
    pub fn new(path: &Path, source: &str, moment: Moment) -> Result<Self, DataError> {
        // Jinja2 reads every line break as this one.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, marks_generation) = mark_generation(&source);
        let mut environment = Environment::new();
        let compiled = configure(&mut environment, moment)
            .and_then(|()| environment.add_template_owned(NAME, source));
        match compiled {
            Ok(()) => Ok(Self {
                environment,
                path: path.to_path_buf(),
                marks_generation,
            }),
            Err(error) => {
                let TemplateProblem { problem, line } = TemplateProblem::new(&error);
                Err(DataError::TemplateParse {
                    path: path.to_path_buf(),
                    line: line.unwrap_or(1),
                    problem,
                })
            }
        }
    }

    /// The file that the template was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the template says itself what a model generates.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Renders with the variables of `context`.
    pub(super) fn render(&self, context: Value) -> Result<Rendered, TemplateProblem> {
        let text = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|error| TemplateProblem::new(&error))?;
        if !self.marks_generation {
            let generated = Vec::new();
            return Ok(Rendered { text, generated });
        }
        take_marks(&text)
    }
}

/// The environment of transformers: blocks trimmed, its functions and its `tojson`.
fn configure(environment: &mut Environment<'static>, moment: Moment) -> Result<(), Error> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(MOST_INSTRUCTIONS));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match json::python_float(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    });
    // In Python neither None nor a number can be iterated over.
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
        )
    });
    environment.add_filter("string", |value: &Value| {
        json::python_float(value).unwrap_or_else(|| value.to_string())
    });
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", |message: String| {
        Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| moment.format(format));
    Ok(())
}

/// Python's methods of strings and dictionaries, beyond those that the engine's companion has.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let text = (value.kind() == ValueKind::String).then(|| value.as_str().unwrap_or_default());
    let argument = arguments.first().and_then(Value::as_str);
    match (name, text, argument) {
        ("removeprefix", Some(text), Some(prefix)) => {
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        ("removesuffix", Some(text), Some(suffix)) => {
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Replaces the tags `generation` and `endgeneration`, and says whether there were any. The
/// signs that trim whitespace stay at the outer sides of what replaces a tag; nothing lies
/// between the parts that could be trimmed.
fn mark_generation(source: &str) -> (String, bool) {
    let mut marked = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(open) = rest.find("{%") {
        // What a comment says of the tags is no tag.
        if let Some(comment) = rest[..open].find("{#")
            && let Some(end) = rest[comment..].find("#}")
        {
            let end = comment + end + 2;
            marked.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let tag = &rest[open + 2..];
        let Some(close) = tag.find("%}") else { break };
        let inner = &tag[..close];
        let (left, body) = sign(inner, |text, sign| text.strip_prefix(sign));
        let (right, body) = sign(body, |text, sign| text.strip_suffix(sign));
        let replacement = match body.trim() {
            "generation" => Some(format!(
                "{{%{left} with generated = true %}}{{{{ '{SPAN_BEGINS}' }}}}{{% if true {right}%}}"
            )),
            "endgeneration" => Some(format!(
                "{{%{left} endif %}}{{{{ '{SPAN_ENDS}' }}}}{{% endwith {right}%}}"
            )),
            _ => None,
        };
        let end = open + 2 + close + 2;
        match replacement {
            Some(replacement) => {
                found = true;
                marked.push_str(&rest[..open]);
                marked.push_str(&replacement);
                rest = &rest[end..];
            }
            // A tag may stand in a string: only its opening is passed over.
            None => {
                marked.push_str(&rest[..open + 2]);
                rest = &rest[open + 2..];
            }
        }
    }
    marked.push_str(rest);
    (marked, found)
}

/// The whitespace sign at one side of a tag, and the tag without it.
fn sign<'a>(
    text: &'a str,
    strip: impl Fn(&'a str, char) -> Option<&'a str>,
) -> (&'static str, &'a str) {
    for (sign, name) in [('-', "-"), ('+', "+")] {
        if let Some(text) = strip(text, sign) {
            return (name, text);
        }
    }
    ("", text)
}

/// Takes the marks out of a rendered text.
fn take_marks(marked: &str) -> Result<Rendered, TemplateProblem> {
    let mut text = String::with_capacity(marked.len());
    let mut generated = Vec::new();
    let mut begin = None;
    for character in marked.chars() {
        match (character, begin) {
            (SPAN_BEGINS, None) => begin = Some(text.len()),
            (SPAN_ENDS, Some(start)) => {
                generated.push(start..text.len());
                begin = None;
            }
            (SPAN_BEGINS | SPAN_ENDS, _) => {
                return Err(TemplateProblem {
                    problem: format!(
                        "a turn holds the character U+{:04X}, which Unicode reserves",
                        u32::from(character)
                    ),
                    line: None,
                });
            }
            _ => text.push(character),
        }
    }
    Ok(Rendered { text, generated })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<Rendered, TemplateProblem> {
        let template = Template::new(Path::new("t"), source, Moment(0)).unwrap();
        template.render(Value::from_pairs([("n", Value::from(1e-5))]))
    }

    #[test]
    fn generated_spans_keep_the_whitespace_of_their_tags() {
        for (source, text, spans) in [
            (
                "a {% generation %} b {% endgeneration %} c",
                "a  b  c",
                &[" b "][..],
            ),
            (
                "a {%- generation -%} b {%- endgeneration -%} c",
                "abc",
                &["b"],
            ),
            (
                "a\n  {% generation %}\nb\n  {% endgeneration %}\nc",
                "a\nb\nc",
                &["b\n"],
            ),
            (
                "a\n  {%+ generation +%}\nb{% endgeneration %}",
                "a\n  \nb",
                &["\nb"],
            ),
            (
                "{% for i in [1, 2] %}{% generation %}{{ i }}{% endgeneration %}-{% endfor %}",
                "1-2-",
                &["1", "2"],
            ),
            (
                "{# {% generation %} #}a{% generation %}b{% endgeneration %}{# x #}",
                "ab",
                &["b"],
            ),
            // Inside a string it is no tag.
            (
                "{{ '{% generation' }}{% generation %}x{% endgeneration %}",
                "{% generationx",
                &["x"],
            ),
        ] {
            let rendered = render(source).unwrap();
            assert_eq!(rendered.text, text, "{source}");
            let found = rendered
                .generated
                .into_iter()
                .map(|span| &rendered.text[span]);
            assert!(found.eq(spans.iter().copied()), "{source}");
        }
    }

    #[test]
    fn a_comment_marks_nothing() {
        let source = "{#- {% generation %} {% endgeneration %} -#}a{% if true %}b{% endif %}";
        let template = Template::new(Path::new("t"), source, Moment(0)).unwrap();
        assert!(!template.marks_generation());
        assert_eq!(render(source).unwrap().text, "ab");
    }

    #[test]
    fn what_is_set_in_a_generated_span_stays_there() {
        let source =
            "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}";
        assert_eq!(render(source).unwrap().text, "21");
    }

    #[test]
    fn a_mark_in_a_turn_is_refused() {
        let problem = render("{% generation %}\u{FDD0}{% endgeneration %}").unwrap_err();
        assert!(problem.problem.contains("U+FDD0"), "{problem:?}");
    }

    #[test]
    fn values_print_as_in_python() {
        let source =
            "{{ n }} {{ n | string }} {{ none }} {{ true }} {{ [1, 'a'] }}\r\n{{ missing }}";
        let text = render(source).unwrap().text;
        assert_eq!(text, "1e-05 1e-05 None True [1, 'a']\n");
        assert_eq!(
            render("{{ 'abc'.removeprefix('a').removesuffix('c') }}")
                .unwrap()
                .text,
            "b"
        );
        assert!(render("{{ n | tojson(indent=999999999999) }}").is_err());
    }
}
