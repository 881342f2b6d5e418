//! Optimizer states on the way from a checkpoint: as they were saved, or converted where the run
//! now keeps them in the other format.
//!
//! In the same format a run goes on bit by bit. To a coarser one each moment is rounded once, as
//! after any step; from eight bits to fp32 nothing is lost.

use cinch_engine::Engine;
use cinch_engine::cpu::kernel::eight_bit::Code;
use cinch_graph::{Graph, TensorId};
use cinch_step::StepPlan;
use cinch_weights::Tensor;

use crate::checkpoint::{Dtype, WeightFiles};
use crate::pretrained::bytes_in;
use crate::session::{copy_tensor, placement, saved_type, type_name};

/// Fills all moments from `file`; says so where some were converted.
pub(crate) fn load_states(
    step: &StepPlan,
    engine: &mut Engine,
    file: &WeightFiles,
) -> Result<Option<String>, String> {
    let graph: &Graph = &step.training;
    let mut states = States { step, engine, file };
    let mut converted = None;
    for parameter in &graph.parameters {
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
}

impl<'a> States<'a> {
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
        let values = self.floats(saved)?;
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
        let mut codes = vec![0; saved.num_bytes() as usize];
        self.file
            .read(name, 0..saved.rows(), &mut codes)
            .map_err(|error| error.to_string())?;
        let scales = format!("{name}.scales");
        let blocks = codes.len().div_ceil(cinch_graph::op::MomentFormat::BLOCK);
        let scales = self.named(&scales, &[blocks])?;
        let scales = self.floats(scales)?;
        let mut values = vec![0.0; codes.len()];
        code.decode(&codes, &scales, &mut values);
        let place = placement(&self.step.plan, moment);
        self.engine
            .write(place, &bytes_in(ty.dtype, &values))
            .and_then(|()| self.engine.synchronize())
            .map_err(|error| error.to_string())
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

    fn floats(&self, saved: &Tensor) -> Result<Vec<f32>, String> {
        let mut values = vec![0.0; saved.num_elements()];
        self.file
            .read_f32(&saved.name, 0..saved.rows(), &mut values)
            .map_err(|error| error.to_string())?;
        Ok(values)
    }
}
