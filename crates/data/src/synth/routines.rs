//! The forms that functions over plain numbers are written in.

use super::author::{Author, Draft};
use super::forms::TOTALS;
use super::nodes::{add_to, assign, binary, count, declare, define, integer, variable, when};
use super::program::{Operator, Statement};

const COUNTERS: [&str; 4] = ["i", "j", "k", "n"];
const VERBS: [&str; 8] = [
    "adjust", "combine", "estimate", "blend", "shift", "balance", "measure", "convert",
];
const TARGETS: [&str; 8] = [
    "offset", "margin", "level", "signal", "budget", "reading", "credit", "window",
];

impl Author {
    pub(super) fn sum_of_multiples(&mut self) -> Draft {
        let (i, total) = (self.random.pick(&COUNTERS), self.random.pick(&TOTALS));
        let divides = binary(
            Operator::Equal,
            binary(Operator::Remainder, variable(i), variable("step")),
            integer(0),
        );
        let body = vec![
            declare(total, integer(0)),
            count(
                i,
                integer(1),
                variable("limit"),
                vec![when(divides, vec![add_to(total, variable(i))])],
            ),
            Statement::Return(variable(total)),
        ];
        let summaries = [
            "Adds the multiples of step that are below limit.".to_owned(),
            "Sums every number under limit that step divides.".to_owned(),
        ];
        let integers = [("limit", 5, 60), ("step", 2, 9)];
        self.draft(
            "sum_of_multiples".to_owned(),
            &summaries,
            false,
            &integers,
            body,
        )
    }

    pub(super) fn power(&mut self) -> Draft {
        let i = self.random.pick(&COUNTERS);
        let product = binary(Operator::Multiply, variable("product"), variable("factor"));
        let body = vec![
            declare("product", integer(1)),
            Statement::Comment("Multiply once for each unit of the exponent.".to_owned()),
            count(
                i,
                integer(0),
                variable("exponent"),
                vec![assign("product", product)],
            ),
            Statement::Return(variable("product")),
        ];
        let summaries = ["Raises factor to the power of exponent.".to_owned()];
        let integers = [("factor", 2, 9), ("exponent", 0, 8)];
        self.draft(
            "raise_to_power".to_owned(),
            &summaries,
            false,
            &integers,
            body,
        )
    }

    pub(super) fn common_divisor(&mut self) -> Draft {
        let rest = binary(Operator::Remainder, variable("large"), variable("small"));
        let body = vec![
            declare("large", variable("first")),
            declare("small", variable("second")),
            Statement::While {
                condition: binary(Operator::Greater, variable("small"), integer(0)),
                body: vec![
                    define("rest", rest),
                    assign("large", variable("small")),
                    assign("small", variable("rest")),
                ],
            },
            Statement::Return(variable("large")),
        ];
        let summaries = ["The greatest common divisor, by Euclid's method.".to_owned()];
        let integers = [("first", 1, 400), ("second", 1, 400)];
        self.draft(
            "common_divisor".to_owned(),
            &summaries,
            false,
            &integers,
            body,
        )
    }

    pub(super) fn clamp(&mut self) -> Draft {
        let back = |name| vec![Statement::Return(variable(name))];
        let body = vec![
            when(
                binary(Operator::Less, variable("value"), variable("low")),
                back("low"),
            ),
            when(
                binary(Operator::Greater, variable("value"), variable("high")),
                back("high"),
            ),
            Statement::Return(variable("value")),
        ];
        let summaries = [
            "Keeps value between low and high.".to_owned(),
            "Returns value, or the nearer bound if it lies outside.".to_owned(),
        ];
        let integers = [("value", 0, 200), ("low", 10, 50), ("high", 60, 150)];
        self.draft("clamp_value".to_owned(), &summaries, false, &integers, body)
    }

    pub(super) fn count_divisors(&mut self) -> Draft {
        let i = self.random.pick(&COUNTERS);
        let rest = binary(Operator::Remainder, variable("number"), variable(i));
        let divides = binary(Operator::Equal, rest, integer(0));
        let end = binary(Operator::Add, variable("number"), integer(1));
        let body = vec![
            declare("divisors", integer(0)),
            count(
                i,
                integer(1),
                end,
                vec![when(divides, vec![add_to("divisors", integer(1))])],
            ),
            Statement::Return(variable("divisors")),
        ];
        let summaries = ["Counts the numbers that divide number without a rest.".to_owned()];
        self.draft(
            "count_divisors".to_owned(),
            &summaries,
            false,
            &[("number", 1, 120)],
            body,
        )
    }

    pub(super) fn alternating(&mut self) -> Draft {
        let (i, total) = (self.random.pick(&COUNTERS), self.random.pick(&TOTALS));
        let even = binary(
            Operator::Equal,
            binary(Operator::Remainder, variable(i), integer(2)),
            integer(0),
        );
        let less = binary(Operator::Subtract, variable(total), variable(i));
        let choice = Statement::If {
            condition: even,
            then: vec![add_to(total, variable(i))],
            otherwise: vec![assign(total, less)],
        };
        let body = vec![
            declare(total, integer(0)),
            count(i, integer(0), variable("limit"), vec![choice]),
            Statement::Return(variable(total)),
        ];
        let summaries =
            ["Adds the even numbers below limit and takes the odd ones away.".to_owned()];
        self.draft(
            "alternating_sum".to_owned(),
            &summaries,
            false,
            &[("limit", 1, 60)],
            body,
        )
    }

    pub(super) fn arithmetic(&mut self) -> Draft {
        let name = format!(
            "{}_{}",
            self.random.pick(&VERBS),
            self.random.pick(&TARGETS)
        );
        let (factor, added) = (self.random.between(2, 12), self.random.between(1, 90));
        let (bound, taken) = (self.random.between(50, 400), self.random.between(1, 40));
        let scaled = binary(
            Operator::Add,
            binary(Operator::Multiply, variable("base"), integer(factor)),
            integer(added),
        );
        let sum = binary(Operator::Add, variable("scaled"), variable("extra"));
        let mut body = vec![define("scaled", scaled), define("moved", sum)];
        body.push(when(
            binary(Operator::Greater, variable("moved"), integer(bound)),
            vec![Statement::Return(binary(
                Operator::Subtract,
                variable("moved"),
                integer(taken),
            ))],
        ));
        body.push(Statement::Return(if self.random.chance(50) {
            let inner = binary(Operator::Add, variable("moved"), variable("base"));
            binary(Operator::Multiply, inner, integer(2))
        } else {
            variable("moved")
        }));
        let summaries = [
            format!("Scales base by {factor} and adds extra, with a deduction above {bound}."),
            format!("Takes {factor} times base, {added} and extra together."),
        ];
        self.draft(
            name,
            &summaries,
            false,
            &[("base", 1, 50), ("extra", 0, 99)],
            body,
        )
    }
}
