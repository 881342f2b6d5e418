//! Attention for heads of 2, 4 or 8 columns: on the tensor cores one launch each way, where they
//! take it; otherwise one forward, two backward (keys and values, then queries). All make δ
//! themselves.

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// What `kernels/attention_narrow.cu` has: threads of a block, and its positions.
const THREADS: u32 = 128;
const BLOCK: usize = 256;

/// What `kernels/attention_narrow_tensor.cu` has: keys of a warp, and warps of a block at most.
const WARP_KEYS: usize = 64;
const MOST_WARPS: usize = op::Attention::CUDA_NARROW_LENGTH / WARP_KEYS;

/// The kernels of a width.
struct Functions {
    head_dim: usize,
    tensor_forward: &'static str,
    tensor_backward: &'static str,
    forward: &'static str,
    keys: &'static str,
    queries: &'static str,
}

const FUNCTIONS: [Functions; 3] = [
    Functions {
        head_dim: 2,
        tensor_forward: "attention_forward_tensor_2",
        tensor_backward: "attention_backward_tensor_2",
        forward: "attention_forward_narrow_2",
        keys: "attention_backward_keys_narrow_2",
        queries: "attention_backward_queries_narrow_2",
    },
    Functions {
        head_dim: 4,
        tensor_forward: "attention_forward_tensor_4",
        tensor_backward: "attention_backward_tensor_4",
        forward: "attention_forward_narrow_4",
        keys: "attention_backward_keys_narrow_4",
        queries: "attention_backward_queries_narrow_4",
    },
    Functions {
        head_dim: 8,
        tensor_forward: "attention_forward_tensor_8",
        tensor_backward: "attention_backward_tensor_8",
        forward: "attention_forward_narrow_8",
        keys: "attention_backward_keys_narrow_8",
        queries: "attention_backward_queries_narrow_8",
    },
];

/// An op with the tensors of its node.
pub struct Site {
    functions: &'static Functions,
    batch: usize,
    seq: usize,
    on_tensor_cores: bool,
    /// Queries, keys and values at their first column.
    sources: [Argument; 3],
    /// Scalars that every kernel takes after its tensors.
    scalars: Vec<Argument>,
}

impl Site {
    /// `first` is the input that holds the queries, `random` the one with the random state.
    /// `None` where these kernels do not suit: another width, or keys that are hidden by more than
    /// their order.
    pub fn find(x: &Lowering<'_>, op: &op::Attention, first: usize, random: usize) -> Option<Self> {
        let hides = op.padding || op.window.is_some() || op.documents || op.selection;
        let functions = FUNCTIONS.iter().find(|f| f.head_dim == op.head_dim);
        let functions = functions.filter(|_| !hides)?;
        let source = x.input_type(first);
        let places = op.places();
        let at = |(input, column): (usize, usize)| {
            Argument::Address(x.input(first + input) + column as u64 * source.dtype.size())
        };
        let stride = |(input, _)| Argument::U32(x.input_type(first + input).width() as u32);
        let (batch, seq) = (source.shape.dims()[0], source.shape.dims()[1]);
        let mut scalars = vec![
            stride(places[0]),
            stride(places[1]),
            Argument::I32(seq as i32),
            Argument::I32(op.heads as i32),
            Argument::I32(op.kv_heads as i32),
            Argument::F32(op.scale as f32),
            Argument::I32(i32::from(op.causal)),
        ];
        scalars.extend(x.dropout_arguments(op.dropout, Some(random)));
        Some(Self {
            functions,
            batch,
            seq,
            on_tensor_cores: op.suits_narrow_tensor_cores(&source),
            sources: places.map(at),
            scalars,
        })
    }

    fn launch(
        &self,
        x: &mut Lowering<'_>,
        function: &'static str,
        heads: usize,
        arguments: &[Argument],
    ) {
        let blocks = self.seq.div_ceil(BLOCK) * heads * self.batch;
        let kernel = Kernel {
            file: "attention_narrow",
            function,
        };
        let shape = LaunchShape::linear(blocks.max(1), THREADS);
        x.launch(kernel, shape, [arguments, &self.scalars].concat());
    }

    /// A block for each of so many heads of all sequences.
    fn launch_tensor(
        &self,
        x: &mut Lowering<'_>,
        function: &'static str,
        heads: usize,
        arguments: &[Argument],
    ) {
        let kernel = Kernel {
            file: "attention_narrow_tensor",
            function,
        };
        let warps = self.seq.div_ceil(WARP_KEYS).clamp(1, MOST_WARPS);
        let shape = LaunchShape::linear((heads * self.batch).max(1), 32 * warps as u32);
        x.launch(kernel, shape, [arguments, &self.scalars].concat());
    }

    pub fn forward(&self, x: &mut Lowering<'_>, op: &op::Attention) {
        let outputs = [x.output_argument(0), x.output_argument(1)];
        let arguments = [&self.sources[..], &outputs].concat();
        if self.on_tensor_cores {
            let function = self.functions.tensor_forward;
            return self.launch_tensor(x, function, op.heads, &arguments);
        }
        self.launch(x, self.functions.forward, op.heads, &arguments);
    }

