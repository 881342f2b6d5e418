//! `cinch`: plan a training step, fit it into a budget, train inside the plan.

mod args;
mod budget;
mod calibration;
mod command;
mod device;
mod failure;
mod files;
mod interrupt;
mod measure;
mod memory;
mod model_folder;
mod overhead;
mod picture;
mod progress;
mod pytorch;
mod ranks;
mod resume;
mod rows;
mod run;
mod settings;
mod table;
mod unfollowed;
mod voice;
mod world;

use std::process::ExitCode;

use args::{Arguments, Command};

fn main() -> ExitCode {
    if let Some(code) = command::run::become_a_command() {
        return code;
    }
    let arguments = Arguments::read();
    voice::set(arguments.verbosity());
    let result = match arguments.command {
        Command::Plan(arguments) => command::plan::run(&arguments),
        Command::Fit(arguments) => command::fit::run(&arguments),
        Command::Train(arguments) => command::train::run(&arguments),
        Command::Launch(arguments) => command::launch::run(&arguments),
        Command::Generate(arguments) => command::generate::run(&arguments),
        Command::Embed(arguments) => command::embed::run(&arguments),
        Command::Eval(arguments) => command::eval::run(&arguments),
        Command::Export(arguments) => command::export::run(&arguments),
        Command::Merge(arguments) => command::merge::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments),
        Command::Profile(arguments) => command::profile::run(&arguments),
        Command::Trace(arguments) => command::trace::run(&arguments),
        Command::Diagnose(arguments) => command::diagnose::run(&arguments),
        Command::Monitor(arguments) => command::monitor::run(&arguments),
        Command::Run(arguments) => return command::run::run(&arguments),
        Command::Report(arguments) => command::report::run(&arguments),
        Command::Rehearse(arguments) => command::rehearse::run(&arguments),
        Command::AskCudnn(arguments) => command::rehearse::ask_cudnn(&arguments),
        Command::Check(arguments) => command::check::run(&arguments),
        Command::Data(arguments) => command::data::run(&arguments),
        Command::Models(arguments) => command::models::run(&arguments),
        Command::Gpus(arguments) => command::gpus::run(&arguments),
        Command::Presets(arguments) => command::presets::run(&arguments),
        Command::Init(arguments) => command::init::run(&arguments),
        Command::Completions(arguments) => command::completions::run(&arguments),
        Command::Man(arguments) => command::man::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}
