//! The end of a step on the GPU, all parameters at once, against AdamW written out in double
//! precision; and the loss scale of half precision. The tests need a GPU and are ignored by
//! default: `-- --include-ignored` runs them.

mod card;

use std::sync::MutexGuard;

use cinch_engine::{Engine, EngineOptions, Part};
use cinch_graph::op::{GradientFormat, LossScale, MomentFormat};
use cinch_graph::{
    DType, Graph, Init, Optimizer, Target, TensorId, TrainingGraph, differentiate, verify,
};
use cinch_plan::{Options, Placement, Plan, num_micro_nodes};

const INIT: Init = Init::Normal { std: 0.02 };
const OPTIMIZER: Optimizer = Optimizer {
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    max_norm: Some(0.5),
    moments: MomentFormat::Full,
    gradients: GradientFormat::Full,
};
/// Learning rate and bias corrections.
const SCALARS: [f32; 3] = [0.01, 0.1, 0.05];
const SHAPES: [usize; 4] = [1, 7, 64, 129];
const LAYERS: usize = 150;

/// Layers learn at different rates.
fn rate_of(layer: usize) -> f64 {
    [1.0, 0.25, 10.0][layer % 3]
}

/// More parameters than one launch takes, of sizes that are no multiples of anything.
fn graph(dtype: DType) -> TrainingGraph {
    graph_with(Graph::new(dtype), &OPTIMIZER)
}

fn graph_with(mut g: Graph, optimizer: &Optimizer) -> TrainingGraph {
    let tokens = g.batch("tokens", [2, 5], DType::I32);
    let table = g.weight("table", [3001, 7], INIT);
    let mut x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let mut width = 7;
    for layer in 0..LAYERS {
        let next = SHAPES[layer % SHAPES.len()];
        let weight = g.weight(&format!("{layer}.weight"), [next, width], INIT);
        g.scale_learning_rate(rate_of(layer));
        let bias =
            (layer % 3 == 1).then(|| g.small_weight(&format!("{layer}.bias"), [next], Init::Zeros));
        x = g.linear(&layer.to_string(), x, weight, bias).unwrap();
        width = next;
    }
    let head = g.weight("head", [61, width], INIT);
    let targets = g.batch("targets", [2, 5], DType::I32);
    g.cross_entropy("loss", x, head, targets, 0.0, None)
        .unwrap();
    let graph = differentiate(g, optimizer).unwrap();
    verify(&graph).unwrap();
    graph
}

