//! Sums of products whose results are whole rows to a block, by a kernel that reads what is long only
//! once: a product with at most one that adds to all of it, dropped in part or not, and the norm of the
//! residual stream that it is added to.

#[cfg(test)]
mod tests;

use cinch_graph::op::Norm;

use super::{is_copied, sum};
use crate::cuda::command::{
    Argument, Command, DropoutAt, Kernel, LaunchShape, MatrixAt, MatrixMapAt, NormAt, Product,
    Tail, TailKind,
};
use crate::cuda::lowering::Card;

/// Rows of a tile, and its columns: with half of them other kernels have less to do.
const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 384;
const _: () = assert!(Norm::WIDTH_BEHIND_PRODUCT == TILE_COLUMNS);
/// Of the inner dimension, at once.
const TILE_DEPTH: usize = 64;
const STAGES: usize = 3;
/// Warpgroups that multiply; one more feeds them.
const GROUPS: usize = 2;
const THREADS: u32 = 128 * (GROUPS as u32 + 1);
/// Of what adds, the matrix units multiply so much of its inner dimension at once.
const RANK_PART: usize = 16;
/// Rows of C that a warp has and writes at once, 64 columns wide, from two places in turn.
const WARP_ROWS: usize = 16;
const WRITES: usize = 2;

/// Stages, what warps write, the bias and barriers. Tiles begin at multiples of 1024 bytes.
const SHARED_BYTES: usize = {
    let tiles = STAGES * (TILE_ROWS + TILE_COLUMNS) + GROUPS * 4 * WRITES * WARP_ROWS;
    2 * TILE_DEPTH * tiles + TILE_COLUMNS * size_of::<f32>() + 8 * 2 * STAGES + 1024
};

/// Blocks of a cluster, with the kernels for B by rows and by columns, and before a norm. More of them
/// read B less often, and may leave multiprocessors without work.
const CLUSTERS: [(usize, [&str; 3]); 2] = [
    (2, ["whole_rows_2", "whole_columns_2", "whole_rows_norm_2"]),
    (4, ["whole_rows_4", "whole_columns_4", "whole_rows_norm_4"]),
];

/// A sum and its tail, as the kernel sees them.
struct Whole<'a> {
    main: &'a Product,
    adapter: Option<&'a Product>,
    /// What the adapter's product is dropped by, or C before a norm.
    dropout: Option<DropoutAt>,
    norm: Option<NormAt>,
}

impl<'a> Whole<'a> {
    /// None where the kernel does not take it.
    fn new(products: &'a [Product], tails: &'a [Tail]) -> Option<Self> {
        let (main, adds) = products.split_first()?;
        let adapter = match adds {
            [] => None,
            [adapter] => Some(adapter),
            _ => return None,
        };
        let mut whole = Self {
            main,
            adapter,
            dropout: None,
            norm: None,
        };
        match tails {
            [] => {}
            [tail] => match &tail.kind {
                TailKind::Dropped { product, dropout } if adapter.is_none() => {
                    whole.adapter = Some(product);
                    whole.dropout = Some(*dropout);
                }
                TailKind::Norm(norm) => {
                    whole.dropout = norm.dropout;
                    whole.norm = Some(*norm);
                }
                _ => return None,
            },
            _ => return None,
        }
        whole.fits().then_some(whole)
    }

    fn fits(&self) -> bool {
        let main = self.main;
        let fits = |product: &Product| {
            let sides = [product.m, product.n, product.k, product.c.row_stride];
            is_copied(&product.a)
                && is_copied(&product.b)
                && is_copied(&product.c)
                && !product.a.transposed
                && product.b.transposed == main.b.transposed
                && sides.iter().all(|&side| i32::try_from(side).is_ok())
        };
        // What adds is one step, and adds to all columns.
        let adapter_fits = self
            .adapter
            .is_none_or(|adapter| fits(adapter) && adapter.n == main.n && adapter.k <= TILE_DEPTH);
        let norm_fits = self.norm.is_none_or(|norm| {
            let mut matrices = [Some(norm.x), norm.sum, Some(norm.to)].into_iter();
            let mut rows = [norm.gamma, norm.beta].into_iter();
            main.n == Norm::WIDTH_BEHIND_PRODUCT
                && main.b.transposed
                && !main.accumulate
                && matrices.all(|address| address.is_none_or(|at| at.is_multiple_of(16)))
                && rows.all(|address| address.is_multiple_of(8))
        });
        fits(main)
            && adapter_fits
            && norm_fits
            && main.n.is_multiple_of(8)
            && main.n > TILE_COLUMNS / 2
            && main.n <= TILE_COLUMNS
    }

