//! What nodes run on: a card, or the host in its place.

use std::ops::Range;

use cinch_engine::{Engine, EngineOptions, Part};
use cinch_graph::{Graph, Target};
use cinch_plan::{Placement, Plan};

pub trait Device {
    /// Makes some nodes ready, of a first micro batch or a later one, which adds to what is there.
    /// This may overwrite memory.
    fn prepare(&mut self, graph: &Graph, plan: &Plan, nodes: Range<usize>, is_first: bool)
    -> usize;

    /// Runs what was made ready by this number.
    fn run(&mut self, graph: &Graph, plan: &Plan, part: usize);

    fn write(&mut self, place: Placement, bytes: &[u8]);

    fn read(&mut self, place: Placement) -> Vec<u8>;
}

/// The GPU of this machine.
pub struct OnCard {
    engine: Engine,
    parts: Vec<Part>,
}

impl OnCard {
    /// With one algorithm a product instead of all that might be fast, where nothing is timed.
    pub fn new(arena_bytes: u64, deterministic: bool) -> Self {
        let options = EngineOptions {
            deterministic,
            ..EngineOptions::default()
        };
        Self {
            engine: Engine::new(Target::Cuda, arena_bytes, options).unwrap(),
            parts: Vec::new(),
        }
    }
}

impl Device for OnCard {
    fn prepare(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        is_first: bool,
    ) -> usize {
        let part = self.engine.prepare(graph, plan, nodes, is_first).unwrap();
        self.parts.push(part);
        self.parts.len() - 1
    }

    fn run(&mut self, graph: &Graph, plan: &Plan, part: usize) {
        self.engine.run(graph, plan, &self.parts[part]).unwrap();
        self.engine.synchronize().unwrap();
    }

    fn write(&mut self, place: Placement, bytes: &[u8]) {
        self.engine.write(place, bytes).unwrap();
        self.engine.synchronize().unwrap();
    }

    fn read(&mut self, place: Placement) -> Vec<u8> {
        self.engine.bytes(place).unwrap().into_owned()
    }
}
