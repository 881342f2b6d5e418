//! Where a generator's weights come from: a checkpoint, a model folder, adapters over one.

use std::ops::Range;

use cinch_graph::op::Quantisation;
use cinch_graph::{DType, Graph, Shape};
use cinch_weights::{Dtype, WeightFiles};

use crate::error::TrainError;
use crate::pretrained::{Codes, check_tied_head, has_tied_head};

/// A tensor as a model's files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPart<'a> {
    pub name: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
}

/// Whatever holds weights by the names of [`cinch_graph::Parameter::parts`]. Those of adapters
/// are the module's name with `.lora_A.weight` and `.lora_B.weight`. What goes wrong is told in a
/// sentence that names the tensor.
pub trait WeightSource {
    /// Whether the source, as a whole, is one of such a graph's weights.
    fn check(&self, _graph: &Graph) -> Result<(), TrainError> {
        Ok(())
    }

    /// Puts rows of a tensor into `into`, in `dtype` and row-major.
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String>;

    /// Puts the codes of a matrix into `codes` and its scales into `scales`, which are in the order
    /// of [`Quantisation::tensors`].
    fn read_codes(
        &mut self,
        part: WeightPart<'_>,
        _quantisation: Quantisation,
        _codes: &mut [u8],
        _scales: &mut [Vec<u8>],
    ) -> Result<(), String> {
        Err(format!("`{}` is not there as codes", part.name))
    }
}

/// The files of a checkpoint or of a model.
impl WeightSource for &WeightFiles {
    fn check(&self, graph: &Graph) -> Result<(), TrainError> {
        check_tied_head(has_tied_head(graph), self)
    }

    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        check(self, part)?;
        let wanted = match dtype {
            DType::F32 => Dtype::F32,
            DType::Bf16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            other => return Err(format!("`{}` cannot be had in {other}", part.name)),
        };
        self.read_as(part.name, rows, wanted, into)
            .map_err(|error| error.to_string())
    }

    fn read_codes(
        &mut self,
        part: WeightPart<'_>,
        quantisation: Quantisation,
        codes: &mut [u8],
        scales: &mut [Vec<u8>],
    ) -> Result<(), String> {
        check(self, part)?;
        let shape = Shape::new(part.shape);
        let read = Codes::read(quantisation, &shape, self, part.name)
            .map_err(|error| error.to_string())?;
        codes.copy_from_slice(&read.codes);
        for (to, from) in scales.iter_mut().zip(read.scales) {
            *to = from;
        }
        Ok(())
    }
}

fn check(files: &WeightFiles, part: WeightPart<'_>) -> Result<(), String> {
    let Some(saved) = files.get(part.name) else {
        return Err(format!("it has no tensor `{}`", part.name));
    };
    match saved.shape == part.shape {
        true => Ok(()),
        false => Err(format!(
            "`{}` is {:?}, the model's is {:?}",
            part.name, saved.shape, part.shape
        )),
    }
}

/// What was trained, over the weights that were not.
pub struct TunedWeights<'a> {
    pub trained: &'a WeightFiles,
    pub base: &'a WeightFiles,
}

impl<'a> TunedWeights<'a> {
    fn of(&self, part: WeightPart<'_>) -> &'a WeightFiles {
        match self.trained.get(part.name) {
            Some(_) => self.trained,
            None => self.base,
        }
    }
}

impl WeightSource for TunedWeights<'_> {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        WeightSource::read(&mut self.of(part), part, rows, dtype, into)
    }

    fn read_codes(
        &mut self,
        part: WeightPart<'_>,
        quantisation: Quantisation,
        codes: &mut [u8],
        scales: &mut [Vec<u8>],
    ) -> Result<(), String> {
        WeightSource::read_codes(&mut self.of(part), part, quantisation, codes, scales)
    }
}
