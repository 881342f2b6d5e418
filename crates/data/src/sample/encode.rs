//! From a record to a sample: tokens, and which of them are learned.
//!
//! **Where a prompt ends, a token ends.** Prompt and completion are encoded apart and joined,
//! because that is what a model meets later: its prompt is encoded alone, and it continues from
//! the last token. Encoded together, a token could begin in the prompt and end in the
//! completion, and the model would learn to continue from a cut it never sees. A rendered
//! conversation is encoded whole, as transformers does, and cut only where a token would reach
//! across the beginning or the end of a turn.
//!
//! Special tokens are recognised in all of it, in records as in templates: files with prompts
//! that were rendered beforehand are common.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::chat::{TemplateProblem, TokenizerConfig};
use super::record::{Chat, Pair, Record};
use super::turns;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::special::{Placed, SpecialTokenizer};

/// What keeps the turns of a pair apart where no template does.
const SEPARATOR: &str = "\n\n";

/// A character that no tokenizer joins with a letter after it.
const ANCHOR: &str = "\n";

/// One record as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub tokens: Vec<i32>,
    /// Whether the model learns to predict the token; one for each.
    pub counted: Vec<bool>,
}

/// Whether pairs become conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Templating {
    /// Instructions and questions are rendered where the model has a template; a `prompt` with
    /// its `completion` is taken as it is.
    #[default]
    Auto,
    /// Every pair is rendered.
    Always,
    /// No pair is rendered.
    Never,
}

/// Where a record lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'a> {
    pub(super) path: &'a Path,
    pub(super) line: u64,
}

impl Origin<'_> {
    pub(super) fn bad(&self, problem: impl Into<String>) -> DataError {
        DataError::BadRecord {
            path: self.path.to_path_buf(),
            line: self.line,
            problem: problem.into(),
        }
    }
}

/// Turns records into samples. May be used from any number of threads.
pub(super) struct SampleEncoder<'a> {
    tokenizer: SpecialTokenizer<'a>,
    config: Option<&'a TokenizerConfig>,
    templating: Templating,
    train_on_inputs: bool,
    end_of_text: Option<u32>,
    /// Whether the tokenizer puts a space before every text.
    adds_prefix: bool,
}

