//! What is kept of the samples: bounded series, peaks and trends of GPUs, processes and the host.

use std::collections::{BTreeMap, HashSet};

use cinch_device::GpuReading;

use crate::sample::Sample;
use crate::series::Series;
use crate::trend::{FEWEST, Trend, trend};

/// Points of a GPU's and of the host's series: an hour at a sample a second, then coarser.
const GPU_POINTS: usize = 3600;
/// Points of a process's series: there may be thousands.
const PROCESS_POINTS: usize = 256;
/// Seconds over which a trend is told.
const TREND_SECONDS: f64 = 600.0;
/// A process's trend is worked out at one in so many samples: it changes slowly.
const TREND_EVERY: u64 = 8;
/// Seconds after which a process that has gone is forgotten.
const FORGET: f64 = 120.0;
/// The weight of a new reading in a moving average.
const WEIGHT: f64 = 0.1;

/// A process on a GPU, or on the host alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    pub gpu: Option<usize>,
    pub pid: u32,
}

#[derive(Clone, Debug)]
pub struct ProcessHistory {
    pub series: Series,
    pub peak_bytes: u64,
    pub trend: Option<Trend>,
    /// Seconds of the first and of the last sample that had it.
    pub first_seen: f64,
    pub last_seen: f64,
    /// Moving averages of busy cores.
    pub cores_busy: Option<f64>,
    pub children_busy: Option<f64>,
    /// How often its use fell steeply while the card was nearly full and came back.
    pub num_flushes: u32,
    before: u64,
    fell_from: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct GpuHistory {
    pub used: Series,
    pub utilization: Series,
    pub peak_bytes: u64,
    pub trend: Option<Trend>,
    /// The newest reading; the last one before it vanished.
    pub reading: GpuReading,
    pub is_gone: bool,
}

/// Everything that views show.
#[derive(Clone, Debug)]
pub struct History {
    pub gpus: BTreeMap<usize, GpuHistory>,
    pub processes: BTreeMap<ProcessKey, ProcessHistory>,
    pub host: Series,
    pub host_peak_bytes: u64,
    pub host_trend: Option<Trend>,
    pub last: Option<Sample>,
    pub num_samples: u64,
}

impl Default for History {
    fn default() -> Self {
        Self {
            gpus: BTreeMap::new(),
            processes: BTreeMap::new(),
            host: Series::new(GPU_POINTS),
            host_peak_bytes: 0,
            host_trend: None,
            last: None,
            num_samples: 0,
        }
    }
}

impl History {
    pub fn push(&mut self, mut sample: Sample) {
        // A recording may have been put together by hand.
        sample.processes.sort_by_key(|facts| facts.pid);
        let now = sample.seconds;
        self.num_samples += 1;
        for gpu in self.gpus.values_mut() {
            gpu.is_gone = true;
        }
        for reading in &sample.gpus {
            self.push_gpu(reading, now);
        }
        let mut present = HashSet::new();
        for (gpu, process) in sample.on_gpus() {
            let key = ProcessKey {
                gpu: Some(gpu),
                pid: process.pid,
            };
            present.insert(process.pid);
            let total = self.gpus.get(&gpu).and_then(|gpu| gpu.reading.total_bytes);
            self.push_process(key, process.used_bytes, total, now, &sample);
        }
        for facts in sample
            .processes
            .iter()
            .filter(|facts| !present.contains(&facts.pid))
        {
            let key = ProcessKey {
                gpu: None,
                pid: facts.pid,
            };
            let total = sample.host.total_bytes;
            self.push_process(key, facts.resident_bytes, total, now, &sample);
        }
        self.processes
            .retain(|_, process| now - process.last_seen <= FORGET);
        if let Some(used) = sample.host_used_bytes() {
            self.host.push(now, used);
            self.host_peak_bytes = self.host_peak_bytes.max(used);
            self.host_trend = trend(&self.host.recent(TREND_SECONDS, FEWEST));
        }
        self.last = Some(sample);
    }

    fn push_gpu(&mut self, reading: &GpuReading, now: f64) {
        let gpu = self
            .gpus
            .entry(reading.index)
            .or_insert_with(|| GpuHistory {
                used: Series::new(GPU_POINTS),
                utilization: Series::new(GPU_POINTS),
                peak_bytes: 0,
                trend: None,
                reading: reading.clone(),
                is_gone: false,
            });
        gpu.is_gone = false;
        gpu.reading = reading.clone();
        if let Some(used) = reading.used_bytes {
            gpu.used.push(now, used);
            gpu.peak_bytes = gpu.peak_bytes.max(used);
            gpu.trend = trend(&gpu.used.recent(TREND_SECONDS, FEWEST));
        }
        if let Some(percent) = reading.utilization_percent {
            gpu.utilization.push(now, percent.into());
        }
    }

    fn push_process(
        &mut self,
        key: ProcessKey,
        used: Option<u64>,
        total: Option<u64>,
        now: f64,
        sample: &Sample,
    ) {
        let count = self.num_samples;
        let process = self.processes.entry(key).or_insert_with(|| ProcessHistory {
            series: Series::new(PROCESS_POINTS),
            peak_bytes: 0,
            trend: None,
            first_seen: now,
            last_seen: now,
            cores_busy: None,
            children_busy: None,
            num_flushes: 0,
            before: 0,
            fell_from: None,
        });
        process.last_seen = now;
        if let Some(used) = used {
            process.series.push(now, used);
            process.peak_bytes = process.peak_bytes.max(used);
            process.note_flush(used, total);
            if (count + u64::from(key.pid)).is_multiple_of(TREND_EVERY) {
                process.trend = trend(&process.series.recent(TREND_SECONDS, FEWEST));
            }
        }
        if let Some(facts) = sample.facts(key.pid) {
            moving(&mut process.cores_busy, facts.cores_busy);
            moving(&mut process.children_busy, facts.children_busy);
        }
    }

    /// Works out all trends now, as after the last sample of a recording.
    pub fn settle(&mut self) {
        for process in self.processes.values_mut() {
            process.trend = trend(&process.series.recent(TREND_SECONDS, FEWEST));
        }
    }
}

impl ProcessHistory {
    /// Counts what an allocator's retry looks like from outside: from nearly all of the card the
    /// use falls by a tenth of it or more, as cached blocks are given back, and returns.
    fn note_flush(&mut self, used: u64, total: Option<u64>) {
        if let Some(total) = total.filter(|&total| total > 0) {
            let is_full = |bytes: u64| bytes > total / 10 * 9;
            match self.fell_from {
                None if is_full(self.before) && self.before.saturating_sub(used) > total / 10 => {
                    self.fell_from = Some(self.before);
                }
                Some(_) if is_full(used) => {
                    self.num_flushes += 1;
                    self.fell_from = None;
                }
                _ => {}
            }
        }
        self.before = used;
    }
}

fn moving(average: &mut Option<f64>, reading: Option<f64>) {
    if let Some(reading) = reading.filter(|reading| reading.is_finite()) {
        *average = Some(average.map_or(reading, |before| before + WEIGHT * (reading - before)));
    }
}
