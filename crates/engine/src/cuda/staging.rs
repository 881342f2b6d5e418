//! The next micro batch on its way: from pinned host memory to the twin of the batch's place,
//! on a stream of its own, while the step still reads the one before. When its turn comes, the
//! twin is copied over inside the card.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;

use cinch_plan::{Placement, twin};
use cudarc::driver::{result, sys};

use super::driver::{Context, Stream, failed};
use crate::error::EngineError;

pub(crate) struct Staging {
    stream: Stream,
    context: Arc<Context>,
    /// By offset of the tensor.
    slots: HashMap<u64, Slot>,
}

/// The way of one batch tensor.
struct Slot {
    host: *mut c_void,
    /// The twin is filled.
    copied: sys::CUevent,
    /// The twin has been copied over and may be filled again.
    consumed: sys::CUevent,
}

// SAFETY: pinned memory and events belong to the context, not to a thread.
unsafe impl Send for Staging {}

impl Staging {
    pub fn new(context: &Arc<Context>) -> Result<Self, EngineError> {
        Ok(Self {
            stream: Stream::new(context)?,
            context: Arc::clone(context),
            slots: HashMap::new(),
        })
    }

    /// Starts copying `from` to the twin of `place` in the arena at `base`.
    pub fn stage(&mut self, base: u64, place: Placement, from: &[u8]) -> Result<(), EngineError> {
        let slot = match self.slots.entry(place.offset) {
            Entry::Occupied(slot) => slot.into_mut(),
            Entry::Vacant(empty) => empty.insert(Slot::new(from.len())?),
        };
        let stream = self.stream.handle;
        // SAFETY: the events and the stream are live. The pinned memory has the size of the
        // tensor, and its last copy is over before it is written again; the twin lies inside the
        // arena by the plan.
        unsafe {
            result::event::synchronize(slot.copied)
                .map_err(failed("wait for the last batch to be copied"))?;
            std::ptr::copy_nonoverlapping(from.as_ptr(), slot.host.cast::<u8>(), from.len());
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(stream, slot.consumed, flags)
                .and_then(|()| {
                    let pinned = std::slice::from_raw_parts(slot.host.cast::<u8>(), from.len());
                    result::memcpy_htod_async(base + twin(place).offset, pinned, stream)
                })
                .and_then(|()| result::event::record(slot.copied, stream))
                .map_err(failed("send the next batch"))
        }
    }

    /// Puts the staged batch in its place, in the order of `main`.
    pub fn commit(&self, base: u64, place: Placement, main: &Stream) -> Result<(), EngineError> {
        let Some(slot) = self.slots.get(&place.offset) else {
            return Ok(());
        };
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let (from, to) = (base + twin(place).offset, base + place.offset);
        let bytes = place.bytes as usize;
        // SAFETY: events and streams are live; both ranges lie inside the arena by the plan.
        unsafe {
            result::stream::wait_event(main.handle, slot.copied, flags)
                .and_then(|()| result::memcpy_dtod_async(to, from, bytes, main.handle))
                .and_then(|()| result::event::record(slot.consumed, main.handle))
                .map_err(failed("take the next batch"))
        }
    }
}

impl Slot {
    fn new(bytes: usize) -> Result<Self, EngineError> {
        let event = || {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            result::event::create(flags).map_err(failed("create an event"))
        };
        // SAFETY: a plain pinned allocation, freed in `Drop` of `Staging`.
        let host = unsafe { result::malloc_host(bytes.max(1), 0) };
        Ok(Self {
            host: host.map_err(failed("pin host memory"))?,
            copied: event()?,
            consumed: event()?,
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind().is_err() || self.stream.synchronize().is_err() {
            return;
        }
        for slot in self.slots.values() {
            // SAFETY: created in `Slot::new`, released once, after the copies are over.
            unsafe {
                let _ = result::event::destroy(slot.copied);
                let _ = result::event::destroy(slot.consumed);
                let _ = result::free_host(slot.host);
            }
        }
    }
}
