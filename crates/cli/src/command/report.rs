//! `cinch report`: one page about a run, a plan, a snapshot, a recording, a log or attempts.

mod attempts;
mod diagnosis;
mod log;
mod plan;
mod recording;
mod run;
mod snapshot;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use cinch_config::Explained;
use cinch_monitor::{Reply, Server};
use cinch_report::{Page, Part, Section};

use super::print;
use crate::args::ReportArguments;
use crate::failure::usage;
use crate::voice;

/// Seconds between two questions of a page that is served.
const REFRESH: u32 = 3;
/// The most a page may weigh: what mail and chat programs take without a word.
const MOST_BYTES: usize = 1_000_000;

/// What the subject is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Run,
    Plan,
    Snapshot,
    Recording,
    Log,
    Attempts,
}

pub fn run(arguments: &ReportArguments) -> anyhow::Result<()> {
    let subject = &arguments.subject;
    let kind = kind_of(subject)?;
    if let Some(address) = &arguments.serve {
        return serve(arguments, kind, address);
    }
    let page = page(arguments, kind)?;
    let html = page.to_html();
    anyhow::ensure!(
        html.len() < MOST_BYTES,
        "the page would have {} bytes, more than {MOST_BYTES}",
        html.len()
    );
    let output = arguments.output.clone().unwrap_or_else(|| beside(subject));
    crate::files::replace(&output, html.as_bytes())?;
    print(&format!(
        "wrote {} ({} KiB)",
        output.display(),
        html.len().div_ceil(1024)
    ))
}

/// `runs/gpt2.html` for `runs/gpt2`, `my.html` for `my.yaml`.
fn beside(subject: &Path) -> PathBuf {
    match subject.file_name() {
        Some(_) => subject.with_extension("html"),
        None => PathBuf::from("report.html"),
    }
}

fn kind_of(subject: &Path) -> anyhow::Result<Kind> {
    if subject.is_dir() {
        let is_run =
            subject.join("metrics.jsonl").is_file() || subject.join("checkpoints").is_dir();
        return match is_run {
            true => Ok(Kind::Run),
            false => Ok(Kind::Plan),
        };
    }
    if !subject.exists() {
        return Err(usage(format!(
            "there is no {}\nhint: a run's folder, a configuration, a snapshot of PyTorch, a log, or what `cinch monitor --record` or `cinch run --report` wrote",
            cinch_files::shown(subject)
        )));
    }
    let ending = subject.extension().and_then(|ending| ending.to_str());
    let file = cinch_files::open_regular(subject);
    let file = file.with_context(|| format!("{} cannot be read", subject.display()))?;
    /// A first line is looked at up to here.
    const FIRST: u64 = 4 << 20;
    let mut first = Vec::new();
    BufReader::new(file)
        .take(FIRST)
        .read_until(b'\n', &mut first)?;
    let value: Option<serde_json::Value> = serde_json::from_slice(&first).ok();
    let is_sample = value
        .as_ref()
        .is_some_and(|value| value.get("read_by").is_some());
    let is_pickle = first.first() == Some(&0x80) || first.starts_with(b"PK");
    match ending {
        _ if is_sample => Ok(Kind::Recording),
        _ if is_pickle => Ok(Kind::Snapshot),
        Some("jsonl") => Ok(Kind::Snapshot),
        Some("json") if attempts::of_file(subject).is_some() => Ok(Kind::Attempts),
        Some(ending) if is_of_config(ending) => Ok(Kind::Plan),
        _ => Ok(Kind::Log),
    }
}

/// Endings of configurations, in whatever language; all other text is a log.
fn is_of_config(ending: &str) -> bool {
    const ENDINGS: [&str; 10] = [
        "json", "jsonc", "json5", "yaml", "yml", "toml", "py", "sh", "bash", "cfg",
    ];
    ENDINGS
        .iter()
        .any(|known| known.eq_ignore_ascii_case(ending))
}

fn page(arguments: &ReportArguments, kind: Kind) -> anyhow::Result<Page> {
    match kind {
        Kind::Run => run::page(arguments),
        Kind::Plan => plan::page(arguments),
        Kind::Snapshot => snapshot::page(arguments),
        Kind::Recording => recording::page(arguments),
        Kind::Log => log::page(arguments),
        Kind::Attempts => attempts::page(arguments),
    }
}

/// Answers with the page as it is now, until it is interrupted.
fn serve(arguments: &ReportArguments, kind: Kind, address: &str) -> anyhow::Result<()> {
    let server = Server::listen(address)?;
    let found = server.address().context("no address")?;
    // Before the first request, so that a wrong subject is told here.
    page(arguments, kind)?;
    print(&format!("http://{found}/"))?;
    if !server.is_local() {
        voice::aside(Some("other machines can read the page".to_owned()));
    }
    server.serve(|path| {
        let made = page(arguments, kind);
        let made = made.unwrap_or_else(|error| broken(&error)).live();
        match path {
            "/" => Some(Reply::html(made.to_html())),
            "/body" => Some(Reply::html(made.body())),
            _ => None,
        }
    });
    Ok(())
}

/// A page that says what is wrong.
fn broken(error: &anyhow::Error) -> Page {
    Page {
        title: "nothing can be shown".to_owned(),
        sections: vec![Section {
            title: "why".to_owned(),
            parts: vec![Part::Text(error.to_string())],
        }],
        ..Page::default()
    }
}

trait Live {
    fn live(self) -> Self;
}

impl Live for Page {
    fn live(self) -> Self {
        Self {
            refresh_seconds: u32::try_from(Duration::from_secs(REFRESH.into()).as_secs()).ok(),
            ..self
        }
    }
}

/// Every setting, its value and where it came from.
fn settings(explained: &[Explained]) -> Section {
    let row = |one: &Explained| {
        vec![
            one.key.to_owned(),
            one.value.to_string(),
            one.source.to_string(),
        ]
    };
    Section {
        title: "Settings and where each came from".to_owned(),
        parts: vec![Part::Table {
            header: ["setting", "value", "from"].map(str::to_owned).to_vec(),
            rows: explained.iter().map(row).collect(),
        }],
    }
}
