//! A machine as it was found: its GPUs, who uses them, the host, and how that was learned.

use serde::{Deserialize, Serialize};

use crate::architecture::ComputeCapability;
use crate::card::Card;
use crate::catalogue::{Gpu, Training};
use crate::find::find_detected;
use crate::host::{self, Host};
use crate::probe::{Probe, Silence, ThisMachine};
use crate::smi;
use crate::visible::{Visible, visible};

/// What the machine has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    pub read_by: ReadBy,
    /// Why there is no GPU to see, or why it was not NVML that was asked.
    pub reason: Option<String>,
    pub driver_version: Option<String>,
    /// The newest CUDA that the driver runs.
    pub cuda_version: Option<String>,
    /// In the order of the bus, as `nvidia-smi` lists them.
    pub gpus: Vec<DetectedGpu>,
    /// What a CUDA program sees, in its order; the first is the one that is used.
    pub visible: Vec<Visible>,
    /// What the user should know about the choice.
    pub notes: Vec<String>,
    pub host: Host,
}

/// Who told us of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadBy {
    Nvml,
    NvidiaSmi,
    Nobody,
}

impl ReadBy {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvml => "NVML",
            Self::NvidiaSmi => "nvidia-smi",
            Self::Nobody => "nobody",
        }
    }
}

/// What a driver told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Readings {
    pub gpus: Vec<DetectedGpu>,
    pub driver_version: Option<String>,
    pub cuda_version: Option<String>,
}

/// One GPU as the driver describes it. A reading that is not to be had is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DetectedGpu {
    /// As `nvidia-smi` counts.
    pub index: usize,
    pub name: String,
    /// Why nothing can be read of it.
    pub problem: Option<String>,
    pub uuid: Option<String>,
    pub total_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    /// What the driver keeps for itself.
    pub reserved_bytes: Option<u64>,
    pub compute_capability: Option<ComputeCapability>,
    pub utilization_percent: Option<u32>,
    pub ecc: Option<bool>,
    /// Whether the GPU is cut into parts.
    pub mig: Option<bool>,
    pub instances: Vec<Instance>,
    /// Who holds memory on it; `None` where that is not told.
    pub processes: Option<Vec<Process>>,
}

/// A part of a GPU in MIG mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Instance {
    pub uuid: String,
    pub total_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
}

/// A program that holds memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// `None` where it is another user's, or outside of this container.
    pub name: Option<String>,
    pub used_bytes: Option<u64>,
    pub kind: ProcessKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessKind {
    Compute,
    Graphics,
}

impl DetectedGpu {
    /// A GPU that is there but does not answer.
    pub fn unreadable(index: usize, problem: String) -> Self {
        Self {
            index,
            name: "unknown".to_owned(),
            problem: Some(problem),
            uuid: None,
            total_bytes: None,
            free_bytes: None,
            used_bytes: None,
            reserved_bytes: None,
            compute_capability: None,
            utilization_percent: None,
            ecc: None,
            mig: None,
            instances: Vec::new(),
            processes: None,
        }
    }

    /// Its line in the catalogue.
    pub fn catalogued(&self) -> Option<&'static Gpu> {
        find_detected(&self.name, self.total_bytes)
    }

    /// Its rates, under the driver's name, where the catalogue knows it.
    pub fn card(&self) -> Option<Card> {
        let card = self.catalogued()?.card();
        Some(Card {
            name: self.name.clone(),
            ..card
        })
    }

    /// Whether cinch trains on it: by what the driver says of the chip, else by the catalogue.
    /// `None` where neither knows.
    pub fn training(&self) -> Option<Training> {
        match self.compute_capability {
            Some(found) => Some(Training::on(Some(found))),
            None => self.catalogued().map(Gpu::training),
        }
    }

    /// The memory that programs share: the total without what the driver keeps.
    pub fn usable_bytes(&self) -> Option<u64> {
        let total = self.total_bytes?;
        Some(total.saturating_sub(self.reserved_bytes.unwrap_or(0)))
    }
}

/// The GPU that a CUDA program would use, or the part of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen<'a> {
    pub gpu: &'a DetectedGpu,
    pub instance: Option<&'a Instance>,
}

