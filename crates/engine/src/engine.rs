//! One face for both executors: what the training loop needs of them and nothing more.

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, Instant};

use cinch_graph::{Graph, Target};
use cinch_plan::{Placement, Plan};
use cinch_ranks::SharedWorld;

use crate::arena::{Arena, Element};
use crate::cpu::executor::Executor;
use crate::cuda::{CudaExecutor, ProgramId};
use crate::error::EngineError;

/// Is told how long a node took, by its op and its name.
pub type Told<'a> = dyn FnMut(&'static str, &str, Duration) + Send + 'a;

/// How an engine is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineOptions {
    /// CPU threads; all cores where not given.
    pub threads: Option<usize>,
    /// Let the GPU's matrix units round single-precision operands to tf32.
    pub tf32: bool,
    /// Choose the same algorithms every time, even if others are faster.
    pub deterministic: bool,
    /// Which of the machine's GPUs.
    pub device: usize,
    /// How many ranks have it besides this one.
    pub other_ranks: usize,
}

/// An executor with its arena.
pub enum Engine {
    Cpu(Executor),
    Cuda(Box<CudaExecutor>),
}

/// Where a micro batch stands in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Accumulators start over.
    pub is_first: bool,
    /// What ranks exchange once a step is exchanged.
    pub is_last: bool,
}

impl MicroBatch {
    /// The only one, or one of several without anything that waits for the last.
    pub fn of_one(is_first: bool) -> Self {
        Self {
            is_first,
            is_last: true,
        }
    }
}

/// A part of a graph that is run at once.
#[derive(Clone, Debug)]
pub struct Part {
    nodes: Range<usize>,
    micro: MicroBatch,
    recorded: Option<ProgramId>,
}

impl Engine {
    pub fn new(
        target: Target,
        arena_bytes: u64,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::with_host(target, arena_bytes, 0, options)
    }

    /// As [`Self::new`], with room for what a plan keeps in host memory.
    pub fn with_host(
        target: Target,
        arena_bytes: u64,
        host_bytes: u64,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        Ok(match target {
            Target::Cpu => Self::Cpu(Executor::with_host(
                arena_bytes,
                host_bytes,
                options.threads,
            )?),
            Target::Cuda => {
                let executor = CudaExecutor::with_host(arena_bytes, host_bytes, options)?;
                Self::Cuda(Box::new(executor))
            }
        })
    }

    /// The host's arena, where the executor has one.
    pub fn arena(&self) -> Option<&Arena> {
        match self {
            Self::Cpu(executor) => Some(executor.arena()),
            Self::Cuda(_) => None,
        }
    }

    /// The CPU executor, where that is what runs.
    pub fn cpu(&self) -> Option<&Executor> {
        match self {
            Self::Cpu(executor) => Some(executor),
            Self::Cuda(_) => None,
        }
    }

