//! Attention: on the tensor cores for heads of 32, 64 or 128 columns in 16 bits, by kernels of
//! their own for the narrowest heads, in plain arithmetic for the rest. The backward is three launches: δ into the workspace, the gradients
//! of keys and values, those of queries. Hopper cards have kernels of their own for most of it.

use cinch_graph::{DType, op};

use super::{attention_hopper, attention_hopper_dealt, attention_hopper_short, attention_narrow};
use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Rows of the result that a block has on the tensor cores.
const ROWS: usize = op::Attention::CUDA_ROWS;

/// What a launch needs to know of the instances in `kernels/attention_tensor.cu` and
/// `kernels/attention_backward.cu`.
struct TensorCores {
    head_dim: usize,
    plain: Functions,
    /// Of attention to selected keys.
    selected: Functions,
    keys_threads: u32,
    /// Rows of the tiles that each of the three walks through.
    forward_tile: usize,
    keys_tile: usize,
    queries_tile: usize,
}

/// The kernels of one instance.
struct Functions {
    forward: &'static str,
    keys: &'static str,
    queries: &'static str,
}

const TENSOR_CORES: [TensorCores; 3] = [
    TensorCores {
        head_dim: 32,
        plain: Functions {
            forward: "attention_forward_32",
            keys: "attention_backward_keys_32",
            queries: "attention_backward_queries_32",
        },
        selected: Functions {
            forward: "attention_selected_forward_32",
            keys: "attention_selected_backward_keys_32",
            queries: "attention_selected_backward_queries_32",
        },
        keys_threads: 128,
        forward_tile: 64,
        keys_tile: 64,
        queries_tile: 64,
    },
    TensorCores {
        head_dim: 64,
        plain: Functions {
            forward: "attention_forward_64",
            keys: "attention_backward_keys_64",
            queries: "attention_backward_queries_64",
        },
        selected: Functions {
            forward: "attention_selected_forward_64",
            keys: "attention_selected_backward_keys_64",
            queries: "attention_selected_backward_queries_64",
        },
        keys_threads: 128,
        forward_tile: 64,
        keys_tile: 64,
        queries_tile: 64,
    },
    // Smaller tiles: two blocks, or one on cards with 100 KiB, find room in shared memory.
    TensorCores {
        head_dim: 128,
        plain: Functions {
            forward: "attention_forward_128",
            keys: "attention_backward_keys_128",
            queries: "attention_backward_queries_128",
        },
        selected: Functions {
            forward: "attention_selected_forward_128",
            keys: "attention_selected_backward_keys_128",
            queries: "attention_selected_backward_queries_128",
        },
        keys_threads: 256,
        forward_tile: 64,
        keys_tile: 32,
        queries_tile: 32,
    },
];

impl TensorCores {
    /// The instance for an op, if there is one.
    fn find(op: &op::Attention, dtype: DType) -> Option<&'static Self> {
        TENSOR_CORES
            .iter()
            .find(|instance| op.suits_tensor_cores(dtype) && instance.head_dim == op.head_dim)
    }

    fn functions(&self, op: &op::Attention) -> &Functions {
        match op.selection {
            true => &self.selected,
            false => &self.plain,
        }
    }

    fn row_bytes(&self) -> usize {
        self.head_dim * 2
    }

    /// Queries, and two stages of keys and values.
    fn forward_bytes(&self) -> usize {
        (ROWS + 4 * self.forward_tile) * self.row_bytes()
    }

    /// Keys and values, and two stages of queries and do, with lse and δ.
    fn keys_bytes(&self) -> usize {
        (2 * ROWS + 4 * self.keys_tile) * self.row_bytes() + 2 * self.keys_tile * 8
    }

    /// Queries and do, and two stages of keys and values.
    fn queries_bytes(&self) -> usize {
        (2 * ROWS + 4 * self.queries_tile) * self.row_bytes()
    }
}

/// Tiles of 32×32 scores in `kernels/attention_any.cu`, and the most columns of a head that it
/// has in shared memory at once: six tiles fit into 99 KiB, which the smallest cards allow.
const SIDE: usize = 32;
const MOST_COLUMNS: usize = 112;

