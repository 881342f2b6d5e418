//! What one record of a fine-tuning file says, by the keys that its kind has.
//!
//! The kind is recognised from the first record of a file; every further record has to be of the
//! same kind, and one that is not is refused with its reason. Nothing is skipped.

use std::fmt;

use serde_json::Value;

use super::chat::Conversation;
use super::message::{
    Object, chat, is_empty, list, message, no_turn, optional_text, read_message, text,
};

/// Columns that hold a question and its answer, with the column of more input, if the convention
/// has one. Where the prompt is the user's own text, it is taken as it is; the others are turns
/// of a conversation, which something has to keep apart.
const PAIR_COLUMNS: [PairColumns; 7] = [
    PairColumns::new("prompt", None, "completion", false),
    PairColumns::new("prompt", None, "response", false),
    PairColumns::new("instruction", Some("input"), "output", true),
    PairColumns::new("instruction", Some("context"), "response", true),
    PairColumns::new("question", None, "answer", true),
    PairColumns::new("query", None, "response", true),
    PairColumns::new("input", None, "output", true),
];

/// Columns that only samples have.
const OF_SAMPLES: [&str; 10] = [
    "messages",
    "conversations",
    "prompt",
    "instruction",
    "question",
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "preferred_output",
];

/// Whether a record with these columns is a sample and not a text in a column, as far as their
/// names tell.
pub fn names_sample(has: impl Fn(&str) -> bool) -> bool {
    let is_pair = |pair: &PairColumns| has(pair.prompt) && has(pair.completion);
    OF_SAMPLES.iter().any(|column| has(column)) || PAIR_COLUMNS.iter().any(is_pair)
}

/// Columns that say that a record is for something other than fine-tuning on text.
const REFUSED_COLUMNS: [(&str, &str); 10] = [
    ("chosen", "is one of a preference pair"),
    ("rejected", "is one of a preference pair"),
    ("preferred_output", "is one of a preference pair"),
    ("rejected_response", "is one of a preference pair"),
    ("chosen_messages", "is one of a preference pair"),
    ("rejected_messages", "is one of a preference pair"),
    ("images", "names pictures"),
    ("videos", "names videos"),
    ("audios", "names sounds"),
    ("image", "names a picture"),
];

/// Columns that hold true for an answer that is wanted, and false for one that is not.
const VERDICTS: [&str; 2] = ["label", "kto_tag"];

/// Why a record is for something other than fine-tuning on text, by a column that no kind has.
pub(super) fn refused(object: &Object) -> Option<String> {
    let mut columns = REFUSED_COLUMNS.iter();
    let column = columns.find(|(column, _)| object.get(*column).is_some_and(|v| !is_empty(v)));
    column.map(|(column, reason)| format!("`{column}` {reason}, which cannot be trained on"))
}

/// Refuses answers of which a column says whether they are wanted: all would be learned alike.
fn refuse_verdict(object: &Object) -> Result<(), String> {
    let mut columns = VERDICTS.iter();
    match columns.find(|column| object.get(**column).is_some_and(Value::is_boolean)) {
        Some(column) => Err(format!(
            "`{column}` says whether the answer is wanted, which cannot be trained on\nhint: keep the records whose answers are wanted, without `{column}`"
        )),
        None => Ok(()),
    }
}

/// The shape of the records of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `messages` of `role` and `content`.
    Messages,
    /// ShareGPT's `conversations` of `from` and `value`.
    Conversations,
    /// A prompt and what follows it.
    Pair(PairColumns),
    /// `text` alone.
    Text,
    /// Lines of a text file.
    Lines,
    /// A whole text file.
    File,
    /// `#::snt` sentences with their Penman graphs.
    Penman,
}

/// The column names of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairColumns {
    pub prompt: &'static str,
    pub input: Option<&'static str>,
    pub completion: &'static str,
    /// Whether the prompt is a turn of a conversation.
    pub is_turn: bool,
}

impl PairColumns {
    const fn new(
        prompt: &'static str,
        input: Option<&'static str>,
        completion: &'static str,
        is_turn: bool,
    ) -> Self {
        Self {
            prompt,
            input,
            completion,
            is_turn,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Messages => f.write_str("conversations (`messages`)"),
            Self::Conversations => f.write_str("conversations (`conversations`)"),
            Self::Pair(columns) => {
                write!(f, "pairs (`{}`", columns.prompt)?;
                if let Some(input) = columns.input {
                    write!(f, ", `{input}`")?;
                }
                write!(f, ", `{}`)", columns.completion)
            }
            Self::Text => f.write_str("texts (`text`)"),
            Self::Lines => f.write_str("lines of text"),
            Self::File => f.write_str("whole text files"),
            Self::Penman => f.write_str("sentences with graphs (`#::snt`)"),
        }
    }
}

