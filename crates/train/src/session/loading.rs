//! Where the numbers of a session come from: a seed, a model's files, adapters, a checkpoint.

use std::convert::Infallible;
use std::ops::Range;
use std::path::Path;

use cinch_data::Progress;
use cinch_engine::Engine;
use cinch_graph::op::LossScale;
use cinch_graph::{DType, Graph, Parameter};
use cinch_weights::{Adapter, PIECE_BYTES, WeightFiles};

use super::{Session, placement, saved_type, type_name};
use crate::checkpoint::Dtype;
use crate::error::TrainError;
use crate::initialize::initialize;
use crate::kept::{self, Kept};
use crate::moments::load_states;
use crate::pretrained;

impl Session {
    /// Initial weights from a seed; moments are zero.
    pub fn initialize(&mut self, seed: u64) -> Result<(), TrainError> {
        self.initialize_where(seed, &|_| true)
    }

    /// As [`Self::initialize`], only the weights that `which` picks.
    fn initialize_where(
        &mut self,
        seed: u64,
        which: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), TrainError> {
        let graph = &self.step.training;
        for parameter in &graph.parameters {
            let tensor = graph.tensor(parameter.master);
            let (width, init) = (parameter.shape.width(), parameter.init);
            let mut numbers = |first: usize, values: &mut [f32]| {
                initialize(values, first, width, init, &tensor.name, seed);
            };
            if !which(parameter) {
                // Its weights come from elsewhere.
            } else if tensor.ty.dtype == DType::F32 {
                let own = kept::elements(parameter, self.share.rank);
                let place = placement(&self.step.plan, parameter.master);
                let Ok(()) = self
                    .engine
                    .write_pieces(place, 1, PIECE_BYTES, |first, values| {
                        let within = own.len().saturating_sub(first).min(values.len());
                        let (own_values, beyond) = values.split_at_mut(within);
                        numbers(own.start + first, own_values);
                        beyond.fill(0.0);
                        Ok::<(), Infallible>(())
                    })?;
            } else {
                let rank = self.share.rank;
                let (step, engine) = (&self.step, &mut self.engine);
                pretrained::write_numbers(step, engine, (parameter, rank), &mut numbers)?;
            }
            // Zero in either format.
            for id in parameter.states() {
                kept::clear(&mut self.engine, placement(&self.step.plan, id))?;
            }
        }
        if let Some(place) = self.loss_scale {
            self.engine.write(place, &LossScale::START.values())?;
        }
        Ok(self.engine.refresh(graph, &self.step.plan)?)
    }

    /// As [`Self::initialize`], with weights from a model's files: all of them, or where some are
    /// frozen, those and the modules that are trained whole beside adapters.
    pub fn load_pretrained(
        &mut self,
        files: &WeightFiles,
        seed: u64,
        progress: &dyn Progress,
    ) -> Result<(), TrainError> {
        let begins_anew = pretrained::begins_anew(&self.step)?;
        self.initialize_where(seed, &begins_anew)?;
        let (step, engine) = (&self.step, (&mut self.engine, self.share.rank));
        pretrained::load(step, engine, files, |p| !begins_anew(p), progress)?;
        Ok(self.engine.refresh(&self.step.training, &self.step.plan)?)
    }

    /// Fills the adapters from a folder in peft's format, which has just those of this model.
    pub fn load_adapter(&mut self, folder: &Path) -> Result<(), TrainError> {
        let adapter = Adapter::open(folder)?;
        let engine = (&mut self.engine, self.share.rank);
        pretrained::load_adapter(&self.step, engine, &adapter)?;
        Ok(self.engine.refresh(&self.step.training, &self.step.plan)?)
    }

    /// Fills what is not trained from a model's files.
    pub fn load_frozen(
        &mut self,
        files: &WeightFiles,
        progress: &dyn Progress,
    ) -> Result<(), TrainError> {
        let (step, engine) = (&self.step, (&mut self.engine, self.share.rank));
        pretrained::load(step, engine, files, |p| !p.is_trained(), progress)
    }