/// The nearest bf16, ties to even.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Numbers in -1..1 that depend on the seed alone.
fn random(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A card with the graph's update ready to run.
struct Device {
    graph: TrainingGraph,
    plan: Plan,
    engine: Engine,
    update: Part,
    /// Given back after the engine.
    _card: MutexGuard<'static, ()>,
}

/// The state of all parameters, one after the other.
#[derive(Clone, Debug, PartialEq)]
struct Weights {
    parameters: Vec<Vec<f32>>,
    m: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

impl Device {
    fn new(dtype: DType) -> Self {
        Self::of(graph(dtype))
    }

    fn of(graph: TrainingGraph) -> Self {
        let card = card::card();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let options = EngineOptions::default();
        let mut engine = Engine::new(Target::Cuda, plan.arena_bytes, options).unwrap();
        let nodes = num_micro_nodes(&graph)..graph.nodes.len();
        let update = engine.prepare(&graph, &plan, nodes, false).unwrap();
        Self {
            graph,
            plan,
            engine,
            update,
            _card: card,
        }
    }

    fn place(&self, id: TensorId) -> Placement {
        self.plan.placement(id).unwrap()
    }

    /// In the type of the tensor: fp32, or bf16, to which all numbers of these tests are rounded
    /// to nearest.
    fn write(&mut self, id: TensorId, values: &[f32]) {
        let place = self.place(id);
        if self.graph.ty(id).dtype == DType::Bf16 {
            let bytes = values.iter().flat_map(|&x| to_bf16(x).to_ne_bytes());
            let bytes: Vec<u8> = bytes.collect();
            return self.engine.write(place, &bytes).unwrap();
        }
        self.engine.write(place, values).unwrap();
    }

    fn read(&self, id: TensorId) -> Vec<f32> {
        let bytes = self.engine.bytes(self.place(id)).unwrap();
        if self.graph.ty(id).dtype == DType::Bf16 {
            let words = bytes.as_chunks::<2>().0.iter();
            return words
                .map(|&word| from_bf16(u16::from_ne_bytes(word)))
                .collect();
        }
        let words = bytes.as_chunks::<4>().0;
        words.iter().map(|&word| f32::from_ne_bytes(word)).collect()
    }

    fn weights(&self) -> Weights {
        let parameters = &self.graph.parameters;
        let read = |id: fn(&cinch_graph::Parameter) -> TensorId| {
            parameters.iter().map(|p| self.read(id(p))).collect()
        };
        Weights {
            parameters: read(|p| p.master),
            m: read(|p| p.moments.unwrap()[0]),
            v: read(|p| p.moments.unwrap()[1]),
        }
    }

    /// Fills everything; gradients are `scale` times too large. Returns them as they should be.
    fn fill(&mut self, scale: f32) -> Vec<Vec<f32>> {
        let mut gradients = Vec::new();
        for (index, parameter) in self.graph.parameters.clone().iter().enumerate() {
            let count = self.graph.ty(parameter.master).shape.elements();
            let numbers = |seed: u64, size: f64| -> Vec<f32> {
                let numbers = random(count, index as u64 * 8 + seed);
                numbers.iter().map(|&r| (size * r) as f32).collect()
            };
            let [m, v] = parameter.moments.unwrap();
            self.write(parameter.master, &numbers(1, 0.1));
            self.write(m, &numbers(2, 1e-3));
            let squares: Vec<f32> = numbers(3, 1e-5).iter().map(|x| x.abs()).collect();
            self.write(v, &squares);
            let gradient = parameter.gradient.unwrap();
            let scaled: Vec<f32> = numbers(4, 1e-2).iter().map(|g| g * scale).collect();
            self.write(gradient, &scaled);
            // As it was rounded.
            let kept = self.read(gradient).into_iter();
            gradients.push(kept.map(|g| g / scale).collect());
        }
        let scalars = self.graph.step_scalars;
        self.write(scalars, &SCALARS);
        gradients
    }

    fn run(&mut self) -> (f32, f32) {
        self.engine
            .run(&self.graph, &self.plan, &self.update)
            .unwrap();
        let norm = self.read(self.graph.gradient_norm);
        (norm[0], norm[1])
    }
}

/// What the update should make of `before`, and the norm of the gradients.
fn expected(graph: &Graph, before: &Weights, gradients: &[Vec<f32>]) -> (Weights, f64) {
    let squares = gradients.iter().flatten().map(|&g| f64::from(g).powi(2));
    let norm = squares.sum::<f64>().sqrt();
    let factor = (OPTIMIZER.max_norm.unwrap() / (norm + 1e-6)).min(1.0);
    assert!(factor < 1.0, "clipping is part of the test");
    let [rate, c1, c2] = SCALARS.map(f64::from);
    let mut after = before.clone();
    for (index, parameter) in graph.parameters.iter().enumerate() {
        let decay = if parameter.decay {
            OPTIMIZER.weight_decay
        } else {
            0.0
        };
        let rate = rate * parameter.learning_rate_scale;
        for (i, &g) in gradients[index].iter().enumerate() {
            let g = f64::from(g) * factor;
            let m = 0.9 * f64::from(before.m[index][i]) + 0.1 * g;
            let v = 0.95 * f64::from(before.v[index][i]) + 0.05 * g * g;
            let step = rate * (m / c1) / ((v / c2).sqrt() + OPTIMIZER.epsilon);
            let p = f64::from(before.parameters[index][i]) * (1.0 - rate * decay) - step;
            after.parameters[index][i] = p as f32;
            after.m[index][i] = m as f32;
            after.v[index][i] = v as f32;
        }
    }
    (after, norm)
}

/// Both, element by element, as far as single precision goes.
fn assert_close(ours: &Weights, expected: &Weights) {
    let pairs = [
        ("parameter", &ours.parameters, &expected.parameters),
        ("m", &ours.m, &expected.m),
        ("v", &ours.v, &expected.v),
    ];
    for (what, ours, expected) in pairs {
        for (index, (ours, expected)) in ours.iter().zip(expected).enumerate() {
            let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            for (i, (a, b)) in ours.iter().zip(expected).enumerate() {
                let near = (a - b).abs() <= 1e-5 * (b.abs() + 0.1 * largest);
                assert!(near, "{what} {index}[{i}]: {a}, expected {b}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn all_parameters_are_updated_at_once() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut device = Device::new(dtype);
        let gradients = device.fill(1.0);
        let before = device.weights();
        let (norm, _) = device.run();
        let (after, expected_norm) = expected(&device.graph, &before, &gradients);
        assert!((f64::from(norm) / expected_norm - 1.0).abs() < 1e-6);
        let ours = device.weights();
        assert_close(&ours, &after);
        // The copy is the parameter rounded to its first 16 bits.
        for (parameter, values) in device.graph.parameters.iter().zip(&ours.parameters) {
            if parameter.compute == parameter.master {
                continue;
            }
            let place = device.place(parameter.compute);
            let bytes = device.engine.bytes(place).unwrap();
            for (&word, value) in bytes.as_chunks::<2>().0.iter().zip(values) {
                let copy = f32::from_bits(u32::from(u16::from_ne_bytes(word)) << 16);
                assert!((copy - value).abs() <= value.abs() / 256.0);
            }
        }
    }
}

/// Weights without masters, with gradients and moments in each type: what comes out is what fp32
/// gives for the rounded numbers, rounded to nearest once.
#[test]
#[ignore = "needs a GPU"]
fn weights_without_masters_are_updated_in_their_type() {
    for moments in [MomentFormat::Full, MomentFormat::AsKept] {
        for gradients in [GradientFormat::Full, GradientFormat::AsKept] {
            let mut g = Graph::new(DType::Bf16);
            g.masters = false;
            let optimizer = Optimizer {
                moments,
                gradients,
                ..OPTIMIZER
            };
            let mut device = Device::of(graph_with(g, &optimizer));
            let gradients = device.fill(1.0);
            let before = device.weights();
            let (norm, _) = device.run();
            let (after, expected_norm) = expected(&device.graph, &before, &gradients);
            assert!((f64::from(norm) / expected_norm - 1.0).abs() < 1e-6);
            let ours = device.weights();
            for (index, parameter) in device.graph.parameters.iter().enumerate() {
                let [m, v] = parameter.moments.unwrap();
                for (id, ours, expected) in [
                    (parameter.master, &ours.parameters, &after.parameters),
                    (m, &ours.m, &after.m),
                    (v, &ours.v, &after.v),
                ] {
                    let largest = expected[index].iter().fold(0.0_f32, |a, x| a.max(x.abs()));
                    let half_unit = match device.graph.ty(id).dtype {
                        DType::Bf16 => 1.0 / 256.0,
                        _ => 0.0,
                    };
                    for (a, b) in ours[index].iter().zip(&expected[index]) {
                        let tolerance = (1e-5 + half_unit) * b.abs() + 1e-6 * largest;
                        let name = &device.graph.tensor(id).name;
                        assert!((a - b).abs() <= tolerance, "{name}: {a}, expected {b}");
                    }
                }
            }
        }
    }
}

/// The same with moments in eight bits, whose scales make them as good as a block allows: the
/// weights move as those with masters do, up to their rounding.
#[test]
#[ignore = "needs a GPU"]
fn eight_bit_moments_update_weights_of_any_type() {
    let run = |masters: bool, gradients: GradientFormat| {
        let mut g = Graph::new(DType::Bf16);
        g.masters = masters;
        let optimizer = Optimizer {
            moments: MomentFormat::EightBit,
            gradients,
            ..OPTIMIZER
        };
        let mut device = Device::of(graph_with(g, &optimizer));
        let parameters = device.graph.parameters.clone();
        for (index, parameter) in parameters.iter().enumerate() {
            let count = parameter.shape.elements();
            let numbers = |seed: u64, size: f64| -> Vec<f32> {
                let numbers = random(count, index as u64 * 8 + seed);
                let coarse = |r: &f64| from_bf16(to_bf16((size * r) as f32));
                numbers.iter().map(coarse).collect()
            };
            device.write(parameter.master, &numbers(1, 0.1));
            device.write(parameter.gradient.unwrap(), &numbers(4, 1e-2));
            for id in parameter.states() {
                let zeros = vec![0_u8; device.place(id).bytes as usize];
                device.engine.write(device.place(id), &zeros).unwrap();
            }
        }
        let scalars = device.graph.step_scalars;
        device.write(scalars, &SCALARS);
        device.run();
        // A sum over rows, and a product: gradients in fp32 and, where asked for, in bf16.
        ["table", "3.weight"].map(|name| device.read(device.graph.find(name).unwrap()))
    };
    let expected = run(true, GradientFormat::Full);
    for gradients in [GradientFormat::Full, GradientFormat::AsKept] {
        let ours = run(false, gradients);
        for (ours, expected) in ours.iter().flatten().zip(expected.iter().flatten()) {
            let tolerance = expected.abs() / 256.0 + 1e-6;
            assert!(
                (ours - expected).abs() <= tolerance,
                "{ours} for {expected}"
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_scale_is_taken_out_of_gradients() {
    let mut device = Device::new(DType::F16);
    let state = device.graph.loss_scale.unwrap();
    for start in [[1024.0, 7.0, 5.0, 1.0], [65536.0, 1999.0, 0.0, 0.0]] {
        let gradients = device.fill(start[0]);
        device.write(state, &start);
        let before = device.weights();
        let (norm, factor) = device.run();
        let (after, expected_norm) = expected(&device.graph, &before, &gradients);
        assert!((f64::from(norm) / expected_norm - 1.0).abs() < 1e-6);
        let expected_factor = 0.5 / expected_norm / f64::from(start[0]);
        assert!((f64::from(factor) / expected_factor - 1.0).abs() < 1e-4);
        assert_close(&device.weights(), &after);
        let expected = LossScale::from_values(start).after(true).values();
        assert_eq!(device.read(state), expected);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_that_are_not_finite_change_nothing() {
    let mut device = Device::new(DType::F16);
    let state = device.graph.loss_scale.unwrap();
    let mut scaling = [4.0, 1500.0, 0.0, 0.0];
    device.fill(scaling[0]);
    let before = device.weights();
    let gradient = device.graph.parameters[20].gradient.unwrap();
    let mut values = device.read(gradient);
    for problem in [f32::INFINITY, f32::NAN, f32::NEG_INFINITY] {
        *values.last_mut().unwrap() = problem;
        device.write(gradient, &values);
        device.write(state, &scaling);
        let (norm, factor) = device.run();
        assert!(!norm.is_finite() && factor == 0.0, "{norm} {factor}");
        assert_eq!(device.weights(), before);
        scaling = LossScale::from_values(scaling).after(false).values();
        assert_eq!(device.read(state), scaling);
    }
    assert_eq!(scaling, [1.0, 0.0, 3.0, 1.0]);
}

/// The gradient of the loss is multiplied, the loss is not.
#[test]
#[ignore = "needs a GPU"]
fn the_loss_itself_is_not_scaled() {
    let mut device = Device::new(DType::F16);
    let graph = device.graph.clone();
    let index = graph.nodes.iter().position(|node| node.name == "loss");
    let index = index.unwrap();
    let node = &graph.nodes[index];
    let part = device
        .engine
        .prepare(&graph, &device.plan, index..index + 1, true)
        .unwrap();
    let hidden = device.place(node.inputs[0]);
    // Halves between 1/4 and 1, of both signs.
    let words: Vec<u8> = random(hidden.bytes as usize / 2, 3)
        .iter()
        .flat_map(|&r| {
            let sign = if r < 0.0 { 0x8000 } else { 0 };
            (sign | (0x3400 + (r.abs() * 2048.0) as u16)).to_le_bytes()
        })
        .collect();
    let targets: Vec<i32> = (0..10).map(|i| i * 6).collect();
    let mut run = |scale: f32| {
        device.engine.write(hidden, &words).unwrap();
        let weight = device.place(node.inputs[1]);
        let weights = words.iter().cycle().take(weight.bytes as usize);
        let weights: Vec<u8> = weights.copied().collect();
        device.engine.write(weight, &weights).unwrap();
        let place = device.place(node.inputs[2]);
        device.engine.write(place, &targets).unwrap();
        let term = graph.terms[0].inputs;
        device.write(term.inverse_count, &[0.1]);
        device.write(term.weight, &[1.0]);
        device.write(graph.loss_scale.unwrap(), &[scale, 0.0, 0.0, 0.0]);
        device.engine.run(&graph, &device.plan, &part).unwrap();
        (device.read(node.outputs[0]), device.read(node.outputs[2]))
    };
    let (loss, gradient) = run(1.0);
    let (scaled_loss, scaled_gradient) = run(256.0);
    assert!(loss[0] > 0.1 && loss == scaled_loss, "{loss:?}");
    let largest = gradient.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    assert!(largest > 1e-3);
    for (a, b) in gradient.iter().zip(&scaled_gradient) {
        assert!((a * 256.0 - b).abs() <= 2e-3 * 256.0 * largest, "{a} {b}");
    }
}