/// One record, before any template.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    Text(String),
    Pair(Pair),
    Chat(Chat),
}

/// A prompt and its completion.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pair {
    pub system: Option<String>,
    /// Earlier questions and answers, which are not learned.
    pub history: Vec<(String, String)>,
    pub prompt: String,
    pub completion: String,
    pub is_turn: bool,
}

/// A conversation, and which of its messages are learned.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    pub conversation: Conversation,
    /// One for each message; true only for the assistant's.
    pub counted: Vec<bool>,
}

impl Kind {
    /// The kind of a JSON record by its keys.
    pub(super) fn of(object: &Object) -> Option<Self> {
        if object.get("messages").is_some_and(Value::is_array) {
            return Some(Self::Messages);
        }
        if object.get("conversations").is_some_and(Value::is_array) {
            return Some(Self::Conversations);
        }
        let pair = PAIR_COLUMNS
            .iter()
            .find(|c| object.contains_key(c.prompt) && object.contains_key(c.completion));
        match pair {
            Some(columns) => Some(Self::Pair(*columns)),
            None if object.contains_key("text") => Some(Self::Text),
            None => None,
        }
    }

    /// The columns of a record with something in them that this kind does not read, by name.
    pub(super) fn unread(self, object: &Object) -> Vec<String> {
        let is_read = |column: &str| match self {
            Self::Messages => ["messages", "system", "tools"].contains(&column),
            Self::Conversations => ["conversations", "system", "tools"].contains(&column),
            Self::Pair(pair) => {
                let is_chat = object.get(pair.prompt).is_some_and(Value::is_array);
                let others: &[&str] = match is_chat {
                    true => &["tools"],
                    false => &["system", "history"],
                };
                [pair.prompt, pair.completion].contains(&column)
                    || pair.input.is_some_and(|input| input == column && !is_chat)
                    || others.contains(&column)
            }
            Self::Text => column == "text",
            Self::Lines | Self::File | Self::Penman => true,
        };
        let columns = object.iter().filter(|(_, value)| !is_empty(value));
        columns
            .map(|(column, _)| column.clone())
            .filter(|column| !is_read(column))
            .collect()
    }

    /// The record in `object`, or why it is not one of this kind.
    pub(super) fn record(self, object: &Object) -> Result<Record, String> {
        if let Some(problem) = refused(object) {
            return Err(problem);
        }
        match self {
            Self::Messages | Self::Conversations => {
                refuse_verdict(object)?;
                let key = if self == Self::Messages {
                    "messages"
                } else {
                    "conversations"
                };
                let mut messages = Vec::new();
                if let Some(system) = optional_text(object, "system")? {
                    messages.push(message("system", &system));
                }
                for value in list(object, key)? {
                    messages.push(read_message(value, key)?);
                }
                chat(messages, object)
            }
            Self::Pair(columns) => {
                refuse_verdict(object)?;
                read_pair(object, columns)
            }
            Self::Text => {
                let text = text(object, "text")?;
                if text.is_empty() {
                    return Err("`text` is empty".to_owned());
                }
                Ok(Record::Text(text))
            }
            Self::Lines | Self::File | Self::Penman => Err(format!("found JSON among {self}")),
        }
    }
}

impl Pair {
    /// The pair as turns of a conversation; only the last answer is learned.
    pub fn into_chat(self) -> Chat {
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(message("system", system));
        }
        for (question, answer) in &self.history {
            messages.push(message("user", question));
            messages.push(message("assistant", answer));
        }
        messages.push(message("user", &self.prompt));
        messages.push(message("assistant", &self.completion));
        let mut counted = vec![false; messages.len()];
        if let Some(last) = counted.last_mut() {
            *last = true;
        }
        Chat {
            conversation: Conversation {
                messages,
                tools: None,
            },
            counted,
        }
    }
}

