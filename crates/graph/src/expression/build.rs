//! Making expressions: operators on [`Expr`], with the simplifications that make derivatives
//! short.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::{Add, Div, Mul, Neg, Sub};
use std::rc::Rc;

use super::{Binary, Comparison, Expression, Number, SMALLEST, Scalar, Unary};
use crate::graph::Dropout;

/// Scalars so far; equal ones are one.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    scalars: Vec<Scalar>,
    known: HashMap<Scalar, u32>,
}

impl Builder {
    pub fn push(&mut self, scalar: Scalar) -> u32 {
        if let Some(&known) = self.known.get(&scalar) {
            return known;
        }
        let number = self.scalars.len() as u32;
        self.scalars.push(scalar);
        self.known.insert(scalar, number);
        number
    }

    pub fn scalar(&self, number: u32) -> Scalar {
        self.scalars[number as usize]
    }

    pub fn input(&mut self, input: usize) -> u32 {
        self.push(Scalar::Input(input as u32))
    }

    pub fn constant(&mut self, value: f64) -> u32 {
        self.push(Scalar::Constant(Number::new(value)))
    }

    fn value(&self, number: u32) -> Option<f64> {
        match self.scalar(number) {
            Scalar::Constant(value) => Some(value.value()),
            _ => None,
        }
    }

    pub fn is_zero(&self, number: u32) -> bool {
        self.value(number) == Some(0.0)
    }

    fn negated(&self, number: u32) -> Option<u32> {
        match self.scalar(number) {
            Scalar::Unary(Unary::Negate, a) => Some(a),
            _ => None,
        }
    }

    pub fn unary(&mut self, function: Unary, a: u32) -> u32 {
        if let Some(value) = self.value(a).and_then(|x| evaluate_unary(function, x)) {
            return self.constant(value);
        }
        match (function, self.scalar(a)) {
            (Unary::Negate, Scalar::Unary(Unary::Negate, inner)) => inner,
            // −(a − b) = b − a
            (Unary::Negate, Scalar::Binary(Binary::Subtract, a, b)) => {
                self.binary(Binary::Subtract, b, a)
            }
            _ => self.push(Scalar::Unary(function, a)),
        }
    }

    pub fn binary(&mut self, function: Binary, a: u32, b: u32) -> u32 {
        if let (Some(a), Some(b)) = (self.value(a), self.value(b)) {
            return self.constant(evaluate_binary(function, a, b));
        }
        match function {
            Binary::Add => self.add(a, b),
            Binary::Subtract => self.subtract(a, b),
            Binary::Multiply => self.multiply(a, b),
            Binary::Divide => self.divide(a, b),
            Binary::Max | Binary::Min if a == b => a,
            // The order says whose the gradient is where both are equal.
            Binary::Max | Binary::Min => self.push(Scalar::Binary(function, a, b)),
        }
    }

    fn commutative(&mut self, function: Binary, a: u32, b: u32) -> u32 {
        self.push(Scalar::Binary(function, a.min(b), a.max(b)))
    }

    pub fn add(&mut self, a: u32, b: u32) -> u32 {
        if self.is_zero(a) {
            return b;
        }
        if self.is_zero(b) {
            return a;
        }
        match (self.negated(a), self.negated(b)) {
            (_, Some(b)) => self.subtract(a, b),
            (Some(a), None) => self.subtract(b, a),
            (None, None) => self.commutative(Binary::Add, a, b),
        }
    }

    fn subtract(&mut self, a: u32, b: u32) -> u32 {
        if self.is_zero(b) {
            return a;
        }
        if self.is_zero(a) {
            return self.unary(Unary::Negate, b);
        }
        if a == b {
            return self.constant(0.0);
        }
        match self.negated(b) {
            Some(b) => self.add(a, b),
            None => self.push(Scalar::Binary(Binary::Subtract, a, b)),
        }
    }