/// The parts in which a head is read and written: how many, and columns of each.
fn chunks(head_dim: usize) -> (usize, usize) {
    let count = head_dim.div_ceil(MOST_COLUMNS);
    (count, head_dim.div_ceil(count))
}

/// Shared memory of `tiles` tiles of the head, `scores` of scores, and three numbers per row.
fn any_bytes(head_dim: usize, tiles: usize, scores: usize) -> usize {
    let row = chunks(head_dim).1 | 1;
    SIDE * (tiles * row + scores * (SIDE + 1) + 3) * size_of::<f32>()
}

/// An op with the tensors of its node.
struct Site<'a> {
    op: &'a op::Attention,
    batch: usize,
    seq: usize,
    tensor_cores: Option<&'static TensorCores>,
    /// Queries, keys and values at their first column.
    sources: [Argument; 3],
    /// Scalars that every kernel takes after its tensors.
    scalars: Vec<Argument>,
}

impl<'a> Site<'a> {
    /// `first` is the input that holds the queries, `extras` the first of those that hold random
    /// state, lengths and starts.
    fn new(x: &Lowering<'_>, op: &'a op::Attention, first: usize, extras: usize) -> Self {
        let source = x.input_type(first);
        let element_bytes = source.dtype.size();
        let places = op.places();
        let at = |(input, column): (usize, usize)| {
            Argument::Address(x.input(first + input) + column as u64 * element_bytes)
        };
        let stride = |(input, _)| Argument::U32(x.input_type(first + input).width() as u32);
        let (batch, seq) = (source.shape.dims()[0], source.shape.dims()[1]);
        let tensor_cores = TensorCores::find(op, source.dtype);
        let mut scalars = vec![
            stride(places[0]),
            stride(places[1]),
            Argument::I32(seq as i32),
            Argument::I32(op.heads as i32),
            Argument::I32(op.kv_heads as i32),
        ];
        if tensor_cores.is_none() {
            scalars.push(Argument::I32(op.head_dim as i32));
            scalars.push(Argument::I32(chunks(op.head_dim).1 as i32));
        }
        scalars.push(Argument::F32(op.scale as f32));
        scalars.push(Argument::I32(i32::from(op.causal)));
        scalars.extend(x.dropout_arguments(op.dropout, Some(extras)));
        scalars.push(x.optional_input(op.lengths().map(|lengths| extras + lengths)));
        scalars.push(Argument::I32(op.window.unwrap_or(seq).min(seq) as i32));
        scalars.push(x.optional_input(op.starts().map(|starts| extras + starts)));
        let selection = op.selected().map(|selected| extras + selected);
        if tensor_cores.is_none() || selection.is_some() {
            scalars.push(x.optional_input(selection));
        }
        Self {
            op,
            batch,
            seq,
            tensor_cores,
            sources: places.map(at),
            scalars,
        }
    }

