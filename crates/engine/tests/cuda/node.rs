//! One graph on both executors, node by node: of training, or of generation.

use std::collections::{HashMap, HashSet};
use std::fmt;

use cinch_engine::Executor;
use cinch_engine::cuda::lowering::Card;
use cinch_graph::op::{LossScale, Op};
use cinch_graph::{
    DType, Graph, Init, Node, Recompute, Role, Storage, Target, TensorId, differentiate, verify,
};
use cinch_model::input;
use cinch_plan::{Options, Placement, Plan};

use crate::device::{Device, OnCard};
use crate::emulated::OnHost;
use crate::numbers::{fill_codes, fill_lengths, fill_positions, fill_starts, random};
use crate::real::{decode, encode, roundoff};
use crate::shared::OPTIMIZER;

/// How often a node's inputs are shaken to see how far its outputs move.
const SHAKES: u64 = 3;

/// How far one output is from the CPU's, for the same inputs to the bit.
///
/// What a kernel rounds on its way is as small as the rounding of its inputs, and moves an output
/// about as far as that does. Mostly this is less than the tolerance of the type, but an output
/// that nearly cancels (the mean of a single row, say) can lose any number of digits to it, in
/// whatever order it is computed. So the CPU says how far: the largest change of its output when
/// every input moves by up to the roundoff of its type is granted where it exceeds the tolerance, and
/// so is what rounding to the output's own type does to numbers near the smallest that it has.
pub struct Report {
    what: String,
    node: String,
    output: usize,
    dtype: DType,
    /// Norm of the difference over norm of the expected values.
    error: f64,
    /// The same of the CPU with shaken inputs.
    granted: f64,
}

impl Report {
    pub fn is_within(&self, tolerance: f64) -> bool {
        self.error <= tolerance.max(self.granted)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} in {}: {} output {}: {:.2e} (shaken inputs: {:.2e})",
            self.what, self.dtype, self.node, self.output, self.error, self.granted
        )
    }
}

/// A graph with its plan for one target.
struct Side {
    graph: Graph,
    plan: Plan,
}

/// The training step of a graph, with half of its blocks recomputed.
pub fn training(graph: Graph) -> Graph {
    let blocks = graph.blocks.len() / 2;
    let graph = differentiate(graph, &OPTIMIZER).unwrap();
    let graph = graph.recompute(Recompute::Blocks(blocks)).unwrap();
    Graph::clone(&graph)
}

impl Side {
    fn new(graph: Graph, target: Target) -> Self {
        let graph = match graph.terms.first() {
            Some(_) => training(graph),
            None => graph,
        };
        verify(&graph).unwrap();
        let plan = Plan::new(&graph, Options::new(target));
        Self { graph, plan }
    }

    fn place(&self, id: TensorId) -> Placement {
        self.plan.placement(id).unwrap()
    }
}

/// What each node has before it runs: inputs, accumulators and states, in both graphs.
fn given<'a>(
    cpu: &'a Side,
    a: &'a Node,
    b: &'a Node,
) -> impl Iterator<Item = (TensorId, TensorId)> + 'a {
    let inputs = a.inputs.iter().copied().zip(b.inputs.iter().copied());
    let outputs = a.outputs.iter().copied().zip(b.outputs.iter().copied());
    inputs.chain(outputs.filter(|&(id, _)| cpu.graph.tensor(id).role != Role::Activation))
}

/// Whether a sanitizer watches, which takes minutes for the many products that the library tries
/// (`.ci/sanitize` says so).
fn under_sanitizer() -> bool {
    std::env::var_os("CINCH_WITHOUT_PRODUCTS").is_some()
}

/// Ops that have no kernel of ours are left out then.
fn is_left_out(op: &Op) -> bool {
    let only_products = match op {
        Op::Linear(op) => op.dropout.is_none(),
        Op::LinearGradInput(op) => op.dropout.is_none(),
        Op::LinearAdd(_) => true,
        Op::Logits(op) => !op.bias,
        // A bias has the sums of columns.
        Op::LinearGradWeight(op) => !op.bias && op.dropout.is_none(),
        _ => false,
    };
    only_products && under_sanitizer()
}

