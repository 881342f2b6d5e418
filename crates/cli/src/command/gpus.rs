//! `cinch gpus`: the cards that are known, and what this machine has.

use std::collections::BTreeSet;

use cinch_config::Bytes;
use cinch_device::{
    CATALOGUE, DetectedGpu, Gpu, Host, Machine, Process, Provenance, ReadBy, Training, detect,
    find_boards,
};
use comfy_table::Cell;
use serde_json::{Value, json};

use super::{print, print_json};
use crate::args::GpusArguments;
use crate::table;

pub fn run(arguments: &GpusArguments) -> anyhow::Result<()> {
    let gpus: Vec<&Gpu> = match &arguments.name {
        Some(name) => find_boards(name)?,
        None => CATALOGUE.iter().collect(),
    };
    let machine = detect();
    if arguments.json {
        let cards: Vec<Value> = gpus.iter().map(|gpu| card_json(gpu)).collect();
        return print_json(&json!({ "machine": machine_json(&machine)?, "catalogue": cards }));
    }
    print(&format!("{}\n{}", catalogue(&gpus), this_machine(&machine)))
}

fn catalogue(gpus: &[&Gpu]) -> String {
    let mut rows = table::new(&[
        "GPU",
        "chip",
        "memory",
        "usable",
        "fp16",
        "bf16",
        "tf32",
        "fp32",
        "GB/s",
        "host GB/s",
        "cinch",
    ]);
    for gpu in gpus {
        let card = gpu.card();
        let tera = |flops: f64| table::right(format!("{:.1}", flops / 1e12));
        let giga = |rate: f64| table::right(format!("{:.0}", rate / 1e9));
        let absent = || table::right("-");
        let chip = match gpu.compute_capability {
            Some(capability) => format!("{} {capability}", gpu.generation),
            None => gpu.generation.to_string(),
        };
        let mark = match gpu.memory.provenance {
            Provenance::Assumed => "~",
            _ => "",
        };
        rows.add_row([
            Cell::new(gpu.name),
            Cell::new(chip),
            table::right(format!("{} GB", gpu.memory.marketed_gb)),
            table::right(format!("{mark}{}", Bytes::new(gpu.memory.usable_bytes()))),
            tera(card.half_flops),
            card.bf16_flops.map_or_else(absent, tera),
            match gpu.peaks.tf32_flops {
                Some(_) => tera(card.tf32_flops),
                None => absent(),
            },
            tera(card.single_flops),
            giga(card.bandwidth),
            giga(card.host_bandwidth),
            Cell::new(purpose(gpu.training())),
        ]);
    }
    // The rate to the host, tf32, what the name says of the memory, the chip, fp32.
    table::settle(&mut rows, &[9, 6, 2, 1, 7]);
    let measured: Vec<&str> = (CATALOGUE.iter())
        .filter(|gpu| gpu.measured.is_some())
        .map(|gpu| gpu.name)
        .collect();
    let mut text = format!(
        "{rows}\n\
         Rates as programs reach them: TFLOP/s of matrix products, GB/s of copies.\n\
         Measured on the {}, elsewhere the data sheet's times the share reached there.\n\
         Usable is what a program sees of the memory; ~ where that is assumed.\n",
        measured.join(", ")
    );
    let reasons: BTreeSet<String> = (gpus.iter())
        .filter_map(|gpu| gpu.training().reason())
        .collect();
    for reason in reasons {
        text += &format!("plan only: {reason}\n");
    }
    text
}

fn purpose(training: Training) -> &'static str {
    if training.is_supported() {
        "plan, train"
    } else {
        "plan only"
    }
}

fn this_machine(machine: &Machine) -> String {
    let mut text = String::from("This machine\n");
    match (machine.read_by, &machine.reason) {
        (ReadBy::Nobody, reason) => {
            let reason = reason.as_deref().unwrap_or("no GPU");
            text += &format!("  no GPU: {reason}\n");
        }
        (by, reason) => {
            let unknown = || "unknown".to_owned();
            text += &format!(
                "  driver {}, CUDA {}, read by {}{}\n",
                machine.driver_version.clone().unwrap_or_else(unknown),
                machine.cuda_version.clone().unwrap_or_else(unknown),
                by.name(),
                (reason.as_ref()).map_or_else(String::new, |reason| format!(" ({reason})")),
            );
        }
    }
    let chosen = machine.visible.first().map(|visible| visible.gpu);
    for (place, gpu) in machine.gpus.iter().enumerate() {
        text += &detected(gpu, chosen == Some(place));
    }
    for note in &machine.notes {
        text += &format!("  {}\n", note.replace('\n', "\n  "));
    }
    text + &host(&machine.host)
}

