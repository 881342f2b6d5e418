//! Everything that is planned for one configuration: the graphs that it is trained by, and
//! evaluation, all in one arena.

use std::ops::Deref;

use cinch_config::Config;
use cinch_graph::{Graph, Parameter, Target, TrainingGraph};
use cinch_model::{TrainingPhase, phases};
use cinch_plan::{Breakdown, Options, Plan};

use crate::graph::{
    VariantForm, check_cut, differentiated, embedding_graph, evaluation_graph, options, recomputed,
};
use crate::recorded::{self, recorded_bytes, training_launches, whole_launches};
use crate::{SamplePlan, StepError, StepTarget, variant_forms};

/// A planned configuration.
///
/// It dereferences to the variant that takes the most memory, which is all of it where a model
/// does not change and rows have one length. Weights, gradients and states are the same tensors in
/// the same places whichever variant is asked about them.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// What is run: the configuration with its final micro batch and accumulation.
    pub config: Config,
    /// What a micro batch may run, never none. Their transient memory overlaps.
    variants: Vec<Variant>,
    /// Which of them takes the most.
    largest: usize,
    /// Where the run asks for embeddings between steps.
    embedding: Option<EmbeddingPlan>,
    recorded_bytes: u64,
    /// Where the run writes texts between steps.
    sample: Option<SamplePlan>,
}

/// The model as it is, from texts to embeddings, in the arena of the step.
#[derive(Clone, Debug)]
pub struct EmbeddingPlan {
    pub graph: Graph,
    pub plan: Plan,
    /// Texts of a run.
    pub texts: usize,
}

/// One of the graphs that a model is trained by, with its plan.
#[derive(Clone, Debug)]
pub struct Variant {
    pub phase: TrainingPhase,
    /// Tokens of a row.
    pub seq_len: usize,
    pub training: TrainingGraph,
    pub plan: Plan,
    /// The same model without dropout and gradients.
    pub evaluation: Graph,
    pub evaluation_plan: Plan,
}

/// A variant before it is planned.
#[derive(Clone, Debug)]
pub struct VariantGraphs {
    pub phase: TrainingPhase,
    pub seq_len: usize,
    pub training: TrainingGraph,
    pub evaluation: Graph,
}

impl VariantGraphs {
    /// Those of a configuration, with the first `blocks` blocks recomputed.
    fn new(
        config: &Config,
        form: VariantForm,
        phase: TrainingPhase,
        target: Target,
        blocks: usize,
    ) -> Result<Self, StepError> {
        let whole = differentiated(config, form, target)?;
        // A phase may have fewer blocks than the largest: then it recomputes all that it has.
        let blocks = match form.phase {
            0 if phases(&config.model).len() == 1 => blocks,
            _ => blocks.min(whole.blocks.len()),
        };
        let training = recomputed(&whole, config, blocks)?;
        training.check_sizes()?;
        let evaluation = evaluation_graph(config, form, target)?;
        evaluation.check_sizes()?;
        Ok(Self {
            phase,
            seq_len: form.seq_len,
            training,
            evaluation,
        })
    }

    /// Whether the optimizer finds here what it finds in another variant. Shapes are compared
    /// where places are shared.
    fn trains_like(&self, other: &Self) -> bool {
        let parameters = [self, other].map(|variant| {
            let graph: &Graph = &variant.training;
            let of = |parameter: &Parameter| {
                let kept = parameter.gradient.into_iter().chain(parameter.states());
                let names = std::iter::once(parameter.master).chain(kept);
                let names: Vec<String> = names.map(|id| graph.tensor(id).name.clone()).collect();
                (names, parameter.storage)
            };
            graph.parameters.iter().map(of).collect::<Vec<_>>()
        });
        let [here, there] = parameters;
        here == there
    }
}

impl StepPlan {
    /// Plans `config` with the first `blocks` blocks recomputed, whatever it takes.
    pub fn new(
        config: &Config,
        machine: impl Into<StepTarget>,
        blocks: usize,
    ) -> Result<Self, StepError> {
        let machine = machine.into();
        let phases = phases(&config.model);
        let graphs = variant_forms(config).into_iter().map(|form| {
            let phase = phases[form.phase].clone();
            VariantGraphs::new(config, form, phase, machine.target, blocks)
        });
        let graphs = graphs.collect::<Result<_, _>>()?;
        let embedding = embedding_graph(config)?;
        Self::with_embedding(config, graphs, embedding, options(config, machine))
    }

