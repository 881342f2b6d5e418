//! One of several processes that train together: who it is, how it meets the others, and what it
//! takes from the first of them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cinch_config::Source;
use cinch_graph::Target;
use cinch_ranks::{Greeting, Identity, Limits, Loss, SharedWorld, Topology, World};
use cinch_step::StepPlan;

use crate::args::MemoryArguments;
use crate::failure::{ANOTHER_RANK, usage};
use crate::overhead;
use crate::progress::shown;
use crate::run::AskedRun;
use crate::voice::{self, tell};

/// Set where every rank says what the first one does.
pub const LOG_VARIABLE: &str = "CINCH_LOG_ALL_RANKS";

/// How long a rank has to end by itself after another was lost. It may be in the middle of
/// something that nothing else ends, such as a kernel that waits for the lost one.
const GRACE: Duration = Duration::from_secs(10);

/// This process among the ranks of its run.
pub struct Rank {
    identity: Option<Identity>,
    world: Option<SharedWorld>,
    newest: Arc<Mutex<Option<PathBuf>>>,
}

impl Rank {
    /// By what a launcher put into the environment. All but the first say nothing but errors,
    /// unless asked to.
    pub fn of_process() -> anyhow::Result<Self> {
        cinch_ranks::launch::follow_launcher()?;
        let identity = Identity::of_process()?;
        let is_other = identity.as_ref().is_some_and(|identity| identity.rank > 0);
        if is_other && std::env::var_os(LOG_VARIABLE).is_none() {
            voice::hush();
        }
        Ok(Self {
            identity,
            world: None,
            newest: Arc::default(),
        })
    }

    pub fn num_ranks(&self) -> usize {
        self.identity.as_ref().map_or(1, |one| one.num_ranks)
    }

    pub fn is_first(&self) -> bool {
        self.identity.as_ref().is_none_or(|one| one.rank == 0)
    }

    /// CPU threads, where nobody said how many: the machine's cores are shared.
    pub fn threads(&self) -> Option<usize> {
        let local = self.identity.as_ref()?.local_ranks;
        let cores = std::thread::available_parallelism().ok()?.get();
        Some((cores / local).max(1))
    }

    /// Which of the machine's GPUs is this rank's: the one of its number on the machine. Where NCCL
    /// was told that ranks may share one, they take them in turn.
    pub fn device(&self, target: Target) -> anyhow::Result<usize> {
        let Some(identity) = self.identity.as_ref().filter(|_| target == Target::Cuda) else {
            return Ok(0);
        };
        let gpus = cinch_engine::cuda::num_cards();
        let shares = std::env::var(cinch_engine::cuda::SHARING_VARIABLE);
        let shares = shares.is_ok_and(|value| value == "1");
        gpu_of(identity, gpus, shares)
    }

    /// How many other ranks of this machine have this rank's GPU.
    pub fn sharers(&self, target: Target) -> usize {
        let Some(identity) = self.identity.as_ref().filter(|_| target == Target::Cuda) else {
            return 0;
        };
        let gpus = cinch_engine::cuda::num_cards().max(1);
        let first = identity.local_rank % gpus;
        (first..identity.local_ranks)
            .step_by(gpus)
            .len()
            .saturating_sub(1)
    }

    pub fn world(&self) -> Option<SharedWorld> {
        self.world.clone()
    }

    /// Meets the others, who must have been asked for the same run, and takes over where the first
    /// one puts it.
    pub fn join(&mut self, asked: &mut AskedRun, target: Target) -> anyhow::Result<()> {
        let Some(identity) = &self.identity else {
            return Ok(());
        };
        let settings = asked.settings.explain().into_iter();
        let stated =
            settings.filter(|one| !matches!(one.source, Source::Default | Source::Derived(_)));
        let greeting = Greeting {
            version: crate::args::VERSION.to_owned(),
            settings: stated
                .map(|one| (one.key.to_owned(), one.value.to_string()))
                .collect(),
        };
        let topology = match target {
            Target::Cpu => Topology::Mesh,
            Target::Cuda => Topology::Star,
        };
        let mut world = World::join(identity, &greeting, Limits::of_process()?, topology)?;
        let newest = self.newest.clone();
        world.on_loss(move |loss| end_after_grace(loss.clone(), newest));
        let folder = &mut asked.config.output.output_dir;
        let first = world.spread(folder.to_str().unwrap_or_default())?;
        if !first.is_empty() {
            *folder = PathBuf::from(first);
        }
        self.world = Some(SharedWorld::new(world));
        Ok(())
    }