impl Chosen<'_> {
    /// The memory that programs on it share.
    pub fn usable_bytes(&self) -> Option<u64> {
        match self.instance {
            Some(instance) => instance.total_bytes,
            None => self.gpu.usable_bytes(),
        }
    }

    /// What nobody holds now.
    pub fn free_bytes(&self) -> Option<u64> {
        match self.instance {
            Some(instance) => instance.free_bytes,
            None => self.gpu.free_bytes,
        }
    }
}

impl Machine {
    /// The GPU that would be used: the first that CUDA shows.
    pub fn chosen(&self) -> Option<Chosen<'_>> {
        let first = self.visible.first()?;
        let gpu = self.gpus.get(first.gpu)?;
        let instance = first.instance.and_then(|place| gpu.instances.get(place));
        Some(Chosen { gpu, instance })
    }
}

/// Looks at this machine. Takes as long as the driver does, mostly some hundredths of a second.
pub fn detect() -> Machine {
    detect_by(&ThisMachine)
}

/// What a machine has, by what `probe` finds on it.
pub fn detect_by(probe: &dyn Probe) -> Machine {
    let (read_by, readings, reason) = match probe.nvml() {
        Ok(mut readings) => {
            add_memory(&mut readings, probe);
            (ReadBy::Nvml, readings, None)
        }
        Err(nvml) => match smi::read(probe) {
            Ok(readings) => (ReadBy::NvidiaSmi, readings, Some(without_nvml(&nvml))),
            Err(smi) => (
                ReadBy::Nobody,
                Readings::default(),
                Some(without_driver(&nvml, &smi)),
            ),
        },
    };
    let Readings {
        gpus,
        driver_version,
        cuda_version,
    } = readings;
    let reason = match read_by {
        ReadBy::Nvml | ReadBy::NvidiaSmi if gpus.is_empty() => {
            Some("the NVIDIA driver finds no GPU on this machine".to_owned())
        }
        _ => reason,
    };
    let devices = probe.variable("CUDA_VISIBLE_DEVICES");
    let order = probe.variable("CUDA_DEVICE_ORDER");
    let (visible, notes) = visible(&gpus, devices.as_deref(), order.as_deref());
    Machine {
        read_by,
        reason,
        driver_version,
        cuda_version,
        gpus,
        visible,
        notes,
        host: host::read(probe),
    }
}

/// NVML of drivers before 510 has no memory in the form that is asked for; `nvidia-smi` has.
fn add_memory(readings: &mut Readings, probe: &dyn Probe) {
    let lacks = |gpu: &DetectedGpu| gpu.problem.is_none() && gpu.total_bytes.is_none();
    if !readings.gpus.iter().any(lacks) {
        return;
    }
    let told = smi::read(probe).unwrap_or_default().gpus;
    for gpu in readings.gpus.iter_mut().filter(|gpu| lacks(gpu)) {
        let same = told
            .iter()
            .find(|other| other.uuid.is_some() && other.uuid == gpu.uuid);
        if let Some(other) = same {
            gpu.total_bytes = other.total_bytes;
            gpu.free_bytes = other.free_bytes;
            gpu.used_bytes = other.used_bytes;
            gpu.reserved_bytes = other.reserved_bytes;
        }
    }
}

/// The host alone, which needs no driver.
pub fn detect_host() -> Host {
    host::read(&ThisMachine)
}

fn without_nvml(nvml: &Silence) -> String {
    match nvml {
        Silence::NotInstalled => "NVML is not installed".to_owned(),
        Silence::Failed(said) => said.clone(),
    }
}

fn without_driver(nvml: &Silence, smi: &Silence) -> String {
    match (nvml, smi) {
        (Silence::NotInstalled, Silence::NotInstalled) => {
            "no NVIDIA driver on this machine".to_owned()
        }
        (Silence::Failed(said), Silence::NotInstalled)
        | (Silence::NotInstalled, Silence::Failed(said)) => said.clone(),
        (Silence::Failed(nvml), Silence::Failed(smi)) => format!("{nvml}; {smi}"),
    }
}

#[cfg(test)]
mod tests;
