//! `cinch monitor`: who holds memory, and where it is going.

use std::fs::File;
use std::io::{BufWriter, IsTerminal};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use cinch_monitor::dashboard::{State, View, show};
use cinch_monitor::{
    CsvWriter, History, Live, MonitorError, Planned, Recording, Reply, Sample, Server, Source,
    Watched, append_line, exposition, is_run, rank_lines, read_curve, read_ranks, signs, text,
};
use cinch_ranks::pace::RanksTable;
use serde_json::json;

use super::{print, print_raw};
use crate::args::{Engine, MonitorArguments, PlainArguments, SettingArguments};
use crate::failure::{INTERRUPTED, usage};
use crate::memory::{self, Budget};
use crate::pytorch::estimate::{Estimate, overhead};
use crate::pytorch::workload::Run;
use crate::settings::Asked;
use crate::voice;

/// How long the dashboard has to end by itself.
const GRACE: Duration = Duration::from_secs(2);

pub fn run(arguments: &MonitorArguments) -> anyhow::Result<()> {
    if let Some(folder) = &arguments.run
        && !is_run(folder)
    {
        return Err(usage(format!(
            "{} is no folder of a run\nhint: `cinch train` says where it writes",
            cinch_files::shown(folder)
        )));
    }
    let source: Box<dyn Source + Send> = match &arguments.replay {
        Some(path) => Box::new(Recording::open(path).map_err(|error| usage(error.to_string()))?),
        None => Box::new(Live::new(Watched {
            pid: arguments.pid,
            also: None,
            planned: arguments.config.as_deref().map(planned).transpose()?,
        })),
    };
    if let Some(pid) = arguments.pid.filter(|_| arguments.replay.is_none())
        && !Path::new("/proc").join(pid.to_string()).is_dir()
    {
        voice::aside(Some(format!(
            "process {pid} is not seen here: it has ended, or is outside this container"
        )));
    }
    let outputs = Outputs::open(arguments)?;
    let is_screen = std::io::stdout().is_terminal() && !arguments.once && !arguments.json;
    match is_screen {
        true => on_screen(arguments, source, outputs),
        false => in_lines(arguments, source, outputs),
    }
}

/// What a configuration's run is predicted to take.
fn planned(path: &Path) -> anyhow::Result<Planned> {
    let arguments = SettingArguments {
        plain: PlainArguments {
            config: Some(path.to_owned()),
            ..PlainArguments::default()
        },
        flags: Vec::new(),
    };
    let asked = Asked::read(&arguments, None, Some(Engine::Pytorch))?;
    // That of this machine, whose memory is watched.
    let machine = memory::detected_now().ok();
    let card = machine.as_ref().and_then(Budget::known_card);
    let run = Run::new(&arguments, &asked, card)?;
    if card.is_none() {
        let assumed = run.assumed.iter().map(String::as_str).collect::<Vec<_>>();
        voice::aside(Some(format!("planned: {}", assumed.join("; "))));
    }
    let estimate = Estimate::new(&run.workload, overhead(machine.as_ref()))?;
    Ok(Planned {
        bytes: estimate.device_bytes,
        of: path.display().to_string(),
        on_gpu: true,
    })
}

/// Where samples go besides the screen.
struct Outputs {
    record: Option<(File, std::path::PathBuf)>,
    csv: Option<(CsvWriter<BufWriter<File>>, std::path::PathBuf)>,
    /// What Prometheus is told.
    shared: Option<Arc<Mutex<History>>>,
}

impl Outputs {
    fn open(arguments: &MonitorArguments) -> anyhow::Result<Self> {
        let create = |path: &std::path::PathBuf| {
            let file = File::create(path);
            let file = file.with_context(|| format!("{} cannot be written", path.display()))?;
            anyhow::Ok((file, path.clone()))
        };
        let csv = arguments.csv.as_ref().map(create).transpose()?;
        let csv = csv.map(|(file, path)| anyhow::Ok((CsvWriter::new(BufWriter::new(file))?, path)));
        let shared = arguments.prometheus.as_deref().map(serve).transpose()?;
        Ok(Self {
            record: arguments.record.as_ref().map(create).transpose()?,
            csv: csv.transpose()?,
            shared,
        })
    }

