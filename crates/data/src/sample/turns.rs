//! Which part of a rendered conversation is learned: the assistant's turns.
//!
//! A template that has `{% generation %}` says it itself. Without it, a turn is what follows
//! when the conversation before it has been rendered with the generation prompt, for that is
//! what a model has to continue. Some templates write earlier turns otherwise than the last one
//! (they drop thoughts), so that the text before a turn is not a prefix of the whole; there a
//! mark is put in the place of the turn's content, to see what stays the same around it.

use std::ops::Range;

use super::chat::{Conversation, Template, TemplateProblem, TokenizerConfig};
use super::record::Chat;

/// A noncharacter, which no text may hold and no template changes.
pub(super) const MARK: &str = "\u{FDD2}";

/// A rendered conversation and the bytes of it that are learned, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Turns {
    pub(super) text: String,
    pub(super) counted: Vec<Range<usize>>,
}

/// Renders `chat` and finds the turns that count.
pub(super) fn render(
    config: &TokenizerConfig,
    template: &Template,
    chat: &Chat,
) -> Result<Turns, TemplateProblem> {
    let view = View {
        config,
        template,
        conversation: &chat.conversation,
    };
    let messages = &chat.conversation.messages;
    let full = config.render(template, view.conversation, messages.len(), false)?;
    if template.marks_generation() {
        let counted = marked_turns(chat, &full.generated)?;
        return Ok(Turns {
            text: full.text,
            counted,
        });
    }
    let mut counted: Vec<Range<usize>> = Vec::new();
    for (index, _) in chat.counted.iter().enumerate().filter(|(_, c)| **c) {
        let after = counted.last().map_or(0, |span| span.end);
        let span = match view.by_prefix(index, &full.text) {
            Some(span) => span,
            None => view.by_parts(index, &full.text, after)?,
        };
        counted.push(span);
    }
    Ok(Turns {
        text: full.text,
        counted,
    })
}

fn problem(problem: String) -> TemplateProblem {
    TemplateProblem {
        problem,
        line: None,
    }
}

/// The spans of `{% generation %}` whose messages count.
fn marked_turns(
    chat: &Chat,
    generated: &[Range<usize>],
) -> Result<Vec<Range<usize>>, TemplateProblem> {
    let is_assistant = |message: &serde_json::Map<String, serde_json::Value>| {
        message.get("role").is_some_and(|role| role == "assistant")
    };
    let turns: Vec<bool> = chat
        .conversation
        .messages
        .iter()
        .zip(&chat.counted)
        .filter(|(message, _)| is_assistant(message))
        .map(|(_, counted)| *counted)
        .collect();
    if turns.iter().all(|counted| *counted) && !generated.is_empty() {
        return Ok(generated.to_vec());
    }
    if turns.len() != generated.len() {
        return Err(problem(format!(
            "it marks {} part(s) as generated, but the assistant has {} turn(s)",
            generated.len(),
            turns.len()
        )));
    }
    let counted = generated.iter().zip(turns).filter(|(_, counted)| *counted);
    Ok(counted.map(|(span, _)| span.clone()).collect())
}

/// What the searches for a turn share.
struct View<'a> {
    config: &'a TokenizerConfig,
    template: &'a Template,
    conversation: &'a Conversation,
}

