//! The frames of a traceback as they come: their lines are kept, and read only for a message that
//! is new. Most tracebacks of a log are the same again.

use crate::frame::{Frame, Spelled};

/// Frames that are kept of a traceback, the innermost.
const MOST_FRAMES: usize = 96;
/// Bytes that are kept of a name: more than a frame shows, whatever letters it has.
const LONGEST: usize = 256;
/// The first half of a frame that a terminal broke is not longer.
const LONGEST_HALF: usize = 512;

/// Where one frame's names stand.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    function: usize,
    end: usize,
    line: u32,
}

#[derive(Debug, Default)]
pub(super) struct Traceback {
    names: Vec<u8>,
    places: Vec<Place>,
    half: Option<Vec<u8>>,
}

impl Traceback {
    /// Whether the line before may be the first half of a frame.
    pub(super) fn is_broken(&self) -> bool {
        self.half.is_some()
    }

    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.places.clear();
    }

    /// Takes a frame, whole or in two halves. Whether the line was one.
    pub(super) fn take(&mut self, line: &[u8]) -> bool {
        let joined = self.half.take().map(|mut half| {
            half.extend_from_slice(line);
            half
        });
        let whole = joined.as_deref().unwrap_or(line);
        if let Some(frame) = Spelled::read(whole) {
            self.push(frame);
            return true;
        }
        let begins = whole.trim_ascii_start().starts_with(b"File \"");
        if begins && whole.len() < LONGEST_HALF {
            self.half = Some(whole.to_vec());
        }
        begins
    }

    fn push(&mut self, frame: Spelled<'_>) {
        // The outer half goes at once, so that each frame is moved at most once.
        if self.places.len() == 2 * MOST_FRAMES {
            let cut = self.places[MOST_FRAMES].file;
            self.names.drain(..cut);
            self.places.drain(..MOST_FRAMES);
            for place in &mut self.places {
                place.file -= cut;
                place.function -= cut;
                place.end -= cut;
            }
        }
        let tail = |name: &'_ [u8]| name.len().saturating_sub(LONGEST);
        let file = self.names.len();
        self.names
            .extend_from_slice(&frame.file[tail(frame.file)..]);
        let function = self.names.len();
        self.names
            .extend_from_slice(&frame.function[tail(frame.function)..]);
        self.places.push(Place {
            file,
            function,
            end: self.names.len(),
            line: frame.line,
        });
    }

    /// The frames, the outermost first.
    pub(super) fn frames(&self) -> Vec<Frame> {
        let skipped = self.places.len().saturating_sub(MOST_FRAMES);
        let frame = |place: &Place| {
            Frame::new(Spelled {
                file: &self.names[place.file..place.function],
                line: place.line,
                function: &self.names[place.function..place.end],
            })
        };
        self.places[skipped..].iter().map(frame).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_frames_stay() {
        let mut traceback = Traceback::default();
        for index in 0..1000 {
            let line = format!("  File \"/a/f{index}.py\", line {index}, in f{index}");
            assert!(traceback.take(line.as_bytes()));
        }
        let frames = traceback.frames();
        assert_eq!(frames.len(), MOST_FRAMES);
        assert_eq!(frames[MOST_FRAMES - 1].function, "f999");
        assert_eq!(frames[0].file, format!("/a/f{}.py", 1000 - MOST_FRAMES));
        assert_eq!(frames[0].line as usize, 1000 - MOST_FRAMES);
        assert!(traceback.names.len() < 2 * MOST_FRAMES * 32);
        traceback.clear();
        assert!(traceback.frames().is_empty());
    }

    #[test]
    fn a_frame_in_two_halves_is_one() {
        let mut traceback = Traceback::default();
        assert!(traceback.take(b"  File \"/a/trai"));
        assert!(traceback.is_broken());
        assert!(traceback.take(b"ner.py\", line 7, in evaluate"));
        assert_eq!(traceback.frames()[0].file, "/a/trainer.py");
        assert!(!traceback.take(b"loss = model(batch)"));
    }
}
