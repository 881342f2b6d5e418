//! `cinch-fuzz TARGET`: reads inputs until the time or the number is over, and says what it
//! found. Exits with 1 if it found anything.
#![expect(
    clippy::print_stdout,
    reason = "this is the program's voice, and a worker's answer to the process that watches"
)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cinch_fuzz::{Campaign, Stop, Summary, TARGETS, Target, replay, watch, work};
use clap::Parser;

/// The stack that a program's main thread has.
const STACK: usize = 8 << 20;

#[derive(Parser)]
#[command(about = "Fuzzes what cinch reads", after_help = targets())]
struct Arguments {
    /// One of the targets below, or `all`
    target: String,
    /// How long to go on
    #[arg(long, default_value_t = 60, conflicts_with = "inputs")]
    seconds: u64,
    /// How many inputs to read instead, of which the seeds are the first
    #[arg(long)]
    inputs: Option<u64>,
    /// The same seed gives the same inputs, in a build that counts no edges
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where corpus and finds are kept
    #[arg(long, default_value = "target/fuzzing")]
    folder: PathBuf,
    /// Read this one file and end
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    #[arg(long, hide = true)]
    worker: Option<PathBuf>,
}

fn targets() -> String {
    let lines: Vec<String> = TARGETS
        .iter()
        .map(|target| format!("  {:<12} {}", target.name, target.about))
        .collect();
    format!("Targets:\n{}", lines.join("\n"))
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let chosen: Vec<&'static Target> = TARGETS
        .iter()
        .filter(|target| arguments.target == "all" || arguments.target == target.name)
        .collect();
    let [first, ..] = chosen.as_slice() else {
        bail!("there is no target `{}`\n{}", arguments.target, targets());
    };
    let stop = match arguments.inputs {
        Some(inputs) => Stop::Inputs(inputs),
        None => Stop::After(Duration::from_secs(arguments.seconds)),
    };
    if let Some(path) = &arguments.replay {
        let input =
            std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
        replay(first, &input)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(scratch) = arguments.worker {
        let (target, folder) = (*first, arguments.folder.join(first.name));
        return on_its_stack(move || run_worker(target, &scratch, &folder, stop, arguments.seed));
    }
    let program = std::env::current_exe()?;
    let mut code = ExitCode::SUCCESS;
    for target in chosen {
        let campaign = Campaign {
            target,
            stop,
            seed: arguments.seed,
            folder: arguments.folder.clone(),
        };
        let summary = watch(&campaign, &program)?;
        show(target, &summary);
        if !summary.finds.is_empty() {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn run_worker(
    target: &'static Target,
    scratch: &Path,
    folder: &Path,
    stop: Stop,
    seed: u64,
) -> Result<ExitCode> {
    let result = work(target, scratch, folder, stop, seed)?;
    println!(
        "{} {} {} {}",
        result.inputs, result.edges, result.kept, result.slowest
    );
    Ok(ExitCode::SUCCESS)
}

/// Runs something on a thread of its own, whose stack has one size everywhere.
fn on_its_stack<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let thread = thread::Builder::new().stack_size(STACK).spawn(work)?;
    match thread.join() {
        Ok(result) => result,
        Err(_) => bail!("the worker panicked outside of its target"),
    }
}

fn show(target: &Target, summary: &Summary) {
    let Summary {
        inputs,
        edges,
        kept,
        slowest,
        finds,
    } = summary;
    println!(
        "{:<12} {inputs} inputs, {edges} edges, {kept} kept, slowest {slowest} ms, {} finds",
        target.name,
        finds.len()
    );
    for find in finds {
        println!(
            "  {}\n    {}",
            find.path.display(),
            find.reason.replace('\n', "\n    ")
        );
    }
}
