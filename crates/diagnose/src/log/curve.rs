//! What step lines tell over the steps: memory by what is measured, and the loss.

use crate::clean::Source;
use crate::trend::Series;
use crate::words::Measure;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Bytes of the card, or of the host.
    Memory(Measure),
    Loss,
}

/// One rank's readings of one quantity, in the order of the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub source: Source,
    pub quantity: Quantity,
    /// Steps with values: of memory the highest of neighbours that were joined.
    pub points: Vec<(f64, f64)>,
}

pub(super) fn of(source: Source, memory: &[(Measure, Series)], losses: &Series) -> Vec<Curve> {
    let mut curves: Vec<Curve> = memory
        .iter()
        .map(|(measure, series)| Curve {
            source,
            quantity: Quantity::Memory(*measure),
            points: series.peaks().collect(),
        })
        .collect();
    if losses.samples() > 0 {
        curves.push(Curve {
            source,
            quantity: Quantity::Loss,
            points: losses.peaks().collect(),
        });
    }
    curves
}
