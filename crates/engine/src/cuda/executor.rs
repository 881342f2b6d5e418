//! Runs planned graphs on a GPU: lowered once, recorded as CUDA graphs, replayed.

mod choosing;
mod issuing;
mod loading;
mod rate;
mod timed;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cinch_graph::op::Op;
use cinch_graph::{DType, Graph, Phase};
use cinch_plan::{Placement, Plan, Residence};
use cinch_ranks::World;
use cudarc::driver::{result, sys};

use self::choosing::{JoinedKey, WayKey};
use self::issuing::no_host;
pub use self::rate::matrix_rate;
use super::beside::Beside;
use super::blas::Blas;
use super::command::{Argument, Command, Generated, Kernel, Lane, LaunchShape};
use super::driver::{
    Context, DeviceInfo, DeviceMemory, HostMemory, Module, Replay, Stream, failed,
};
use super::lowering::Card;
use super::nccl::Nccl;
use super::op::{COPY_TO_REAL, Lowered, lower_all};
use super::staging::Staging;
use super::timing::Stopwatch;
use crate::engine::{EngineOptions, MicroBatch, Told};
use crate::error::EngineError;

/// A recorded part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramId(usize);

/// The commands of a part of a step, by node, and their recording.
struct Program {
    nodes: Vec<Lowered>,
    dtype: DType,
    replay: Replay,
}

/// A card with the arena in its memory.
pub struct CudaExecutor {
    // Dropped in this order: what lives in the context before the context.
    programs: Vec<Program>,
    /// The other ranks, where there are some.
    nccl: Option<Nccl>,
    blas: Blas,
    /// Of joined products that were timed, the way that was faster than one by one.
    joined: HashMap<JoinedKey, Option<usize>>,
    /// Which of several ways is taken, by number.
    ways: HashMap<Vec<WayKey>, usize>,
    functions: HashMap<(Kernel, DType), sys::CUfunction>,
    modules: HashMap<(&'static str, DType), Module>,
    generated_functions: HashMap<(Generated, DType), sys::CUfunction>,
    generated_modules: HashMap<(Arc<str>, DType), Module>,
    staging: Staging,
    fetches: Beside,
    stores: Beside,
    exchanges: Beside,
    arena: DeviceMemory,
    /// What the plan keeps in host memory.
    host: Option<HostMemory>,
    stream: Stream,
    context: Arc<Context>,
    /// Free memory before the context existed is not to be had; what it took by itself is the
    /// difference between total and free right after its creation.
    context_bytes: u64,
    /// The same after the arena was allocated.
    allocated_bytes: u64,
    network_bytes: u64,
    other_ranks: usize,
}

// SAFETY: what is inside belongs to the context, not to a thread. Every public call that reaches
// the driver binds the context first, and so does `drop`.
unsafe impl Send for CudaExecutor {}

impl Drop for CudaExecutor {
    /// What is dropped after this needs the context on this thread, and memory that nothing on
    /// the device uses any more. A failure has nobody to be told to.
    fn drop(&mut self) {
        let _ = self.synchronize();
    }
}

/// The memory that a plan's places are in.
#[derive(Clone, Copy, Debug)]
struct Memory {
    arena_bytes: u64,
    host_bytes: u64,
}

impl Memory {
    /// Whether all places of a plan are inside: commands are issued without a look at each.
    fn holds(self, plan: Memory) -> Result<(), EngineError> {
        for (memory, needed, allocated) in [
            ("GPU memory", plan.arena_bytes, self.arena_bytes),
            ("host memory", plan.host_bytes, self.host_bytes),
        ] {
            if needed > allocated {
                return Err(EngineError::OtherPlan {
                    memory,
                    needed,
                    allocated,
                });
            }
        }
        Ok(())
    }
}

impl CudaExecutor {
    /// Opens the card and allocates the arena.
    pub fn new(arena_bytes: u64, options: EngineOptions) -> Result<Self, EngineError> {
        Self::with_host(arena_bytes, 0, options)
    }

