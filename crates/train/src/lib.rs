//! Trains inside a plan: weights, data, the loop, schedules, checkpoints, logs.
//!
//! [`Session`] is the model in its arena: it runs steps and evaluations and knows nothing of
//! files. [`train`] is the run around it: data, schedule, evaluation, checkpoints, record.

pub mod checkpoint;
mod error;
mod event;
mod initialize;
mod moments;
pub mod record;
mod sample;
mod schedule;
mod session;
mod state;
mod step;
mod trainer;

pub use cinch_device::{available_host_bytes, peak_resident_bytes, resident_bytes};
pub use error::TrainError;
pub use event::{Event, Observer, StepReport};
pub use sample::{Generator, Sampling};
pub use schedule::learning_rate;
pub use session::{Batch, Session};
pub use state::State;
pub use step::StepResult;
pub use trainer::{Ending, Outcome, Resume, Run, train};
