//! What the driver says through NVML, its management library. The library is looked for at run
//! time, so that nothing of NVIDIA's is needed to build or to start.

use std::ffi::OsStr;
use std::sync::mpsc::{Receiver, Sender};

use nvml_wrapper::enum_wrappers::device::{PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{
    Device, Nvml, cuda_driver_version_major as major, cuda_driver_version_minor as minor,
};

use crate::architecture::ComputeCapability;
use crate::machine::{DetectedGpu, Instance, Process, ProcessKind, Readings};
use crate::probe::Silence;
use crate::watch::GpuReading;

/// Drivers install the first name; the second comes with development packages.
#[cfg(not(windows))]
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
#[cfg(windows)]
const LIBRARIES: [&str; 1] = ["nvml.dll"];

/// Bytes of a process's name that are asked for.
const NAME_LENGTH: usize = 256;

pub(crate) fn read() -> Result<Readings, Silence> {
    let nvml = open().map_err(|error| silence(&error))?;
    let count = nvml.device_count().map_err(|error| failed(&error))?;
    let gpus = (0..count).map(|index| {
        // A GPU that has fallen off the bus leaves its place, so that the others keep theirs.
        match nvml.device_by_index(index) {
            Ok(device) => read_gpu(&nvml, &device, index as usize),
            Err(error) => DetectedGpu::unreadable(index as usize, error.to_string()),
        }
    });
    Ok(Readings {
        gpus: gpus.collect(),
        driver_version: nvml.sys_driver_version().ok(),
        cuda_version: nvml
            .sys_cuda_driver_version()
            .ok()
            .map(|version| format!("{}.{}", major(version), minor(version))),
    })
}

/// Reads all GPUs for each request, until nobody asks any more. A driver that cannot be opened is
/// tried again for the next request: it may have been loaded meanwhile.
pub(crate) fn serve(requests: &Receiver<()>, answers: &Sender<Result<Vec<GpuReading>, Silence>>) {
    let mut opened = None;
    while requests.recv().is_ok() {
        let answer = match &opened {
            Some(nvml) => watch(nvml),
            None => match open() {
                Ok(nvml) => watch(opened.insert(nvml)),
                Err(error) => Err(silence(&error)),
            },
        };
        // After a reset of the driver the old handle answers no more.
        if answer.is_err() {
            opened = None;
        }
        if answers.send(answer).is_err() {
            return;
        }
    }
}

fn watch(nvml: &Nvml) -> Result<Vec<GpuReading>, Silence> {
    let count = nvml.device_count().map_err(|error| failed(&error))?;
    let gpus = (0..count).map(|index| match nvml.device_by_index(index) {
        Ok(device) => watch_gpu(nvml, &device, index as usize),
        Err(error) => GpuReading::unreadable(index as usize, error.to_string()),
    });
    Ok(gpus.collect())
}

fn watch_gpu(nvml: &Nvml, device: &Device<'_>, index: usize) -> GpuReading {
    let name = match device.name() {
        Ok(name) => name,
        Err(error) => return GpuReading::unreadable(index, error.to_string()),
    };
    let memory = device.memory_info().ok();
    let watts = |milliwatts: Result<u32, NvmlError>| milliwatts.ok().map(|mw| f64::from(mw) / 1e3);
    // The driver counts kilobytes a second.
    let pcie = |counter| {
        let kilobytes = device.pcie_throughput(counter).ok();
        kilobytes.map(|kilobytes| u64::from(kilobytes) * 1000)
    };
    GpuReading {
        index,
        name,
        problem: None,
        uuid: device.uuid().ok(),
        total_bytes: memory.as_ref().map(|memory| memory.total),
        used_bytes: memory.as_ref().map(|memory| memory.used),
        free_bytes: memory.as_ref().map(|memory| memory.free),
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        power_watts: watts(device.power_usage()),
        power_limit_watts: watts(device.enforced_power_limit()),
        pcie_receive: pcie(PcieUtilCounter::Receive),
        pcie_send: pcie(PcieUtilCounter::Send),
        processes: read_processes(nvml, device),
    }
}

fn silence(error: &NvmlError) -> Silence {
    match error {
        NvmlError::LibloadingError(_) => Silence::NotInstalled,
        other => failed(other),
    }
}

fn failed(error: &NvmlError) -> Silence {
    Silence::Failed(format!("NVML: {error}"))
}

fn open() -> Result<Nvml, NvmlError> {
    let mut result = Err(NvmlError::DriverNotLoaded);
    for library in LIBRARIES {
        result = Nvml::builder().lib_path(OsStr::new(library)).init();
        if !matches!(result, Err(NvmlError::LibloadingError(_))) {
            break;
        }
    }
    result
}

fn read_gpu(nvml: &Nvml, device: &Device<'_>, index: usize) -> DetectedGpu {
    let name = match device.name() {
        Ok(name) => name,
        Err(error) => return DetectedGpu::unreadable(index, error.to_string()),
    };
    let memory = device.memory_info().ok();
    let capability = device.cuda_compute_capability().ok();
    DetectedGpu {
        index,
        name,
        problem: None,
        uuid: device.uuid().ok(),
        total_bytes: memory.as_ref().map(|memory| memory.total),
        free_bytes: memory.as_ref().map(|memory| memory.free),
        used_bytes: memory.as_ref().map(|memory| memory.used),
        reserved_bytes: memory.as_ref().map(|memory| memory.reserved),
        compute_capability: capability.and_then(|capability| {
            let major = u32::try_from(capability.major).ok()?;
            Some(ComputeCapability::new(
                major,
                capability.minor.try_into().ok()?,
            ))
        }),
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        ecc: device
            .is_ecc_enabled()
            .ok()
            .map(|mode| mode.currently_enabled),
        mig: device.mig_mode().ok().map(|mode| mode.current != 0),
        instances: read_instances(device),
        processes: read_processes(nvml, device),
    }
}

/// The parts that a GPU in MIG mode is cut into.
fn read_instances(device: &Device<'_>) -> Vec<Instance> {
    let count = match device.mig_mode() {
        Ok(mode) if mode.current != 0 => device.mig_device_count().unwrap_or(0),
        _ => 0,
    };
    // Places without an instance answer with an error.
    let instances = (0..count).filter_map(|place| device.mig_device_by_index(place).ok());
    let read = instances.filter_map(|instance| {
        let memory = instance.memory_info().ok();
        Some(Instance {
            uuid: instance.uuid().ok()?,
            total_bytes: memory.as_ref().map(|memory| memory.total),
            free_bytes: memory.as_ref().map(|memory| memory.free),
        })
    });
    read.collect()
}

fn read_processes(nvml: &Nvml, device: &Device<'_>) -> Option<Vec<Process>> {
    let compute = device.running_compute_processes();
    let graphics = device.running_graphics_processes();
    if let (Err(_), Err(_)) = (&compute, &graphics) {
        return None;
    }
    let compute = compute.unwrap_or_default();
    let mut graphics = graphics.unwrap_or_default();
    // A program that computes and draws is in both lists, each time with all of its memory.
    graphics.retain(|info| compute.iter().all(|other| other.pid != info.pid));
    let with = |kind| {
        move |info: ProcessInfo| Process {
            pid: info.pid,
            name: nvml.sys_process_name(info.pid, NAME_LENGTH).ok(),
            used_bytes: match info.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
            kind,
        }
    };
    let compute = compute.into_iter().map(with(ProcessKind::Compute));
    let graphics = graphics.into_iter().map(with(ProcessKind::Graphics));
    Some(compute.chain(graphics).collect())
}
