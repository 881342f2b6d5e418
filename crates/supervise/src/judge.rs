//! Why a command ended: by itself, by a signal, or for want of memory, with what tells so.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use cinch_diagnose::{Event, Log, failure};
use serde::Serialize;

/// Why it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Success,
    /// It says so, or the kernel does.
    OutOfMemory(Evidence),
    /// Another failure.
    Failed,
    /// The user or another program told it to stop.
    Interrupted,
}

/// What tells of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// Its output tells so: what happened, in a sentence.
    Said(String),
    /// The kernel ended so many processes for want of host memory meanwhile.
    KilledByKernel(u64),
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Said(summary) => formatter.write_str(summary),
            Self::KilledByKernel(1) => {
                formatter.write_str("the kernel ended a process for want of host memory")
            }
            Self::KilledByKernel(count) => {
                write!(
                    formatter,
                    "the kernel ended {count} processes for want of host memory"
                )
            }
        }
    }
}

/// What its output tells of memory, if anything. A signal that it tells of is for the kernel's
/// counters: anybody may have sent it.
fn said(log: &Log) -> Option<String> {
    let incidents = log.incidents();
    let mut told = incidents
        .iter()
        .filter(|incident| incident.message.event != Event::KilledBySignal)
        .map(|incident| failure(incident, log.told(), None));
    told.find(|failure| failure.is_oom)
        .map(|failure| failure.summary)
}

/// SIGKILL, by number: what the kernel's killer sends.
const KILL: i32 = 9;
/// What a shell, or a launcher of ranks, returns for a child that was ended so.
const KILLED_BELOW: i32 = 128 + KILL;

/// Reads why a command ended. `kills` is what the kernel counted meanwhile, `stopped` whether a
/// person or a program asked it to stop.
pub fn judge(status: ExitStatus, log: &Log, kills: u64, stopped: bool) -> End {
    if status.success() {
        return End::Success;
    }
    if stopped {
        return End::Interrupted;
    }
    let was_killed = status.signal() == Some(KILL) || status.code() == Some(KILLED_BELOW);
    if let Some(summary) = said(log) {
        return End::OutOfMemory(Evidence::Said(summary));
    }
    // A launcher reports the death of a rank with a code of its own.
    if kills > 0 && (was_killed || status.code().is_some_and(|code| code != 0)) {
        return End::OutOfMemory(Evidence::KilledByKernel(kills));
    }
    End::Failed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str) -> Log {
        let mut log = Log::new();
        log.feed(text.as_bytes());
        log.finish();
        log
    }

    /// As `wait` reports it: the code in the second byte, the signal in the first.
    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn ends_are_told_apart() {
        let oom = log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n");
        let quiet = log("step 1\nValueError: shapes do not match\n");
        assert_eq!(judge(exited(0), &oom, 1, false), End::Success);
        assert!(matches!(
            judge(exited(1), &oom, 0, false),
            End::OutOfMemory(Evidence::Said(_))
        ));
        assert_eq!(judge(exited(1), &oom, 0, true), End::Interrupted);
        assert_eq!(judge(exited(1), &quiet, 0, false), End::Failed);
        let kernel = |kills| End::OutOfMemory(Evidence::KilledByKernel(kills));
        assert_eq!(
            judge(ExitStatus::from_raw(KILL), &quiet, 1, false),
            kernel(1)
        );
        assert_eq!(judge(exited(KILLED_BELOW), &quiet, 2, false), kernel(2));
        // Nobody knows who sent it: the kernel counted none.
        assert_eq!(
            judge(ExitStatus::from_raw(KILL), &quiet, 0, false),
            End::Failed
        );
        // Neither does the shell that tells of it.
        let told = log("run.sh: line 3: 123 Killed  python train.py\n");
        assert_eq!(judge(exited(KILLED_BELOW), &told, 0, false), End::Failed);
        let talk = log("memory: 12 GiB allocated\nout of memory-mapped files\n");
        assert_eq!(judge(exited(1), &talk, 0, false), End::Failed);
    }
}
