//! Where samples come from.

use std::collections::HashMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use cinch_device::{Watch, detect_host};

use crate::error::MonitorError;
use crate::facts::{Facts, ProcessTable};
use crate::sample::{Planned, Sample};

/// Gives samples, one at a call; `None` at the end of a recording.
pub trait Source {
    fn sample(&mut self) -> Result<Option<Sample>, MonitorError>;
    /// Whether time passes between two samples.
    fn is_live(&self) -> bool;
}

/// What is watched besides the processes on the GPUs.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// A process of which facts are wanted wherever it runs.
    pub pid: Option<u32>,
    /// Another process of which facts are wanted, beside all others.
    pub also: Option<u32>,
    /// What was predicted for the process of `pid`, or for every one that is not cinch's.
    pub planned: Option<Planned>,
}

/// This machine.
#[derive(Debug)]
pub struct Live {
    watch: Watch,
    facts: Facts,
    watched: Watched,
    begin: Instant,
}

impl Live {
    pub fn new(watched: Watched) -> Self {
        Self {
            watch: Watch::new(),
            facts: Facts::new(ProcessTable::of_this_machine()),
            watched,
            begin: Instant::now(),
        }
    }

    /// Wants facts of another process than before.
    pub fn watch_also(&mut self, pid: u32) {
        self.watched.also = Some(pid);
    }

    /// Reads everything once.
    pub fn read(&mut self) -> Sample {
        let look = self.watch.look();
        let mut sample = Sample {
            at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
            seconds: self.begin.elapsed().as_secs_f64(),
            read_by: look.read_by,
            reason: look.reason,
            gpus: look.gpus,
            host: detect_host(),
            processes: Vec::new(),
        };
        let mut pids: Vec<(u32, u64)> = sample
            .on_gpus()
            .map(|(_, process)| (process.pid, process.used_bytes.unwrap_or(0)))
            .collect();
        let wanted = self.watched.pid.into_iter().chain(self.watched.also);
        pids.extend(wanted.map(|pid| (pid, u64::MAX)));
        sample.processes = self.facts.read(&pids, sample.seconds);
        // Where the host sees nothing of a process, the driver's name for it will do.
        let named = sample
            .on_gpus()
            .filter_map(|(_, process)| Some((process.pid, process.name.clone()?)));
        let names: HashMap<u32, String> = named.collect();
        for facts in sample
            .processes
            .iter_mut()
            .filter(|facts| facts.command.is_none())
        {
            facts.command = names.get(&facts.pid).cloned();
        }
        if let Some(planned) = &self.watched.planned {
            for facts in &mut sample.processes {
                let is_meant = self.watched.pid.is_none_or(|pid| pid == facts.pid);
                if is_meant && facts.plan.is_none() {
                    facts.plan = Some(planned.clone());
                }
            }
        }
        if let Some(pid) = self.watched.pid {
            sample.only(pid);
        }
        sample
    }
}

impl Source for Live {
    fn sample(&mut self) -> Result<Option<Sample>, MonitorError> {
        Ok(Some(self.read()))
    }

    fn is_live(&self) -> bool {
        true
    }
}
