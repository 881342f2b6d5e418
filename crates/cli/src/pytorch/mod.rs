//! The commands about PyTorch's memory: what a run will take, what was measured of it, what a
//! recording of it says, and which settings fit.

pub mod chosen;
pub mod course;
pub mod estimate;
mod guides;
pub mod plan;
mod read_as;
mod remedies;
mod sharded;
pub mod show;
pub mod snapshot;
mod truth;
pub mod workload;

use crate::failure::usage;

/// Flags about cinch's own engine beside a PyTorch run.
pub fn refuse_flags_of_cinch(flags: &[&'static str]) -> anyhow::Result<()> {
    let Some(flag) = flags.first() else {
        return Ok(());
    };
    let instead = match *flag {
        "--optimizer-states" => "; PyTorch's eight-bit states are --optimizer adamw_8bit",
        "--explain" | "--graph" | "--guide" => "; --what-if and --guides tell more of PyTorch",
        "--front-picture" | "--profile" => {
            "; there is no model of PyTorch's speed, and nothing of it runs here"
        }
        _ => "",
    };
    Err(usage(format!(
        "{flag} is about cinch's own engine, not about PyTorch\n\
         hint: leave it out, or leave --engine pytorch out{instead}"
    )))
}

/// Flags about PyTorch without it.
pub fn refuse_flags_of_pytorch(flag: Option<&str>) -> anyhow::Result<()> {
    match flag {
        None => Ok(()),
        Some(flag) => Err(usage(format!(
            "{flag} is about a run in PyTorch, not about cinch's own engine\n\
             hint: add --engine pytorch, or leave it out"
        ))),
    }
}
