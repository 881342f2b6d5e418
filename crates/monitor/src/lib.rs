//! Watching memory while programs run: who holds the GPUs, whether it grows, and how it compares
//! with what was predicted.
//!
//! A [`Source`] gives a [`Sample`] a second: of this machine ([`Live`]) or of a recording
//! ([`Recording`]). A [`History`] keeps what is needed of them: series of bounded length, peaks,
//! trends. [`signs`] reads the history for what a person should know. The dashboard, the
//! lines, the metrics page and the report are views of these; none of them looks at the machine,
//! and none ends a process.

mod csv;
pub mod dashboard;
mod error;
mod facts;
mod history;
mod http;
mod prometheus;
mod rank_lines;
mod recording;
mod run_folder;
mod sample;
mod series;
mod signs;
mod source;
pub mod text;
mod trend;

pub use csv::CsvWriter;
pub use error::MonitorError;
pub use facts::{Facts, ProcessFacts, ProcessTable};
pub use history::{GpuHistory, History, ProcessHistory, ProcessKey};
pub use http::{Reply, Server};
pub use prometheus::exposition;
pub use rank_lines::{rank_lines, read_ranks};
pub use recording::{Recording, append_line};
pub use run_folder::{RunCurve, RunPoint, is_run, owned_by, read_curve};
pub use sample::{Planned, Sample};
pub use series::Series;
pub use signs::{Sign, SignKind, signs};
pub use source::{Live, Source, Watched};
pub use trend::{Trend, trend};
