//! What `nvidia-smi` prints, read into the same readings that NVML gives. It is asked where NVML
//! cannot be loaded: under WSL, or where only the tool is on the path of a container.

use crate::machine::{DetectedGpu, Process, ProcessKind, Readings};
use crate::probe::{Probe, Silence};
use crate::watch::GpuReading;

/// What is asked of each GPU, in the order of the fields of a line. The name comes last, since
/// it is the one that might hold a comma.
const FIELDS: [&str; 11] = [
    "index",
    "uuid",
    "memory.total",
    "memory.free",
    "memory.used",
    "utilization.gpu",
    "ecc.mode.current",
    "driver_version",
    "compute_cap",
    "mig.mode.current",
    "name",
];

/// Fields that drivers of some years ago do not know; one such field spoils the whole question.
const LATE_FIELDS: [&str; 2] = ["compute_cap", "mig.mode.current"];

/// What a monitor asks of each GPU, the name last.
const WATCHED: [&str; 10] = [
    "index",
    "uuid",
    "memory.total",
    "memory.free",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "enforced.power.limit",
    "name",
];

const PROCESS_FIELDS: [&str; 4] = ["gpu_uuid", "pid", "used_memory", "process_name"];

const FORMAT: &str = "--format=csv,noheader,nounits";

/// What the tool says, with success, of a driver without GPUs.
const NO_DEVICES: &str = "No devices were found";

/// Asks `nvidia-smi`; what it holds no reading for stays empty.
pub(crate) fn read(probe: &dyn Probe) -> Result<Readings, Silence> {
    let ask = |fields: &[&str]| {
        let query = format!("--query-gpu={}", fields.join(","));
        let text = probe.nvidia_smi(&[&query, FORMAT])?;
        parse_gpus(&text, fields).map_err(Silence::Failed)
    };
    let mut readings = match ask(&FIELDS) {
        Err(Silence::Failed(said)) if said.contains("not a valid field") => {
            let mut early = FIELDS.to_vec();
            early.retain(|field| !LATE_FIELDS.contains(field));
            ask(&early)?
        }
        answer => answer?,
    };
    let query = format!("--query-compute-apps={}", PROCESS_FIELDS.join(","));
    if let Ok(text) = probe.nvidia_smi(&[&query, FORMAT]) {
        add_processes(&mut readings.gpus, &text);
    }
    // No query has the CUDA version; it stands in the head of the plain output alone.
    let head = probe.nvidia_smi(&[]).ok();
    readings.cuda_version = head.and_then(|text| cuda_version(&text));
    Ok(readings)
}

