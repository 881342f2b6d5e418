//! One tile: loads its inputs, computes its scalars one after the other.

use std::ops::Range;

use cinch_graph::expression::{Binary, Broadcast, Comparison, Expression, SMALLEST, Scalar, Unary};

use super::{Numbers, Outputs, Places, Source, TILE};
use crate::cpu::dropout::Dropout;
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Where the values of each scalar of a tile begin.
pub struct Values<F> {
    pointers: [*const F; Expression::MOST_SCALARS],
    len: usize,
}

impl<F: Real> Values<F> {
    pub fn new() -> Self {
        Self {
            pointers: [std::ptr::null(); Expression::MOST_SCALARS],
            len: 0,
        }
    }

    /// The values of a scalar of the tile that was computed last.
    ///
    /// # Safety
    /// Neither the cells nor the inputs of that tile have been written since.
    #[inline(always)]
    pub unsafe fn of(&self, scalar: u32) -> &[F] {
        // SAFETY: `compute` has set the pointer to `len` values.
        unsafe { std::slice::from_raw_parts(self.pointers[scalar as usize], self.len) }
    }
}

/// Fills the cells of what is the same in every tile.
pub fn prepare<F: Real>(places: &Places<'_, F>, cells: &mut [F]) {
    for (scalar, &slot) in places
        .expression
        .scalars()
        .iter()
        .zip(places.expression.slots())
    {
        if let Some(value) = constant(places, scalar) {
            cells[slot as usize * TILE..][..TILE].fill(value);
        }
    }
}

/// The value of a scalar that is the same at every place.
fn constant<F: Real>(places: &Places<'_, F>, scalar: &Scalar) -> Option<F> {
    match *scalar {
        Scalar::Constant(value) => Some(F::from_f64(value.value())),
        Scalar::Input(input) => {
            let source = &places.sources[input as usize];
            let single = source.broadcast.is_single() && places.elements() != 1;
            if !single {
                return None;
            }
            match source.numbers {
                Numbers::Real(numbers) => Some(numbers[0]),
                Numbers::Single(numbers) => Some(F::from_f64(f64::from(numbers[0]))),
                Numbers::Integer(numbers) => Some(F::from_f64(f64::from(numbers[0]))),
                Numbers::InPlace(_) => None,
            }
        }
        _ => None,
    }
}

simd! {
    /// Computes the places `first..first + len`, which is at most a tile.
    pub fn compute<F: Real>(
        places: &Places<'_, F>,
        outputs: &Outputs<'_, F>,
        first: usize,
        len: usize,
        cells: &mut [F],
        values: &mut Values<F>,
    ) {
        assert!(len <= TILE && cells.len() >= places.expression.num_slots() * TILE);
        values.len = len;
        let expression = places.expression;
        let base = cells.as_mut_ptr();
        let steps = expression.scalars().iter().zip(expression.slots());
        for (number, (scalar, &slot)) in steps.enumerate() {
            // SAFETY: the cell is inside by the assertion.
            let cell = unsafe { base.add(slot as usize * TILE) };
            values.pointers[number] = cell;
            let at = |operand: u32| {
                // SAFETY: operands were computed before, `len` values each, and none of them is in
                // this scalar's cell (`Expression::slots`).
                unsafe { std::slice::from_raw_parts(values.pointers[operand as usize], len) }
            };
            // SAFETY: a tile of the cells, which nothing else refers to.
            let out = unsafe { std::slice::from_raw_parts_mut(cell, len) };
            match *scalar {
                Scalar::Constant(_) => {}
                Scalar::Input(input) => {
                    let source = &places.sources[input as usize];
                    match direct(places, source, outputs, first, len) {
                        // What is a result itself would be overwritten where it lies.
                        Some(taken) if is_taken(source) && is_result(expression, number) => {
                            // SAFETY: `len` values, as `direct` says; cells are apart from them.
                            let taken = unsafe { std::slice::from_raw_parts(taken, len) };
                            out.copy_from_slice(taken);
                        }
                        Some(pointer) => values.pointers[number] = pointer,
                        None => load(places, source, first, out),
                    }
                }
                Scalar::Column => {
                    for_segments(places.width, first, len, |_, column, part| {
                        for (i, value) in out[part].iter_mut().enumerate() {
                            *value = F::from_f64((column + i) as f64);
                        }
                    });
                }
                Scalar::Kept { stream, rate } => match places.random {
                    None => out.fill(F::ONE),
                    Some(state) => {
                        let dropout = Dropout::new(state, stream, rate.value());
                        for_segments(places.width, first, len, |row, column, part| {
                            let base = dropout.row(row);
                            for (i, value) in out[part].iter_mut().enumerate() {
                                *value = dropout.factor(base, column + i);
                            }
                        });
                    }
                },
                Scalar::Unary(function, a) => unary(function, at(a), out),
                Scalar::Binary(function, a, b) => binary(function, at(a), at(b), out),
                Scalar::Select(comparison, [a, b, then, otherwise]) => {
                    let (a, b, then, otherwise) = (at(a), at(b), at(then), at(otherwise));
                    match comparison {
                        Comparison::Less => select(a, b, then, otherwise, out, |a, b| a < b),
                        Comparison::Equal => select(a, b, then, otherwise, out, |a, b| a == b),
                    }
                }
            }
        }
    }
}