    /// The plan of the run. The first rank makes it, by what its machine has free, and the others
    /// plan what it came to.
    pub fn plan(
        &self,
        asked: &AskedRun,
        memory: &MemoryArguments,
        target: Target,
    ) -> anyhow::Result<StepPlan> {
        let Some(world) = &self.world else {
            return Ok(asked.plan(memory, target)??);
        };
        if self.is_first() {
            let plan = asked.plan(memory, target);
            let plan = plan.and_then(|plan| Ok(plan?));
            return match plan {
                Ok(plan) => {
                    world.lock().spread(&serde_json::to_string(&plan.config)?)?;
                    Ok(plan)
                }
                Err(error) => {
                    world.lock().fail(&error.to_string());
                    Err(error)
                }
            };
        }
        let config = world.lock().spread("")?;
        let config = serde_json::from_str(&config)?;
        Ok(cinch_fit::plan(&config, overhead::machine(target))?)
    }

    /// Remembers where to go on from, should a rank be lost.
    pub fn saved(&self, path: &Path) {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        *newest = Some(path.to_owned());
    }
}

/// Which of so many GPUs is a rank's, where ranks may share them or not.
fn gpu_of(identity: &Identity, gpus: usize, shares: bool) -> anyhow::Result<usize> {
    let local = identity.local_rank;
    if local < gpus {
        return Ok(local);
    }
    if gpus > 0 && shares {
        return Ok(local % gpus);
    }
    Err(usage(format!(
        "rank {} is number {local} on this machine, which has {gpus} GPUs\n\
         hint: start as many ranks as there are GPUs, check CUDA_VISIBLE_DEVICES, or let ranks \
         share a GPU with {}=1 (NCCL 2.30 or later)",
        identity.rank,
        cinch_engine::cuda::SHARING_VARIABLE,
    )))
}

/// Ends the process if it has not ended by itself.
fn end_after_grace(loss: Loss, newest: Arc<Mutex<Option<PathBuf>>>) {
    std::thread::spawn(move || {
        std::thread::sleep(GRACE);
        let newest = newest.lock().unwrap_or_else(PoisonError::into_inner);
        let way = match &*newest {
            Some(path) => format!(
                "the newest checkpoint is {0}; start all ranks again with --resume {0}",
                shown(path)
            ),
            None => "nothing was saved yet: start all ranks again".to_owned(),
        };
        tell(&voice::message(&format!("error: {loss}\nhint: {way}")));
        #[expect(clippy::exit, reason = "whatever it is in the middle of does not end")]
        std::process::exit(ANOTHER_RANK.into());
    });
}

#[cfg(test)]
mod tests {
    use cinch_ranks::Meeting;

    use super::*;

    #[test]
    fn a_rank_without_a_gpu_is_told_the_ways_out() {
        let of = |local_rank| Identity {
            rank: 4 + local_rank,
            num_ranks: 8,
            local_rank,
            local_ranks: 4,
            meeting: Meeting {
                host: "a".to_owned(),
                ports: vec![1],
                is_inherited: false,
                run: String::new(),
            },
        };
        assert_eq!(gpu_of(&of(1), 2, false).unwrap(), 1);
        assert_eq!(gpu_of(&of(3), 2, true).unwrap(), 1);
        for (gpus, shares) in [(2, false), (0, true)] {
            let told = gpu_of(&of(3), gpus, shares).unwrap_err().to_string();
            assert!(told.contains("rank 7 is number 3"), "{told}");
            assert!(told.contains("CUDA_VISIBLE_DEVICES"), "{told}");
        }
    }
}
