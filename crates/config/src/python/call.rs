//! Calls that say how a model is loaded and trained: `TrainingArguments(…)`, `LoraConfig(…)`,
//! `AutoModelForCausalLM.from_pretrained("id", …)`. Programs make them anywhere, mostly inside a
//! function, and their keywords are settings wherever they stand.

use super::literal::{matching, split};
use super::token::{Placed, Token};

/// A call whose keywords are settings.
pub(super) struct Call<'t> {
    /// The section that its keywords are of.
    pub section: &'t str,
    /// The tokens from bracket to bracket.
    pub arguments: &'t [Placed],
    /// The name of the first argument, where it can stand without one.
    pub first: Option<&'static str>,
}

/// Classes whose keywords are settings of a run, whatever their instance is called.
const CLASSES: &[&str] = &[
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "SFTTrainer",
    "LoraConfig",
    "BitsAndBytesConfig",
    "DPOConfig",
    "DPOTrainer",
    "ORPOConfig",
    "KTOConfig",
    "CPOConfig",
    "GRPOConfig",
    "PPOConfig",
    "RLOOConfig",
    "RewardConfig",
];

/// The same, by its name.
pub(super) fn is_class(name: &str) -> bool {
    CLASSES.contains(&name)
}

/// The calls among some tokens, inner ones behind the outer. Inside a function any class whose
/// name says that it holds settings counts.
pub(super) fn calls<'t>(text: &'t str, tokens: &'t [Placed], in_function: bool) -> Vec<Call<'t>> {
    let name = |index: usize| {
        let placed = tokens.get(index)?;
        (placed.token == Token::Name).then(|| &text[placed.span.clone()])
    };
    let is_mark = |index: usize, mark: u8| {
        tokens.get(index).map(|placed| placed.token) == Some(Token::Mark(mark))
    };
    let mut found = Vec::new();
    for index in 0..tokens.len() {
        let Some(callee) = name(index).filter(|_| is_mark(index + 1, b'(')) else {
            continue;
        };
        let before = index.checked_sub(1).and_then(name);
        if matches!(before, Some("class" | "def")) {
            continue;
        }
        let owner = index
            .checked_sub(2)
            .filter(|_| is_mark(index - 1, b'.'))
            .and_then(name);
        let call = match (callee, owner) {
            ("from_pretrained", Some(owner)) => {
                model_section(owner).map(|section| (section, Some("pretrained_model_name_or_path")))
            }
            _ if is_class(callee) || (in_function && holds_settings(callee)) => {
                Some((callee, None))
            }
            _ => None,
        };
        if let Some((section, first)) = call {
            let close = matching(tokens, index + 1);
            found.push(Call {
                section,
                arguments: &tokens[index + 1..=close],
                first,
            });
        }
    }
    found
}

fn holds_settings(class: &str) -> bool {
    let is_class = class.starts_with(|c: char| c.is_ascii_uppercase());
    is_class && (class.ends_with("Arguments") || class.ends_with("Config"))
}

/// The section of what loads a model; tokenizers and processors are loaded the same way.
fn model_section(owner: &str) -> Option<&str> {
    match owner {
        "PeftModel" | "AutoPeftModel" | "AutoPeftModelForCausalLM" => None,
        "FastLanguageModel" | "FastModel" => Some("FastLanguageModel"),
        _ if owner.contains("Model") || owner.ends_with("LM") => Some("model"),
        _ => None,
    }
}

/// The arguments of a call.
pub(super) struct Arguments<'t> {
    /// Those with a name: its token, and those of the value.
    pub named: Vec<(&'t Placed, &'t [Placed])>,
    pub others: Vec<&'t [Placed]>,
}

/// The arguments of a call whose tokens run from bracket to bracket.
pub(super) fn arguments_of(arguments: &[Placed]) -> Arguments<'_> {
    let mut named = Vec::new();
    let mut others = Vec::new();
    let inner = arguments.get(1..arguments.len().saturating_sub(1));
    for item in split(inner.unwrap_or_default(), b',') {
        match item {
            [key, equals, value @ ..]
                if key.token == Token::Name
                    && equals.token == Token::Mark(b'=')
                    && !value.is_empty()
                    && value[0].token != Token::Mark(b'=') =>
            {
                named.push((key, value));
            }
            _ => others.push(item),
        }
    }
    Arguments { named, others }
}
