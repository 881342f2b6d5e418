//! `cinch rehearse`: a PyTorch script on a card that is not there.

mod answer;
mod knob;
mod largest;
mod process;

use std::path::Path;

use anyhow::Context;
use cinch_card::{Emulated, Outside, SCRIPT, deviceless};
use cinch_device::{DeviceError, Gpu};
use cinch_torch::overhead::Overhead;

use super::print_raw;
use crate::args::{AskCudnnArguments, RehearseArguments};
use crate::failure::{Interrupted, ScriptEnded, usage};
use crate::interrupt;
use crate::pytorch::snapshot::{Showing, explain_file};
use crate::voice::{aside, tell};
use answer::Answer;
use process::{Ended, Rehearsal};

/// The most cards of one host that a process sees.
const MOST_DEVICES: u32 = 8;

pub fn run(arguments: &RehearseArguments) -> anyhow::Result<()> {
    if arguments.script {
        return print_raw(SCRIPT.as_bytes());
    }
    let gpu = cinch_device::find(&arguments.gpu).map_err(of_catalogue)?;
    if arguments.rank >= arguments.world.unwrap_or(1) {
        let world = arguments.world.unwrap_or(1);
        return Err(usage(format!(
            "--rank {} is none of --world {world}\nhint: ranks are counted from 0",
            arguments.rank
        )));
    }
    if !cfg!(target_os = "linux") {
        return Err(usage(
            "a rehearsal needs Linux: a library is loaded into the script's process",
        ));
    }
    let emulated = emulated(gpu, arguments.world)?;
    interrupt::listen_twice("stopping the script")?;
    aside(Some(
        "the script runs as it is: what it saves, it saves; values of weights and activations do not exist".to_owned(),
    ));
    if let Some(asked) = &arguments.fit {
        return largest::run(arguments, gpu, &emulated, asked);
    }
    let rehearsal = Rehearsal::new(&emulated, arguments)?;
    let ended = rehearsal.run(&arguments.command)?;
    let answer = Answer::new(gpu, &rehearsal, &ended)?;
    if let Some(path) = &arguments.report {
        write_report(path, &answer)?;
    }
    tell(&answer.text());
    show_recording(arguments, &rehearsal, &answer)?;
    finish(&ended)
}

/// Only cards whose data sheet is known can be rehearsed on: a size alone does not make one.
fn of_catalogue(error: DeviceError) -> anyhow::Error {
    let text = error.to_string();
    match (&error, text.split_once("\nhint: ")) {
        (DeviceError::UnknownGpu { .. }, Some((said, _))) => usage(format!(
            "{said}\nhint: `cinch gpus` lists them; take one of the same generation with as much memory"
        )),
        _ => error.into(),
    }
}

/// The card as the script's process is to see it.
fn emulated(gpu: &Gpu, world: Option<u32>) -> anyhow::Result<Emulated> {
    let overhead = Overhead::of(Some(gpu.generation));
    let outside = Outside {
        context: overhead.context,
        blas: overhead.kernels,
        dnn: overhead.cudnn,
        nccl: overhead.nccl,
    };
    let devices = world.unwrap_or(1).min(MOST_DEVICES);
    Emulated::new(gpu, outside, devices).ok_or_else(|| {
        usage(format!(
            "{} has no CUDA: only cards of NVIDIA can be rehearsed",
            gpu.name
        ))
    })
}

fn write_report(path: &Path, answer: &Answer) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(&answer.report())? + "\n";
    let shown = cinch_files::shown(path).to_string();
    cinch_files::replace(path, text.as_bytes()).with_context(|| format!("cannot write `{shown}`"))
}

fn show_recording(
    arguments: &RehearseArguments,
    rehearsal: &Rehearsal,
    answer: &Answer,
) -> anyhow::Result<()> {
    let Some(recorded) = answer.process().map(|process| rehearsal.recording(process)) else {
        return Ok(());
    };
    if !recorded.is_file() {
        return Ok(());
    }
    if arguments.explain || arguments.timeline {
        let showing = Showing {
            batch: None,
            timeline: arguments.timeline,
            pictures: &[],
            json: false,
        };
        explain_file(&recorded, &showing)?;
    }
    if let Some(path) = &arguments.recording {
        let shown = cinch_files::shown(path).to_string();
        std::fs::copy(&recorded, path).with_context(|| format!("cannot write `{shown}`"))?;
    }
    Ok(())
}

/// The script's exit code becomes cinch's.
fn finish(ended: &Ended) -> anyhow::Result<()> {
    match ended {
        Ended::Interrupted => Err(Interrupted.into()),
        Ended::Code(0) => Ok(()),
        Ended::Code(code) => Err(ScriptEnded(*code).into()),
        // As shells have it: 128 and the signal's number.
        Ended::Signal(signal) => Err(ScriptEnded(128_u8.wrapping_add(*signal)).into()),
        // As `timeout` has it.
        Ended::TimedOut => Err(ScriptEnded(124).into()),
    }
}

/// The other side of the library's questions about convolutions.
pub fn ask_cudnn(arguments: &AskCudnnArguments) -> anyhow::Result<()> {
    let device = std::env::var(deviceless::DEVICE_VARIABLE).with_context(|| {
        format!(
            "{} is not set: a rehearsed process starts this",
            deviceless::DEVICE_VARIABLE
        )
    })?;
    let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
    Ok(deviceless::serve(
        &arguments.library,
        &device,
        input,
        output,
    )?)
}
