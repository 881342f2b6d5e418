//! A training graph in an arena of its own, filled with reproducible numbers, in single or
//! double precision: the way from a graph through plan and executor to gradients.

use cinch_engine::Executor;
use cinch_graph::{
    Count, DType, Graph, Init, Parameter, Recompute, Storage, Target, TensorId, TrainingGraph,
    differentiate, verify,
};
use cinch_plan::{Options, Plan, num_micro_nodes};

use crate::numbers::{fill_codes, fill_lengths, fill_positions, fill_starts, random};
use crate::shared::{OPTIMIZER, VOCABULARY};

pub struct Planned {
    pub graph: TrainingGraph,
    plan: Plan,
    executor: Executor,
}

impl Planned {
    /// Differentiates, applies the choice, plans, and fills weights and inputs.
    pub fn new(graph: Graph, choice: Recompute) -> Self {
        let graph = differentiate(graph, &OPTIMIZER).unwrap();
        let graph = graph.recompute(choice).unwrap();
        verify(&graph).unwrap();
        let plan = Plan::new(&graph, Options::new(Target::Cpu));
        let executor = Executor::new(plan.arena_bytes, Some(2)).unwrap();
        let mut planned = Self {
            graph,
            plan,
            executor,
        };
        planned.fill();
        planned
    }

    fn fill(&mut self) {
        for (index, parameter) in self.graph.parameters.clone().iter().enumerate() {
            let ty = self.graph.ty(parameter.master);
            if let Storage::Quantised(_) = parameter.storage {
                fill_codes(&self.graph, parameter, &mut |id, bytes| {
                    let place = self.plan.placement(id).unwrap();
                    let memory = self.executor.arena_mut().write::<u8>(place);
                    memory.copy_from_slice(bytes);
                });
                continue;
            }
            let numbers = random(ty.shape.elements(), index as u64 + 1);
            let values = numbers
                .iter()
                .enumerate()
                .map(|(i, r)| match parameter.init {
                    Init::Ones => 1.0 + 0.3 * r,
                    Init::Constant { value } => value + 0.3 * r,
                    Init::LogRange => ((i % ty.width() + 1) as f64).ln() + 0.2 * r,
                    // Time steps around softplus(−1) ≈ 0.3.
                    Init::InverseSoftplus { .. } => 0.5 * r - 1.0,
                    Init::Zeros => 0.3 * r,
                    Init::Normal { .. } | Init::Uniform { .. } => 0.6 * r,
                });
            let values: Vec<f64> = values.map(|v| f64::from(v as f32)).collect();
            self.write(parameter.master, &values);
        }
        let tokens = self.graph.find("tokens").unwrap();
        let targets = self.graph.find("targets").unwrap();
        for (id, seed) in [(tokens, 101), (targets, 102)] {
            let place = self.plan.placement(id).unwrap();
            let values = self.executor.arena_mut().write::<i32>(place);
            let numbers = random(values.len(), seed);
            for (value, r) in values.iter_mut().zip(numbers) {
                *value = ((r + 1.0) / 2.0 * VOCABULARY as f64) as i32;
            }
            if id == targets {
                values[3] = cinch_graph::op::IGNORE_INDEX;
            }
        }
        if let Some(positions) = self.graph.find("positions") {
            let place = self.plan.placement(positions).unwrap();
            let values = self.executor.arena_mut().write::<i32>(place);
            fill_positions(values);
        }
        if let Some(lengths) = self.graph.find("lengths") {
            let place = self.plan.placement(lengths).unwrap();
            let values = self.executor.arena_mut().write::<i32>(place);
            fill_lengths(values, self.graph.ty(tokens).width());
        }
        if let Some(starts) = self.graph.find("starts") {
            let place = self.plan.placement(starts).unwrap();
            let values = self.executor.arena_mut().write::<i32>(place);
            fill_starts(values, self.graph.ty(tokens).width());
        }
        for random in &self.graph.random {
            let place = self.plan.placement(random.id).unwrap();
            let words = [0x1234_5678, -77, 5, 0];
            let state = self.executor.arena_mut().write::<i32>(place);
            state.copy_from_slice(&words);
        }
        let count = self.graph.ty(targets).shape.elements() - 1;
        for term in self.graph.terms.clone() {
            let count = match term.count {
                Count::Targets(_) => count,
                Count::Rows(rows) => rows,
                Count::Batch => 1,
            };
            self.write(term.inputs.inverse_count, &[1.0 / count as f64]);
            self.write(term.inputs.weight, &[term.weight]);
        }
        // A learning rate, and the bias corrections of the first step.
        let scalars = [0.01, 1.0 - OPTIMIZER.beta1, 1.0 - OPTIMIZER.beta2];
        self.write(self.graph.step_scalars, &scalars);
    }

