//! What a command prints, read for its diagnosis on the way. What is held is bounded, however
//! many gigabytes pass through.

use cinch_diagnose::Log;

/// The longest line that waits for its end; a longer one is read in pieces.
const LONGEST_LINE: usize = 64 << 10;

/// Where a command writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Output,
    Error,
}

/// The output of a command, as a log of both streams: whole lines in the order in which they came,
/// so that steps on one stream stand before a message on the other.
#[derive(Debug, Default)]
pub struct Capture {
    log: Log,
    /// The last line of each stream, which has no end yet.
    open: [Vec<u8>; 2],
    num_bytes: u64,
}

impl Capture {
    /// Takes up what the command wrote.
    pub fn push(&mut self, stream: Stream, bytes: &[u8]) {
        self.num_bytes += bytes.len() as u64;
        let open = &mut self.open[stream as usize];
        let end = memchr::memrchr2(b'\n', b'\r', bytes).map_or(0, |place| place + 1);
        if end > 0 {
            self.log.feed(open);
            self.log.feed(&bytes[..end]);
            open.clear();
        }
        open.extend_from_slice(&bytes[end..]);
        if open.len() > LONGEST_LINE {
            self.log.feed(open);
            open.clear();
        }
    }

    /// Ends the last lines.
    pub fn finish(&mut self) {
        for open in &mut self.open {
            if !open.is_empty() {
                self.log.feed(open);
                self.log.feed(b"\n");
                open.clear();
            }
        }
        self.log.finish();
        self.log.join_streams();
    }

    /// What was read.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The kernel ended processes of the command.
    pub fn note_kernel_kills(&mut self, count: u64) {
        self.log.note_kernel_kills(count);
    }

    /// Bytes that were written in all.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }
}

#[cfg(test)]
mod tests {
    use cinch_diagnose::{Cause, diagnose};

    use super::*;

    const MESSAGE: &[u8] =
        b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 3.81 GiB total \
          capacity; 3.08 GiB already allocated; 55.38 MiB free; 9.78 MiB cached)";

    #[test]
    fn a_message_is_read_however_it_arrives_and_whatever_the_other_stream_says() {
        for size in 1..=MESSAGE.len() {
            let mut capture = Capture::default();
            for piece in MESSAGE.chunks(size) {
                capture.push(Stream::Error, piece);
                capture.push(Stream::Output, b"epoch 1\rstep 2\nste");
            }
            capture.finish();
            let failures = diagnose(capture.log(), None);
            assert_eq!(failures.len(), 1, "{size}");
            assert_eq!(failures[0].cause, Cause::Capacity, "{size}");
            assert_eq!(failures[0].numbers.tried, Some(2 << 30), "{size}");
        }
    }

    #[test]
    fn steps_that_come_after_the_message_are_those_before_it() {
        let mut capture = Capture::default();
        capture.push(Stream::Error, MESSAGE);
        capture.push(Stream::Error, b"\n");
        for step in 1..=60 {
            let line = format!("step: {step} loss: 1.5 memory: {} MiB\n", 2000 + 30 * step);
            capture.push(Stream::Output, line.as_bytes());
        }
        capture.finish();
        let failures = diagnose(capture.log(), None);
        assert_eq!(failures[0].cause, Cause::Leak);
        assert_eq!(failures[0].step, Some(60));
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut capture = Capture::default();
        let line = [b'x'; 100_000];
        for _ in 0..100 {
            capture.push(Stream::Output, &line);
            assert!(capture.open[0].len() <= LONGEST_LINE);
        }
        assert_eq!(capture.num_bytes(), 100 * 100_000);
    }
}