    /// `gradients` are those of queries, keys and values at their first column.
    pub fn backward(&self, x: &mut Lowering<'_>, op: &op::Attention, gradients: [Argument; 3]) {
        let sources = op.num_sources();
        let mut operands = vec![x.input_argument(0)];
        operands.extend(self.sources);
        operands.extend([1, 2].map(|input| x.input_argument(sources + input)));
        if self.on_tensor_cores {
            let arguments = [&operands[..], &gradients].concat();
            let function = self.functions.tensor_backward;
            return self.launch_tensor(x, function, op.kv_heads, &arguments);
        }
        let [dq, dk, dv] = gradients;
        let keys = [&operands[..], &[dk, dv]].concat();
        self.launch(x, self.functions.keys, op.kv_heads, &keys);
        let queries = [&operands[..], &[dq]].concat();
        self.launch(x, self.functions.queries, op.heads, &queries);
    }
}

#[cfg(test)]
mod tests {
    use cinch_graph::DType;
    use cinch_graph::op::AttentionInputs::{Packed, Separate};

    use super::super::attention::tests::{launches, lower_for, op, plain};
    use super::*;
    use crate::cuda::lowering::Card;

    fn files(op: &op::Attention, dtype: DType) -> Vec<&'static str> {
        let (_, _, commands) = lower_for(op, dtype, 1, 7, Card::HOPPER);
        launches(&commands).iter().map(|l| l.0.file).collect()
    }

    #[test]
    fn narrow_heads_have_their_kernels_in_every_precision() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for head_dim in [2, 4, 8] {
                let op = plain(Packed, 4, 2, head_dim);
                match dtype {
                    DType::F32 => assert_eq!(files(&op, dtype), ["attention_narrow"; 3]),
                    _ => assert_eq!(files(&op, dtype), ["attention_narrow_tensor"; 2]),
                }
                let negative = op::Attention { scale: -1.0, ..op };
                assert_eq!(files(&negative, dtype), ["attention_narrow"; 3]);
            }
            for head_dim in [1, 3, 6, 16] {
                let op = plain(Packed, 4, 2, head_dim);
                assert_eq!(files(&op, dtype)[0], "attention_any");
            }
        }
    }

    #[test]
    fn hidden_keys_are_left_to_the_others() {
        let plain = plain(Separate, 4, 2, 8);
        let hiding = [
            op::Attention {
                padding: true,
                ..plain.clone()
            },
            op::Attention {
                window: Some(33),
                ..plain.clone()
            },
            op::Attention {
                documents: true,
                ..plain
            },
        ];
        for op in hiding {
            assert_eq!(files(&op, DType::F16)[0], "attention_any");
        }
        assert_eq!(
            files(&op(Separate, 4, 2, 8), DType::F16)[0],
            "attention_any"
        );
    }

    #[test]
    fn blocks_cover_the_sequence() {
        let op = plain(Separate, 6, 2, 2);
        let (_, _, commands) = lower_for(&op, DType::F16, 3, 777, Card::ANY);
        let grids: Vec<_> = launches(&commands).iter().map(|l| l.1.grid).collect();
        assert_eq!(
            grids,
            [[4 * 6 * 3, 1, 1], [4 * 2 * 3, 1, 1], [4 * 6 * 3, 1, 1]]
        );
    }

    #[test]
    fn on_the_tensor_cores_a_block_has_a_head() {
        let op = plain(Separate, 6, 2, 2);
        for (seq, threads) in [(1, 32), (64, 32), (65, 64), (500, 256), (512, 256)] {
            let (_, _, commands) = lower_for(&op, DType::F16, 3, seq, Card::ANY);
            let launches = launches(&commands);
            let shapes: Vec<_> = launches.iter().map(|l| (l.1.grid, l.1.block)).collect();
            let block = [threads, 1, 1];
            assert_eq!(shapes, [([6 * 3, 1, 1], block), ([2 * 3, 1, 1], block)]);
        }
        let (_, _, commands) = lower_for(&op, DType::F16, 3, 513, Card::ANY);
        assert_eq!(launches(&commands).len(), 3);
    }

    #[test]
    fn packed_heads_are_columns_of_one_tensor() {
        let op = plain(Packed, 4, 2, 8);
        let (graph, plan, commands) = lower_for(&op, DType::F32, 2, 50, Card::ANY);
        let launches = launches(&commands);
        let columns = |tensor| {
            let start = plan.placement(tensor).unwrap().offset;
            [0, 4 * 8 * 4, 6 * 8 * 4].map(|bytes| Argument::Address(start + bytes))
        };
        let sources = columns(graph.nodes[0].inputs[0]);
        assert_eq!(launches[0].2[..3], sources);
        assert_eq!(launches[1].2[1..4], sources);
        let [dq, dk, dv] = columns(graph.nodes[1].outputs[0]);
        assert_eq!(launches[1].2[6..8], [dk, dv]);
        assert_eq!(launches[2].2[6], dq);
    }
}
