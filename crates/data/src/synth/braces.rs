//! Prints programs in the languages with braces: Rust, Go, C, C++, Java, JavaScript, TypeScript.

use super::Language;
use super::page::{Notation, Page, camel, pascal, print, usual_operator};
use super::program::{Expression, Function, Kind, Operator, Program, Statement};

/// One language and the program it prints.
pub(super) struct Printer<'a> {
    pub(super) language: Language,
    pub(super) program: &'a Program,
}

pub(super) fn render(language: Language, program: &Program) -> String {
    let printer = Printer { language, program };
    let mut page = Page::new(match language {
        Language::Go => "\t",
        Language::JavaScript | Language::TypeScript => "  ",
        _ => "    ",
    });
    printer.opening(&mut page);
    printer.record(&mut page);
    for function in &program.functions {
        page.blank();
        printer.function(&mut page, function);
    }
    page.blank();
    printer.tests(&mut page);
    page.into_text()
}

impl Notation for Printer<'_> {
    fn variable(&self, name: &str) -> String {
        match self.language {
            Language::C | Language::Cpp | Language::Rust => name.to_owned(),
            _ => camel(name),
        }
    }

    fn field(&self, item: &str, field: &str) -> String {
        match self.language {
            Language::C => format!("{item}->{field}"),
            Language::Go => format!("{}.{}", camel(item), pascal(field)),
            Language::Java => format!("{}.{}()", camel(item), camel(field)),
            _ => format!("{item}.{field}"),
        }
    }

    fn operator(&self, operator: Operator) -> &'static str {
        match (self.language, operator) {
            (Language::JavaScript | Language::TypeScript, Operator::Equal) => "===",
            _ => usual_operator(operator),
        }
    }

    fn call(&self, function: &str, arguments: &[String]) -> String {
        // In C a list is a pointer and a length, and both are handed on together.
        let list = &self.program.records;
        let arguments: Vec<String> = arguments
            .iter()
            .map(|argument| match self.language {
                Language::C if argument == list => format!("{list}, num_{list}"),
                Language::C if argument == "samples" => "samples, num_samples".to_owned(),
                _ => argument.clone(),
            })
            .collect();
        format!("{}({})", self.variable(function), arguments.join(", "))
    }
}

