//! Text from a generator, as it comes, and how long it took.

use std::time::{Duration, Instant};

use cinch_data::{Decoder, Tokenizer};
use cinch_train::{Generator, Sampling};

/// A model that writes.
pub struct Writer<'a> {
    pub generator: Generator,
    pub tokenizer: &'a Tokenizer,
    pub sampling: Sampling,
    /// Tokens drawn so far: no two draws are the same.
    pub drawn: u64,
}

/// When a text is over.
pub struct Ends {
    pub max_tokens: usize,
    pub tokens: Vec<u32>,
    pub texts: Vec<String>,
}

/// What was written.
#[derive(Debug, Default)]
pub struct Answer {
    pub text: String,
    pub tokens: usize,
    /// From the beginning to the first token: the prompt is read meanwhile.
    pub first_after: Option<Duration>,
    pub took: Duration,
}

impl Answer {
    /// Of the tokens after the first; none where there are too few to tell.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let since = self.took.saturating_sub(self.first_after?).as_secs_f64();
        let tokens = self.tokens.checked_sub(1).filter(|&tokens| tokens > 0)?;
        (since > 0.0).then(|| tokens as f64 / since)
    }

    /// A line for people.
    pub fn speed(&self) -> String {
        let tokens = match self.tokens {
            1 => "1 token".to_owned(),
            tokens => format!("{tokens} tokens"),
        };
        let rate = self.tokens_per_second();
        let rate = rate.map_or_else(String::new, |rate| format!(" at {rate:.1} tokens/s"));
        let first = self.first_after.map_or_else(String::new, |first| {
            format!(", the first after {:.2} s", first.as_secs_f64())
        });
        format!("{tokens}{rate}{first}")
    }
}

impl Writer<'_> {
    /// Continues `text`, which is not empty, and gives `show` each piece that is certain; it
    /// answers whether to go on.
    pub fn write(
        &mut self,
        text: &mut Vec<u32>,
        ends: &Ends,
        show: &mut dyn FnMut(&str) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Answer> {
        let begun = Instant::now();
        let mut answer = Answer::default();
        let mut decoder = Decoder::new(self.tokenizer);
        let mut filter = Filter::new(&ends.texts);
        let mut goes_on = true;
        while goes_on && answer.tokens < ends.max_tokens {
            let token = self.generator.next(text, &self.sampling, self.drawn)?;
            answer.first_after.get_or_insert_with(|| begun.elapsed());
            if ends.tokens.contains(&token) {
                break;
            }
            self.drawn += 1;
            text.push(token);
            answer.tokens += 1;
            let (piece, is_over) = filter.push(&decoder.push(token));
            goes_on = show(&piece)? && !is_over;
            answer.text += &piece;
        }
        answer.took = begun.elapsed();
        if !filter.is_over {
            let rest = filter.finish(&decoder.finish());
            show(&rest)?;
            answer.text += &rest;
        }
        Ok(answer)
    }
}

/// Holds text back as long as it may become one that ends the answer.
struct Filter<'a> {
    ends: &'a [String],
    held: String,
    is_over: bool,
}

impl<'a> Filter<'a> {
    fn new(ends: &'a [String]) -> Self {
        Self {
            ends,
            held: String::new(),
            is_over: false,
        }
    }

    /// What is certain to belong to the answer, and whether it is over.
    fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let ends = self.ends.iter().filter_map(|end| self.held.find(end));
        if let Some(end) = ends.min() {
            self.is_over = true;
            self.held.truncate(end);
            return (std::mem::take(&mut self.held), true);
        }
        let begins = |from: &usize| {
            self.ends
                .iter()
                .any(|end| end.starts_with(&self.held[*from..]))
        };
        let places = self.held.char_indices().map(|(place, _)| place);
        let kept = places.into_iter().find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(kept);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What is left when nothing follows.
    fn finish(mut self, piece: &str) -> String {
        let (certain, is_over) = self.push(piece);
        match is_over {
            true => certain,
            false => certain + &self.held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filtered(pieces: &[&str]) -> (String, bool) {
        let ends = ["\nUser:".to_owned(), "END".to_owned()];
        let mut filter = Filter::new(&ends);
        let mut text = String::new();
        for piece in pieces {
            let (certain, is_over) = filter.push(piece);
            text += &certain;
            if is_over {
                return (text, true);
            }
        }
        (text + &filter.finish(""), false)
    }

    #[test]
    fn what_ends_an_answer_is_not_part_of_it() {
        assert_eq!(
            filtered(&["hello\nUs", "er: more"]),
            ("hello".to_owned(), true)
        );
        assert_eq!(filtered(&["a EN", "D"]), ("a ".to_owned(), true));
    }

    #[test]
    fn what_only_looks_like_an_end_is() {
        let pieces = ["one\n", "\nUse", "d é", "EN", "E"];
        assert_eq!(filtered(&pieces), (pieces.concat(), false));
    }

    #[test]
    fn speed_is_told_of_the_tokens_after_the_first() {
        let answer = Answer {
            text: String::new(),
            tokens: 11,
            first_after: Some(Duration::from_millis(500)),
            took: Duration::from_millis(1500),
        };
        assert_eq!(
            answer.speed(),
            "11 tokens at 10.0 tokens/s, the first after 0.50 s"
        );
        let single = Answer {
            tokens: 1,
            ..answer
        };
        assert_eq!(single.speed(), "1 token, the first after 0.50 s");
    }
}
