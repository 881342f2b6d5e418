//! The written record of a run: `metrics.jsonl` for programs and `events.out.tfevents.…` for
//! TensorBoard. Both survive a kill at any moment, and both forget, on resume, what the killed
//! process had recorded beyond the checkpoint it is resumed from.

mod crc32c;
mod error;
mod metrics;
mod run;
mod tensorboard;

pub use error::RecordError;
pub use metrics::MetricsLog;
pub(crate) use run::RunRecord;
pub use tensorboard::EventWriter;
