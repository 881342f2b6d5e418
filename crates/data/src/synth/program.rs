//! A small program that knows no language: records, functions over integers and lists, and
//! checks whose expected values come from running the functions.
//!
//! One tree for all languages keeps the files honest: whatever is printed in ten notations means
//! the same, and an assertion in a generated test is true.

use std::collections::HashMap;

/// Values stay below this in every step, so that 32-bit integers hold them in any language.
const LARGEST_VALUE: i64 = 1 << 30;
/// Ends a loop that does not end by itself.
const MOST_STEPS: usize = 20_000;

/// Names are words joined by `_`; each language respells them its own way.
pub(super) type Name = String;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Remainder,
    Less,
    Greater,
    Equal,
}

impl Operator {
    /// Operators of a higher level bind tighter.
    pub(super) fn level(self) -> u8 {
        match self {
            Self::Multiply | Self::Remainder => 3,
            Self::Add | Self::Subtract => 2,
            Self::Less | Self::Greater | Self::Equal => 1,
        }
    }

    fn apply(self, left: i64, right: i64) -> Option<i64> {
        Some(match self {
            Self::Add => left + right,
            Self::Subtract => left - right,
            Self::Multiply => left * right,
            // Languages disagree on the remainder of a negative number, so there is none here.
            Self::Remainder if left >= 0 && right > 0 => left % right,
            Self::Remainder => return None,
            Self::Less => i64::from(left < right),
            Self::Greater => i64::from(left > right),
            Self::Equal => i64::from(left == right),
        })
    }
}

#[derive(Debug, Clone)]
pub(super) enum Expression {
    Integer(i64),
    Variable(Name),
    Field { item: Name, field: Name },
    Binary(Operator, Box<Expression>, Box<Expression>),
    Call(Name, Vec<Expression>),
}

#[derive(Debug, Clone)]
pub(super) enum Statement {
    Comment(String),
    Let {
        name: Name,
        value: Expression,
        mutable: bool,
    },
    Assign {
        name: Name,
        value: Expression,
    },
    AddTo {
        name: Name,
        value: Expression,
    },
    /// `variable` takes the values `from` up to but not including `to`.
    ForRange {
        variable: Name,
        from: Expression,
        to: Expression,
        body: Vec<Statement>,
    },
    ForEach {
        item: Name,
        list: Name,
        body: Vec<Statement>,
    },
    While {
        condition: Expression,
        body: Vec<Statement>,
    },
    If {
        condition: Expression,
        then: Vec<Statement>,
        otherwise: Vec<Statement>,
    },
    Return(Expression),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Integer,
    /// A list of the program's record.
    List,
}

#[derive(Debug, Clone)]
pub(super) struct Parameter {
    pub(super) name: Name,
    pub(super) kind: Kind,
}

/// Takes integers and lists, returns an integer.
#[derive(Debug, Clone)]
pub(super) struct Function {
    pub(super) name: Name,
    pub(super) summary: String,
    pub(super) parameters: Vec<Parameter>,
    pub(super) body: Vec<Statement>,
}

/// `function(arguments) == expected`; None stands for the program's sample list.
#[derive(Debug, Clone)]
pub(super) struct Check {
    pub(super) function: Name,
    pub(super) arguments: Vec<Option<i64>>,
    pub(super) expected: i64,
}

#[derive(Debug, Clone)]
pub(super) struct Program {
    pub(super) module: Name,
    pub(super) purpose: String,
    pub(super) record: Name,
    pub(super) records: Name,
    pub(super) fields: Vec<Name>,
    /// One row of field values for each record of the sample list.
    pub(super) samples: Vec<Vec<i64>>,
    pub(super) functions: Vec<Function>,
    pub(super) checks: Vec<Check>,
}

impl Program {
    /// The value of a call, or None where a value would not fit or a loop would not end.
    pub(super) fn call(&self, function: &str, arguments: &[Option<i64>]) -> Option<i64> {
        let arguments = arguments
            .iter()
            .map(|argument| argument.map_or(Value::List, Value::Integer))
            .collect();
        Run {
            program: self,
            num_steps: 0,
        }
        .call(function, arguments)
    }
}