    /// As [`Self::new`], with pinned memory of the host beside the arena.
    pub fn with_host(
        arena_bytes: u64,
        host_bytes: u64,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let context = Context::new(options.device)?;
        let (free, total) = context.memory()?;
        let context_bytes = total - free;
        let stream = Stream::new(&context)?;
        let arena = DeviceMemory::new(&context, arena_bytes.max(256))?;
        let host = HostMemory::new(&context, host_bytes)?;
        let (free, total) = context.memory()?;
        Ok(Self {
            programs: Vec::new(),
            nccl: None,
            blas: Blas::new(options)?,
            joined: HashMap::new(),
            ways: HashMap::new(),
            functions: HashMap::new(),
            modules: HashMap::new(),
            generated_functions: HashMap::new(),
            generated_modules: HashMap::new(),
            staging: Staging::new(&context)?,
            fetches: Beside::new(&context)?,
            stores: Beside::new(&context)?,
            exchanges: Beside::new(&context)?,
            arena,
            host,
            stream,
            context,
            context_bytes,
            allocated_bytes: total - free,
            network_bytes: 0,
            other_ranks: options.other_ranks,
        })
    }

    /// Connects the other ranks of the run, which do the same at the same time.
    pub fn connect(&mut self, world: &mut World) -> Result<(), EngineError> {
        let before = self.used_bytes()?;
        self.nccl = Some(Nccl::connect(&self.context, world)?);
        self.network_bytes = self.used_bytes()?.saturating_sub(before);
        Ok(())
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.nccl.is_some()
    }

    /// What lowering knows of it.
    pub fn card(&self) -> Card {
        Card {
            rank: self.nccl.as_ref().map_or(0, Nccl::rank),
            ..self.context.info.card()
        }
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.context.info
    }

    /// What the device has lost to this process's context before the arena, as the driver shows
    /// it (other processes' memory included).
    pub fn context_bytes(&self) -> u64 {
        self.context_bytes
    }

    /// Used bytes of the whole card right after the arena was allocated.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    pub fn arena_bytes(&self) -> u64 {
        self.arena.bytes
    }

    /// What the card has lost while the other ranks were connected. Where ranks share the card,
    /// what they took at the same time is in it.
    pub fn network_bytes(&self) -> u64 {
        self.network_bytes
    }

    /// Used bytes of the whole card.
    pub fn used_bytes(&self) -> Result<u64, EngineError> {
        self.context.bind()?;
        let (free, total) = self.context.memory()?;
        Ok(total - free)
    }

    /// This rank's part of them: ranks that share a card are alike.
    pub fn own_used_bytes(&self) -> Result<u64, EngineError> {
        Ok(self.used_bytes()? / (1 + self.other_ranks as u64))
    }

    /// How many ranks have the card besides this one.
    pub fn other_ranks(&self) -> usize {
        self.other_ranks
    }

    /// Lowers, compiles and records some of a graph's nodes. Products are timed on the way, so
    /// what is in the arena does not outlast it.
    pub fn prepare(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        micro: MicroBatch,
    ) -> Result<ProgramId, EngineError> {
        self.check(plan)?;
        self.context.bind()?;
        let dtype = graph.compute;
        let lowered = lower_all(graph, plan, nodes, micro, self.card());
        let commands = lowered.iter().flat_map(|node| &node.commands);
        self.compile_all(commands, dtype)?;
        for Lowered {
            op, node, commands, ..
        } in &lowered
        {
            for command in commands {
                self.make_ready(command, dtype)
                    .map_err(|error| named(op, node, error))?;
            }
        }
        let replay = Replay::capture(&self.stream, || {
            for Lowered {
                op, node, commands, ..
            } in &lowered
            {
                for command in commands {
                    self.issue(command, dtype, &self.stream)
                        .map_err(|error| named(op, node, error))?;
                }
            }
            Ok(())
        })?;
        self.programs.push(Program {
            nodes: lowered,
            dtype,
            replay,
        });
        Ok(ProgramId(self.programs.len() - 1))
    }

