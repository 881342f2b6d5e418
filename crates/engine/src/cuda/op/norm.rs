//! Norms: which kernel takes a width, and how many rows a block works on at once.

use cinch_graph::op::{Norm, NormApply, NormBackward, NormKind, cuda_quads_of_row};

use crate::cuda::command::{Argument, Command, Kernel, LaunchShape};
use crate::cuda::lowering::{Lowering, MULTIPROCESSORS};

use super::linear::sum_partials;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "norm",
        function,
    }
}

/// Threads of a block to which a whole row belongs, where a row is no whole number of vectors.
const ANY_THREADS: u32 = 256;

/// Rows of the blocks that sum columns of any width, and columns.
const ANY_ROWS: usize = 8;
const ANY_COLUMNS: usize = 32;

/// The sizes of a norm, and how its rows are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    rows: usize,
    width: usize,
    /// Threads that share a row, a 16-byte vector to each; `None` where a row is not made of
    /// such vectors, or of too many.
    threads: Option<usize>,
    /// Elements that a lane has where a row is a warp's, in fours; `None` for other widths.
    quads: Option<usize>,
}

/// Rows that a block of warps works on at once, and blocks that find registers.
const WARPS: usize = 8;
const WARP_BLOCKS: usize = 3 * MULTIPROCESSORS;

impl Rows {
    fn new(x: &Lowering<'_>) -> Self {
        let ty = x.input_type(0);
        let vector = 16 / ty.dtype.size() as usize;
        let threads = (ty.width() / vector).next_multiple_of(32);
        let fits = ty.width().is_multiple_of(vector) && threads <= 1024;
        Self {
            rows: ty.rows(),
            width: ty.width(),
            threads: fits.then_some(threads),
            quads: cuda_quads_of_row(&ty),
        }
    }

