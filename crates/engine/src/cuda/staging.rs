//! The next micro batch on its way: from pinned host memory to the twin of the batch's place,
//! on a stream of its own, while the step still reads the one before. When its turn comes, the
//! twin is copied over inside the card.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use cinch_plan::{Placement, Residence, twin};
use cudarc::driver::{result, sys};

use super::driver::{Context, DeviceMemory, Event, HostMemory, Stream, failed};
use crate::error::EngineError;

pub(crate) struct Staging {
    stream: Stream,
    context: Arc<Context>,
    /// By offset of the tensor.
    slots: HashMap<u64, Slot>,
}

/// The way of one batch tensor.
struct Slot {
    /// As large as the place.
    host: HostMemory,
    /// Bytes that were staged last.
    staged: u64,
    /// The twin is filled.
    copied: Event,
    /// The twin has been copied over and may be filled again.
    consumed: Event,
}

impl Staging {
    pub fn new(context: &Arc<Context>) -> Result<Self, EngineError> {
        Ok(Self {
            stream: Stream::new(context)?,
            context: Arc::clone(context),
            slots: HashMap::new(),
        })
    }

    /// Starts copying `from` to the twin of `place` in the arena. Rows may be shorter than the
    /// place has room for; their twin is where that of the longest is, because these may still be
    /// in use.
    ///
    /// # Panics
    /// Where `from` is larger than the place, the place is not in the arena with its twin, or a
    /// place of another size was given before.
    pub fn stage(
        &mut self,
        arena: &DeviceMemory,
        place: Placement,
        from: &[u8],
    ) -> Result<(), EngineError> {
        check(place, arena.bytes, from.len());
        if from.is_empty() {
            return Ok(());
        }
        let slot = match self.slots.entry(place.offset) {
            Entry::Occupied(slot) => slot.into_mut(),
            Entry::Vacant(empty) => {
                let Some(slot) = Slot::new(&self.context, place.bytes)? else {
                    return Ok(());
                };
                empty.insert(slot)
            }
        };
        assert_eq!(slot.host.bytes, place.bytes, "a place of another size");
        slot.staged = from.len() as u64;
        let (stream, whole) = (self.stream.handle, Placement::in_arena(0, slot.staged));
        // SAFETY: the event is live.
        unsafe { result::event::synchronize(slot.copied.handle) }
            .map_err(failed("wait for the last batch to be copied"))?;
        // SAFETY: nothing reads the pinned memory now: its last copy is over.
        unsafe { slot.host.view_mut(whole) }.copy_from_slice(from);
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let to = arena.address + twin(place).offset;
        // SAFETY: events and stream are live; the twin lies inside the arena by `check`; the
        // pinned memory is only read by the device, and neither written before the copy is over
        // nor freed (see `Drop`).
        unsafe {
            result::stream::wait_event(stream, slot.consumed.handle, flags)
                .and_then(|()| result::memcpy_htod_async(to, slot.host.view(whole), stream))
                .and_then(|()| result::event::record(slot.copied.handle, stream))
        }
        .map_err(failed("send the next batch"))
    }

    /// Puts the staged batch in its place, in the order of `main`.
    ///
    /// # Panics
    /// Where what was staged there has another size, or the place is not in the arena.
    pub fn commit(
        &self,
        arena: &DeviceMemory,
        place: Placement,
        main: &Stream,
    ) -> Result<(), EngineError> {
        let Some(slot) = self.slots.get(&place.offset) else {
            return Ok(());
        };
        let bytes = slot.staged as usize;
        check(place, arena.bytes, bytes);
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let [from, to] = [twin(place), place].map(|place| arena.address + place.offset);
        // SAFETY: events and streams are live; both ranges lie inside the arena by `check`.
        unsafe {
            result::stream::wait_event(main.handle, slot.copied.handle, flags)
                .and_then(|()| result::memcpy_dtod_async(to, from, bytes, main.handle))
                .and_then(|()| result::event::record(slot.consumed.handle, main.handle))
        }
        .map_err(failed("take the next batch"))
    }
}

/// # Panics
/// Where `bytes` are more than the place's, or it lies outside the arena, itself or its twin.
fn check(place: Placement, arena_bytes: u64, bytes: usize) {
    assert!(
        place.residence == Residence::Arena
            && place.end() <= arena_bytes
            && twin(place).end() <= arena_bytes,
        "a batch outside the arena"
    );
    assert!(bytes as u64 <= place.bytes, "a batch of another size");
}

impl Slot {
    /// None for zero bytes, which need no way.
    fn new(context: &Arc<Context>, bytes: u64) -> Result<Option<Self>, EngineError> {
        let event = || Event::new(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let host = HostMemory::new(context, bytes).map_err(|_| EngineError::Cuda {
            action: "send the next batch".to_owned(),
            problem: format!("{bytes} bytes of host memory cannot be pinned"),
        })?;
        let Some(host) = host else {
            return Ok(None);
        };
        Ok(Some(Self {
            host,
            staged: 0,
            copied: event()?,
            consumed: event()?,
        }))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind().is_ok() && self.stream.synchronize().is_ok() {
            return;
        }
        // A copy may still read the pinned memory, so it is given up instead of freed.
        std::mem::forget(std::mem::take(&mut self.slots));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Placement = Placement::in_arena(256, 100);

    #[test]
    fn a_batch_and_its_twin_fit_the_arena() {
        check(PLACE, twin(PLACE).end(), 100);
        check(PLACE, twin(PLACE).end(), 60);
    }

    #[test]
    #[should_panic(expected = "outside the arena")]
    fn a_twin_beyond_the_arena_is_refused() {
        check(PLACE, twin(PLACE).end() - 1, 100);
    }

    #[test]
    #[should_panic(expected = "another size")]
    fn a_batch_without_room_is_refused() {
        check(PLACE, 1 << 20, 101);
    }
}