    fn table(&self, row_tiles: usize) -> Box<[u32]> {
        let main = self.main;
        let low_parts = |adapter: &Product| adapter.k.div_ceil(RANK_PART);
        let sizes = [
            main.m,
            main.n,
            row_tiles,
            main.k.div_ceil(TILE_DEPTH),
            self.adapter.map_or(0, low_parts),
        ];
        let mut table: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
        table.push(self.adapter.map_or(1.0, |adapter| adapter.scale).to_bits());
        table.push(self.dropout.map_or(0, |dropout| dropout.stream));
        table.push(self.dropout.map_or(0, |dropout| dropout.threshold));
        table.push(u32::from(main.accumulate));
        let norm = self.norm;
        table.push(u32::from(norm.is_some_and(|norm| norm.sum.is_some())));
        table.push(norm.map_or(0.0, |norm| norm.epsilon).to_bits());
        table.into()
    }

    fn arguments(&self, blocks: usize) -> Vec<Argument> {
        let main = self.main;
        let side = |matrix: &MatrixAt, size: [usize; 2], sides: [usize; 2]| {
            let ([rows, columns], [box_rows, box_columns]) = (size, sides);
            Argument::MatrixMap(MatrixMapAt {
                address: matrix.address,
                rows,
                columns,
                row_stride: matrix.row_stride,
                box_rows,
                box_columns,
            })
        };
        let left = |product: &Product| {
            let size = [product.m, product.k];
            side(&product.a, size, [TILE_ROWS, TILE_DEPTH])
        };
        // Each block of a cluster brings a part, for all.
        let right = |product: &Product| match product.b.transposed {
            false => {
                let size = [product.k, product.n];
                side(&product.b, size, [TILE_DEPTH / blocks, TILE_DEPTH])
            }
            true => {
                let size = [product.n, product.k];
                side(&product.b, size, [TILE_COLUMNS / blocks, TILE_DEPTH])
            }
        };
        // Without an adapter another stands for it, which nobody reads.
        let adapter = self.adapter.unwrap_or(main);
        // What a kernel does not touch stands for C again.
        let like_c = |address: Option<u64>, rows: usize| {
            let c = MatrixAt {
                address: address.unwrap_or(main.c.address),
                ..main.c
            };
            side(&c, [main.m, main.n], [rows, TILE_DEPTH])
        };
        let norm = self.norm;
        let optional = |address: Option<u64>| address.map_or(Argument::Null, Argument::Address);
        vec![
            left(main),
            right(main),
            left(adapter),
            right(adapter),
            like_c(norm.and_then(|norm| norm.sum), WARP_ROWS),
            like_c(norm.map(|norm| norm.x), TILE_ROWS),
            like_c(norm.map(|norm| norm.to), WARP_ROWS),
            sum::bias(main),
            optional(self.dropout.map(|dropout| dropout.random)),
            optional(norm.map(|norm| norm.gamma)),
            optional(norm.map(|norm| norm.beta)),
            optional(norm.and_then(|norm| norm.mean)),
            optional(norm.and_then(|norm| norm.rstd)),
        ]
    }

    /// The launch with so many blocks in a cluster.
    fn launch(&self, (blocks, kernels): (usize, [&'static str; 3]), card: Card) -> Option<Command> {
        let row_tiles = self.main.m.div_ceil(blocks * TILE_ROWS);
        let most = card.multiprocessors / blocks;
        // As few as are ready at the same time: not all clusters find room where chips have parts of
        // other sizes.
        let rounds = row_tiles.div_ceil(most.max(1)).max(1);
        let clusters = row_tiles.div_ceil(rounds).max(1);
        let [by_rows, by_columns, before_norm] = kernels;
        let function = match (self.norm, self.main.b.transposed) {
            (Some(_), _) => before_norm,
            (None, true) => by_rows,
            (None, false) => by_columns,
        };
        (most > 0).then(|| Command::LaunchTable {
            kernel: Kernel {
                file: "product_whole_hopper",
                function,
            },
            shape: LaunchShape {
                grid: [(blocks * clusters) as u32, 1, 1],
                block: [THREADS, 1, 1],
                shared_bytes: SHARED_BYTES as u32,
            },
            table: self.table(row_tiles),
            arguments: self.arguments(blocks),
        })
    }
}

/// Whether the kernel takes a sum and its tails.
pub(super) fn takes(products: &[Product], tails: &[Tail]) -> bool {
    Whole::new(products, tails).is_some()
}

/// The launches of which each computes all of it, by clusters of different sizes; none where the
/// kernel does not take it.
pub(super) fn launches(products: &[Product], tails: &[Tail], card: Card) -> Vec<Command> {
    let Some(whole) = Whole::new(products, tails).filter(|_| card.is_hopper) else {
        return Vec::new();
    };
    let launches = CLUSTERS.into_iter().rev();
    launches
        .filter_map(|cluster| whole.launch(cluster, card))
        .collect()
}
