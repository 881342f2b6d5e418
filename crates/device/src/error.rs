//! What can be wrong with what was asked of the catalogue.

use thiserror::Error;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    #[error(
        "`{name}` is no GPU that cinch knows{}\nhint: `cinch gpus` lists them; for any other, --gpu-memory SIZE says what it has",
        did_you_mean(nearest)
    )]
    UnknownGpu {
        name: String,
        /// The likeliest ones, best first.
        nearest: Vec<&'static str>,
    },
    #[error(
        "`{name}` can be any of {}\nhint: name one of them, for example --gpu \"{}\"",
        candidates.join(", "),
        candidates.first().copied().unwrap_or_default()
    )]
    AmbiguousGpu {
        name: String,
        candidates: Vec<&'static str>,
    },
    #[error(
        "`{name}` is no link that cinch knows\nhint: GB/s of one GPU in one direction, or one of {}",
        known.join(", ")
    )]
    UnknownLink {
        name: String,
        known: Vec<&'static str>,
    },
    #[error("no GPU is named\nhint: --gpu \"RTX 4090\"; `cinch gpus` lists those that cinch knows")]
    EmptyName,
}

fn did_you_mean(nearest: &[&'static str]) -> String {
    match nearest {
        [] => String::new(),
        names => format!("; did you mean {}?", names.join(" or ")),
    }
}
