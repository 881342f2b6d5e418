//! Sums and maxima of an expression over rows, columns or groups of them.

use cinch_graph::expression::Broadcast;
use cinch_graph::op::ReduceKind;

use super::tile::{Values, compute, for_groups, for_segments, prepare};
use super::{Places, TILE};
use crate::cpu::kernel::lanes;
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Elements of one task, where output rows are dealt out.
const TASK: usize = 32 * TILE;

/// Where the places of an expression go.
#[derive(Clone, Copy)]
pub struct Reduction {
    pub kind: ReduceKind,
    /// The element of the output that a place belongs to.
    pub broadcast: Broadcast,
    /// The rows of an output are reduced in so many parts.
    pub parts: usize,
}

/// `output` (+)= the expression, reduced. With several parts, `partials` has room for as many
/// outputs; they are put together in their order.
///
/// # Panics
/// Where the output or the partials have another size.
pub fn reduce<F: Real>(
    places: &Places<'_, F>,
    reduction: &Reduction,
    partials: &mut [F],
    output: &mut [F],
    mode: Accumulate,
) {
    let Reduction {
        kind,
        broadcast,
        parts,
    } = *reduction;
    assert_eq!(output.len(), broadcast.elements(), "the output");
    if parts <= 1 {
        if mode == Accumulate::Overwrite {
            output.fill(start(kind));
        }
        // The rows that belong to each output row, and output rows of a task.
        let rows = places.rows / broadcast.rows;
        let block = (TASK / (rows * places.width).max(1)).clamp(1, broadcast.rows);
        let output = Shared::new(output);
        for_each(broadcast.rows.div_ceil(block), |task| {
            let first = task * block;
            let count = block.min(broadcast.rows - first);
            // SAFETY: each task has its own output rows.
            let sums = unsafe { output.part(first * broadcast.columns, count * broadcast.columns) };
            let outer = places.rows / (broadcast.rows * broadcast.row_group);
            with_cells(places, |cells, values| {
                for turn in 0..outer {
                    let row = (turn * broadcast.rows + first) * broadcast.row_group;
                    let rows = row..row + count * broadcast.row_group;
                    reduce_rows(places, reduction, rows, first, sums, cells, values);
                }
            });
        });
        return;
    }
    let elements = broadcast.elements();
    let partials = &mut partials[..parts * elements];
    let shared = Shared::new(partials);
    for_each(parts * broadcast.rows, |task| {
        let (part, row) = (task / broadcast.rows, task % broadcast.rows);
        let at = part * elements + row * broadcast.columns;
        // SAFETY: each task has its own part of its own output row.
        let sums = unsafe { shared.part(at, broadcast.columns) };
        sums.fill(start(kind));
        with_cells(places, |cells, values| {
            for_part(places.rows, &broadcast, row, part, parts, |rows| {
                reduce_rows(places, reduction, rows, row, sums, cells, values);
            });
        });
    });
    for (index, output) in output.iter_mut().enumerate() {
        let all = partials[index..].iter().step_by(elements);
        let total = all.fold(start(kind), |total, &part| combine(kind, total, part));
        match kind {
            ReduceKind::Sum => mode.put(output, total),
            ReduceKind::Max => *output = total,
        }
    }
}

/// What nothing is reduced to.
fn start<F: Real>(kind: ReduceKind) -> F {
    match kind {
        ReduceKind::Sum => F::ZERO,
        ReduceKind::Max => F::from_f64(f64::NEG_INFINITY),
    }
}

#[inline(always)]
fn combine<F: Real>(kind: ReduceKind, a: F, b: F) -> F {
    match kind {
        ReduceKind::Sum => a + b,
        ReduceKind::Max => b.larger(a),
    }
}

fn with_cells<F: Real>(places: &Places<'_, F>, work: impl FnOnce(&mut [F], &mut Values<F>)) {
    let cells = places.expression.num_slots() * TILE;
    scratch::with(Owner::Expression, cells, |cells: &mut [F]| {
        prepare(places, cells);
        work(cells, &mut Values::new());
    });
}

/// The rows of one part of an output row, in ranges: parts of its one group of rows, or some of
/// its groups.
fn for_part(
    rows: usize,
    broadcast: &Broadcast,
    row: usize,
    part: usize,
    parts: usize,
    mut work: impl FnMut(std::ops::Range<usize>),
) {
    let group = broadcast.row_group;
    let outer = rows / (broadcast.rows * group);
    let cut = |count: usize| count * part / parts..count * (part + 1) / parts;
    if outer == 1 {
        let rows = cut(group);
        work(row * group + rows.start..row * group + rows.end);
    } else {
        for turn in cut(outer) {
            let first = (turn * broadcast.rows + row) * group;
            work(first..first + group);
        }
    }
}

/// Reduces whole rows of places into output rows, of which `sums` begins with `first`.
fn reduce_rows<F: Real>(
    places: &Places<'_, F>,
    reduction: &Reduction,
    rows: std::ops::Range<usize>,
    first: usize,
    sums: &mut [F],
    cells: &mut [F],
    values: &mut Values<F>,
) {
    let result = places.expression.outputs()[0];
    let end = rows.end * places.width;
    for start in (rows.start * places.width..end).step_by(TILE) {
        let len = TILE.min(end - start);
        compute(places, &[], start, len, cells, values);
        // SAFETY: nothing has been written since.
        let values = unsafe { values.of(result) };
        add_tile(places.width, reduction, start, values, first, sums);
    }
}

simd! {
    fn add_tile<F: Real>(
        width: usize,
        reduction: &Reduction,
        start: usize,
        values: &[F],
        first: usize,
        sums: &mut [F],
    ) {
        let columns = reduction.broadcast.columns;
        let kind = reduction.kind;
        for_segments(width, start, values.len(), |row, column, part| {
            let part = &values[part];
            let row = reduction.broadcast.row(row) - first;
            let sums = &mut sums[row * columns..][..columns];
            if columns == width {
                let sums = sums[column..].iter_mut().zip(part);
                match kind {
                    ReduceKind::Sum => sums.for_each(|(sum, value)| *sum += *value),
                    ReduceKind::Max => sums.for_each(|(sum, value)| *sum = value.larger(*sum)),
                }
                return;
            }
            for_groups(&reduction.broadcast, column, part.len(), |number, groups| {
                let (part, sums) = (&part[groups.places], &mut sums[number..]);
                match groups.size {
                    2 => add_groups::<F, 2>(kind, part, sums),
                    4 => add_groups::<F, 4>(kind, part, sums),
                    8 => add_groups::<F, 8>(kind, part, sums),
                    16 => add_groups::<F, 16>(kind, part, sums),
                    _ => add_group(kind, part, &mut sums[0]),
                }
            });
        });
    }
}

/// Reduces groups of `SIZE` places into a number each.
#[inline(always)]
fn add_groups<F: Real, const SIZE: usize>(kind: ReduceKind, part: &[F], sums: &mut [F]) {
    for (group, sum) in part.as_chunks::<SIZE>().0.iter().zip(sums) {
        add_group(kind, group, sum);
    }
}

#[inline(always)]
fn add_group<F: Real>(kind: ReduceKind, group: &[F], sum: &mut F) {
    *sum = match kind {
        ReduceKind::Sum => *sum + lanes::sum(group, |value| value),
        ReduceKind::Max => group.iter().fold(*sum, |max, value| value.larger(max)),
    };
}
