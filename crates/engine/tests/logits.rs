//! The two graphs of a model that train nothing: logits for generation, and the loss of an
//! evaluation, which are checked against one another.

use cinch_architecture::{Architecture, Gpt2, Mamba};
use cinch_engine::Executor;
use cinch_graph::op::IGNORE_INDEX;
use cinch_graph::{DType, Graph, Target};
use cinch_model::{Build, Purpose, build, input};
use cinch_plan::{Options, Plan};

const BATCH: usize = 3;
const SEQ: usize = 13;
const VOCABULARY: usize = 17;
/// The position of each sequence whose logits are asked for: first, inside, last.
const POSITIONS: [usize; BATCH] = [0, 7, SEQ - 1];

/// Whole sequences, which nothing comes before.
const GENERATE: Purpose = Purpose::Generate {
    context: SEQ,
    longest_run: SEQ,
};

fn models() -> [Architecture; 2] {
    let mamba = Mamba {
        width: 11,
        layers: 2,
        states: 4,
        expansion: 2,
        convolution: 4,
        dropout: 0.2,
        positions: SEQ as u64,
        vocabulary: VOCABULARY as u64,
        scan_chunk: 5,
    };
    let gpt2 = Gpt2 {
        width: 10,
        layers: 2,
        heads: 2,
        residual_dropout: 0.2,
        positions: SEQ as u64,
        vocabulary: VOCABULARY as u64,
        ..Gpt2::default()
    };
    [Architecture::Mamba(mamba), Architecture::Gpt2(gpt2)]
}

/// A graph in its arena, with numbers that depend only on their place in a tensor.
struct Forward {
    graph: Graph,
    plan: Plan,
    executor: Executor,
}

impl Forward {
    fn new(model: &Architecture, compute: DType, purpose: Purpose) -> Self {
        let options = Build::plain(BATCH, SEQ, compute, purpose);
        let graph = build(model, &options).unwrap();
        let plan = Plan::new(&graph, Options::new(Target::Cpu));
        let executor = Executor::new(plan.arena_bytes, Some(2)).unwrap();
        let mut forward = Self {
            graph,
            plan,
            executor,
        };
        for parameter in forward.graph.parameters.clone() {
            let place = forward.plan.placement(parameter.master).unwrap();
            let value = |i: usize| f64::from(((i * 29 + 3) % 23) as f32 / 23.0 - 0.5);
            let arena = forward.executor.arena_mut();
            if compute == DType::F64 {
                for (i, to) in arena.write::<f64>(place).iter_mut().enumerate() {
                    *to = value(i);
                }
            } else {
                for (i, to) in arena.write::<f32>(place).iter_mut().enumerate() {
                    *to = value(i) as f32;
                }
            }
        }
        let token = |i: usize| (i * 7 % VOCABULARY) as i32;
        forward.integers(input::TOKENS, token);
        forward
    }

    fn integers(&mut self, name: &str, value: impl Fn(usize) -> i32) {
        let place = self.plan.placement(self.graph.find(name).unwrap()).unwrap();
        let integers = self.executor.arena_mut().write::<i32>(place);
        for (i, to) in integers.iter_mut().enumerate() {
            *to = value(i);
        }
    }

    fn run(&mut self) -> Vec<f64> {
        let nodes = 0..self.graph.nodes.len();
        let (graph, plan) = (&self.graph, &self.plan);
        self.executor.run(graph, plan, nodes, true).unwrap();
        let result = self
            .graph
            .terms
            .first()
            .map(|term| term.value)
            .or(self.graph.result)
            .unwrap();
        let place = self.plan.placement(result).unwrap();
        let arena = self.executor.arena();
        match self.graph.compute {
            DType::F64 => arena.read::<f64>(place).to_vec(),
            _ => arena
                .read::<f32>(place)
                .iter()
                .copied()
                .map(f64::from)
                .collect(),
        }
    }
}

fn logits(model: &Architecture, compute: DType) -> Vec<f64> {
    let mut forward = Forward::new(model, compute, GENERATE);
    forward.integers(input::POSITIONS, |i| (i % SEQ) as i32);
    forward.integers(input::POSITION, |sequence| POSITIONS[sequence] as i32);
    forward.run()
}

#[test]
fn logits_are_those_that_the_loss_is_made_of() {
    for model in models() {
        let logits = logits(&model, DType::F64);
        assert_eq!(logits.len(), BATCH * VOCABULARY);
        let purpose = Purpose::Evaluate {
            loss_chunk: Some(5),
        };
        let mut evaluation = Forward::new(&model, DType::F64, purpose);
        let term = evaluation.graph.terms[0].inputs;
        for id in [term.inverse_count, term.weight] {
            let place = evaluation.plan.placement(id).unwrap();
            evaluation
                .executor
                .arena_mut()
                .write::<f32>(place)
                .fill(1.0);
        }
        for (sequence, row) in logits.chunks(VOCABULARY).enumerate() {
            let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
            for target in [0, 9, VOCABULARY - 1] {
                let only = sequence * SEQ + POSITIONS[sequence];
                evaluation.integers(input::TARGETS, |i| {
                    if i == only {
                        target as i32
                    } else {
                        IGNORE_INDEX
                    }
                });
                let (loss, expected) = (evaluation.run()[0], sum.ln() - row[target]);
                assert!((loss - expected).abs() < 1e-12, "{loss} for {expected}");
            }
        }
    }
}

#[test]
fn single_precision_agrees_with_double() {
    for model in models() {
        let (ours, expected) = (logits(&model, DType::F32), logits(&model, DType::F64));
        for (ours, expected) in ours.iter().zip(&expected) {
            assert!((ours - expected).abs() < 1e-4, "{ours} for {expected}");
        }
    }
}

#[test]
fn a_position_outside_the_sequence_is_an_error() {
    let [model, _] = models();
    for position in [-1, SEQ as i32] {
        let mut forward = Forward::new(&model, DType::F32, GENERATE);
        forward.integers(input::POSITIONS, |i| (i % SEQ) as i32);
        forward.integers(input::POSITION, |_| position);
        let nodes = 0..forward.graph.nodes.len();
        let (graph, plan) = (&forward.graph, &forward.plan);
        let error = forward.executor.run(graph, plan, nodes, true).unwrap_err();
        assert!(error.to_string().contains(&position.to_string()), "{error}");
    }
}
