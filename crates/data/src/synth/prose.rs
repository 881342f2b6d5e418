//! Describes programs in Markdown, so that the corpus holds sentences about the code it holds.

use super::author::{list_words, with_article};
use super::page::capital;
use super::program::{Check, Kind, Program, Statement};
use crate::random::Random;

pub(super) fn render(program: &Program, seed: u64) -> String {
    let mut random = Random::new(seed, 0x7E87);
    let (record, records) = (&program.record, &program.records);
    let mut text = format!(
        "# {}\n\n{}\n\n",
        program.module.replace('_', " "),
        program.purpose
    );
    text.push_str(&match random.below(3) {
        0 => format!(
            "Each {record} has {} values: {}. ",
            program.fields.len(),
            list_words(&program.fields)
        ),
        1 => format!(
            "{} is described by its {}. ",
            capital(&with_article(record)),
            list_words(&program.fields)
        ),
        _ => format!(
            "For every {record} we keep the {}. ",
            list_words(&program.fields)
        ),
    });
    text.push_str(random.pick(&[
        "All of them are whole numbers.\n\n",
        "Whole numbers are enough here, so there is nothing to round.\n\n",
        "They are counted in whole units.\n\n",
    ]));
    text.push_str(&table(program));
    text.push_str("## Functions\n");
    for function in &program.functions {
        text.push_str(&format!(
            "\n### `{}`\n\n{}",
            function.name, function.summary
        ));
        let takes_list = function.parameters.iter().any(|p| p.kind == Kind::List);
        let integers: Vec<String> = function
            .parameters
            .iter()
            .filter(|p| p.kind == Kind::Integer)
            .map(|p| format!("`{}`", p.name))
            .collect();
        text.push_str(&match (takes_list, integers.is_empty()) {
            (true, true) => format!(" It needs nothing but the list of {records}."),
            (true, false) => format!(
                " Besides the list of {records} it takes {}.",
                list_words(&integers)
            ),
            _ => format!(" It takes {}.", list_words(&integers)),
        });
        if has_loop(&function.body) && random.chance(60) {
            text.push_str(random.pick(&[
                " It walks through its input once and keeps a single running value.",
                " The work grows in step with the size of the input, and the memory does not grow at all.",
                " There is one loop in it, and no allocation.",
            ]));
        }
        text.push('\n');
        let checks: Vec<&Check> = program
            .checks
            .iter()
            .filter(|c| c.function == function.name)
            .collect();
        if let Some(check) = checks.first() {
            let sentence = match random.below(3) {
                0 => format!("For example, `{}` gives {}.", spoken(check), check.expected),
                1 => format!("So `{}` is {}.", spoken(check), check.expected),
                _ => format!(
                    "With the table above, `{}` returns {}.",
                    spoken(check),
                    check.expected
                ),
            };
            text.push_str(&format!("\n{sentence}\n"));
        }
        if checks.len() > 1 {
            text.push_str("\nAlso:\n\n");
        }
        for check in checks.iter().skip(1) {
            text.push_str(&format!("- `{}` = {}\n", spoken(check), check.expected));
        }
    }
    text.push_str(&format!(
        "\n## Questions\n\n**What happens when there are no {records}?** A loop over an empty list does \
         nothing, so the result is the value it started with.\n"
    ));
    text
}

fn spoken(check: &Check) -> String {
    let arguments: Vec<String> = check
        .arguments
        .iter()
        .map(|argument| argument.map_or_else(|| "samples".to_owned(), |value| value.to_string()))
        .collect();
    format!("{}({})", check.function, arguments.join(", "))
}

fn has_loop(body: &[Statement]) -> bool {
    body.iter().any(|statement| {
        matches!(
            statement,
            Statement::ForRange { .. } | Statement::ForEach { .. } | Statement::While { .. }
        )
    })
}

fn table(program: &Program) -> String {
    let mut text = format!("| {} |\n|", program.fields.join(" | "));
    text.push_str(&"---|".repeat(program.fields.len()));
    text.push('\n');
    for row in &program.samples {
        let values: Vec<String> = row.iter().map(i64::to_string).collect();
        text.push_str(&format!("| {} |\n", values.join(" | ")));
    }
    text.push('\n');
    text
}
