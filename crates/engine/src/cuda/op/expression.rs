//! Expressions and their reductions: launches of kernels that are made for them.

use std::sync::Arc;

use cinch_graph::op::{CudaReduction, Map, Reduce};

use super::activation::elementwise;
use crate::cuda::command::{Argument, Generated, LaunchShape};
use crate::cuda::expression::{self, FINISH_BLOCK, THREADS, row_block};
use crate::cuda::lowering::Lowering;

pub fn map(x: &mut Lowering<'_>, op: &Map) {
    let generated = expression::map(op);
    let elements = op.pointwise.shape.elements();
    let mut arguments = expression::arguments(&op.pointwise, |input| x.input_argument(input));
    for output in 0..op.outputs.len() {
        arguments.push(x.output_argument(output));
        arguments.push(Argument::U32(u32::from(x.adds(output))));
    }
    arguments.push(expression::num_vectors(elements, generated.vector));
    let kernel = Generated {
        source: Arc::from(generated.source),
        function: "map",
    };
    let shape = elementwise(elements, generated.vector);
    x.launch_generated(kernel, shape, arguments);
}

pub fn reduce(x: &mut Lowering<'_>, op: &Reduce) {
    let generated = expression::reduce(op);
    let reduction = op.cuda_reduction();
    let parts = reduction.parts();
    let (span_rows, _) = op.span();
    let outputs = op.broadcast.elements();
    let shape = match reduction {
        CudaReduction::Rows { .. } => {
            let [columns, rows] = row_block(op.broadcast.columns);
            let blocks = op.broadcast.columns.div_ceil(columns * generated.vector);
            LaunchShape {
                grid: [(blocks * op.broadcast.rows) as u32, parts as u32, 1],
                block: [columns as u32, rows as u32, 1],
                shared_bytes: 0,
            }
        }
        CudaReduction::Lanes { lanes, .. } => LaunchShape {
            grid: [outputs.div_ceil(THREADS / lanes) as u32, parts as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
        },
        CudaReduction::Each => {
            let threads = outputs.div_ceil(generated.vector);
            LaunchShape::linear(threads.div_ceil(THREADS).max(1), THREADS as u32)
        }
    };
    let source: Arc<str> = Arc::from(generated.source);
    let kernel = |function| Generated {
        source: source.clone(),
        function,
    };
    let adds = u32::from(x.adds(0));
    let (to, adds_now) = match parts {
        1 => (x.output_argument(0), adds),
        _ => (Argument::Address(x.workspace().0), 0),
    };
    let mut arguments = expression::arguments(&op.pointwise, |input| x.input_argument(input));
    arguments.push(to);
    arguments.extend(
        [
            outputs,
            span_rows,
            op.broadcast.row_group,
            op.broadcast.rows,
        ]
        .map(|count| Argument::U32(count as u32)),
    );
    arguments.push(Argument::U32(adds_now));
    x.launch_generated(kernel("reduce"), shape, arguments);
    if parts > 1 {
        let arguments = vec![
            to,
            x.output_argument(0),
            Argument::U32(outputs as u32),
            Argument::U32(parts as u32),
            Argument::U32(adds),
        ];
        let [columns, rows] = FINISH_BLOCK;
        let shape = LaunchShape {
            grid: [outputs.div_ceil(columns) as u32, 1, 1],
            block: [columns as u32, rows as u32, 1],
            shared_bytes: 0,
        };
        x.launch_generated(kernel("finish"), shape, arguments);
    }
}
