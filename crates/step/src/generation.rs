//! A model planned to write text, token by token, and what the texts of a run take beside its step.
//!
//! The model is planned for runs of 1, 4, 16, 64 and 256 tokens, so that a prompt of any length is
//! a few runs; all of them share one arena of weights, cache and transient memory.

use cinch_architecture::Architecture;
use cinch_config::{Config, ShardedPart};
use cinch_graph::{DType, Graph, Role, Target};
use cinch_model::{AdapterShape, Build, Purpose, build, without_generation};
use cinch_plan::{Options, Plan};

use crate::StepError;

/// Runs grow by this factor, up to [`LONGEST_RUN`] tokens.
const RUN_FACTOR: usize = 4;
const LONGEST_RUN: usize = 256;

/// The graphs of a model that writes, in one arena.
#[derive(Clone, Debug)]
pub struct GenerationPlan {
    /// The most tokens in sight.
    pub context: usize,
    /// Longest first; the last reads one token.
    pub runs: Vec<GenerationRun>,
}

/// The model for one number of tokens at once.
#[derive(Clone, Debug)]
pub struct GenerationRun {
    pub length: usize,
    pub graph: Graph,
    pub plan: Plan,
}

impl GenerationPlan {
    /// For a context of so many tokens, or as many as the model has positions for.
    pub fn new(
        model: &Architecture,
        context: usize,
        compute: DType,
        adapters: Option<&AdapterShape>,
        target: Target,
    ) -> Result<Self, StepError> {
        let most = model.positions().map_or(usize::MAX, |most| most as usize);
        let context = context.clamp(1, most.max(1));
        let lengths = run_lengths(context);
        let form = |&length: &usize| -> Result<Graph, StepError> {
            let purpose = Purpose::Generate {
                context,
                longest_run: lengths[0],
            };
            let form = Build {
                adapters: adapters.cloned(),
                ..Build::plain(1, length, compute, purpose)
            };
            Ok(build(model, &form)?)
        };
        let graphs: Vec<Graph> = lengths.iter().map(form).collect::<Result<_, _>>()?;
        let plans = Plan::several(&graphs.iter().collect::<Vec<_>>(), Options::new(target))?;
        let runs = lengths.into_iter().zip(graphs).zip(plans);
        let runs: Vec<GenerationRun> = runs
            .map(|((length, graph), plan)| GenerationRun {
                length,
                graph,
                plan,
            })
            .collect();
        for run in &runs {
            run.plan.check_sizes(&run.graph)?;
        }
        Ok(Self { context, runs })
    }

    pub fn arena_bytes(&self) -> u64 {
        let arenas = self.runs.iter().map(|run| run.plan.arena_bytes);
        arenas.max().unwrap_or(0)
    }
}

/// The lengths of runs that a prompt is read in, longest first.
fn run_lengths(context: usize) -> Vec<usize> {
    let lengths = std::iter::successors(Some(1), |length| Some(length * RUN_FACTOR));
    let mut lengths: Vec<usize> = lengths
        .take_while(|&length| length <= context.min(LONGEST_RUN))
        .collect();
    lengths.reverse();
    lengths
}

/// What the texts that a run writes between its steps take of the host's memory: they are written
/// on the CPU, in single precision, in an arena that is given back afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplePlan {
    /// The most tokens in sight.
    pub context: usize,
    /// The arena, the largest weight on its way there, and all of them where ranks have parts.
    pub host_bytes: u64,
}

impl SamplePlan {
    /// For a configuration that asks for texts, of a model that writes and whose weights are all
    /// trained.
    pub fn of(config: &Config) -> Result<Option<Self>, StepError> {
        let training = &config.training;
        let writes = config.tuning.lora.is_none() && without_generation(&config.model).is_none();
        if training.sample_tokens == 0 || !writes {
            return Ok(None);
        }
        // A prompt has no more tokens than bytes, and one where it is empty.
        let prompt = training.sample_prompt.len().max(1);
        let context = prompt.saturating_add(training.sample_tokens);
        let plan = GenerationPlan::new(&config.model, context, DType::F32, None, Target::Cpu)?;
        // All runs read the same weights.
        let weights = plan.runs.iter().take(1).flat_map(|run| &run.graph.tensors);
        let weights = weights.filter(|tensor| tensor.role == Role::Parameter);
        let weights = weights.map(|tensor| tensor.ty.bytes());
        let largest = weights.clone().max().unwrap_or(0);
        // Where ranks have parts of them, they are put together before.
        let world = &config.batch.world;
        let assembled = match world.is_alone() || world.shard == ShardedPart::None {
            true => 0,
            false => weights.fold(0, u64::saturating_add),
        };
        let on_their_way = largest.saturating_add(assembled);
        Ok(Some(Self {
            context: plan.context,
            host_bytes: plan.arena_bytes().saturating_add(on_their_way),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_grow_to_the_context() {
        assert_eq!(run_lengths(1), [1]);
        assert_eq!(run_lengths(40), [16, 4, 1]);
        assert_eq!(run_lengths(100_000), [256, 64, 16, 4, 1]);
    }
}