    pub fn multiply(&mut self, a: u32, b: u32) -> u32 {
        let (a, b) = if self.value(b).is_some() {
            (b, a)
        } else {
            (a, b)
        };
        // A constant is now first.
        match (self.value(a), self.scalar(b)) {
            (Some(x), Scalar::Constant(y)) => return self.constant(x * y.value()),
            (Some(0.0), _) => return a,
            (Some(1.0), _) => return b,
            (Some(-1.0), _) => return self.unary(Unary::Negate, b),
            (Some(x), Scalar::Unary(Unary::Negate, inner)) => {
                let x = self.constant(-x);
                return self.multiply(x, inner);
            }
            (Some(x), Scalar::Binary(Binary::Multiply, c, inner)) => {
                if let Some(y) = self.value(c) {
                    let both = self.constant(x * y);
                    return self.multiply(both, inner);
                }
                if let Some(y) = self.value(inner) {
                    let both = self.constant(x * y);
                    return self.multiply(both, c);
                }
            }
            _ => {}
        }
        match (self.negated(a), self.negated(b)) {
            (Some(a), Some(b)) => self.multiply(a, b),
            (Some(a), None) => {
                let product = self.multiply(a, b);
                self.unary(Unary::Negate, product)
            }
            (None, Some(b)) => {
                let product = self.multiply(a, b);
                self.unary(Unary::Negate, product)
            }
            (None, None) => self.commutative(Binary::Multiply, a, b),
        }
    }

    fn divide(&mut self, a: u32, b: u32) -> u32 {
        if self.is_zero(a) {
            return a;
        }
        match self.value(b) {
            Some(value) if value != 0.0 => {
                let inverse = self.constant(1.0 / value);
                self.multiply(a, inverse)
            }
            _ => self.push(Scalar::Binary(Binary::Divide, a, b)),
        }
    }

    pub fn select(&mut self, comparison: Comparison, [a, b, then, otherwise]: [u32; 4]) -> u32 {
        if then == otherwise {
            return then;
        }
        if let (Some(a), Some(b)) = (self.value(a), self.value(b)) {
            let holds = match comparison {
                Comparison::Less => a < b,
                Comparison::Equal => a == b,
            };
            return if holds { then } else { otherwise };
        }
        self.push(Scalar::Select(comparison, [a, b, then, otherwise]))
    }

    /// Brings the scalars of an expression in; returns their numbers here.
    pub fn import(&mut self, expression: &Expression) -> Vec<u32> {
        let mut numbers: Vec<u32> = Vec::with_capacity(expression.scalars().len());
        for scalar in expression.scalars() {
            let at = |operand: u32| numbers[operand as usize];
            let here = match *scalar {
                Scalar::Unary(function, a) => Scalar::Unary(function, at(a)),
                Scalar::Binary(function, a, b) => Scalar::Binary(function, at(a), at(b)),
                Scalar::Select(comparison, all) => Scalar::Select(comparison, all.map(at)),
                leaf => leaf,
            };
            numbers.push(self.push(here));
        }
        numbers
    }

    /// The expression of some scalars, and which inputs it reads, in their new order. A scalar of
    /// `replaced` is read from the input beside it instead of being computed.
    pub fn extract(&self, outputs: &[u32], replaced: &[(u32, u32)]) -> (Expression, Vec<usize>) {
        let substitute = |number: u32| {
            let replacement = replaced.iter().find(|(from, _)| *from == number);
            replacement.map_or(self.scalar(number), |&(_, input)| Scalar::Input(input))
        };
        let mut needed = vec![false; self.scalars.len()];
        for &output in outputs {
            needed[output as usize] = true;
        }
        for number in (0..self.scalars.len()).rev() {
            if needed[number] {
                for operand in substitute(number as u32).operands() {
                    needed[operand as usize] = true;
                }
            }
        }
        let mut inputs: Vec<usize> = (0..self.scalars.len())
            .filter(|&number| needed[number])
            .filter_map(|number| match substitute(number as u32) {
                Scalar::Input(input) => Some(input as usize),
                _ => None,
            })
            .collect();
        inputs.sort_unstable();
        inputs.dedup();
        let mut scalars = Builder::default();
        let mut numbers = vec![0; self.scalars.len()];
        for number in (0..self.scalars.len()).filter(|&number| needed[number]) {
            let at = |operand: u32| numbers[operand as usize];
            let here = match substitute(number as u32) {
                Scalar::Input(input) => {
                    let place = inputs.iter().position(|&other| other == input as usize);
                    Scalar::Input(place.unwrap_or(0) as u32)
                }
                Scalar::Unary(function, a) => Scalar::Unary(function, at(a)),
                Scalar::Binary(function, a, b) => Scalar::Binary(function, at(a), at(b)),
                Scalar::Select(comparison, all) => Scalar::Select(comparison, all.map(at)),
                leaf => leaf,
            };
            numbers[number] = scalars.push(here);
        }
        let outputs = outputs.iter().map(|&output| numbers[output as usize]);
        (Expression::new(scalars.scalars, outputs.collect()), inputs)
    }
}

