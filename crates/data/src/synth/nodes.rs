//! Short spellings for the nodes of a program's tree, so that a form reads like the code it makes.

use super::program::{Expression, Operator, Statement};

pub(super) fn variable(name: &str) -> Expression {
    Expression::Variable(name.to_owned())
}

pub(super) fn integer(value: i64) -> Expression {
    Expression::Integer(value)
}

pub(super) fn field(item: &str, name: &str) -> Expression {
    Expression::Field {
        item: item.to_owned(),
        field: name.to_owned(),
    }
}

pub(super) fn binary(operator: Operator, left: Expression, right: Expression) -> Expression {
    Expression::Binary(operator, Box::new(left), Box::new(right))
}

pub(super) fn declare(name: &str, value: Expression) -> Statement {
    Statement::Let {
        name: name.to_owned(),
        value,
        mutable: true,
    }
}

pub(super) fn define(name: &str, value: Expression) -> Statement {
    Statement::Let {
        name: name.to_owned(),
        value,
        mutable: false,
    }
}

pub(super) fn assign(name: &str, value: Expression) -> Statement {
    Statement::Assign {
        name: name.to_owned(),
        value,
    }
}

pub(super) fn add_to(name: &str, value: Expression) -> Statement {
    Statement::AddTo {
        name: name.to_owned(),
        value,
    }
}

pub(super) fn when(condition: Expression, then: Vec<Statement>) -> Statement {
    Statement::If {
        condition,
        then,
        otherwise: Vec::new(),
    }
}

pub(super) fn count(
    variable: &str,
    from: Expression,
    to: Expression,
    body: Vec<Statement>,
) -> Statement {
    Statement::ForRange {
        variable: variable.to_owned(),
        from,
        to,
        body,
    }
}
