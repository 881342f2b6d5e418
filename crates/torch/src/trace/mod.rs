//! What PyTorch records of its allocator: one event for each request, in order, with the Python
//! frames that made it.

mod program;
mod replay;

use std::collections::HashMap;

use serde::Serialize;

pub use program::{Operation, Program};
pub use replay::{Comparison, Difference, ReplayOutcome, WhatIf, compare, replay, what_if};

/// The kinds of events in `device_traces`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    OutOfMemory,
    /// Snapshots, annotations and what later versions add: without effect on memory.
    Other,
}

impl Action {
    pub fn parse(name: &str) -> Self {
        match name {
            "alloc" => Self::Alloc,
            "free_requested" | "free" => Self::FreeRequested,
            "free_completed" => Self::FreeCompleted,
            "segment_alloc" => Self::SegmentAlloc,
            "segment_free" => Self::SegmentFree,
            "segment_map" => Self::SegmentMap,
            "segment_unmap" => Self::SegmentUnmap,
            "oom" => Self::OutOfMemory,
            _ => Self::Other,
        }
    }
}

/// A list of frames, innermost first, by its place in [`Frames`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StackId(u32);

impl StackId {
    /// Nothing was recorded.
    pub const EMPTY: Self = Self(0);
}

/// One event, 32 bytes: a snapshot has millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Of a request what was asked for, of a segment its bytes.
    pub size: u64,
    /// Of [`Action::OutOfMemory`] the bytes that were free on the device.
    pub address: u64,
    /// Microseconds since 1970, 0 if not recorded.
    pub time: u64,
    pub stack: StackId,
    /// Place in [`Trace::streams`].
    pub stream: u16,
    pub action: Action,
}

/// Every string, frame and stack of a snapshot, each once.
pub struct Frames {
    strings: Vec<Box<str>>,
    string_index: HashMap<Box<str>, u32>,
    /// File, line, function.
    frames: Vec<(u32, u32, u32)>,
    frame_index: HashMap<(u32, u32, u32), u32>,
    stacks: Vec<Box<[u32]>>,
    stack_index: HashMap<Box<[u32]>, u32>,
}

/// A frame of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Frame<'frames> {
    pub file: &'frames str,
    pub line: u32,
    pub function: &'frames str,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            strings: Vec::new(),
            string_index: HashMap::new(),
            frames: Vec::new(),
            frame_index: HashMap::new(),
            stacks: vec![Box::default()],
            stack_index: HashMap::from([(Box::default(), 0)]),
        }
    }
}

impl Frames {
    pub fn intern(&mut self, text: &str) -> u32 {
        if let Some(&index) = self.string_index.get(text) {
            return index;
        }
        let index = self.strings.len() as u32;
        self.strings.push(text.into());
        self.string_index.insert(text.into(), index);
        index
    }

    pub fn frame(&mut self, file: u32, line: u32, function: u32) -> u32 {
        let key = (file, line, function);
        *self.frame_index.entry(key).or_insert_with(|| {
            self.frames.push(key);
            (self.frames.len() - 1) as u32
        })
    }

    /// A frame written as `file:line:function`, as JSON lines have it. Text of another form
    /// becomes a function without a file.
    pub fn frame_from_text(&mut self, text: &str) -> u32 {
        let mut parts = text.rsplitn(3, ':');
        let (function, line, file) = (parts.next(), parts.next(), parts.next());
        match (file, line.and_then(|line| line.parse().ok()), function) {
            (Some(file), Some(line), Some(function)) => {
                let (file, function) = (self.intern(file), self.intern(function));
                self.frame(file, line, function)
            }
            _ => {
                let (file, function) = (self.intern(""), self.intern(text));
                self.frame(file, 0, function)
            }
        }
    }

    pub fn stack(&mut self, frames: &[u32]) -> StackId {
        if let Some(&index) = self.stack_index.get(frames) {
            return StackId(index);
        }
        let index = self.stacks.len() as u32;
        self.stacks.push(frames.into());
        self.stack_index.insert(frames.into(), index);
        StackId(index)
    }

    pub fn num_stacks(&self) -> usize {
        self.stacks.len()
    }

    /// The string that [`intern`](Self::intern) gave this index.
    pub fn text(&self, index: u32) -> &str {
        self.strings.get(index as usize).map_or("", |text| text)
    }

    /// The frames of a stack, innermost first.
    pub fn get(&self, stack: StackId) -> impl Iterator<Item = Frame<'_>> {
        let frames = self
            .stacks
            .get(stack.0 as usize)
            .map_or(&[][..], |stack| stack);
        frames.iter().map(|&frame| {
            let (file, line, function) = self.frames[frame as usize];
            Frame {
                file: self.text(file),
                line,
                function: self.text(function),
            }
        })
    }
}

impl StackId {
    pub(crate) fn from_index(index: usize) -> Self {
        Self(index as u32)
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The events of one device.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub events: Vec<Event>,
    /// The streams that occur, as PyTorch numbers them.
    pub streams: Vec<u64>,
}

impl Trace {
    /// The short number of a stream in this trace. Past 2¹⁶ streams, which no program has, all
    /// further ones are one.
    pub fn stream(&mut self, stream: u64) -> u16 {
        let place = self.streams.iter().position(|&known| known == stream);
        let place = place.unwrap_or_else(|| {
            if self.streams.len() <= usize::from(u16::MAX) {
                self.streams.push(stream);
            }
            self.streams.len() - 1
        });
        place as u16
    }
}
