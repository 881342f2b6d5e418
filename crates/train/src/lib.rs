//! Trains inside a plan: weights, data, the loop, schedules, checkpoints, logs.
//!
//! [`Session`] is the model in its arena: it runs steps and evaluations and knows nothing of
//! files. [`train`] is the run around it: data, schedule, evaluation, checkpoints, record.

pub mod checkpoint;
mod data;
mod error;
mod event;
mod initialize;
mod moments;
mod outcome;
pub mod record;
mod sample;
mod schedule;
mod session;
mod state;
mod step;
mod trainer;

pub use cinch_device::{available_host_bytes, peak_resident_bytes, resident_bytes};
pub use data::DataReport;
pub use error::TrainError;
pub use event::{Event, MemoryUse, Observer, StepReport};
pub use outcome::{Ending, MeasuredLoss, TrainingOutcome};
pub use sample::{Generator, Sampling};
pub use schedule::learning_rate;
pub use session::{Batch, Session};
pub use state::{Difference, EFFECTIVE_BATCH, State};
pub use step::StepResult;
pub use trainer::{Resume, Run, train};
