//! Fuzzing without tools: on stable Rust, with nothing to install.
//!
//! A [`Target`] reads one kind of file. A worker process (`worker`) runs it on inputs that
//! `mutate` makes of the repository's fixtures, under a memory bound (`memory`) and with panics
//! caught; it writes each input down before it is read (`current`). The process that was started
//! (`watch`) waits for the worker: if it dies or hangs, the last input written is the reason. In a
//! build with LLVM's coverage pass, inputs that reach new edges are kept and mutated further
//! (`coverage`). `.ci/fuzz` makes such a build.

mod coverage;
mod current;
mod find;
mod memory;
mod mutate;
mod random;
mod target;
mod watch;
mod worker;

pub use find::Find;
pub use target::{TARGETS, Target};
pub use watch::{Campaign, Summary, watch};
pub use worker::{Stop, replay, work};
