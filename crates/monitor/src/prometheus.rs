//! The newest sample in Prometheus' text format (version 0.0.4).

use std::fmt::Write as _;

use crate::history::History;
use crate::text::command;

/// All metrics; empty before the first sample.
pub fn exposition(history: &History) -> String {
    let mut page = Page::default();
    let Some(sample) = &history.last else {
        return page.text;
    };
    for gpu in &sample.gpus {
        let labels = [("gpu", gpu.index.to_string()), ("name", gpu.name.clone())];
        let mut gauge = |name, help, value: Option<f64>| page.gauge(name, help, &labels, value);
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        gauge(
            "cinch_gpu_up",
            "1 if the GPU can be read",
            Some(f64::from(u8::from(gpu.problem.is_none()))),
        );
        gauge(
            "cinch_gpu_memory_total_bytes",
            "Memory of the card",
            bytes(gpu.total_bytes),
        );
        gauge(
            "cinch_gpu_memory_used_bytes",
            "Memory in use",
            bytes(gpu.used_bytes),
        );
        gauge(
            "cinch_gpu_utilization_ratio",
            "Share of the time in which a kernel ran",
            gpu.utilization_percent
                .map(|percent| f64::from(percent) / 100.0),
        );
        gauge(
            "cinch_gpu_temperature_celsius",
            "Temperature",
            gpu.temperature_celsius.map(f64::from),
        );
        gauge("cinch_gpu_power_watts", "Power", gpu.power_watts);
        gauge(
            "cinch_gpu_pcie_receive_bytes_per_second",
            "From the host to the card",
            bytes(gpu.pcie_receive),
        );
        gauge(
            "cinch_gpu_pcie_send_bytes_per_second",
            "From the card to the host",
            bytes(gpu.pcie_send),
        );
    }
    for (key, process) in &history.processes {
        if process.last_seen < sample.seconds {
            continue;
        }
        let facts = sample.facts(key.pid);
        let user = facts
            .and_then(|facts| facts.user.clone())
            .unwrap_or_default();
        let labels = [
            (
                "gpu",
                key.gpu
                    .map_or_else(|| "host".to_owned(), |gpu| gpu.to_string()),
            ),
            ("pid", key.pid.to_string()),
            ("user", user),
            ("command", command(facts, None)),
        ];
        let plan = facts.and_then(|facts| facts.plan.as_ref());
        let plan = plan.filter(|plan| plan.on_gpu == key.gpu.is_some());
        let mut gauge = |name, help, value| page.gauge(name, help, &labels, value);
        gauge(
            "cinch_process_memory_bytes",
            "Memory of a process",
            process.series.last().map(|bytes| bytes as f64),
        );
        gauge(
            "cinch_process_memory_peak_bytes",
            "The most it had since the monitor started",
            Some(process.peak_bytes as f64),
        );
        gauge(
            "cinch_process_memory_planned_bytes",
            "What was predicted",
            plan.map(|plan| plan.bytes as f64),
        );
    }
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    page.gauge(
        "cinch_host_memory_used_bytes",
        "Host memory in use",
        &[],
        bytes(sample.host_used_bytes()),
    );
    page.gauge(
        "cinch_host_memory_total_bytes",
        "Host memory",
        &[],
        bytes(sample.host.total_bytes),
    );
    page.finish()
}

/// Metrics by name: the format wants all values of one name together.
#[derive(Default)]
struct Page {
    metrics: Vec<(&'static str, &'static str, String)>,
    text: String,
}

impl Page {
    fn gauge(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, String)],
        value: Option<f64>,
    ) {
        let Some(value) = value else { return };
        let place = self.metrics.iter().position(|metric| metric.0 == name);
        let place = place.unwrap_or_else(|| {
            self.metrics.push((name, help, String::new()));
            self.metrics.len() - 1
        });
        let labels = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escape(value)));
        let labels = labels.collect::<Vec<_>>().join(",");
        let labels = if labels.is_empty() {
            labels
        } else {
            format!("{{{labels}}}")
        };
        let _ = writeln!(self.metrics[place].2, "{name}{labels} {value}");
    }

    fn finish(mut self) -> String {
        for (name, help, lines) in &self.metrics {
            let _ = write!(
                self.text,
                "# HELP {name} {help}\n# TYPE {name} gauge\n{lines}"
            );
        }
        self.text
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
