//! From an op to the commands of its kernels.

mod activation;
mod attention;
mod attention_entropy;
mod attention_hopper;
mod attention_hopper_dealt;
mod attention_hopper_short;
mod attention_narrow;
mod cached_attention;
mod cached_convolution;
mod cached_scan;
mod cached_selection;
mod collective;
mod columns;
mod convolution;
mod cross_entropy;
mod dequantise;
mod embedding;
mod expression;
mod gated;
mod indexer;
pub mod joined;
mod linear;
mod logits;
mod norm;
mod optimizer;
mod projections;
mod rotary;
mod scan;

use std::collections::HashMap;
use std::ops::Range;

use cinch_graph::op::{MomentFormat, Op};
use cinch_graph::{Graph, Node, Phase, TensorId};
use cinch_plan::{Placement, Plan, Residence};

use super::command::{Command, Kernel, Lane, TailKind};
use super::lowering::{Card, Lowering};
use crate::engine::MicroBatch;

/// Master weights to their compute copies, after loading: (float*, real*, u64).
pub const COPY_TO_REAL: Kernel = Kernel {
    file: "optimizer",
    function: "copy_to_real",
};

/// The commands of one node.
pub fn lower(mut x: Lowering<'_>) -> Vec<Command> {
    let node = x.node;
    match &node.op {
        Op::Embedding(op) => embedding::embedding(&mut x, op),
        Op::EmbeddingBackward(op) => embedding::embedding_backward(&mut x, op),
        Op::Norm(op) => norm::norm(&mut x, op),
        Op::NormApply(op) => norm::norm_apply(&mut x, op),
        Op::NormBackward(op) => norm::norm_backward(&mut x, op),
        Op::Linear(op) => linear::linear(&mut x, op),
        Op::LinearAdd(op) => linear::linear_add(&mut x, op),
        Op::LinearGradInput(op) => linear::linear_grad_input(&mut x, op),
        Op::LinearGradWeight(op) => linear::linear_grad_weight(&mut x, op),
        Op::Activation(op) => activation::activation(&mut x, op),
        Op::ActivationBackward(op) => activation::activation_backward(&mut x, op),
        Op::Gated(op) => gated::gated(&mut x, op),
        Op::GatedBackward(op) => gated::gated_backward(&mut x, op),
        Op::Add(op) => activation::add(&mut x, op),
        Op::Rotary(op) => rotary::rotary(&mut x, op),
        Op::View(_) => view(&mut x),
        Op::Map(op) => expression::map(&mut x, op),
        Op::Reduce(op) => expression::reduce(&mut x, op),
        Op::Concat(op) => columns::concat(&mut x, op),
        Op::Split(op) => columns::split(&mut x, op),
        Op::Dequantise(op) => dequantise::dequantise(&mut x, op),
        Op::Fetch(_) => x.fetch(),
        Op::Store(_) => x.store(),
        Op::Attention(op) => attention::attention(&mut x, op),
        Op::AttentionBackward(op) => attention::attention_backward(&mut x, op),
        Op::CachedAttention(op) => cached_attention::cached_attention(&mut x, op),
        Op::AttentionEntropy(op) => attention_entropy::attention_entropy(&mut x, op),
        Op::AttentionEntropyBackward(op) => attention_entropy::backward(&mut x, &op.0),
        Op::CachedAttentionEntropy(op) => attention_entropy::cached(&mut x, &op.0),
        Op::CachedSelection(op) => cached_selection::cached_selection(&mut x, op),
        Op::IndexerSelection(op) => indexer::indexer_selection(&mut x, op),
        Op::IndexerLoss(op) => indexer::indexer_loss(&mut x, op),
        Op::IndexerLossBackward(op) => indexer::indexer_loss_backward(&mut x, op),
        Op::Convolution(op) => convolution::convolution(&mut x, op),
        Op::ConvolutionBackward(op) => convolution::convolution_backward(&mut x, op),
        Op::CachedConvolution(op) => cached_convolution::cached_convolution(&mut x, op),
        Op::Scan(op) => scan::scan(&mut x, op),
        Op::ScanBackward(op) => scan::scan_backward(&mut x, op),
        Op::CachedScan(op) => cached_scan::cached_scan(&mut x, op),
        Op::CrossEntropy(op) => cross_entropy::cross_entropy(&mut x, op),
        Op::Logits(op) => logits::logits(&mut x, op),
        Op::GradientSquares(op) => optimizer::gradient_squares(&mut x, op),
        Op::GradientNorm(op) => optimizer::gradient_norm(&mut x, op),
        Op::AdamW(op) => match op.moments {
            MomentFormat::Full | MomentFormat::AsKept => optimizer::adamw(&mut x, op, 1),
            MomentFormat::EightBit => optimizer::adamw_8bit(&mut x, op),
        },
        Op::AllReduce(op) => collective::all_reduce(&mut x, op),
        Op::ReduceScatter(op) => collective::reduce_scatter(&mut x, op),
        Op::AllGather(op) => collective::all_gather(&mut x, op),
        Op::GatherRows(op) => collective::gather_rows(&mut x, op),
        // One thing happens after the other.
        Op::Await(_) => {}
    }
    x.clear_beyond();
    x.finish()
}

