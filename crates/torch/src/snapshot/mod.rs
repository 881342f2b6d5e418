//! A run of the user's own, as PyTorch recorded it: read, rewound to its start, and explained.

mod align;
mod batch;
mod category;
mod compact;
mod course;
mod explain;
mod json_lines;
mod origin;
mod peak;
mod pickle;
mod pickled;
mod rewind;
mod steps;

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::TorchError;
use crate::allocator::{AllocatorConfig, RestoredState};
use crate::trace::{Event, Frames, Program, StackId, Trace};

pub use batch::{BatchEffect, Batches, CannotTell};
pub use category::{RecordedCategory, RecordedPhase};
pub use course::{Fragmentation, TimelinePoint};
pub use explain::{Explanation, Fidelity, RanOut, explain};
pub use origin::Origin;
pub use peak::{CategoryBytes, LiveBlock, LiveLine};
pub use rewind::{restore, rewind};
pub use steps::Step;

/// A Python module that records a run in the user's own environment.
pub const RECORDER: &str = include_str!("recorder.py");

/// A segment with its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub size: u64,
    pub stream: u64,
    /// A private pool's number, 0 for the common one.
    pub private: u64,
    pub small: bool,
    /// A mapped part of an expandable segment.
    pub expandable: bool,
    pub blocks: Vec<SegmentBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBlock {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    pub state: RestoredState,
    pub stack: StackId,
}

impl SegmentBlock {
    pub fn is_live(&self) -> bool {
        matches!(
            self.state,
            RestoredState::Allocated | RestoredState::Pending
        )
    }
}

impl RestoredState {
    /// As snapshots write it.
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "active_allocated" => Some(Self::Allocated),
            "active_pending_free" | "active_awaiting_free" => Some(Self::Pending),
            "inactive" => Some(Self::Free),
            _ => None,
        }
    }
}

/// What was recorded of one device.
#[derive(Default)]
pub struct DeviceRecord {
    pub trace: Trace,
    /// The segments when the snapshot was taken; `None` if the file has events only.
    pub segments: Option<Vec<Segment>>,
}

impl DeviceRecord {
    fn is_empty(&self) -> bool {
        self.trace.events.is_empty() && self.segments.as_ref().is_none_or(Vec::is_empty)
    }
}

/// A moment the user named, such as the start of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub name: String,
    /// Microseconds since 1970.
    pub time: u64,
    /// Samples of the step that begins here.
    pub batch: Option<u64>,
}

/// A recorded run.
#[derive(Default)]
pub struct Snapshot {
    pub frames: Frames,
    pub devices: Vec<DeviceRecord>,
    pub marks: Vec<Mark>,
    /// The text of `PYTORCH_ALLOC_CONF`, if it is known.
    pub settings: Option<String>,
    pub device_total: Option<u64>,
    /// Total minus free, as the driver said at the end.
    pub device_used: Option<u64>,
    pub device_name: Option<String>,
    pub torch_version: Option<String>,
    /// Whether the recorder kept every event since its start, if it said so.
    pub complete: Option<bool>,
}

/// Addresses and sizes beyond these are no device's, and sums of them could overflow.
const LARGEST_ADDRESS: u64 = 1 << 62;
const LARGEST_SIZE: u64 = 1 << 60;

fn check_event(event: &Event) -> Result<(), String> {
    check_place(event.address, event.size)
}

fn check_place(address: u64, size: u64) -> Result<(), String> {
    if address > LARGEST_ADDRESS || size > LARGEST_SIZE {
        return Err(format!(
            "{size} bytes at address {address} are on no device"
        ));
    }
    Ok(())
}

/// Blocks must cover their segment, one after the other.
fn check_segment(segment: &Segment) -> Result<(), String> {
    check_place(segment.address, segment.size)?;
    let mut end = segment.address;
    for block in &segment.blocks {
        check_place(block.address, block.size)?;
        if block.address != end {
            return Err(format!(
                "a block of the segment at {} is at {}, not at {end}",
                segment.address, block.address
            ));
        }
        end += block.size;
        if end > segment.address + segment.size {
            break;
        }
    }
    if end != segment.address + segment.size {
        return Err(format!(
            "the blocks of the segment at {} end at {end}, the segment at {}",
            segment.address,
            segment.address + segment.size
        ));
    }
    Ok(())
}

impl Snapshot {
    /// Reads a pickle of `torch.cuda.memory._dump_snapshot` or JSON lines.
    pub fn read(path: &Path) -> Result<Self, TorchError> {
        let failed = |source| TorchError::File {
            path: path.to_owned(),
            source,
        };
        let mut reader =
            BufReader::with_capacity(1 << 20, cinch_files::open_regular(path).map_err(failed)?);
        let is_pickle = reader.fill_buf().map_err(failed)?.first() == Some(&0x80);
        Self::read_from(reader, is_pickle, path)
    }

    /// Reads from anything; `name` is for messages.
    pub fn read_from(
        reader: impl BufRead,
        is_pickle: bool,
        name: &Path,
    ) -> Result<Self, TorchError> {
        let snapshot = if is_pickle {
            let pickle = pickle::Pickle::read(reader).map_err(|error| TorchError::Pickle {
                path: name.to_owned(),
                offset: error.offset,
                problem: error.problem,
            })?;
            pickled::snapshot(pickle).map_err(|problem| TorchError::Snapshot {
                path: name.to_owned(),
                problem,
            })?
        } else {
            json_lines::read(reader).map_err(|error| TorchError::JsonLine {
                path: name.to_owned(),
                line: error.line,
                problem: error.problem,
            })?
        };
        if snapshot.devices.iter().all(DeviceRecord::is_empty) {
            return Err(TorchError::Snapshot {
                path: name.to_owned(),
                problem: "nothing is recorded in it: no event and no segment\nhint: start the \
                          recording before the first step, and save after some; `cinch trace \
                          --script` prints a recorder"
                    .to_owned(),
            });
        }
        Ok(snapshot)
    }

    /// The settings it was recorded with; PyTorch's defaults where they are not known.
    pub fn config(&self) -> Result<AllocatorConfig, TorchError> {
        let text = self.settings.as_deref().unwrap_or_default();
        Ok(AllocatorConfig::parse(text)?)
    }

    /// The device with the most events.
    pub fn busiest_device(&self) -> Option<usize> {
        (0..self.devices.len()).max_by_key(|&device| {
            let device = &self.devices[device];
            let segments = device.segments.as_ref().map_or(0, Vec::len);
            (device.trace.events.len(), segments)
        })
    }

    /// What the allocator can have of a device: all but what is in use outside of it (the
    /// context, libraries, other programs) when the recording is saved.
    pub fn capacity(&self, device: usize) -> Option<u64> {
        let segments = self.devices.get(device)?.segments.as_ref()?;
        let reserved: u64 = segments
            .iter()
            .fold(0, |sum, segment| sum.saturating_add(segment.size));
        let outside = self.device_used?.saturating_sub(reserved);
        Some(self.device_total?.saturating_sub(outside))
    }

    /// What the program asked of a device, from the state at the start of the recording on.
    pub fn program(&self, device: usize) -> Result<Program, TorchError> {
        let config = self.config()?;
        let record = &self.devices[device];
        Ok(Program::from_trace(
            &record.trace,
            record.segments.as_deref(),
            &config,
        ))
    }
}
