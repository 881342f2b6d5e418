//! Runs the nodes of a planned graph, in order, inside the arena.

use std::ops::Range;

use cinch_graph::op::Op;
use cinch_graph::{DType, Graph, Phase};
use cinch_plan::{Placement, Plan, Residence};
use cinch_ranks::SharedWorld;

use super::collective::{exchange, is_collective};
use super::kernel::scratch;
use super::op::execute;
use super::operands::Operands;
use crate::arena::Arena;
use crate::engine::MicroBatch;
use crate::error::EngineError;

/// The arena, what lies in host memory beside it, and the threads that work in both.
pub struct Executor {
    arena: Arena,
    host: Arena,
    threads: rayon::ThreadPool,
    /// The other ranks, where there are some.
    world: Option<SharedWorld>,
}

impl Executor {
    /// Allocates the arena, and starts as many threads as there are cores unless told.
    pub fn new(arena_bytes: u64, threads: Option<usize>) -> Result<Self, EngineError> {
        Self::with_host(arena_bytes, 0, threads)
    }

    /// As [`Self::new`], with room for what a plan keeps in host memory.
    pub fn with_host(
        arena_bytes: u64,
        host_bytes: u64,
        threads: Option<usize>,
    ) -> Result<Self, EngineError> {
        let threads = threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("cinch-{index}"))
            .start_handler(|_| scratch::reserve())
            .build()
            .map_err(|error| EngineError::Threads {
                threads,
                problem: error.to_string(),
            })?;
        Ok(Self {
            arena: Arena::new(arena_bytes)?,
            host: Arena::new(host_bytes)?,
            threads: pool,
            world: None,
        })
    }

    /// Lets collectives go to the other ranks.
    pub fn connect(&mut self, world: SharedWorld) {
        self.world = Some(world);
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.world.is_some()
    }

    /// Makes whole weights of the parts that ranks have, as the update does.
    pub(crate) fn gather_weights(&mut self, graph: &Graph, plan: &Plan) -> Result<(), EngineError> {
        let nodes = graph.nodes.iter().enumerate();
        let gathers = nodes
            .filter(|(_, node)| node.phase == Phase::Update && matches!(node.op, Op::AllGather(_)));
        let gathers: Vec<usize> = gathers.map(|(index, _)| index).collect();
        for index in gathers {
            self.run(graph, plan, index..index + 1, true)?;
        }
        Ok(())
    }

    pub fn num_threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// The allocation in host memory beside the arena.
    pub fn host(&self) -> &Arena {
        &self.host
    }

    /// The allocation that a place is in.
    pub(crate) fn memory(&self, place: Placement) -> &Arena {
        match place.residence {
            Residence::Arena => &self.arena,
            Residence::Host => &self.host,
        }
    }

    pub(crate) fn memory_mut(&mut self, place: Placement) -> &mut Arena {
        match place.residence {
            Residence::Arena => &mut self.arena,
            Residence::Host => &mut self.host,
        }
    }

    /// Runs something else on the executor's threads.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.threads.install(work)
    }

    /// Runs some of a graph's nodes. In the first micro batch of a step, accumulators start
    /// over; later ones add.
    pub fn run(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        first_micro: bool,
    ) -> Result<(), EngineError> {
        let micro = MicroBatch::of_one(first_micro);
        self.run_observed(graph, plan, nodes, micro, &mut |_, _| {})
    }

    /// As [`Self::run`], calling `after(arena, node)` when a node is done.
    pub fn run_observed(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        micro: MicroBatch,
        after: &mut (dyn FnMut(&mut Arena, usize) + Send),
    ) -> Result<(), EngineError> {
        if !matches!(graph.compute, DType::F32 | DType::F64) {
            return Err(EngineError::Precision {
                dtype: graph.compute,
            });
        }
        let (arena, host, world) = (&mut self.arena, &self.host, &self.world);
        self.threads.install(|| {
            for index in nodes {
                let node = &graph.nodes[index];
                if node.phase == Phase::Exchange && !micro.is_last {
                    continue;
                }
                let operands = Operands {
                    arena,
                    host,
                    graph,
                    plan,
                    node,
                    index,
                    first_micro: micro.is_first,
                };
                match (world, graph.compute) {
                    (Some(world), _) if is_collective(&node.op) => {
                        exchange(&operands, &mut world.lock())?;
                    }
                    (_, DType::F64) => execute::<f64>(&operands)?,
                    (_, _) => execute::<f32>(&operands)?,
                }
                after(arena, index);
            }
            Ok(())
        })
    }
}
