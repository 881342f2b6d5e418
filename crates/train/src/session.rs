//! The model in its arena: initial or loaded weights, one step, one evaluation.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use cinch_engine::{Arena, Engine, EngineError, EngineOptions, Part};
use cinch_graph::op::{IGNORE_INDEX, LossScale};
use cinch_graph::{DType, Graph, Parameter, Role, TensorId};
use cinch_model::input;
use cinch_plan::{Placement, Plan, num_micro_nodes};
use cinch_step::StepPlan;

use crate::checkpoint::{Dtype, TensorView, WeightFiles};
use crate::error::TrainError;
use crate::initialize::{initialize, mix};
use crate::moments::load_states;
use crate::schedule::learning_rate;
use crate::step::StepResult;

/// Tokens and shifted targets of one effective batch, sequence after sequence.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub tokens: Vec<i32>,
    pub targets: Vec<i32>,
}

impl Batch {
    pub fn new(sequences: usize, seq_len: usize) -> Self {
        Self {
            tokens: vec![0; sequences * seq_len],
            targets: vec![IGNORE_INDEX; sequences * seq_len],
        }
    }

    /// Targets that count.
    pub fn num_targets(&self) -> usize {
        let counted = self
            .targets
            .iter()
            .filter(|&&target| target != IGNORE_INDEX);
        counted.count()
    }
}

/// Runs a part of the step.
type RunPart<'a> = dyn FnMut(&mut Engine, &Graph, &Plan, &Part) -> Result<(), EngineError> + 'a;

/// Tensors as they are in the arena, or copies of them.
pub struct Snapshot<'a>(Vec<Saved<'a>>);

struct Saved<'a> {
    name: &'a str,
    shape: &'a [usize],
    dtype: Dtype,
    bytes: Cow<'a, [u8]>,
}

impl Snapshot<'_> {
    pub fn views(&self) -> Vec<TensorView<'_>> {
        self.0
            .iter()
            .map(|saved| TensorView {
                name: saved.name,
                shape: saved.shape,
                dtype: saved.dtype,
                bytes: &saved.bytes,
            })
            .collect()
    }
}

/// A planned model with its weights, gradients and states.
pub struct Session {
    step: StepPlan,
    engine: Engine,
    /// Forward and backward of the first micro batch of a step, and of later ones; with the
    /// updates that stand among the backward.
    micro: [Part; 2],
    update: Part,
    evaluation: Part,
    /// Where the loop reads and writes.
    tokens: Placement,
    targets: Placement,
    random: Option<Placement>,
    inverse_count: Placement,
    step_scalars: Placement,
    loss: Placement,
    gradient_norm: Placement,
    loss_scale: Option<Placement>,
}

impl Session {
    /// Allocates the arena. Weights are zero until [`Self::initialize`] or [`Self::load`].
    pub fn new(step: StepPlan, options: EngineOptions) -> Result<Self, TrainError> {
        let graph = &step.training;
        let mut engine = Engine::with_host(
            step.plan.options.target,
            step.arena_bytes(),
            step.plan.host_bytes,
            options,
        )?;
        let (micro, all) = (num_micro_nodes(graph), graph.nodes.len());
        let mut part = |nodes, first| engine.prepare(graph, &step.plan, nodes, first);
        let first = part(0..micro, true)?;
        let later = if step.config.batch.accumulation > 1 {
            part(0..micro, false)?
        } else {
            first.clone()
        };
        let (micro, update) = ([first, later], part(micro..all, false)?);
        let nodes = 0..step.evaluation.nodes.len();
        let evaluation = engine.prepare(&step.evaluation, &step.evaluation_plan, nodes, true)?;
        let place = |id| placement(&step.plan, id);
        let named = |name: &str| graph.find(name).map_or(Placement::EMPTY, place);
        Ok(Self {
            tokens: named(input::TOKENS),
            targets: named(input::TARGETS),
            random: graph.random.map(place),
            inverse_count: graph.inverse_count.map_or(Placement::EMPTY, place),
            step_scalars: place(graph.step_scalars),
            loss: graph.loss.map_or(Placement::EMPTY, place),
            gradient_norm: place(graph.gradient_norm),
            loss_scale: graph.loss_scale.map(place),
            engine,
            micro,
            update,
            evaluation,
            step,
        })
    }

