//! The same GPUs, read again and again: what a monitor needs every second.
//!
//! NVML is opened once and stays open in a thread of its own: opening it takes hundredths of a
//! second, and a GPU that falls off the bus can make a call that never comes back. Whoever waits
//! for such a call waits for a stated time, goes on with what is known, and asks again later.

use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::machine::{Process, ReadBy};
use crate::nvml;
use crate::probe::{Probe, Silence, ThisMachine};
use crate::smi;

/// One GPU at one moment. A reading that is not to be had is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuReading {
    pub index: usize,
    pub name: String,
    /// Why nothing can be read of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    pub uuid: Option<String>,
    pub total_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
    /// The share of the time in which a kernel ran.
    pub utilization_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    /// From the host to the card, bytes a second.
    pub pcie_receive: Option<u64>,
    /// From the card to the host, bytes a second.
    pub pcie_send: Option<u64>,
    /// Who holds memory on it; `None` where that is not told.
    pub processes: Option<Vec<Process>>,
}

impl GpuReading {
    /// A GPU that is there but does not answer.
    pub(crate) fn unreadable(index: usize, problem: String) -> Self {
        Self {
            index,
            name: "unknown".to_owned(),
            problem: Some(problem),
            ..Self::default()
        }
    }
}

/// What one look at all GPUs found.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    pub read_by: ReadBy,
    /// Why there is no GPU to see, or why it was not NVML that was asked.
    pub reason: Option<String>,
    pub gpus: Vec<GpuReading>,
}

/// How long a look may take. PCIe counters take some forty milliseconds a card.
const PATIENCE: Duration = Duration::from_secs(4);

const NOT_INSTALLED: &str = "NVML is not installed";

type Answer = Result<Vec<GpuReading>, Silence>;

/// Keeps the driver's library open and reads all GPUs on request.
#[derive(Debug)]
pub struct Watch {
    nvml: Option<Asked>,
    /// What NVML said when it was given up.
    reason: Option<String>,
    /// The machine has neither, and is not asked again.
    has_nobody: bool,
}

#[derive(Debug)]
struct Asked {
    requests: Sender<()>,
    answers: Receiver<Answer>,
    /// A question that has had no answer yet.
    is_waiting: bool,
}

impl Default for Watch {
    fn default() -> Self {
        Self::new()
    }
}

impl Watch {
    pub fn new() -> Self {
        let (requests, wanted) = mpsc::channel();
        let (sender, answers) = mpsc::channel();
        let thread = thread::Builder::new().name("nvml".to_owned());
        let spawned = thread.spawn(move || nvml::serve(&wanted, &sender));
        let asked = Asked {
            requests,
            answers,
            is_waiting: false,
        };
        match spawned {
            Ok(_) => Self {
                nvml: Some(asked),
                reason: None,
                has_nobody: false,
            },
            Err(error) => Self {
                nvml: None,
                reason: Some(format!("no thread for NVML: {error}")),
                has_nobody: false,
            },
        }
    }

    /// Reads all GPUs: by NVML, else by `nvidia-smi`.
    pub fn look(&mut self) -> Look {
        match self.ask() {
            Some(Ok(gpus)) => {
                let reason = gpus
                    .is_empty()
                    .then(|| "the NVIDIA driver finds no GPU on this machine".to_owned());
                return Look {
                    read_by: ReadBy::Nvml,
                    reason,
                    gpus,
                };
            }
            // A library that is not there will not come while we run.
            Some(Err(silence)) => {
                self.reason = Some(silence.said(NOT_INSTALLED));
                if silence == Silence::NotInstalled {
                    self.nvml = None;
                }
            }
            None => {}
        }
        if self.has_nobody {
            return without_driver();
        }
        let (look, is_installed) = look_by_tool(&ThisMachine, self.reason.clone());
        self.has_nobody = self.nvml.is_none() && !is_installed;
        look
    }

    /// What NVML says; `None` where it is not there or has not answered in time.
    fn ask(&mut self) -> Option<Answer> {
        let asked = self.nvml.as_mut()?;
        if asked.is_waiting {
            match asked.answers.try_recv() {
                Ok(_) => asked.is_waiting = false,
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    self.nvml = None;
                    return None;
                }
            }
        }
        if asked.requests.send(()).is_err() {
            self.nvml = None;
            return None;
        }
        match asked.answers.recv_timeout(PATIENCE) {
            Ok(answer) => Some(answer),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                asked.is_waiting = true;
                self.reason = Some(format!(
                    "NVML did not answer within {:.0} s",
                    PATIENCE.as_secs_f64()
                ));
                None
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                self.nvml = None;
                self.reason = Some("NVML broke off".to_owned());
                None
            }
        }
    }
}

/// A machine without NVIDIA's driver.
fn without_driver() -> Look {
    Look {
        read_by: ReadBy::Nobody,
        reason: Some("no NVIDIA driver on this machine".to_owned()),
        gpus: Vec::new(),
    }
}

/// What `nvidia-smi` says, after NVML did not, and whether the tool is there at all.
fn look_by_tool(probe: &dyn Probe, without_nvml: Option<String>) -> (Look, bool) {
    match smi::watch(probe) {
        Ok(gpus) => {
            let look = Look {
                read_by: ReadBy::NvidiaSmi,
                reason: without_nvml,
                gpus,
            };
            (look, true)
        }
        Err(Silence::NotInstalled) => match without_nvml {
            Some(said) if said != NOT_INSTALLED => {
                let reason = Some(said);
                (
                    Look {
                        reason,
                        ..without_driver()
                    },
                    false,
                )
            }
            _ => (without_driver(), false),
        },
        Err(Silence::Failed(said)) => {
            let reason = Some(said);
            (
                Look {
                    reason,
                    ..without_driver()
                },
                true,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::recorded::Recorded;

    #[test]
    fn without_a_driver_the_reason_is_said() {
        let (look, is_installed) = look_by_tool(&Recorded::default(), None);
        assert!(!is_installed);
        assert_eq!(look.read_by, ReadBy::Nobody);
        let reason = look.reason.unwrap();
        assert!(reason.contains("no NVIDIA driver"), "{reason}");
    }

    #[test]
    fn the_tool_is_read_with_temperature_and_power() {
        let probe = Recorded {
            smi: vec![
                (
                    "--query-gpu",
                    Ok("0, GPU-aa, 24564, 23000, 1200, 3, 41, 65.20, 450.00, RTX 4090\n\
                        1, GPU-bb, 24564, [N/A], [N/A], [N/A], [N/A], [Insufficient Permissions], [N/A], RTX 4090\n"
                        .to_owned()),
                ),
                ("--query-compute-apps", Ok("GPU-aa, 77, 1100, python\n".to_owned())),
            ],
            ..Recorded::default()
        };
        let (look, _) = look_by_tool(&probe, Some("NVML is not installed".to_owned()));
        assert_eq!(look.read_by, ReadBy::NvidiaSmi);
        let [first, second] = &look.gpus[..] else {
            panic!("{:?}", look.gpus);
        };
        assert_eq!(first.temperature_celsius, Some(41));
        assert_eq!(
            (first.power_watts, first.power_limit_watts),
            (Some(65.2), Some(450.0))
        );
        assert_eq!(first.processes.as_ref().unwrap()[0].pid, 77);
        assert_eq!((second.used_bytes, second.power_watts), (None, None));
        assert_eq!(second.total_bytes, Some(24_564 << 20));
    }
}