/// One number of an expression that is being written: what `+`, `-`, `*`, `/` and the functions
/// below combine. Those of one expression belong together.
#[derive(Clone)]
pub struct Expr {
    builder: Rc<RefCell<Builder>>,
    number: u32,
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scalar = self.builder.borrow().scalar(self.number);
        write!(f, "{}: {scalar:?}", self.number)
    }
}

impl Expr {
    /// What `write` makes of some inputs, and the numbers of those that it reads, in the order in
    /// which the expression counts them.
    pub(crate) fn build<const N: usize>(
        inputs: impl IntoIterator<Item = usize>,
        write: impl FnOnce(&[Self]) -> [Self; N],
    ) -> (Expression, Vec<usize>) {
        let builder = Rc::new(RefCell::new(Builder::default()));
        let inputs: Vec<Self> = inputs
            .into_iter()
            .map(|input| {
                let number = builder.borrow_mut().input(input);
                Self {
                    builder: builder.clone(),
                    number,
                }
            })
            .collect();
        let outputs = write(&inputs).map(|output| output.number);
        builder.borrow().extract(&outputs, &[])
    }

    fn make(&self, make: impl FnOnce(&mut Builder) -> u32) -> Self {
        let number = make(&mut self.builder.borrow_mut());
        Self {
            builder: self.builder.clone(),
            number,
        }
    }

    fn unary(&self, function: Unary) -> Self {
        self.make(|builder| builder.unary(function, self.number))
    }

    fn binary(&self, function: Binary, other: &Self) -> Self {
        self.make(|builder| builder.binary(function, self.number, other.number))
    }

    /// A constant of the same expression.
    pub fn constant(&self, value: f64) -> Self {
        self.make(|builder| builder.constant(value))
    }

    /// The number of the element's column, from 0.
    pub fn column(&self) -> Self {
        self.make(|builder| builder.push(Scalar::Column))
    }

    /// The value, without a gradient through it.
    #[must_use]
    pub fn detach(&self) -> Self {
        self.unary(Unary::Detach)
    }

    /// The value after dropout. Its mask is made again wherever it is needed; rows are those of
    /// the batch.
    #[must_use]
    pub fn dropout(&self, dropout: Option<Dropout>) -> Self {
        let Some(Dropout { rate, stream }) = dropout else {
            return self.clone();
        };
        let rate = Number::new(rate);
        let kept = self.make(|builder| builder.push(Scalar::Kept { stream, rate }));
        self * kept
    }

    #[must_use]
    pub fn abs(&self) -> Self {
        self.unary(Unary::Abs)
    }

    #[must_use]
    pub fn exp(&self) -> Self {
        self.unary(Unary::Exp)
    }

    /// Of what is at least [`SMALLEST`].
    #[must_use]
    pub fn ln(&self) -> Self {
        self.unary(Unary::Ln)
    }

    /// Has no derivative at 0: take the larger of x and a small number before, not after.
    #[must_use]
    pub fn sqrt(&self) -> Self {
        self.unary(Unary::Sqrt)
    }

    /// 1/√x.
    #[must_use]
    pub fn rsqrt(&self) -> Self {
        self.unary(Unary::InverseSqrt)
    }

    #[must_use]
    pub fn square(&self) -> Self {
        self * self
    }

    #[must_use]
    pub fn sigmoid(&self) -> Self {
        self.unary(Unary::Sigmoid)
    }

    #[must_use]
    pub fn tanh(&self) -> Self {
        self.unary(Unary::Tanh)
    }

    /// ln(1 + eˣ).
    #[must_use]
    pub fn softplus(&self) -> Self {
        self.unary(Unary::Softplus)
    }

    /// x·σ(x).
    #[must_use]
    pub fn silu(&self) -> Self {
        self * self.sigmoid()
    }

    /// x·Φ(x), Φ the normal distribution function.
    #[must_use]
    pub fn gelu(&self) -> Self {
        self * self.unary(Unary::NormalDistribution)
    }

    /// GELU by its tanh approximation, `x/2·(1 + tanh u) = x·σ(2u)`.
    #[must_use]
    pub fn gelu_tanh(&self) -> Self {
        let scale = (2.0 / std::f64::consts::PI).sqrt();
        let inside = self * (self.square() * 0.044_715 + 1.0) * (2.0 * scale);
        self * inside.sigmoid()
    }

    #[must_use]
    pub fn relu(&self) -> Self {
        self.max(0.0)
    }

    #[must_use]
    pub fn cosh(&self) -> Self {
        self.unary(Unary::Cosh)
    }