impl View<'_> {
    /// The first messages as text, where the template takes so few.
    fn start(&self, num_messages: usize, add_generation_prompt: bool) -> Option<String> {
        let (template, conversation) = (self.template, self.conversation);
        let rendered =
            self.config
                .render(template, conversation, num_messages, add_generation_prompt);
        rendered.ok().map(|rendered| rendered.text)
    }

    /// The turn as what is added to the text before it.
    fn by_prefix(&self, index: usize, full: &str) -> Option<Range<usize>> {
        let before = self.start(index, true)?;
        let through = self.start(index + 1, false)?;
        let is_prefix = through.starts_with(&before) && full.starts_with(&through);
        (is_prefix && before.len() < through.len()).then_some(before.len()..through.len())
    }

    /// The turn in a text whose beginning depends on what follows.
    fn by_parts(
        &self,
        index: usize,
        full: &str,
        after: usize,
    ) -> Result<Range<usize>, TemplateProblem> {
        let content = self.by_mark(index, full);
        let begin = content.as_ref().map(|turn| turn.content.start);
        let start = self.after_prompt(index, full, begin.map(|begin| after..begin));
        let start = start.or(begin);
        let end = match (&content, start) {
            (Some(turn), _) => Some(turn.end),
            (None, Some(start)) => self.end_after(index, full, start),
            (None, None) => None,
        };
        match (start, end) {
            (Some(start), Some(end)) if after <= start && start < end => Ok(start..end),
            _ => Err(problem(format!(
                "the text of message {} cannot be found in what it renders\nhint: mark the assistant's part in the template with `{{% generation %}}`",
                index + 1
            ))),
        }
    }

    /// The place of a message's content as what a mark takes the place of, and the end of what
    /// the template puts after it.
    fn by_mark(&self, index: usize, full: &str) -> Option<Marked> {
        let mut marked = self.conversation.clone();
        marked.messages[index].insert("content".to_owned(), MARK.into());
        let render = |num_messages| {
            let rendered = self
                .config
                .render(self.template, &marked, num_messages, false);
            rendered.ok().map(|rendered| rendered.text)
        };
        let whole = render(marked.messages.len())?;
        let (prefix, suffix) = whole.split_once(MARK)?;
        let is_around = full.len() >= prefix.len() + suffix.len()
            && full.starts_with(prefix)
            && full.ends_with(suffix)
            && !suffix.contains(MARK);
        let content = prefix.len()..full.len().saturating_sub(suffix.len());
        // What ends the turn: as far as it stands there too when nothing comes after.
        let alone = render(index + 1)?;
        let (_, tail) = alone.split_once(MARK)?;
        let end = content.end + common_end(tail, suffix);
        (is_around && !content.is_empty()).then_some(Marked { content, end })
    }

    /// The place up to which the generation prompt is given, as far as the text has it in whole
    /// lines: a prompt may open a thought that the turn does not have. Where the text before it
    /// is not the same, the prompt is looked for in `within`.
    fn after_prompt(
        &self,
        index: usize,
        full: &str,
        within: Option<Range<usize>>,
    ) -> Option<usize> {
        let plain = self.start(index, false)?;
        let prompted = self.start(index, true)?;
        let prompt = prompted.strip_prefix(plain.as_str())?;
        if prompt.is_empty() && full.starts_with(&plain) {
            return Some(plain.len());
        }
        let mut given = prompt;
        while !given.is_empty() {
            let found = if full.starts_with(&plain) {
                full[plain.len()..]
                    .starts_with(given)
                    .then_some(plain.len())
            } else {
                let within = within.clone()?;
                let between = full.get(within.clone())?;
                between.rfind(given).map(|place| within.start + place)
            };
            if let Some(place) = found {
                return Some(place + given.len());
            }
            let shorter = given[..given.len() - 1].rfind('\n');
            given = &given[..shorter.map_or(0, |place| place + 1)];
        }
        None
    }

    /// The end of a turn that begins at `start`, by what ends a turn of plain text there.
    fn end_after(&self, index: usize, full: &str, start: usize) -> Option<usize> {
        if index + 1 == self.conversation.messages.len() {
            return Some(full.len());
        }
        let mut marked = self.conversation.clone();
        marked.messages.truncate(index + 1);
        marked.messages[index].retain(|key, _| key == "role");
        marked.messages[index].insert("content".to_owned(), MARK.into());
        let rendered = self.config.render(self.template, &marked, index + 1, false);
        let text = rendered.ok()?.text;
        let (_, tail) = text.split_once(MARK).filter(|(_, tail)| !tail.is_empty())?;
        let found = full.get(start..)?.find(tail)?;
        Some(start + found + tail.len())
    }
}

/// Where a mark says that a message's content lies.
struct Marked {
    content: Range<usize>,
    /// The end of the turn.
    end: usize,
}