    /// Launches on the tensor cores as `cores` says (kernel, threads, shared memory), otherwise
    /// the kernel `any` with its shared memory. One block has rows of one of the `heads`.
    fn launch(
        &self,
        x: &mut Lowering<'_>,
        heads: usize,
        cores: impl Fn(&TensorCores) -> (Kernel, u32, usize),
        any: (&'static str, usize),
        mut arguments: Vec<Argument>,
    ) {
        arguments.extend(&self.scalars);
        let blocks = |rows: usize| (self.seq.div_ceil(rows) * heads * self.batch).max(1) as u32;
        let (kernel, shape) = match self.tensor_cores {
            Some(instance) => {
                let (kernel, threads, bytes) = cores(instance);
                let shape = LaunchShape {
                    grid: [blocks(ROWS), 1, 1],
                    block: [threads, 1, 1],
                    shared_bytes: bytes as u32,
                };
                (kernel, shape)
            }
            None => {
                let chunks = chunks(self.op.head_dim).0 as u32;
                let shape = LaunchShape {
                    grid: [blocks(SIDE), chunks, 1],
                    block: [256, 1, 1],
                    shared_bytes: any.1 as u32,
                };
                (kernel("attention_any", any.0), shape)
            }
        };
        x.launch(kernel, shape, arguments);
    }

    /// The gradients of keys and values from those of every query head.
    fn sum_heads(&self, x: &mut Lowering<'_>, parts: u64, [dk, dv]: [Argument; 2]) {
        let op = self.op;
        let quads = self.batch * self.seq * op.kv_heads * op.head_dim / 4;
        let arguments = vec![
            Argument::Address(parts),
            dk,
            dv,
            self.scalars[1],
            Argument::I32(self.seq as i32),
            Argument::I32(op.heads as i32),
            Argument::I32(op.kv_heads as i32),
            Argument::I32(op.head_dim as i32),
            Argument::U64(quads as u64),
        ];
        let shape = LaunchShape::linear((2 * quads).div_ceil(256), 256);
        let kernel = kernel("attention_backward", "attention_sum_heads");
        x.launch(kernel, shape, arguments);
    }
}

fn kernel(file: &'static str, function: &'static str) -> Kernel {
    Kernel { file, function }
}

pub fn attention(x: &mut Lowering<'_>, op: &op::Attention) {
    if x.card.is_hopper && op.hopper_short(&x.input_type(0)).is_some() {
        return attention_hopper_short::attention(x, op);
    }
    if x.card.is_hopper && op.suits_hopper(&x.input_type(0)) {
        return attention_hopper::attention(x, op);
    }
    if let Some(site) = attention_narrow::Site::find(x, op, 0, op.num_sources()) {
        return site.forward(x, op);
    }
    let site = Site::new(x, op, 0, op.num_sources());
    let mut arguments = site.sources.to_vec();
    arguments.extend([x.output_argument(0), x.output_argument(1)]);
    site.launch(
        x,
        op.heads,
        |instance| {
            let function = instance.functions(op).forward;
            let kernel = kernel("attention_tensor", function);
            (kernel, 128, instance.forward_bytes())
        },
        ("attention_forward_any", any_bytes(op.head_dim, 4, 1)),
        arguments,
    );
}

pub fn attention_backward(x: &mut Lowering<'_>, op: &op::AttentionBackward) {
    let op = &op.0;
    if x.card.is_hopper
        && let Some(layout) = op.hopper_short(&x.input_type(1))
    {
        return attention_hopper_short::attention_backward(x, op, &layout);
    }
    if x.card.is_hopper
        && let Some(layout) = op.hopper_dealt(&x.input_type(1), x.card.multiprocessors)
    {
        return attention_hopper_dealt::attention_backward(x, op, &layout);
    }
    if x.card.is_hopper
        && let Some(layout) = op.hopper_backward(&x.input_type(1), x.card.multiprocessors)
    {
        return attention_hopper::attention_backward(x, op, &layout);
    }
    let sources = op.num_sources();
    let element_bytes = x.input_type(1).dtype.size();
    let [dq, dk, dv] = op.places().map(|(output, column)| {
        Argument::Address(x.output(output) + column as u64 * element_bytes)
    });
    if let Some(site) = attention_narrow::Site::find(x, op, 1, sources + 3) {
        return site.backward(x, op, [dq, dk, dv]);
    }
    let site = Site::new(x, op, 1, sources + 3);
    let parts = op.cuda_head_parts(&x.input_type(1));
    let (workspace, _) = x.workspace();
    let delta = Argument::Address(workspace + parts);

    let rows = site.batch * site.seq;
    // Eight lanes for a row of a head.
    let blocks = (rows * op.heads * 8).div_ceil(256);
    x.launch(
        kernel("attention_backward", "attention_delta"),
        LaunchShape::linear(blocks, 256),
        vec![
            x.input_argument(0),
            x.input_argument(sources + 1),
            delta,
            Argument::U64(rows as u64),
            Argument::I32(site.seq as i32),
            Argument::I32(op.heads as i32),
            Argument::I32(op.head_dim as i32),
            Argument::I32(i32::from(op.head_dim.is_multiple_of(8))),
        ],
    );

    let mut operands = vec![x.input_argument(0)];
    operands.extend(site.sources);
    operands.extend([x.input_argument(sources + 2), delta]);
    let mut key_operands = [&operands[..], &[dk, dv]].concat();
    if site.tensor_cores.is_some() && op.selection {
        key_operands.push(match parts {
            0 => Argument::Null,
            _ => Argument::Address(workspace),
        });
    }
    site.launch(
        x,
        if parts > 0 { op.heads } else { op.kv_heads },
        |instance| {
            let function = instance.functions(op).keys;
            let kernel = kernel("attention_backward", function);
            (kernel, instance.keys_threads, instance.keys_bytes())
        },
        ("attention_backward_keys_any", any_bytes(op.head_dim, 6, 2)),
        key_operands,
    );
    if parts > 0 {
        site.sum_heads(x, workspace, [dk, dv]);
    }
    site.launch(
        x,
        op.heads,
        |instance| {
            let function = instance.functions(op).queries;
            let kernel = kernel("attention_backward", function);
            (kernel, 128, instance.queries_bytes())
        },
        (
            "attention_backward_queries_any",
            any_bytes(op.head_dim, 5, 1),
        ),
        [&operands[..], &[dq]].concat(),
    );
}

#[cfg(test)]
pub(super) mod tests {
    use cinch_graph::op::AttentionInputs::{Packed, Separate};
    use cinch_graph::{Dropout, Graph, Target};
    use cinch_plan::{Options, Plan};

