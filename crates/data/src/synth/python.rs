//! Prints programs as Python.

use super::page::{Notation, Page, pascal, print, usual_operator};
use super::program::{Expression, Kind, Operator, Program, Statement};

struct Python;

impl Notation for Python {
    fn variable(&self, name: &str) -> String {
        name.to_owned()
    }

    fn field(&self, item: &str, field: &str) -> String {
        format!("{item}.{field}")
    }

    fn operator(&self, operator: Operator) -> &'static str {
        usual_operator(operator)
    }

    fn call(&self, function: &str, arguments: &[String]) -> String {
        format!("{function}({})", arguments.join(", "))
    }
}

pub(super) fn render(program: &Program) -> String {
    let mut page = Page::new("    ");
    let record = pascal(&program.record);
    page.line(format!("\"\"\"{}\"\"\"", program.purpose));
    page.line("from dataclasses import dataclass");
    page.blank();
    page.blank();
    page.line("@dataclass");
    page.open(format!("class {record}:"));
    for field in &program.fields {
        page.line(format!("{field}: int"));
    }
    page.leave();
    for function in &program.functions {
        let parameters: Vec<String> = function
            .parameters
            .iter()
            .map(|parameter| match parameter.kind {
                Kind::Integer => format!("{}: int", parameter.name),
                Kind::List => format!("{}: list[{record}]", parameter.name),
            })
            .collect();
        page.blank();
        page.blank();
        page.open(format!(
            "def {}({}) -> int:",
            function.name,
            parameters.join(", ")
        ));
        page.line(format!("\"\"\"{}\"\"\"", function.summary));
        block(&mut page, &function.body);
        page.leave();
    }
    tests(&mut page, program, &record);
    page.into_text()
}

fn block(page: &mut Page, body: &[Statement]) {
    for statement in body {
        match statement {
            Statement::Comment(text) => page.line(format!("# {text}")),
            Statement::Let { name, value, .. } | Statement::Assign { name, value } => {
                page.line(format!("{name} = {}", print(&Python, value)));
            }
            Statement::AddTo { name, value } => {
                page.line(format!("{name} += {}", print(&Python, value)))
            }
            Statement::ForRange {
                variable,
                from,
                to,
                body,
            } => {
                let range = match from {
                    Expression::Integer(0) => print(&Python, to),
                    _ => format!("{}, {}", print(&Python, from), print(&Python, to)),
                };
                page.open(format!("for {variable} in range({range}):"));
                block(page, body);
                page.leave();
            }
            Statement::ForEach { item, list, body } => {
                page.open(format!("for {item} in {list}:"));
                block(page, body);
                page.leave();
            }
            Statement::While { condition, body } => {
                page.open(format!("while {}:", print(&Python, condition)));
                block(page, body);
                page.leave();
            }
            Statement::If {
                condition,
                then,
                otherwise,
            } => {
                page.open(format!("if {}:", print(&Python, condition)));
                block(page, then);
                page.leave();
                if !otherwise.is_empty() {
                    page.open("else:");
                    block(page, otherwise);
                    page.leave();
                }
            }
            Statement::Return(value) => page.line(format!("return {}", print(&Python, value))),
        }
    }
}

fn tests(page: &mut Page, program: &Program, record: &str) {
    page.blank();
    page.blank();
    page.open("SAMPLES = [");
    for row in &program.samples {
        let pairs: Vec<String> = program
            .fields
            .iter()
            .zip(row)
            .map(|(field, value)| format!("{field}={value}"))
            .collect();
        page.line(format!("{record}({}),", pairs.join(", ")));
    }
    page.close("]");
    for function in &program.functions {
        let mut checks = program
            .checks
            .iter()
            .filter(|check| check.function == function.name)
            .peekable();
        if checks.peek().is_none() {
            continue;
        }
        page.blank();
        page.blank();
        page.open(format!("def test_{}():", function.name));
        for check in checks {
            let arguments: Vec<String> = check
                .arguments
                .iter()
                .map(|argument| {
                    argument.map_or_else(|| "SAMPLES".to_owned(), |value| value.to_string())
                })
                .collect();
            let call = Python.call(&check.function, &arguments);
            page.line(format!("assert {call} == {}", check.expected));
        }
        page.leave();
    }
}