/// Of a norm in a recomputed block the sum is not written the first time: nobody reads it.
fn is_written(graph: &Graph, index: usize, output: usize) -> bool {
    let node = &graph.nodes[index];
    let is_sum = matches!(&node.op, Op::Norm(op) if op.residual) && output == 0;
    let later = graph.nodes[index + 1..].iter();
    !is_sum
        || later
            .flat_map(|node| &node.inputs)
            .any(|&id| id == node.outputs[0])
}

/// Runs both, giving each node of the GPU the CPU's inputs.
pub fn compare(what: &str, reference: Graph, tested: Graph) -> Vec<Report> {
    compare_as(what, reference, tested, under_sanitizer())
}

/// The same where it is said whether nothing is timed, so that newer ways are taken unseen.
pub fn compare_as(what: &str, reference: Graph, tested: Graph, deterministic: bool) -> Vec<Report> {
    let device = |arena_bytes| OnCard::new(arena_bytes, deterministic);
    compare_on(what, reference, tested, |_| true, device).0
}

/// The same with the host in place of a card, by each way that there is to something.
///
/// # Panics
/// Where a kernel touches what it must not.
pub fn compare_emulated(
    what: &str,
    card: Card,
    make: impl Fn(DType) -> Graph,
    compute: DType,
) -> Vec<Report> {
    let mut reports = Vec::new();
    // Of each node: another way of one that has no more would be the same again.
    let mut ways: HashMap<usize, usize> = HashMap::new();
    for way in 0.. {
        let is_another = |index: &usize| ways.get(index).is_some_and(|&most| way < most);
        let has_more = |index: &usize| way == 0 || is_another(index);
        let device = |arena_bytes| OnHost::new(arena_bytes, card, way);
        let (more, device) = compare_on(what, make(DType::F32), make(compute), has_more, device);
        reports.extend(more);
        assert!(
            device.conflicts.is_empty(),
            "{what}: {:#?}",
            device.conflicts
        );
        if !device.has_more_ways(way + 1) {
            break;
        }
        ways = device.ways;
    }
    reports
}

fn compare_on<D: Device>(
    what: &str,
    reference: Graph,
    tested: Graph,
    is_run: impl Fn(&usize) -> bool,
    device: impl FnOnce(u64) -> D,
) -> (Vec<Report>, D) {
    let cpu = Side::new(reference, Target::Cpu);
    let gpu = Side::new(tested, Target::Cuda);
    let mut host = Executor::new(cpu.plan.arena_bytes, Some(2)).unwrap();
    let mut device = device(gpu.plan.arena_bytes);
    fill(&cpu, &mut host);
    let mut reports = Vec::new();
    for (index, tested) in pairs(&cpu.graph, &gpu.graph) {
        let tested = tested.filter(|&at| !is_left_out(&gpu.graph.nodes[at].op));
        let Some(tested) = tested.filter(&is_run) else {
            run_on_cpu(&cpu, &mut host, index);
            continue;
        };
        let (a, b) = (&cpu.graph.nodes[index], &gpu.graph.nodes[tested]);
        let expected = expect(&cpu, &mut host, index, &gpu, b);
        // A later micro batch: accumulators are added to. Preparing may overwrite the arena.
        let part = device.prepare(&gpu.graph, &gpu.plan, tested..tested + 1, false);
        for (from, to) in given(&cpu, a, b) {
            give(&cpu, &host, from, &gpu, &mut device, to);
        }
        // The CPU has no scale, so it is 1.
        if let Some(scale) = gpu.graph.loss_scale {
            let state = LossScale {
                scale: 1.0,
                ..LossScale::START
            };
            let values = state.values().map(f32::to_le_bytes);
            device.write(gpu.place(scale), values.as_flattened());
        }
        device.run(&gpu.graph, &gpu.plan, part);
        // The next node's inputs are the unrounded ones.
        run_on_cpu(&cpu, &mut host, index);
        let is_written = |(output, _): &(usize, _)| is_written(&gpu.graph, tested, *output);
        let outputs = expected.iter().zip(&b.outputs).enumerate();
        for (output, (expected, &to)) in outputs.filter(is_written) {
            let bytes = device.read(gpu.place(to));
            let ours = numbers(&bytes, gpu.graph.ty(to).dtype);
            reports.push(Report {
                what: what.to_owned(),
                node: format!("{} `{}`", a.op.name(), a.name),
                output,
                dtype: gpu.graph.compute,
                error: distance(&ours, &expected.values),
                granted: expected.moved,
            });
        }
    }
    (reports, device)
}