    /// The launch of a kernel for rows that are a warp's, one of four by width.
    fn by_warps(&self, kernels: [&'static str; 4]) -> Option<(Kernel, LaunchShape)> {
        let function = kernels.get(self.quads?.checked_sub(1)?)?;
        let blocks = self.rows.div_ceil(WARPS).clamp(1, WARP_BLOCKS);
        let shape = LaunchShape {
            grid: [blocks as u32, 1, 1],
            block: [32, WARPS as u32, 1],
            shared_bytes: 0,
        };
        Some((kernel(function), shape))
    }

    /// Rows that a block works on at once: blocks have about 512 threads, and no more rows than
    /// there are barriers for.
    fn side_by_side(threads: usize) -> usize {
        (512 / threads).clamp(1, 8)
    }

    /// Blocks that find registers at the same time, where threads have as many as they may. Each
    /// brings the numbers of its next row while it sums up one: fewer rows to a block are fewer
    /// that nobody has to wait for.
    fn at_once(&self) -> usize {
        let block = self
            .threads
            .map(|threads| threads * Self::side_by_side(threads));
        MULTIPROCESSORS * (1024 / block.unwrap_or(1024)).max(1)
    }

    /// The launch with at most `most` blocks.
    fn shape(&self, most: usize) -> LaunchShape {
        match self.threads {
            Some(threads) => {
                let side_by_side = Self::side_by_side(threads);
                let blocks = self.rows.div_ceil(side_by_side).min(most);
                LaunchShape {
                    grid: [blocks.max(1) as u32, 1, 1],
                    block: [threads as u32, side_by_side as u32, 1],
                    shared_bytes: 0,
                }
            }
            None => LaunchShape::linear(self.rows.min(8 * MULTIPROCESSORS), ANY_THREADS),
        }
    }

    /// One of two kernels: for rows of vectors, or for any.
    fn choose(&self, vectors: &'static str, any: &'static str) -> Kernel {
        kernel(if self.threads.is_some() { vectors } else { any })
    }

    fn arguments(&self) -> [Argument; 2] {
        [
            Argument::U32(self.rows as u32),
            Argument::U32(self.width as u32),
        ]
    }
}

pub fn norm(x: &mut Lowering<'_>, op: &Norm) {
    let rows = Rows::new(x);
    let layout = op.layout();
    // A block that is recomputed reads the sum only when it runs again. Where a row is not held in
    // registers, it is read back in any case.
    let is_written = rows.threads.is_none() || x.is_read(0);
    let stream = (op.residual && is_written).then_some(0);
    let mut arguments = vec![
        x.input_argument(0),
        x.optional_input(op.residual.then_some(1)),
        x.input_argument(layout.gamma),
        x.optional_input(layout.beta),
        x.optional_output(stream),
        x.output_argument(layout.y),
        x.optional_output(layout.mean),
        x.output_argument(layout.rstd),
    ];
    arguments.extend(x.dropout_arguments(op.dropout, layout.random));
    arguments.extend(rows.arguments());
    arguments.push(Argument::F32(op.epsilon as f32));
    let by_warps = rows.by_warps([
        "norm_forward_warp_1",
        "norm_forward_warp_2",
        "norm_forward_warp_3",
        "norm_forward_warp_4",
    ]);
    let (kernel, shape) = by_warps.unwrap_or_else(|| {
        let kernel = rows.choose("norm_forward", "norm_forward_any");
        (kernel, rows.shape(rows.at_once()))
    });
    x.launch(kernel, shape, arguments);
}

pub fn norm_apply(x: &mut Lowering<'_>, op: &NormApply) {
    let rows = Rows::new(x);
    let [mean, rstd, gamma, beta] = match op.kind {
        NormKind::Layer => [Some(1), Some(2), Some(3), Some(4)],
        NormKind::Rms => [None, Some(1), Some(2), None],
    };
    let mut arguments = vec![
        x.input_argument(0),
        x.optional_input(mean),
        x.optional_input(rstd),
        x.optional_input(gamma),
        x.optional_input(beta),
        x.output_argument(0),
    ];
    arguments.extend(rows.arguments());
    let kernel = rows.choose("norm_apply", "norm_apply_any");
    x.launch(kernel, rows.shape(4 * MULTIPROCESSORS), arguments);
}

pub fn norm_backward(x: &mut Lowering<'_>, op: &NormBackward) {
    let rows = Rows::new(x);
    let layout = op.layout();
    let partials = Argument::Address(x.workspace().0);
    let dropout = x.dropout_arguments(op.dropout, layout.random);
    let operands = [
        x.input_argument(0),
        x.optional_input(layout.residual_gradient),
        x.input_argument(layout.stream),
        x.optional_input(layout.mean),
        x.input_argument(layout.rstd),
    ];
    let [dy, _, stream, mean, rstd] = operands;
    let mut arguments = operands.to_vec();
    arguments.extend([
        x.input_argument(layout.gamma),
        x.optional_input(layout.beta),
        x.output_argument(0),
        x.optional_output(layout.dbranch),
        x.optional_output(layout.value),
    ]);
    let by_warps = rows.by_warps([
        "norm_backward_warp_1",
        "norm_backward_warp_2",
        "norm_backward_warp_3",
        "norm_backward_warp_4",
    ]);
    if let Some((kernel, shape)) = by_warps.filter(|_| op.is_by_warps()) {
        arguments.remove(1);
        arguments.extend(dropout);
        arguments.extend(rows.arguments());
        return x.launch(kernel, shape, arguments);
    }
    let blocks = if rows.threads.is_some() {
        let (function, shape) = if op.parameters {
            arguments.push(partials);
            let shape = LaunchShape {
                shared_bytes: (2 * rows.width * size_of::<f32>()) as u32,
                ..rows.shape(NormBackward::CUDA_BLOCKS)
            };
            ("norm_backward_sums", shape)
        } else {
            ("norm_backward", rows.shape(rows.at_once()))
        };
        arguments.extend(dropout);
        arguments.extend(rows.arguments());
        let sums_by_warps = rows.by_warps([
            "norm_backward_sums_warp_1",
            "norm_backward_sums_warp_2",
            "norm_backward_sums_warp_3",
            "norm_backward_sums_warp_4",
        ]);
        if let (Some(dgamma), Some((by_warps, mut warps))) = (layout.dgamma, sums_by_warps) {
            warps.grid[0] = warps.grid[0].min(NormBackward::CUDA_BLOCKS as u32);
            let ways = [(kernel(function), shape), (by_warps, warps)].map(|(kernel, shape)| {
                let mut way = Lowering::new(x.graph, x.plan, x.index, x.first_micro, x.card);
                way.launch(kernel, shape, arguments.clone());
                sum_partials(&mut way, shape.grid[0], rows.width, dgamma, layout.dbeta);
                way.finish()
            });
            return x.command(Command::Ways(ways.into()));
        }
        x.launch(kernel(function), shape, arguments);
        shape.grid[0]
    } else {
        let blocks = rows.rows.div_ceil(ANY_ROWS).min(NormBackward::CUDA_BLOCKS);
        if op.parameters {
            // First, because dx may be about to replace dy.
            let shape = LaunchShape {
                grid: [rows.width.div_ceil(ANY_COLUMNS) as u32, blocks as u32, 1],
                block: [ANY_COLUMNS as u32, ANY_ROWS as u32, 1],
                shared_bytes: 0,
            };
            let mut arguments = vec![dy, stream, mean, rstd, partials];
            arguments.extend(rows.arguments());
            x.launch(kernel("norm_partials_any"), shape, arguments);
        }
        arguments.extend(dropout);
        arguments.extend(rows.arguments());
        let shape = rows.shape(8 * MULTIPROCESSORS);
        x.launch(kernel("norm_backward_any"), shape, arguments);
        blocks as u32
    };
    if let Some(dgamma) = layout.dgamma {
        sum_partials(x, blocks, rows.width, dgamma, layout.dbeta);
    }
}
