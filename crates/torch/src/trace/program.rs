//! A trace without addresses: what the program asked for, in order. The same program can be run
//! under any settings; what was recorded (addresses, segments) stays beside it for comparison.

use std::collections::HashMap;

use super::{Action, StackId, Trace};
use crate::allocator::{Allocator, AllocatorConfig, BlockId, OutOfMemory, SegmentEvent, Stream};
use crate::snapshot::{Segment, rewind};

/// One request. Allocations are named by their number in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Allocate {
        bytes: u64,
        stream: Stream,
    },
    RequestFree {
        allocation: u32,
    },
    CompleteFree {
        allocation: u32,
    },
    /// `empty_cache()`, or the release before a retry: recorded as segments that were freed.
    ReleaseCached,
}

impl Operation {
    /// Makes the request. `blocks` has the block of each allocation so far, `None` once it is
    /// free. A request that runs out of memory counts as an allocation without a block.
    pub fn run(
        self,
        allocator: &mut Allocator,
        blocks: &mut Vec<Option<BlockId>>,
    ) -> Result<(), OutOfMemory> {
        let block = |allocation: u32| blocks.get(allocation as usize).copied().flatten();
        match self {
            Self::Allocate { bytes, stream } => {
                let block = allocator.allocate(bytes, stream);
                blocks.push(block.as_ref().ok().copied());
                block?;
            }
            Self::RequestFree { allocation } => {
                if let Some(id) = block(allocation).filter(|&id| allocator.is_allocated(id)) {
                    allocator.request_free(id);
                }
            }
            Self::CompleteFree { allocation } => {
                if let Some(id) = block(allocation) {
                    // The request may lie before the recording.
                    if allocator.is_allocated(id) {
                        allocator.request_free(id);
                    }
                    allocator.complete_free(id);
                    blocks[allocation as usize] = None;
                }
            }
            Self::ReleaseCached => allocator.release_cached(),
        }
        Ok(())
    }
}

/// A block that was there before the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Survivor {
    pub bytes: u64,
    pub stream: Stream,
    pub address: u64,
    pub size: u64,
    pub stack: StackId,
}

/// Requests in order, and what was recorded of their effect.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(super) operations: Vec<Operation>,
    /// By allocation: the address it got, if that was recorded.
    pub(super) addresses: Vec<Option<u64>>,
    /// By allocation: who asked.
    pub(super) stacks: Vec<StackId>,
    /// By allocation: who freed it, if it was freed.
    pub(super) free_stacks: Vec<Option<StackId>>,
    /// By event of the trace: how many operations came before it.
    pub(super) event_places: Vec<u32>,
    /// Segment events, each with the number of operations before it.
    pub(super) segment_events: Vec<(u32, SegmentEvent)>,
    /// Where the recording began: what comes before was put there to rebuild the state.
    pub(super) num_prelude: u32,
    /// The segments at the start of the recording, if they are known, and the blocks in them.
    pub(super) initial: Option<Vec<Segment>>,
    pub(super) survivors: Vec<Survivor>,
    /// Frees of blocks that nothing is known of.
    pub(super) num_unknown_frees: u64,
}

impl Program {
    /// Appends a request and returns the number of the allocation.
    pub fn allocate(&mut self, bytes: u64, stream: Stream, address: Option<u64>) -> u32 {
        self.allocate_from(bytes, stream, address, StackId::EMPTY)
    }

    fn allocate_from(
        &mut self,
        bytes: u64,
        stream: Stream,
        address: Option<u64>,
        stack: StackId,
    ) -> u32 {
        self.operations.push(Operation::Allocate { bytes, stream });
        self.addresses.push(address);
        self.stacks.push(stack);
        self.free_stacks.push(None);
        (self.addresses.len() - 1) as u32
    }

    /// Appends the free of a block that no other stream uses.
    pub fn free(&mut self, allocation: u32) {
        self.operations.push(Operation::RequestFree { allocation });
        self.operations.push(Operation::CompleteFree { allocation });
    }

    /// Appends an operation other than an allocation.
    pub(crate) fn push(&mut self, operation: Operation) {
        self.operations.push(operation);
    }

    /// Notes that a segment event was recorded here.
    pub fn recorded(&mut self, event: SegmentEvent) {
        self.segment_events
            .push((self.operations.len() as u32, event));
    }

    /// The recording begins here.
    pub fn end_prelude(&mut self) {
        self.num_prelude = self.operations.len() as u32;
    }

    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    pub fn num_allocations(&self) -> usize {
        self.addresses.len()
    }

    /// Who made an allocation.
    pub fn stack(&self, allocation: u32) -> StackId {
        self.stacks
            .get(allocation as usize)
            .copied()
            .unwrap_or(StackId::EMPTY)
    }

    /// Who freed an allocation; `None` if it lives on.
    pub fn free_stack(&self, allocation: u32) -> Option<StackId> {
        self.free_stacks.get(allocation as usize).copied().flatten()
    }

    /// The operation that an event of the trace became, or the next one after it.
    pub fn place_of_event(&self, event: usize) -> usize {
        self.event_places
            .get(event)
            .map_or(self.operations.len(), |&place| place as usize)
    }