    pub fn read(&self, id: TensorId) -> Vec<f64> {
        let (ty, place) = (self.graph.ty(id), self.plan.placement(id).unwrap());
        let arena = self.executor.arena();
        match ty.dtype {
            DType::F64 => arena.read::<f64>(place).to_vec(),
            _ => arena
                .read::<f32>(place)
                .iter()
                .copied()
                .map(f64::from)
                .collect(),
        }
    }

    pub fn write(&mut self, id: TensorId, values: &[f64]) {
        let (ty, place) = (self.graph.ty(id), self.plan.placement(id).unwrap());
        let arena = self.executor.arena_mut();
        match ty.dtype {
            DType::F64 => arena.write::<f64>(place).copy_from_slice(values),
            _ => {
                for (to, &from) in arena.write::<f32>(place).iter_mut().zip(values) {
                    *to = from as f32;
                }
            }
        }
    }

    /// Changes one number of a tensor in double precision.
    pub fn set(&mut self, id: TensorId, index: usize, value: f64) {
        let place = self.plan.placement(id).unwrap();
        self.executor.arena_mut().write::<f64>(place)[index] = value;
    }

    fn run(&mut self, nodes: std::ops::Range<usize>) {
        let (graph, plan) = (&self.graph, &self.plan);
        self.executor.run(graph, plan, nodes, true).unwrap();
    }

    /// The loss of the forward pass alone.
    pub fn loss(&mut self) -> f64 {
        let is_forward = |node: &cinch_graph::Node| node.phase == cinch_graph::Phase::Forward;
        let forward = self.graph.nodes.iter().take_while(|node| is_forward(node));
        let forward = forward.count();
        self.run(0..forward);
        let terms = self.graph.terms.iter();
        terms
            .map(|term| term.weight * self.read(term.value)[0])
            .sum()
    }

    pub fn trained(&self) -> Vec<Parameter> {
        let parameters = self.graph.parameters.iter();
        parameters.filter(|p| p.is_trained()).cloned().collect()
    }

    pub fn name(&self, parameter: &Parameter) -> String {
        self.graph.tensor(parameter.master).name.clone()
    }

    /// The gradient of every trained parameter, in their order, after one micro batch.
    pub fn gradients(&mut self) -> Vec<Vec<f64>> {
        self.run(0..num_micro_nodes(&self.graph));
        let trained = self.trained();
        trained
            .iter()
            .map(|p| self.read(p.gradient.unwrap()))
            .collect()
    }

    /// Runs the update; the gradient's norm, then every trained parameter with its moments.
    pub fn update(&mut self) -> Vec<(String, Vec<f64>)> {
        self.run(num_micro_nodes(&self.graph)..self.graph.nodes.len());
        let trained = self.trained();
        let updated = trained
            .iter()
            .flat_map(|p| [p.master].into_iter().chain(p.moments.unwrap()));
        [self.graph.gradient_norm]
            .into_iter()
            .chain(updated)
            .map(|id| (self.graph.tensor(id).name.clone(), self.read(id)))
            .collect()
    }
}
