//! `cinch plan --engine pytorch --truth FILE`: measured runs beside what is predicted for them.

use std::path::Path;

use cinch_config::Bytes;
use cinch_files::read_regular_text;
use cinch_torch::TorchError;
use cinch_torch::truth::{self, Compared, Comparison, Skipped, Spread, Summary, Verdict};
use comfy_table::Cell;
use serde_json::json;

use crate::command::{print, print_json};
use crate::table::{self, right};

/// How far another tool was off, in words.
struct OtherTool {
    name: &'static str,
    allocated: &'static str,
    reserved: &'static str,
    device: &'static str,
    takes: &'static str,
}

/// Measured on the runs of the fixture `peaks.jsonl`, whose peaks an H200 gave: the rules of
/// thumb by their medians over all, the tracker by its range over the runs it finished.
const OTHER_TOOLS: [OtherTool; 3] = [
    OtherTool {
        name: "accelerate estimate-memory",
        allocated: "66 %",
        reserved: "",
        device: "",
        takes: "",
    },
    OtherTool {
        name: "DeepSpeed's estimate",
        allocated: "64 %",
        reserved: "",
        device: "",
        takes: "",
    },
    OtherTool {
        name: "PyTorch's MemTracker",
        allocated: "0.5–3 %",
        reserved: "6–21 %",
        device: "12–23 %",
        takes: "7–47 s",
    },
];

/// The most that is read of a file of measurements, whose runs have a line each.
const MAX_MEASUREMENTS: u64 = 256 << 20;

pub fn run(path: &Path, as_json: bool) -> anyhow::Result<()> {
    let text = read_regular_text(path, MAX_MEASUREMENTS).map_err(|source| TorchError::File {
        path: path.to_owned(),
        source,
    })?;
    let origin = path.display().to_string();
    let (measurements, mut skipped) = truth::read(&text, &origin)?;
    let Comparison {
        verdicts,
        summary,
        skipped: unpredicted,
    } = truth::compare(&measurements)?;
    skipped.extend(unpredicted);
    let skipped: Vec<String> = skipped
        .iter()
        .map(|Skipped { name, reason }| format!("{name}: {reason}"))
        .collect();
    if as_json {
        return print_json(&json!({
            "cases": verdicts,
            "summary": summary,
            "skipped": skipped,
        }));
    }
    print(&cases(&verdicts))?;
    print(&against_others(&verdicts, &summary))?;
    for one in skipped {
        print(&format!("skipped: {one}"))?;
    }
    let too_low: Vec<&str> = verdicts
        .iter()
        .filter(|verdict| verdict.device.measured > Some(verdict.safe_bytes))
        .map(|verdict| verdict.name.as_str())
        .collect();
    print(&match too_low[..] {
        [] => "the safe figure is below no measured run".to_owned(),
        ref names => format!("the safe figure is too low for {}", names.join(", ")),
    })
}

fn cases(verdicts: &[Verdict]) -> String {
    let mut table = table::new(&[
        "run",
        "allocated",
        "measured",
        "off",
        "reserved",
        "measured",
        "off",
        "device",
        "measured",
        "off",
        "safe",
        "ms",
    ]);
    for verdict in verdicts {
        let mut row = vec![Cell::new(&verdict.name)];
        for compared in [&verdict.allocated, &verdict.reserved, &verdict.device] {
            row.extend(cells(compared));
        }
        row.push(right(Bytes::new(verdict.safe_bytes)));
        row.push(right(format!("{:.1}", verdict.milliseconds)));
        table.add_row(row);
    }
    // Times and the safe figure, what was measured, then all but the device.
    table::settle(&mut table, &[11, 10, 2, 5, 8, 1, 3, 6, 4]);
    table.to_string()
}

fn cells(compared: &Compared) -> [Cell; 3] {
    let measured = compared.measured.map(Bytes::new);
    [
        right(Bytes::new(compared.predicted)),
        right(measured.map_or_else(|| "not measured".to_owned(), |bytes| bytes.to_string())),
        right(compared.error().map_or_else(String::new, percent_signed)),
    ]
}

/// An exact prediction is told from one that rounds to nothing.
fn percent_signed(error: f64) -> String {
    if error == 0.0 {
        return "exact".to_owned();
    }
    format!("{:+.2} %", 100.0 * error).replace('-', "−")
}

fn against_others(verdicts: &[Verdict], summary: &Summary) -> String {
    let mut table = table::new(&["errors", "allocated", "reserved", "device", "takes"]);
    let slowest = verdicts.iter().map(|verdict| verdict.milliseconds);
    let slowest = slowest.fold(0.0, f64::max);
    let spread = |spread: Spread, compared: fn(&Verdict) -> &Compared| {
        let is_measured = |verdict| compared(verdict).measured.is_some();
        if !verdicts.iter().any(is_measured) {
            return right("not measured");
        }
        right(format!(
            "{:.2}, {:.2} %",
            100.0 * spread.median,
            100.0 * spread.worst
        ))
    };
    table.add_row([
        Cell::new(format!("cinch, {} runs: median, worst", verdicts.len())),
        spread(summary.allocated, |verdict| &verdict.allocated),
        spread(summary.reserved, |verdict| &verdict.reserved),
        spread(summary.device, |verdict| &verdict.device),
        right(format!("at most {slowest:.0} ms")),
    ]);
    for tool in &OTHER_TOOLS {
        table.add_row([
            Cell::new(tool.name),
            right(tool.allocated),
            right(tool.reserved),
            right(tool.device),
            right(tool.takes),
        ]);
    }
    table::settle(&mut table, &[]);
    format!(
        "\n{table}\nthe other tools were measured on 68 runs on an H200, which the fixture peaks.jsonl holds"
    )
}
