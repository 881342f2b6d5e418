//! The model in its arena: initial or loaded weights, one step, one evaluation.

use std::time::{Duration, Instant};

use cinch_engine::{Arena, Executor};
use cinch_fit::StepPlan;
use cinch_graph::op::IGNORE_INDEX;
use cinch_graph::{Graph, Parameter, Role, TensorId};
use cinch_model::input;
use cinch_plan::{Placement, Plan, num_micro_nodes};

use crate::checkpoint::{Dtype, TensorFile, TensorView};
use crate::error::TrainError;
use crate::initialize::{initialize, mix};
use crate::schedule::learning_rate;

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

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean over the effective batch.
    pub loss: f64,
    /// Before clipping.
    pub gradient_norm: f64,
    pub learning_rate: f64,
}

/// A planned model with its weights, gradients and states.
pub struct Session {
    step: StepPlan,
    executor: Executor,
    /// Where the loop reads and writes.
    tokens: Placement,
    targets: Placement,
    random: Option<Placement>,
    inverse_count: Placement,
    step_scalars: Placement,
    loss: Placement,
    gradient_norm: Placement,
    micro_nodes: usize,
}

impl Session {
    /// Allocates the arena. Weights are zero until [`Self::initialize`] or [`Self::load`].
    pub fn new(step: StepPlan, threads: Option<usize>) -> Result<Self, TrainError> {
        let executor = Executor::new(step.arena_bytes(), threads)?;
        let graph = &step.training;
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
            micro_nodes: num_micro_nodes(graph),
            executor,
            step,
        })
    }

    pub fn plan(&self) -> &StepPlan {
        &self.step
    }

    pub fn num_threads(&self) -> usize {
        self.executor.num_threads()
    }

    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    pub fn arena(&self) -> &Arena {
        self.executor.arena()
    }

    /// Initial weights from a seed; moments are zero.
    pub fn initialize(&mut self, seed: u64) {
        let graph = &self.step.training;
        for parameter in &graph.parameters {
            let tensor = graph.tensor(parameter.master);
            let place = placement(&self.step.plan, parameter.master);
            let values = self.executor.arena_mut().write::<f32>(place);
            initialize(
                values,
                tensor.ty.width(),
                parameter.init,
                &tensor.name,
                seed,
            );
            for id in parameter.moments.into_iter().flatten() {
                let place = placement(&self.step.plan, id);
                self.executor.arena_mut().write::<f32>(place).fill(0.0);
            }
        }
    }

    /// One optimizer step over an effective batch. `step` counts from 0; it gives the
    /// learning rate, Adam's bias corrections and the dropout masks.
    pub fn train_step(&mut self, batch: &Batch, step: u64) -> Result<StepResult, TrainError> {
        self.train_step_observed(batch, step, &mut |_, _| {})
    }

    /// As [`Self::train_step`], telling how long each node took, by the name of its op.
    pub fn train_step_traced(
        &mut self,
        batch: &Batch,
        step: u64,
        told: &mut (dyn FnMut(&'static str, Duration) + Send),
    ) -> Result<StepResult, TrainError> {
        let names: Vec<&'static str> = self
            .step
            .training
            .nodes
            .iter()
            .map(|node| node.op.name())
            .collect();
        let mut since = Instant::now();
        self.train_step_observed(batch, step, &mut |_, node| {
            told(names[node], since.elapsed());
            since = Instant::now();
        })
    }

    /// As [`Self::train_step`], calling `after(arena, node)` when a node is done.
    pub fn train_step_observed(
        &mut self,
        batch: &Batch,
        step: u64,
        after: &mut (dyn FnMut(&mut Arena, usize) + Send),
    ) -> Result<StepResult, TrainError> {
        let learning_rate = self.accumulate_observed(batch, step, after)?;
        let nodes = self.micro_nodes..self.step.training.nodes.len();
        let (graph, plan) = (&self.step.training, &self.step.plan);
        self.executor
            .run_observed(graph, plan, nodes, false, after)?;
        let norm = self.executor.arena().read::<f32>(self.gradient_norm)[0];
        Ok(StepResult {
            loss: f64::from(self.executor.arena().read::<f32>(self.loss)[0]),
            gradient_norm: f64::from(norm),
            learning_rate,
        })
    }

    /// Everything of a step but the update; returns the learning rate the update would use.
    pub fn accumulate_gradients(&mut self, batch: &Batch, step: u64) -> Result<f64, TrainError> {
        self.accumulate_observed(batch, step, &mut |_, _| {})
    }

    fn accumulate_observed(
        &mut self,
        batch: &Batch,
        step: u64,
        after: &mut (dyn FnMut(&mut Arena, usize) + Send),
    ) -> Result<f64, TrainError> {
        let config = &self.step.config;
        let learning_rate = learning_rate(&config.training, step);
        let targets = batch.num_targets();
        if targets == 0 {
            return Err(TrainError::NoTargets { step });
        }
        let (beta1, beta2) = (config.training.adam_beta1, config.training.adam_beta2);
        let scalars = [
            learning_rate as f32,
            (1.0 - beta1.powf((step + 1) as f64)) as f32,
            (1.0 - beta2.powf((step + 1) as f64)) as f32,
        ];
        let key = mix(config.training.seed ^ mix(step));
        let micro_tokens = config.batch.batch_size * config.batch.seq_len;
        let arena = self.executor.arena_mut();
        arena
            .write::<f32>(self.step_scalars)
            .copy_from_slice(&scalars);
        arena.write::<f32>(self.inverse_count)[0] = 1.0 / targets as f32;
        for micro in 0..self.step.config.batch.accumulation {
            let rows = micro * micro_tokens..(micro + 1) * micro_tokens;
            if let Some(random) = self.random {
                let words = [key as u32, (key >> 32) as u32, rows.start as u32, 0];
                let words = words.map(u32::cast_signed);
                let arena = self.executor.arena_mut();
                arena.write::<i32>(random).copy_from_slice(&words);
            }
            self.fill(&batch.tokens[rows.clone()], &batch.targets[rows]);
            let (graph, plan) = (&self.step.training, &self.step.plan);
            self.executor
                .run_observed(graph, plan, 0..self.micro_nodes, micro == 0, after)?;
        }
        Ok(learning_rate)
    }

    /// The sum of the losses of one micro batch and the number of its targets.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<(f64, usize), TrainError> {
        let arena = self.executor.arena_mut();
        arena.write::<f32>(self.inverse_count)[0] = 1.0;
        self.fill(&batch.tokens, &batch.targets);
        let nodes = 0..self.step.evaluation.nodes.len();
        let (graph, plan) = (&self.step.evaluation, &self.step.evaluation_plan);
        self.executor.run(graph, plan, nodes, true)?;
        let loss = f64::from(self.executor.arena().read::<f32>(self.loss)[0]);
        Ok((loss, batch.num_targets()))
    }

    fn fill(&mut self, tokens: &[i32], targets: &[i32]) {
        let arena = self.executor.arena_mut();
        arena.write::<i32>(self.tokens).copy_from_slice(tokens);
        arena.write::<i32>(self.targets).copy_from_slice(targets);
    }

    /// The gradient that the last [`Self::accumulate_gradients`] left, by parameter name.
    pub fn gradients(&self) -> impl Iterator<Item = (&str, &[f32])> {
        let graph: &Graph = &self.step.training;
        graph.parameters.iter().filter_map(|parameter| {
            let place = placement(&self.step.plan, parameter.gradient?);
            let name = graph.tensor(parameter.master).name.as_str();
            Some((name, self.executor.arena().read(place)))
        })
    }

    /// The loss that the last run left.
    pub fn loss(&self) -> f64 {
        f64::from(self.executor.arena().read::<f32>(self.loss)[0])
    }

    /// Weights as they are saved.
    pub fn weights(&self) -> Vec<TensorView<'_>> {
        self.views(|parameter| vec![parameter.master])
    }

    /// Optimizer states as they are saved.
    pub fn states(&self) -> Vec<TensorView<'_>> {
        self.views(|parameter| parameter.moments.into_iter().flatten().collect())
    }

    fn views(&self, which: impl Fn(&Parameter) -> Vec<TensorId>) -> Vec<TensorView<'_>> {
        let graph: &Graph = &self.step.training;
        graph
            .parameters
            .iter()
            .flat_map(which)
            .map(|id| {
                let tensor = graph.tensor(id);
                TensorView {
                    name: &tensor.name,
                    shape: tensor.ty.shape.dims(),
                    dtype: Dtype::F32,
                    bytes: self.executor.arena().read(placement(&self.step.plan, id)),
                }
            })
            .collect()
    }

    /// Copies weights and states from a checkpoint's files, which must hold just those of this
    /// model.
    pub fn load(&mut self, weights: &TensorFile, states: &TensorFile) -> Result<(), String> {
        self.load_by_name(weights)?;
        let expected = self.step.training.parameters.len();
        if weights.num_tensors() != expected {
            return Err(format!(
                "it has {} tensors, the model {expected}",
                weights.num_tensors()
            ));
        }
        let moments = |parameter: &Parameter| parameter.moments.into_iter().flatten().collect();
        self.copy_from(states, moments)
    }

    /// Copies the weights from a file that may hold other tensors as well.
    pub fn load_by_name(&mut self, weights: &TensorFile) -> Result<(), String> {
        self.copy_from(weights, |parameter| vec![parameter.master])
    }

    fn copy_from(
        &mut self,
        file: &TensorFile,
        which: impl Fn(&Parameter) -> Vec<TensorId>,
    ) -> Result<(), String> {
        let graph: &Graph = &self.step.training;
        for id in graph.parameters.iter().flat_map(which) {
            let place = placement(&self.step.plan, id);
            copy_tensor(graph, id, file, self.executor.arena_mut().write(place))?;
        }
        Ok(())
    }
}

/// Copies a tensor of a file into the place of a graph's tensor.
pub(crate) fn copy_tensor(
    graph: &Graph,
    id: TensorId,
    file: &TensorFile,
    into: &mut [u8],
) -> Result<(), String> {
    let tensor = graph.tensor(id);
    debug_assert!(matches!(tensor.role, Role::Parameter | Role::State));
    let Some(saved) = file.get(&tensor.name) else {
        return Err(format!("it has no tensor `{}`", tensor.name));
    };
    if saved.shape != tensor.ty.shape.dims() || saved.dtype != Dtype::F32 {
        return Err(format!(
            "`{}` is {:?} {:?}, the model's is F32 {:?}",
            tensor.name,
            saved.dtype,
            saved.shape,
            tensor.ty.shape.dims()
        ));
    }
    file.read_into(&saved, into)
        .map_err(|error| format!("`{}` cannot be read: {error}", tensor.name))
}

pub(crate) fn placement(plan: &Plan, id: TensorId) -> Placement {
    plan.placement(id).unwrap_or(Placement::EMPTY)
}
