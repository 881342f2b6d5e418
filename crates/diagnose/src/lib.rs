//! From an error message or a training log to why memory ran out and what to do about it.
//!
//! - `lines`, `clean`: bytes as they come → lines without colours and prefixes, by rank;
//! - `words`, `step`, `frame`: what a line is about;
//! - `message`: what a message says, framework by framework;
//! - `log`: messages with the traceback and the steps before them;
//! - `trend`: whether memory climbs, for logs and for whoever else measures it;
//! - `cause`, `advice`: why, and what to do; `spelling`: in whose words; `failure` is what is told.
//!
//! Nothing here reads a file, a device or a clock. What a change would save comes from the caller,
//! who has the planner and the replay: see [`Run`].
//!
//! ```
//! use cinch_diagnose::{Cause, Log, diagnose};
//!
//! let mut log = Log::new();
//! log.feed(b"RuntimeError: CUDA out of memory. Tried to allocate 160.00 MiB (GPU 0; 3.81 GiB total \
//!            capacity; 3.08 GiB already allocated; 55.38 MiB free; 9.78 MiB cached)\n");
//! log.finish();
//! let failures = diagnose(&log, None);
//! assert_eq!(failures[0].cause, Cause::Capacity);
//! assert_eq!(failures[0].numbers.tried, Some(160 << 20));
//! ```

mod advice;
mod cause;
mod clean;
mod failure;
mod frame;
mod lines;
mod log;
mod message;
mod size;
mod spelling;
mod step;
pub mod trend;
mod words;

pub use clean::Source;
pub use failure::{Cause, Failure, Fix, Priced, Run, Together};
pub use frame::Phase;
pub use log::{Curve, Incident, Log, MOST_FAILURES, Quantity, Told};
pub use message::{Event, Framework, Message, Numbers};
pub use spelling::{Spelling, Values};
pub use words::{Known, Measure};

use advice::Case;

/// Every failure of a log, in the order of its lines. `run` is the run that it is about, where
/// that is known.
pub fn diagnose(log: &Log, run: Option<&Run>) -> Vec<Failure> {
    let incidents = log.incidents();
    let failures = incidents
        .iter()
        .map(|incident| failure(incident, log.told(), run));
    failures.collect()
}

/// One failure.
pub fn failure(incident: &Incident, told: &Told, run: Option<&Run>) -> Failure {
    let verdict = cause::verdict(incident, told, run);
    let mut numbers = cause::completed(incident.message.numbers);
    let is_of_device = !matches!(verdict.cause, Cause::Host | Cause::NotOom);
    let run = run.filter(|_| is_of_device);
    numbers.predicted = run.map(|run| run.predicted);
    let case = Case {
        incident,
        cause: verdict.cause,
        numbers: &numbers,
        told,
        run,
    };
    Failure {
        framework: incident.message.framework,
        is_oom: verdict.cause != Cause::NotOom,
        cause: verdict.cause,
        confidence: verdict.confidence,
        fixes: advice::fixes(&case),
        will_not_help: advice::will_not_help(&case),
        evidence: verdict.evidence,
        summary: summary(incident, verdict.cause),
        numbers,
        line: incident.line,
        rank: incident.source.rank(),
        phase: incident.phase,
        step: incident.step,
        times: incident.times,
    }
}

/// What happened, in a sentence.
fn summary(incident: &Incident, cause: Cause) -> String {
    let who = incident.message.framework.title();
    let unit = incident.message.accelerator.noun();
    let what = match (&incident.message.event, cause) {
        (Event::NotMemory(_) | Event::AbsurdSize, _) => {
            format!("{who} failed, and not for lack of memory")
        }
        (Event::KilledBySignal, _) => {
            "a process was ended by signal 9, as the kernel does when host memory runs out"
                .to_owned()
        }
        (Event::HostKilled, _) => {
            format!("{who} reports a process that was ended because host memory ran out")
        }
        (Event::SharedMemory, _) if incident.message.framework == Framework::PyTorch => {
            "a loader worker ran out of shared memory".to_owned()
        }
        (Event::SharedMemory, _) => format!("{who} ran out of shared memory"),
        (Event::HostAllocation, _) => format!("{who} could not get host memory"),
        (Event::DoesNotFit, _) => "the run does not fit the budget it was planned for".to_owned(),
        (Event::CacheBlocks, _) => {
            format!("{who} has no memory left for the cache of keys and values")
        }
        (Event::Pool, _) => format!("{who} has no place left for another request or token"),
        (Event::Startup, _) => {
            "less of the card was free at the start than vLLM is to take".to_owned()
        }
        (Event::Library(name), _) if *name != who => {
            format!("{who} ran out of {unit} memory: {name} could not get its workspace")
        }
        (Event::Unified, _) => {
            format!("{who} ran out of the memory that the GPU of this Mac may use")
        }
        _ => format!("{who} ran out of {unit} memory"),
    };
    let rank = incident
        .source
        .rank()
        .map(|rank| format!(" on rank {rank}"));
    let device = incident
        .message
        .device
        .map(|device| format!(" ({unit} {device})"));
    let phase = incident.phase.map(|phase| format!(" {}", phase.said()));
    let step = incident
        .step
        .filter(|step| incident.steps > 0 && *step > 0)
        .map(|step| format!(", after step {step}"));
    let times = (incident.times > 1).then(|| format!(", told {} times", incident.times));
    let parts = [rank, device, phase, step, times]
        .map(Option::unwrap_or_default)
        .concat();
    format!("{what}{parts}")
}
