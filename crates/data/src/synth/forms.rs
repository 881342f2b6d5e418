//! The forms that functions over lists are written in: totals, counts, extremes, differences.
//!
//! Each form is a method that fills in names and constants. Loops end, remainders are of
//! non-negative numbers, and there is no division, so every language computes the same value.

use super::author::{Author, Draft, with_article};
use super::nodes::{add_to, assign, binary, declare, define, field, integer, variable, when};
use super::program::{Expression, Function, Kind, Name, Operator, Parameter, Statement};

/// What a variable that adds things up is called.
pub(super) const TOTALS: [&str; 5] = ["total", "result", "tally", "amount", "running"];

impl Author {
    /// A function in one of the forms, chosen at random.
    pub(super) fn any_form(&mut self) -> Draft {
        match self.random.below(13) {
            0 | 1 => self.total(),
            2 => self.count_above(),
            3 => self.extreme(),
            4 => self.weighted(),
            5 => self.difference(),
            6 => self.sum_of_multiples(),
            7 => self.power(),
            8 => self.common_divisor(),
            9 => self.clamp(),
            10 => self.count_divisors(),
            11 => self.alternating(),
            _ => self.arithmetic(),
        }
    }

    fn any_field(&mut self) -> Name {
        let at = self.random.below(self.program.fields.len());
        self.program.fields[at].clone()
    }

    /// Puts a function together; each of `integers` is a parameter and the range its checks draw from.
    pub(super) fn draft(
        &mut self,
        name: String,
        summaries: &[String],
        over_list: bool,
        integers: &[(&str, i64, i64)],
        body: Vec<Statement>,
    ) -> Draft {
        let list = over_list.then(|| Parameter {
            name: self.program.records.clone(),
            kind: Kind::List,
        });
        let integer_parameters = integers.iter().map(|(name, ..)| Parameter {
            name: (*name).to_owned(),
            kind: Kind::Integer,
        });
        Draft {
            function: Function {
                name,
                summary: summaries[self.random.below(summaries.len())].clone(),
                parameters: list.into_iter().chain(integer_parameters).collect(),
                body,
            },
            ranges: integers.iter().map(|&(_, low, high)| (low, high)).collect(),
        }
    }

    fn for_each(&self, body: Vec<Statement>) -> Statement {
        Statement::ForEach {
            item: self.program.record.clone(),
            list: self.program.records.clone(),
            body,
        }
    }

    fn total(&mut self) -> Draft {
        let (record, records) = (self.program.record.clone(), self.program.records.clone());
        let (summed, tested) = (self.any_field(), self.any_field());
        let total = self.random.pick(&TOTALS);
        let add = add_to(total, field(&record, &summed));
        if self.random.chance(50) {
            let body = vec![
                declare(total, integer(0)),
                self.for_each(vec![add]),
                Statement::Return(variable(total)),
            ];
            let summaries = [
                format!("Adds up the {summed} of all {records}."),
                format!("Returns the {summed} of the {records} taken together."),
            ];
            return self.draft(format!("total_{summed}"), &summaries, true, &[], body);
        }
        let condition = binary(
            Operator::Greater,
            field(&record, &tested),
            variable("limit"),
        );
        let body = vec![
            declare(total, integer(0)),
            Statement::Comment(format!("Only {records} beyond the limit count.")),
            self.for_each(vec![when(condition, vec![add])]),
            Statement::Return(variable(total)),
        ];
        let summaries = [
            format!("Adds up the {summed} of each {record} whose {tested} is above the limit."),
            format!(
                "Sums {summed} over the {records} with {} greater than the limit.",
                with_article(&tested)
            ),
        ];
        let name = format!("total_{summed}_above_{tested}");
        self.draft(name, &summaries, true, &[("limit", 1, 60)], body)
    }

    fn count_above(&mut self) -> Draft {
        let (record, records) = (self.program.record.clone(), self.program.records.clone());
        let tested = self.any_field();
        let (operator, word) = if self.random.chance(50) {
            (Operator::Greater, "above")
        } else {
            (Operator::Less, "below")
        };
        let condition = binary(operator, field(&record, &tested), variable("limit"));
        let body = vec![
            declare("found", integer(0)),
            self.for_each(vec![when(condition, vec![add_to("found", integer(1))])]),
            Statement::Return(variable("found")),
        ];
        let summaries = [
            format!(
                "Counts the {records} with {} {word} the limit.",
                with_article(&tested)
            ),
            format!(
                "How many {records} have {} {word} the given limit.",
                with_article(&tested)
            ),
        ];
        let name = format!("count_{tested}_{word}");
        self.draft(name, &summaries, true, &[("limit", 1, 60)], body)
    }

    fn extreme(&mut self) -> Draft {
        let (record, records) = (self.program.record.clone(), self.program.records.clone());
        let compared = self.any_field();
        let largest = self.random.chance(50);
        let (operator, word, start) = if largest {
            (Operator::Greater, "largest", 0)
        } else {
            (Operator::Less, "smallest", 1_000_000)
        };
        let better = binary(operator, field(&record, &compared), variable("best"));
        let body = vec![
            declare("best", integer(start)),
            self.for_each(vec![when(
                better,
                vec![assign("best", field(&record, &compared))],
            )]),
            Statement::Return(variable("best")),
        ];
        let summaries = [
            format!("Finds the {word} {compared} among the {records}."),
            format!("Returns the {word} {compared}, or {start} if there are no {records}."),
        ];
        self.draft(format!("{word}_{compared}"), &summaries, true, &[], body)
    }

    fn weighted(&mut self) -> Draft {
        let (record, records) = (self.program.record.clone(), self.program.records.clone());
        let (first, second) = (self.any_field(), self.any_field());
        let total = self.random.pick(&TOTALS);
        let product = binary(
            Operator::Multiply,
            field(&record, &first),
            field(&record, &second),
        );
        let body = vec![
            declare(total, integer(0)),
            self.for_each(vec![
                define("product", product),
                add_to(total, variable("product")),
            ]),
            Statement::Return(variable(total)),
        ];
        let summaries = [format!(
            "Adds up {first} times {second} over all {records}."
        )];
        self.draft(
            format!("weighted_{first}_by_{second}"),
            &summaries,
            true,
            &[],
            body,
        )
    }

    /// Calls two functions that exist already; before there are two it falls back to a total.
    fn difference(&mut self) -> Draft {
        let only_list =
            |f: &&Function| f.parameters.len() == 1 && f.parameters[0].kind == Kind::List;
        let names: Vec<Name> = self
            .program
            .functions
            .iter()
            .filter(only_list)
            .map(|f| f.name.clone())
            .collect();
        if names.len() < 2 {
            return self.total();
        }
        let at = self.random.below(names.len() - 1);
        let (first, second) = (&names[at], &names[at + 1]);
        let list = variable(&self.program.records);
        let gap = |high, low| {
            Statement::Return(binary(Operator::Subtract, variable(high), variable(low)))
        };
        let body = vec![
            define("left", Expression::Call(first.clone(), vec![list.clone()])),
            define("right", Expression::Call(second.clone(), vec![list])),
            Statement::Comment("The difference is never negative.".to_owned()),
            when(
                binary(Operator::Greater, variable("left"), variable("right")),
                vec![gap("left", "right")],
            ),
            gap("right", "left"),
        ];
        let summaries = [format!(
            "How far the {} and the {} lie apart.",
            first.replace('_', " "),
            second.replace('_', " ")
        )];
        self.draft(format!("gap_{first}_{second}"), &summaries, true, &[], body)
    }
}
