//! What is kept of a command's output: the end of it, and the lines that speak of memory. The
//! rest passes through, however many gigabytes it is.

use std::collections::VecDeque;

use memchr::memmem;

/// Bytes of the end that are kept.
const TAIL: usize = 256 << 10;
/// Lines that speak of memory that are kept, and how long each may be.
const MOST_LINES: usize = 64;
const LONGEST_LINE: usize = 4 << 10;

/// What a line that speaks of memory has: one of these. They only choose which lines are kept.
const WORDS: [&[u8]; 6] = [
    b"emory",
    b"ALLOC_FAILED",
    b"bad_alloc",
    b"RESOURCE_EXHAUSTED",
    b"killed by signal",
    b"Killed",
];

/// The output of a command, bounded.
#[derive(Debug)]
pub struct Capture {
    finders: Vec<memmem::Finder<'static>>,
    tail: VecDeque<u8>,
    lines: Vec<String>,
    /// The last line of what came, which has no end yet.
    open: Vec<u8>,
    num_bytes: u64,
}

impl Default for Capture {
    fn default() -> Self {
        Self {
            finders: WORDS.iter().map(memmem::Finder::new).collect(),
            tail: VecDeque::new(),
            lines: Vec::new(),
            open: Vec::new(),
            num_bytes: 0,
        }
    }
}

impl Capture {
    /// Takes up what the command wrote.
    pub fn push(&mut self, bytes: &[u8]) {
        self.num_bytes += bytes.len() as u64;
        let kept = &bytes[bytes.len().saturating_sub(TAIL)..];
        let overflow = (self.tail.len() + kept.len()).saturating_sub(TAIL);
        self.tail.drain(..overflow);
        self.tail.extend(kept);
        let Some(last_end) = memchr::memrchr2(b'\n', b'\r', bytes) else {
            self.extend_open(bytes);
            return;
        };
        let first_end = memchr::memchr2(b'\n', b'\r', bytes).unwrap_or(last_end);
        self.extend_open(&bytes[..first_end]);
        let open = std::mem::take(&mut self.open);
        self.consider(&open);
        let middle = &bytes[first_end..last_end];
        // Whole pieces without a word of memory are not cut into lines.
        if self.finders.iter().any(|word| word.find(middle).is_some()) {
            for line in middle.split(|byte| matches!(byte, b'\n' | b'\r')) {
                self.consider(line);
            }
        }
        self.extend_open(&bytes[last_end + 1..]);
    }

    fn extend_open(&mut self, bytes: &[u8]) {
        let room = LONGEST_LINE.saturating_sub(self.open.len());
        self.open.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn consider(&mut self, line: &[u8]) {
        let line = &line[..line.len().min(LONGEST_LINE)];
        if self.lines.len() < MOST_LINES
            && self.finders.iter().any(|word| word.find(line).is_some())
        {
            self.lines.push(String::from_utf8_lossy(line).into_owned());
        }
    }

    /// Ends the last line.
    pub fn finish(&mut self) {
        let open = std::mem::take(&mut self.open);
        self.consider(&open);
    }

    /// Lines that speak of memory, the first ones.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// The end of the output.
    pub fn tail(&self) -> String {
        let (first, second) = self.tail.as_slices();
        String::from_utf8_lossy(&[first, second].concat()).into_owned()
    }

    /// Bytes that were written in all.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_memory_are_found_however_they_arrive() {
        let text = b"epoch 1\rstep 2\nRuntimeError: CUDA out of memory. Tried 2 GiB\nbye";
        for size in 1..=text.len() {
            let mut capture = Capture::default();
            for piece in text.chunks(size) {
                capture.push(piece);
            }
            capture.finish();
            assert_eq!(
                capture.lines(),
                ["RuntimeError: CUDA out of memory. Tried 2 GiB"],
                "{size}"
            );
            assert_eq!(capture.tail().as_bytes(), text);
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut capture = Capture::default();
        let line = [b'x'; 100_000];
        for _ in 0..100 {
            capture.push(&line);
            capture.push(b"out of memory\n");
        }
        assert!(capture.tail().len() <= TAIL);
        assert!(capture.lines().len() <= MOST_LINES);
        assert_eq!(capture.num_bytes(), 100 * 100_014);
        assert!(capture.open.len() <= LONGEST_LINE);
    }
}
