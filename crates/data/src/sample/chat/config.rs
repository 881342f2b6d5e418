//! What a model's folder says of its text: special tokens and chat templates.
//!
//! `tokenizer_config.json` names the special tokens, as strings or as objects, and may hold one
//! template or a list of named ones. A file `chat_template.jinja` beside it takes the place of
//! the default one, as in transformers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use minijinja::Value as TemplateValue;
use minijinja::value::Serde;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::date::Moment;
use super::template::{Rendered, Template, TemplateProblem};
use crate::error::DataError;

const CONFIG_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
const DEFAULT_TEMPLATE: &str = "default";
const TOOL_TEMPLATE: &str = "tool_use";

/// The keys of special tokens that a template may print.
const TOKEN_KEYS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A conversation as a template sees it: messages are objects with `role` and `content`, and
/// whatever else the template reads.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Map<String, Value>>,
    pub tools: Option<Value>,
}

/// The templates and special tokens of one model.
#[derive(Debug)]
pub struct TokenizerConfig {
    path: PathBuf,
    tokens: Vec<(&'static str, String)>,
    default: Option<Template>,
    tool_use: Option<Template>,
    fingerprint: String,
}

impl TokenizerConfig {
    /// Reads a model's folder; a folder without these files has neither tokens nor template.
    /// `moment` is the date for templates that print one.
    pub fn from_folder(folder: &Path, moment: Moment) -> Result<Self, DataError> {
        let path = folder.join(CONFIG_FILE);
        let config = read(&path)?.unwrap_or_else(|| "{}".to_owned());
        let template_path = folder.join(TEMPLATE_FILE);
        let file = read(&template_path)?;
        Self::new(
            &path,
            &config,
            file.as_deref().map(|text| (template_path.as_path(), text)),
            moment,
        )
    }

    /// From the content of `tokenizer_config.json` and, if there is one, of the template's own
    /// file with its path.
    pub fn new(
        path: &Path,
        config: &str,
        file: Option<(&Path, &str)>,
        moment: Moment,
    ) -> Result<Self, DataError> {
        let bad = |problem: String| DataError::TokenizerConfig {
            path: path.to_path_buf(),
            problem,
        };
        let config: Map<String, Value> =
            serde_json::from_str(config).map_err(|error| bad(error.to_string()))?;
        let mut tokens = Vec::new();
        for key in TOKEN_KEYS {
            match config.get(key) {
                None | Some(Value::Null) => {}
                Some(token) => tokens.push((
                    key,
                    token_text(token).ok_or_else(|| {
                        bad(format!(
                            "`{key}` is neither a string nor an object with `content`"
                        ))
                    })?,
                )),
            }
        }
        let mut sources = named_templates(&config).ok_or_else(|| {
            bad("`chat_template` is neither a string nor a list of objects with `name` and `template`".to_owned())
        })?;
        let mut default_path = path;
        if let Some((template_path, source)) = file {
            default_path = template_path;
            sources.retain(|(name, _)| *name != DEFAULT_TEMPLATE);
            sources.push((DEFAULT_TEMPLATE, source));
        }
        let compile = |name: &str, path: &Path| {
            sources
                .iter()
                .find(|(candidate, _)| *candidate == name)
                .map(|(_, source)| Template::new(path, source, moment))
                .transpose()
        };
        let mut hash = Sha256::new();
        for (name, text) in sources
            .iter()
            .copied()
            .chain(tokens.iter().map(|(key, text)| (*key, text.as_str())))
        {
            for part in [name, text] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            default: compile(DEFAULT_TEMPLATE, default_path)?,
            tool_use: compile(TOOL_TEMPLATE, path)?,
            tokens,
            fingerprint: format!("{:x}", hash.finalize()),
        })
    }

    /// `tokenizer_config.json`, whether it is there or not.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of a special token by its key, such as `eos_token`.
    pub fn token(&self, key: &str) -> Option<&str> {
        let found = self.tokens.iter().find(|(name, _)| *name == key);
        found.map(|(_, text)| text.as_str())
    }

    /// The same for the same templates and special tokens.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The template for a conversation: one with tools takes the template that is named for
    /// tools, where there is one.
    pub fn template(&self, has_tools: bool) -> Option<&Template> {
        let special = self.tool_use.as_ref().filter(|_| has_tools);
        special.or(self.default.as_ref())
    }

    /// Renders the first `num_messages` of `conversation` by `template`, one of this model's.
    pub fn render(
        &self,
        template: &Template,
        conversation: &Conversation,
        num_messages: usize,
        add_generation_prompt: bool,
    ) -> Result<Rendered, TemplateProblem> {
        let messages = &conversation.messages[..num_messages.min(conversation.messages.len())];
        let mut context = vec![
            ("messages", TemplateValue::from(Serde(messages))),
            ("tools", TemplateValue::from(Serde(&conversation.tools))),
            ("documents", TemplateValue::from(())),
            (
                "add_generation_prompt",
                TemplateValue::from(add_generation_prompt),
            ),
        ];
        for (key, text) in &self.tokens {
            context.push((key, TemplateValue::from(text.as_str())));
        }
        template.render(TemplateValue::from_pairs(context))
    }
}

fn read(path: &Path) -> Result<Option<String>, DataError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DataError::Read {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn token_text(token: &Value) -> Option<String> {
    let text = match token {
        Value::Object(object) => object.get("content")?,
        other => other,
    };
    text.as_str().map(str::to_owned)
}

/// The templates of a `tokenizer_config.json` by name; None where the key is of a wrong shape.
fn named_templates(config: &Map<String, Value>) -> Option<Vec<(&str, &str)>> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::String(source)) => Some(vec![(DEFAULT_TEMPLATE, source.as_str())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| {
                let text = |key| entry.get(key).and_then(Value::as_str);
                Some((text("name")?, text("template")?))
            })
            .collect(),
        Some(_) => None,
    }
}