    pub fn plan(&self) -> &StepPlan {
        &self.step
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The host's arena, where the session runs on the CPU.
    pub fn arena(&self) -> Option<&Arena> {
        self.engine.arena()
    }

    /// Initial weights from a seed; moments are zero.
    pub fn initialize(&mut self, seed: u64) -> Result<(), TrainError> {
        let graph = &self.step.training;
        for parameter in &graph.parameters {
            let tensor = graph.tensor(parameter.master);
            let (width, init) = (tensor.ty.width(), parameter.init);
            let place = placement(&self.step.plan, parameter.master);
            self.engine.write_with(place, |values: &mut [f32]| {
                initialize(values, width, init, &tensor.name, seed);
            })?;
            // Zero in either format.
            for id in parameter.states() {
                let place = placement(&self.step.plan, id);
                self.engine
                    .write_with(place, |bytes: &mut [u8]| bytes.fill(0))?;
            }
        }
        if let Some(place) = self.loss_scale {
            self.engine.write(place, &LossScale::START.values())?;
        }
        Ok(self.engine.refresh(graph, &self.step.plan)?)
    }

    /// One optimizer step over an effective batch. `step` counts from 0; it gives the
    /// learning rate, Adam's bias corrections and the dropout masks.
    pub fn train_step(&mut self, batch: &Batch, step: u64) -> Result<StepResult, TrainError> {
        self.train_step_by(batch, step, &mut |engine, graph, plan, part| {
            engine.run(graph, plan, part)
        })
    }

    /// As [`Self::train_step`], asking `stop` before each micro batch. None where it was told to
    /// stop: weights and optimizer states are then those of the step before, and the gradients
    /// added up so far are overwritten by the first micro batch that runs next.
    pub fn train_step_unless(
        &mut self,
        batch: &Batch,
        step: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Result<Option<StepResult>, TrainError> {
        let run: &mut RunPart<'_> = &mut |engine, graph, plan, part| engine.run(graph, plan, part);
        if !self.accumulate_by(batch, step, run, stop)? {
            return Ok(None);
        }
        self.update_by(step, run).map(Some)
    }

    /// As [`Self::train_step`], telling how long each node took, by the name of its op.
    pub fn train_step_traced(
        &mut self,
        batch: &Batch,
        step: u64,
        told: &mut (dyn FnMut(&'static str, Duration) + Send),
    ) -> Result<StepResult, TrainError> {
        self.train_step_by(batch, step, &mut |engine, graph, plan, part| {
            engine.run_traced(graph, plan, part, told)
        })
    }

    /// As [`Self::train_step`] on the CPU, calling `after(arena, node)` when a node is done.
    pub fn train_step_observed(
        &mut self,
        batch: &Batch,
        step: u64,
        after: &mut (dyn FnMut(&mut Arena, usize) + Send),
    ) -> Result<StepResult, TrainError> {
        self.train_step_by(batch, step, &mut |engine, graph, plan, part| {
            engine.run_observed(graph, plan, part, after)
        })
    }

    fn train_step_by(
        &mut self,
        batch: &Batch,
        step: u64,
        run: &mut RunPart<'_>,
    ) -> Result<StepResult, TrainError> {
        self.accumulate_by(batch, step, run, &mut || false)?;
        self.update_by(step, run)
    }

    /// The end of a step: the optimizer over the gradients that were added up.
    fn update_by(&mut self, step: u64, run: &mut RunPart<'_>) -> Result<StepResult, TrainError> {
        let (graph, plan) = (&self.step.training, &self.step.plan);
        run(&mut self.engine, graph, plan, &self.update)?;
        Ok(StepResult {
            loss: self.loss()?,
            gradient_norm: f64::from(self.engine.scalar(self.gradient_norm)?),
            learning_rate: self.learning_rate(step),
            loss_scale: self.loss_scale()?,
        })
    }

    /// Everything of a step but the update; returns the learning rate the update would use. A step
    /// that updates inside the backward has no such part.
    pub fn accumulate_gradients(&mut self, batch: &Batch, step: u64) -> Result<f64, TrainError> {
        if self.step.training.backward_passes.is_some() {
            return Err(TrainError::NoGradients);
        }
        let run: &mut RunPart<'_> = &mut |engine, graph, plan, part| engine.run(graph, plan, part);
        self.accumulate_by(batch, step, run, &mut || false)?;
        Ok(self.learning_rate(step))
    }

    fn learning_rate(&self, step: u64) -> f64 {
        learning_rate(&self.step.config.training, step)
    }

    /// Whether all micro batches ran: `stop` is asked before each.
    fn accumulate_by(
        &mut self,
        batch: &Batch,
        step: u64,
        run: &mut RunPart<'_>,
        stop: &mut dyn FnMut() -> bool,
    ) -> Result<bool, TrainError> {
        let config = &self.step.config;
        let targets = batch.num_targets();
        if targets == 0 {
            return Err(TrainError::NoTargets { step });
        }
        let (beta1, beta2) = (config.training.adam_beta1, config.training.adam_beta2);
        let scalars = [
            self.learning_rate(step) as f32,
            (1.0 - beta1.powf((step + 1) as f64)) as f32,
            (1.0 - beta2.powf((step + 1) as f64)) as f32,
        ];
        let key = mix(config.training.seed ^ mix(step));
        let micro_tokens = config.batch.batch_size * config.batch.seq_len;
        let accumulation = config.batch.accumulation;
        self.engine.write(self.step_scalars, &scalars)?;
        self.engine
            .write(self.inverse_count, &[1.0 / targets as f32])?;
        let rows_of = |micro: usize| micro * micro_tokens..(micro + 1) * micro_tokens;
        self.stage(batch, rows_of(0))?;
        for micro in 0..accumulation {
            if stop() {
                return Ok(false);
            }
            let rows = rows_of(micro);
            if let Some(random) = self.random {
                let words = [key as u32, (key >> 32) as u32, rows.start as u32, 0];
                self.engine.write(random, &words.map(u32::cast_signed))?;
            }
            self.commit(batch, rows)?;
            let part = &self.micro[usize::from(micro > 0)];
            let (graph, plan) = (&self.step.training, &self.step.plan);
            run(&mut self.engine, graph, plan, part)?;
            if micro + 1 < accumulation {
                self.stage(batch, rows_of(micro + 1))?;
            }
        }
        Ok(true)
    }

    /// The sum of the losses of one micro batch and the number of its targets.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<(f64, usize), TrainError> {
        self.engine.write(self.inverse_count, &[1.0_f32])?;
        let rows = 0..batch.tokens.len();
        self.stage(batch, rows.clone())?;
        self.commit(batch, rows)?;
        let (graph, plan) = (&self.step.evaluation, &self.step.evaluation_plan);
        self.engine.run(graph, plan, &self.evaluation)?;
        Ok((self.loss()?, batch.num_targets()))
    }

    /// Starts sending some rows of the batch.
    fn stage(&mut self, batch: &Batch, rows: Range<usize>) -> Result<(), TrainError> {
        self.engine
            .stage(self.tokens, &batch.tokens[rows.clone()])?;
        Ok(self.engine.stage(self.targets, &batch.targets[rows])?)
    }

    /// Puts the rows that were staged in their place.
    fn commit(&mut self, batch: &Batch, rows: Range<usize>) -> Result<(), TrainError> {
        self.engine
            .commit(self.tokens, &batch.tokens[rows.clone()])?;
        Ok(self.engine.commit(self.targets, &batch.targets[rows])?)
    }

    /// The gradient that the last [`Self::accumulate_gradients`] left, by parameter name.
    pub fn gradients(&self) -> Result<Vec<(&str, Vec<f32>)>, TrainError> {
        let graph: &Graph = &self.step.training;
        let scale = self.loss_scale()?.map_or(1.0, |state| state.scale);
        let mut gradients = Vec::new();
        for parameter in &graph.parameters {
            if let Some(id) = parameter.gradient {
                let bytes = self.engine.bytes(placement(&self.step.plan, id))?;
                let words = bytes.as_chunks::<4>().0;
                let values = words.iter().map(|&word| f32::from_ne_bytes(word) / scale);
                let values = values.collect();
                let name = graph.tensor(parameter.master).name.as_str();
                gradients.push((name, values));
            }
        }
        Ok(gradients)
    }

    /// The loss that the last run left.
    pub fn loss(&self) -> Result<f64, TrainError> {
        Ok(f64::from(self.engine.scalar(self.loss)?))
    }

    /// The state of loss scaling, in half precision.
    pub fn loss_scale(&self) -> Result<Option<LossScale>, TrainError> {
        let Some(place) = self.loss_scale else {
            return Ok(None);
        };
        let mut values = [0.0; LossScale::NUM_VALUES];
        let bytes = self.engine.bytes(place)?;
        for (value, &word) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *value = f32::from_ne_bytes(word);
        }
        Ok(Some(LossScale::from_values(values)))
    }

    /// Weights as they are saved.
    pub fn weights(&self) -> Result<Snapshot<'_>, TrainError> {
        let parameters = self.step.training.parameters.iter();
        self.snapshot(parameters.map(|parameter| parameter.master))
    }

    /// Optimizer states as they are saved.
    pub fn states(&self) -> Result<Snapshot<'_>, TrainError> {
        let graph: &Graph = &self.step.training;
        let states = graph.parameters.iter().flat_map(Parameter::states);
        self.snapshot(states.chain(graph.loss_scale))
    }