    /// Refuses a plan of other memory than was allocated.
    fn check(&self, plan: &Plan) -> Result<(), EngineError> {
        let memory = Memory {
            arena_bytes: self.arena.bytes,
            host_bytes: self.host.as_ref().map_or(0, |host| host.bytes),
        };
        memory.holds(Memory {
            arena_bytes: plan.arena_bytes,
            host_bytes: plan.host_bytes,
        })
    }

    /// Loads the kernel or chooses the algorithm that a command needs.
    fn make_ready(&mut self, command: &Command, dtype: DType) -> Result<(), EngineError> {
        match command {
            Command::Launch { kernel, shape, .. } | Command::LaunchTable { kernel, shape, .. } => {
                self.load(*kernel, dtype, shape)
            }
            Command::LaunchGenerated { kernel, .. } => self.load_generated(kernel, dtype),
            Command::Product(product) => self.choose_algorithms(&[*product], dtype),
            Command::Products {
                joined,
                heads,
                products,
                tails,
            } => self.choose(*joined, (heads, products, tails), dtype),
            Command::Ways(ways) => self.choose_way(ways, dtype),
            Command::Beside {
                lane,
                number,
                commands,
            } => {
                self.lane_mut(*lane).make_ready(*number)?;
                let mut commands = commands.iter();
                commands.try_for_each(|command| self.make_ready(command, dtype))
            }
            // The first time, NCCL connects what it has not connected yet, which is not recorded.
            Command::Exchange(_) => {
                let before = self.used_bytes()?;
                self.issue(command, dtype, &self.stream)?;
                self.stream.synchronize()?;
                self.network_bytes += self.used_bytes()?.saturating_sub(before);
                Ok(())
            }
            Command::Fetch(_)
            | Command::Store(_)
            | Command::Clear { .. }
            | Command::Copy { .. }
            | Command::Await { .. } => Ok(()),
        }
    }

    /// What runs beside the step.
    fn lane(&self, lane: Lane) -> &Beside {
        match lane {
            Lane::Fetches => &self.fetches,
            Lane::Stores => &self.stores,
            Lane::Exchanges => &self.exchanges,
        }
    }

    fn lane_mut(&mut self, lane: Lane) -> &mut Beside {
        match lane {
            Lane::Fetches => &mut self.fetches,
            Lane::Stores => &mut self.stores,
            Lane::Exchanges => &mut self.exchanges,
        }
    }

    /// Replays a recorded part. Returns at once; reads wait for it.
    pub fn run(&mut self, program: ProgramId) -> Result<(), EngineError> {
        self.context.bind()?;
        self.programs[program.0].replay.launch(&self.stream)
    }

    /// Runs a recorded part node by node, telling how long each took on the device. A device
    /// error then names the op.
    pub fn run_traced(
        &mut self,
        program: ProgramId,
        told: &mut Told<'_>,
    ) -> Result<(), EngineError> {
        self.context.bind()?;
        let stopwatch = Stopwatch::new(&self.stream)?;
        let program = &self.programs[program.0];
        for Lowered {
            op, node, commands, ..
        } in &program.nodes
        {
            let issue = |command| self.issue(command, program.dtype, &self.stream);
            let time = stopwatch
                .time(&self.stream, || commands.iter().try_for_each(issue))
                .map_err(|error| named(op, node, error))?;
            told(op, node, time);
        }
        Ok(())
    }

    pub fn synchronize(&self) -> Result<(), EngineError> {
        self.context.bind()?;
        self.stream.synchronize()
    }

    /// Copies from the arena or from host memory, after what was started before is done.
    pub fn read(&self, place: Placement, into: &mut [u8]) -> Result<(), EngineError> {
        if place.residence == Residence::Host {
            self.synchronize()?;
            let host = self.host.as_ref().ok_or_else(no_host)?;
            // SAFETY: the stream is done, and nothing is put on it while this borrow lasts.
            into.copy_from_slice(unsafe { host.view(place) });
            return Ok(());
        }
        assert!(place.end() <= self.arena.bytes && into.len() as u64 == place.bytes);
        self.synchronize()?;
        // SAFETY: inside the arena by the assertion.
        unsafe { result::memcpy_dtoh_sync(into, self.arena.address + place.offset) }
            .map_err(failed("read from the GPU"))
    }

