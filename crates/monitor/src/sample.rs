//! One look at the machine, as it is kept in a recording: a line of JSON.

use cinch_device::{GpuReading, Host, Process, ReadBy};
use serde::{Deserialize, Serialize};

use crate::facts::ProcessFacts;

/// Everything that was read at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Seconds since 1970.
    pub at: f64,
    /// Seconds since the first sample, by a clock that is never set back.
    pub seconds: f64,
    pub read_by: ReadBy,
    /// Why there is no GPU to see, or why it was not NVML that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub gpus: Vec<GpuReading>,
    pub host: Host,
    /// What the host knows of processes: those on the GPUs, and cinch's own runs. In the order of
    /// their numbers, by which they are looked up.
    #[serde(default)]
    pub processes: Vec<ProcessFacts>,
}

/// What was predicted for a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    pub bytes: u64,
    /// The run's folder, or the file that was planned.
    pub of: String,
    /// Whether it is of a GPU's memory, and not of the host's.
    pub on_gpu: bool,
}

impl Sample {
    pub fn facts(&self, pid: u32) -> Option<&ProcessFacts> {
        let place = self.processes.binary_search_by_key(&pid, |facts| facts.pid);
        self.processes.get(place.ok()?)
    }

    /// Processes on GPUs, each with its GPU's index.
    pub fn on_gpus(&self) -> impl Iterator<Item = (usize, &Process)> {
        self.gpus.iter().flat_map(|gpu| {
            let processes = gpu.processes.iter().flatten();
            processes.map(move |process| (gpu.index, process))
        })
    }

    /// Host memory in use, without what the kernel would give back.
    pub fn host_used_bytes(&self) -> Option<u64> {
        let total = self.host.total_bytes?;
        Some(total.saturating_sub(self.host.available_bytes?))
    }

    /// Keeps only one process and what it runs on.
    pub fn only(&mut self, pid: u32) {
        self.processes.retain(|facts| facts.pid == pid);
        for gpu in &mut self.gpus {
            if let Some(processes) = &mut gpu.processes {
                processes.retain(|process| process.pid == pid);
            }
        }
    }
}
