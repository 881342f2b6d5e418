//! Optimizer states on the way from a checkpoint: as they were saved, or converted where the run
//! now keeps them in the other format.
//!
//! In the same format a run goes on bit by bit. To a coarser one each moment is rounded once, as
//! after any step; from eight bits to fp32 nothing is lost.

use std::ops::Range;

use cinch_engine::Engine;
use cinch_engine::cpu::kernel::eight_bit::Code;
use cinch_graph::op::MomentFormat;
use cinch_graph::{Graph, Parameter, TensorId};
use cinch_plan::Placement;
use cinch_step::StepPlan;
use cinch_weights::{PIECE_BYTES, Tensor, WeightError};

use crate::checkpoint::{Dtype, WeightFiles};
use crate::kept::{self, Kept};
use crate::pretrained::bytes_in;
use crate::session::{copy_kept, placement, saved_type, type_name};

/// Fills all moments from `file`; says so where some were converted.
pub(crate) fn load_states(
    step: &StepPlan,
    engine: &mut Engine,
    rank: usize,
    file: &WeightFiles,
) -> Result<Option<String>, String> {
    let graph: &Graph = &step.training;
    let mut converted = None;
    for parameter in &graph.parameters {
        let mut states = States {
            step,
            engine,
            file,
            parameter,
            rank,
        };
        let Some(moments) = parameter.moments else {
            continue;
        };
        for (index, code) in [Code::Signed, Code::Unsigned].into_iter().enumerate() {
            let (moment, scales) = (moments[index], parameter.scales.map(|s| s[index]));
            let name = &graph.tensor(moment).name;
            let saved = file.get(name).map(|saved| saved.dtype);
            let now = saved_type(graph.ty(moment).dtype);
            if let Some(saved) = saved.filter(|&saved| saved != now) {
                converted.get_or_insert((saved, now));
            }
            match (saved, scales) {
                (Some(Dtype::F32 | Dtype::BF16 | Dtype::F16), Some(scales)) => {
                    states.encode(code, moment, scales)?;
                }
                (Some(Dtype::U8), None) => states.decode(code, moment)?,
                (_, scales) => {
                    for id in [moment].into_iter().chain(scales) {
                        states.copy(id)?;
                    }
                }
            }
        }
    }
    Ok(converted.map(|(saved, now)| {
        let now = match now {
            Dtype::U8 => "8 bits",
            now => type_name(now),
        };
        let saved = type_name(saved);
        format!("the checkpoint's optimizer states were {saved}: they go on in {now}")
    }))
}

/// Where states come from and go to.
struct States<'a> {
    step: &'a StepPlan,
    engine: &'a mut Engine,
    file: &'a WeightFiles,
    parameter: &'a Parameter,
    rank: usize,
}

impl<'a> States<'a> {
    /// What this rank keeps of a state. What lies beyond the end of the whole is zero.
    fn kept(&mut self, id: TensorId) -> Result<Kept<'a>, String> {
        if self.parameter.shard.is_some() {
            let place = placement(&self.step.plan, id);
            kept::clear(self.engine, place).map_err(|error| error.to_string())?;
        }
        let (graph, plan) = (&self.step.training, &self.step.plan);
        Ok(kept::state(graph, plan, self.parameter, id, self.rank))
    }

    fn copy(&mut self, id: TensorId) -> Result<(), String> {
        let kept = self.kept(id)?;
        copy_kept(self.engine, &kept, self.file)
    }

    fn encode(&mut self, code: Code, moment: TensorId, scales: TensorId) -> Result<(), String> {
        let (kept, kept_scales) = (self.kept(moment)?, self.kept(scales)?);
        let saved = self.named(kept.name, &kept.shape)?;
        let places = [kept.place, kept_scales.place];
        for elements in pieces(kept.elements.len()) {
            let mut values = vec![0.0; elements.len()];
            let first = kept.elements.start;
            let in_file = first + elements.start..first + elements.end;
            self.file
                .read_elements_f32(&saved.name, in_file, &mut values)
                .map_err(|error| error.to_string())?;
            let mut codes = vec![0; values.len()];
            let mut of_blocks = vec![0.0_f32; values.len().div_ceil(MomentFormat::BLOCK)];
            code.encode(&values, &mut codes, &mut of_blocks);
            let codes_at = part(places[0], elements.start, codes.len());
            let scale_bytes = size_of::<f32>();
            let first = elements.start / MomentFormat::BLOCK * scale_bytes;
            let scales_at = part(places[1], first, of_blocks.len() * scale_bytes);
            self.engine
                .write(codes_at, &codes)
                .and_then(|()| self.engine.write(scales_at, &of_blocks))
                .and_then(|()| self.engine.synchronize())
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn decode(&mut self, code: Code, moment: TensorId) -> Result<(), String> {
        let kept = self.kept(moment)?;
        let (name, dtype) = (kept.name, kept.dtype);
        let saved = self.named(name, &kept.shape)?;
        let blocks = saved.num_elements().div_ceil(MomentFormat::BLOCK);
        let scales = self.named(&format!("{name}.scales"), &[blocks])?;
        if scales.dtype != Dtype::F32 {
            return Err(format!("`{}` is {:?}, not F32", scales.name, scales.dtype));
        }
        let file = self.file;
        let size = dtype.size() as usize;
        let decoded = self.engine.write_pieces(
            kept.place,
            MomentFormat::BLOCK * size,
            PIECE_BYTES,
            |first, bytes: &mut [u8]| {
                let first = kept.elements.start + first / size;
                let mut codes = vec![0; bytes.len() / size];
                file.read_elements(name, first..first + codes.len(), &mut codes)?;
                let block = first / MomentFormat::BLOCK;
                let mut of_blocks = vec![0.0; codes.len().div_ceil(MomentFormat::BLOCK)];
                let blocks = block..block + of_blocks.len();
                file.read_f32(&scales.name, blocks, &mut of_blocks)?;
                let mut values = vec![0.0; codes.len()];
                code.decode(&codes, &of_blocks, &mut values);
                bytes.copy_from_slice(&bytes_in(dtype, &values));
                Ok::<(), WeightError>(())
            },
        );
        match decoded {
            Err(error) => Err(error.to_string()),
            Ok(decoded) => decoded.map_err(|error| error.to_string()),
        }
    }

    /// The file's tensor of that name, which has to have that shape.
    fn named(&self, name: &str, shape: &[usize]) -> Result<&'a Tensor, String> {
        let saved = self.file.get(name);
        let saved = saved.ok_or_else(|| format!("it has no tensor `{name}`"))?;
        if saved.shape == shape {
            return Ok(saved);
        }
        Err(format!(
            "`{name}` is {:?}, the model's is {shape:?}",
            saved.shape
        ))
    }
}

/// Ranges of elements whose fp32 numbers are one piece, cut between blocks.
fn pieces(elements: usize) -> impl Iterator<Item = Range<usize>> {
    const STEP: usize = PIECE_BYTES / size_of::<f32>();
    const { assert!(STEP.is_multiple_of(MomentFormat::BLOCK)) };
    (0..elements)
        .step_by(STEP)
        .map(move |first| first..elements.min(first + STEP))
}

fn part(place: Placement, first: usize, bytes: usize) -> Placement {
    Placement {
        offset: place.offset + first as u64,
        bytes: bytes as u64,
        ..place
    }
}