    /// The CUDA executor, where that is what runs.
    pub fn cuda(&self) -> Option<&CudaExecutor> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(executor) => Some(executor),
        }
    }

    /// What it runs on, for people.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(executor) => match executor.num_threads() {
                1 => "1 thread".to_owned(),
                threads => format!("{threads} threads"),
            },
            Self::Cuda(executor) => executor.info().name.clone(),
        }
    }

    /// Connects the other ranks of the run, before anything that needs them is made ready.
    pub fn connect(&mut self, world: SharedWorld) -> Result<(), EngineError> {
        match self {
            Self::Cpu(executor) => {
                executor.connect(world);
                Ok(())
            }
            Self::Cuda(executor) => executor.connect(&mut world.lock()),
        }
    }

    /// Whether collectives can run.
    fn is_connected(&self) -> bool {
        match self {
            Self::Cpu(executor) => executor.is_connected(),
            Self::Cuda(executor) => executor.is_connected(),
        }
    }

    /// Makes some of a graph's nodes ready to run; on a GPU, compiles and records them. What is in
    /// the arena may be lost: weights are written afterwards.
    pub fn prepare(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        first_micro: bool,
    ) -> Result<Part, EngineError> {
        self.prepare_micro(graph, plan, nodes, MicroBatch::of_one(first_micro))
    }

    /// As [`Self::prepare`], for a micro batch that may be followed by others.
    pub fn prepare_micro(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        micro: MicroBatch,
    ) -> Result<Part, EngineError> {
        let mut exchanges = graph.nodes[nodes.clone()].iter();
        let exchange = exchanges.find(|node| graph.wire(node).is_some());
        if let Some(node) = exchange.filter(|_| !self.is_connected()) {
            return Err(EngineError::NoRanks {
                op: node.op.name(),
                node: node.name.clone(),
            });
        }
        let recorded = match self {
            Self::Cpu(_) => None,
            Self::Cuda(executor) => Some(executor.prepare(graph, plan, nodes.clone(), micro)?),
        };
        Ok(Part {
            nodes,
            micro,
            recorded,
        })
    }

    /// Runs a part of `graph`, which is the one it was prepared from.
    pub fn run(&mut self, graph: &Graph, plan: &Plan, part: &Part) -> Result<(), EngineError> {
        match (self, part.recorded) {
            (Self::Cpu(executor), _) => {
                let nodes = part.nodes.clone();
                executor.run_observed(graph, plan, nodes, part.micro, &mut |_, _| {})
            }
            (Self::Cuda(executor), Some(program)) => executor.run(program),
            (Self::Cuda(_), None) => Ok(()),
        }
    }

    /// As [`Self::run`] on the CPU, calling `after(arena, node)` when a node is done. A GPU runs
    /// the whole part at once and has no such moments.
    pub fn run_observed(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        part: &Part,
        after: &mut (dyn FnMut(&mut Arena, usize) + Send),
    ) -> Result<(), EngineError> {
        match self {
            Self::Cpu(executor) => {
                executor.run_observed(graph, plan, part.nodes.clone(), part.micro, after)
            }
            Self::Cuda(_) => self.run(graph, plan, part),
        }
    }

    /// As [`Self::run`], node by node, telling how long each took.
    pub fn run_traced(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        part: &Part,
        told: &mut Told<'_>,
    ) -> Result<(), EngineError> {
        match (self, part.recorded) {
            (Self::Cpu(executor), _) => {
                let mut since = Instant::now();
                let mut after = |_: &mut Arena, node: usize| {
                    let node = &graph.nodes[node];
                    told(node.op.name(), &node.name, since.elapsed());
                    since = Instant::now();
                };
                let nodes = part.nodes.clone();
                executor.run_observed(graph, plan, nodes, part.micro, &mut after)
            }
            (Self::Cuda(executor), Some(program)) => executor.run_traced(program, told),
            (Self::Cuda(_), None) => Ok(()),
        }
    }

    /// Waits until everything that was started is done.
    pub fn synchronize(&self) -> Result<(), EngineError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(executor) => executor.synchronize(),
        }
    }

    /// Fills a tensor.
    pub fn write<T: Element>(&mut self, place: Placement, values: &[T]) -> Result<(), EngineError> {
        match self {
            Self::Cpu(executor) => {
                let memory = executor.memory_mut(place);
                memory.write::<T>(place).copy_from_slice(values);
                Ok(())
            }
            Self::Cuda(executor) => executor.write(place, as_bytes(values)),
        }
    }

    /// Starts sending the next content of a batch tensor while the last is in use; it may be
    /// shorter than the place, which is the same every time. On the CPU there is nothing to send.
    pub fn stage<T: Element>(&mut self, place: Placement, values: &[T]) -> Result<(), EngineError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(executor) => executor.stage(place, as_bytes(values)),
        }
    }

    /// Puts what was staged in its place: `values`, which are the ones given to
    /// [`Self::stage`].
    pub fn commit<T: Element>(
        &mut self,
        place: Placement,
        values: &[T],
    ) -> Result<(), EngineError> {
        match self {
            Self::Cpu(_) => {
                let bytes = size_of_val(values) as u64;
                self.write(Placement { bytes, ..place }, values)
            }
            Self::Cuda(executor) => executor.commit(place),
        }
    }

    /// Fills a tensor that `fill` sees in host memory: where it is, or a copy of that size.
    pub fn write_with<T: Element + Default, R>(
        &mut self,
        place: Placement,
        fill: impl FnOnce(&mut [T]) -> R,
    ) -> Result<R, EngineError> {
        match self {
            Self::Cpu(executor) => Ok(fill(executor.memory_mut(place).write::<T>(place))),
            Self::Cuda(executor) => {
                let mut values = vec![T::default(); place.bytes as usize / size_of::<T>()];
                let filled = fill(&mut values);
                executor.write(place, as_bytes(&values))?;
                executor.synchronize()?;
                Ok(filled)
            }
        }
    }

    /// As [`Self::write_with`], in pieces of whole units of `unit` elements; `fill` is told the
    /// first element of each. Where the tensor is not in host memory, a piece of at most
    /// `piece_bytes`, or one unit, is; where it is, it is one piece.
    pub fn write_pieces<T: Element + Default, E>(
        &mut self,
        place: Placement,
        unit: usize,
        piece_bytes: usize,
        mut fill: impl FnMut(usize, &mut [T]) -> Result<(), E>,
    ) -> Result<Result<(), E>, EngineError> {
        let unit_bytes = (unit * size_of::<T>()).max(1);
        let largest = match self {
            Self::Cpu(_) => place.bytes,
            Self::Cuda(_) => ((piece_bytes / unit_bytes).max(1) * unit_bytes) as u64,
        };
        for piece in pieces(place, largest) {
            let first = (piece.offset - place.offset) as usize / size_of::<T>();
            let filled = self.write_with(piece, |values: &mut [T]| fill(first, values))?;
            if filled.is_err() {
                return Ok(filled);
            }
        }
        Ok(Ok(()))
    }

    /// Shows a tensor's bytes in order, in pieces of at most `piece_bytes`: where they are, or
    /// copies of which there is one at a time.
    pub fn read_pieces<E>(
        &self,
        place: Placement,
        piece_bytes: usize,
        mut show: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Result<(), E>, EngineError> {
        let mut copy = Vec::new();
        for piece in pieces(place, piece_bytes as u64) {
            let shown = match self {
                Self::Cpu(executor) => show(executor.memory(piece).read(piece)),
                Self::Cuda(executor) => {
                    copy.resize(piece.bytes as usize, 0);
                    executor.read(piece, &mut copy)?;
                    show(&copy)
                }
            };
            if shown.is_err() {
                return Ok(shown);
            }
        }
        Ok(Ok(()))
    }

    /// A tensor's bytes: where they are, or a copy of them.
    pub fn bytes(&self, place: Placement) -> Result<Cow<'_, [u8]>, EngineError> {
        match self {
            Self::Cpu(executor) => Ok(Cow::Borrowed(executor.memory(place).read(place))),
            Self::Cuda(executor) => {
                let mut bytes = vec![0; place.bytes as usize];
                executor.read(place, &mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    /// The first number of a small result.
    pub fn scalar(&self, place: Placement) -> Result<f32, EngineError> {
        match self {
            Self::Cpu(executor) => Ok(executor.memory(place).read::<f32>(place)[0]),
            Self::Cuda(executor) => {
                let place = Placement {
                    bytes: size_of::<f32>() as u64,
                    ..place
                };
                let mut bytes = [0; size_of::<f32>()];
                executor.read(place, &mut bytes)?;
                Ok(f32::from_ne_bytes(bytes))
            }
        }
    }

    /// After weights were written: whatever is derived from them is made anew, by all ranks
    /// together where each has a part of them.
    pub fn refresh(&mut self, graph: &Graph, plan: &Plan) -> Result<(), EngineError> {
        match self {
            Self::Cpu(executor) => executor.gather_weights(graph, plan),
            Self::Cuda(executor) => executor.refresh_copies(graph, plan),
        }
    }
}

/// A place cut into parts of at most `largest` bytes.
fn pieces(place: Placement, largest: u64) -> impl Iterator<Item = Placement> {
    let largest = largest.max(1);
    (0..place.bytes.div_ceil(largest)).map(move |number| {
        let start = number * largest;
        Placement {
            offset: place.offset + start,
            bytes: largest.min(place.bytes - start),
            ..place
        }
    })
}

fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements have no padding by the contract of `Element`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
