//! What can go wrong between ranks, and the way out of it.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::identity::Variable;

/// A problem of a run of several ranks.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RanksError {
    #[error(
        "{variable}: {problem}\nhint: {launcher} sets it; start the run by {launcher}, or unset all of its variables"
    )]
    Variable {
        variable: Variable,
        problem: String,
        launcher: &'static str,
    },
    #[error(
        "the nodes of the Slurm job are not known: {problem}\n\
         hint: set MASTER_ADDR to the name of the first node"
    )]
    Nodes { problem: String },
    #[error(
        "no rank can be reached at {address}: {problem}\n\
         hint: MASTER_ADDR is the machine of rank 0, as the others see it"
    )]
    Address { address: String, problem: String },
    #[error(
        "rank 0 cannot listen at {address}: the port is in use\n\
         hint: another run, or one that was left, has it; set MASTER_PORT to a free port on every \
         rank, or end the other run"
    )]
    PortInUse { address: String },
    #[error("rank 0 cannot listen at {address}: {problem}")]
    Listen { address: String, problem: String },
    #[error(
        "{missing} of {num_ranks} did not come to {address} within {}\n\
         hint: look at their output, or give them longer by {variable}", told(*.waited)
    )]
    Missing {
        missing: String,
        num_ranks: usize,
        address: String,
        waited: Duration,
        variable: &'static str,
    },
    #[error(
        "rank 0 was not found at {address} within {}: {problem}\n\
         hint: see whether rank 0 runs there, and whether a firewall keeps the port from rank \
         {rank}", told(*.waited)
    )]
    NoMeeting {
        rank: usize,
        address: String,
        waited: Duration,
        problem: String,
    },
    #[error("rank 0 refuses the run: {reason}")]
    Refused { reason: Refusal },
    #[error("{0}")]
    Lost(Loss),
    #[error(
        "rank {rank} and rank {other} are not at the same place of the step: {problem}\n\
         hint: this is an error of cinch; please report it"
    )]
    OutOfStep {
        rank: usize,
        other: usize,
        problem: String,
    },
    #[error("parts of tensors go between all ranks, which are connected with rank 0 only")]
    NoMesh,
    #[error("the ranks differ in {what}: {}", differing(.values))]
    Differ {
        what: String,
        /// By rank.
        values: Vec<String>,
    },
}

/// Why ranks do not make one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    Versions {
        rank: usize,
        version: String,
        of_rank_0: String,
    },
    WorldSizes {
        rank: usize,
        num_ranks: usize,
        of_rank_0: usize,
    },
    Settings {
        rank: usize,
        /// Key, value on that rank, value on rank 0.
        differences: Vec<(String, Option<String>, Option<String>)>,
    },
    Twice {
        rank: usize,
        hosts: [String; 2],
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Versions {
                rank,
                version,
                of_rank_0,
            } => write!(
                formatter,
                "rank {rank} is cinch {version}, rank 0 is cinch {of_rank_0}\n\
                 hint: install the same version on every machine"
            ),
            Self::WorldSizes {
                rank,
                num_ranks,
                of_rank_0,
            } => write!(
                formatter,
                "rank {rank} was told of {num_ranks} ranks, rank 0 of {of_rank_0}\n\
                 hint: WORLD_SIZE must be the same everywhere"
            ),
            Self::Settings { rank, differences } => {
                write!(formatter, "rank {rank} has other settings than rank 0:")?;
                for (key, own, first) in differences {
                    let shown = |value: &Option<String>| match value {
                        Some(value) => value.clone(),
                        None => "not set".to_owned(),
                    };
                    let (own, first) = (shown(own), shown(first));
                    write!(
                        formatter,
                        "\n  {key}: {own} on rank {rank}, {first} on rank 0"
                    )?;
                }
                formatter.write_str("\nhint: start every rank with the same arguments and files")
            }
            Self::Twice { rank, hosts } => write!(
                formatter,
                "two processes say that they are rank {rank}, on {} and on {}\n\
                 hint: every process needs a RANK of its own; a run that was left may still be there",
                hosts[0], hosts[1]
            ),
        }
    }
}

/// A rank that is no more, and how that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    pub rank: usize,
    pub host: String,
    pub pid: u32,
    pub cause: Cause,
}

/// How a rank was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// Its connection closed: the process ended or was killed.
    Ended,
    /// It said nothing for so long.
    Silent(Duration),
    /// It runs, but the others waited for it in an exchange for so long.
    Waited(Duration),
    /// It ended with this error.
    Failed(String),
}

impl fmt::Display for Loss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            host,
            pid,
            cause,
        } = self;
        match cause {
            Cause::Ended => write!(
                formatter,
                "rank {rank} (process {pid} on {host}) ended or was killed"
            ),
            Cause::Silent(time) => write!(
                formatter,
                "rank {rank} (process {pid} on {host}) has said nothing for {}",
                told(*time)
            ),
            Cause::Waited(time) => write!(
                formatter,
                "rank {rank} (process {pid} on {host}) runs, but did not come to an exchange for {}",
                told(*time)
            ),
            Cause::Failed(problem) => write!(
                formatter,
                "rank {rank} (process {pid} on {host}) failed: {problem}"
            ),
        }
    }
}

/// A time as people say it.
fn told(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds => format!("{seconds} s"),
    }
}

/// Values with the ranks that have them.
fn differing(values: &[String]) -> String {
    let told = values.iter().enumerate();
    let told: Vec<String> = told
        .map(|(rank, value)| format!("{value} on rank {rank}"))
        .collect();
    told.join(", ")
}

/// `rank 3`, or `ranks 1, 3`.
pub(crate) fn ranks_named(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match ranks.len() {
        1 => format!("rank {}", names[0]),
        _ => format!("ranks {}", names.join(", ")),
    }
}

impl RanksError {
    pub(crate) fn listen(address: SocketAddr, error: &std::io::Error) -> Self {
        let address = address.to_string();
        match error.kind() {
            std::io::ErrorKind::AddrInUse => Self::PortInUse { address },
            _ => Self::Listen {
                address,
                problem: error.to_string(),
            },
        }
    }
}
