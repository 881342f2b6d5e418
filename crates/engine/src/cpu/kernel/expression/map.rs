//! The results of an expression at every place.

use super::tile::{Values, compute, prepare};
use super::{Numbers, Places, TILE};
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;

/// Elements of one task.
const TASK: usize = 32 * TILE;

/// Writes, or adds, the results of an expression. What an output held before is an input where a
/// source says so.
///
/// # Panics
/// Where an output or a source has another number of elements than its places.
pub fn map<F: Real>(places: &Places<'_, F>, outputs: &mut [(&mut [F], Accumulate)]) {
    let elements = places.elements();
    for (output, _) in outputs.iter() {
        assert_eq!(output.len(), elements, "an output");
    }
    for source in places.sources {
        let in_place = matches!(source.numbers, Numbers::InPlace(_));
        assert!(!in_place || places.is_full(&source.broadcast), "in place");
    }
    let modes: Vec<Accumulate> = outputs.iter().map(|(_, mode)| *mode).collect();
    let outputs = outputs.iter_mut().map(|(output, _)| Shared::new(output));
    let outputs: Vec<Shared<'_, F>> = outputs.collect();
    for_each(elements.div_ceil(TASK), |task| {
        let cells = places.expression.num_slots() * TILE;
        scratch::with(Owner::Expression, cells, |cells: &mut [F]| {
            prepare(places, cells);
            let mut values = Values::new();
            let end = elements.min((task + 1) * TASK);
            for first in (task * TASK..end).step_by(TILE) {
                let len = TILE.min(end - first);
                compute(places, &outputs, first, len, cells, &mut values);
                let results = places.expression.outputs().iter().zip(&outputs);
                for ((&scalar, output), mode) in results.zip(&modes) {
                    // SAFETY: a tile belongs to one task, and results are in cells or in inputs
                    // that no output has taken over (`direct`), so writing one leaves the others.
                    unsafe { put(values.of(scalar), output.part(first, len), *mode) };
                }
            }
        });
    });
}

fn put<F: Real>(values: &[F], output: &mut [F], mode: Accumulate) {
    match mode {
        Accumulate::Overwrite => output.copy_from_slice(values),
        Accumulate::Add => {
            for (output, value) in output.iter_mut().zip(values) {
                *output += *value;
            }
        }
    }
}
