//! The warning signs: memory that creeps up, spikes, an allocator that retries, a card that is
//! hardly used and why, memory above the plan, and what cannot be read.

use cinch_config::Bytes;
use serde::Serialize;

use crate::history::{GpuHistory, History, ProcessHistory, ProcessKey};
use crate::text::span;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SignKind {
    Creep,
    Spikes,
    Retries,
    LowUse,
    LowMemory,
    AbovePlan,
    Vanished,
}

impl SignKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Creep => "creep",
            Self::Spikes => "spikes",
            Self::Retries => "retries",
            Self::LowUse => "low use",
            Self::LowMemory => "memory to spare",
            Self::AbovePlan => "above the plan",
            Self::Vanished => "vanished",
        }
    }
}

/// Something that a person should look at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sign {
    pub kind: SignKind,
    pub gpu: Option<usize>,
    pub pid: Option<u32>,
    pub text: String,
}

/// Seconds over which use is averaged, and the samples that it takes.
const USE_SECONDS: f64 = 60.0;
const FEWEST: usize = 20;
/// The guides' bound: below half, something else is waited for.
const LOW: f64 = 0.5;
/// A core that is busy for so much of the time leaves a single-threaded program no more.
const WHOLE_CORE: f64 = 0.8;
/// A moment above the usual by this share and by these bytes is a spike.
const SPIKE_SHARE: f64 = 0.2;
const SPIKE_BYTES: u64 = 256 << 20;
/// Over the plan by more than this is told; what lies below are other programs' contexts.
const PLAN_SLACK: u64 = 64 << 20;

/// All signs of the newest sample, in the order of GPUs.
pub fn signs(history: &History) -> Vec<Sign> {
    let mut found = Vec::new();
    for (&index, gpu) in &history.gpus {
        if gpu.is_gone {
            found.push(Sign {
                kind: SignKind::Vanished,
                gpu: Some(index),
                pid: None,
                text: "no longer told of by the driver: it may have fallen off the bus (see \
                       `dmesg` for Xid)"
                    .to_owned(),
            });
            continue;
        }
        found.extend(underuse(history, index, gpu));
    }
    for (key, process) in &history.processes {
        let newest = history.last.as_ref().map_or(0.0, |last| last.seconds);
        if process.last_seen < newest {
            continue;
        }
        found.extend(of_process(history, *key, process));
    }
    found
}

fn of_process(history: &History, key: ProcessKey, process: &ProcessHistory) -> Vec<Sign> {
    let mut found = Vec::new();
    let mut sign = |kind, text| {
        found.push(Sign {
            kind,
            gpu: key.gpu,
            pid: Some(key.pid),
            text,
        });
    };
    if let Some(trend) = process.trend.filter(|trend| trend.is_creep) {
        let rate = trend.mebibytes_per_minute();
        let full = free_bytes(history, key).and_then(|free| trend.seconds_until(free));
        let full = full.map_or_else(String::new, |seconds| {
            format!(", full in {}", span(seconds))
        });
        sign(
            SignKind::Creep,
            format!(
                "rises by {rate:.1} MiB a minute (by {} in {}){full}: is something kept from step to step?",
                Bytes::new(trend.growth_bytes as u64),
                span(trend.seconds)
            ),
        );
    } else if let Some((usual, spike)) = spikes(process) {
        sign(
            SignKind::Spikes,
            format!(
                "mostly {}, at times {}: batches of different lengths, or an evaluation",
                Bytes::new(usual),
                Bytes::new(spike)
            ),
        );
    }
    // Where nearly full is the exception, a fall is the end of a spike.
    if process.num_flushes >= 2 && spikes(process).is_none() {
        sign(
            SignKind::Retries,
            format!(
                "gave cached memory back and took it again {} times on a full card: allocations \
                 fail at first and are tried again, which is slow and the last stage before an error",
                process.num_flushes
            ),
        );
    }
    let facts = history.last.as_ref().and_then(|last| last.facts(key.pid));
    if let Some(plan) = facts.and_then(|facts| facts.plan.as_ref())
        && plan.on_gpu == key.gpu.is_some()
        && let Some(used) = process.series.last()
        && used > plan.bytes.saturating_add(PLAN_SLACK)
    {
        sign(
            SignKind::AbovePlan,
            format!(
                "holds {}, and {} were planned",
                Bytes::new(used),
                Bytes::new(plan.bytes)
            ),
        );
    }
    found
}