    /// Copies into the arena or into host memory, after what was started before is done.
    pub fn write(&mut self, place: Placement, from: &[u8]) -> Result<(), EngineError> {
        if place.residence == Residence::Host {
            self.synchronize()?;
            let host = self.host.as_mut().ok_or_else(no_host)?;
            // SAFETY: as in `read`.
            unsafe { host.view_mut(place) }.copy_from_slice(from);
            return Ok(());
        }
        assert!(place.end() <= self.arena.bytes && from.len() as u64 == place.bytes);
        self.context.bind()?;
        // SAFETY: inside the arena by the assertion; the copy is ordered on the stream and
        // pageable source memory is staged before the call returns.
        unsafe {
            result::memcpy_htod_async(self.arena.address + place.offset, from, self.stream.handle)
        }
        .map_err(failed("write to the GPU"))
    }

    /// Starts sending the next content of a batch tensor, while the last is still in use.
    pub fn stage(&mut self, place: Placement, from: &[u8]) -> Result<(), EngineError> {
        self.context.bind()?;
        self.staging.stage(&self.arena, place, from)
    }

    /// Puts staged content in its place, once what was started before is done with the last.
    pub fn commit(&mut self, place: Placement) -> Result<(), EngineError> {
        self.context.bind()?;
        self.staging.commit(&self.arena, place, &self.stream)
    }

    /// Makes the compute copies of all weights anew, after the masters were written.
    pub fn refresh_copies(&mut self, graph: &Graph, plan: &Plan) -> Result<(), EngineError> {
        self.check(plan)?;
        self.context.bind()?;
        for parameter in &graph.parameters {
            // What is frozen has no copy: codes become numbers only while they are read.
            if parameter.compute == parameter.master || !parameter.is_trained() {
                continue;
            }
            let at = |id| plan.placement(id).unwrap_or(Placement::EMPTY).offset;
            let elements = graph.ty(parameter.master).shape.elements();
            // Of which a rank has a part, it is gathered.
            if graph.ty(parameter.compute).shape.elements() != elements {
                continue;
            }
            let command = Command::Launch {
                kernel: COPY_TO_REAL,
                shape: LaunchShape::linear(elements.div_ceil(1024).min(4096), 256),
                arguments: vec![
                    Argument::Address(at(parameter.master)),
                    Argument::Address(at(parameter.compute)),
                    Argument::U64(elements as u64),
                ],
            };
            self.make_ready(&command, graph.compute)?;
            self.issue(&command, graph.compute, &self.stream)?;
        }
        for (index, node) in graph.nodes.iter().enumerate() {
            if node.phase != Phase::Update || !matches!(node.op, Op::AllGather(_)) {
                continue;
            }
            let micro = MicroBatch::of_one(true);
            for lowered in lower_all(graph, plan, index..index + 1, micro, self.card()) {
                for command in &lowered.commands {
                    // An exchange is made ready by being run.
                    self.make_ready(command, graph.compute)?;
                    self.issue(command, graph.compute, &self.stream)?;
                }
            }
        }
        self.stream.synchronize()
    }
}

fn named(op: &'static str, node: &str, error: EngineError) -> EngineError {
    EngineError::Op {
        op,
        node: node.to_owned(),
        problem: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_other_memory_is_refused() {
        let memory = |arena_bytes, host_bytes| Memory {
            arena_bytes,
            host_bytes,
        };
        assert!(memory(100, 10).holds(memory(100, 10)).is_ok());
        for (plan, part) in [
            (memory(101, 0), "101 bytes of GPU memory"),
            (memory(1, 11), "11 bytes of host memory"),
        ] {
            let message = memory(100, 10).holds(plan).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        // What passed an address counted from zero before.
        assert!(memory(100, 0).holds(memory(100, 1)).is_err());
    }
}