/// Whether an output has taken over the source's memory.
fn is_taken<F>(source: &Source<'_, F>) -> bool {
    matches!(source.numbers, Numbers::InPlace(_))
}

fn is_result(expression: &Expression, scalar: usize) -> bool {
    let outputs = expression.outputs().iter();
    outputs.into_iter().any(|&output| output as usize == scalar)
}

/// Where the elements lie one after the other already.
#[inline(always)]
fn direct<F: Real>(
    places: &Places<'_, F>,
    source: &Source<'_, F>,
    outputs: &Outputs<'_, F>,
    first: usize,
    len: usize,
) -> Option<*const F> {
    match source.numbers {
        Numbers::Real(numbers) if places.is_full(&source.broadcast) => {
            Some(numbers[first..first + len].as_ptr())
        }
        // SAFETY: the tile is this task's own; it is written when all its scalars are computed.
        Numbers::InPlace(output) => Some(unsafe { outputs[output].part(first, len) }.as_ptr()),
        _ => None,
    }
}

#[inline(always)]
fn load<F: Real>(places: &Places<'_, F>, source: &Source<'_, F>, first: usize, out: &mut [F]) {
    let (width, broadcast) = (places.width, &source.broadcast);
    if broadcast.is_single() && places.elements() != 1 {
        return;
    }
    match source.numbers {
        Numbers::Real(numbers) => gather(width, broadcast, numbers, first, out, |x| x),
        Numbers::Single(numbers) => gather(width, broadcast, numbers, first, out, |x: f32| {
            F::from_f64(f64::from(x))
        }),
        Numbers::Integer(numbers) => gather(width, broadcast, numbers, first, out, |x: i32| {
            F::from_f64(f64::from(x))
        }),
        Numbers::InPlace(_) => {}
    }
}

/// The elements that belong to the places from `first` on.
#[inline(always)]
fn gather<F: Real, T: Copy>(
    width: usize,
    broadcast: &Broadcast,
    numbers: &[T],
    first: usize,
    out: &mut [F],
    convert: impl Fn(T) -> F,
) {
    for_segments(width, first, out.len(), |row, column, part| {
        let part = &mut out[part];
        let numbers = &numbers[broadcast.row(row) * broadcast.columns..][..broadcast.columns];
        if broadcast.columns == 1 {
            part.fill(convert(numbers[0]));
        } else if broadcast.columns == width {
            for (value, &number) in part.iter_mut().zip(&numbers[column..]) {
                *value = convert(number);
            }
        } else {
            for_groups(broadcast, column, part.len(), |number, groups| {
                let (part, value) = (&mut part[groups.places.clone()], numbers[number]);
                match groups.size {
                    2 => fill::<F, T, 2>(&numbers[number..], part, &convert),
                    4 => fill::<F, T, 4>(&numbers[number..], part, &convert),
                    8 => fill::<F, T, 8>(&numbers[number..], part, &convert),
                    16 => fill::<F, T, 16>(&numbers[number..], part, &convert),
                    _ => part.fill(convert(value)),
                }
            });
        }
    });
}

