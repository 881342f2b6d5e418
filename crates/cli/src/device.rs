//! What the commands plan for and run on.

use cinch_config::{Bytes, Config, Precision};
use cinch_graph::Target;

use crate::args::Device;
use crate::failure::usage;

pub fn free_host_memory() -> Option<u64> {
    cinch_train::available_host_bytes()
}

/// What `cinch plan` plans for: what was asked, else a GPU where the precision asks for one.
pub fn plan_target(device: Device, config: &Config) -> Target {
    match device {
        Device::Cpu => Target::Cpu,
        Device::Cuda => Target::Cuda,
        Device::Auto if config.batch.precision == Precision::Fp32 => Target::Cpu,
        Device::Auto => Target::Cuda,
    }
}

/// What `cinch train` runs on.
pub fn train_target(device: Device) -> anyhow::Result<Target> {
    match device {
        Device::Auto | Device::Cpu => Ok(Target::Cpu),
        Device::Cuda => Err(usage(
            "this version trains on the CPU only\n\
             hint: leave --device out to train here; `cinch plan --device cuda` plans for a GPU",
        )),
    }
}

/// Changes that the CPU makes to a configuration, as notes.
pub fn adapt_to_cpu(config: &mut Config) -> Vec<String> {
    let mut notes = Vec::new();
    if config.batch.precision != Precision::Fp32 {
        notes.push(format!(
            "{} is for GPUs: on the CPU this runs in fp32",
            config.batch.precision.name()
        ));
        config.batch.precision = Precision::Fp32;
    }
    if config.batch.offload {
        notes.push("offload changes nothing on the CPU: all is in host memory".to_owned());
        config.batch.offload = false;
    }
    notes
}

/// Without a budget, what is free on the host is one: a run that starts does not swap or get
/// killed. Returns a note where that was done.
pub fn default_budget(config: &mut Config) -> Option<String> {
    if config.batch.budget.is_some() {
        return None;
    }
    let free = Bytes::new(free_host_memory()?);
    config.batch.budget = Some(free);
    Some(format!(
        "no --vram given: the budget is the free host memory, {free}"
    ))
}