/// The nodes of the reference, each with the tested one.
///
/// What is worth keeping for the backward depends on the size of its type, so that a recomputation
/// may be in one of the graphs alone. What it computes again is a pair of its own.
fn pairs(reference: &Graph, tested: &Graph) -> Vec<(usize, Option<usize>)> {
    let again = |graph: &Graph| -> HashSet<String> {
        let names = graph.nodes.iter().map(|node| node.name.clone());
        names.filter(|name| name.starts_with("again.")).collect()
    };
    let both: HashSet<String> = &again(reference) & &again(tested);
    let is_paired = |node: &Node| !node.name.starts_with("again.") || both.contains(&node.name);
    let mut others = (tested.nodes.iter().enumerate()).filter(|(_, b)| is_paired(b));
    let mut pairs = Vec::new();
    for (index, a) in reference.nodes.iter().enumerate() {
        let other = is_paired(a).then(|| others.next().expect("as many nodes"));
        if let Some((_, b)) = other {
            assert_eq!(a.op.name(), b.op.name(), "{} and {}", a.name, b.name);
        }
        pairs.push((index, other.map(|(at, _)| at)));
    }
    assert!(others.next().is_none());
    pairs
}

/// What the CPU makes of inputs that are rounded to the GPU's types.
struct Expected {
    values: Vec<f32>,
    /// How far this moves, relative to its norm, when the inputs move by as much as rounding
    /// could have moved them.
    moved: f64,
}

/// The outputs of a node; the arena is left as it was.
fn expect(cpu: &Side, host: &mut Executor, index: usize, gpu: &Side, b: &Node) -> Vec<Expected> {
    let a = &cpu.graph.nodes[index];
    let places = a.inputs.iter().chain(&a.outputs).map(|&id| cpu.place(id));
    let before: Vec<(Placement, Vec<u8>)> = places
        .map(|place| (place, host.arena().read::<u8>(place).to_vec()))
        .collect();
    let mut outputs_for = |shake: u64| -> Vec<Vec<f32>> {
        for (from, to) in given(cpu, a, b) {
            let dtype = gpu.graph.ty(to).dtype;
            if !matches!(dtype, DType::I32 | DType::U8) {
                let values = host.arena_mut().write::<f32>(cpu.place(from));
                let mut rounded = decode(&encode(values, dtype), dtype);
                if shake > 0 {
                    let seed = shake << 32 | u64::from(from.0);
                    let moves = random(rounded.len(), seed);
                    for (value, r) in rounded.iter_mut().zip(moves) {
                        *value += (r * roundoff(*value, dtype)) as f32;
                    }
                }
                values.copy_from_slice(&rounded);
            }
        }
        run_on_cpu(cpu, host, index);
        let outputs = a.outputs.iter().map(|&id| floats(cpu, host, id)).collect();
        for (place, bytes) in &before {
            host.arena_mut().write::<u8>(*place).copy_from_slice(bytes);
        }
        outputs
    };
    let values = outputs_for(0);
    let shaken: Vec<Vec<Vec<f32>>> = (1..=SHAKES).map(outputs_for).collect();
    // One of the graphs may keep more of a node for its backward than the other.
    values
        .into_iter()
        .zip(&b.outputs)
        .enumerate()
        .map(|(output, (values, &tested))| {
            let moves = shaken
                .iter()
                .map(|shaken| distance(&shaken[output], &values));
            // Of numbers that are hardly more than the smallest of a type, rounding leaves little.
            let dtype = gpu.graph.ty(tested).dtype;
            let kept = match dtype {
                DType::I32 | DType::U8 => values.clone(),
                _ => decode(&encode(&values, dtype), dtype),
            };
            let rounded = 2.0 * distance(&kept, &values);
            let moved = moves.fold(rounded, f64::max);
            Expected { values, moved }
        })
        .collect()
}