    #[must_use]
    pub fn sinh(&self) -> Self {
        self.unary(Unary::Sinh)
    }

    /// Of what is at least 1; its derivative needs more than 1.
    #[must_use]
    pub fn acosh(&self) -> Self {
        self.unary(Unary::Acosh)
    }

    /// The larger of two; where they are equal, the gradient goes to the second.
    #[must_use]
    pub fn max(&self, other: impl Into<Term>) -> Self {
        let other = other.into().of(self);
        self.binary(Binary::Max, &other)
    }

    #[must_use]
    pub fn min(&self, other: impl Into<Term>) -> Self {
        let other = other.into().of(self);
        self.binary(Binary::Min, &other)
    }

    #[must_use]
    pub fn clamp(&self, low: f64, high: f64) -> Self {
        self.max(low).min(high)
    }

    /// `then` where this is less than `other`, else `otherwise`.
    #[must_use]
    pub fn where_less(
        &self,
        other: impl Into<Term>,
        then: impl Into<Term>,
        otherwise: impl Into<Term>,
    ) -> Self {
        self.select(
            Comparison::Less,
            other.into(),
            then.into(),
            otherwise.into(),
        )
    }

    /// `then` where this is equal to `other`, else `otherwise`.
    #[must_use]
    pub fn where_equal(
        &self,
        other: impl Into<Term>,
        then: impl Into<Term>,
        otherwise: impl Into<Term>,
    ) -> Self {
        self.select(
            Comparison::Equal,
            other.into(),
            then.into(),
            otherwise.into(),
        )
    }

    fn select(&self, comparison: Comparison, other: Term, then: Term, otherwise: Term) -> Self {
        let [other, then, otherwise] = [other, then, otherwise].map(|term| term.of(self).number);
        self.make(|builder| builder.select(comparison, [self.number, other, then, otherwise]))
    }
}

/// The other operand of an operator: a part of the expression or a number.
#[derive(Clone, Debug)]
pub enum Term {
    Expr(Expr),
    Number(f64),
}

impl Term {
    fn of(self, expr: &Expr) -> Expr {
        match self {
            Self::Expr(expr) => expr,
            Self::Number(value) => expr.constant(value),
        }
    }
}

impl From<Expr> for Term {
    fn from(expr: Expr) -> Self {
        Self::Expr(expr)
    }
}

impl From<&Expr> for Term {
    fn from(expr: &Expr) -> Self {
        Self::Expr(expr.clone())
    }
}

impl From<f64> for Term {
    fn from(value: f64) -> Self {
        Self::Number(value)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $function:ident;)*) => {
        $(
            impl<T: Into<Term>> $trait<T> for Expr {
                type Output = Expr;

                fn $method(self, other: T) -> Expr {
                    (&self).$method(other)
                }
            }

            impl<T: Into<Term>> $trait<T> for &Expr {
                type Output = Expr;

                fn $method(self, other: T) -> Expr {
                    self.binary(Binary::$function, &other.into().of(self))
                }
            }

            impl $trait<Expr> for f64 {
                type Output = Expr;

                fn $method(self, other: Expr) -> Expr {
                    self.$method(&other)
                }
            }

            impl $trait<&Expr> for f64 {
                type Output = Expr;

                fn $method(self, other: &Expr) -> Expr {
                    other.constant(self).binary(Binary::$function, other)
                }
            }
        )*
    };
}

operators! {
    Add add Add;
    Sub sub Subtract;
    Mul mul Multiply;
    Div div Divide;
}

impl Neg for Expr {
    type Output = Self;

    fn neg(self) -> Self {
        self.unary(Unary::Negate)
    }
}

impl Neg for &Expr {
    type Output = Expr;

    fn neg(self) -> Expr {
        self.unary(Unary::Negate)
    }
}

/// The value of a function of constants.
fn evaluate_unary(function: Unary, x: f64) -> Option<f64> {
    Some(match function {
        Unary::Detach => x,
        Unary::Negate => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Ln => x.max(SMALLEST).ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::InverseSqrt => 1.0 / x.sqrt(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Tanh => x.tanh(),
        Unary::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        // The standard library has no error function, and nobody writes this of a constant.
        Unary::NormalDistribution => return None,
        Unary::Cosh => x.cosh(),
        Unary::Sinh => x.sinh(),
        Unary::Acosh => x.acosh(),
    })
}

fn evaluate_binary(function: Binary, a: f64, b: f64) -> f64 {
    match function {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
    }
}