    fn snapshot(&self, which: impl Iterator<Item = TensorId>) -> Result<Snapshot<'_>, TrainError> {
        let graph: &Graph = &self.step.training;
        let mut tensors = Vec::new();
        for id in which {
            let tensor = graph.tensor(id);
            let bytes = self.engine.bytes(placement(&self.step.plan, id))?;
            tensors.push(Saved {
                name: &tensor.name,
                shape: tensor.ty.shape.dims(),
                dtype: saved_type(tensor.ty.dtype),
                bytes,
            });
        }
        Ok(Snapshot(tensors))
    }

    /// Copies weights and states from a checkpoint's files, which must hold just those of this
    /// model. States in another format are converted, which the note that is returned says.
    pub fn load(
        &mut self,
        weights: &WeightFiles,
        states: &WeightFiles,
    ) -> Result<Option<String>, String> {
        self.load_by_name(weights)?;
        let expected = self.step.training.parameters.len();
        if weights.tensors().len() != expected {
            return Err(format!(
                "it has {} tensors, the model {expected}",
                weights.tensors().len()
            ));
        }
        let converted = load_states(&self.step, &mut self.engine, states)?;
        self.load_loss_scale(states)?;
        self.refresh()?;
        Ok(converted)
    }

    /// A run in another precision has left no scale: then it starts anew.
    fn load_loss_scale(&mut self, states: &WeightFiles) -> Result<(), String> {
        let (Some(id), Some(place)) = (self.step.training.loss_scale, self.loss_scale) else {
            return Ok(());
        };
        if states.get(&self.step.training.tensor(id).name).is_some() {
            return self.copy_from(states, vec![id]);
        }
        self.engine
            .write(place, &LossScale::START.values())
            .map_err(|error| error.to_string())
    }

    /// Copies the weights from a file that may hold other tensors as well.
    pub fn load_by_name(&mut self, weights: &WeightFiles) -> Result<(), String> {
        let parameters = self.step.training.parameters.iter();
        self.copy_from(weights, parameters.map(|p| p.master).collect())?;
        self.refresh()
    }

    fn refresh(&mut self) -> Result<(), String> {
        let (graph, plan) = (&self.step.training, &self.step.plan);
        self.engine
            .refresh(graph, plan)
            .map_err(|error| error.to_string())
    }

    fn copy_from(&mut self, file: &WeightFiles, which: Vec<TensorId>) -> Result<(), String> {
        let graph: &Graph = &self.step.training;
        for id in which {
            let place = placement(&self.step.plan, id);
            self.engine
                .write_with(place, |bytes: &mut [u8]| {
                    copy_tensor(graph, id, file, bytes)
                })
                .map_err(|error| error.to_string())??;
        }
        Ok(())
    }
}

