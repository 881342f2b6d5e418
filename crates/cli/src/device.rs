//! What the commands plan for and run on.

use cinch_config::{Bytes, Config, Precision};
use cinch_engine::cuda::compile::kernels_folder;
use cinch_engine::{EngineError, cuda};
use cinch_graph::Target;
use cinch_step::StepPlan;

use crate::args::Device;

pub fn free_host_memory() -> Option<u64> {
    cinch_train::available_host_bytes()
}

/// What `cinch plan` plans for: what was asked, else a GPU where one is named or the precision
/// asks for it.
pub fn plan_target(device: Device, config: &Config, names_a_gpu: bool) -> Target {
    match device {
        Device::Cpu => Target::Cpu,
        Device::Cuda => Target::Cuda,
        Device::Auto if names_a_gpu => Target::Cuda,
        Device::Auto if config.batch.precision == Precision::Fp32 => Target::Cpu,
        Device::Auto => Target::Cuda,
    }
}

/// What `cinch train` runs on: what was asked, else a GPU where there is one.
pub fn train_target(device: Device) -> anyhow::Result<Target> {
    match device {
        Device::Cpu => Ok(Target::Cpu),
        Device::Auto if !cuda::is_available() => Ok(Target::Cpu),
        Device::Cuda if !cuda::is_available() => Err(EngineError::NoDriver.into()),
        Device::Auto | Device::Cuda => Ok(Target::Cuda),
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
        notes.push(
            "offload saves nothing on the CPU: states get an allocation of their own in the same \
             memory"
                .to_owned(),
        );
    }
    if config.batch.offload_frozen {
        notes.push(
            "offload of frozen weights saves nothing on the CPU: they get an allocation of their \
             own in the same memory, and are copied from there"
                .to_owned(),
        );
    }
    if config.batch.offload_activations > 0 {
        notes.push(
            "offload of activations saves nothing on the CPU: they get an allocation of their own \
             in the same memory, and are copied there and back"
                .to_owned(),
        );
    }
    notes
}

/// What to say where fewer blocks than asked keep activations in host memory: only what is
/// recomputed can be kept there instead.
pub fn stored_note(step: &StepPlan) -> Option<String> {
    let (asked, stored) = (
        step.config.batch.offload_activations,
        step.training.num_offloaded,
    );
    (stored < asked).then(|| {
        format!(
            "activations of {stored} blocks are in host memory, not of {asked}: only recomputed \
             blocks can keep some there, and {} are recomputed (--checkpointing {asked})",
            step.training.num_recomputed
        )
    })
}

/// Why compiled kernels are not kept, where they are not.
pub fn cache_note(target: Target) -> Option<String> {
    let refused = match target {
        Target::Cuda => kernels_folder().err()?,
        Target::Cpu => return None,
    };
    Some(format!(
        "kernels are compiled anew in every run, because `{}` is not used: {}; {} names another \
         cache folder",
        refused.folder.display(),
        refused.reason,
        cinch_files::CACHE_VARIABLE
    ))
}

/// Without a budget, what is free on the device is one: a run that starts does not run out
/// later. Returns what that memory is where it was done.
pub fn default_budget(config: &mut Config, target: Target) -> Option<&'static str> {
    if config.batch.budget.is_some() {
        return None;
    }
    let (free, name) = match target {
        Target::Cpu => (free_host_memory()?, "free host memory"),
        Target::Cuda => (cuda::memory().ok()?.0, "free GPU memory"),
    };
    config.batch.budget = Some(Bytes::new(free));
    Some(name)
}
