//! Memory while a command runs: sampled by a thread of its own, written down where asked.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use cinch_monitor::{Live, Sample, Watched, append_line};

/// The most that was in use.
#[derive(Clone, Debug, Default)]
pub struct Peaks {
    pub gpus: BTreeMap<usize, u64>,
    pub host: Option<u64>,
    pub num_samples: u64,
}

impl Peaks {
    fn take_up(&mut self, sample: &Sample, pid: u32) {
        self.num_samples += 1;
        for gpu in &sample.gpus {
            if let Some(used) = gpu.used_bytes {
                let peak = self.gpus.entry(gpu.index).or_default();
                *peak = used.max(*peak);
            }
        }
        let resident = sample.facts(pid).and_then(|facts| facts.resident_bytes);
        self.host = self.host.max(resident);
    }
}

/// Samples memory until it is stopped.
pub struct Recorder {
    peaks: Arc<Mutex<Peaks>>,
    pids: Sender<u32>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    pub fn start(interval: f64, record: Option<PathBuf>) -> anyhow::Result<Self> {
        let file = record.map(|path| {
            File::create(&path).with_context(|| format!("{} cannot be written", path.display()))
        });
        let mut file = file.transpose()?;
        let peaks = Arc::new(Mutex::new(Peaks::default()));
        let (pids, received) = mpsc::channel();
        let shared = Arc::clone(&peaks);
        let interval = Duration::from_secs_f64(interval);
        let work = move || {
            let Ok(mut pid) = received.recv() else { return };
            let watched = |pid| Watched {
                also: Some(pid),
                ..Watched::default()
            };
            let mut live = Live::new(watched(pid));
            loop {
                let sample = live.read();
                shared
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take_up(&sample, pid);
                // A full disk must not end the training.
                if let Some(out) = &mut file
                    && append_line(out, &sample).is_err()
                {
                    file = None;
                }
                match received.recv_timeout(interval) {
                    Ok(next) => {
                        pid = next;
                        live.watch_also(pid);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(work);
        Ok(Self {
            peaks,
            pids,
            thread: Some(thread.context("no thread to watch memory")?),
        })
    }

    /// A new attempt begins.
    pub fn begin(&self) {
        *self.peaks.lock().unwrap_or_else(PoisonError::into_inner) = Peaks::default();
    }

    /// Its process has started.
    pub fn watch(&self, pid: u32) {
        let _ = self.pids.send(pid);
    }

    pub fn peaks(&self) -> Peaks {
        self.peaks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn stop(mut self) {
        let (closed, _) = mpsc::channel();
        self.pids = closed;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
