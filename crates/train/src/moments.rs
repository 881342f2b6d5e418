//! Optimizer states on the way from a checkpoint: as they were saved, or converted where the run
//! now keeps them in the other format.
//!
//! In the same format a run goes on bit by bit. From fp32 to eight bits each moment is rounded
//! once, as after any step; from eight bits to fp32 nothing is lost.

use cinch_engine::Engine;
use cinch_engine::cpu::kernel::eight_bit::Code;
use cinch_graph::{Graph, TensorId};
use cinch_step::StepPlan;

use crate::checkpoint::{Dtype, SavedTensor, TensorFile};
use crate::session::{copy_tensor, placement};

/// Fills all moments from `file`; says so where some were converted.
pub(crate) fn load_states(
    step: &StepPlan,
    engine: &mut Engine,
    file: &TensorFile,
) -> Result<Option<String>, String> {
    let graph: &Graph = &step.training;
    let mut states = States { step, engine, file };
    let (mut encoded, mut decoded) = (0, 0);
    for parameter in &graph.parameters {
        let Some(moments) = parameter.moments else {
            continue;
        };
        for (index, code) in [Code::Signed, Code::Unsigned].into_iter().enumerate() {
            let (moment, scales) = (moments[index], parameter.scales.map(|s| s[index]));
            let name = &graph.tensor(moment).name;
            let saved = file.get(name).map(|saved| saved.dtype);
            match (saved, scales) {
                (Some(Dtype::F32), Some(scales)) => {
                    states.encode(code, moment, scales)?;
                    encoded += 1;
                }
                (Some(Dtype::U8), None) => {
                    states.decode(code, moment)?;
                    decoded += 1;
                }
                (_, scales) => {
                    for id in [moment].into_iter().chain(scales) {
                        states.copy(id)?;
                    }
                }
            }
        }
    }
    Ok(match (encoded, decoded) {
        (0, 0) => None,
        (0, _) => {
            Some("the checkpoint's optimizer states were 8-bit: they go on in fp32".to_owned())
        }
        _ => Some("the checkpoint's optimizer states were fp32: they go on in 8 bits".to_owned()),
    })
}

/// Where states come from and go to.
struct States<'a> {
    step: &'a StepPlan,
    engine: &'a mut Engine,
    file: &'a TensorFile,
}

impl States<'_> {
    fn copy(&mut self, id: TensorId) -> Result<(), String> {
        let graph: &Graph = &self.step.training;
        let (place, file) = (placement(&self.step.plan, id), self.file);
        self.engine
            .write_with(place, |bytes: &mut [u8]| {
                copy_tensor(graph, id, file, bytes)
            })
            .map_err(|error| error.to_string())?
    }

    fn encode(&mut self, code: Code, moment: TensorId, scales: TensorId) -> Result<(), String> {
        let graph: &Graph = &self.step.training;
        let saved = self.named(&graph.tensor(moment).name, graph.ty(moment).shape.dims())?;
        let values = self.floats(&saved)?;
        let mut codes = vec![0; values.len()];
        let mut of_blocks = vec![0.0; graph.ty(scales).shape.elements()];
        code.encode(&values, &mut codes, &mut of_blocks);
        let plan = &self.step.plan;
        self.engine
            .write(placement(plan, moment), &codes)
            .and_then(|()| self.engine.write(placement(plan, scales), &of_blocks))
            .and_then(|()| self.engine.synchronize())
            .map_err(|error| error.to_string())
    }

    fn decode(&mut self, code: Code, moment: TensorId) -> Result<(), String> {
        let graph: &Graph = &self.step.training;
        let (name, ty) = (&graph.tensor(moment).name, graph.ty(moment));
        let saved = self.named(name, ty.shape.dims())?;
        let codes = self.read(&saved)?;
        let scales = format!("{name}.scales");
        let blocks = codes.len().div_ceil(cinch_graph::op::MomentFormat::BLOCK);
        let scales = self.named(&scales, &[blocks])?;
        let scales = self.floats(&scales)?;
        let place = placement(&self.step.plan, moment);
        self.engine
            .write_with(place, |values: &mut [f32]| {
                code.decode(&codes, &scales, values)
            })
            .map_err(|error| error.to_string())
    }

    /// The file's tensor of that name, which has to have that shape.
    fn named<'f>(&self, name: &'f str, shape: &[usize]) -> Result<SavedTensor<'f>, String>
    where
        Self: 'f,
    {
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

    fn floats(&self, saved: &SavedTensor<'_>) -> Result<Vec<f32>, String> {
        if saved.dtype != Dtype::F32 {
            return Err(format!("`{}` is {:?}, not F32", saved.name, saved.dtype));
        }
        let bytes = self.read(saved)?;
        let words = bytes.as_chunks::<4>().0;
        Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
    }

    fn read(&self, saved: &SavedTensor<'_>) -> Result<Vec<u8>, String> {
        self.file
            .read(saved)
            .map_err(|error| format!("`{}` cannot be read: {error}", saved.name))
    }
}
