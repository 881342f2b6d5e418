//! Cross entropy in chunks of rows: logits by a product, loss and gradient of each row in place,
//! and the products of that gradient.

use cinch_graph::op::{CUDA_GEMM_WORKSPACE, CrossEntropy};

use crate::cuda::command::{Argument, Command, Joined, Kernel, LaunchShape, MatrixAt, Product};
use crate::cuda::lowering::{Card, Lowering};

use super::joined;
use super::linear::{matrix, transposed};

/// The most threads of a row's block, whose registers leave room for a second one.
const ROW_THREADS: usize = 768;

/// Shared memory in which a block keeps its row between its two passes: two blocks
/// find room on a multiprocessor of a Hopper card. Cards with less would hold fewer.
const KEPT_BYTES: usize = 104 << 10;
/// Of its pieces of 16 bytes a thread brings nine by themselves at most.
const _: () = assert!(KEPT_BYTES / 16 <= 9 * ROW_THREADS);

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "cross_entropy",
        function,
    }
}

pub fn cross_entropy(x: &mut Lowering<'_>, op: &CrossEntropy) {
    let (h, w) = (x.input_type(0), x.input_type(1));
    let (rows, width, vocabulary) = (h.rows(), h.width(), w.rows());
    let stride = CrossEntropy::cuda_row_stride(vocabulary);
    let [logits_bytes, losses_bytes] = op.cuda_parts(&h, vocabulary);
    let logits = x.workspace().0;
    let losses = logits + logits_bytes;
    let workspace = losses + losses_bytes;
    let z = MatrixAt {
        address: logits,
        row_stride: stride,
        dtype: h.dtype,
        transposed: false,
    };
    let weight = matrix(x.input(1), w, 0);
    let vector = 16 / h.dtype.size() as usize;
    let threads = (stride / vector)
        .next_multiple_of(32)
        .clamp(32, ROW_THREADS) as u32;
    let kept = match x.card.is_hopper && op.gradient {
        true => (KEPT_BYTES / 16).min(stride.div_ceil(vector)),
        false => 0,
    };
    let row_bytes = width as u64 * h.dtype.size();
    let mut weight_adds = op.weight && x.adds(2);
    let mut bias_adds = op.bias_output().is_some_and(|output| x.adds(output));
    for first in (0..rows).step_by(op.chunk_rows) {
        let chunk = op.chunk_rows.min(rows - first);
        let hidden = matrix(x.input(0) + first as u64 * row_bytes, h, 0);
        let product = |m: usize, n: usize, k: usize, [a, b, c]: [MatrixAt; 3]| Product {
            m,
            n,
            k,
            a,
            b,
            c,
            scale: 1.0,
            accumulate: false,
            bias: None,
            workspace,
            workspace_bytes: CUDA_GEMM_WORKSPACE,
        };
        // Over the rounded vocabulary: the rows of W beyond the last are zero, so the logits
        // there are too, and add nothing to dh.
        x.product(product(
            chunk,
            stride,
            width,
            [hidden, transposed(weight), z],
        ));
        let arguments = vec![
            Argument::Address(logits),
            Argument::Address(x.input(2) + 4 * first as u64),
            Argument::Address(losses + 4 * first as u64),
            x.input_argument(3),
            x.input_argument(4),
            x.optional_input(op.bias_input()),
            x.optional_input(op.scale_input()),
            Argument::U32(vocabulary as u32),
            Argument::U32(stride as u32),
            Argument::F32(op.label_smoothing as f32),
            Argument::U32(u32::from(op.gradient)),
            Argument::U32(kept as u32),
        ];
        let shape = LaunchShape {
            shared_bytes: 16 * kept as u32,
            ..LaunchShape::linear(chunk, threads)
        };
        let rows = |function| Command::Launch {
            kernel: kernel(function),
            shape,
            arguments: arguments.clone(),
        };
        // What is kept may be brought by itself.
        x.command(match kept {
            0 => rows("cross_entropy_rows"),
            _ => Command::Ways(
                ["cross_entropy_rows", "cross_entropy_rows_ahead"]
                    .map(|function| vec![rows(function)])
                    .into(),
            ),
        });
        if op.weight {
            let dw = matrix(x.output(2), x.output_type(2), 0);
            let whole = Product {
                accumulate: weight_adds,
                ..product(vocabulary, width, chunk, [transposed(z), hidden, dw])
            };
            x.command(weight_gradient(whole, x.card));
            weight_adds = true;
        }
        if op.gradient {
            // Last, because it may be over h.
            let dh = matrix(x.output(1) + first as u64 * row_bytes, h, 0);
            x.product(product(chunk, width, stride, [z, weight, dh]));
        }
        if let Some(output) = op.bias_output() {
            let arguments = vec![
                Argument::Address(logits),
                x.output_argument(output),
                Argument::U32(chunk as u32),
                Argument::U32(vocabulary as u32),
                Argument::U32(stride as u32),
                Argument::U32(u32::from(bias_adds)),
            ];
            let shape = LaunchShape {
                grid: [stride.div_ceil(8 * vector) as u32, 1, 1],
                block: [8, 128, 1],
                shared_bytes: 0,
            };
            x.launch(kernel("cross_entropy_bias"), shape, arguments);
            bias_adds = true;
        }
    }
    let arguments = vec![
        Argument::Address(losses),
        x.input_argument(3),
        x.output_argument(0),
        Argument::U32(rows as u32),
        Argument::U32(u32::from(x.adds(0))),
    ];
    x.launch(
        kernel("cross_entropy_loss"),
        LaunchShape::linear(1, 1024),
        arguments,
    );
}

