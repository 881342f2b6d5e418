//! Samples as a table: a line for each process on each GPU, and one for a GPU without any.

use std::io::{self, Write};

use crate::sample::Sample;

const HEADER: &str = "at,gpu,name,used_bytes,total_bytes,utilization_percent,temperature_celsius,\
    power_watts,pcie_receive,pcie_send,pid,user,container,process_bytes,planned_bytes,command\n";

/// Writes samples as comma-separated values. A reading that is not to be had is an empty field.
#[derive(Debug)]
pub struct CsvWriter<W> {
    out: W,
}

impl<W: Write> CsvWriter<W> {
    /// Begins a table with its header.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(HEADER.as_bytes())?;
        Ok(Self { out })
    }

    pub fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let mut text = String::new();
        for gpu in &sample.gpus {
            let common = [
                format!("{:.3}", sample.at),
                gpu.index.to_string(),
                quoted(&gpu.name),
                field(gpu.used_bytes),
                field(gpu.total_bytes),
                field(gpu.utilization_percent),
                field(gpu.temperature_celsius),
                field(gpu.power_watts),
                field(gpu.pcie_receive),
                field(gpu.pcie_send),
            ];
            let common = common.join(",");
            let processes = gpu.processes.as_deref().unwrap_or_default();
            if processes.is_empty() {
                text += &format!("{common},,,,,,\n");
            }
            for process in processes {
                let facts = sample.facts(process.pid);
                let of = |part: Option<&String>| part.map_or_else(String::new, |part| quoted(part));
                let plan = facts.and_then(|facts| facts.plan.as_ref());
                let line = facts.and_then(|facts| facts.command.as_ref());
                text += &format!(
                    "{common},{},{},{},{},{},{}\n",
                    process.pid,
                    of(facts.and_then(|facts| facts.user.as_ref())),
                    of(facts.and_then(|facts| facts.container.as_ref())),
                    field(process.used_bytes),
                    field(plan.map(|plan| plan.bytes)),
                    of(line.or(process.name.as_ref())),
                );
            }
        }
        if sample.gpus.is_empty() {
            let (used, total) = (
                field(sample.host_used_bytes()),
                field(sample.host.total_bytes),
            );
            text += &format!("{:.3},,host,{used},{total},,,,,,,,,,,\n", sample.at);
        }
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

fn field(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// In quotation marks where a comma or one of them would end the field.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
