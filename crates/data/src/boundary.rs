//! Where a text may be cut so that GPT-2's tokens of the parts are its tokens of the whole.
//!
//! GPT-2 first splits text with the pattern
//! `'(s|d|m|t|ll|ve|re) | ␣?\p{L}+ | ␣?\p{N}+ | ␣?[^\s\p{L}\p{N}]+ | \s+$ | \s+(?!\S) | \s`
//! and merges bytes inside each match only. Three kinds of cut are safe:
//!
//! 1. **Before a whitespace character that follows a non-whitespace one.** The match holding the
//!    character before the cut is an optional space and a run of non-whitespace, so it ends at
//!    the cut in the whole text and at the end of the text in the left part. `$` and the
//!    look-ahead appear only after whitespace; a whitespace run of the left part is followed by a
//!    character of the left part, so neither sees the cut. The pattern never looks behind, so the
//!    right part starts afresh.
//! 2. **Before the last character of a whitespace run of two or more that text follows.** In the
//!    whole, `\s+(?!\S)` gives one match of all but that last character. In the left part
//!    those characters end the text and `\s+$` gives the same match; before the run, cut 1
//!    applies. The right part starts where the whole's next match starts.
//! 3. **Between two ASCII characters of different classes, letter, digit or other, neither of them
//!    whitespace, the left one no apostrophe.** The match holding the left character is a run of
//!    its class (or, for a letter, a contraction that ends with it), so it ends at the cut in the
//!    whole text and at the end of the text in the left part. Only an apostrophe begins a match
//!    that goes on in another class, and only a space one that goes on after whitespace. ASCII
//!    alone, because there a character's class needs no table.
//!
//! Cut 1 lets a large file be tokenised in parallel, and cut 3 one that has no white space, such
//! as minified code. Cut 2 exists because the regex engine behind
//! the published tokenizer keeps a backtracking entry per whitespace character and gives up
//! beyond about a million of them, which a file of padding can hold.

/// The last place of the first kind in `text`, if there is any.
pub(crate) fn last_cut(text: &str) -> Option<usize> {
    let mut later_is_whitespace: Option<usize> = None;
    for (position, character) in text.char_indices().rev() {
        if character.is_whitespace() {
            later_is_whitespace = Some(position);
        } else if let Some(cut) = later_is_whitespace {
            return Some(cut);
        }
    }
    None
}

/// The last place of the third kind in `text`, if there is any.
pub(crate) fn last_change(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let changes = |pair: &[u8]| match (Class::of(pair[0]), Class::of(pair[1])) {
        (Some(left), Some(right)) => left != right && pair[0] != b'\'',
        _ => false,
    };
    let before = bytes.windows(2).rposition(changes)?;
    Some(before + 1)
}

/// What the pattern tells apart, of ASCII characters that are not whitespace.
#[derive(PartialEq)]
enum Class {
    Letter,
    Digit,
    Other,
}

impl Class {
    fn of(byte: u8) -> Option<Self> {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Some(Self::Letter),
            b'0'..=b'9' => Some(Self::Digit),
            _ if !byte.is_ascii() || char::from(byte).is_whitespace() => None,
            _ => Some(Self::Other),
        }
    }
}

/// `text` in parts that hold no whitespace run longer than `longest_run` bytes, except as a whole
/// part or at the end of one. The concatenation of the parts is `text`.
pub(crate) fn parts(text: &str, longest_run: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    // Where the whitespace run being read began and where its last character began.
    let mut run: Option<(usize, usize)> = None;
    for (position, character) in text.char_indices() {
        if character.is_whitespace() {
            run = Some(run.map_or((position, position), |(began, _)| (began, position)));
        } else if let Some((began, last)) = run.take()
            && position - began > longest_run
            && last > began
        {
            if began > start {
                parts.push(&text[start..began]);
            }
            parts.push(&text[began..last]);
            start = last;
        }
    }
    if start < text.len() {
        parts.push(&text[start..]);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn random_text(random: &mut Random) -> String {
        let alphabet = [
            " ", " ", "\n", "\t", "\r\n", "\u{a0}", "\u{2003}", "a", "Bc", "7", "12", "'s", "'",
            "!?", "é", "漢", "👍", "_", "l", "don't", "\u{301}",
        ];
        (0..random.below(60))
            .map(|_| random.pick(&alphabet))
            .collect()
    }

    #[test]
    fn tokens_of_the_parts_are_tokens_of_the_whole() {
        let gpt2 = tiktoken_rs::r50k_base_singleton();
        let mut random = Random::new(3, 0);
        let mut num_cut = 0;
        for _ in 0..4_000 {
            let text = random_text(&mut random);
            let whole = gpt2.encode_ordinary(&text);
            for cut in [last_cut(&text), last_change(&text)].into_iter().flatten() {
                num_cut += 1;
                let mut halves = gpt2.encode_ordinary(&text[..cut]);
                halves.extend(gpt2.encode_ordinary(&text[cut..]));
                assert_eq!(halves, whole, "cut at {cut} of {text:?}");
            }
            let pieces = parts(&text, 1);
            assert_eq!(pieces.concat(), text);
            let joined: Vec<u32> = pieces
                .iter()
                .flat_map(|p| gpt2.encode_ordinary(p))
                .collect();
            assert_eq!(joined, whole, "parts {pieces:?}");
        }
        assert!(num_cut > 6_000);
    }

    #[test]
    fn text_without_a_boundary_is_not_cut() {
        assert_eq!(last_cut("abc"), None);
        assert_eq!(last_cut("  abc"), None);
        assert_eq!(last_cut("ab \n c"), Some(2));
        assert_eq!(last_change("don't stop"), Some(3));
        assert_eq!(last_change("ab12é!"), Some(2));
        assert_eq!(last_change("'s a漢 1"), None);
        assert_eq!(parts("a  b", 100), ["a  b"]);
        assert!(parts("", 1).is_empty());
    }
}