/// The same bytes: a copy only where the input is read later.
fn view(x: &mut Lowering<'_>) {
    x.copy(x.input(0), x.output(0), x.output_type(0).bytes());
}

/// Where a node's commands run that do not run in the order of the nodes.
fn lane(op: &Op) -> Option<Lane> {
    match op {
        Op::Fetch(_) => Some(Lane::Fetches),
        Op::Store(_) => Some(Lane::Stores),
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) => Some(Lane::Exchanges),
        _ => None,
    }
}

/// What is under way beside the nodes: by tensor, the node that has it there.
#[derive(Default)]
struct UnderWay {
    held: HashMap<TensorId, (Lane, usize)>,
    /// Those that are only read there: others may read them too.
    read: HashMap<TensorId, (Lane, usize)>,
}

impl UnderWay {
    /// A node begins beside the others. What is before it in its own lane is done when it runs.
    fn begin(&mut self, node: &Node, lane: Lane, number: usize) -> Vec<Command> {
        let waits = self.awaited(node, Some(lane));
        let inputs = match lane {
            Lane::Stores => &mut self.read,
            // Ranks may use what they send as scratch memory.
            Lane::Fetches | Lane::Exchanges => &mut self.held,
        };
        inputs.extend(node.inputs.iter().map(|&id| (id, (lane, number))));
        let outputs = node.outputs.iter().map(|&id| (id, (lane, number)));
        self.held.extend(outputs);
        waits
    }

    /// What a node has to wait for, each once: whoever names a tensor waits for what has it, and
    /// whoever is there to wait, or writes it, for what reads it.
    fn awaited(&mut self, node: &Node, own: Option<Lane>) -> Vec<Command> {
        let mut waits = Vec::new();
        let inputs = node.inputs.iter().map(|id| (id, false));
        let outputs = node.outputs.iter().map(|id| (id, true));
        for (id, is_written) in inputs.chain(outputs) {
            let ends = is_written || matches!(node.op, Op::Await(_));
            let read = self.read.get(id).filter(|_| ends);
            let holder = self.held.get(id).or(read).copied();
            if let Some((lane, number)) = holder.filter(|(lane, _)| Some(*lane) != own) {
                waits.push(self.wait(lane, number));
            }
        }
        waits
    }

    /// All of a lane up to a number is done after it was waited for.
    fn wait(&mut self, lane: Lane, number: usize) -> Command {
        let goes_on = |(other, earlier): (Lane, usize)| other != lane || earlier > number;
        self.held.retain(|_, one| goes_on(*one));
        self.read.retain(|_, one| goes_on(*one));
        Command::Await { lane, number }
    }

    /// The last of each lane.
    fn finish(&mut self) -> Vec<Command> {
        let mut waits = Vec::new();
        for lane in Lane::ALL {
            let all = self.held.values().chain(self.read.values());
            let numbers = all.filter(|(other, _)| *other == lane);
            if let Some(last) = numbers.map(|(_, number)| *number).max() {
                waits.push(self.wait(lane, last));
            }
        }
        waits
    }
}

/// Commands that belong together, and what they are called in traces and errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    pub op: &'static str,
    pub node: String,
    pub commands: Vec<Command>,
    pub memory: Memory,
    /// What its one command is to a product before it.
    pub tail: Option<TailKind>,
}

