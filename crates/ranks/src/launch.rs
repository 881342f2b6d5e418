//! Ranks started on one machine, with the variables that torchrun sets.
//!
//! Rank 0 has the terminal; what the others print goes to files. Signals are passed on, once each:
//! ranks are in process groups of their own, so that Ctrl-C on a terminal reaches them by this way
//! only. When one fails, the others notice and end by themselves; whoever has not after a grace
//! time is killed. A launcher that is killed takes its ranks along: each asked the kernel for a
//! signal at its parent's death.
//!
//! The socket at which ranks meet is opened here, where the system chooses its port, and handed to
//! rank 0 as its standard input: nobody else can take the port in between.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use thiserror::Error;

use crate::error::RanksError;
use crate::identity::{INHERITED_VARIABLE, Variable};

/// Set for ranks that a launcher started: its process.
const LAUNCHER_VARIABLE: &str = "CINCH_LAUNCHER";

/// Variables of launchers around this one, which would contradict it.
const OUTER_VARIABLES: [&str; 3] = [
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
];

/// The exit code of a rank that ends because another did.
pub const FOLLOWED: u8 = 5;

/// How long ranks have to end by themselves after one failed: to find it out, to say what the
/// newest checkpoint is, and to leave.
const GRACE: Duration = Duration::from_secs(10);

/// Of what a failed rank printed, so much is shown.
const TAIL_BYTES: u64 = 4 << 10;

/// What is to be started.
#[derive(Clone, Debug)]
pub struct Launch {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Besides those that say who a rank is.
    pub variables: Vec<(OsString, OsString)>,
    pub num_ranks: usize,
    /// Where to keep what ranks other than the first print; None to show it only where one fails.
    pub logs: Option<PathBuf>,
}

/// How the ranks ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Of the first rank that failed: its exit code, or 128 and the signal that killed it.
    pub code: u8,
    /// What happened to that rank, where it was not the one that has the terminal or could say
    /// nothing more.
    pub told: Option<String>,
}

#[derive(Debug, Error)]
pub enum LaunchError {
    #[error("cannot open a socket for the ranks on this machine: {0}")]
    Socket(io::Error),
    #[error("cannot start rank {rank}: {}: {problem}", .program.display())]
    Start {
        rank: usize,
        program: PathBuf,
        problem: io::Error,
    },
    #[error("cannot write what rank {rank} prints to {}: {problem}", .path.display())]
    Log {
        rank: usize,
        path: PathBuf,
        problem: io::Error,
    },
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    #[error("cannot wait for rank {rank}: {problem}")]
    Wait { rank: usize, problem: io::Error },
}

/// Ends this process with the launcher that started it, if one did: by SIGTERM, at which a run is
/// saved.
pub fn follow_launcher() -> Result<(), RanksError> {
    let Ok(value) = std::env::var(LAUNCHER_VARIABLE) else {
        return Ok(());
    };
    let problem = |problem: &str| RanksError::Variable {
        variable: Variable {
            name: LAUNCHER_VARIABLE,
            value: Some(value.clone()),
        },
        problem: problem.to_owned(),
        launcher: "cinch launch",
    };
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| problem(&error.to_string()))?;
    // It may have ended before.
    let parent = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    match parent.as_deref() == Some(value.as_str()) {
        true => Ok(()),
        false => Err(problem("the launcher has ended")),
    }
}

/// Starts the ranks and waits until all have ended.
pub fn launch(what: &Launch) -> Result<Ended, LaunchError> {
    let signals = listen().map_err(LaunchError::Signals)?;
    let logs = Logs::create(what)?;
    let mut ranks = Ranks::start(what, &logs)?;
    let failed = ranks.wait(&signals)?;
    Ok(match failed {
        None => Ended {
            code: 0,
            told: None,
        },
        Some((rank, status)) => Ended {
            code: code_of(status),
            told: logs.tell(rank, &ranks),
        },
    })
}

/// Signals as they come, those of ended ranks too.
fn listen() -> io::Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD])?;
    let (send, receive) = channel();
    thread::spawn(move || {
        for signal in signals.forever() {
            if send.send(signal).is_err() {
                return;
            }
        }
    });
    Ok(receive)
}

fn code_of(status: ExitStatus) -> u8 {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    };
    u8::try_from(code).unwrap_or(1)
}