/// What changes from second to second. The tool has no counters of PCIe in this form.
pub(crate) fn watch(probe: &dyn Probe) -> Result<Vec<GpuReading>, Silence> {
    let query = format!("--query-gpu={}", WATCHED.join(","));
    let text = probe.nvidia_smi(&[&query, FORMAT])?;
    let mut gpus = parse_gpus(&text, &WATCHED).map_err(Silence::Failed)?.gpus;
    let query = format!("--query-compute-apps={}", PROCESS_FIELDS.join(","));
    if let Ok(text) = probe.nvidia_smi(&[&query, FORMAT]) {
        add_processes(&mut gpus, &text);
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let readings = gpus.into_iter().zip(lines).map(|(gpu, line)| {
        let fields: Vec<&str> = line.splitn(WATCHED.len(), ',').map(str::trim).collect();
        let get = |name| {
            let place = WATCHED.iter().position(|field| *field == name)?;
            value(fields.get(place)?)
        };
        let watts = |name| get(name).and_then(|text| text.parse().ok());
        GpuReading {
            index: gpu.index,
            name: gpu.name,
            problem: None,
            uuid: gpu.uuid,
            total_bytes: gpu.total_bytes,
            used_bytes: gpu.used_bytes,
            free_bytes: gpu.free_bytes,
            utilization_percent: gpu.utilization_percent,
            temperature_celsius: get("temperature.gpu").and_then(|text| text.parse().ok()),
            power_watts: watts("power.draw"),
            power_limit_watts: watts("enforced.power.limit"),
            pcie_receive: None,
            pcie_send: None,
            processes: gpu.processes,
        }
    });
    Ok(readings.collect())
}

/// Reads the lines that `--query-gpu` prints for these fields. Text that is no line of fields is
/// what the tool says instead of an answer: no driver, a library of another version.
pub(crate) fn parse_gpus(text: &str, fields: &[&str]) -> Result<Readings, String> {
    let mut readings = Readings::default();
    if text.trim() == NO_DEVICES {
        return Ok(readings);
    }
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let found: Vec<&str> = line.splitn(fields.len(), ',').map(str::trim).collect();
        let get = |name| {
            let place = fields.iter().position(|field| *field == name)?;
            value(found.get(place)?)
        };
        let index = get("index").and_then(|text| text.parse().ok());
        let Some(index) = index.filter(|_| found.len() == fields.len()) else {
            return Err(format!("nvidia-smi: {line}"));
        };
        let memory = |name| get(name).and_then(mebibytes);
        let sizes = ["memory.total", "memory.free", "memory.used"].map(memory);
        let [total_bytes, free_bytes, used_bytes] = sizes;
        let reserved_bytes = match sizes {
            [Some(total), Some(free), Some(used)] => total.checked_sub(free.saturating_add(used)),
            _ => None,
        };
        let text = |name| get(name).map(str::to_owned);
        readings.driver_version = readings.driver_version.or_else(|| text("driver_version"));
        readings.gpus.push(DetectedGpu {
            index,
            name: text("name").unwrap_or_else(|| "unknown".to_owned()),
            problem: None,
            uuid: text("uuid"),
            total_bytes,
            free_bytes,
            used_bytes,
            reserved_bytes,
            compute_capability: get("compute_cap").and_then(|text| text.parse().ok()),
            utilization_percent: get("utilization.gpu").and_then(|text| text.parse().ok()),
            ecc: get("ecc.mode.current").map(|mode| mode == "Enabled"),
            mig: get("mig.mode.current").map(|mode| mode == "Enabled"),
            instances: Vec::new(),
            processes: None,
        });
    }
    Ok(readings)
}

/// Reads the lines of `--query-compute-apps` into the GPUs they belong to. Nothing but lines
/// that can be read counts; the tool lists programs that compute, and not those that draw.
pub(crate) fn add_processes(gpus: &mut [DetectedGpu], text: &str) {
    for gpu in gpus.iter_mut() {
        gpu.processes = Some(Vec::new());
    }
    for line in text.lines() {
        let fields: Vec<&str> = line
            .splitn(PROCESS_FIELDS.len(), ',')
            .map(str::trim)
            .collect();
        let [uuid, pid, used, name] = fields[..] else {
            continue;
        };
        let Ok(pid) = pid.parse() else { continue };
        let owner = gpus
            .iter_mut()
            .find(|gpu| gpu.uuid.as_deref() == Some(uuid));
        if let Some(processes) = owner.and_then(|gpu| gpu.processes.as_mut()) {
            processes.push(Process {
                pid,
                name: value(name).map(str::to_owned),
                used_bytes: value(used).and_then(mebibytes),
                kind: ProcessKind::Compute,
            });
        }
    }
}

/// `CUDA Version: 12.4` or, of later drivers, `CUDA UMD Version: 13.3`.
fn cuda_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("CUDA"))?;
    let (_, after) = line.rsplit_once("Version:")?;
    let version = after.split_whitespace().next()?;
    let digits = version.starts_with(|digit: char| digit.is_ascii_digit());
    digits.then(|| version.to_owned())
}

/// A field that holds something: `[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`,
/// `[Not Found]`, `[GPU is lost]` and `[Unknown Error]` do not.
fn value(field: &str) -> Option<&str> {
    let empty = field.is_empty() || field.starts_with('[') || field == "N/A";
    (!empty).then_some(field)
}

fn mebibytes(field: &str) -> Option<u64> {
    let mib: u64 = field.parse().ok()?;
    mib.checked_mul(1 << 20)
}

#[cfg(test)]
mod tests;