/// Bytes of the arena from the first to before the second.
pub type Bytes = (u64, u64);

/// What some nodes read and write of the arena.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub reads: Vec<Bytes>,
    pub writes: Vec<Bytes>,
}

impl Memory {
    fn of(graph: &Graph, plan: &Plan, nodes: Range<usize>) -> Self {
        let mut memory = Self::default();
        let bytes = |place: Placement| (place.offset, place.end());
        let of = |ids: &[TensorId]| -> Vec<Bytes> {
            let places = ids.iter().filter_map(|&id| plan.placement(id));
            let in_arena = places.filter(|place| place.residence == Residence::Arena);
            in_arena.map(bytes).collect()
        };
        for index in nodes {
            let node = &graph.nodes[index];
            memory.reads.extend(of(&node.inputs));
            memory.writes.extend(of(&node.outputs));
            memory.writes.extend(plan.workspace(index).map(bytes));
        }
        memory
    }

    fn extend(&mut self, other: Self) {
        self.reads.extend(other.reads);
        self.writes.extend(other.writes);
    }
}

/// The commands of some of a graph's nodes. Updates that follow each other become one, since most
/// parameters are too small to keep a card busy by themselves, and so do products that are added
/// to one result.
pub fn lower_all(
    graph: &Graph,
    plan: &Plan,
    nodes: Range<usize>,
    micro: MicroBatch,
    card: Card,
) -> Vec<Lowered> {
    let mut lowered = Vec::new();
    let mut under_way = UnderWay::default();
    let mut index = nodes.start;
    while index < nodes.end {
        let node = &graph.nodes[index];
        if node.phase == Phase::Exchange && !micro.is_last {
            index += 1;
            continue;
        }
        let lane = lane(&node.op);
        let waits = match lane {
            Some(lane) => under_way.begin(node, lane, index),
            None => under_way.awaited(node, None),
        };
        let mut count = optimizer::num_together(&graph.nodes[index..nodes.end]).max(1);
        let mut x = Lowering::new(graph, plan, index, micro.is_first, card);
        let tail = joined::tail(&x);
        let mut waits = waits;
        let commands = match &node.op {
            Op::AdamW(op) if count > 1 => {
                optimizer::adamw(&mut x, op, count);
                x.finish()
            }
            _ => match projections::together(&x, nodes.end) {
                Some((several, command)) => {
                    let others = &graph.nodes[index + 1..index + several];
                    waits.extend(others.iter().flat_map(|node| under_way.awaited(node, None)));
                    count = several;
                    vec![command]
                }
                None => lower(x),
            },
        };
        let name = match count {
            1 => node.name.clone(),
            _ => format!("{} and {} more", node.name, count - 1),
        };
        let commands = match lane {
            Some(lane) => vec![Command::Beside {
                lane,
                number: index,
                commands,
            }],
            None => commands,
        };
        let commands = waits.into_iter().chain(commands).collect();
        lowered.push(Lowered {
            op: node.op.name(),
            node: name,
            commands,
            memory: Memory::of(graph, plan, index..index + count),
            tail,
        });
        index += count;
    }
    // A recording ends when everything in it does.
    if let Some(last) = lowered.last_mut() {
        last.commands.extend(under_way.finish());
    }
    joined::join(&mut lowered);
    lowered
}

#[cfg(test)]
mod tests {
    use cinch_graph::op::{ActivationKind, GradientFormat};
    use cinch_graph::{
        DType, Init, Optimizer, Recompute, ShardLevel, Sharding, Target, TrainingGraph,
        differentiate,
    };
    use cinch_plan::Options;

    use crate::cuda::command::HostCopy;

    use super::*;

    pub(super) const OPTIMIZER: Optimizer = Optimizer {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_norm: Some(1.0),
        moments: MomentFormat::Full,
        gradients: GradientFormat::Full,
    };

    /// Blocks of one product each, with frozen weights in host memory.
    fn offloaded() -> Graph {
        let mut graph = Graph::new(DType::F32);
        let mut x = graph.batch("x", [2, 8], DType::F32);
        for block in 0..4 {
            graph.enter_block(format!("block.{block}"));
            let weight = graph.frozen_weight(&format!("w{block}"), [8, 8], Init::Ones);
            x = graph.linear(&format!("y{block}"), x, weight, None).unwrap();
            graph.leave_block();
        }
        graph.result = Some(x);
        graph.offload_frozen()
    }

