//! What a rank keeps of tensors, by the names that files have for them: whole ones, or its part of
//! those that are cut over the ranks. A part is elements that follow each other; beyond the end of
//! the tensor its place holds zeros.

use std::convert::Infallible;
use std::ops::Range;

use cinch_engine::{Engine, EngineError};
use cinch_graph::op::MomentFormat;
use cinch_graph::{DType, FilePart, Graph, Parameter, TensorId};
use cinch_plan::{Placement, Plan};
use cinch_weights::PIECE_BYTES;

use crate::session::placement;

/// Elements of a tensor of a file, and where this rank has them.
#[derive(Clone, Debug)]
pub(crate) struct Kept<'a> {
    pub name: &'a str,
    /// Of the whole tensor, as files have it.
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// Those that this rank keeps, row-major.
    pub elements: Range<usize>,
    /// Of just these.
    pub place: Placement,
    /// Whether ranks have parts of it, which may be all or nothing, and not all of it each.
    pub is_cut: bool,
}

impl Kept<'_> {
    fn size(&self) -> usize {
        self.dtype.size() as usize
    }

    /// Elements of the whole tensor.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The first byte of the part in the whole tensor.
    pub fn first_byte(&self) -> u64 {
        (self.elements.start * self.size()) as u64
    }

    /// Fills the place, some elements at a time: `read` puts those that it is told into the bytes
    /// that it is given.
    pub fn fill<E>(
        &self,
        engine: &mut Engine,
        mut read: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<(), E>, EngineError> {
        let size = self.size();
        engine.write_pieces(self.place, size, PIECE_BYTES, |first, bytes: &mut [u8]| {
            let first = self.elements.start + first / size;
            read(first..first + bytes.len() / size, bytes)
        })
    }
}

/// The elements of a parameter that a rank keeps.
pub(crate) fn elements(parameter: &Parameter, rank: usize) -> Range<usize> {
    match parameter.shard {
        None => 0..parameter.shape.elements(),
        Some(shard) => shard.range(rank),
    }
}

/// The shape of a parameter's rows that are one tensor of a file.
pub(crate) fn file_shape(parameter: &Parameter, part: &FilePart) -> Vec<usize> {
    let mut shape = parameter.shape.dims().to_vec();
    if let Some(outermost) = shape.first_mut() {
        *outermost = part.rows;
    }
    shape
}

/// The weights of a parameter that is not quantised, file tensor by file tensor.
pub(crate) fn weights<'g>(
    graph: &'g Graph,
    plan: &Plan,
    parameter: &'g Parameter,
    rank: usize,
) -> Vec<Kept<'g>> {
    let own = elements(parameter, rank);
    let rows: usize = parameter.parts.iter().map(|part| part.rows).sum();
    let width = parameter.shape.elements() / rows.max(1);
    let (place, dtype) = (
        placement(plan, parameter.master),
        graph.ty(parameter.master).dtype,
    );
    let size = dtype.size();
    let mut first = 0;
    let kept = parameter.parts.iter().map(|part| {
        let all = first..first + part.rows * width;
        first = all.end;
        let begin = own.start.clamp(all.start, all.end);
        let end = own.end.clamp(begin, all.end);
        Kept {
            name: &part.name,
            shape: file_shape(parameter, part),
            dtype,
            elements: begin - all.start..end - all.start,
            place: Placement {
                offset: place.offset + (begin.saturating_sub(own.start)) as u64 * size,
                bytes: (end - begin) as u64 * size,
                ..place
            },
            is_cut: parameter.shard.is_some(),
        }
    });
    kept.collect()
}

/// A state of a parameter: a moment, or the scales of one.
pub(crate) fn state<'g>(
    graph: &'g Graph,
    plan: &Plan,
    parameter: &Parameter,
    id: TensorId,
    rank: usize,
) -> Kept<'g> {
    let tensor = graph.tensor(id);
    let place = placement(plan, id);
    let (shape, elements) = match parameter.shard {
        None => {
            let shape = tensor.ty.shape.dims().to_vec();
            (shape, 0..tensor.ty.shape.elements())
        }
        Some(shard) => {
            let is_scales = parameter.scales.is_some_and(|ids| ids.contains(&id));
            let own = shard.range(rank);
            match is_scales {
                false => (parameter.shape.dims().to_vec(), own),
                // A part is whole blocks, and each has a scale.
                true => (
                    vec![shard.elements.div_ceil(MomentFormat::BLOCK)],
                    own.start / MomentFormat::BLOCK..own.end.div_ceil(MomentFormat::BLOCK),
                ),
            }
        }
    };
    Kept {
        name: &tensor.name,
        shape,
        dtype: tensor.ty.dtype,
        place: Placement {
            bytes: elements.len() as u64 * tensor.ty.dtype.size(),
            ..place
        },
        elements,
        is_cut: parameter.shard.is_some(),
    }
}

/// A tensor that every rank has alike.
pub(crate) fn whole<'g>(graph: &'g Graph, plan: &Plan, id: TensorId) -> Kept<'g> {
    let tensor = graph.tensor(id);
    Kept {
        name: &tensor.name,
        shape: tensor.ty.shape.dims().to_vec(),
        dtype: tensor.ty.dtype,
        elements: 0..tensor.ty.shape.elements(),
        place: placement(plan, id),
        is_cut: false,
    }
}

/// Writes this rank's part of bytes into a place, which holds as many of every rank's.
pub(crate) fn write_part(
    engine: &mut Engine,
    place: Placement,
    all: &[u8],
    rank: usize,
) -> Result<(), EngineError> {
    let part = place.bytes as usize;
    if part == all.len() {
        return engine.write(place, all);
    }
    let begin = (rank * part).min(all.len());
    let own = &all[begin..(begin + part).min(all.len())];
    clear(engine, place)?;
    let bytes = own.len() as u64;
    engine.write(Placement { bytes, ..place }, own)
}

/// Fills a place with zeros.
pub(crate) fn clear(engine: &mut Engine, place: Placement) -> Result<(), EngineError> {
    let Ok(()) = engine.write_pieces(place, 1, PIECE_BYTES, |_, bytes: &mut [u8]| {
        bytes.fill(0);
        Ok::<(), Infallible>(())
    })?;
    Ok(())
}