impl<'a> SampleEncoder<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        config: Option<&'a TokenizerConfig>,
        templating: Templating,
        train_on_inputs: bool,
    ) -> Result<Self, DataError> {
        let special = SpecialTokenizer::new(tokenizer);
        let named = config.and_then(|config| Some((config, config.token("eos_token")?)));
        let end_of_text = match named {
            None => tokenizer.end_of_text(),
            Some((config, token)) => {
                let id = special
                    .id(token)
                    .ok_or_else(|| DataError::TokenizerConfig {
                        path: config.path().to_path_buf(),
                        problem: format!(
                            "its `eos_token` `{token}` is not a token of `{}`",
                            tokenizer.name()
                        ),
                    })?;
                Some(id)
            }
        };
        let mut encoder = Self {
            tokenizer: special,
            config,
            templating,
            train_on_inputs,
            end_of_text,
            adds_prefix: false,
        };
        let plain = encoder.tokenizer.encode("x")?;
        let after = encoder.after_anchor("x")?;
        encoder.adds_prefix = after.is_some_and(|after| ids(&after) != ids(&plain));
        Ok(encoder)
    }

    /// The id that ends a completion.
    pub(super) fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    pub(super) fn encode(&self, record: Record, origin: Origin<'_>) -> Result<Sample, DataError> {
        let has_template = self.config.is_some_and(|c| c.template(false).is_some());
        let mut sample = match record {
            Record::Text(text) => self.pair("", &text)?,
            Record::Chat(chat) => self.chat(&chat, origin)?,
            Record::Pair(pair) => {
                let is_rendered = match self.templating {
                    Templating::Auto => pair.is_turn && has_template,
                    Templating::Always => true,
                    Templating::Never => false,
                };
                if is_rendered {
                    self.chat(&pair.into_chat(), origin)?
                } else {
                    let (prompt, completion) = plain_pair(pair, origin)?;
                    self.pair(&prompt, &completion)?
                }
            }
        };
        if self.train_on_inputs {
            sample.counted.fill(true);
        }
        // The first token has nothing before it that could predict it.
        if !sample.counted.iter().skip(1).any(|counted| *counted) {
            return Err(origin.bad("it gives no token to learn"));
        }
        Ok(sample)
    }

    fn pair(&self, prompt: &str, completion: &str) -> Result<Sample, DataError> {
        let mut tokens: Vec<u32> = self.tokenizer.beginning().to_vec();
        let completion = if prompt.is_empty() {
            self.tokenizer.encode(completion)?
        } else {
            tokens.extend(ids(&self.tokenizer.encode(prompt)?));
            self.continuation(completion)?
        };
        let num_prompt = tokens.len();
        tokens.extend(ids(&completion));
        tokens.extend(self.end_of_text);
        Ok(Sample {
            counted: (0..tokens.len()).map(|place| place >= num_prompt).collect(),
            tokens: tokens.into_iter().map(|id| id as i32).collect(),
        })
    }

    fn chat(&self, chat: &Chat, origin: Origin<'_>) -> Result<Sample, DataError> {
        let has_tools = chat.conversation.tools.is_some();
        let with_template = self
            .config
            .and_then(|config| Some((config, config.template(has_tools)?)));
        let Some((config, template)) = with_template else {
            return Err(DataError::NoTemplate {
                path: origin.path.to_path_buf(),
                line: origin.line,
            });
        };
        let rendered = turns::render(config, template, chat).map_err(|problem| {
            let TemplateProblem { problem, line } = problem;
            DataError::TemplateRender {
                path: origin.path.to_path_buf(),
                line: origin.line,
                template: template.path().to_path_buf(),
                template_line: line.map_or(String::new(), |line| format!(", line {line} of it")),
                problem,
            }
        })?;
        let placed = self.encode_turns(&rendered.text, &rendered.counted)?;
        let is_counted = |place: &Range<usize>| {
            let mut spans = rendered.counted.iter();
            spans.any(|span| span.contains(&place.start))
        };
        Ok(Sample {
            counted: placed.iter().map(|(_, place)| is_counted(place)).collect(),
            tokens: placed.iter().map(|(id, _)| *id as i32).collect(),
        })
    }

    /// Encodes a text so that no token reaches across an end of a span.
    fn encode_turns(&self, text: &str, spans: &[Range<usize>]) -> Result<Vec<Placed>, DataError> {
        let whole = self.tokenizer.encode(text)?;
        let mut cuts: Vec<usize> = spans
            .iter()
            .flat_map(|span| [span.start, span.end])
            .filter(|cut| {
                // Templates may end turns by different special tokens, which begin alike.
                whole.iter().any(|(id, place)| {
                    place.start < *cut && *cut < place.end && !self.tokenizer.is_added(*id)
                })
            })
            .collect();
        if cuts.is_empty() {
            return Ok(whole);
        }
        cuts.push(text.len());
        cuts.dedup();
        let mut placed = Vec::with_capacity(whole.len() + cuts.len());
        let mut start = 0;
        for cut in cuts {
            let piece = &text[start..cut];
            let encoded = if start == 0 {
                self.tokenizer.encode(piece)?
            } else {
                self.continuation(piece)?
            };
            let moved = |place: Range<usize>| place.start + start..place.end + start;
            placed.extend(encoded.into_iter().map(|(id, place)| (id, moved(place))));
            start = cut;
        }
        Ok(placed)
    }

    /// The tokens of a text that continues another. LLaMA's first tokenizers put a space before
    /// whatever they encode, which belongs before a text and not into the middle of one.
    fn continuation(&self, text: &str) -> Result<Vec<Placed>, DataError> {
        if self.adds_prefix
            && let Some(placed) = self.after_anchor(text)?
        {
            return Ok(placed);
        }
        self.tokenizer.encode(text)
    }

    /// The tokens of `text` after a line break; None where they do not begin with its tokens.
    fn after_anchor(&self, text: &str) -> Result<Option<Vec<Placed>>, DataError> {
        let anchor = self.tokenizer.encode(ANCHOR)?;
        let mut placed = self.tokenizer.encode(&format!("{ANCHOR}{text}"))?;
        if placed.len() < anchor.len() || ids(&placed[..anchor.len()]) != ids(&anchor) {
            return Ok(None);
        }
        placed.drain(..anchor.len());
        let back = |at: usize| at.saturating_sub(ANCHOR.len());
        for (_, place) in &mut placed {
            *place = back(place.start)..back(place.end);
        }
        Ok(Some(placed))
    }
}

fn ids(placed: &[Placed]) -> Vec<u32> {
    placed.iter().map(|(id, _)| *id).collect()
}

/// The two sides of a pair that no template renders.
fn plain_pair(pair: Pair, origin: Origin<'_>) -> Result<(String, String), DataError> {
    if !pair.history.is_empty() {
        return Err(DataError::NoTemplate {
            path: PathBuf::from(origin.path),
            line: origin.line,
        });
    }
    let mut prompt = pair.prompt;
    if let Some(system) = pair.system {
        prompt = format!("{system}{SEPARATOR}{prompt}");
    }
    if pair.is_turn {
        prompt.push_str(SEPARATOR);
    }
    Ok((prompt, pair.completion))
}
