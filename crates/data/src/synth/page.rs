//! Lines, indentation and the spelling of names: what printing needs in every language.

use super::program::{Expression, Operator};

/// A text that grows line by line.
pub(super) struct Page {
    text: String,
    depth: usize,
    indent: &'static str,
}

impl Page {
    pub(super) fn new(indent: &'static str) -> Self {
        Self {
            text: String::new(),
            depth: 0,
            indent,
        }
    }

    pub(super) fn line(&mut self, line: impl AsRef<str>) {
        for _ in 0..self.depth {
            self.text.push_str(self.indent);
        }
        self.text.push_str(line.as_ref());
        self.text.push('\n');
    }

    pub(super) fn blank(&mut self) {
        self.text.push('\n');
    }

    /// A line after which the following ones stand further in.
    pub(super) fn open(&mut self, line: impl AsRef<str>) {
        self.line(line);
        self.depth += 1;
    }

    /// A line that ends what `open` began.
    pub(super) fn close(&mut self, line: impl AsRef<str>) {
        self.leave();
        self.line(line);
    }

    /// Ends what `open` began where indentation alone says so.
    pub(super) fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }
}

/// The word with its first letter in upper case.
pub(super) fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_ascii_uppercase().to_string() + letters.as_str()
    })
}

/// `total_weight` → `TotalWeight`.
pub(super) fn pascal(name: &str) -> String {
    name.split('_').map(capital).collect()
}

/// `total_weight` → `totalWeight`.
pub(super) fn camel(name: &str) -> String {
    match name.split_once('_') {
        Some((first, rest)) => first.to_owned() + &pascal(rest),
        None => name.to_owned(),
    }
}

/// `total_weight` → `Total_Weight`.
pub(super) fn capital_words(name: &str) -> String {
    let words: Vec<String> = name.split('_').map(capital).collect();
    words.join("_")
}

/// How one language writes the leaves of an expression.
pub(super) trait Notation {
    fn variable(&self, name: &str) -> String;
    fn field(&self, item: &str, field: &str) -> String;
    fn operator(&self, operator: Operator) -> &'static str;
    fn call(&self, function: &str, arguments: &[String]) -> String;
}

/// The symbols that most languages share.
pub(super) fn usual_operator(operator: Operator) -> &'static str {
    match operator {
        Operator::Add => "+",
        Operator::Subtract => "-",
        Operator::Multiply => "*",
        Operator::Remainder => "%",
        Operator::Less => "<",
        Operator::Greater => ">",
        Operator::Equal => "==",
    }
}

/// An expression with the parentheses it needs and no others.
pub(super) fn print(notation: &dyn Notation, expression: &Expression) -> String {
    match expression {
        Expression::Integer(value) => value.to_string(),
        Expression::Variable(name) => notation.variable(name),
        Expression::Field { item, field } => notation.field(item, field),
        Expression::Binary(operator, left, right) => {
            let level = operator.level();
            format!(
                "{} {} {}",
                operand(notation, left, level),
                notation.operator(*operator),
                operand(notation, right, level + 1)
            )
        }
        Expression::Call(name, arguments) => {
            let arguments: Vec<String> = arguments.iter().map(|a| print(notation, a)).collect();
            notation.call(name, &arguments)
        }
    }
}

fn operand(notation: &dyn Notation, expression: &Expression, least_level: u8) -> String {
    let text = print(notation, expression);
    match expression {
        Expression::Binary(operator, ..) if operator.level() < least_level => format!("({text})"),
        _ => text,
    }
}