    use super::*;
    use crate::cuda::command::Command;
    use crate::cuda::lowering::Card;

    const TENSOR_CORE_SOURCE: &str = concat!(
        include_str!("../kernels/attention.cuh"),
        include_str!("../kernels/attention_tensor.cu")
    );
    const TENSOR_CORE_BACKWARD_SOURCE: &str = concat!(
        include_str!("../kernels/attention.cuh"),
        include_str!("../kernels/attention_backward.cu")
    );
    const ANY_SOURCE: &str = include_str!("../kernels/attention_any.cu");
    const NARROW_SOURCE: &str = include_str!("../kernels/attention_narrow.cu");
    const NARROW_TENSOR_SOURCE: &str = include_str!("../kernels/attention_narrow_tensor.cu");
    const HOPPER_SOURCE: &str = include_str!("../kernels/attention_hopper.cu");
    const HOPPER_BACKWARD_SOURCE: &str = include_str!("../kernels/attention_hopper_backward.cu");
    const HOPPER_DEALT_SOURCE: &str = include_str!("../kernels/attention_hopper_dealt.cu");
    const HOPPER_SHORT_SOURCE: &str = include_str!("../kernels/attention_hopper_short.cu");
    const HOPPER_SHORT_FORWARD_SOURCE: &str =
        include_str!("../kernels/attention_hopper_short_forward.cu");

