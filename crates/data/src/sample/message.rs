//! Messages of a conversation as records write them, with the names that templates know.

use serde_json::{Map, Value, json};

use super::chat::Conversation;
use super::record::{Chat, Record};

pub(super) type Object = Map<String, Value>;

pub(super) fn message(role: &str, content: &str) -> Object {
    Object::from_iter([
        ("role".to_owned(), Value::from(role)),
        ("content".to_owned(), Value::from(content)),
    ])
}

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

pub(super) fn text(object: &Object, key: &str) -> Result<String, String> {
    match object.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(format!(
            "`{key}` is {}, but a string is needed",
            kind_of(other)
        )),
        None => Err(format!("there is no `{key}`")),
    }
}

pub(super) fn optional_text(object: &Object, key: &str) -> Result<Option<String>, String> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => text(object, key).map(|text| Some(text).filter(|text| !text.is_empty())),
    }
}

pub(super) fn list<'a>(object: &'a Object, key: &str) -> Result<&'a [Value], String> {
    match object.get(key) {
        Some(Value::Array(list)) if list.is_empty() => Err(format!("`{key}` is empty")),
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(format!(
            "`{key}` is {}, but a list is needed",
            kind_of(other)
        )),
        None => Err(format!("there is no `{key}`")),
    }
}

pub(super) fn no_turn(key: &str) -> String {
    format!("`{key}` has no turn of the assistant to learn from")
}

pub(super) fn chat(messages: Vec<Object>, object: &Object) -> Result<Record, String> {
    let counted = messages
        .iter()
        .map(is_counted)
        .collect::<Result<Vec<_>, _>>()?;
    if !counted.contains(&true) {
        return Err(no_turn("messages"));
    }
    let tools = match object.get("tools") {
        Some(value) if is_empty(value) => None,
        // Some files hold the list as a string of JSON.
        Some(Value::String(text)) => Some(
            serde_json::from_str(text)
                .map_err(|error| format!("`tools` is a string that is not JSON: {error}"))?,
        ),
        other => other.cloned(),
    };
    Ok(Record::Chat(Chat {
        conversation: Conversation { messages, tools },
        counted,
    }))
}

/// Under which a message says whether it is learned, in the files of several programs.
const LEARNED: [&str; 5] = ["weight", "loss_weight", "train", "training", "loss"];

/// Under which a message says which parts of it are.
const PARTS: [&str; 2] = ["train_detail", "training_detail"];

/// Whether a message is learned: the assistant's are, unless the record says otherwise.
fn is_counted(message: &Object) -> Result<bool, String> {
    if message.get("role").and_then(Value::as_str) != Some("assistant") {
        return Ok(false);
    }
    for key in PARTS {
        if message.get(key).is_some_and(|value| !is_empty(value)) {
            return Err(format!(
                "`{key}` of a message says which parts of it are learned, but only whole messages are"
            ));
        }
    }
    for key in LEARNED {
        match message.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::Bool(train)) => return Ok(*train),
            Some(value) if value.as_f64() == Some(0.0) => return Ok(false),
            Some(value) if value.as_f64() == Some(1.0) => {}
            Some(other) => {
                return Err(format!(
                    "`{key}` of a message is {other}, but 0 or 1 is needed"
                ));
            }
        }
    }
    Ok(true)
}

pub(super) fn read_message(value: &Value, key: &str) -> Result<Object, String> {
    let Value::Object(object) = value else {
        return Err(format!("`{key}` holds {}, not an object", kind_of(value)));
    };
    let is_sharegpt = object.contains_key("from") && !object.contains_key("role");
    let (role_key, content_key) = if is_sharegpt {
        ("from", "value")
    } else {
        ("role", "content")
    };
    let role = text(object, role_key).map_err(|problem| format!("in `{key}`: {problem}"))?;
    if is_sharegpt {
        let mut message = read_sharegpt(&role, &text(object, content_key)?)?;
        for key in LEARNED.into_iter().chain(PARTS) {
            if let Some(value) = object.get(key) {
                message.insert(key.to_owned(), value.clone());
            }
        }
        return Ok(message);
    }
    let mut message = object.clone();
    let content = match object.get(content_key) {
        Some(Value::String(_)) => return Ok(message),
        Some(Value::Array(parts)) => parts
            .iter()
            .map(text_part)
            .collect::<Result<String, String>>()?,
        None | Some(Value::Null) if object.contains_key("tool_calls") => String::new(),
        None => return Err(format!("a message of `{key}` has no `{content_key}`")),
        Some(other) => {
            return Err(format!(
                "`{content_key}` of a message is {}, but a string is needed",
                kind_of(other)
            ));
        }
    };
    message.insert(content_key.to_owned(), Value::from(content));
    Ok(message)
}

/// A part of a message whose content is a list.
fn text_part(part: &Value) -> Result<String, String> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
    let text = part.get("text").or_else(|| part.get("value"));
    match (kind, text.and_then(Value::as_str)) {
        ("text", Some(text)) => Ok(text.to_owned()),
        ("text", None) => Err("a part of a message has no `text`".to_owned()),
        (other, _) => Err(format!(
            "a message has a part of the type `{other}`, but only text can be trained on"
        )),
    }
}

/// ShareGPT's roles by the names that templates know.
fn read_sharegpt(role: &str, value: &str) -> Result<Object, String> {
    match role {
        "human" | "user" => Ok(message("user", value)),
        "gpt" | "assistant" | "chatgpt" | "bing" | "bard" => Ok(message("assistant", value)),
        "system" => Ok(message("system", value)),
        "observation" | "tool" => Ok(message("tool", value)),
        "function_call" => {
            let call: Value = serde_json::from_str(value)
                .map_err(|error| format!("a `function_call` is not JSON: {error}"))?;
            let calls = match call {
                Value::Array(calls) => calls,
                call => vec![call],
            };
            let calls: Vec<Value> = calls
                .into_iter()
                .map(|call| json!({"type": "function", "function": call}))
                .collect();
            let mut message = message("assistant", "");
            message.insert("tool_calls".to_owned(), Value::from(calls));
            Ok(message)
        }
        other => Err(format!("`from` is `{other}`, which is not known")),
    }
}
