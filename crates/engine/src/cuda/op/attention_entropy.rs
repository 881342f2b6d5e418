//! The entropy of attention: one launch forward, two backward (queries, keys).

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Sides of a tile in `kernels/attention_entropy.cu`.
const ROWS: usize = 16;
const KEYS: usize = 32;
const THREADS: u32 = 256;

/// What `kernels/attention_entropy_narrow.cu` is for, and positions and threads of its blocks.
const NARROW_HEADS: usize = 8;
const NARROW_WIDTH: usize = 8;
const NARROW_BLOCK: usize = 32;
const NARROW_THREADS: u32 = 128;
/// Positions of a block of `kernels/attention_entropy_tensor.cu`, which has as many threads.
const TENSOR_BLOCK: usize = 16;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "attention_entropy",
        function,
    }
}

/// An op with the tensors of its node.
struct Site {
    batch: usize,
    seq: usize,
    heads: usize,
    columns: usize,
    /// Whether the kernels for heads of 8 columns take it, and those on the tensor cores.
    is_narrow: bool,
    on_tensor_cores: bool,
    element_bytes: u64,
    /// Queries and keys at their first column.
    sources: [Argument; 2],
    /// Scalars that every kernel takes after its tensors.
    scalars: [Argument; 6],
}

impl Site {
    /// `qkv` is the input that holds queries and keys.
    fn new(x: &Lowering<'_>, op: &op::AttentionEntropy, qkv: usize) -> Self {
        let source = x.input_type(qkv);
        let columns = op.heads * op.head_dim;
        let element_bytes = source.dtype.size();
        let (batch, seq) = (source.shape.dims()[0], source.shape.dims()[1]);
        let at = |column: usize| Argument::Address(x.input(qkv) + column as u64 * element_bytes);
        Self {
            batch,
            seq,
            heads: op.heads,
            columns,
            is_narrow: op.heads <= NARROW_HEADS && op.head_dim == NARROW_WIDTH,
            on_tensor_cores: op.suits_tensor_cores(source.dtype),
            element_bytes,
            sources: [at(0), at(columns)],
            scalars: [
                Argument::U32(source.width() as u32),
                Argument::I32(seq as i32),
                Argument::I32(op.heads as i32),
                Argument::I32(op.head_dim as i32),
                Argument::F32(op.scale as f32),
                Argument::I32(i32::from(op.causal)),
            ],
        }
    }

    /// Launches a kernel of which there are four: for heads of 8 columns with and without the
    /// tensor cores, and by how many heads and columns registers have room for. A block has `rows` positions and, in shared memory,
    /// tiles of queries and keys and, for a backward, the gradients of their scores.
    fn launch(
        &self,
        x: &mut Lowering<'_>,
        [tensor, narrow, few, many]: [&'static str; 4],
        (rows, gradients): (usize, bool),
        arguments: Vec<Argument>,
    ) {
        if self.on_tensor_cores {
            let kernel = Kernel {
                file: "attention_entropy_tensor",
                function: tensor,
            };
            let shape = LaunchShape {
                grid: self.grid(TENSOR_BLOCK),
                block: [NARROW_THREADS, 1, 1],
                shared_bytes: 0,
            };
            return x.launch(kernel, shape, arguments);
        }
        if self.is_narrow {
            let kernel = Kernel {
                file: "attention_entropy_narrow",
                function: narrow,
            };
            let shape = LaunchShape {
                grid: self.grid(NARROW_BLOCK),
                block: [NARROW_THREADS, 1, 1],
                shared_bytes: 0,
            };
            return x.launch(kernel, shape, arguments);
        }
        let function = match self.heads <= 8 && self.columns <= 64 {
            true => few,
            false => many,
        };
        let tiles = ROWS * self.columns + KEYS * (self.columns + 1);
        let scores = match gradients {
            true => ROWS * self.heads * (KEYS + 1),
            false => 0,
        };
        let shape = LaunchShape {
            grid: self.grid(rows),
            block: [THREADS, 1, 1],
            shared_bytes: ((tiles + scores) * size_of::<f32>()) as u32,
        };
        x.launch(kernel(function), shape, arguments);
    }

    fn grid(&self, rows: usize) -> [u32; 3] {
        [self.seq.div_ceil(rows) as u32, self.batch as u32, 1]
    }
}

pub fn attention_entropy(x: &mut Lowering<'_>, op: &op::AttentionEntropy) {
    let site = Site::new(x, op, 0);
    let mut arguments = site.sources.to_vec();
    arguments.extend([
        x.input_argument(1),
        x.output_argument(0),
        x.optional_output(op.keep_means.then_some(1)),
    ]);
    arguments.extend(site.scalars);
    let kernels = [
        "attention_entropy_tensor",
        "attention_entropy_narrow",
        "attention_entropy_8",
        "attention_entropy_16",
    ];
    site.launch(x, kernels, (ROWS, false), arguments);
}

pub fn backward(x: &mut Lowering<'_>, op: &op::AttentionEntropy) {
    let site = Site::new(x, op, 1);
    let part = |index: usize| {
        let bytes = (index * site.columns) as u64 * site.element_bytes;
        Argument::Address(x.output(0) + bytes)
    };
    let [dq, dk, dv] = [0, 1, 2].map(part);
    let [q, k] = site.sources;
    let shared = [
        x.input_argument(0),
        q,
        k,
        x.input_argument(2),
        x.input_argument(3),
    ];

    let arguments = shared.into_iter().chain([dq, dv]).chain(site.scalars);
    let queries = [
        "attention_entropy_queries_tensor",
        "attention_entropy_queries_narrow",
        "attention_entropy_queries_8",
        "attention_entropy_queries_16",
    ];
    site.launch(x, queries, (ROWS, true), arguments.collect());

    let arguments = shared.into_iter().chain([dk]).chain(site.scalars);
    let keys = [
        "attention_entropy_keys_tensor",
        "attention_entropy_keys_narrow",
        "attention_entropy_keys_8",
        "attention_entropy_keys_16",
    ];
    site.launch(x, keys, (KEYS, true), arguments.collect());
}

pub fn cached(x: &mut Lowering<'_>, op: &op::AttentionEntropy) {
    let site = Site::new(x, op, 0);
    let [stride, seq, heads, width, scale, _] = site.scalars;
    let slots = x.input_type(1).shape.dims()[2];
    let arguments = vec![
        site.sources[0],
        x.input_argument(1),
        x.input_argument(2),
        x.output_argument(0),
        stride,
        seq,
        heads,
        width,
        scale,
        Argument::I32(slots as i32),
    ];
    let shape = LaunchShape {
        grid: [site.seq as u32, site.batch as u32, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    };
    x.launch(kernel("cached_attention_entropy"), shape, arguments);
}