/// What is granted to each output of a graph, with its name; this takes no GPU.
pub fn granted(reference: Graph, tested: Graph) -> Vec<(String, f64)> {
    let cpu = Side::new(reference, Target::Cpu);
    let gpu = Side::new(tested, Target::Cuda);
    let mut host = Executor::new(cpu.plan.arena_bytes, Some(2)).unwrap();
    fill(&cpu, &mut host);
    let mut granted = Vec::new();
    for (index, tested) in pairs(&cpu.graph, &gpu.graph) {
        let node = &cpu.graph.nodes[index];
        let tested = tested.map(|at| &gpu.graph.nodes[at]);
        let outputs = tested.map(|b| expect(&cpu, &mut host, index, &gpu, b));
        run_on_cpu(&cpu, &mut host, index);
        for (output, expected) in outputs.iter().flatten().enumerate() {
            let name = format!("{} `{}` output {output}", node.op.name(), node.name);
            granted.push((name, expected.moved));
        }
    }
    granted
}

/// A later micro batch: accumulators are added to.
fn run_on_cpu(cpu: &Side, host: &mut Executor, index: usize) {
    host.run(&cpu.graph, &cpu.plan, index..index + 1, false)
        .unwrap();
}

/// Weights around their initial values, tokens, targets and scalars.
fn fill(side: &Side, host: &mut Executor) {
    let graph = &side.graph;
    for (index, tensor) in graph.tensors.iter().enumerate() {
        let id = TensorId(index as u32);
        let Some(place) = side.plan.placement(id) else {
            continue;
        };
        let numbers = random(tensor.ty.shape.elements(), index as u64 + 1);
        let name = tensor.name.as_str();
        match tensor.role {
            Role::Parameter => {
                let Some(parameter) = graph.parameters.iter().find(|p| p.master == id) else {
                    // Scales, which are filled with their codes.
                    continue;
                };
                if let Storage::Quantised(_) = parameter.storage {
                    fill_codes(graph, parameter, &mut |id, bytes| {
                        let place = side.plan.placement(id).unwrap();
                        host.arena_mut().write::<u8>(place).copy_from_slice(bytes);
                    });
                    continue;
                }
                let values = host.arena_mut().write::<f32>(place);
                for (i, (value, r)) in values.iter_mut().zip(numbers).enumerate() {
                    *value = match parameter.init {
                        Init::Ones => 1.0 + 0.3 * r,
                        Init::Constant { value } => value + 0.3 * r,
                        Init::LogRange => ((i % tensor.ty.width() + 1) as f64).ln() + 0.2 * r,
                        Init::InverseSoftplus { .. } => 0.5 * r - 1.0,
                        Init::Zeros => 0.3 * r,
                        Init::Normal { .. } | Init::Uniform { .. } => {
                            2.0 * r / (tensor.ty.width() as f64).sqrt()
                        }
                    } as f32;
                }
            }
            Role::Gradient => {
                let values = host.arena_mut().write::<f32>(place);
                for (value, r) in values.iter_mut().zip(numbers) {
                    *value = (1e-3 * r) as f32;
                }
            }
            Role::State => {
                let values = host.arena_mut().write::<f32>(place);
                for (value, r) in values.iter_mut().zip(numbers) {
                    *value = (1e-3 * r.abs()) as f32;
                }
            }
            Role::Batch if name == "positions" => {
                fill_positions(host.arena_mut().write::<i32>(place));
            }
            // Which of the tokens of a row has its logits computed.
            Role::Batch if name == "position" => {
                host.arena_mut().write::<i32>(place).fill(1);
            }
            Role::Cache => {
                let values = host.arena_mut().write::<f32>(place);
                for (value, r) in values.iter_mut().zip(numbers) {
                    *value = r as f32;
                }
            }
            Role::Batch if name.ends_with("lengths") => {
                let tokens = match input::texts_of_lengths(name) {
                    Some(chunk) => input::tokens_of(chunk),
                    None => "tokens".to_owned(),
                };
                let seq = graph.find(&tokens).map_or(1, |id| graph.ty(id).width());
                fill_lengths(host.arena_mut().write::<i32>(place), seq);
            }
            Role::Batch if name == "starts" => {
                fill_starts(host.arena_mut().write::<i32>(place), tensor.ty.width());
            }
            Role::Batch if tensor.ty.dtype.is_float() => {
                let values = host.arena_mut().write::<f32>(place);
                for (value, r) in values.iter_mut().zip(numbers) {
                    *value = r as f32;
                }
            }
            Role::Batch => {
                let table = graph.find("embedding.weight");
                let table = table.or_else(|| graph.parameters.first().map(|p| p.master));
                let vocabulary = table.map_or(1, |id| graph.ty(id).shape.dims()[0]);
                let values = host.arena_mut().write::<i32>(place);
                for (value, r) in values.iter_mut().zip(numbers) {
                    *value =
                        (((r + 1.0) / 2.0 * vocabulary as f64) as i32).min(vocabulary as i32 - 1);
                }
                if name == "targets" && values.len() > 3 {
                    values[3] = cinch_graph::op::IGNORE_INDEX;
                }
            }
            Role::Control if name == "random" => {
                let words = [0x1234_5678, -77, 5, 0];
                host.arena_mut().write::<i32>(place).copy_from_slice(&words);
            }
            Role::Control if name.ends_with(".inverse_count") || name.ends_with(".weight") => {
                // Gradients as large as loss scaling makes them: smaller ones are rounded away in
                // f16 by any executor.
                host.arena_mut().write::<f32>(place).fill(1.0);
            }
            Role::Control => {
                let scalars = [0.01, 0.1, 0.05];
                host.arena_mut()
                    .write::<f32>(place)
                    .copy_from_slice(&scalars);
            }
            // Weights and activations in host memory are `cinch-train`'s to test: here nodes run by themselves.
            Role::Offloaded | Role::HostActivation => {}
            Role::ComputeCopy | Role::LossScale | Role::Result | Role::Activation => {}
        }
    }
}