    fn write(&mut self, sample: &Sample) -> Result<(), MonitorError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| MonitorError::Io {
                action: "write",
                path,
                source,
            }
        };
        if let Some((file, path)) = &mut self.record {
            append_line(file, sample).map_err(failed(path))?;
        }
        if let Some((table, path)) = &mut self.csv {
            table.write(sample).map_err(failed(path))?;
        }
        if let Some(shared) = &self.shared
            && let Ok(mut history) = shared.lock()
        {
            history.push(sample.clone());
        }
        Ok(())
    }
}

/// Answers Prometheus from now on, in a thread of its own.
fn serve(address: &str) -> anyhow::Result<Arc<Mutex<History>>> {
    let server = Server::listen(address)?;
    let shared = Arc::new(Mutex::new(History::default()));
    if let Some(found) = server.address() {
        voice::aside(Some(format!("metrics at http://{found}/metrics")));
    }
    if !server.is_local() {
        voice::aside(Some(
            "other machines can read users and commands there".to_owned(),
        ));
    }
    let history = Arc::clone(&shared);
    thread::Builder::new()
        .name("prometheus".to_owned())
        .spawn(move || {
            server.serve(|path| {
                let is_metrics = ["/metrics", "/"].contains(&path);
                let text = history.lock().ok().map(|history| exposition(&history));
                text.filter(|_| is_metrics).map(Reply::text)
            });
        })
        .context("no thread for Prometheus")?;
    Ok(shared)
}

fn on_screen(
    arguments: &MonitorArguments,
    source: Box<dyn Source + Send>,
    mut outputs: Outputs,
) -> anyhow::Result<()> {
    static STOP: AtomicBool = AtomicBool::new(false);
    // The terminal has to be given back before the program ends. One that is gone answers nothing
    // any more, and whoever asks it for keys does not come back.
    ctrlc::set_handler(|| {
        STOP.store(true, Ordering::Relaxed);
        thread::sleep(GRACE);
        #[expect(clippy::exit, reason = "the terminal is gone")]
        std::process::exit(INTERRUPTED.into());
    })
    .context("cannot listen for signals")?;
    let view = match &arguments.run {
        Some(folder) => View::Run(folder.clone()),
        None => View::Machine,
    };
    let interval = match source.is_live() {
        true => Duration::from_secs_f64(arguments.interval),
        false => Duration::from_millis(20),
    };
    let heard = |sample: &Sample| outputs.write(sample);
    let stopped = || STOP.load(Ordering::Relaxed);
    show(source, interval, State::new(view), heard, stopped)?.context("the terminal cannot be used")
}

/// Without a screen: one look as text, or lines of JSON.
fn in_lines(
    arguments: &MonitorArguments,
    mut source: Box<dyn Source + Send>,
    mut outputs: Outputs,
) -> anyhow::Result<()> {
    let mut history = History::default();
    let is_endless = arguments.json && !arguments.once;
    let records =
        arguments.record.is_some() || arguments.csv.is_some() || arguments.prometheus.is_some();
    loop {
        let begin = Instant::now();
        let Some(sample) = source.sample()? else {
            break;
        };
        outputs.write(&sample)?;
        if arguments.json {
            let mut line = serde_json::to_value(&sample)?;
            if let (Some(folder), Some(line)) = (&arguments.run, line.as_object_mut()) {
                let last = read_curve(folder)?.last().cloned();
                let ranks = read_ranks(folder).ok().flatten();
                let slowest = ranks.as_ref().and_then(RanksTable::slowest_lately);
                let run = json!({
                    "folder": folder.display().to_string(),
                    "last": last,
                    "ranks": ranks,
                    "slowest_rank": slowest,
                });
                line.insert("run".to_owned(), run);
            }
            print_raw(&serde_json::to_vec(&line)?)?;
        }
        history.push(sample);
        let goes_on = is_endless || (records && !arguments.once);
        if source.is_live() {
            if !goes_on {
                break;
            }
            let rest = Duration::from_secs_f64(arguments.interval);
            thread::sleep(rest.saturating_sub(begin.elapsed()));
        }
    }
    if arguments.json {
        return Ok(());
    }
    if let Some(folder) = &arguments.run {
        let last = read_curve(folder)
            .ok()
            .and_then(|curve| curve.last().cloned());
        let last = last.map_or_else(
            || "no step is logged yet".to_owned(),
            |point| point.summary(),
        );
        print(&format!("run {}: {last}\n", cinch_files::shown(folder)))?;
        if let Some(ranks) = read_ranks(folder).ok().flatten() {
            print(&(rank_lines(&ranks, usize::MAX).join("\n") + "\n"))?;
        }
    }
    history.settle();
    print(&text::once(&history, &signs(&history)))
}
