//! Weights and states as a session has them, to be read or saved.

use std::fmt;

use cinch_engine::Engine;
use cinch_graph::DType;
use cinch_plan::Placement;
use cinch_weights::PIECE_BYTES;

use crate::checkpoint::{CheckpointError, Dtype, TakePiece, TensorBytes, TensorPart, TensorView};
use crate::error::TrainError;
use crate::kept::Kept;
use crate::ranks::Ranks;

/// Tensors as they are in the arena, to be read in pieces.
pub struct Snapshot<'a>(Vec<Saved<'a>>);

/// A tensor in host memory, from the parts of all ranks.
pub(crate) struct AssembledTensor {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl AssembledTensor {
    pub fn view(&self) -> TensorView<'_> {
        TensorView {
            name: &self.name,
            shape: &self.shape,
            dtype: self.dtype,
            bytes: &self.bytes,
        }
    }
}

struct Saved<'a> {
    name: &'a str,
    shape: Vec<usize>,
    dtype: Dtype,
    /// Where this rank's bytes begin in the whole tensor.
    first_byte: u64,
    is_cut: bool,
    bytes: InEngine<'a>,
}

/// Bytes where a step left them, in host or in GPU memory.
struct InEngine<'a> {
    engine: &'a Engine,
    place: Placement,
}

impl fmt::Debug for InEngine<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(formatter)
    }
}

impl TensorBytes for InEngine<'_> {
    fn num_bytes(&self) -> u64 {
        self.place.bytes
    }

    fn give(&self, take: &mut TakePiece<'_>) -> Result<(), CheckpointError> {
        self.engine.read_pieces(self.place, PIECE_BYTES, take)?
    }
}

impl<'a> Snapshot<'a> {
    pub(super) fn of(engine: &'a Engine, kept: impl IntoIterator<Item = Kept<'a>>) -> Self {
        let saved = kept.into_iter().map(|kept| Saved {
            name: kept.name,
            dtype: saved_type(kept.dtype),
            first_byte: kept.first_byte(),
            is_cut: kept.is_cut,
            bytes: InEngine {
                engine,
                place: kept.place,
            },
            shape: kept.shape,
        });
        Self(saved.collect())
    }

    /// What one of several ranks writes of the tensors: its parts, and of those that all ranks have
    /// alike, every so many-th.
    pub fn parts(&self, rank: usize, ranks: usize) -> Vec<TensorPart<'_>> {
        let parts = self.0.iter().enumerate();
        let parts = parts.map(|(index, saved)| TensorPart {
            name: saved.name,
            shape: &saved.shape,
            dtype: saved.dtype,
            first_byte: saved.first_byte,
            bytes: (saved.is_cut || index % ranks == rank)
                .then_some(&saved.bytes as &dyn TensorBytes),
        });
        parts.collect()
    }

    /// The tensors that ranks have parts of, whole, on the first rank; the others get nothing. All
    /// ranks do this together.
    pub(crate) fn assembled(&self, ranks: &Ranks) -> Result<Vec<AssembledTensor>, TrainError> {
        let mut tensors = Vec::new();
        let needed = |saved: &&Saved<'_>| saved.is_cut || ranks.is_first();
        for saved in self.0.iter().filter(needed) {
            let elements: usize = saved.shape.iter().product();
            let own: &dyn TensorBytes = &saved.bytes;
            let own = own.to_vec()?;
            let mut bytes = match ranks.is_first() {
                true => vec![0; elements * saved.dtype.bitsize() / 8],
                false => Vec::new(),
            };
            match saved.is_cut {
                true => ranks.assemble(&own, saved.first_byte as usize, &mut bytes)?,
                false => bytes = own,
            }
            if ranks.is_first() {
                tensors.push(AssembledTensor {
                    name: saved.name.to_owned(),
                    shape: saved.shape.clone(),
                    dtype: saved.dtype,
                    bytes,
                });
            }
        }
        Ok(tensors)
    }

    /// The tensors, where every one is whole.
    pub fn views(&self) -> Vec<TensorView<'_>> {
        self.0
            .iter()
            .map(|saved| TensorView {
                name: saved.name,
                shape: &saved.shape,
                dtype: saved.dtype,
                bytes: &saved.bytes,
            })
            .collect()
    }
}

/// The type in which a tensor is saved: the one in which training keeps it.
pub(crate) fn saved_type(dtype: DType) -> Dtype {
    match dtype {
        DType::U8 => Dtype::U8,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// A type of files as the settings call it.
pub(crate) fn type_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bf16",
        Dtype::F16 => "fp16",
        Dtype::U8 => "8-bit",
        _ => "fp32",
    }
}
