//! Sentences with their graphs: `#::snt` and a Penman graph, blocks apart by blank lines.
//!
//! Published files write `# ::snt` with a space and carry more comments (`# ::id`, dates,
//! alignments), which are passed over. A block without a sentence and without a graph is a note
//! at the head of a file; one that has only half of the two is refused.

use super::read::{Content, Found, LONGEST_RECORD_BYTES};
use super::record::{Pair, Record};

const SENTENCE_KEY: &str = "::snt";

/// Lines that wait for the blank line that ends their block.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    sentence: Option<String>,
    graph: String,
    first_line: Option<u64>,
    num_bytes: u64,
}

impl Blocks {
    /// Takes a line; a blank one, as at the end of the file, may complete a record. An error
    /// names its line.
    pub(super) fn push(&mut self, line: u64, text: &str) -> Result<Option<Found>, (u64, String)> {
        self.num_bytes += text.len() as u64;
        let trimmed = text.trim_end();
        if trimmed.trim_start().is_empty() {
            return self.end();
        }
        let first_line = *self.first_line.get_or_insert(line);
        match trimmed.trim_start().strip_prefix('#') {
            Some(comment) => {
                let comment = comment.trim_start();
                if let Some(sentence) = comment.strip_prefix(SENTENCE_KEY) {
                    if self.sentence.is_some() {
                        return Err((line, "a second sentence before a blank line".to_owned()));
                    }
                    self.sentence = Some(sentence.trim().to_owned());
                }
            }
            None => {
                if self.sentence.is_none() {
                    return Err((first_line, format!("a graph without `#{SENTENCE_KEY}`")));
                }
                if !self.graph.is_empty() {
                    self.graph.push('\n');
                }
                self.graph.push_str(trimmed);
                if self.graph.len() > LONGEST_RECORD_BYTES {
                    let problem = format!("the graph is longer than {LONGEST_RECORD_BYTES} bytes");
                    return Err((first_line, problem));
                }
            }
        }
        Ok(None)
    }

    fn end(&mut self) -> Result<Option<Found>, (u64, String)> {
        let Self {
            sentence,
            graph,
            first_line,
            num_bytes,
        } = std::mem::take(self);
        let line = first_line.unwrap_or(1);
        let Some(prompt) = sentence else {
            return Ok(None);
        };
        if prompt.is_empty() {
            return Err((line, format!("`#{SENTENCE_KEY}` is empty")));
        }
        if graph.is_empty() {
            return Err((line, "a sentence without a graph".to_owned()));
        }
        if let Some(problem) = imbalance(&graph) {
            return Err((line, problem.to_owned()));
        }
        Ok(Some(Found {
            line,
            num_bytes,
            content: Content::Record(Record::Pair(Pair {
                prompt,
                completion: graph,
                is_turn: true,
                ..Pair::default()
            })),
        }))
    }
}

/// What is wrong with the parentheses of a graph; those in quoted names do not count.
fn imbalance(graph: &str) -> Option<&'static str> {
    if !graph.trim_start().starts_with('(') {
        return Some("the graph does not begin with a parenthesis");
    }
    let mut depth = 0usize;
    let mut in_quotes = false;
    for (index, character) in graph.char_indices() {
        match character {
            '"' => in_quotes = !in_quotes,
            '(' if !in_quotes => depth += 1,
            ')' if !in_quotes => {
                let Some(less) = depth.checked_sub(1) else {
                    return Some("the graph closes more parentheses than it opens");
                };
                depth = less;
                if depth == 0 && !graph[index + 1..].trim().is_empty() {
                    return Some("something follows the graph before a blank line");
                }
            }
            _ => {}
        }
    }
    (depth > 0 || in_quotes).then_some("the graph does not end before the blank line")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(u64, Pair)>, (u64, String)> {
        let mut blocks = Blocks::default();
        let mut pairs = Vec::new();
        let lines = text.lines().zip(1..).map(|(text, line)| (line, text));
        for (line, text) in lines.chain([(0, "")]) {
            if let Some(found) = blocks.push(line, text)? {
                match found.content {
                    Content::Record(Record::Pair(pair)) => pairs.push((found.line, pair)),
                    other => panic!("{other:?}"),
                }
            }
        }
        Ok(pairs)
    }

    #[test]
    fn sentences_come_with_their_graphs() {
        let text = "# Notes of the release.\n\n#::snt The boy wants to go.\n(w / want-01\n   :ARG0 (b / boy)\n   :ARG1 (g / go-02 :ARG0 b))\n\n\n# ::id x.1 ::date 2020\n# ::snt  A :) \n(n / name :op1 \":)\")";
        let pairs = read(text).unwrap();
        assert_eq!(pairs.len(), 2);
        assert_eq!(pairs[0].0, 3);
        assert_eq!(pairs[0].1.prompt, "The boy wants to go.");
        assert!(pairs[0].1.completion.starts_with("(w / want-01\n   :ARG0"));
        assert_eq!((pairs[1].0, pairs[1].1.prompt.as_str()), (9, "A :)"));
    }

    #[test]
    fn halves_are_refused_with_their_line() {
        for (text, line, word) in [
            ("#::snt A\n\n(a / b)", 1, "without a graph"),
            ("#::id 1\n(a / b)", 1, "without `#::snt`"),
            ("\n#::snt A\n#::snt B\n(a / b)", 3, "second sentence"),
            ("#::snt\n(a / b)", 1, "empty"),
            ("#::snt A\n(a / b", 1, "does not end"),
            ("#::snt A\n(a / b))", 1, "follows"),
            ("#::snt A\n(a / b)\n(c / d)", 1, "follows"),
            ("#::snt A\na / b)", 1, "begin"),
        ] {
            let (found, problem) = read(text).unwrap_err();
            assert_eq!(found, line, "{text}");
            assert!(problem.contains(word), "{text}: {problem}");
        }
    }
}