    pub fn op(
        inputs: op::AttentionInputs,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> op::Attention {
        op::Attention {
            inputs,
            heads,
            kv_heads,
            head_dim,
            causal: true,
            scale: 0.125,
            dropout: Some(Dropout {
                rate: 0.25,
                stream: 3,
            }),
            padding: true,
            window: Some(33),
            documents: true,
            selection: false,
        }
    }

    /// Of which nothing is hidden but by the order.
    pub fn plain(
        inputs: op::AttentionInputs,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> op::Attention {
        op::Attention {
            padding: false,
            window: None,
            documents: false,
            ..op(inputs, heads, kv_heads, head_dim)
        }
    }

    /// Forward and backward of one op over [batch, seq], lowered.
    fn lower(
        op: &op::Attention,
        dtype: DType,
        batch: usize,
        seq: usize,
    ) -> (Graph, Plan, Vec<Command>) {
        lower_for(op, dtype, batch, seq, Card::ANY)
    }

    pub fn lower_for(
        op: &op::Attention,
        dtype: DType,
        batch: usize,
        seq: usize,
        card: Card,
    ) -> (Graph, Plan, Vec<Command>) {
        let mut graph = Graph::new(dtype);
        let (q, kv) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
        let widths = match op.inputs {
            Packed => vec![q + 2 * kv],
            Separate => vec![q, kv, kv],
        };
        let mut inputs: Vec<_> = widths
            .iter()
            .enumerate()
            .map(|(i, &width)| graph.batch(&format!("source{i}"), [batch, seq, width], dtype))
            .collect();
        let mut extras = Vec::new();
        if op.dropout.is_some() {
            extras.push(graph.random_state());
        }
        if op.padding {
            extras.push(graph.batch("lengths", [batch], DType::I32));
        }
        if op.documents {
            extras.push(graph.batch("starts", [batch, seq], DType::I32));
        }
        if op.selection {
            let words = seq.div_ceil(32);
            extras.push(graph.batch("selection", [batch, seq, words], DType::I32));
        }
        inputs.extend(&extras);
        let outputs = graph.emit("attention", op.clone(), inputs.clone()).unwrap();
        let mut all = vec![graph.batch("do", [batch, seq, q], dtype)];
        all.extend(&inputs[..op.num_sources()]);
        all.extend([outputs[0], outputs[1]]);
        all.extend(&extras);
        graph
            .emit("backward", op::AttentionBackward(op.clone()), all)
            .unwrap();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut x = Lowering::new(&graph, &plan, 0, true, card);
        attention(&mut x, op);
        let mut commands = x.finish();
        let mut x = Lowering::new(&graph, &plan, 1, true, card);
        attention_backward(&mut x, &op::AttentionBackward(op.clone()));
        commands.extend(x.finish());
        (graph, plan, commands)
    }

    /// The types of a kernel's parameters, as its source has them.
    fn parameters(kernel: Kernel) -> Vec<String> {
        let source = match kernel.file {
            "attention_tensor" => TENSOR_CORE_SOURCE,
            "attention_backward" => TENSOR_CORE_BACKWARD_SOURCE,
            "attention_narrow" => NARROW_SOURCE,
            "attention_narrow_tensor" => NARROW_TENSOR_SOURCE,
            "attention_hopper" => HOPPER_SOURCE,
            "attention_hopper_backward" => HOPPER_BACKWARD_SOURCE,
            "attention_hopper_dealt" => HOPPER_DEALT_SOURCE,
            "attention_hopper_short" => HOPPER_SHORT_SOURCE,
            "attention_hopper_short_forward" => HOPPER_SHORT_FORWARD_SOURCE,
            _ => ANY_SOURCE,
        };
        let source = source.replace('\\', " ");
        // The parameters that a source's kernels share are a macro of it.
        let shared_name = match kernel.file {
            "attention_any" | "attention_narrow" | "attention_narrow_tensor" => "PARAMETERS",
            _ => "SCALARS",
        };
        let define = format!("#define {shared_name} ");
        let (_, shared) = source.split_once(&define).unwrap();
        let shared = shared.split('#').next().unwrap_or_default();
        let (stem, width) = kernel.function.rsplit_once('_').unwrap();
        let is_instance = source.contains(&format!("INSTANCE({}", kernel.function));
        let name = match width.parse::<u32>() {
            _ if is_instance => " NAME(".to_owned(),
            Ok(_) => format!(" {stem}_##D("),
            Err(_) => format!(" {}(", kernel.function),
        };
        let (_, rest) = source.split_once(&name).unwrap();
        let (list, _) = rest.split_once(')').unwrap();
        list.replace(shared_name, shared)
            .split(',')
            .map(|parameter| {
                let kind = parameter.trim().trim_start_matches("const ");
                let kind = kind.trim_start_matches("__grid_constant__ ");
                match parameter.contains('*') {
                    true => "pointer".to_owned(),
                    false => kind.split(' ').next().unwrap().to_owned(),
                }
            })
            .collect()
    }

    pub fn launches(commands: &[Command]) -> Vec<(Kernel, LaunchShape, &[Argument])> {
        commands
            .iter()
            .filter_map(|command| match command {
                Command::Launch {
                    kernel,
                    shape,
                    arguments,
                } => Some((*kernel, *shape, &arguments[..])),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn arguments_are_the_kernels_parameters() {
        for (dtype, head_dim, card) in [
            (DType::Bf16, 32, Card::ANY),
            (DType::F16, 64, Card::ANY),
            (DType::Bf16, 128, Card::ANY),
            (DType::Bf16, 24, Card::ANY),
            (DType::F32, 64, Card::ANY),
            (DType::F16, 2, Card::ANY),
            (DType::F32, 8, Card::HOPPER),
            (DType::F16, 32, Card::HOPPER),
            (DType::F16, 64, Card::HOPPER),
            (DType::Bf16, 128, Card::HOPPER),
        ] {
            let encoder = op::Attention {
                causal: false,
                padding: true,
                ..plain(Packed, 4, 4, head_dim)
            };
            let few = op::Attention {
                dropout: None,
                ..plain(Packed, 4, 2, head_dim)
            };
            let ops = [
                (op(Packed, 4, 2, head_dim), 50),
                (plain(Packed, 4, 2, head_dim), 50),
                (few, 1000),
                (encoder, 50),
            ];
            let lowered = ops.map(|(op, seq)| lower_for(&op, dtype, 2, seq, card).2);
            let launched = lowered.iter().flat_map(|commands| launches(commands));
            for (kernel, _, arguments) in launched {
                let given: Vec<_> = arguments
                    .iter()
                    .map(|argument| match argument {
                        Argument::Address(_) | Argument::Host(_) | Argument::Null => "pointer",
                        Argument::I32(_) => "int",
                        Argument::U32(_) | Argument::Stream(_) => "u32",
                        Argument::U64(_) => "u64",
                        Argument::F32(_) => "float",
                        Argument::TensorMap(_) | Argument::MatrixMap(_) => "TensorMap",
                    })
                    .collect();
                assert_eq!(parameters(kernel), given, "{}", kernel.function);
            }
        }
    }

    #[test]
    fn tensor_cores_serve_their_widths_in_16_bits() {
        let file = |head_dim, dtype| {
            let (_, _, commands) = lower(&op(Packed, 2, 2, head_dim), dtype, 1, 7);
            launches(&commands)[0].0.file
        };
        for head_dim in [32, 64, 128] {
            assert_eq!(file(head_dim, DType::Bf16), "attention_tensor");
            assert_eq!(file(head_dim, DType::F16), "attention_tensor");
            assert_eq!(file(head_dim, DType::F32), "attention_any");
        }
        for head_dim in [4, 24, 80, 256] {
            assert_eq!(file(head_dim, DType::Bf16), "attention_any");
        }
        let negative = op::Attention {
            scale: -0.125,
            ..op(Packed, 2, 2, 64)
        };
        let (_, _, commands) = lower(&negative, DType::Bf16, 1, 7);
        assert_eq!(launches(&commands)[0].0.file, "attention_any");
    }

    #[test]
    fn blocks_cover_the_sequence() {
        // 777 positions are 7 blocks of 128 or 25 of 32.
        let (_, _, commands) = lower(&op(Separate, 6, 2, 64), DType::Bf16, 3, 777);
        let grids: Vec<_> = launches(&commands).iter().map(|l| l.1.grid).collect();
        let rows_of_heads = (3_u32 * 777 * 6 * 8).div_ceil(256);
        let expected = [
            [7 * 6 * 3, 1, 1],
            [rows_of_heads, 1, 1],
            [7 * 2 * 3, 1, 1],
            [7 * 6 * 3, 1, 1],
        ];
        assert_eq!(grids, expected);
        let (_, _, commands) = lower(&op(Separate, 6, 2, 200), DType::Bf16, 3, 777);
        let grids: Vec<_> = launches(&commands).iter().map(|l| l.1.grid).collect();
        assert_eq!(grids[0], [25 * 6 * 3, 2, 1]);
        assert_eq!(grids[2], [25 * 2 * 3, 2, 1]);
    }

    /// Where key heads have too few blocks for a card, every query head has its own, and what they
    /// leave is added up.
    #[test]
    fn few_blocks_of_selected_keys_are_split_by_heads() {
        let selected = |heads: usize, kv_heads: usize| op::Attention {
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: true,
            ..op(Separate, heads, kv_heads, 64)
        };
        let of = |op: &op::Attention, batch: usize| {
            let (graph, plan, commands) = lower(op, DType::Bf16, batch, 1024);
            let launches: Vec<(Kernel, LaunchShape, Vec<Argument>)> = launches(&commands)
                .into_iter()
                .map(|(kernel, shape, arguments)| (kernel, shape, arguments.to_vec()))
                .collect();
            (graph, plan, launches)
        };
        let (graph, plan, split) = of(&selected(8, 2), 2);
        let names: Vec<_> = split.iter().map(|launch| launch.0.function).collect();
        let expected = [
            "attention_selected_forward_64",
            "attention_delta",
            "attention_selected_backward_keys_64",
            "attention_sum_heads",
            "attention_selected_backward_queries_64",
        ];
        assert_eq!(names, expected);
        assert_eq!(split[2].1.grid, [8 * 8 * 2, 1, 1]);
        let workspace = plan.workspace(1).unwrap();
        let parts = 2 * 2 * 1024 * 8 * 64 * 4;
        assert!(workspace.bytes >= parts + 2 * 8 * 1024 * 4);
        assert_eq!(split[3].2[0], Argument::Address(workspace.offset));
        assert_eq!(split[2].2[8], Argument::Address(workspace.offset));
        assert_eq!(split[1].2[2], Argument::Address(workspace.offset + parts));
        let dk = plan.placement(graph.nodes[1].outputs[1]).unwrap().offset;
        assert_eq!(split[3].2[1], Argument::Address(dk));
        for (kernel, _, arguments) in &split {
            let pointers = arguments
                .iter()
                .map(|argument| matches!(argument, Argument::Address(_) | Argument::Null));
            let declared = parameters(*kernel);
            let declared = declared.iter().map(|kind| kind == "pointer");
            assert!(pointers.eq(declared), "{}", kernel.function);
        }
        // Enough of them, or nothing to add up.
        for (heads, kv_heads, batch) in [(8, 2, 16), (2, 2, 2)] {
            let (_, _, whole) = of(&selected(heads, kv_heads), batch);
            assert_eq!(whole.len(), 4);
            assert_eq!(whole[2].1.grid, [(8 * kv_heads * batch) as u32, 1, 1]);
            assert_eq!(whole[2].2[8], Argument::Null);
        }
    }

    #[test]
    fn shared_memory_fits_the_smallest_cards() {
        for head_dim in 1..600 {
            for dtype in [DType::Bf16, DType::F32] {
                let (_, _, commands) = lower(&op(Packed, 1, 1, head_dim), dtype, 1, 1);
                for (kernel, shape, _) in launches(&commands) {
                    assert!(shape.shared_bytes <= 99 << 10, "{}", kernel.function);
                }
            }
        }
    }

    #[test]
    fn packed_blocks_are_columns_of_one_tensor() {
        let (graph, plan, commands) = lower(&op(Packed, 4, 2, 64), DType::Bf16, 2, 50);
        let launches = launches(&commands);
        let qkv = plan.placement(graph.nodes[0].inputs[0]).unwrap().offset;
        let columns = [0, 4 * 64 * 2, 6 * 64 * 2].map(|bytes| Argument::Address(qkv + bytes));
        assert_eq!(launches[0].2[..3], columns);
        assert_eq!(launches[2].2[1..4], columns);
        let gradient = plan.placement(graph.nodes[1].outputs[0]).unwrap().offset;
        let dkv = [4 * 64 * 2, 6 * 64 * 2].map(|bytes| Argument::Address(gradient + bytes));
        assert_eq!(launches[2].2[6..8], dkv);
        assert_eq!(launches[3].2[6], Argument::Address(gradient));
        // Both strides are the packed width; the workspace holds δ.
        assert_eq!(launches[0].2[5..7], [Argument::U32(8 * 64); 2]);
        let workspace = plan.workspace(1).unwrap();
        assert!(workspace.bytes >= 2 * 4 * 50 * 4);
        assert_eq!(launches[1].2[2], Argument::Address(workspace.offset));
    }
}
