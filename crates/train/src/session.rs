//! The model in its arena: initial or loaded weights, one step, one evaluation.

mod loading;
mod prepared;
mod snapshot;

use std::ops::Range;

use cinch_config::TrainingConfig;
use cinch_engine::{Arena, Engine, EngineError, EngineOptions, Part as GraphPart, Told};
use cinch_graph::op::LossScale;
use cinch_graph::{Graph, Parameter, Role, TensorId};
use cinch_model::input;
use cinch_plan::{Placement, Plan};
use cinch_ranks::SharedWorld;
use cinch_step::StepPlan;
use smallvec::SmallVec;

use self::prepared::{BatchTensor, RandomPlace, VariantParts, batch_tensors, random_places};
use crate::batch::Batch;
use crate::error::TrainError;
use crate::initialize::mix;
use crate::kept;
use crate::pretrained;
use crate::ranks::Ranks;
use crate::schedule::learning_rate;
use crate::share::Share;
use crate::step::StepResult;
use crate::terms::{Evaluation, Terms, loss_of};
use crate::texts::write_text;

pub(crate) use loading::copy_kept;
pub use snapshot::Snapshot;
pub(crate) use snapshot::{AssembledTensor, saved_type, type_name};

/// Runs a part of the step.
type RunPart<'a> =
    dyn FnMut(&mut Engine, &Graph, &Plan, &GraphPart) -> Result<(), EngineError> + 'a;

/// A micro batch of a step, and the graph that it runs.
#[derive(Clone, Copy)]
struct Micro {
    index: usize,
    variant: usize,
}

/// A planned model with its weights, gradients and states.
pub struct Session {
    step: StepPlan,
    engine: Engine,
    /// By variant. All are made ready before the first step, so that nothing is allocated later.
    parts: Vec<VariantParts>,
    /// Where the loop reads and writes.
    batch: Vec<BatchTensor>,
    /// Rows of a micro batch without the ends that a variant has no place for.
    shortened: Vec<i32>,
    /// The random states of each variant.
    random: Vec<Vec<RandomPlace>>,
    /// The terms of the loss in training, and in evaluation, by variant.
    terms: Vec<Terms>,
    evaluated: Vec<Terms>,
    /// Of the micro batch that was trained on last.
    last_variant: usize,
    step_scalars: Placement,
    gradient_norm: Placement,
    loss_scale: Option<Placement>,
    /// What turns texts into embeddings, where the plan has it.
    embedding: Option<GraphPart>,
    /// The learning rates of the stage that runs, and its first step.
    schedule: TrainingConfig,
    schedule_start: u64,
    ranks: Ranks,
    share: Share,
}

/// A step without its update.
struct Accumulated {
    /// The variant of the last micro batch.
    last_variant: usize,
    tokens: u64,
}

/// What the ranks say before a step, added up.
struct Agreed {
    /// Nobody was told to stop.
    goes_on: bool,
    /// Tokens that the step computes.
    tokens: u64,
    /// What each term is averaged over, variant after variant.
    counts: SmallVec<[f64; 8]>,
}

impl Session {
    /// Allocates the arena. Weights are zero until [`Self::initialize`] or [`Self::load`].
    pub fn new(step: StepPlan, options: EngineOptions) -> Result<Self, TrainError> {
        Self::of_rank(step, options, Ranks::default())
    }

    /// As [`Self::new`], one of the ranks of a world, which the plan is for: every rank does the
    /// same at the same time.
    pub fn connected(
        step: StepPlan,
        options: EngineOptions,
        world: SharedWorld,
    ) -> Result<Self, TrainError> {
        Self::of_rank(step, options, Ranks::new(Some(world)))
    }

    pub(crate) fn of_rank(
        step: StepPlan,
        options: EngineOptions,
        ranks: Ranks,
    ) -> Result<Self, TrainError> {
        let graph = &step.training;
        let mut engine = Engine::with_host(
            step.plan.options.target,
            step.arena_bytes(),
            step.plan.host_bytes,
            options,
        )?;
        if let Some(world) = ranks.world() {
            engine.connect(world.clone())?;
        }
        let accumulation = step.config.batch.accumulation;
        let parts = step.variants().iter();
        let parts = parts.map(|variant| VariantParts::prepare(&mut engine, variant, accumulation));
        let parts = parts.collect::<Result<_, _>>()?;
        let embedding = step.embedding().map(|embedding| {
            let nodes = 0..embedding.graph.nodes.len();
            engine.prepare(&embedding.graph, &embedding.plan, nodes, true)
        });
        let embedding = embedding.transpose()?;
        let place = |id| placement(&step.plan, id);
        let variants = step.variants().iter();
        let random = variants.clone();
        let random = random.map(|variant| random_places(variant, &step.config.batch));
        let random = random.collect();
        let terms = variants.clone().map(|v| Terms::of(&v.training, &v.plan));
        let terms = terms.collect();
        let evaluated = variants.map(|v| Terms::of(&v.evaluation, &v.evaluation_plan));
        let evaluated = evaluated.collect();
        let batch = batch_tensors(&step);
        let longest = batch.iter().map(|tensor| tensor.place.bytes).max();
        let longest = longest.unwrap_or(0) as usize / size_of::<i32>();
        Ok(Self {
            batch,
            shortened: Vec::with_capacity(longest),
            random,
            terms,
            evaluated,
            last_variant: 0,
            step_scalars: place(graph.step_scalars),
            gradient_norm: place(graph.gradient_norm),
            loss_scale: graph.loss_scale.map(place),
            embedding,
            schedule: step.config.training.clone(),
            schedule_start: 0,
            share: ranks.share(),
            ranks,
            engine,
            parts,
            step,
        })
    }