    /// The segments at the start of the recording, if they are known.
    pub fn initial(&self) -> Option<&[Segment]> {
        self.initial.as_deref()
    }

    /// Operations before this rebuild the state at the start of the recording.
    pub fn num_prelude(&self) -> usize {
        self.num_prelude as usize
    }

    /// Allocations 0 to this were alive when the recording began.
    pub fn num_survivors(&self) -> usize {
        self.survivors.len()
    }

    /// Frees whose block was allocated neither in the trace nor before it, as far as is known.
    pub fn num_unknown_frees(&self) -> u64 {
        self.num_unknown_frees
    }

    /// The program of a trace. With the segments at its *end*, the state at its start follows by
    /// going back over the events, and the replay begins there. Without them, blocks that are
    /// freed but were not allocated must have been there, and the rest of the start is unknown.
    ///
    /// `config` is what the trace was recorded with.
    pub fn from_trace(
        trace: &Trace,
        segments_at_end: Option<&[Segment]>,
        config: &AllocatorConfig,
    ) -> Self {
        let mut program = Self::default();
        let (initial, survivors) = match segments_at_end {
            Some(segments) => {
                let start = rewind(trace, segments, config);
                let survivors = start
                    .iter()
                    .flat_map(|segment| {
                        segment
                            .blocks
                            .iter()
                            .filter(|block| block.is_live())
                            .map(|block| Survivor {
                                bytes: block.requested,
                                stream: segment.stream,
                                address: block.address,
                                size: block.size,
                                stack: block.stack,
                            })
                    })
                    .collect();
                (Some(start), survivors)
            }
            None => (None, freed_but_never_allocated(trace)),
        };
        let mut living: HashMap<u64, u32> = HashMap::new();
        for survivor in &survivors {
            let Survivor {
                bytes,
                stream,
                address,
                stack,
                ..
            } = *survivor;
            let allocation = program.allocate_from(bytes, stream, Some(address), stack);
            living.insert(address, allocation);
        }
        program.initial = initial;
        program.survivors = survivors;
        program.end_prelude();
        program.append(trace, &mut living);
        program
    }

    fn append(&mut self, trace: &Trace, living: &mut HashMap<u64, u32>) {
        // A free without a completion is one event in old traces ("free") and is complete.
        let has_completions = trace
            .events
            .iter()
            .any(|event| event.action == Action::FreeCompleted);
        let mut pending: HashMap<u64, u32> = HashMap::new();
        let mut releasing = false;
        self.event_places.reserve(trace.events.len());
        for event in &trace.events {
            self.event_places.push(self.operations.len() as u32);
            let address = event.address;
            let bytes = event.size;
            let was_releasing = releasing;
            releasing = matches!(event.action, Action::SegmentFree | Action::SegmentUnmap);
            if releasing && !was_releasing {
                self.operations.push(Operation::ReleaseCached);
            }
            match event.action {
                Action::Alloc => {
                    let stream = trace.streams[usize::from(event.stream)];
                    let allocation = self.allocate_from(bytes, stream, Some(address), event.stack);
                    living.insert(address, allocation);
                }
                Action::FreeRequested => match living.remove(&address) {
                    Some(allocation) => {
                        self.free_stacks[allocation as usize] = Some(event.stack);
                        if has_completions {
                            self.operations.push(Operation::RequestFree { allocation });
                            pending.insert(address, allocation);
                        } else {
                            self.free(allocation);
                        }
                    }
                    None => self.num_unknown_frees += 1,
                },
                Action::FreeCompleted => {
                    // The request may lie before the recording.
                    if let Some(allocation) = pending.remove(&address) {
                        self.operations.push(Operation::CompleteFree { allocation });
                    } else if let Some(allocation) = living.remove(&address) {
                        self.free_stacks[allocation as usize] = Some(event.stack);
                        self.free(allocation);
                    } else {
                        self.num_unknown_frees += 1;
                    }
                }
                Action::SegmentAlloc => self.recorded(SegmentEvent::Alloc { address, bytes }),
                Action::SegmentFree => self.recorded(SegmentEvent::Free { address, bytes }),
                Action::SegmentMap => self.recorded(SegmentEvent::Map { address, bytes }),
                Action::SegmentUnmap => self.recorded(SegmentEvent::Unmap { address, bytes }),
                Action::OutOfMemory | Action::Other => {}
            }
        }
    }
}

/// Blocks that the trace frees before it allocates anything at their address, by address.
fn freed_but_never_allocated(trace: &Trace) -> Vec<Survivor> {
    let mut seen: HashMap<u64, bool> = HashMap::new();
    let mut survivors = Vec::new();
    for event in &trace.events {
        match event.action {
            Action::Alloc => {
                seen.insert(event.address, true);
            }
            Action::FreeRequested | Action::FreeCompleted => {
                if let std::collections::hash_map::Entry::Vacant(entry) = seen.entry(event.address)
                {
                    entry.insert(false);
                    survivors.push(Survivor {
                        bytes: event.size,
                        stream: trace.streams[usize::from(event.stream)],
                        address: event.address,
                        size: event.size,
                        stack: StackId::EMPTY,
                    });
                }
            }
            _ => {}
        }
    }
    survivors.sort_by_key(|survivor| survivor.address);
    survivors
}