impl Printer<'_> {
    pub(super) fn record_type(&self) -> String {
        pascal(&self.program.record)
    }

    fn end(&self) -> &'static str {
        match self.language {
            Language::Go => "",
            _ => ";",
        }
    }

    fn opening(&self, page: &mut Page) {
        let purpose = &self.program.purpose;
        match self.language {
            Language::Rust => page.line(format!("//! {purpose}")),
            Language::Go => {
                let package = self.program.module.replace('_', "");
                page.line(format!("// Package {package}: {purpose}"));
                page.line(format!("package {package}"));
                page.blank();
                page.line("import \"testing\"");
            }
            Language::C => {
                page.line(format!("/* {purpose} */"));
                page.line("#include <assert.h>");
            }
            Language::Cpp => {
                page.line(format!("// {purpose}"));
                page.line("#include <cassert>");
                page.line("#include <vector>");
            }
            Language::Java => {
                page.line("import java.util.List;");
                page.blank();
                page.line(format!("/** {purpose} */"));
                page.open(format!("final class {} {{", pascal(&self.program.module)));
                return;
            }
            _ => {
                page.line(format!("// {purpose}"));
                page.line("import assert from \"node:assert\";");
                page.line("import test from \"node:test\";");
            }
        }
        page.blank();
    }

    fn record(&self, page: &mut Page) {
        let (name, fields) = (self.record_type(), &self.program.fields);
        match self.language {
            Language::Rust => {
                page.line("#[derive(Debug, Clone)]");
                page.open(format!("pub struct {name} {{"));
                for field in fields {
                    page.line(format!("pub {field}: i64,"));
                }
                page.close("}");
            }
            Language::Go => {
                page.line(format!("// {name} is one entry."));
                page.open(format!("type {name} struct {{"));
                for field in fields {
                    page.line(format!("{} int", pascal(field)));
                }
                page.close("}");
            }
            Language::C | Language::Cpp => {
                let opening = if self.language == Language::C {
                    "typedef struct {".to_owned()
                } else {
                    format!("struct {name} {{")
                };
                page.open(opening);
                for field in fields {
                    page.line(format!("int {field};"));
                }
                page.close(if self.language == Language::C {
                    format!("}} {name};")
                } else {
                    "};".to_owned()
                });
            }
            Language::Java => {
                let parts: Vec<String> =
                    fields.iter().map(|f| format!("int {}", camel(f))).collect();
                page.line(format!("record {name}({}) {{}}", parts.join(", ")));
            }
            Language::TypeScript => {
                page.open(format!("export interface {name} {{"));
                for field in fields {
                    page.line(format!("{field}: number;"));
                }
                page.close("}");
            }
            _ => {
                page.line("/**");
                page.line(format!(" * @typedef {{Object}} {name}"));
                for field in fields {
                    page.line(format!(" * @property {{number}} {field}"));
                }
                page.line(" */");
            }
        }
    }

    fn signature(&self, function: &Function) -> String {
        let record = self.record_type();
        let parameters: Vec<String> = function
            .parameters
            .iter()
            .map(|parameter| {
                let name = self.variable(&parameter.name);
                match (self.language, parameter.kind) {
                    (Language::JavaScript, _) => name,
                    (Language::Rust, Kind::Integer) => format!("{name}: i64"),
                    (Language::Rust, Kind::List) => format!("{name}: &[{record}]"),
                    (Language::TypeScript, Kind::Integer) => format!("{name}: number"),
                    (Language::TypeScript, Kind::List) => format!("{name}: {record}[]"),
                    (Language::Go, Kind::Integer) => format!("{name} int"),
                    (Language::Go, Kind::List) => format!("{name} []{record}"),
                    (Language::C, Kind::List) => format!("const {record} *{name}, int num_{name}"),
                    (Language::Cpp, Kind::List) => format!("const std::vector<{record}>& {name}"),
                    (Language::Java, Kind::List) => format!("List<{record}> {name}"),
                    (_, Kind::Integer) => format!("int {name}"),
                    (_, Kind::List) => name,
                }
            })
            .collect();
        let (name, list) = (self.variable(&function.name), parameters.join(", "));
        match self.language {
            Language::Rust => format!("pub fn {name}({list}) -> i64 {{"),
            Language::Go => format!("func {name}({list}) int {{"),
            Language::JavaScript => format!("export function {name}({list}) {{"),
            Language::TypeScript => format!("export function {name}({list}): number {{"),
            _ => format!("static int {name}({list}) {{"),
        }
    }

    fn function(&self, page: &mut Page, function: &Function) {
        page.line(match self.language {
            Language::Rust => format!("/// {}", function.summary),
            Language::C => format!("/* {} */", function.summary),
            Language::Go | Language::Cpp => format!("// {}", function.summary),
            _ => format!("/** {} */", function.summary),
        });
        page.open(self.signature(function));
        self.block(page, &function.body);
        page.close("}");
    }

    fn block(&self, page: &mut Page, body: &[Statement]) {
        for statement in body {
            self.statement(page, statement);
        }
    }

    fn condition(&self, keyword: &str, condition: &Expression) -> String {
        let condition = print(self, condition);
        match self.language {
            Language::Rust | Language::Go => format!("{keyword} {condition} {{"),
            _ => format!("{keyword} ({condition}) {{"),
        }
    }

    fn statement(&self, page: &mut Page, statement: &Statement) {
        let end = self.end();
        match statement {
            Statement::Comment(text) if self.language == Language::C => {
                page.line(format!("/* {text} */"))
            }
            Statement::Comment(text) => page.line(format!("// {text}")),
            Statement::Let {
                name,
                value,
                mutable,
            } => {
                let (name, value) = (self.variable(name), print(self, value));
                page.line(match (self.language, mutable) {
                    (Language::Rust, true) => format!("let mut {name} = {value};"),
                    (Language::Rust, false) => format!("let {name} = {value};"),
                    (Language::Go, _) => format!("{name} := {value}"),
                    (Language::JavaScript | Language::TypeScript, true) => {
                        format!("let {name} = {value};")
                    }
                    (Language::JavaScript | Language::TypeScript, false) => {
                        format!("const {name} = {value};")
                    }
                    _ => format!("int {name} = {value};"),
                });
            }
            Statement::Assign { name, value } => {
                page.line(format!(
                    "{} = {}{end}",
                    self.variable(name),
                    print(self, value)
                ));
            }
            Statement::AddTo { name, value } => {
                page.line(format!(
                    "{} += {}{end}",
                    self.variable(name),
                    print(self, value)
                ));
            }
            Statement::ForRange {
                variable,
                from,
                to,
                body,
            } => {
                let (v, to_text) = (self.variable(variable), print(self, to));
                let from = print(self, from);
                page.open(match self.language {
                    Language::Rust if matches!(to, Expression::Binary(..)) => {
                        format!("for {v} in {from}..({to_text}) {{")
                    }
                    Language::Rust => format!("for {v} in {from}..{to_text} {{"),
                    Language::Go => format!("for {v} := {from}; {v} < {to_text}; {v}++ {{"),
                    Language::JavaScript | Language::TypeScript => {
                        format!("for (let {v} = {from}; {v} < {to_text}; {v}++) {{")
                    }
                    _ => format!("for (int {v} = {from}; {v} < {to_text}; {v}++) {{"),
                });
                self.block(page, body);
                page.close("}");
            }
            Statement::ForEach { item, list, body } => {
                let (item, list, record) =
                    (self.variable(item), self.variable(list), self.record_type());
                page.open(match self.language {
                    Language::Rust => format!("for {item} in {list} {{"),
                    Language::Go => format!("for _, {item} := range {list} {{"),
                    Language::C => format!("for (int at = 0; at < num_{list}; at++) {{"),
                    Language::Cpp => format!("for (const auto& {item} : {list}) {{"),
                    Language::Java => format!("for ({record} {item} : {list}) {{"),
                    _ => format!("for (const {item} of {list}) {{"),
                });
                if self.language == Language::C {
                    page.line(format!("const {record} *{item} = &{list}[at];"));
                }
                self.block(page, body);
                page.close("}");
            }
            Statement::While { condition, body } => {
                let keyword = if self.language == Language::Go {
                    "for"
                } else {
                    "while"
                };
                page.open(self.condition(keyword, condition));
                self.block(page, body);
                page.close("}");
            }
            Statement::If {
                condition,
                then,
                otherwise,
            } => {
                page.open(self.condition("if", condition));
                self.block(page, then);
                if !otherwise.is_empty() {
                    page.leave();
                    page.open("} else {");
                    self.block(page, otherwise);
                }
                page.close("}");
            }
            Statement::Return(value) => page.line(format!("return {}{end}", print(self, value))),
        }
    }
}