    /// Plans graphs that train the same parameters.
    pub fn of_graphs(
        config: &Config,
        graphs: Vec<VariantGraphs>,
        options: Options,
    ) -> Result<Self, StepError> {
        Self::with_embedding(config, graphs, None, options)
    }

    fn with_embedding(
        config: &Config,
        graphs: Vec<VariantGraphs>,
        embedding: Option<(Graph, usize)>,
        options: Options,
    ) -> Result<Self, StepError> {
        let Some(first) = graphs.first() else {
            return Err(StepError::NoVariant);
        };
        if let Some(other) = graphs.iter().find(|other| !other.trains_like(first)) {
            let phases = [first, other].map(|variant| variant.phase.name.to_string());
            return Err(StepError::OtherParameters { phases });
        }
        for variant in &graphs {
            check_cut(&variant.training, config)?;
        }
        let accumulation = config.batch.accumulation;
        let trained = graphs.iter();
        let trained = trained.map(|variant| training_launches(&variant.training, accumulation));
        let others = graphs.iter().map(|variant| &variant.evaluation);
        let others = others.chain(embedding.iter().map(|(graph, _)| graph));
        let launches = recorded::sum(trained.chain(others.map(whole_launches)));
        let recorded_bytes = recorded_bytes(options.target, launches);
        let sample = SamplePlan::of(config)?;
        let beside = recorded_bytes.saturating_add(sample_bytes(sample, options.target));
        let options = Options {
            overhead_bytes: options.overhead_bytes.saturating_add(beside),
            ..options
        };
        let training = graphs.iter().map(|variant| -> &Graph { &variant.training });
        let evaluation = graphs.iter().map(|variant| &variant.evaluation);
        let embedded = embedding.iter().map(|(graph, _)| graph);
        let all: Vec<&Graph> = training.chain(evaluation).chain(embedded).collect();
        let plans = Plan::several(&all, options)?;
        for (graph, plan) in all.iter().zip(&plans) {
            plan.check_sizes(graph)?;
        }
        let mut plans = plans.into_iter();
        let training: Vec<Plan> = plans.by_ref().take(graphs.len()).collect();
        let evaluation: Vec<Plan> = plans.by_ref().take(graphs.len()).collect();
        let embedding = embedding.zip(plans.next());
        let variants: Vec<Variant> = graphs
            .into_iter()
            .zip(training)
            .zip(evaluation)
            .map(|((graphs, plan), evaluation_plan)| Variant {
                phase: graphs.phase,
                seq_len: graphs.seq_len,
                training: graphs.training,
                plan,
                evaluation: graphs.evaluation,
                evaluation_plan,
            })
            .collect();
        let sizes = variants.iter().map(|variant| variant.plan.arena_bytes);
        // The first of those that take the same.
        let largest = sizes.enumerate().rev().max_by_key(|&(_, bytes)| bytes);
        Ok(Self {
            config: config.clone(),
            largest: largest.map_or(0, |(index, _)| index),
            variants,
            embedding: embedding.map(|((graph, texts), plan)| EmbeddingPlan { graph, plan, texts }),
            recorded_bytes,
            sample,
        })
    }

    pub fn variants(&self) -> &[Variant] {
        &self.variants
    }

    /// Says when a phase begins, where that follows from the data.
    pub fn begin_phase(&mut self, name: &str, first_step: u64) {
        for variant in &mut self.variants {
            if variant.phase.name == name {
                variant.phase.first_step = first_step;
            }
        }
    }

    /// What texts become, where the step has a graph for it.
    pub fn embedding(&self) -> Option<&EmbeddingPlan> {
        self.embedding.as_ref()
    }

    /// The variant with the longest rows, by which a batch is laid out.
    pub fn longest(&self) -> &Variant {
        let longest = self.variants.iter().max_by_key(|variant| variant.seq_len);
        longest.unwrap_or(self)
    }

    /// Whether this is the variant that takes the most.
    pub fn is_largest(&self, variant: usize) -> bool {
        variant == self.largest
    }