/// Calls `work(row, column, part)` for the parts of a tile of so many places from `first` on that
/// are in one row each.
#[inline(always)]
pub fn for_segments(
    width: usize,
    first: usize,
    len: usize,
    mut work: impl FnMut(usize, usize, Range<usize>),
) {
    let (mut row, mut column, mut start) = (first / width, first % width, 0);
    while start < len {
        let end = len.min(start + width - column);
        work(row, column, start..end);
        (row, column, start) = (row + 1, 0, end);
    }
}

/// Groups of columns that belong to numbers one after the other.
pub struct Groups {
    /// Columns of a group; 0 where it is a group or a part of one, of any size.
    pub size: usize,
    /// The places of their columns.
    pub places: Range<usize>,
}

/// Calls `work(number, groups)` for the groups of a row's columns from `column` on, `number` being
/// that of the first. Whole groups of a size that loops are made for come together.
#[inline(always)]
pub fn for_groups(
    broadcast: &Broadcast,
    column: usize,
    len: usize,
    mut work: impl FnMut(usize, Groups),
) {
    let size = broadcast.column_group;
    let (mut number, mut inside) = (broadcast.column(column), column % size);
    let mut start = 0;
    while start < len {
        let whole = match (inside, size) {
            (0, 2 | 4 | 8 | 16) => ((len - start) / size).min(broadcast.columns - number),
            _ => 0,
        };
        let end = match whole {
            0 => len.min(start + size - inside),
            _ => start + whole * size,
        };
        let groups = Groups {
            size: if whole > 0 { size } else { 0 },
            places: start..end,
        };
        work(number, groups);
        number += whole.max(1);
        if number == broadcast.columns {
            number = 0;
        }
        (inside, start) = (0, end);
    }
}

/// Each number as often as a group has columns.
#[inline(always)]
fn fill<F: Real, T: Copy, const SIZE: usize>(
    numbers: &[T],
    part: &mut [F],
    convert: &impl Fn(T) -> F,
) {
    for (group, &number) in part.as_chunks_mut::<SIZE>().0.iter_mut().zip(numbers) {
        *group = [convert(number); SIZE];
    }
}

#[inline(always)]
fn each<F: Real>(x: &[F], out: &mut [F], function: impl Fn(F) -> F) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = function(*x);
    }
}

#[inline(always)]
fn both<F: Real>(a: &[F], b: &[F], out: &mut [F], function: impl Fn(F, F) -> F) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = function(*a, *b);
    }
}

#[inline(always)]
fn select<F: Real>(
    a: &[F],
    b: &[F],
    then: &[F],
    otherwise: &[F],
    out: &mut [F],
    holds: impl Fn(F, F) -> bool,
) {
    let operands = a.iter().zip(b).zip(then).zip(otherwise);
    for (out, (((a, b), then), otherwise)) in out.iter_mut().zip(operands) {
        *out = if holds(*a, *b) { *then } else { *otherwise };
    }
}

#[inline(always)]
fn unary<F: Real>(function: Unary, x: &[F], out: &mut [F]) {
    match function {
        Unary::Detach => out.copy_from_slice(x),
        Unary::Negate => each(x, out, |x| -x),
        Unary::Abs => each(x, out, F::abs),
        Unary::Exp => each(x, out, F::exp),
        Unary::Ln => each(x, out, |x| x.larger(F::from_f64(SMALLEST)).ln()),
        Unary::Sqrt => each(x, out, F::sqrt),
        Unary::InverseSqrt => each(x, out, |x| F::ONE / x.sqrt()),
        Unary::Sigmoid => each(x, out, F::sigmoid),
        Unary::Tanh => each(x, out, F::tanh),
        Unary::Softplus => each(x, out, F::softplus),
        Unary::NormalDistribution => each(x, out, super::super::activation::normal_distribution),
        Unary::Cosh => each(x, out, F::cosh),
        Unary::Sinh => each(x, out, F::sinh),
        Unary::Acosh => each(x, out, F::acosh),
    }
}

#[inline(always)]
fn binary<F: Real>(function: Binary, a: &[F], b: &[F], out: &mut [F]) {
    match function {
        Binary::Add => both(a, b, out, |a, b| a + b),
        Binary::Subtract => both(a, b, out, |a, b| a - b),
        Binary::Multiply => both(a, b, out, |a, b| a * b),
        Binary::Divide => both(a, b, out, |a, b| a / b),
        Binary::Max => both(a, b, out, F::larger),
        Binary::Min => both(a, b, out, |a, b| if a < b { a } else { b }),
    }
}
