//! Prints the tests of programs in the languages with braces, each in the way its users run tests.

use super::Language;
use super::braces::Printer;
use super::page::{Notation, Page, camel, pascal};
use super::program::Check;

impl Printer<'_> {
    /// The sample list as a value.
    fn samples(&self, page: &mut Page) {
        let (record, fields) = (self.record_type(), &self.program.fields);
        let (opening, closing) = match self.language {
            Language::Rust => (format!("fn samples() -> Vec<{record}> {{"), "}"),
            Language::Go => (format!("var samples = []{record}{{"), "}"),
            Language::C => (format!("static const {record} samples[] = {{"), "};"),
            Language::Cpp => (
                format!("static const std::vector<{record}> samples = {{"),
                "};",
            ),
            Language::Java => (
                format!("static final List<{record}> samples = List.of("),
                ");",
            ),
            _ => ("const samples = [".to_owned(), "];"),
        };
        page.open(opening);
        if self.language == Language::Rust {
            page.open("vec![");
        }
        let last = self.program.samples.len() - 1;
        for (index, row) in self.program.samples.iter().enumerate() {
            let pairs: Vec<String> = fields
                .iter()
                .zip(row)
                .map(|(field, value)| match self.language {
                    Language::Go => format!("{}: {value}", pascal(field)),
                    Language::C => format!(".{field} = {value}"),
                    Language::Cpp | Language::Java => value.to_string(),
                    _ => format!("{field}: {value}"),
                })
                .collect();
            let pairs = pairs.join(", ");
            page.line(match self.language {
                Language::Rust => format!("{record} {{ {pairs} }},"),
                Language::Java => format!(
                    "new {record}({pairs}){}",
                    if index == last { "" } else { "," }
                ),
                Language::Go | Language::C | Language::Cpp => format!("{{{pairs}}},"),
                _ => format!("{{ {pairs} }},"),
            });
        }
        if self.language == Language::Rust {
            page.close("]");
        }
        page.close(closing);
        if self.language == Language::C {
            page.line("static const int num_samples = sizeof(samples) / sizeof(samples[0]);");
        }
    }

    fn check(&self, page: &mut Page, check: &Check) {
        let samples = if self.language == Language::Rust {
            "&samples()"
        } else {
            "samples"
        };
        let arguments: Vec<String> = check
            .arguments
            .iter()
            .map(|argument| argument.map_or_else(|| samples.to_owned(), |value| value.to_string()))
            .collect();
        let (call, expected) = (self.call(&check.function, &arguments), check.expected);
        match self.language {
            Language::Rust => page.line(format!("assert_eq!({call}, {expected});")),
            Language::Go => {
                page.open(format!("if got := {call}; got != {expected} {{"));
                page.line(format!("t.Errorf(\"got %d, want {expected}\", got)"));
                page.close("}");
            }
            Language::C | Language::Cpp => page.line(format!("assert({call} == {expected});")),
            Language::Java => {
                page.open(format!("if ({call} != {expected}) {{"));
                page.line(format!(
                    "throw new AssertionError(\"{}\");",
                    camel(&check.function)
                ));
                page.close("}");
            }
            _ => page.line(format!("assert.equal({call}, {expected});")),
        }
    }

    /// Everything after the functions: the sample list and a test for each function.
    pub(super) fn tests(&self, page: &mut Page) {
        if self.language == Language::Rust {
            page.line("#[cfg(test)]");
            page.open("mod tests {");
            page.line("use super::*;");
            page.blank();
        }
        self.samples(page);
        let mut names = Vec::new();
        for function in &self.program.functions {
            let checks: Vec<&Check> = self
                .program
                .checks
                .iter()
                .filter(|check| check.function == function.name)
                .collect();
            if checks.is_empty() {
                continue;
            }
            let (name, spoken) = (&function.name, function.name.replace('_', " "));
            page.blank();
            if self.language == Language::Rust {
                page.line("#[test]");
            }
            page.open(match self.language {
                Language::Rust => format!("fn {name}_is_right() {{"),
                Language::Go => format!("func Test{}(t *testing.T) {{", pascal(name)),
                Language::C => format!("static void test_{name}(void) {{"),
                Language::Cpp => format!("static void test_{name}() {{"),
                Language::Java => format!("static void test{}() {{", pascal(name)),
                _ => format!("test(\"{spoken}\", () => {{"),
            });
            for check in checks {
                self.check(page, check);
            }
            page.close(match self.language {
                Language::JavaScript | Language::TypeScript => "});",
                _ => "}",
            });
            names.push(match self.language {
                Language::Java => format!("test{}();", pascal(name)),
                _ => format!("test_{name}();"),
            });
        }
        match self.language {
            Language::C | Language::Cpp | Language::Java => self.entry(page, &names),
            Language::Rust => page.close("}"),
            _ => {}
        }
    }

    /// Calls the tests where no test runner does.
    fn entry(&self, page: &mut Page, calls: &[String]) {
        page.blank();
        page.open(match self.language {
            Language::C => "int main(void) {",
            Language::Cpp => "int main() {",
            _ => "public static void main(String[] arguments) {",
        });
        for call in calls {
            page.line(call);
        }
        if self.language != Language::Java {
            page.line("return 0;");
        }
        page.close("}");
        if self.language == Language::Java {
            page.close("}");
        }
    }
}
