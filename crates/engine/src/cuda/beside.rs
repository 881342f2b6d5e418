//! What runs beside the step, on a stream of its own: weights and activations on their way from
//! pinned host memory into the arena, activations on their way there, and what is exchanged with
//! other ranks. All streams are recorded together: what
//! a recording replays has the same queues.
//!
//! What runs beside begins when everything before it on the main stream is done, because its
//! places may have been somebody else's until then; nothing later on the main stream uses them
//! before it has waited.

use std::collections::HashMap;
use std::sync::Arc;

use cinch_plan::{Placement, Residence};
use cudarc::driver::{result, sys};

use super::command::HostCopy;
use super::driver::{Context, Event, HostMemory, Stream, failed};
use crate::error::EngineError;

/// A stream beside the main one. What it runs has numbers, by which it is waited for.
pub(crate) struct Beside {
    marks: HashMap<usize, Marks>,
    stream: Stream,
    context: Arc<Context>,
}

struct Marks {
    /// The places are free.
    free: Event,
    done: Event,
}

impl Beside {
    pub fn new(context: &Arc<Context>) -> Result<Self, EngineError> {
        Ok(Self {
            marks: HashMap::new(),
            stream: Stream::new(context)?,
            context: Arc::clone(context),
        })
    }

    /// Makes what a number needs, before anything is recorded.
    pub fn make_ready(&mut self, number: usize) -> Result<(), EngineError> {
        let event = || Event::new(&self.context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let marks = Marks {
            free: event()?,
            done: event()?,
        };
        self.marks.entry(number).or_insert(marks);
        Ok(())
    }

    /// Puts something behind what is on the main stream, beside what comes next there.
    pub fn run(
        &self,
        number: usize,
        main: &Stream,
        issue: impl FnOnce(&Stream) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let marks = self.marks(number)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: events and streams are live.
        unsafe {
            result::event::record(marks.free.handle, main.handle)
                .and_then(|()| {
                    result::stream::wait_event(self.stream.handle, marks.free.handle, flags)
                })
                .map_err(failed("begin beside the step"))?;
        }
        self.stream.set_ends_with_kernel(false);
        issue(&self.stream)?;
        // SAFETY: event and stream are live.
        unsafe { result::event::record(marks.done.handle, self.stream.handle) }
            .map_err(failed("end beside the step"))
    }

    /// Lets the main stream wait.
    pub fn wait(&self, number: usize, main: &Stream) -> Result<(), EngineError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let done = self.marks(number)?.done.handle;
        // SAFETY: event and stream are live.
        unsafe { result::stream::wait_event(main.handle, done, flags) }
            .map_err(failed("wait for what ran beside"))
    }

    fn marks(&self, number: usize) -> Result<&Marks, EngineError> {
        self.marks.get(&number).ok_or_else(|| EngineError::Cuda {
            action: "run beside the step".to_owned(),
            problem: "it was not made ready".to_owned(),
        })
    }
}

/// Copies from pinned host memory into the arena.
pub(crate) fn fetch(
    copies: &[HostCopy],
    host: &HostMemory,
    arena: u64,
    stream: &Stream,
) -> Result<(), EngineError> {
    for copy in copies {
        let from = host.address_of(in_host(copy.from, copy.bytes));
        // SAFETY: the destination is inside the arena by the plan, which the executor holds
        // against it; `address_of` checks the source, which the host writes only while nothing
        // runs, and which lives as long as the executor.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                arena + copy.to,
                from.cast_const().cast(),
                copy.bytes as usize,
                stream.handle,
            )
        }
        .result()
        .map_err(failed("fetch from host memory"))?;
    }
    Ok(())
}

/// Copies from the arena into pinned host memory.
pub(crate) fn store(
    copies: &[HostCopy],
    host: &HostMemory,
    arena: u64,
    stream: &Stream,
) -> Result<(), EngineError> {
    for copy in copies {
        let to = host.address_of(in_host(copy.to, copy.bytes));
        // SAFETY: as in `fetch`, with source and destination exchanged; the host reads it only
        // while nothing runs.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                to.cast(),
                arena + copy.from,
                copy.bytes as usize,
                stream.handle,
            )
        }
        .result()
        .map_err(failed("store in host memory"))?;
    }
    Ok(())
}

fn in_host(offset: u64, bytes: u64) -> Placement {
    Placement {
        residence: Residence::Host,
        offset,
        bytes,
    }
}