/// The processes of all ranks, by rank. Dropped, it kills those that still run.
struct Ranks(Vec<(Child, Option<ExitStatus>)>);

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Ranks {
    fn start(what: &Launch, logs: &Logs) -> Result<Self, LaunchError> {
        let meeting = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(LaunchError::Socket)?;
        let port = meeting.local_addr().map_err(LaunchError::Socket)?.port();
        let mut meeting = Some(meeting);
        let mut ranks = Self(Vec::new());
        for rank in 0..what.num_ranks {
            let mut command = Command::new(&what.program);
            command.args(&what.arguments).process_group(0);
            command.envs(what.variables.iter().cloned());
            for name in OUTER_VARIABLES {
                command.env_remove(name);
            }
            let number = |number: usize| number.to_string();
            command
                .env("RANK", number(rank))
                .env("LOCAL_RANK", number(rank))
                .env("WORLD_SIZE", number(what.num_ranks))
                .env("LOCAL_WORLD_SIZE", number(what.num_ranks))
                .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
                .env("MASTER_PORT", port.to_string())
                .env(LAUNCHER_VARIABLE, std::process::id().to_string())
                .env_remove(INHERITED_VARIABLE);
            match meeting.take() {
                Some(meeting) => {
                    command.env(INHERITED_VARIABLE, "1");
                    command.stdin(OwnedFd::from(meeting));
                }
                None => {
                    let (output, errors) = logs.open(rank)?;
                    command.stdin(Stdio::null()).stdout(output).stderr(errors);
                }
            }
            let child = command.spawn().map_err(|problem| LaunchError::Start {
                rank,
                program: what.program.clone(),
                problem,
            })?;
            ranks.0.push((child, None));
        }
        Ok(ranks)
    }

    /// Waits for all, and returns the first that failed.
    fn wait(
        &mut self,
        signals: &Receiver<i32>,
    ) -> Result<Option<(usize, ExitStatus)>, LaunchError> {
        let mut failed: Option<(usize, ExitStatus, Instant)> = None;
        loop {
            for (rank, (child, status)) in self.0.iter_mut().enumerate() {
                if status.is_some() {
                    continue;
                }
                let ended = child.try_wait();
                *status = ended.map_err(|problem| LaunchError::Wait { rank, problem })?;
                let Some(status) = status.filter(|status| !status.success()) else {
                    continue;
                };
                let deadline = Instant::now() + GRACE;
                let (known, since) = match failed {
                    None => ((rank, status), deadline),
                    // One that follows may be gone before the one that it follows.
                    Some((first, before, since)) if code_of(before) != FOLLOWED => {
                        ((first, before), since)
                    }
                    Some((.., since)) => ((rank, status), since),
                };
                failed = Some((known.0, known.1, since));
            }
            if self.0.iter().all(|(_, status)| status.is_some()) {
                return Ok(failed.map(|(rank, status, _)| (rank, status)));
            }
            let received = match failed {
                None => signals.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some((.., deadline)) => {
                    signals.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            match received {
                Ok(SIGCHLD) => {}
                Ok(signal) => self.pass_on(signal),
                Err(_) => self.kill(),
            }
        }
    }

    fn running(&mut self) -> impl Iterator<Item = &mut Child> {
        let running = self.0.iter_mut().filter(|(_, status)| status.is_none());
        running.map(|(child, _)| child)
    }

    fn pass_on(&mut self, signal: i32) {
        let signal = match signal {
            SIGINT => Signal::INT,
            SIGUSR1 => Signal::USR1,
            // A terminal that was closed ends the run as a request does.
            _ => Signal::TERM,
        };
        for child in self.running() {
            if let Some(pid) = Pid::from_raw(child.id().cast_signed()) {
                // One that has ended meanwhile needs no signal.
                let _ = kill_process(pid, signal);
            }
        }
    }

    fn kill(&mut self) {
        for (child, status) in &mut self.0 {
            if status.is_none() {
                let _ = child.kill();
                *status = child.wait().ok();
            }
        }
    }
}

/// Where ranks other than the first print.
struct Logs {
    folder: PathBuf,
    is_kept: bool,
}

impl Drop for Logs {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

impl Logs {
    fn create(what: &Launch) -> Result<Self, LaunchError> {
        let failed = |path: &Path, problem| LaunchError::Log {
            rank: 1,
            path: path.to_owned(),
            problem,
        };
        if let Some(folder) = &what.logs {
            fs::create_dir_all(folder).map_err(|problem| failed(folder, problem))?;
            return Ok(Self {
                folder: folder.clone(),
                is_kept: true,
            });
        }
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let pid = std::process::id();
        for number in 0_u32.. {
            let folder = std::env::temp_dir().join(format!("cinch-launch-{pid}-{number}"));
            match builder.create(&folder) {
                Ok(()) => {
                    return Ok(Self {
                        folder,
                        is_kept: false,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(problem) => return Err(failed(&folder, problem)),
            }
        }
        Err(failed(
            &std::env::temp_dir(),
            io::ErrorKind::AlreadyExists.into(),
        ))
    }

    fn path(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("rank-{rank}.log"))
    }

    /// One file for both streams of a rank.
    fn open(&self, rank: usize) -> Result<(File, File), LaunchError> {
        let path = self.path(rank);
        let open = || {
            let file = File::create(&path)?;
            Ok((file.try_clone()?, file))
        };
        open().map_err(|problem| LaunchError::Log {
            rank,
            path,
            problem,
        })
    }

    /// What became of the rank that failed first, where nobody has seen it yet: rank 0 says itself
    /// what it ends with, unless it was killed. Then another rank knows how to go on.
    fn tell(&self, rank: usize, ranks: &Ranks) -> Option<String> {
        let statuses: Vec<ExitStatus> = ranks.0.iter().filter_map(|(_, status)| *status).collect();
        let status = statuses.get(rank)?;
        let first = statuses.first()?;
        // It has failed by itself, and said why.
        if first.code().is_some_and(|code| code != 0) && code_of(*first) != FOLLOWED {
            return None;
        }
        let who = match (status.code(), status.signal()) {
            (_, Some(signal)) => format!("rank {rank} was killed by signal {signal}"),
            (Some(code), _) => format!("rank {rank} ended with exit code {code}"),
            _ => format!("rank {rank} failed"),
        };
        let said = match rank {
            0 => (1..statuses.len()).find_map(|other| self.tail(other)),
            _ => self.tail(rank),
        };
        Some(match said {
            Some(said) => format!("{who}\n{said}"),
            None => who,
        })
    }

    /// The last lines that a rank printed.
    fn tail(&self, rank: usize) -> Option<String> {
        let mut file = File::open(self.path(rank)).ok()?;
        let length = file.metadata().ok()?.len();
        let first = length.saturating_sub(TAIL_BYTES);
        file.seek(SeekFrom::Start(first)).ok()?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let text = match first {
            0 => text.as_ref(),
            // The first line is cut.
            _ => text.split_once('\n').map_or("", |(_, rest)| rest),
        };
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }
}