/// How much of `tail`, which ends a turn where nothing follows, ends it also before `suffix`: all
/// of it, or the whole lines of it, or what both begin with.
fn common_end(tail: &str, suffix: &str) -> usize {
    let common: usize = tail
        .chars()
        .zip(suffix.chars())
        .take_while(|(left, right)| left == right)
        .map(|(character, _)| character.len_utf8())
        .sum();
    if common == tail.len() {
        return common;
    }
    tail[..common].rfind('\n').map_or(common, |place| place + 1)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::sample::Moment;
    use crate::sample::record::{Kind, Record};

    fn learned(template: &str, record: Value) -> Result<Vec<String>, TemplateProblem> {
        let config = json!({"eos_token": "</s>", "chat_template": template}).to_string();
        let config = TokenizerConfig::new(Path::new("c.json"), &config, None, Moment(0)).unwrap();
        let Ok(Record::Chat(chat)) = Kind::Messages.record(record.as_object().unwrap()) else {
            panic!("{record}")
        };
        let turns = render(&config, config.template(false).unwrap(), &chat)?;
        let spans = turns.counted.into_iter();
        Ok(spans.map(|span| turns.text[span].to_owned()).collect())
    }

    fn two_turns() -> Value {
        json!({"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>t</think>b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]})
    }

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn turns_follow_the_generation_prompt() {
        let spans = learned(PLAIN, two_turns()).unwrap();
        assert_eq!(
            spans,
            ["<think>t</think>b<end>", "d<end>"].map(|s| format!("{s}\n"))
        );
    }

    #[test]
    fn weights_of_zero_are_left_out() {
        let mut record = two_turns();
        record["messages"][1]["weight"] = json!(0);
        assert_eq!(learned(PLAIN, record.clone()).unwrap(), ["d<end>\n"]);
        let marked = PLAIN.replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
        );
        assert_eq!(learned(&marked, record.clone()).unwrap(), ["d"]);
        // A template that marks only the last turn cannot say which one has no weight.
        let last = marked.replace("m.role == 'assistant'", "loop.last");
        let problem = learned(&last, record).unwrap_err().problem;
        assert!(
            problem.contains("1 part(s)") && problem.contains("2 turn(s)"),
            "{problem}"
        );
    }

    #[test]
    fn thoughts_that_earlier_turns_lose_do_not_shift_the_turns() {
        // Before the last turn the thought is cut away, and the last one gets an empty one.
        let template = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content.split('</think>')[-1] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let spans = learned(template, two_turns()).unwrap();
        assert_eq!(spans, ["b<end>", "<think></think>d<end>"]);
    }

    #[test]
    fn a_generation_prompt_that_a_turn_does_not_have_is_no_prefix() {
        let template = PLAIN.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}");
        let spans = learned(&template, two_turns()).unwrap();
        // The first turn does begin with it, and continues from there.
        assert_eq!(spans, ["t</think>b<end>\n", "d<end>\n"]);
    }

    #[test]
    fn a_prompt_is_given_as_far_as_the_turn_has_it_in_whole_lines() {
        let template = "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' and '<think>' not in m.content %}<think></think>{% endif %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}";
        let spans = learned(template, two_turns()).unwrap();
        assert_eq!(spans, ["<think>t</think>b<end>", "<think></think>d<end>"]);
    }

    #[test]
    fn the_end_of_a_conversation_does_not_end_every_turn() {
        let template = "{% for m in messages %}<{{ m.role }}>{{ '<think>' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}";
        let spans = learned(template, two_turns()).unwrap();
        assert_eq!(spans, ["<think>t</think>b<end>\n", "<think>d<end>\n<eos>"]);
    }

    #[test]
    fn a_turn_without_text_ends_where_one_with_text_would() {
        let template = "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% if m.tool_calls %}{% if m.content %}\n{% endif %}<call>{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let record = json!({"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]});
        let spans = learned(template, record).unwrap();
        assert_eq!(spans, ["<call><end>", "<think></think>d<end>"]);
    }

    #[test]
    fn a_template_that_drops_a_turn_is_refused() {
        let template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
        let problem = learned(template, two_turns()).unwrap_err().problem;
        assert!(problem.contains("message 2"), "{problem}");
    }
}