fn free_bytes(history: &History, key: ProcessKey) -> Option<u64> {
    match key.gpu {
        Some(index) => history.gpus.get(&index)?.reading.free_bytes,
        None => history.last.as_ref()?.host.available_bytes,
    }
}

/// What a process mostly holds, and its highest use where that stands out and has passed.
fn spikes(process: &ProcessHistory) -> Option<(u64, u64)> {
    let mut values: Vec<u64> = process.series.points().map(|point| point.1).collect();
    if values.len() < FEWEST {
        return None;
    }
    let last = *values.last()?;
    let middle = values.len() / 2;
    let usual = *values.select_nth_unstable(middle).1;
    let peak = process.peak_bytes;
    let least = usual.saturating_add(SPIKE_BYTES.max((usual as f64 * SPIKE_SHARE) as u64));
    (peak > least && last < least).then_some((usual, peak))
}

/// A card that somebody holds and that mostly does nothing, with what it waits for.
fn underuse(history: &History, index: usize, gpu: &GpuHistory) -> Vec<Sign> {
    let largest = history
        .processes
        .iter()
        .filter(|(key, process)| key.gpu == Some(index) && !process.series.is_empty())
        .max_by_key(|(_, process)| process.series.last());
    let Some((key, process)) = largest else {
        return Vec::new();
    };
    let total = gpu.reading.total_bytes.unwrap_or(0).max(1);
    let share = gpu.peak_bytes as f64 / total as f64;
    let recent = gpu.utilization.recent(USE_SECONDS, 1);
    let percents: Vec<f64> = recent.iter().map(|point| point.1 as f64).collect();
    if percents.len() < FEWEST {
        return Vec::new();
    }
    let mean = percents.iter().sum::<f64>() / percents.len() as f64;
    let sign = |kind, text| Sign {
        kind,
        gpu: Some(index),
        pid: Some(key.pid),
        text,
    };
    if mean >= 100.0 * LOW {
        let spare = share < LOW;
        let text = || {
            format!(
                "busy, with {} of {} used at the peak: a larger batch fits",
                Bytes::new(gpu.peak_bytes),
                Bytes::new(total)
            )
        };
        return spare
            .then(|| sign(SignKind::LowMemory, text()))
            .into_iter()
            .collect();
    }
    let waits = waiting_for(process, share);
    vec![sign(
        SignKind::LowUse,
        format!("kernels run {mean:.0} % of the time: {waits}"),
    )]
}

/// Why a card is idle, from how busy the host's side of it is.
fn waiting_for(process: &ProcessHistory, memory_share: f64) -> String {
    let workers = process.children_busy.unwrap_or(0.0);
    match process.cores_busy {
        None => "the host tells nothing of its process".to_owned(),
        Some(cores) if cores >= WHOLE_CORE && memory_share < LOW => format!(
            "too small a batch. The host is busy starting kernels ({cores:.1} cores), and {:.0} % \
             of the memory is used: more samples a step give each kernel more to do",
            100.0 * memory_share
        ),
        Some(cores) if cores >= WHOLE_CORE => format!(
            "waiting for the host, which is busy ({cores:.1} cores): Python between kernels, \
             logging, transfers"
        ),
        Some(cores) if workers >= LOW => format!(
            "waiting for data. Its workers are busy ({workers:.1} cores) and it is not \
             ({cores:.1}): more workers, or data prepared before"
        ),
        Some(cores) => format!(
            "waiting for data or for others: neither it ({cores:.1} cores) nor its workers \
             ({workers:.1}) are busy, so it waits for a disk, a network or another rank"
        ),
    }
}

#[cfg(test)]
mod tests {
    use cinch_device::{GpuReading, Host, Process, ProcessKind, ReadBy};

    use super::*;
    use crate::facts::ProcessFacts;
    use crate::sample::{Planned, Sample};

    const GIB: u64 = 1 << 30;

    struct Scene {
        used: u64,
        percent: u32,
        cores: f64,
        workers: f64,
        plan: Option<u64>,
    }