/// Words in whole rows of what the library's fastest kernels bring at once, and the fewest that are
/// worth two products.
const WHOLE: usize = 64;
const LEAST_WORDS: usize = 4096;

/// `dW (+)= dzᵀ·h`. The library has slower kernels for a number of words that is no multiple of 8, as
/// many vocabularies have. Then the last words are a product of their own, or a kernel of ours
/// computes all of it, whichever is fastest.
fn weight_gradient(whole: Product, card: Card) -> Command {
    let is_narrow = whole.a.dtype.size() == 2;
    if whole.m.is_multiple_of(8) || whole.m < LEAST_WORDS || !is_narrow {
        return Command::Product(whole);
    }
    let words = whole.m / WHOLE * WHOLE;
    let further = |matrix: MatrixAt, elements: usize| MatrixAt {
        address: matrix.address + elements as u64 * matrix.dtype.size(),
        ..matrix
    };
    let most = Product { m: words, ..whole };
    let last = Product {
        m: whole.m - words,
        a: further(whole.a, words),
        c: further(whole.c, words * whole.c.row_stride),
        ..whole
    };
    let mut ways = vec![
        vec![Command::Product(whole)],
        vec![Command::Product(most), Command::Product(last)],
    ];
    ways.extend(joined::ways(Joined::Gradients, &[whole], &[], card));
    Command::Ways(ways)
}

#[cfg(test)]
mod tests {
    use cinch_graph::op::{GradientFormat, MomentFormat};
    use cinch_graph::{
        DType, Graph, Init, Optimizer, ShardLevel, Sharding, Target, TrainingGraph, differentiate,
    };
    use cinch_plan::{Options, Owner, Plan};

    use super::*;
    use crate::cuda::op::lower_all;
    use crate::engine::MicroBatch;

    /// The step of a table and a head of so many words.
    fn step(vocabulary: usize, dtype: DType, frozen: bool) -> TrainingGraph {
        let mut graph = Graph::new(dtype);
        let tokens = graph.batch("tokens", [1, 4], DType::I32);
        let targets = graph.batch("targets", [1, 4], DType::I32);
        let table = graph.weight("table", [vocabulary, 8], Init::Zeros);
        let h = graph
            .embedding("embedding", tokens, table, None, None)
            .unwrap();
        graph.enter_block("last");
        let head = match frozen {
            true => graph.frozen_weight("head", [vocabulary, 8], Init::Zeros),
            false => graph.weight("head", [vocabulary, 8], Init::Zeros),
        };
        graph
            .cross_entropy("loss", h, head, targets, 0.0, None)
            .unwrap();
        graph.leave_block();
        let optimizer = Optimizer {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            max_norm: None,
            moments: MomentFormat::Full,
            gradients: GradientFormat::Full,
        };
        differentiate(graph, &optimizer).unwrap()
    }

    fn commands(graph: &Graph, plan: &Plan, card: Card) -> Vec<Command> {
        let nodes = 0..graph.nodes.len();
        let lowered = lower_all(graph, plan, nodes, MicroBatch::of_one(true), card);
        let commands = lowered.into_iter().flat_map(|lowered| lowered.commands);
        let inner = commands.flat_map(|command| match command {
            Command::Beside { commands, .. } => commands,
            command => vec![command],
        });
        inner.collect()
    }

    /// All ways to do it.
    fn flat(commands: Vec<Command>) -> Vec<Command> {
        let each = commands.into_iter().flat_map(|command| match command {
            Command::Ways(ways) => ways.concat(),
            command => vec![command],
        });
        each.collect()
    }

