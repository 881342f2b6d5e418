//! The line of a model's program that runs. Every request and every node of the graph carries it, so that memory is named by
//! the statement that asked for it, and what backward makes by the forward statement it belongs to.

use std::fmt;

/// A place in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Line {
    /// A line of a library's file, which anyone can open.
    Source { file: &'static str, number: u32 },
    /// A statement of code that has no such file, as a formula.
    Statement(&'static str),
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Source { file, number } => write!(f, "{file}:{number}"),
            Line::Statement(statement) => f.write_str(statement),
        }
    }
}

/// Says which line runs from here on: `at!(context, FILE, 291)` or `at!(context, "y = x · W")`. It stands before the
/// statement it names. The line is a constant, so this stores one pointer.
macro_rules! at {
    ($context:expr, $statement:literal) => {
        $context.at(&$crate::eager::Line::Statement($statement))
    };
    ($context:expr, $file:expr, $number:literal) => {
        $context.at(&$crate::eager::Line::Source {
            file: $file,
            number: $number,
        })
    };
}
pub(crate) use at;