    /// The variant that a micro batch of a step runs, whose longest row has so many tokens: the
    /// shortest that holds it, of the phase that the step is in. Steps count from 0.
    pub fn variant_of(&self, step: u64, row_len: usize) -> usize {
        let begun = self.variants.iter().map(|variant| variant.phase.first_step);
        let phase = begun.filter(|&first| first <= step).max().unwrap_or(0);
        let in_phase = self.variants.iter().enumerate();
        let in_phase = in_phase.filter(|(_, variant)| variant.phase.first_step == phase);
        // None holds a row whose length is not known; the longest is for it.
        let fit = in_phase.min_by_key(|(_, variant)| {
            let too_short = variant.seq_len < row_len;
            let length = variant.seq_len;
            (
                too_short,
                if too_short {
                    usize::MAX - length
                } else {
                    length
                },
            )
        });
        fit.map_or(self.largest, |(index, _)| index)
    }

    /// What is allocated: room for every variant and, in turn, for evaluation.
    pub fn arena_bytes(&self) -> u64 {
        let plans = self.variants.iter();
        let plans = plans.flat_map(|variant| [&variant.plan, &variant.evaluation_plan]);
        let plans = plans.chain(self.embedding.iter().map(|embedding| &embedding.plan));
        plans.map(|plan| plan.arena_bytes).max().unwrap_or(0)
    }

    /// The most that is in use inside the arena at once.
    pub fn peak_bytes(&self) -> u64 {
        let plans = self.variants.iter();
        let plans = plans.flat_map(|variant| [&variant.plan, &variant.evaluation_plan]);
        let plans = plans.chain(self.embedding.iter().map(|embedding| &embedding.plan));
        plans.map(|plan| plan.peak_bytes).max().unwrap_or(0)
    }

    /// The arena and what lies outside it.
    pub fn total_bytes(&self) -> u64 {
        self.arena_bytes().saturating_add(self.overhead_bytes())
    }

    /// What lies outside the arena.
    pub fn overhead_bytes(&self) -> u64 {
        beside_arena(self.plan.options, self.plan.host_bytes)
    }

    /// What recorded steps take of that.
    pub fn recorded_bytes(&self) -> u64 {
        self.recorded_bytes
    }

    /// The texts that the run writes between steps, where it does.
    pub fn sample(&self) -> Option<SamplePlan> {
        self.sample
    }

    /// Bytes by purpose; they add up to [`Self::total_bytes`].
    pub fn breakdown(&self) -> Breakdown {
        let mut breakdown = self.plan.breakdown(&self.training);
        breakdown.overhead = self.overhead_bytes().saturating_sub(breakdown.network);
        breakdown.activations += self.arena_bytes() - self.plan.arena_bytes;
        breakdown
    }

    /// Operations of one optimizer step as it runs, recomputation included; of a step whose micro
    /// batches are all of the largest variant.
    pub fn step_flops(&self) -> u128 {
        let micro = self.training.micro_flops();
        micro * self.config.batch.accumulation as u128 + self.training.update_flops()
    }

    /// Operations of one optimizer step that the result needs.
    pub fn useful_flops(&self) -> u128 {
        let micro = self.training.useful_flops();
        micro * self.config.batch.accumulation as u128 + self.training.update_flops()
    }
}

impl Deref for StepPlan {
    type Target = Variant;

    fn deref(&self) -> &Variant {
        &self.variants[self.largest]
    }
}

impl Variant {
    /// What tells it from the others of a step.
    pub fn name(&self) -> String {
        format!("{}, {} tokens", self.phase.name, self.seq_len)
    }
}

/// What texts between steps take of the memory that a step is in: that of the CPU.
pub fn sample_bytes(sample: Option<SamplePlan>, target: Target) -> u64 {
    match target {
        Target::Cpu => sample.map_or(0, |sample| sample.host_bytes),
        Target::Cuda => 0,
    }
}

/// What lies outside the arena. On the CPU offloaded states are a second allocation in the same
/// memory, so they count here; a GPU is rid of them.
pub fn beside_arena(options: Options, host_bytes: u64) -> u64 {
    let beside = match options.target {
        Target::Cpu => host_bytes,
        Target::Cuda => 0,
    };
    let outside = options.overhead_bytes.saturating_add(beside);
    outside.saturating_add(options.network_bytes)
}
