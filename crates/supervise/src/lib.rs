//! Running a training command so that nobody sees the difference, and knowing afterwards whether
//! it ran out of memory.
//!
//! [`Supervisor::run`] starts one process and relays its output; [`judge`] reads why it ended from
//! its exit, from what `cinch-diagnose` reads in its output and from the kernel's counters; [`Search`] says which batch to
//! try next; [`Place`] writes it where the user said it stands. Nothing here decides to try again:
//! that is the command's loop.

mod capture;
mod error;
mod judge;
mod kernel;
mod newest;
mod place;
mod search;
mod supervisor;
mod terminal;

pub use capture::{Capture, Stream};
pub use error::SuperviseError;
pub use judge::{End, Evidence, judge};
pub use kernel::KernelKills;
pub use newest::newest_checkpoint;
pub use place::{Batch, FileKey, Place};
pub use search::{Result as TrialResult, Search};
pub use supervisor::{Ended, Supervisor, as_the_command_ended};
pub use terminal::{LAUNCHER, exec_on_terminal};