    pub fn plan(&self) -> &StepPlan {
        &self.step
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Begins a stage: its learning rates go from its first step to its end, and phases of the
    /// model begin where `phases` says.
    pub fn begin_stage(&mut self, (first, end): (u64, u64), phases: &[(String, u64)]) {
        for (name, first_step) in phases {
            self.step.begin_phase(name, *first_step);
        }
        let training = &self.step.config.training;
        let max_steps = end.saturating_sub(first);
        let warmup = training.warmup_of(max_steps);
        self.schedule = TrainingConfig {
            max_steps,
            // A warm-up beyond the end has no peak.
            warmup_steps: match warmup > max_steps {
                true => max_steps / 10,
                false => warmup,
            },
            ..training.clone()
        };
        self.schedule_start = first;
    }

    /// The embeddings of texts as the weights are now, one after the other: the tokens of each
    /// text's channels in the order of the model's encoders. None where the plan has no graph for
    /// it.
    pub fn embed<'t>(
        &mut self,
        channel_names: &[&str],
        lengths: &[usize],
        texts: impl IntoIterator<Item = &'t [Vec<i32>]>,
    ) -> Result<Option<Vec<f32>>, TrainError> {
        let (Some(embedding), Some(part)) = (self.step.embedding(), &self.embedding) else {
            return Ok(None);
        };
        let (graph, plan) = (&embedding.graph, &embedding.plan);
        let texts: Vec<&[Vec<i32>]> = texts.into_iter().collect();
        let mut batch = Batch::of(graph, embedding.texts, embedding.texts);
        let mut found = Vec::new();
        for texts in texts.chunks(embedding.texts.max(1)) {
            for (row, channels) in texts.iter().enumerate() {
                for ((name, ids), &length) in channel_names.iter().zip(*channels).zip(lengths) {
                    write_text(&input::chunk_of(name, 0), ids, length, (row, 0), &mut batch);
                }
            }
            for id in (0..graph.tensors.len() as u32).map(TensorId) {
                let tensor = graph.tensor(id);
                if tensor.role == Role::Batch {
                    let place = placement(plan, id);
                    self.engine.write(place, batch.get(&tensor.name))?;
                }
            }
            self.engine.run(graph, plan, part)?;
            if let Some(result) = graph.result {
                let bytes = self.engine.bytes(placement(plan, result))?;
                let values = pretrained::numbers(graph.ty(result).dtype, &bytes);
                let width = graph.ty(result).width();
                found.extend_from_slice(&values[..texts.len() * width]);
            }
        }
        Ok(Some(found))
    }

    /// The host's arena, where the session runs on the CPU.
    pub fn arena(&self) -> Option<&Arena> {
        self.engine.arena()
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
        match self.accumulate_by(batch, step, run, stop)? {
            None => Ok(None),
            Some(done) => self.update_by(step, done, run).map(Some),
        }
    }

    /// As [`Self::train_step`], telling how long each node took.
    pub fn train_step_traced(
        &mut self,
        batch: &Batch,
        step: u64,
        told: &mut Told<'_>,
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
        match self.accumulate_by(batch, step, run, &mut || false)? {
            None => Err(TrainError::NoTargets { step }),
            Some(done) => self.update_by(step, done, run),
        }
    }

    /// The end of a step: the optimizer over the gradients that were added up, as the variant of
    /// the last micro batch has it.
    fn update_by(
        &mut self,
        step: u64,
        done: Accumulated,
        run: &mut RunPart<'_>,
    ) -> Result<StepResult, TrainError> {
        let last = done.last_variant;
        let variant = &self.step.variants()[last];
        let (graph, plan) = (&variant.training, &variant.plan);
        run(&mut self.engine, graph, plan, &self.parts[last].update)?;
        let terms = self.terms[last].values(&self.engine)?;
        Ok(StepResult {
            loss: loss_of(&terms),
            terms,
            gradient_norm: f64::from(self.engine.scalar(self.gradient_norm)?),
            learning_rate: self.learning_rate(step),
            loss_scale: self.loss_scale()?,
            tokens: done.tokens,
        })
    }

