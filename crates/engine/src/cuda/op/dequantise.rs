//! Codes of quantised weights back into numbers: one launch.

use cinch_graph::op::{Dequantise, Quantisation};
use cinch_weights::{DYNAMIC_MAP, NF4_MAP};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::{Lowering, MULTIPROCESSORS};

const THREADS: usize = 256;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "dequantise",
        function,
    }
}

pub fn dequantise(x: &mut Lowering<'_>, op: &Dequantise) {
    let elements = op.shape.elements();
    match op.quantisation {
        Quantisation::Nf4 { double } => {
            /// Numbers to a thread.
            const EACH: usize = 16;
            let scales = if double {
                [1, 2, 3].map(|input| x.input_argument(input))
            } else {
                [Argument::Null, x.input_argument(1), Argument::Null]
            };
            let mut arguments = vec![x.input_argument(0)];
            arguments.extend(scales);
            arguments.extend([x.output_argument(0), Argument::U64(elements as u64)]);
            let values = NF4_MAP.into_iter().chain(DYNAMIC_MAP);
            let table = values.map(f32::to_bits).collect();
            let blocks = elements.div_ceil(EACH * THREADS).min(32 * MULTIPROCESSORS);
            let shape = LaunchShape::linear(blocks, THREADS as u32);
            x.launch_table(kernel("dequantise_nf4"), shape, table, arguments);
        }
        Quantisation::Int8 => {
            let (rows, width) = (op.shape.rows(), op.shape.width());
            let shape = LaunchShape {
                grid: [rows.max(1) as u32, width.div_ceil(8 * THREADS) as u32, 1],
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
            };
            let arguments = vec![
                x.input_argument(0),
                x.input_argument(1),
                x.output_argument(0),
                Argument::U32(width as u32),
            ];
            x.launch(kernel("dequantise_int8"), shape, arguments);
        }
    }
}
