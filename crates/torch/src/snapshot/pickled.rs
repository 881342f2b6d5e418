//! From the values of a pickle to a snapshot.

use super::pickle::{Pickle, Value};
use super::{DeviceRecord, Segment, SegmentBlock, Snapshot, check_segment};
use crate::allocator::RestoredState;
use crate::trace::StackId;

/// The root is `{"segments": […], "device_traces": [[…]], "allocator_settings": {…}}`.
pub(super) fn snapshot(mut pickle: Pickle) -> Result<Snapshot, String> {
    let root = pickle.root;
    let segments = pickle
        .get(root, "segments")
        .ok_or("there are no `segments`: this is a pickle, but not a memory snapshot")?;
    let mut devices: Vec<DeviceRecord> = Vec::new();
    for &segment in pickle.items(segments).ok_or("`segments` is not a list")? {
        let (device, segment) = read_segment(&pickle, segment)?;
        check_segment(&segment)?;
        while devices.len() <= device {
            devices.push(DeviceRecord::default());
        }
        devices[device]
            .segments
            .get_or_insert_default()
            .push(segment);
    }
    let traces = pickle
        .get(root, "device_traces")
        .and_then(|traces| pickle.items(traces))
        .map_or(Vec::new(), <[Value]>::to_vec);
    for (device, trace) in traces.into_iter().enumerate() {
        let trace = pickle
            .take_trace(trace)
            .ok_or("`device_traces` holds something that is not a list of events")?;
        while devices.len() <= device {
            devices.push(DeviceRecord::default());
        }
        devices[device].trace = trace;
    }
    for device in &mut devices {
        device.segments.get_or_insert_default();
    }
    Ok(Snapshot {
        settings: settings(&pickle, root),
        frames: pickle.frames,
        devices,
        ..Snapshot::default()
    })
}

/// More devices than one machine has.
const MOST_DEVICES: usize = 1024;

fn read_segment(pickle: &Pickle, segment: Value) -> Result<(usize, Segment), String> {
    let device = match pickle.get(segment, "device") {
        None => 0,
        Some(device) => integer(device, "device")? as usize,
    };
    if device >= MOST_DEVICES {
        return Err(format!("a segment is on device {device}"));
    }
    let number = |key: &str| -> Result<u64, String> {
        let value = pickle
            .get(segment, key)
            .ok_or_else(|| format!("a segment has no `{key}`"))?;
        integer(value, key)
    };
    let address = number("address")?;
    let small = match pickle.get(segment, "segment_type") {
        Some(Value::Text(text)) => pickle.frames.text(text) == "small",
        _ => return Err("a segment has no `segment_type`".into()),
    };
    let private = pickle
        .get(segment, "segment_pool_id")
        .and_then(|id| pickle.items(id))
        .and_then(|id| match id {
            [Value::Int(first), Value::Int(second)] => Some((*first as u64) << 32 ^ *second as u64),
            _ => None,
        })
        .unwrap_or(0);
    let expandable = pickle.get(segment, "is_expandable") == Some(Value::Bool(true));
    let list = pickle
        .get(segment, "blocks")
        .and_then(|blocks| pickle.items(blocks))
        .ok_or("a segment has no `blocks`")?;
    let mut blocks = Vec::with_capacity(list.len());
    let mut next = address;
    for &block in list {
        let block = read_block(pickle, block, next)?;
        next = next.saturating_add(block.size);
        blocks.push(block);
    }
    Ok((
        device,
        Segment {
            address,
            size: number("total_size")?,
            stream: number("stream")?,
            private,
            small,
            expandable,
            blocks,
        },
    ))
}

fn read_block(pickle: &Pickle, block: Value, next: u64) -> Result<SegmentBlock, String> {
    let number = |key: &str| -> Result<Option<u64>, String> {
        pickle
            .get(block, key)
            .map(|value| integer(value, key))
            .transpose()
    };
    let size = number("size")?.ok_or("a block has no `size`")?;
    let state = match pickle.get(block, "state") {
        Some(Value::Text(text)) => RestoredState::from_name(pickle.frames.text(text)),
        _ => None,
    };
    Ok(SegmentBlock {
        // PyTorch before 2.1 gives no addresses of blocks: they follow each other.
        address: number("address")?.unwrap_or(next),
        size,
        requested: number("requested_size")?.unwrap_or(size).min(size),
        state: state.ok_or("a block has no `state` that is known")?,
        stack: match pickle.get(block, "frames") {
            Some(Value::Stack(stack)) => stack,
            _ => StackId::EMPTY,
        },
    })
}

fn integer(value: Value, key: &str) -> Result<u64, String> {
    match value {
        Value::Int(number) if key == "stream" => Ok(number as u64),
        Value::Int(number) => u64::try_from(number).map_err(|_| format!("`{key}` is {number}")),
        _ => Err(format!("`{key}` is not a whole number")),
    }
}

/// The text of the environment variable, or what can be told without it.
fn settings(pickle: &Pickle, root: Value) -> Option<String> {
    let settings = pickle.get(root, "allocator_settings")?;
    for key in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"] {
        if let Some(Value::Text(text)) = pickle.get(settings, key)
            && !pickle.frames.text(text).is_empty()
        {
            return Some(pickle.frames.text(text).to_owned());
        }
    }
    let expandable = pickle.get(settings, "expandable_segments") == Some(Value::Bool(true));
    Some(
        if expandable {
            "expandable_segments:True"
        } else {
            ""
        }
        .to_owned(),
    )
}