    #[test]
    fn a_fetch_is_waited_for_once_right_before_its_first_reader() {
        let graph = offloaded();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let lowered = lower_all(
            &graph,
            &plan,
            0..graph.nodes.len(),
            MicroBatch::of_one(true),
            Card::ANY,
        );
        let order: Vec<String> = lowered
            .iter()
            .flat_map(|lowered| &lowered.commands)
            .filter_map(|command| match command {
                Command::Beside {
                    number, commands, ..
                } => {
                    assert!(matches!(&commands[..], [Command::Fetch(copies)] if copies.len() == 1));
                    Some(format!("fetch {number}"))
                }
                Command::Await { number, .. } => Some(format!("await {number}")),
                Command::Product(_) => Some("product".to_owned()),
                _ => None,
            })
            .collect();
        // Each is fetched while the block before it computes; the first two at once.
        let expected = [
            "fetch 0", "fetch 1", "await 0", "product", "fetch 3", "await 1", "product", "fetch 5",
            "await 3", "product", "await 5", "product",
        ];
        assert_eq!(order, expected);
        // Slots are used again, so that two of the four are in the arena.
        let slots: std::collections::BTreeSet<u64> = lowered
            .iter()
            .flat_map(|lowered| &lowered.commands)
            .filter_map(|command| match command {
                Command::Beside { commands, .. } => match &commands[..] {
                    [Command::Fetch(copies)] => Some(copies[0].to),
                    _ => None,
                },
                _ => None,
            })
            .collect();
        assert!(slots.len() < 4, "{slots:?}");
    }

    /// Blocks of two products each, all recomputed, of which some have activations in host memory.
    fn stored() -> TrainingGraph {
        let mut graph = Graph::new(DType::Bf16);
        let mut x = graph.batch("x", [32, 64], DType::Bf16);
        for block in 0..6 {
            graph.enter_block(format!("block.{block}"));
            let weight = graph.weight(&format!("up{block}.weight"), [256, 64], Init::Ones);
            let wide = graph.linear(&format!("up{block}"), x, weight, None);
            let active =
                graph.activation(&format!("gelu{block}"), wide.unwrap(), ActivationKind::Gelu);
            let weight = graph.weight(&format!("down{block}.weight"), [64, 256], Init::Ones);
            let narrow = graph.linear(&format!("down{block}"), active.unwrap(), weight, None);
            x = narrow.unwrap();
            graph.leave_block();
        }
        let head = graph.weight("head.weight", [16, 64], Init::Ones);
        let targets = graph.batch("targets", [32], DType::I32);
        graph
            .cross_entropy("loss", x, head, targets, 0.0, None)
            .unwrap();
        let optimizer = Optimizer {
            gradients: GradientFormat::AsKept,
            ..OPTIMIZER
        };
        let step = differentiate(graph, &optimizer).unwrap();
        step.recompute_and_offload(Recompute::Full, 3).unwrap()
    }

    /// From the start of a copy to or from host memory until it was waited for, nothing writes what
    /// it reads, and nothing touches what it writes.
    #[test]
    fn what_is_on_its_way_is_left_alone() {
        let step = stored();
        let plan = Plan::new(&step, Options::new(Target::Cuda));
        let nodes = 0..step.nodes.len();
        let lowered = lower_all(&step, &plan, nodes, MicroBatch::of_one(true), Card::HOPPER);
        let overlap = |a: &[Bytes], b: &[Bytes]| {
            let pairs = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
            pairs.into_iter().any(|(a, b)| a.0 < b.1 && b.0 < a.1)
        };
        let mut under_way: Vec<(Lane, usize, &Memory)> = Vec::new();
        let (mut stores, mut fetches, mut most) = (0, 0, 0);
        for Lowered {
            node,
            commands,
            memory,
            ..
        } in &lowered
        {
            for command in commands {
                if let Command::Await { lane, number } = command {
                    under_way.retain(|(other, earlier, _)| other != lane || earlier > number);
                }
            }
            for (_, _, copied) in &under_way {
                assert!(!overlap(&memory.writes, &copied.reads), "{node}");
                assert!(!overlap(&memory.writes, &copied.writes), "{node}");
                assert!(!overlap(&memory.reads, &copied.writes), "{node}");
            }
            for command in commands {
                let Command::Beside {
                    lane,
                    number,
                    commands,
                } = command
                else {
                    continue;
                };
                match &commands[..] {
                    [Command::Store(copies)] => {
                        stores += 1;
                        let inside = |copy: &HostCopy| copy.to + copy.bytes <= plan.host_bytes;
                        assert!(copies.iter().all(inside));
                    }
                    [Command::Fetch(_)] => {
                        fetches += 1;
                        // What it reads is all there.
                        let stores = under_way.iter().filter(|(lane, ..)| *lane == Lane::Stores);
                        assert_eq!(stores.count(), 0, "{node}");
                    }
                    other => panic!("{other:?} beside the step"),
                }
                under_way.push((*lane, *number, memory));
                most = most.max(under_way.len());
            }
        }
        assert_eq!((stores, fetches, most), (3, 3, 2));
        assert!(under_way.is_empty());
    }

