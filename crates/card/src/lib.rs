//! A card that is not there, for `cinch rehearse`: the shared object that stands in for CUDA's libraries, the Python that
//! runs beside the script, and the process that asks cuDNN.
//!
//! `library/` is the shared object's source. It is compiled by the build script and carried here as bytes; as a module of
//! this crate it is what the tests call.

pub mod deviceless;
mod emulated;
#[path = "../library/lib.rs"]
#[allow(dead_code, unsafe_code)]
pub mod library;
mod record;
mod wave;

pub use emulated::{Emulated, Outside};
pub use record::{Entry, Record};

/// The shared object.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcuda.so.1"));

/// Python modules for the script's process: their file names and texts.
pub const MODULES: &[(&str, &str)] = &[
    (
        "sitecustomize.py",
        include_str!("../python/sitecustomize.py"),
    ),
    (
        "cinch_rehearsal.py",
        include_str!("../python/cinch_rehearsal.py"),
    ),
    ("cinch_values.py", include_str!("../python/cinch_values.py")),
];

/// A module for the user's own script: a callback and a context that rehearse it before its first step.
pub const SCRIPT: &str = include_str!("../python/cinch_rehearse.py");