/// Copies a tensor of a file into the place of a graph's tensor.
pub(crate) fn copy_tensor(
    graph: &Graph,
    id: TensorId,
    file: &WeightFiles,
    into: &mut [u8],
) -> Result<(), String> {
    let tensor = graph.tensor(id);
    debug_assert!(matches!(
        tensor.role,
        Role::Parameter | Role::State | Role::LossScale
    ));
    let Some(saved) = file.get(&tensor.name) else {
        return Err(format!("it has no tensor `{}`", tensor.name));
    };
    let dtype = saved_type(tensor.ty.dtype);
    if saved.shape != tensor.ty.shape.dims() || saved.dtype != dtype {
        return Err(format!(
            "`{}` is {:?} {:?}, the model's is {dtype:?} {:?}",
            tensor.name,
            saved.dtype,
            saved.shape,
            tensor.ty.shape.dims()
        ));
    }
    file.read(&tensor.name, 0..saved.rows(), into)
        .map_err(|error| error.to_string())
}

/// The type in which a tensor is saved: what training keeps is fp32, or codes of one byte.
fn saved_type(dtype: DType) -> Dtype {
    match dtype {
        DType::U8 => Dtype::U8,
        _ => Dtype::F32,
    }
}

pub(crate) fn placement(plan: &Plan, id: TensorId) -> Placement {
    plan.placement(id).unwrap_or(Placement::EMPTY)
}
