//! Figures in words, and a sample as plain lines: `cinch monitor --once`.

use std::fmt::Write as _;

use cinch_config::Bytes;
use cinch_device::GpuReading;

use crate::facts::ProcessFacts;
use crate::history::History;
use crate::signs::Sign;

/// What stands for a reading that is not to be had.
pub const MISSING: &str = "-";

/// A duration in the two largest units that it has.
pub fn span(seconds: f64) -> String {
    if !seconds.is_finite() || seconds > 365.0 * 86_400.0 {
        return "over a year".to_owned();
    }
    let whole = seconds.max(0.0) as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{whole} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// Bytes, or the sign that they are not known.
pub fn bytes(count: Option<u64>) -> String {
    count.map_or_else(|| MISSING.to_owned(), |count| Bytes::new(count).to_string())
}

/// A process's command without the folder of its program, or the driver's name for it.
pub fn command(facts: Option<&ProcessFacts>, name: Option<&str>) -> String {
    let given = facts.and_then(|facts| facts.command.as_deref());
    let line = given.or(name).unwrap_or(MISSING);
    let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
    let program = program.rsplit('/').next().unwrap_or(program);
    format!("{program} {rest}").trim_end().to_owned()
}

/// The newest sample and its signs in lines.
pub fn once(history: &History, signs: &[Sign]) -> String {
    let mut text = String::new();
    let Some(sample) = &history.last else {
        return text;
    };
    if sample.gpus.is_empty() {
        let reason = sample.reason.as_deref().unwrap_or("no GPU");
        let _ = writeln!(
            text,
            "no GPU: {reason}; host memory and cinch's runs are shown"
        );
    }
    for reading in &sample.gpus {
        text += &gpu(reading);
        let Some(processes) = &reading.processes else {
            let _ = writeln!(
                text,
                "  processes: not told (another user's, or no permission)"
            );
            continue;
        };
        let mut processes: Vec<_> = processes.iter().collect();
        processes.sort_by_key(|process| (std::cmp::Reverse(process.used_bytes), process.pid));
        for process in processes {
            let facts = sample.facts(process.pid);
            text += &row(
                process.pid,
                process.used_bytes,
                facts,
                process.name.as_deref(),
                true,
            );
        }
    }
    let _ = writeln!(
        text,
        "host memory: {} of {} used, swap {} of {}",
        bytes(sample.host_used_bytes()),
        bytes(sample.host.total_bytes),
        bytes(
            sample
                .host
                .swap_bytes
                .zip(sample.host.swap_free_bytes)
                .map(|(all, free)| all.saturating_sub(free))
        ),
        bytes(sample.host.swap_bytes),
    );
    for facts in &sample.processes {
        if !sample
            .on_gpus()
            .any(|(_, process)| process.pid == facts.pid)
        {
            text += &row(facts.pid, facts.resident_bytes, Some(facts), None, false);
        }
    }
    for sign in signs {
        let _ = writeln!(text, "{}", sign_line(sign));
    }
    text
}

/// Whom a sign is about, what it is, and what it means.
pub fn sign_line(sign: &Sign) -> String {
    let gpu = sign.gpu.map(|index| format!("GPU {index}"));
    let pid = sign.pid.map(|pid| format!("process {pid}"));
    let whom: Vec<String> = gpu.into_iter().chain(pid).collect();
    format!("{}: {}: {}", whom.join(", "), sign.kind.name(), sign.text)
}

fn gpu(reading: &GpuReading) -> String {
    let mut text = format!("GPU {}: {}", reading.index, reading.name);
    if let Some(problem) = &reading.problem {
        return text + &format!(": {problem}\n");
    }
    let or_missing = |value: Option<String>| value.unwrap_or_else(|| MISSING.to_owned());
    let _ = writeln!(
        text,
        ", {} of {} used, busy {}, {}, {}, PCIe in {} out {}",
        bytes(reading.used_bytes),
        bytes(reading.total_bytes),
        or_missing(
            reading
                .utilization_percent
                .map(|percent| format!("{percent} %"))
        ),
        or_missing(
            reading
                .temperature_celsius
                .map(|degrees| format!("{degrees} °C"))
        ),
        or_missing(
            reading
                .power_watts
                .map(|watts| match reading.power_limit_watts {
                    Some(limit) => format!("{watts:.0} of {limit:.0} W"),
                    None => format!("{watts:.0} W"),
                })
        ),
        rate(reading.pcie_receive),
        rate(reading.pcie_send),
    );
    text
}

/// Bytes a second, as links are counted: in powers of ten.
pub fn rate(bytes_per_second: Option<u64>) -> String {
    match bytes_per_second {
        None => MISSING.to_owned(),
        Some(rate) if rate >= 1_000_000_000 => format!("{:.1} GB/s", rate as f64 / 1e9),
        Some(rate) => format!("{:.0} MB/s", rate as f64 / 1e6),
    }
}

fn row(
    pid: u32,
    used: Option<u64>,
    facts: Option<&ProcessFacts>,
    name: Option<&str>,
    on_gpu: bool,
) -> String {
    let user = facts
        .and_then(|facts| facts.user.as_deref())
        .unwrap_or(MISSING);
    let container = facts.and_then(|facts| facts.container.as_deref());
    let container = container.map_or_else(String::new, |name| format!(" [{name}]"));
    let plan = facts.and_then(|facts| facts.plan.as_ref());
    let plan = plan.filter(|plan| plan.on_gpu == on_gpu);
    let plan = plan.map_or_else(String::new, |plan| {
        format!(" (planned {}, {})", Bytes::new(plan.bytes), plan.of)
    });
    let (used, line) = (bytes(used), command(facts, name));
    format!("  {pid:>8} {user:<10} {used:>10}{plan}{container}  {line}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_two_units() {
        for (seconds, text) in [
            (0.4, "0 s"),
            (59.0, "59 s"),
            (442.0, "7 min"),
            (7800.0, "2 h 10 min"),
            (200_000.0, "2 d 7 h"),
            (f64::INFINITY, "over a year"),
            (-3.0, "0 s"),
        ] {
            assert_eq!(span(seconds), text);
        }
    }

    #[test]
    fn a_command_is_told_without_its_folder() {
        let facts = ProcessFacts {
            command: Some("/opt/venv/bin/python -m train".to_owned()),
            ..ProcessFacts::default()
        };
        assert_eq!(command(Some(&facts), None), "python -m train");
        assert_eq!(command(None, Some("/usr/bin/x")), "x");
        assert_eq!(command(None, None), MISSING);
    }
}