    /// Shared memory of the rows' launch, and the pieces that it says are kept.
    fn kept(vocabulary: usize, dtype: DType, card: Card) -> (u32, Argument) {
        let graph = step(vocabulary, dtype, false);
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let commands = flat(commands(&graph, &plan, card)).into_iter();
        let mut rows = commands.filter_map(|command| match command {
            Command::Launch {
                kernel,
                shape,
                arguments,
            } if kernel.function == "cross_entropy_rows" => {
                Some((shape.shared_bytes, arguments[arguments.len() - 1]))
            }
            _ => None,
        });
        rows.next().unwrap()
    }

    /// Products go over the rounded vocabulary, and read zeros where a head that was brought for
    /// them has ended.
    #[test]
    fn a_head_that_is_brought_ends_with_zeros() {
        let cut = Sharding {
            ranks: 2,
            level: ShardLevel::Weights,
        };
        let gathered = step(61, DType::Bf16, false).shard(cut).unwrap();
        let fetched = step(61, DType::Bf16, true).offload_frozen();
        for graph in [gathered, fetched] {
            let plan = Plan::new(&graph, Options::new(Target::Cuda));
            let commands = commands(&graph, &plan, Card::ANY);
            let is_logits = |command: &Command| match command {
                Command::Product(product) => product.n == 64 && product.k == 8,
                _ => false,
            };
            let at = commands.iter().position(is_logits).unwrap();
            let Command::Product(Product { b: head, .. }) = commands[at] else {
                unreachable!("found above")
            };
            let beyond = Command::Clear {
                address: head.address + 61 * 8 * 2,
                bytes: 3 * 8 * 2,
            };
            let cleared = commands.iter().position(|command| *command == beyond);
            assert!(cleared.is_some_and(|cleared| cleared < at));
            // Nobody else has that memory meanwhile.
            let end = head.address + 64 * 8 * 2;
            let alive = plan.buffers().iter().any(|buffer| {
                let mut owners = buffer.owners.iter();
                buffer.bytes == 64 * 8 * 2
                    && owners.any(|owner| match owner {
                        Owner::Tensor(id) => {
                            let place = plan.placement(*id).unwrap();
                            place.offset == head.address && place.offset + buffer.bytes == end
                        }
                        Owner::Workspace(_) => false,
                    })
            });
            assert!(alive, "{:?}", plan.buffers());
        }
    }

    /// Of 5003 words 4992 are computed by themselves; all are, once.
    #[test]
    fn the_last_words_of_an_odd_vocabulary_may_be_a_product_of_their_own() {
        let ways = |vocabulary: usize, dtype: DType, card: Card| -> Vec<Vec<Command>> {
            let graph = step(vocabulary, dtype, false);
            let plan = Plan::new(&graph, Options::new(Target::Cuda));
            let commands = commands(&graph, &plan, card).into_iter();
            let is_product = |way: &Vec<Command>| matches!(way[0], Command::Product(_));
            let ways = commands.filter_map(|command| match command {
                Command::Ways(ways) if is_product(&ways[0]) => Some(ways),
                _ => None,
            });
            ways.flatten().collect()
        };
        let found = ways(5003, DType::Bf16, Card::HOPPER);
        let [whole, cut, ours] = &found[..] else {
            panic!("{found:?}");
        };
        let (&[Command::Product(whole)], &[Command::Product(most), Command::Product(last)]) =
            (&whole[..], &cut[..])
        else {
            panic!("{whole:?} {cut:?}");
        };
        assert_eq!([whole.m, most.m, last.m], [5003, 4992, 11]);
        assert_eq!(most, Product { m: 4992, ..whole });
        assert_eq!(last.a.address, whole.a.address + 2 * 4992);
        assert_eq!(last.c.address, whole.c.address + 4 * 4992 * 8);
        assert_eq!((last.n, last.k, last.b), (whole.n, whole.k, whole.b));
        assert!(matches!(&ours[..], [Command::LaunchTable { .. }]));
        assert_eq!(ways(5003, DType::Bf16, Card::ANY).len(), 2);
        assert_eq!(ways(5000, DType::Bf16, Card::HOPPER).len(), 0);
        assert_eq!(ways(5003, DType::F32, Card::HOPPER).len(), 0);
        assert_eq!(ways(61, DType::Bf16, Card::HOPPER).len(), 0);
    }

    #[test]
    fn hopper_cards_keep_what_finds_room_of_a_row() {
        // 61 logits are padded to 64.
        let whole = kept(61, DType::Bf16, Card::HOPPER);
        assert_eq!(whole, (128, Argument::U32(8)));
        let part = kept(60_001, DType::Bf16, Card::HOPPER);
        assert_eq!(part, (KEPT_BYTES as u32, Argument::U32(6656)));
        assert_eq!(kept(61, DType::F32, Card::HOPPER).0, 256);
        let none = kept(61, DType::Bf16, Card::ANY);
        assert_eq!(none, (0, Argument::U32(0)));
    }
}
