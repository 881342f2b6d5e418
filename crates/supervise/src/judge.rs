//! Why a command ended: by itself, by a signal, or for want of memory, with what tells so.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::Serialize;

use crate::capture::Capture;

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
    /// A line of its output.
    Said(String),
    /// The kernel ended so many processes for want of host memory meanwhile.
    KilledByKernel(u64),
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Said(line) => write!(formatter, "it said: {line}"),
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

/// What programs say when an allocation fails. Parts of their messages, without figures.
const SAID: [&str; 17] = [
    "CUDA out of memory",
    "HIP out of memory",
    "MPS backend out of memory",
    "OutOfMemoryError",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED: Out of memory",
    "failed to allocate memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "is killed by signal: Killed",
    "MemoryError",
];

/// The line that says so, if one does.
fn said(capture: &Capture) -> Option<&String> {
    let mut lines = capture.lines().iter();
    lines.find(|line| SAID.iter().any(|words| line.contains(words)))
}

/// SIGKILL, by number: what the kernel's killer sends.
const KILL: i32 = 9;
/// What a shell, or a launcher of ranks, returns for a child that was ended so.
const KILLED_BELOW: i32 = 128 + KILL;

/// Reads why a command ended. `kills` is what the kernel counted meanwhile, `stopped` whether a
/// person or a program asked it to stop.
pub fn judge(status: ExitStatus, capture: &Capture, kills: u64, stopped: bool) -> End {
    if status.success() {
        return End::Success;
    }
    if stopped {
        return End::Interrupted;
    }
    let was_killed = status.signal() == Some(KILL) || status.code() == Some(KILLED_BELOW);
    if let Some(line) = said(capture) {
        return End::OutOfMemory(Evidence::Said(line.trim().to_owned()));
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

    fn capture(text: &str) -> Capture {
        let mut capture = Capture::default();
        capture.push(text.as_bytes());
        capture.finish();
        capture
    }

    /// As `wait` reports it: the code in the second byte, the signal in the first.
    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn ends_are_told_apart() {
        let oom =
            capture("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n");
        let quiet = capture("step 1\nValueError: shapes do not match\n");
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
        let talk = capture("memory: 12 GiB allocated\nout of memory-mapped files\n");
        assert_eq!(judge(exited(1), &talk, 0, false), End::Failed);
    }
}
