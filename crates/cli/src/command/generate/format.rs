//! How a conversation becomes tokens for a model to continue.

use cinch_data::Tokenizer;
use cinch_data::sample::{Conversation, Prompter, TokenizerConfig};
use serde_json::Value;

use crate::failure::usage;

/// Who said something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// Whoever says beforehand how the assistant is to answer.
    System,
    User,
    Assistant,
}

/// What one of them said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub speaker: Speaker,
    pub text: String,
}

/// A way to write conversations down: a model's own template, or the plain one.
pub trait ChatFormat {
    /// What is to be said of it before the first turn, if anything.
    fn note(&self) -> Option<String>;

    /// The conversation up to where the assistant's next turn begins.
    fn encode(&self, turns: &[Turn]) -> anyhow::Result<Vec<u32>>;

    /// Texts with which the assistant's turn is over, besides the tokens that end it.
    fn ends(&self) -> Vec<String>;
}

/// `User: …` and `Assistant: …` in lines of their own, for models without a template.
pub struct PlainFormat<'a> {
    pub tokenizer: &'a Tokenizer,
}

impl PlainFormat<'_> {
    fn write(turns: &[Turn]) -> String {
        let line = |turn: &Turn| match turn.speaker {
            Speaker::System => format!("{}\n", turn.text),
            Speaker::User => format!("User: {}\nAssistant:", turn.text),
            Speaker::Assistant => format!(" {}\n", turn.text),
        };
        turns.iter().map(line).collect()
    }
}

impl ChatFormat for PlainFormat<'_> {
    fn note(&self) -> Option<String> {
        let note = "the model has no chat template, so it sees the conversation as lines that \
                    begin with `User:` and `Assistant:`";
        Some(note.to_owned())
    }

    fn encode(&self, turns: &[Turn]) -> anyhow::Result<Vec<u32>> {
        Ok(self.tokenizer.encode(&Self::write(turns))?)
    }

    fn ends(&self) -> Vec<String> {
        vec!["\nUser:".to_owned()]
    }
}

/// A model's own template.
pub struct TemplateFormat<'a> {
    pub config: &'a TokenizerConfig,
    pub prompter: &'a Prompter<'a>,
}

impl ChatFormat for TemplateFormat<'_> {
    fn note(&self) -> Option<String> {
        None
    }

    fn encode(&self, turns: &[Turn]) -> anyhow::Result<Vec<u32>> {
        let message = |turn: &Turn| {
            let role = match turn.speaker {
                Speaker::System => "system",
                Speaker::User => "user",
                Speaker::Assistant => "assistant",
            };
            let fields = [("role", role), ("content", &turn.text)];
            let fields = fields.map(|(key, text)| (key.to_owned(), Value::from(text)));
            fields.into_iter().collect()
        };
        let conversation = Conversation {
            messages: turns.iter().map(message).collect(),
            tools: None,
        };
        let Some(template) = self.config.template(false) else {
            return Ok(Vec::new());
        };
        let rendered = self
            .config
            .render(template, &conversation, turns.len(), true)
            .map_err(|problem| {
                let path = cinch_files::shown(template.path());
                usage(format!(
                    "{path}: the chat template fails: {}",
                    problem.problem
                ))
            })?;
        Ok(self.prompter.encode_rendered(&rendered.text)?)
    }

    fn ends(&self) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_ends_where_the_answer_begins() {
        let turn = |speaker, text: &str| Turn {
            speaker,
            text: text.to_owned(),
        };
        let turns = [
            turn(Speaker::User, "hello"),
            turn(Speaker::Assistant, "good day"),
            turn(Speaker::User, "and?"),
        ];
        assert_eq!(
            PlainFormat::write(&turns),
            "User: hello\nAssistant: good day\nUser: and?\nAssistant:"
        );
    }
}
