//! Chat templates: a model's own program that turns a conversation into one text.

mod config;
mod date;
mod json;
mod template;

pub use config::{Conversation, TokenizerConfig};
pub use date::Moment;
pub use template::{Rendered, Template, TemplateProblem};
