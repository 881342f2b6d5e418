//! Snapshots as JSON lines: what the recorder writes, and plain lists of events.
//!
//! A line is one of
//! - the header: `{"cinch_snapshot": 1, "settings": …, "device_total": …, …}`, optional,
//! - a stack: `{"stack": 3, "frames": ["file.py:12:forward", …]}`, innermost first,
//! - a segment: `{"segment": ADDRESS, "size": …, "pool": "small", "blocks": [[SIZE, REQUESTED,
//!   STATE, STACK], …], …}`,
//! - a mark: `{"mark": "step", "time_us": …, "batch": 4}`,
//! - an event: `{"action": "alloc", "size": …, "addr": …, …}` with `stack` or `frames`; of the
//!   action `oom`, `device_free` stands in the place of `addr`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{BufRead, Read};

use serde::Deserialize;

use super::{DeviceRecord, Mark, Segment, SegmentBlock, Snapshot, check_event, check_segment};
use crate::allocator::RestoredState;
use crate::trace::{Action, Event, StackId};

/// No line of a recorder is longer, and none is held beyond it.
const LONGEST_LINE: u64 = 64 << 20;

/// The format's version.
const VERSION: u64 = 1;

/// Size, what was requested, state, stack.
#[derive(Deserialize)]
struct Block<'line>(u64, u64, #[serde(borrow)] Cow<'line, str>, Option<u64>);

#[derive(Deserialize)]
struct Line<'line> {
    cinch_snapshot: Option<u64>,
    #[serde(borrow)]
    settings: Option<Cow<'line, str>>,
    device_total: Option<u64>,
    device_used: Option<u64>,
    device_name: Option<String>,
    torch: Option<String>,
    complete: Option<bool>,

    #[serde(borrow)]
    action: Option<Cow<'line, str>>,
    size: Option<u64>,
    addr: Option<u64>,
    device_free: Option<u64>,
    stream: Option<u64>,
    time_us: Option<u64>,
    stack: Option<u64>,
    #[serde(borrow)]
    frames: Option<Vec<Cow<'line, str>>>,

    segment: Option<u64>,
    #[serde(borrow)]
    pool: Option<Cow<'line, str>>,
    private: Option<u64>,
    expandable: Option<bool>,
    #[serde(borrow)]
    blocks: Option<Vec<Block<'line>>>,

    mark: Option<String>,
    batch: Option<u64>,
}

/// A problem and the line at which it was found.
pub(super) struct LineError {
    pub line: u64,
    pub problem: String,
}

pub(super) fn read(mut reader: impl BufRead) -> Result<Snapshot, LineError> {
    let mut file = Reading::default();
    let mut buffer = Vec::new();
    let mut line = 0;
    loop {
        line += 1;
        buffer.clear();
        let length = reader
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut buffer)
            .map_err(|error| LineError {
                line,
                problem: error.to_string(),
            })?;
        if length == 0 {
            break;
        }
        if length as u64 == LONGEST_LINE {
            let problem = format!("the line is longer than {LONGEST_LINE} bytes");
            return Err(LineError { line, problem });
        }
        if buffer.trim_ascii().is_empty() {
            continue;
        }
        serde_json::from_slice(&buffer)
            .map_err(|error| error.to_string())
            .and_then(|parsed| file.take(parsed))
            .map_err(|problem| LineError { line, problem })?;
    }
    Ok(file.finish())
}

#[derive(Default)]
struct Reading {
    snapshot: Snapshot,
    device: DeviceRecord,
    /// The file's numbers of stacks.
    stacks: HashMap<u64, StackId>,
}

impl Reading {
    fn take(&mut self, line: Line<'_>) -> Result<(), String> {
        if let Some(version) = line.cinch_snapshot {
            self.header(version, line)
        } else if let Some(name) = line.mark {
            self.snapshot.marks.push(Mark {
                name,
                time: line.time_us.ok_or("a mark has no `time_us`")?,
                batch: line.batch,
            });
            Ok(())
        } else if line.action.is_some() {
            self.event(&line)
        } else if let Some(address) = line.segment {
            self.segment(address, line)
        } else if let (Some(number), Some(frames)) = (line.stack, &line.frames) {
            let stack = self.stack(frames);
            self.stacks.insert(number, stack);
            Ok(())
        } else {
            Err("this is neither an event (`action`) nor a segment, a stack or a mark".into())
        }
    }

    fn header(&mut self, version: u64, line: Line<'_>) -> Result<(), String> {
        if version > VERSION {
            return Err(format!(
                "the format's version is {version}; this program reads up to {VERSION}"
            ));
        }
        self.snapshot.settings = line.settings.map(Cow::into_owned);
        self.snapshot.device_total = line.device_total;
        self.snapshot.device_used = line.device_used;
        self.snapshot.device_name = line.device_name;
        self.snapshot.torch_version = line.torch;
        self.snapshot.complete = line.complete;
        // From here on the recorder lists every segment there is.
        self.device.segments.get_or_insert_default();
        Ok(())
    }

    fn stack(&mut self, frames: &[Cow<'_, str>]) -> StackId {
        let known = &mut self.snapshot.frames;
        let frames: Vec<u32> = frames
            .iter()
            .map(|frame| known.frame_from_text(frame))
            .collect();
        known.stack(&frames)
    }

    fn known_stack(&self, number: Option<u64>) -> Result<StackId, String> {
        match number {
            None => Ok(StackId::EMPTY),
            Some(number) => self
                .stacks
                .get(&number)
                .copied()
                .ok_or_else(|| format!("stack {number} is used before it is given")),
        }
    }

    fn event(&mut self, line: &Line<'_>) -> Result<(), String> {
        let action = Action::parse(line.action.as_deref().unwrap_or_default());
        let stack = match &line.frames {
            Some(frames) => self.stack(frames),
            None => self.known_stack(line.stack)?,
        };
        let event = Event {
            size: line.size.ok_or("an event has no `size`")?,
            address: line.addr.or(line.device_free).unwrap_or(0),
            time: line.time_us.unwrap_or(0),
            stack,
            stream: self.device.trace.stream(line.stream.unwrap_or(0)),
            action,
        };
        check_event(&event)?;
        self.device.trace.events.push(event);
        Ok(())
    }

    fn segment(&mut self, address: u64, line: Line<'_>) -> Result<(), String> {
        let mut next = address;
        let mut blocks = Vec::new();
        for Block(size, requested, state, stack) in
            line.blocks.ok_or("a segment has no `blocks`")?
        {
            blocks.push(SegmentBlock {
                address: next,
                size,
                requested: requested.min(size),
                state: RestoredState::from_name(&state)
                    .ok_or_else(|| format!("a block's state `{state}` is unknown"))?,
                stack: self.known_stack(stack)?,
            });
            next = next.saturating_add(size);
        }
        let segment = Segment {
            address,
            size: line.size.ok_or("a segment has no `size`")?,
            stream: line.stream.unwrap_or(0),
            private: line.private.unwrap_or(0),
            small: match line.pool.as_deref() {
                Some("small") => true,
                Some("large") => false,
                _ => return Err("a segment's `pool` is neither `small` nor `large`".into()),
            },
            expandable: line.expandable.unwrap_or(false),
            blocks,
        };
        check_segment(&segment)?;
        self.device.segments.get_or_insert_default().push(segment);
        Ok(())
    }

    fn finish(mut self) -> Snapshot {
        self.snapshot.devices.push(self.device);
        self.snapshot
    }
}
