//! Everything that is planned for one configuration: the training step, and evaluation in the
//! same arena.

use cinch_config::Config;
use cinch_graph::{Graph, Target, TrainingGraph};
use cinch_plan::{Breakdown, Options, Plan};

use crate::graph::{check_cut, differentiated, evaluation_graph, options, recomputed};
use crate::{StepError, StepTarget};

/// A planned configuration.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// What is run: the configuration with its final micro batch and accumulation.
    pub config: Config,
    pub training: TrainingGraph,
    pub plan: Plan,
    /// The same model without dropout and gradients.
    pub evaluation: Graph,
    pub evaluation_plan: Plan,
}

impl StepPlan {
    /// Plans `config` with the first `blocks` blocks recomputed, whatever it takes.
    pub fn new(
        config: &Config,
        machine: impl Into<StepTarget>,
        blocks: usize,
    ) -> Result<Self, StepError> {
        let machine = machine.into();
        let training = recomputed(&differentiated(config, machine.target)?, config, blocks)?;
        let evaluation = evaluation_graph(config, machine.target)?;
        Self::of(config, machine, training, evaluation)
    }

    /// Plans a step of these graphs, whatever made them.
    pub fn of(
        config: &Config,
        machine: impl Into<StepTarget>,
        training: TrainingGraph,
        evaluation: Graph,
    ) -> Result<Self, StepError> {
        let machine = machine.into();
        check_cut(&training, config)?;
        training.check_sizes()?;
        let plan = Plan::new(&training, options(config, machine));
        plan.check_sizes(&training)?;
        evaluation.check_sizes()?;
        let evaluation_plan = plan.sharing(&training, &evaluation)?;
        evaluation_plan.check_sizes(&evaluation)?;
        Ok(Self {
            config: config.clone(),
            training,
            plan,
            evaluation,
            evaluation_plan,
        })
    }

    /// What is allocated: room for training and, in turn, for evaluation.
    pub fn arena_bytes(&self) -> u64 {
        self.plan.arena_bytes.max(self.evaluation_plan.arena_bytes)
    }

    /// The arena and what lies outside it.
    pub fn total_bytes(&self) -> u64 {
        self.arena_bytes().saturating_add(self.overhead_bytes())
    }

    /// What lies outside the arena.
    pub fn overhead_bytes(&self) -> u64 {
        beside_arena(self.plan.options, self.plan.host_bytes)
    }

    /// Bytes by purpose; they add up to [`Self::total_bytes`].
    pub fn breakdown(&self) -> Breakdown {
        let mut breakdown = self.plan.breakdown(&self.training);
        breakdown.overhead = self.overhead_bytes();
        breakdown.activations += self.arena_bytes() - self.plan.arena_bytes;
        breakdown
    }

    /// Operations of one optimizer step as it runs, recomputation included.
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

/// What lies outside the arena. On the CPU offloaded states are a second allocation in the same
/// memory, so they count here; a GPU is rid of them.
pub fn beside_arena(options: Options, host_bytes: u64) -> u64 {
    let beside = match options.target {
        Target::Cpu => host_bytes,
        Target::Cuda => 0,
    };
    options.overhead_bytes.saturating_add(beside)
}
