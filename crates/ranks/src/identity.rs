//! Which rank this process is, and where the ranks meet, from the variables that launchers set.
//!
//! | launcher | variables |
//! |---|---|
//! | torchrun, `cinch launch` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` |
//! | mpirun (Open MPI) | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | mpirun (MPICH, Intel) | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_JOB_NODELIST` |
//!
//! Launchers are started by one another (torchrun under srun), so the innermost counts: torchrun
//! before mpirun before Slurm. Variables of the same launcher must agree.
//!
//! torchrun's own agent listens at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE`), so ranks under
//! it meet at the first free one of the ports that follow. Who finds somebody else there knows it
//! by the run's name, which is part of the greeting, and tries the next.

use std::fmt;

use crate::error::RanksError;

/// The first port to meet at where nobody states one: the one that PyTorch's tools take.
const DEFAULT_PORT: u16 = 29_500;

/// Ports that are tried after one that the launcher itself has.
const NEIGHBOURS: u16 = 16;

/// A variable of the environment as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    pub name: &'static str,
    pub value: Option<String>,
}

impl fmt::Display for Variable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(formatter, "{}={value:?}", self.name),
            None => write!(formatter, "{} is not set", self.name),
        }
    }
}

/// Which of a run's processes this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub rank: usize,
    pub num_ranks: usize,
    /// Among the ranks of this machine; a GPU's number.
    pub local_rank: usize,
    pub local_ranks: usize,
    pub meeting: Meeting,
}

/// Where ranks find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// The machine of rank 0.
    pub host: String,
    /// In the order in which they are tried.
    pub ports: Vec<u16>,
    /// Rank 0's standard input is a socket that listens already, at the first port.
    pub is_inherited: bool,
    /// The run's name, if the launcher gives one.
    pub run: String,
}

/// One that starts ranks, and how it tells them who they are.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first that is set counts.
    num_ranks: &'static [&'static str],
    local_rank: &'static str,
    local_ranks: Option<&'static str>,
}

const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    rank: "RANK",
    num_ranks: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_ranks: Some("LOCAL_WORLD_SIZE"),
};

const OPEN_MPI: Launcher = Launcher {
    name: "mpirun",
    rank: "OMPI_COMM_WORLD_RANK",
    num_ranks: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_ranks: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
};

const MPICH: Launcher = Launcher {
    name: "mpirun",
    rank: "PMI_RANK",
    num_ranks: &["PMI_SIZE"],
    local_rank: "MPI_LOCALRANKID",
    local_ranks: Some("MPI_LOCALNRANKS"),
};

const SLURM: Launcher = Launcher {
    name: "srun",
    rank: "SLURM_PROCID",
    num_ranks: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_ranks: None,
};

/// The names of a Slurm job's machines, from the list that names them.
pub type Hosts<'a> = &'a dyn Fn(&str) -> Result<Vec<String>, String>;

/// Environment of a process.
struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// One that is empty counts as not set.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &'static str, launcher: &Launcher) -> Result<Option<usize>, RanksError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.wrong(name, launcher, "it is no whole number".to_owned())),
        }
    }

    fn wrong(&self, name: &'static str, launcher: &Launcher, problem: String) -> RanksError {
        RanksError::Variable {
            variable: Variable {
                name,
                value: self.get(name),
            },
            problem,
            launcher: launcher.name,
        }
    }
}

impl Identity {
    /// From the environment of this process; None where nobody says that there are other ranks.
    pub fn of_process() -> Result<Option<Self>, RanksError> {
        Self::of(&|name| std::env::var(name).ok(), &crate::slurm::hosts)
    }

    /// From an environment. A world of one rank is as none.
    pub fn of(
        variable: &dyn Fn(&str) -> Option<String>,
        hosts: Hosts<'_>,
    ) -> Result<Option<Self>, RanksError> {
        let environment = Environment(variable);
        let Some(launcher) = launcher_of(&environment) else {
            return Ok(None);
        };
        let required = |name: &'static str| {
            environment.number(name, launcher)?.ok_or_else(|| {
                let problem = format!("the other variables of {} are", launcher.name);
                environment.wrong(name, launcher, problem)
            })
        };
        let size_name = launcher
            .num_ranks
            .iter()
            .find(|name| environment.is_set(name));
        let size_name = size_name.copied().unwrap_or(launcher.num_ranks[0]);
        // Some clusters say of every job that it has one process, and nothing else.
        if environment.number(size_name, launcher)? == Some(1) && !environment.is_set(launcher.rank)
        {
            return Ok(None);
        }
        let (rank, num_ranks) = (required(launcher.rank)?, required(size_name)?);
        let below = |name, number: usize, limit: usize, of: String| match number < limit {
            true => Ok(()),
            false => Err(environment.wrong(name, launcher, format!("it must be below {of}"))),
        };
        if num_ranks == 0 {
            let problem = "a run has at least one rank".to_owned();
            return Err(environment.wrong(size_name, launcher, problem));
        }
        below(
            launcher.rank,
            rank,
            num_ranks,
            format!("{size_name}={num_ranks}"),
        )?;
        if num_ranks == 1 {
            return Ok(None);
        }
        let local_rank = required(launcher.local_rank)?;
        let local_ranks = match launcher.local_ranks {
            None => slurm_local_ranks(&environment).unwrap_or(num_ranks),
            Some(name) => {
                let local = environment.number(name, launcher)?.unwrap_or(num_ranks);
                below(name, local, num_ranks + 1, format!("{}", num_ranks + 1))?;
                local
            }
        };
        let of = format!("{local_ranks}, the ranks of this machine");
        below(launcher.local_rank, local_rank, local_ranks, of)?;
        let meeting = Meeting::of(&environment, launcher, local_ranks == num_ranks, hosts)?;
        Ok(Some(Self {
            rank,
            num_ranks,
            local_rank,
            local_ranks,
            meeting,
        }))
    }
}

