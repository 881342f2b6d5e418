//! Trains inside a plan: weights, data, the loop, schedules, checkpoints, logs.
//!
//! [`Session`] is the model in its arena: it runs steps and evaluations and knows nothing of
//! files. [`train`] is the run around it: data, schedule, evaluation, checkpoints, record.
//!
//! ```
//! use cinch_config::{Settings, Source};
//! use cinch_engine::EngineOptions;
//! use cinch_graph::Target;
//! use cinch_step::StepPlan;
//! use cinch_train::{Batch, Session};
//!
//! let mut settings = Settings::new();
//! for (key, value) in [
//!     ("model.size", "tiny"),
//!     ("vram.batch_size", "1"),
//!     ("vram.gradient_accumulation_steps", "1"),
//!     ("vram.max_seq_len", "16"),
//! ] {
//!     settings.set(key, value, Source::Flag("--set".to_owned()))?;
//! }
//! let plan = StepPlan::new(&settings.resolve()?, Target::Cpu, 0)?;
//! let mut session = Session::new(plan, EngineOptions::default())?;
//! session.initialize(42)?;
//! let mut batch = Batch::new(1, 16);
//! batch.targets_mut().fill(7);
//! let first = session.train_step(&batch, 0)?.loss;
//! let second = session.train_step(&batch, 1)?.loss;
//! assert!(second < first);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
pub mod checkpoint;
mod cluster;
mod curriculum;
mod data;
mod embed;
mod error;
mod event;
mod export;
mod generate;
mod host;
mod initialize;
mod kept;
mod moments;
mod outcome;
mod owner;
mod pretrained;
mod rank_times;
mod ranks;
pub mod record;
mod retrieval;
mod rows;
mod sample;
mod schedule;
mod sentences;
mod session;
mod share;
mod state;
mod step;
mod terms;
mod texts;
mod trainer;

pub use batch::Batch;
pub use cinch_device::{available_host_bytes, peak_resident_bytes, resident_bytes};
pub use data::DataReport;
pub use embed::{Embedder, EmbedderFiles, EmbedderOptions, normalised};
pub use error::TrainError;
pub use event::{Event, MemoryUse, Observer, StepReport};
pub use export::{ADAPTER_FOLDER, Exported, export};
pub use generate::{
    Generator, GeneratorMemory, GeneratorOptions, Sampling, TunedWeights, WeightPart, WeightSource,
};
pub use outcome::{Ending, MeasuredLoss, TrainingOutcome};
pub use owner::{Owner, Ownership};
pub use pretrained::{FirstWeights, described_otherwise, open_weights, test_load};
pub use retrieval::{Retrieval, evaluate_retrieval};
pub use rows::{PaddedRows, Padding, RowLengths, RowSurvey};
pub use schedule::learning_rate;
pub use sentences::SentenceForm;
pub use session::Session;
pub use state::{Clusters, Difference, EFFECTIVE_BATCH, State};
pub use step::StepResult;
pub use terms::{Evaluation, TermSum, TermValue, TermValues};
pub use trainer::{Resume, Run, TOKENIZER_FILE, train, train_owned};
