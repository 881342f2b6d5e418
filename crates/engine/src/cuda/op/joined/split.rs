//! Narrow products with a long sum, which the blocks of a cluster share: what an adapter reads is a
//! few columns wide, and its tiles alone would leave most of a card idle.

#[cfg(test)]
mod tests;

use super::is_copied;
use crate::cuda::command::{
    Argument, Command, Kernel, LaunchShape, MatrixAt, MatrixMapAt, Product,
};
use crate::cuda::lowering::Card;

/// Rows and columns of a tile of C.
const TILE: usize = 128;
/// Of the inner dimension, at once.
const TILE_DEPTH: usize = 64;
const STAGES: usize = 3;
const THREADS: u32 = 288;

/// Into how many parts the inner dimension is cut, and the kernels for B by rows and by columns.
const PARTS: [(usize, [&str; 2]); 2] = [
    (8, ["narrow_rows_8", "narrow_columns_8"]),
    (4, ["narrow_rows_4", "narrow_columns_4"]),
];

/// More tiles than this are enough for a card.
const MAX_TILES: usize = 96;
/// Tiles of the inner dimension, at least.
const MIN_STEPS: usize = 16;

fn tiles(product: &Product) -> usize {
    product.m.div_ceil(TILE) * product.n.div_ceil(TILE)
}

/// Whether it has few tiles and a long sum.
pub(super) fn is_split(product: &Product) -> bool {
    tiles(product) <= MAX_TILES
        && product.k >= MIN_STEPS * TILE_DEPTH
        && !product.a.transposed
        && product.bias.is_none()
}

/// The launches that compute the product, one for each number of parts; none where the kernel does
/// not take it.
pub(super) fn launches(product: &Product, card: Card) -> Vec<Command> {
    let sides = [product.m, product.n, product.k, product.c.row_stride];
    let fits = is_copied(&product.a)
        && is_copied(&product.b)
        && is_copied(&product.c)
        && is_split(product)
        && product.n.is_multiple_of(8)
        && sides.iter().all(|&side| i32::try_from(side).is_ok());
    if !card.is_hopper || !fits {
        return Vec::new();
    }
    let launch = |(parts, kernels)| launch(product, parts, kernels);
    PARTS.into_iter().map(launch).collect()
}

fn launch(product: &Product, parts: usize, kernels: [&'static str; 2]) -> Command {
    let by_column = !product.b.transposed;
    let sizes = [
        product.m,
        product.n,
        product.c.row_stride,
        product.n.div_ceil(TILE),
        product.k.div_ceil(TILE_DEPTH),
    ];
    let mut table: Vec<u32> = sizes.map(|size| size as u32).to_vec();
    table.extend([product.scale.to_bits(), u32::from(product.accumulate)]);
    let side = |matrix: &MatrixAt, rows: usize, columns: usize, box_rows: usize| {
        Argument::MatrixMap(MatrixMapAt {
            address: matrix.address,
            rows,
            columns,
            row_stride: matrix.row_stride,
            box_rows,
            box_columns: TILE_DEPTH,
        })
    };
    Command::LaunchTable {
        kernel: Kernel {
            file: "split_hopper",
            function: kernels[usize::from(by_column)],
        },
        shape: LaunchShape {
            grid: [(tiles(product) * parts) as u32, 1, 1],
            block: [THREADS, 1, 1],
            // Tiles begin at multiples of 1024 bytes; barriers follow them.
            shared_bytes: (STAGES * 2 * TILE * TILE_DEPTH * 2 + 1024 + 16 * STAGES) as u32,
        },
        table: table.into(),
        arguments: vec![
            side(&product.a, product.m, product.k, TILE),
            match by_column {
                true => side(&product.b, product.k, product.n, TILE_DEPTH),
                false => side(&product.b, product.n, product.k, TILE),
            },
            Argument::Address(product.c.address),
        ],
    }
}