fn give(
    cpu: &Side,
    host: &Executor,
    from: TensorId,
    gpu: &Side,
    device: &mut impl Device,
    to: TensorId,
) {
    let place = gpu.place(to);
    let dtype = gpu.graph.ty(to).dtype;
    if matches!(dtype, DType::I32 | DType::U8) {
        let bytes = host.arena().read::<u8>(cpu.place(from));
        device.write(place, bytes);
    } else {
        let bytes = encode(host.arena().read::<f32>(cpu.place(from)), dtype);
        device.write(place, &bytes);
    }
}

fn floats(side: &Side, host: &Executor, id: TensorId) -> Vec<f32> {
    let dtype = side.graph.ty(id).dtype;
    numbers(host.arena().read::<u8>(side.place(id)), dtype)
}

/// What an output is compared by: its numbers or, where it is a selection, its bits.
fn numbers(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::I32 => {
            let bits = bytes
                .iter()
                .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1));
            bits.map(f32::from).collect()
        }
        dtype => decode(bytes, dtype),
    }
}

fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f64| x * x;
    let difference: f64 = ours
        .iter()
        .zip(expected)
        .map(|(&a, &b)| square(f64::from(a) - f64::from(b)))
        .sum();
    let norm: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
    if norm == 0.0 {
        return difference.sqrt();
    }
    (difference / norm).sqrt()
}