fn read_pair(object: &Object, columns: PairColumns) -> Result<Record, String> {
    let is_list = |key: &str| object.get(key).is_some_and(Value::is_array);
    if is_list(columns.prompt) && is_list(columns.completion) {
        return read_chat_pair(object, columns);
    }
    let mut prompt = text(object, columns.prompt)?;
    if let Some(column) = columns.input
        && let Some(input) = optional_text(object, column)?
    {
        prompt = format!("{prompt}\n{input}");
    }
    let mut history = Vec::new();
    if object.get("history").is_some_and(|value| !is_empty(value)) {
        for turn in list(object, "history")? {
            let text = |index: usize| turn.get(index).and_then(Value::as_str);
            let (Some(question), Some(answer)) = (text(0), text(1)) else {
                return Err("`history` is not a list of questions with answers".to_owned());
            };
            history.push((question.to_owned(), answer.to_owned()));
        }
    }
    Ok(Record::Pair(Pair {
        system: optional_text(object, "system")?,
        history,
        prompt,
        completion: text(object, columns.completion)?,
        is_turn: columns.is_turn,
    }))
}

/// A pair whose two sides are lists of messages: only the second side is learned.
fn read_chat_pair(object: &Object, columns: PairColumns) -> Result<Record, String> {
    let mut messages = Vec::new();
    let mut num_prompt = 0;
    for key in [columns.prompt, columns.completion] {
        num_prompt = messages.len();
        for value in list(object, key)? {
            messages.push(read_message(value, key)?);
        }
    }
    match chat(messages, object)? {
        Record::Chat(mut chat) => {
            chat.counted[..num_prompt].fill(false);
            if !chat.counted.contains(&true) {
                return Err(no_turn(columns.completion));
            }
            Ok(Record::Chat(chat))
        }
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(json: Value) -> (Option<Kind>, Result<Record, String>) {
        let object = json.as_object().unwrap();
        let kind = Kind::of(object);
        let record = match kind {
            Some(kind) => kind.record(object),
            None => Err("no kind".to_owned()),
        };
        (kind, record)
    }

    fn chat(json: Value) -> Chat {
        match read(json).1 {
            Ok(Record::Chat(chat)) => chat,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn pairs_are_known_by_their_columns() {
        let (kind, record) = read(json!({"prompt": "a", "completion": "b"}));
        assert_eq!(kind.unwrap().to_string(), "pairs (`prompt`, `completion`)");
        let Ok(Record::Pair(pair)) = record else {
            panic!()
        };
        assert!(!pair.is_turn && pair.prompt == "a" && pair.completion == "b");
        let (kind, record) = read(json!({
            "instruction": "Add.", "input": "1 2", "output": "3", "system": "Be exact.",
            "history": [["q", "a"]]
        }));
        assert_eq!(
            kind.unwrap().to_string(),
            "pairs (`instruction`, `input`, `output`)"
        );
        let Ok(Record::Pair(pair)) = record else {
            panic!()
        };
        assert!(pair.is_turn);
        assert_eq!(pair.prompt, "Add.\n1 2");
        let chat = pair.into_chat();
        assert_eq!(chat.counted, [false, false, false, false, true]);
        assert_eq!(chat.conversation.messages[2]["content"], "a");
        let (_, record) = read(json!({"question": "a", "answer": "b"}));
        assert!(matches!(record, Ok(Record::Pair(_))));
        assert_eq!(read(json!({"title": "a"})).0, None);
    }

    #[test]
    fn conversations_keep_what_templates_read() {
        let chat = chat(json!({
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]},
                {"role": "assistant", "content": "x", "weight": 0},
                {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "tools": "[{\"name\": \"f\"}]"
        }));
        assert_eq!(chat.counted, [false, false, true]);
        assert_eq!(chat.conversation.messages[0]["content"], "ab");
        assert_eq!(chat.conversation.messages[2]["content"], "");
        assert_eq!(
            chat.conversation.messages[2]["tool_calls"][0]["function"]["name"],
            "f"
        );
        assert_eq!(chat.conversation.tools, Some(json!([{"name": "f"}])));
    }

    #[test]
    fn sharegpt_roles_become_those_of_templates() {
        let chat = chat(json!({
            "system": "s",
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
                {"from": "observation", "value": "b"},
                {"from": "gpt", "value": "c"},
            ]
        }));
        let roles: Vec<&str> = chat
            .conversation
            .messages
            .iter()
            .map(|message| message["role"].as_str().unwrap())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
        assert_eq!(chat.counted, [false, false, true, false, true]);
    }

    #[test]
    fn turns_that_a_file_leaves_out_are_not_learned_by_whatever_name_it_says_so() {
        for (key, leave_out) in [
            ("weight", json!(0)),
            ("loss_weight", json!(0.0)),
            ("train", json!(false)),
            ("training", json!(false)),
            ("loss", json!(false)),
        ] {
            let sharegpt = chat(json!({"conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b", key: leave_out},
                {"from": "gpt", "value": "c"},
            ]}));
            assert_eq!(sharegpt.counted, [false, false, true], "{key}");
            let messages = chat(json!({"messages": [
                {"role": "assistant", "content": "b", key: leave_out},
                {"role": "assistant", "content": "c"},
            ]}));
            assert_eq!(messages.counted, [false, true], "{key}");
        }
    }

    #[test]
    fn columns_that_no_kind_reads_are_known() {
        for (record, unread) in [
            (
                json!({"question": "a", "answer": "b", "context": "c", "id": 1, "source": ""}),
                vec!["context", "id"],
            ),
            (
                json!({"instruction": "a", "input": "", "output": "b", "system": "c", "system_prompt": "d"}),
                vec!["system_prompt"],
            ),
            (
                json!({"prompt": "a", "completion": "b", "tools": "[{}]"}),
                vec!["tools"],
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "a"}], "tools": [], "text": "b"}),
                vec!["text"],
            ),
        ] {
            let object = record.as_object().unwrap();
            assert_eq!(Kind::of(object).unwrap().unread(object), unread);
        }
    }

    #[test]
    fn a_prompt_of_messages_is_not_learned() {
        let chat = chat(json!({
            "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "completion": [{"role": "assistant", "content": "c"}]
        }));
        assert_eq!(chat.counted, [false, false, true]);
    }

    #[test]
    fn what_cannot_be_trained_on_is_refused_by_name() {
        for (json, word) in [
            (
                json!({"messages": [{"role": "user", "content": "a"}]}),
                "no turn of the assistant",
            ),
            (json!({"messages": []}), "empty"),
            (json!({"messages": ["a"]}), "a string, not an object"),
            (json!({"messages": [{"role": "assistant"}]}), "no `content`"),
            (
                json!({"messages": [{"role": "assistant", "content": 3}]}),
                "a number",
            ),
            (json!({"messages": [{"content": "a"}]}), "no `role`"),
            (
                json!({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}),
                "0 or 1",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "`image_url`",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "a"}], "label": false}),
                "`label`",
            ),
            (
                json!({"prompt": "a", "completion": "b", "label": true}),
                "`label` says whether",
            ),
            (
                json!({
                    "prompt": [{"role": "user", "content": "a"}],
                    "completion": [{"role": "assistant", "content": "b"}],
                    "label": false
                }),
                "`label` says whether",
            ),
            (
                json!({"instruction": "a", "output": "b", "kto_tag": false}),
                "`kto_tag` says whether",
            ),
            (
                json!({
                    "conversations": [{"from": "gpt", "value": "a", "train_detail": [{"begin_offset": 0}]}]
                }),
                "`train_detail`",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "a"}], "images": ["x.png"]}),
                "`images`",
            ),
            (
                json!({"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt"}}),
                "`chosen`",
            ),
            (
                json!({"conversations": [{"from": "judge", "value": "a"}]}),
                "`judge`",
            ),
            (
                json!({"conversations": [{"from": "function_call", "value": "f("}]}),
                "not JSON",
            ),
            (
                json!({"prompt": "a", "completion": 1}),
                "`completion` is a number",
            ),
            (
                json!({"instruction": "a", "output": "b", "history": [1]}),
                "`history`",
            ),
            (json!({"text": ""}), "`text` is empty"),
            (
                json!({"messages": [{"role": "assistant", "content": "a"}], "tools": "["}),
                "`tools`",
            ),
        ] {
            let problem = read(json.clone()).1.unwrap_err();
            assert!(problem.contains(word), "{json}: {problem}");
        }
    }

    /// LLaMA-Factory's own demonstration, whose conversations are in these columns alone.
    #[test]
    fn preferences_without_any_other_column_are_samples_that_are_refused() {
        let pair = json!({"chosen_messages": [{"role": "user"}], "rejected_messages": []});
        let object = pair.as_object().unwrap();
        assert!(names_sample(|column| object.contains_key(column)));
        assert_eq!(Kind::of(object), None);
        let problem = refused(object).unwrap();
        assert!(problem.starts_with("`chosen_messages`"), "{problem}");
    }
}