    /// Copies weights and states from a checkpoint's files, which must hold just those of this
    /// model. Weights and states in another type are converted, which the note that is returned
    /// says.
    pub fn load(
        &mut self,
        weights: &WeightFiles,
        states: &WeightFiles,
    ) -> Result<Option<String>, String> {
        let kept = self.load_weights(weights)?;
        let expected: usize = self.trained().map(|parameter| parameter.parts.len()).sum();
        if weights.tensors().len() != expected {
            return Err(format!(
                "it has {} tensors, the model {expected}",
                weights.tensors().len()
            ));
        }
        let converted = load_states(&self.step, &mut self.engine, self.share.rank, states)?;
        self.load_loss_scale(states)?;
        self.refresh()?;
        let notes: Vec<String> = kept.into_iter().chain(converted).collect();
        Ok((!notes.is_empty()).then(|| notes.join("; ")))
    }

    /// A run in another precision has left no scale: then it starts anew.
    fn load_loss_scale(&mut self, states: &WeightFiles) -> Result<(), String> {
        let (Some(id), Some(place)) = (self.step.training.loss_scale, self.loss_scale) else {
            return Ok(());
        };
        if states.get(&self.step.training.tensor(id).name).is_some() {
            let kept = kept::whole(&self.step.training, &self.step.plan, id);
            return copy_kept(&mut self.engine, &kept, states);
        }
        self.engine
            .write(place, &LossScale::START.values())
            .map_err(|error| error.to_string())
    }

    /// Copies what is trained from a file that may hold other tensors as well.
    pub fn load_by_name(&mut self, weights: &WeightFiles) -> Result<(), String> {
        self.load_weights(weights)?;
        self.refresh()
    }

    /// What is trained, and a note where it was saved in another type.
    fn load_weights(&mut self, weights: &WeightFiles) -> Result<Option<String>, String> {
        let graph: &Graph = &self.step.training;
        let mut converted = None;
        for parameter in graph.parameters.iter().filter(|p| p.is_trained()) {
            let dtype = saved_type(graph.ty(parameter.master).dtype);
            if parameter.shard.is_some() {
                let place = placement(&self.step.plan, parameter.master);
                kept::clear(&mut self.engine, place).map_err(|error| error.to_string())?;
            }
            for kept in kept::weights(graph, &self.step.plan, parameter, self.share.rank) {
                copy_kept(&mut self.engine, &kept, weights)?;
            }
            let saved = parameter
                .parts
                .first()
                .and_then(|part| weights.get(&part.name));
            if let Some(saved) = saved.filter(|saved| saved.dtype != dtype) {
                converted.get_or_insert((saved.dtype, dtype));
            }
        }
        Ok(converted.map(|(saved, now)| {
            let (saved, now) = (type_name(saved), type_name(now));
            format!("the checkpoint's weights were {saved}: they go on in {now}")
        }))
    }

    fn refresh(&mut self) -> Result<(), String> {
        let (graph, plan) = (&self.step.training, &self.step.plan);
        self.engine
            .refresh(graph, plan)
            .map_err(|error| error.to_string())
    }
}

/// Copies what a rank keeps of a tensor from a file.
pub(crate) fn copy_kept(
    engine: &mut Engine,
    kept: &Kept<'_>,
    file: &WeightFiles,
) -> Result<(), String> {
    let (name, dtype) = (kept.name, saved_type(kept.dtype));
    let Some(saved) = file.get(name) else {
        return Err(format!("it has no tensor `{name}`"));
    };
    let is_float = |dtype| matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
    let converts = is_float(saved.dtype) && is_float(dtype);
    if saved.shape != kept.shape || !(saved.dtype == dtype || converts) {
        return Err(format!(
            "`{name}` is {:?} {:?}, the model's is {dtype:?} {:?}",
            saved.dtype, saved.shape, kept.shape
        ));
    }
    let read = |elements: Range<usize>, bytes: &mut [u8]| {
        file.read_elements_as(name, elements, dtype, bytes)
    };
    match kept.fill(engine, read) {
        Err(error) => Err(error.to_string()),
        Ok(read) => read.map_err(|error| error.to_string()),
    }
}
