//! Fine-tuning data: records of files as samples, and rows of samples for a step.
//!
//! In the order in which they flow: [`Samples::prepare`] reads files of prompts, conversations or
//! text, renders conversations by the model's own template ([`TokenizerConfig`]) and encodes all
//! of it; [`Samples::limit`] deals with what is too long; [`Samples::split`] sets samples apart
//! for validation; [`Selection::rows`] packs or pads them; [`Rows::fill`] writes one row.

mod array;
mod chat;
mod encode;
mod length;
mod message;
mod pack;
mod penman;
mod prepare;
mod prompt;
mod read;
mod record;
mod row;
mod store;
mod turns;

pub use chat::{Conversation, Moment, Rendered, Template, TemplateProblem, TokenizerConfig};
pub use encode::{Sample, Templating};
pub use length::{Bucket, Buckets, Lengths};
pub use prepare::SampleOptions;
pub use prompt::{Prompter, generation_ends};
pub(crate) use read::UNREAD_EXTENSIONS;
pub use read::{LONGEST_RECORD_BYTES, TextUnit};
pub use record::{Chat, Kind, Pair, PairColumns, Record, names_sample};
pub use row::{Row, RowStyle, Rows, Selection};
pub use store::{Limited, SampleFile, SampleView, Samples, TooLong};
