//! Products that are added to one result. The second half of an adapter adds to
//! what the layer's own product wrote, and its gradient to that of the layer's input: as a term of
//! the same sum the result is written once and never read. What is pointwise and follows the sum is
//! its tail.

#[cfg(test)]
mod tests;

use super::{WINDOW, effects, in_place_of, is_copied, may_pass, short, tail};
use crate::cuda::command::{
    Argument, Command, Joined, Kernel, LaunchShape, MatrixAt, MatrixMapAt, Product, Tail,
};
use crate::cuda::lowering::Card;
use crate::cuda::op::{COPY_TO_REAL, Lowered};

/// Terms that the kernel has room for.
const MAX_TERMS: usize = 4;

/// Rows of C of a block; two blocks have neighbouring ones.
const TILE_ROWS: usize = 128;
/// Of the inner dimension, at once.
const TILE_DEPTH: usize = 64;
const STAGES: usize = 4;
const THREADS: u32 = 384;
/// Pairs of row tiles that are gone through together, so that their part of A stays in the cache.
const TOGETHER: usize = 8;

/// Columns of a tile, and its kernels for B by rows and by columns. Which is best depends on how
/// the tiles fill the card in whole rounds.
const TILES: [(usize, [&str; 2]); 3] = [
    (256, ["products_rows_256", "products_columns_256"]),
    (192, ["products_rows_192", "products_columns_192"]),
    (176, ["products_rows_176", "products_columns_176"]),
];

/// The first column of C that `more` adds to, where it adds to columns of what `first` writes.
pub(super) fn column_in(first: &Product, more: &Product) -> Option<usize> {
    let (c, into) = (&first.c, &more.c);
    let same = c.row_stride == into.row_stride && c.dtype == into.dtype && first.m == more.m;
    let distance = into.address.checked_sub(c.address)? / c.dtype.size();
    let column = usize::try_from(distance).ok()?;
    let inside = column.checked_add(more.n)? <= first.n;
    (same && inside && more.accumulate && more.bias.is_none()).then_some(column)
}

/// Joins products that follow each other into sums, with their tails. Between them there may be
/// what touches nothing of theirs.
pub(super) fn join(lowered: &mut [Lowered]) {
    for at in 0..lowered.len() {
        let Some(Command::Product(first)) = lowered[at].commands.last() else {
            continue;
        };
        if first.accumulate || first.scale != 1.0 {
            continue;
        }
        let mut sum = vec![*first];
        let mut terms = Vec::new();
        let mut tails: Vec<Tail> = Vec::new();
        let mut followers = Vec::new();
        let mut passed = Vec::new();
        let end = lowered.len().min(at + WINDOW);
        for (later, node) in lowered.iter().enumerate().take(end).skip(at + 1) {
            let Some(effects) = effects(node) else {
                break;
            };
            if let [Command::Product(product)] = node.commands[..]
                && column_in(&sum[0], &product).is_some()
                && sum.len() < MAX_TERMS
                && passed.iter().all(|&effect| may_pass(&product, effect))
            {
                sum.push(in_place_of(&sum[0], product));
                terms.push(later);
            } else if let Some(tail) = tail::follows(&sum, &tails, node)
                && passed
                    .iter()
                    .all(|&effect| tail::may_pass(&tail.kind, &node.memory, effect))
            {
                let is_last = tail::is_last(&tail.kind);
                tails.push(tail);
                followers.push(later);
                if is_last {
                    break;
                }
            } else {
                passed.extend(effects);
            }
        }
        drop(passed);
        while !tails.is_empty() && !short::takes(&sum, &tails) {
            tails.pop();
            followers.pop();
        }
        for term in terms {
            lowered[term].commands.clear();
        }
        for follower in followers {
            let memory = lowered[follower].memory.clone();
            lowered[follower].commands.clear();
            lowered[at].memory.extend(memory);
        }
        if sum.len() + tails.len() > 1 {
            let commands = &mut lowered[at].commands;
            commands.pop();
            // The bias in another type, which kernels of ours do without.
            let is_copy = |command: &mut Command| match command {
                Command::Launch { kernel, .. } => *kernel == COPY_TO_REAL,
                _ => false,
            };
            let heads = commands.pop_if(is_copy).into_iter().collect();
            commands.push(Command::Products {
                joined: Joined::Sum,
                heads,
                products: sum,
                tails,
            });
        }
    }
}