/// A GPU of this machine and who holds its memory.
fn detected(gpu: &DetectedGpu, chosen: bool) -> String {
    let mut text = format!("  GPU {}: {}", gpu.index, gpu.name);
    if let Some(problem) = &gpu.problem {
        return text + &format!(": {problem}\n");
    }
    if let (Some(usable), Some(free)) = (gpu.usable_bytes(), gpu.free_bytes) {
        let (usable, free) = (Bytes::new(usable), Bytes::new(free));
        text += &format!(", {free} free of {usable}");
    }
    if let Some(percent) = gpu.utilization_percent {
        text += &format!(", {percent} % busy");
    }
    if gpu.mig == Some(true) {
        text += &format!(", cut into {} parts (MIG)", gpu.instances.len());
    }
    if chosen {
        text += ", the one that is used";
    }
    text.push('\n');
    if let Some(reason) = gpu.training().and_then(Training::reason) {
        text += &format!("    plan only: {reason}\n");
    }
    if gpu.catalogued().is_none() {
        text += "    not in the catalogue: its speed cannot be predicted\n";
    }
    for process in gpu.processes.iter().flatten() {
        text += &format!("    {}\n", holder(process));
    }
    text
}

fn holder(process: &Process) -> String {
    let name = process.name.as_deref().unwrap_or("of another user");
    match process.used_bytes {
        Some(bytes) => format!(
            "{} held by process {} ({name})",
            Bytes::new(bytes),
            process.pid
        ),
        None => format!("process {} ({name})", process.pid),
    }
}

fn host(host: &Host) -> String {
    let size = |bytes: Option<u64>| {
        bytes.map_or_else(
            || "unknown".to_owned(),
            |bytes| Bytes::new(bytes).to_string(),
        )
    };
    let cores = host
        .cores
        .map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    let limit = match host.limit_bytes {
        Some(_) => " (the limit of the container)",
        None => "",
    };
    format!(
        "  host: {cores} cores, {} free of {}{limit}, swap {}\n",
        size(host.available_bytes),
        size(host.total_bytes),
        size(host.swap_bytes),
    )
}

fn card_json(gpu: &Gpu) -> Value {
    let card = gpu.card();
    let precisions: &[&str] = if gpu.generation.has_bf16() {
        &["fp32", "tf32", "bf16", "fp16"]
    } else {
        &["fp32", "fp16"]
    };
    json!({
        "name": gpu.name,
        "aliases": gpu.aliases,
        "generation": gpu.generation,
        "compute_capability": gpu.compute_capability,
        "marketed_gb": gpu.memory.marketed_gb,
        "shown_bytes": gpu.memory.shown_bytes(),
        "usable_bytes": gpu.memory.usable_bytes(),
        "memory_from": gpu.memory.provenance,
        "precisions": precisions,
        "half_flops": card.half_flops,
        "bf16_flops": card.bf16_flops,
        "tf32_flops": gpu.peaks.tf32_flops.map(|_| card.tf32_flops),
        "single_flops": card.single_flops,
        "bandwidth": card.bandwidth,
        "host_bandwidth": card.host_bandwidth,
        "link": gpu.fabric.link.name,
        "link_bandwidth": gpu.fabric.link.reached(),
        "link_latency": gpu.fabric.link.latency,
        "network": gpu.fabric.network.name,
        "network_bandwidth": gpu.fabric.network.reached(),
        "network_latency": gpu.fabric.network.latency,
        "multiprocessors": card.multiprocessors,
        "rates_from": gpu.rates_provenance(),
        "trainable": gpu.training().is_supported(),
        "plan_only_because": gpu.training().reason(),
    })
}

/// The machine as it was read, and for each GPU what the catalogue makes of it.
fn machine_json(machine: &Machine) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(machine)?;
    let gpus = value.get_mut("gpus").and_then(Value::as_array_mut);
    for (value, gpu) in gpus.into_iter().flatten().zip(&machine.gpus) {
        value["usable_bytes"] = json!(gpu.usable_bytes());
        value["catalogue_name"] = json!(gpu.catalogued().map(|gpu| gpu.name));
        value["trainable"] = json!(gpu.training().map(Training::is_supported));
        value["plan_only_because"] = json!(gpu.training().and_then(Training::reason));
    }
    Ok(value)
}
