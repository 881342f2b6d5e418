//! Weights on their way from pinned host memory into the arena, on a stream of their own, while
//! the step computes on another. Both streams are recorded together: what a recording replays has
//! the same two queues.
//!
//! A copy begins when everything before it on the main stream is done, because its place may have
//! been somebody else's until then; nothing later on the main stream uses that place before it has
//! waited for the copy.

use std::collections::HashMap;
use std::sync::Arc;

use cinch_plan::{Placement, Residence};
use cudarc::driver::{result, sys};

use super::command::HostCopy;
use super::driver::{Context, Event, HostMemory, Stream, failed};
use crate::error::EngineError;

pub(crate) struct Fetching {
    /// By the number of the fetch.
    marks: HashMap<usize, Marks>,
    stream: Stream,
    context: Arc<Context>,
}

struct Marks {
    /// The place is free.
    free: Event,
    /// The copies are done.
    copied: Event,
}

impl Fetching {
    pub fn new(context: &Arc<Context>) -> Result<Self, EngineError> {
        Ok(Self {
            marks: HashMap::new(),
            stream: Stream::new(context)?,
            context: Arc::clone(context),
        })
    }

    /// Makes what a fetch needs, before anything is recorded.
    pub fn make_ready(&mut self, number: usize) -> Result<(), EngineError> {
        let event = || Event::new(&self.context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let marks = Marks {
            free: event()?,
            copied: event()?,
        };
        self.marks.entry(number).or_insert(marks);
        Ok(())
    }

    /// Puts copies behind what is on the main stream, beside what comes next there.
    pub fn begin(
        &self,
        number: usize,
        copies: &[HostCopy],
        host: &HostMemory,
        arena: u64,
        main: &Stream,
    ) -> Result<(), EngineError> {
        let marks = self.marks(number)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: events and streams are live.
        unsafe {
            result::event::record(marks.free.handle, main.handle)
                .and_then(|()| {
                    result::stream::wait_event(self.stream.handle, marks.free.handle, flags)
                })
                .map_err(failed("begin to fetch weights"))?;
        }
        for copy in copies {
            let from = Placement {
                residence: Residence::Host,
                offset: copy.from,
                bytes: copy.bytes,
            };
            // SAFETY: the destination is inside the arena by the plan, which the executor holds
            // against it; `view` checks the source, which is written only while nothing runs, and
            // lives as long as the executor.
            unsafe {
                let from = host.view(from);
                result::memcpy_htod_async(arena + copy.to, from, self.stream.handle)
            }
            .map_err(failed("fetch weights"))?;
        }
        // SAFETY: event and stream are live.
        unsafe { result::event::record(marks.copied.handle, self.stream.handle) }
            .map_err(failed("fetch weights"))
    }

    /// Lets the main stream wait for a fetch.
    pub fn wait(&self, number: usize, main: &Stream) -> Result<(), EngineError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let copied = self.marks(number)?.copied.handle;
        // SAFETY: event and stream are live.
        unsafe { result::stream::wait_event(main.handle, copied, flags) }
            .map_err(failed("wait for weights"))
    }

    fn marks(&self, number: usize) -> Result<&Marks, EngineError> {
        self.marks.get(&number).ok_or_else(|| EngineError::Cuda {
            action: "fetch weights".to_owned(),
            problem: "the fetch was not made ready".to_owned(),
        })
    }
}