/// The launches that compute a sum, one for each width of tiles; none where the kernel does not
/// take it.
pub fn launches(sum: &[Product], card: Card) -> Vec<Command> {
    let Some(first) = sum.first() else {
        return Vec::new();
    };
    let by_column = !first.b.transposed;
    let fits = |product: &Product| {
        let sides = [product.m, product.n, product.k, product.c.row_stride];
        is_copied(&product.a)
            && is_copied(&product.b)
            && is_copied(&product.c)
            && !product.a.transposed
            && product.b.transposed != by_column
            && product.n.is_multiple_of(8)
            && sides.iter().all(|&side| i32::try_from(side).is_ok())
    };
    if !card.is_hopper || sum.len() > MAX_TERMS || !sum.iter().all(fits) {
        return Vec::new();
    }
    let launch = |(columns, kernels)| launch(sum, columns, kernels, by_column, card);
    TILES.into_iter().map(launch).collect()
}

fn launch(
    sum: &[Product],
    columns: usize,
    kernels: [&'static str; 2],
    by_column: bool,
    card: Card,
) -> Command {
    let first = &sum[0];
    let row_pairs = first.m.div_ceil(2 * TILE_ROWS);
    let column_tiles = first.n.div_ceil(columns);
    // What adds comes first: it is scaled once, before the long term.
    let terms: Vec<&Product> = sum[1..].iter().chain([first]).collect();
    let mut table = vec![
        first.m as u32,
        first.n as u32,
        first.c.row_stride as u32,
        row_pairs as u32,
        column_tiles as u32,
        row_pairs.min(TOGETHER) as u32,
        terms.len() as u32,
    ];
    for term in &terms {
        let column = column_in(first, term).unwrap_or(0);
        let steps = term.k.div_ceil(TILE_DEPTH);
        table.extend([column, term.n, steps].map(|size| size as u32));
        table.push(term.scale.to_bits());
    }
    table.resize(7 + 4 * MAX_TERMS, 0);
    let side = |matrix: &MatrixAt, rows: usize, columns: usize, box_rows: usize| {
        Argument::MatrixMap(MatrixMapAt {
            address: matrix.address,
            rows,
            columns,
            row_stride: matrix.row_stride,
            box_rows,
        })
    };
    let a = terms
        .iter()
        .map(|term| side(&term.a, term.m, term.k, TILE_ROWS));
    // Each of the two blocks brings half a tile.
    let b = terms.iter().map(|term| match by_column {
        true => side(&term.b, term.k, term.n, TILE_DEPTH / 2),
        false => side(&term.b, term.n, term.k, columns / 2),
    });
    let padded = |maps: Vec<Argument>| {
        let last = maps.last().copied().into_iter();
        let missing = MAX_TERMS - maps.len();
        let more: Vec<Argument> = last.cycle().take(missing).collect();
        maps.into_iter().chain(more)
    };
    let arguments = padded(a.collect())
        .chain(padded(b.collect()))
        .chain([
            Argument::Address(first.c.address),
            first
                .bias
                .map_or(Argument::Null, |bias| Argument::Address(bias.kept)),
        ])
        .collect();
    let panels = columns.div_ceil(64) * 64;
    let stage = (TILE_ROWS + panels) * TILE_DEPTH * 2;
    let blocks = 2
        * (row_pairs * column_tiles)
            .min(card.multiprocessors / 2)
            .max(1);
    Command::LaunchTable {
        kernel: Kernel {
            file: "product_hopper",
            function: kernels[usize::from(by_column)],
        },
        shape: LaunchShape {
            grid: [blocks as u32, 1, 1],
            block: [THREADS, 1, 1],
            // Tiles begin at multiples of 1024 bytes; barriers follow them.
            shared_bytes: (STAGES * stage + 1024 + 16 * STAGES) as u32,
        },
        table: table.into(),
        arguments,
    }
}
