//! How a conversation becomes tokens for a model to continue.

use cinch_data::Tokenizer;

/// Who said something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    User,
    Assistant,
}

/// What one of the two said.
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

    /// Texts with which the assistant's turn is over.
    fn ends(&self) -> Vec<String>;

    /// Tokens with which it is over.
    fn end_tokens(&self) -> Vec<u32>;
}

/// `User: …` and `Assistant: …` in lines of their own, for models without a template.
pub struct PlainFormat<'a> {
    pub tokenizer: &'a Tokenizer,
}

impl PlainFormat<'_> {
    fn write(turns: &[Turn]) -> String {
        let line = |turn: &Turn| match turn.speaker {
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

    fn end_tokens(&self) -> Vec<u32> {
        self.tokenizer.end_of_text().into_iter().collect()
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