    /// What all ranks bring to a step: their counts, and whether they were told to stop. One that
    /// is alone is asked again before each micro batch; several stop between steps only, where
    /// all of them do.
    fn agree(&self, batch: &Batch, step: u64, told_to_stop: bool) -> Result<Agreed, TrainError> {
        let accumulation = self.step.config.batch.accumulation;
        let mut numbers: SmallVec<[f64; 8]> = SmallVec::new();
        numbers.push(f64::from(told_to_stop));
        numbers.push(self.num_tokens(batch, step) as f64);
        for terms in &self.terms {
            numbers.extend(terms.counts(batch, accumulation).map(|count| count as f64));
        }
        self.ranks.sum(&mut numbers)?;
        Ok(Agreed {
            goes_on: numbers[0] == 0.0,
            tokens: numbers[1] as u64,
            counts: numbers.into_iter().skip(2).collect(),
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
        learning_rate(&self.schedule, step.saturating_sub(self.schedule_start))
    }

    /// What ran, once all micro batches did: `stop` is asked before.
    fn accumulate_by(
        &mut self,
        batch: &Batch,
        step: u64,
        run: &mut RunPart<'_>,
        stop: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Accumulated>, TrainError> {
        let config = &self.step.config;
        let (beta1, beta2) = (config.training.adam_beta1, config.training.adam_beta2);
        let scalars = [
            self.learning_rate(step) as f32,
            (1.0 - beta1.powf((step + 1) as f64)) as f32,
            (1.0 - beta2.powf((step + 1) as f64)) as f32,
        ];
        let key = mix(config.training.seed ^ mix(step));
        let accumulation = config.batch.accumulation;
        let told_to_stop = self.ranks.are_several() && stop();
        let agreed = self.agree(batch, step, told_to_stop)?;
        if !agreed.goes_on {
            return Ok(None);
        }
        self.engine.write(self.step_scalars, &scalars)?;
        let mut counts = &agreed.counts[..];
        for terms in &self.terms {
            let (own, others) = counts.split_at(terms.len());
            counts = others;
            if !terms.average(&mut self.engine, own)? {
                return Err(TrainError::NoTargets { step });
            }
        }
        let mut micro = self.micro(batch, step, 0);
        self.stage(batch, micro)?;
        loop {
            if !self.ranks.are_several() && stop() {
                return Ok(None);
            }
            for random in &self.random[micro.variant] {
                let first = self.share.micro(micro.index).wrapping_mul(random.rows) as u32;
                let words = [key as u32, (key >> 32) as u32, first, 0];
                self.engine
                    .write(random.place, &words.map(u32::cast_signed))?;
            }
            self.commit(batch, micro)?;
            let variant = &self.step.variants()[micro.variant];
            let part = self.parts[micro.variant]
                .micro
                .of(micro.index, accumulation);
            run(&mut self.engine, &variant.training, &variant.plan, part)?;
            self.last_variant = micro.variant;
            if micro.index + 1 >= accumulation {
                return Ok(Some(Accumulated {
                    last_variant: micro.variant,
                    tokens: agreed.tokens,
                }));
            }
            micro = self.micro(batch, step, micro.index + 1);
            self.stage(batch, micro)?;
        }
    }

    /// A micro batch of a step, in the shortest graph that holds its rows.
    fn micro(&self, batch: &Batch, step: u64, index: usize) -> Micro {
        let longest = batch.longest(self.sequences(index));
        let variant = self.step.variant_of(step, longest);
        Micro { index, variant }
    }

    /// Which of an effective batch's sequences a micro batch has.
    fn sequences(&self, micro: usize) -> Range<usize> {
        let batch_size = self.step.config.batch.batch_size;
        micro * batch_size..(micro + 1) * batch_size
    }

    /// Tokens that this rank computes in a step, padding included.
    pub fn num_tokens(&self, batch: &Batch, step: u64) -> u64 {
        let config = &self.step.config.batch;
        let micros = (0..config.accumulation).map(|index| self.micro(batch, step, index));
        let rows = micros.map(|micro| self.step.variants()[micro.variant].seq_len as u64);
        rows.sum::<u64>() * config.batch_size as u64
    }

    /// Sets the weight of a term of the loss from the next step on; whether there is such a term.
    /// Nothing is prepared anew: weights are read from memory.
    pub fn weigh_term(&mut self, name: &str, weight: f64) -> bool {
        let all = self.terms.iter_mut().chain(&mut self.evaluated);
        let found = all.map(|terms| terms.weigh(name, weight));
        found.filter(|&found| found).count() > 0
    }

    /// The terms of one micro batch, as sums and what they are over, by the model as it is trained
    /// at a step.
    pub fn evaluate_at(&mut self, batch: &Batch, step: u64) -> Result<Evaluation, TrainError> {
        let micro = self.micro(batch, step, 0);
        self.evaluated[micro.variant].add_up(&mut self.engine)?;
        self.stage(batch, micro)?;
        self.commit(batch, micro)?;
        let variant = &self.step.variants()[micro.variant];
        let (graph, plan) = (&variant.evaluation, &variant.evaluation_plan);
        let part = &self.parts[micro.variant].evaluation;
        self.engine.run(graph, plan, part)?;
        self.evaluated[micro.variant].sums(&self.engine, batch)
    }

    /// As [`Self::evaluate_at`], by the model as training leaves it.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, TrainError> {
        self.evaluate_at(batch, u64::MAX)
    }

    /// Starts sending a micro batch.
    fn stage(&mut self, batch: &Batch, micro: Micro) -> Result<(), TrainError> {
        self.send(batch, micro, &mut |engine, place, values| {
            engine.stage(place, values)
        })
    }

    /// Puts the micro batch that was staged in its place.
    fn commit(&mut self, batch: &Batch, micro: Micro) -> Result<(), TrainError> {
        self.send(batch, micro, &mut |engine, place, values| {
            engine.commit(place, values)
        })
    }

    fn send(
        &mut self,
        batch: &Batch,
        micro: Micro,
        send: &mut SendNumbers<'_>,
    ) -> Result<(), TrainError> {
        let sequences = self.sequences(micro.index);
        for tensor in &self.batch {
            let width = tensor.widths[micro.variant];
            let part = batch.part(&tensor.name, sequences.clone(), width, &mut self.shortened);
            let part = part.ok_or_else(|| TrainError::BatchTensor {
                name: tensor.name.clone(),
                needed: sequences.end * width,
                found: batch.get(&tensor.name).len(),
            })?;
            send(&mut self.engine, tensor.place, part)?;
        }
        Ok(())
    }

    /// The gradient that the last [`Self::accumulate_gradients`] left, by the names that files
    /// have for the rows of a parameter.
    pub fn gradients(&self) -> Result<Vec<(&str, Vec<f32>)>, TrainError> {
        let graph: &Graph = &self.step.training;
        let scale = self.loss_scale()?.map_or(1.0, |state| state.scale);
        let mut gradients = Vec::new();
        for parameter in &graph.parameters {
            if let Some(id) = parameter.gradient {
                let bytes = self.engine.bytes(placement(&self.step.plan, id))?;
                let mut values = pretrained::numbers(graph.ty(id).dtype, &bytes);
                values.iter_mut().for_each(|value| *value /= scale);
                let mut values = values.into_iter();
                for kept in kept::weights(graph, &self.step.plan, parameter, self.share.rank) {
                    let own = values.by_ref().take(kept.elements.len());
                    gradients.push((kept.name, own.collect()));
                }
            }
        }
        Ok(gradients)
    }

    /// The loss that the last step left.
    pub fn loss(&self) -> Result<f64, TrainError> {
        Ok(loss_of(
            &self.terms[self.last_variant].values(&self.engine)?,
        ))
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

    /// What is trained, as it is saved: by the names that files have for the rows of a parameter.
    pub fn weights(&self) -> Snapshot<'_> {
        let (graph, plan) = (&self.step.training, &self.step.plan);
        let rank = self.share.rank;
        let kept = self
            .trained()
            .flat_map(|parameter| kept::weights(graph, plan, parameter, rank));
        Snapshot::of(&self.engine, kept)
    }

    /// Whether ranks keep parts of what is trained, and not all of it each.
    pub fn is_cut(&self) -> bool {
        self.trained().any(|parameter| parameter.shard.is_some())
    }

    /// The parameters that are updated.
    fn trained(&self) -> impl Iterator<Item = &Parameter> {
        let parameters = self.step.training.parameters.iter();
        parameters.filter(|parameter| parameter.is_trained())
    }

    /// Optimizer states as they are saved.
    pub fn states(&self) -> Snapshot<'_> {
        let graph: &Graph = &self.step.training;
        let (plan, rank) = (&self.step.plan, self.share.rank);
        let states = graph.parameters.iter().flat_map(|parameter| {
            let states = parameter.states();
            states.map(move |id| kept::state(graph, plan, parameter, id, rank))
        });
        let scale = graph.loss_scale.map(|id| kept::whole(graph, plan, id));
        Snapshot::of(&self.engine, states.chain(scale))
    }
}

/// Puts the numbers of a batch tensor where they go.
type SendNumbers<'a> = dyn FnMut(&mut Engine, Placement, &[i32]) -> Result<(), EngineError> + 'a;

pub(crate) fn placement(plan: &Plan, id: TensorId) -> Placement {
    plan.placement(id).unwrap_or(Placement::EMPTY)
}