/// The innermost launcher that says something. A rank or a number of ranks is enough: one without
/// the other is told rather than trained alone.
fn launcher_of(environment: &Environment<'_>) -> Option<&'static Launcher> {
    let named = |launcher: &Launcher| {
        let mut names = launcher.num_ranks.iter().chain([&launcher.rank]);
        names.any(|name| environment.is_set(name))
    };
    let mut launchers = [&TORCHRUN, &OPEN_MPI, &MPICH].into_iter();
    let found = launchers.find(|launcher| named(launcher));
    // A batch script has SLURM_PROCID=0 too; only what srun starts is in a step.
    let in_step = environment
        .get("SLURM_STEP_ID")
        .is_some_and(|step| step.trim().parse::<u32>().is_ok());
    found.or_else(|| (in_step && environment.is_set(SLURM.rank)).then_some(&SLURM))
}

/// The ranks of this machine from `SLURM_STEP_TASKS_PER_NODE`: "4", or "4(x2)" where every
/// machine has as many. Where they differ, the list does not say which entry is ours without
/// another variable, so the largest is taken: it bounds the local ranks.
fn slurm_local_ranks(environment: &Environment<'_>) -> Option<usize> {
    let list = environment
        .get("SLURM_STEP_TASKS_PER_NODE")
        .or_else(|| environment.get("SLURM_TASKS_PER_NODE"))?;
    let counts = list.split(',').filter_map(|entry| {
        let count = entry.split('(').next()?;
        count.trim().parse::<usize>().ok()
    });
    counts.max()
}

impl Meeting {
    fn of(
        environment: &Environment<'_>,
        launcher: &Launcher,
        one_machine: bool,
        hosts: Hosts<'_>,
    ) -> Result<Self, RanksError> {
        let host = match environment.get("MASTER_ADDR") {
            Some(host) => host,
            None if one_machine => "127.0.0.1".to_owned(),
            None => {
                let list = environment
                    .get("SLURM_STEP_NODELIST")
                    .or_else(|| environment.get("SLURM_JOB_NODELIST"));
                let Some(list) = list.filter(|_| launcher.name == SLURM.name) else {
                    let problem = "the ranks are on several machines".to_owned();
                    return Err(environment.wrong("MASTER_ADDR", launcher, problem));
                };
                let named = hosts(&list).map_err(|problem| RanksError::Nodes { problem })?;
                named.into_iter().next().ok_or_else(|| RanksError::Nodes {
                    problem: format!("the list {list:?} names none"),
                })?
            }
        };
        let run = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"]
            .iter()
            .find_map(|name| environment.get(name))
            .unwrap_or_default();
        let restart = environment
            .get("TORCHELASTIC_RESTART_COUNT")
            .unwrap_or_default();
        let stated = match environment.get("MASTER_PORT") {
            None => None,
            Some(value) => Some(
                value
                    .trim()
                    .parse::<u16>()
                    .ok()
                    .filter(|&port| port > 0)
                    .ok_or_else(|| {
                        let problem = "a port is a number from 1 to 65535".to_owned();
                        environment.wrong("MASTER_PORT", launcher, problem)
                    })?,
            ),
        };
        let of_agent = environment
            .get("TORCHELASTIC_USE_AGENT_STORE")
            .is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let ports = match (stated, of_agent) {
            (Some(port), false) => vec![port],
            (Some(port), true) => neighbours(port.saturating_add(1)),
            (None, _) => neighbours(derived_port(&run)),
        };
        Ok(Self {
            host,
            ports,
            is_inherited: environment.is_set(INHERITED_VARIABLE),
            run: format!("{run}/{restart}"),
        })
    }
}

/// Set by `cinch launch`: rank 0's standard input is the socket at which the ranks meet.
pub const INHERITED_VARIABLE: &str = "CINCH_MEETING_ON_STDIN";

fn neighbours(first: u16) -> Vec<u16> {
    (0..NEIGHBOURS)
        .filter_map(|step| first.checked_add(step))
        .collect()
}

/// Jobs that share a machine meet at different ports.
fn derived_port(run: &str) -> u16 {
    let sum = run.bytes().fold(0_u32, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    // Below the ports that Linux gives to connections by itself, from 32768 on.
    const SLOTS: u32 = 200;
    DEFAULT_PORT + (sum % SLOTS) as u16 * NEIGHBOURS
}