#[derive(Debug, Clone, Copy)]
enum Value {
    Integer(i64),
    /// The sample list: the only list there is.
    List,
    /// A row of the sample list.
    Record(usize),
}

struct Run<'a> {
    program: &'a Program,
    num_steps: usize,
}

type Variables<'a> = HashMap<&'a str, Value>;

impl<'a> Run<'a> {
    fn call(&mut self, name: &str, arguments: Vec<Value>) -> Option<i64> {
        let program = self.program;
        let function = program.functions.iter().find(|f| f.name == name)?;
        let names = function.parameters.iter().map(|p| p.name.as_str());
        let mut variables: Variables<'a> = names.zip(arguments).collect();
        self.block(&function.body, &mut variables)?
    }

    /// Some(None) when the block ran through, Some(Some(_)) when it returned.
    fn block(
        &mut self,
        body: &'a [Statement],
        variables: &mut Variables<'a>,
    ) -> Option<Option<i64>> {
        for statement in body {
            self.num_steps += 1;
            if self.num_steps > MOST_STEPS {
                return None;
            }
            match statement {
                Statement::Comment(_) => {}
                Statement::Let { name, value, .. } | Statement::Assign { name, value } => {
                    let value = self.integer(value, variables)?;
                    variables.insert(name, Value::Integer(value));
                }
                Statement::AddTo { name, value } => {
                    let added = self.integer(value, variables)?;
                    let Value::Integer(before) = variables[name.as_str()] else {
                        return None;
                    };
                    variables.insert(name, Value::Integer(bounded(before + added)?));
                }
                Statement::ForRange {
                    variable,
                    from,
                    to,
                    body,
                } => {
                    let range = self.integer(from, variables)?..self.integer(to, variables)?;
                    for value in range {
                        variables.insert(variable, Value::Integer(value));
                        if let Some(returned) = self.block(body, variables)? {
                            return Some(Some(returned));
                        }
                    }
                }
                Statement::ForEach { item, body, .. } => {
                    for row in 0..self.program.samples.len() {
                        variables.insert(item, Value::Record(row));
                        if let Some(returned) = self.block(body, variables)? {
                            return Some(Some(returned));
                        }
                    }
                }
                Statement::While { condition, body } => {
                    while self.integer(condition, variables)? != 0 {
                        if let Some(returned) = self.block(body, variables)? {
                            return Some(Some(returned));
                        }
                    }
                }
                Statement::If {
                    condition,
                    then,
                    otherwise,
                } => {
                    let taken = self.integer(condition, variables)? != 0;
                    let branch = if taken { then } else { otherwise };
                    if let Some(returned) = self.block(branch, variables)? {
                        return Some(Some(returned));
                    }
                }
                Statement::Return(value) => return Some(Some(self.integer(value, variables)?)),
            }
        }
        Some(None)
    }

    fn integer(&mut self, expression: &'a Expression, variables: &Variables<'a>) -> Option<i64> {
        match self.value(expression, variables)? {
            Value::Integer(value) => Some(value),
            Value::List | Value::Record(_) => None,
        }
    }

    fn value(&mut self, expression: &'a Expression, variables: &Variables<'a>) -> Option<Value> {
        let value = match expression {
            Expression::Integer(value) => *value,
            Expression::Variable(name) => return variables.get(name.as_str()).copied(),
            Expression::Field { item, field } => {
                let Value::Record(row) = *variables.get(item.as_str())? else {
                    return None;
                };
                let column = self.program.fields.iter().position(|f| f == field)?;
                self.program.samples[row][column]
            }
            Expression::Binary(operator, left, right) => {
                let left = self.integer(left, variables)?;
                let right = self.integer(right, variables)?;
                operator.apply(left, right)?
            }
            Expression::Call(name, arguments) => {
                let arguments = arguments
                    .iter()
                    .map(|argument| self.value(argument, variables))
                    .collect::<Option<Vec<Value>>>()?;
                self.call(name, arguments)?
            }
        };
        bounded(value).map(Value::Integer)
    }
}

fn bounded(value: i64) -> Option<i64> {
    (value.abs() < LARGEST_VALUE).then_some(value)
}