    /// A step of four blocks on two ranks.
    fn on_two_ranks(level: ShardLevel) -> TrainingGraph {
        let mut graph = Graph::new(DType::Bf16);
        let mut x = graph.batch("x", [2, 64], DType::Bf16);
        for block in 0..4 {
            graph.enter_block(format!("block.{block}"));
            let weight = graph.weight(&format!("w{block}"), [64, 64], Init::Ones);
            x = graph.linear(&format!("y{block}"), x, weight, None).unwrap();
            graph.leave_block();
        }
        let head = graph.weight("head", [64, 64], Init::Ones);
        let targets = graph.batch("targets", [2], DType::I32);
        graph
            .cross_entropy("loss", x, head, targets, 0.0, None)
            .unwrap();
        let step = differentiate(graph, &OPTIMIZER).unwrap();
        let sharding = Sharding { ranks: 2, level };
        step.shard(sharding).unwrap()
    }

    /// Whoever takes a place that an exchange has waits for it, everything is waited for, and
    /// something runs meanwhile.
    #[test]
    fn exchanges_are_waited_for_by_whoever_takes_their_places() {
        for level in [
            ShardLevel::None,
            ShardLevel::Optimizer,
            ShardLevel::Gradients,
            ShardLevel::Weights,
        ] {
            let graph = on_two_ranks(level);
            let plan = Plan::new(&graph, Options::new(Target::Cuda));
            let micro = MicroBatch::of_one(true);
            let mut under_way: Vec<usize> = Vec::new();
            let mut num_hidden = 0;
            let mut index = 0;
            for lowered in lower_all(&graph, &plan, 0..graph.nodes.len(), micro, Card::ANY) {
                let count = match optimizer::num_together(&graph.nodes[index..]) {
                    0 => 1,
                    count => count,
                };
                let nodes = &graph.nodes[index..index + count];
                index += count;
                for command in &lowered.commands {
                    match command {
                        Command::Await { number, .. } => under_way.retain(|other| other > number),
                        Command::Beside { number, .. } => under_way.push(*number),
                        _ => {
                            let named =
                                nodes.iter().flat_map(|n| n.inputs.iter().chain(&n.outputs));
                            let mut places = named.filter_map(|&id| plan.placement(id));
                            let works = (index - count..index).filter_map(|n| plan.workspace(n));
                            let is_free = |place: Placement| {
                                let meets = |other: &Placement| {
                                    place.residence == other.residence
                                        && place.offset < other.end()
                                        && other.offset < place.end()
                                };
                                let taken = under_way.iter().flat_map(|&number| {
                                    let node = &graph.nodes[number];
                                    let ids = node.inputs.iter().chain(&node.outputs);
                                    let places = ids.filter_map(|&id| plan.placement(id));
                                    places.chain(plan.workspace(number))
                                });
                                !taken.into_iter().any(|other| meets(&other))
                            };
                            assert!(places.all(is_free), "{level:?} {}", lowered.node);
                            assert!(works.into_iter().all(is_free), "{level:?} {}", lowered.node);
                            num_hidden += under_way.len();
                        }
                    }
                }
            }
            assert_eq!(index, graph.nodes.len());
            assert!(under_way.is_empty(), "{level:?}");
            assert!(num_hidden > 0, "{level:?}");
        }
    }
}