    fn sample(second: u64, scene: &Scene) -> Sample {
        Sample {
            at: 1e9 + second as f64,
            seconds: second as f64,
            read_by: ReadBy::Nvml,
            reason: None,
            gpus: vec![GpuReading {
                name: "NVIDIA H200".to_owned(),
                total_bytes: Some(140 * GIB),
                used_bytes: Some(scene.used),
                free_bytes: Some(140 * GIB - scene.used),
                utilization_percent: Some(scene.percent),
                processes: Some(vec![Process {
                    pid: 7,
                    name: None,
                    used_bytes: Some(scene.used),
                    kind: ProcessKind::Compute,
                }]),
                ..GpuReading::default()
            }],
            host: Host::default(),
            processes: vec![ProcessFacts {
                pid: 7,
                cores_busy: Some(scene.cores),
                children_busy: Some(scene.workers),
                plan: scene.plan.map(|bytes| Planned {
                    bytes,
                    of: "runs/a".to_owned(),
                    on_gpu: true,
                }),
                ..ProcessFacts::default()
            }],
        }
    }

    fn after(seconds: u64, scene: impl Fn(u64) -> Scene) -> Vec<Sign> {
        let mut history = History::default();
        for second in 0..seconds {
            history.push(sample(second, &scene(second)));
        }
        history.settle();
        signs(&history)
    }

    fn kinds(signs: &[Sign]) -> Vec<SignKind> {
        signs.iter().map(|sign| sign.kind).collect()
    }

    const BUSY: Scene = Scene {
        used: 100 * GIB,
        percent: 97,
        cores: 1.0,
        workers: 0.0,
        plan: None,
    };

    #[test]
    fn a_healthy_run_has_no_sign() {
        assert_eq!(after(200, |_| BUSY), []);
    }

    #[test]
    fn creep_has_a_rate_and_a_forecast() {
        let signs = after(200, |second| Scene {
            used: 100 * GIB + second * (64 << 20),
            ..BUSY
        });
        assert_eq!(kinds(&signs), [SignKind::Creep]);
        // 64 MiB a second; 40 GiB less 12.4 are left: 442 seconds.
        assert!(
            signs[0].text.contains("3840.0 MiB a minute"),
            "{}",
            signs[0].text
        );
        assert!(signs[0].text.contains("full in 7 min"), "{}", signs[0].text);
    }

    #[test]
    fn idle_cards_are_explained() {
        for (cores, workers, used, expected) in [
            (1.0, 0.0, 20, "too small a batch"),
            (1.1, 0.0, 120, "waiting for the host"),
            (0.1, 3.5, 120, "waiting for data. Its workers"),
            (0.1, 0.0, 120, "waits for a disk"),
        ] {
            let signs = after(40, |_| Scene {
                used: used * GIB,
                percent: 20,
                cores,
                workers,
                plan: None,
            });
            assert_eq!(kinds(&signs), [SignKind::LowUse]);
            assert!(signs[0].text.contains(expected), "{}", signs[0].text);
        }
        let spare = after(40, |_| Scene {
            used: 30 * GIB,
            ..BUSY
        });
        assert_eq!(kinds(&spare), [SignKind::LowMemory]);
    }

    #[test]
    fn spikes_retries_and_plans() {
        let spikes = after(100, |second| Scene {
            used: if second % 30 == 5 { 130 } else { 90 } * GIB,
            ..BUSY
        });
        assert_eq!(kinds(&spikes), [SignKind::Spikes]);
        let retries = after(100, |second| Scene {
            used: if second % 10 == 5 { 110 } else { 138 } * GIB,
            ..BUSY
        });
        assert_eq!(kinds(&retries), [SignKind::Retries]);
        let above = after(30, |_| Scene {
            plan: Some(90 * GIB),
            ..BUSY
        });
        assert_eq!(kinds(&above), [SignKind::AbovePlan]);
    }

    #[test]
    fn a_gpu_that_vanishes_is_told_and_the_rest_goes_on() {
        let mut history = History::default();
        history.push(sample(0, &BUSY));
        let mut gone = sample(1, &BUSY);
        gone.gpus.clear();
        history.push(gone);
        assert_eq!(kinds(&signs(&history)), [SignKind::Vanished]);
        assert_eq!(history.gpus[&0].reading.name, "NVIDIA H200");
        history.push(sample(2, &BUSY));
        assert_eq!(signs(&history), []);
    }
}
