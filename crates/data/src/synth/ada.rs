//! Prints programs as Ada.

use super::page::{Notation, Page, capital_words, print, usual_operator};
use super::program::{Expression, Function, Kind, Name, Operator, Program, Statement};

struct Ada;

impl Notation for Ada {
    fn variable(&self, name: &str) -> String {
        capital_words(name)
    }

    fn field(&self, item: &str, field: &str) -> String {
        format!("{}.{}", capital_words(item), capital_words(field))
    }

    fn operator(&self, operator: Operator) -> &'static str {
        match operator {
            Operator::Remainder => "mod",
            Operator::Equal => "=",
            other => usual_operator(other),
        }
    }

    fn call(&self, function: &str, arguments: &[String]) -> String {
        format!("{} ({})", capital_words(function), arguments.join(", "))
    }
}

pub(super) fn render(program: &Program) -> String {
    let mut page = Page::new("   ");
    let (module, record) = (
        capital_words(&program.module),
        capital_words(&program.record),
    );
    page.line(format!("--  {}", program.purpose));
    page.open(format!("procedure {module} is"));
    page.blank();
    // Ada does not tell upper from lower case: the type cannot be called like its variables.
    page.open(format!("type {record}_Record is record"));
    for field in &program.fields {
        page.line(format!("{} : Integer;", capital_words(field)));
    }
    page.close("end record;");
    page.blank();
    page.line(format!(
        "type {record}_List is array (Positive range <>) of {record}_Record;"
    ));
    for function in &program.functions {
        page.blank();
        print_function(&mut page, function, &record);
    }
    page.blank();
    page.open(format!("Samples : constant {record}_List :="));
    let rows: Vec<String> = program
        .samples
        .iter()
        .map(|row| {
            let values: Vec<String> = row.iter().map(i64::to_string).collect();
            format!("({})", values.join(", "))
        })
        .collect();
    page.line(format!("({});", rows.join(", ")));
    page.leave();
    page.close("begin");
    page.open("--  Each assertion holds for the sample list.");
    for check in &program.checks {
        let arguments: Vec<String> = check
            .arguments
            .iter()
            .map(|argument| {
                argument.map_or_else(|| "Samples".to_owned(), |value| value.to_string())
            })
            .collect();
        let call = Ada.call(&check.function, &arguments);
        page.line(format!(
            "pragma Assert ({call} = {});",
            integer(check.expected)
        ));
    }
    page.close(format!("end {module};"));
    page.into_text()
}

/// A negative literal needs parentheses beside an operator.
fn integer(value: i64) -> String {
    if value < 0 {
        format!("({value})")
    } else {
        value.to_string()
    }
}

fn print_function(page: &mut Page, function: &Function, record: &str) {
    let name = capital_words(&function.name);
    let parameters: Vec<String> = function
        .parameters
        .iter()
        .map(|parameter| {
            let kind = match parameter.kind {
                Kind::Integer => "Integer".to_owned(),
                Kind::List => format!("{record}_List"),
            };
            format!("{} : {kind}", capital_words(&parameter.name))
        })
        .collect();
    page.line(format!("--  {}", function.summary));
    page.open(format!(
        "function {name} ({}) return Integer is",
        parameters.join("; ")
    ));
    let mut locals = Vec::new();
    collect_locals(&function.body, &mut locals);
    for local in locals {
        page.line(format!("{} : Integer;", capital_words(&local)));
    }
    page.leave();
    page.open("begin");
    block(page, &function.body);
    page.close(format!("end {name};"));
}

/// Variables are declared before the body begins, whichever block uses them.
fn collect_locals(body: &[Statement], locals: &mut Vec<Name>) {
    for statement in body {
        match statement {
            Statement::Let { name, .. } if !locals.contains(name) => locals.push(name.clone()),
            Statement::ForRange { body, .. }
            | Statement::ForEach { body, .. }
            | Statement::While { body, .. } => collect_locals(body, locals),
            Statement::If {
                then, otherwise, ..
            } => {
                collect_locals(then, locals);
                collect_locals(otherwise, locals);
            }
            _ => {}
        }
    }
}

fn block(page: &mut Page, body: &[Statement]) {
    for statement in body {
        match statement {
            Statement::Comment(text) => page.line(format!("--  {text}")),
            Statement::Let { name, value, .. } | Statement::Assign { name, value } => {
                page.line(format!(
                    "{} := {};",
                    capital_words(name),
                    print(&Ada, value)
                ));
            }
            Statement::AddTo { name, value } => {
                let name = capital_words(name);
                page.line(format!("{name} := {name} + {};", print(&Ada, value)));
            }
            Statement::ForRange {
                variable,
                from,
                to,
                body,
            } => {
                let last = match to {
                    // 1 .. N + 1 - 1 would be read twice.
                    Expression::Binary(Operator::Add, left, right)
                        if matches!(**right, Expression::Integer(1)) =>
                    {
                        print(&Ada, left)
                    }
                    other => format!("{} - 1", print(&Ada, other)),
                };
                page.open(format!(
                    "for {} in {} .. {last} loop",
                    capital_words(variable),
                    print(&Ada, from)
                ));
                block(page, body);
                page.close("end loop;");
            }
            Statement::ForEach { item, list, body } => {
                page.open(format!(
                    "for {} of {} loop",
                    capital_words(item),
                    capital_words(list)
                ));
                block(page, body);
                page.close("end loop;");
            }
            Statement::While { condition, body } => {
                page.open(format!("while {} loop", print(&Ada, condition)));
                block(page, body);
                page.close("end loop;");
            }
            Statement::If {
                condition,
                then,
                otherwise,
            } => {
                page.open(format!("if {} then", print(&Ada, condition)));
                block(page, then);
                if !otherwise.is_empty() {
                    page.leave();
                    page.open("else");
                    block(page, otherwise);
                }
                page.close("end if;");
            }
            Statement::Return(value) => page.line(format!("return {};", print(&Ada, value))),
        }
    }
}
