//! TensorBoard's event files, written without TensorFlow.
//!
//! A file is a sequence of framed records, each a protobuf `Event`:
//!
//! ```text
//! length u64 | masked crc32c of length u32 | data | masked crc32c of data u32     (little-endian)
//! ```
//!
//! Three events are needed: the file version, the start of a session, and a scalar. Their few
//! fields are encoded by hand:
//!
//! ```text
//! Event      1 wall_time double, 2 step int64, then one of 3 file_version string,
//!            5 summary Summary, 7 session_log SessionLog
//! Summary    1 value, repeated: Value { 1 tag string, 2 simple_value float }
//! SessionLog 1 status enum (START = 1)
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use super::crc32c::masked_crc32c;
use super::error::{IoContext, RecordError};
use crate::host::host_name;

const FILE_PREFIX: &str = "events.out.tfevents.";
const FILE_VERSION: &str = "brain.Event:2";

mod event_field {
    pub(super) const WALL_TIME: u64 = 1;
    pub(super) const STEP: u64 = 2;
    pub(super) const FILE_VERSION: u64 = 3;
    pub(super) const SUMMARY: u64 = 5;
    pub(super) const SESSION_LOG: u64 = 7;
}

const SUMMARY_VALUE: u64 = 1;
const VALUE_TAG: u64 = 1;
const VALUE_SIMPLE_VALUE: u64 = 2;
const SESSION_STATUS: u64 = 1;
const SESSION_START: u64 = 1;

/// Writes scalars to an event file of its own, buffered until [`EventWriter::flush`].
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    out: BufWriter<File>,
}

impl EventWriter {
    /// Starts the event file of a new run in `folder`.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self, RecordError> {
        Self::start(folder.as_ref(), 0)
    }

    /// Starts the next event file of a run resumed after `step`. TensorBoard discards the points
    /// that earlier files hold beyond that step.
    pub fn resume(folder: impl AsRef<Path>, step: u64) -> Result<Self, RecordError> {
        // TensorBoard keeps only points strictly before a session's first step, so the points of
        // `step` itself stay.
        Self::start(folder.as_ref(), step.saturating_add(1))
    }

    /// Opens a file and a session in it. The first run has its session too: TensorBoard takes the
    /// first session it meets for the beginning and only those after it for restarts.
    fn start(folder: &Path, first_step: u64) -> Result<Self, RecordError> {
        let (path, file) = create_file(folder)?;
        let mut writer = Self {
            path,
            out: BufWriter::new(file),
        };
        writer.write_event(0, |event| {
            write_bytes(event, event_field::FILE_VERSION, FILE_VERSION.as_bytes());
        })?;
        writer.write_event(first_step, |event| {
            let mut session = Vec::new();
            write_key(&mut session, SESSION_STATUS, WireType::Varint);
            write_varint(&mut session, SESSION_START);
            write_bytes(event, event_field::SESSION_LOG, &session);
        })?;
        writer.flush()?;
        Ok(writer)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point to the curve `tag`.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f32) -> Result<(), RecordError> {
        self.write_event(step, |event| {
            let mut point = Vec::new();
            write_bytes(&mut point, VALUE_TAG, tag.as_bytes());
            write_key(&mut point, VALUE_SIMPLE_VALUE, WireType::Fixed32);
            point.extend_from_slice(&value.to_le_bytes());
            let mut summary = Vec::new();
            write_bytes(&mut summary, SUMMARY_VALUE, &point);
            write_bytes(event, event_field::SUMMARY, &summary);
        })
    }

    /// Hands all points to the system, where TensorBoard sees them and a kill no longer loses
    /// them. Meant to be called once per step, after its scalars.
    pub fn flush(&mut self) -> Result<(), RecordError> {
        self.out.flush().at("write", &self.path)
    }

    fn write_event(
        &mut self,
        step: u64,
        write_what: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), RecordError> {
        let mut event = Vec::new();
        write_key(&mut event, event_field::WALL_TIME, WireType::Fixed64);
        event.extend_from_slice(&seconds_since_1970().to_le_bytes());
        write_key(&mut event, event_field::STEP, WireType::Varint);
        // The field is signed.
        write_varint(&mut event, step.min(i64::MAX as u64));
        write_what(&mut event);
        write_record(&mut self.out, &event).at("write", &self.path)
    }
}

/// Creates `events.out.tfevents.<seconds>.<host>.<process>.0`.
///
/// TensorBoard reads the files of a folder in the order of their names, and the start of a session
/// only acts on points read before it. A file's time is therefore later than that of every file
/// before it, also when a run is resumed within the same second or after the clock was set back.
fn create_file(folder: &Path) -> Result<(PathBuf, File), RecordError> {
    fs::create_dir_all(folder).at("create", folder)?;
    let mut seconds = seconds_since_1970() as u64;
    for entry in fs::read_dir(folder).at("read", folder)? {
        let name = entry.at("read", folder)?.file_name();
        if let Some(earlier) = name.to_str().and_then(seconds_in_name) {
            seconds = seconds.max(earlier.saturating_add(1));
        }
    }
    // Ten digits, so that the order of names is the order of numbers.
    let name = format!(
        "{FILE_PREFIX}{seconds:010}.{}.{}.0",
        host_name(),
        process::id()
    );
    let path = folder.join(name);
    let file = File::create_new(&path).at("create", &path)?;
    Ok((path, file))
}

fn seconds_in_name(name: &str) -> Option<u64> {
    let (seconds, _) = name.strip_prefix(FILE_PREFIX)?.split_once('.')?;
    seconds.parse().ok()
}

/// A clock before 1970 reads as 1970: a wrong time of day must not stop a run.
fn seconds_since_1970() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

fn write_record(out: &mut impl Write, data: &[u8]) -> io::Result<()> {
    let length = (data.len() as u64).to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&masked_crc32c(&length).to_le_bytes())?;
    out.write_all(data)?;
    out.write_all(&masked_crc32c(data).to_le_bytes())
}

/// How a protobuf field is stored, as the low three bits of its key say.
#[derive(Clone, Copy)]
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    LengthDelimited = 2,
    Fixed32 = 5,
}

fn write_key(out: &mut Vec<u8>, field: u64, wire_type: WireType) {
    write_varint(out, field << 3 | wire_type as u64);
}

/// Seven bits per byte, lowest first; the high bit says that more follow.
fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A string, bytes or message field.
fn write_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    write_key(out, field, WireType::LengthDelimited);
    write_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests;
