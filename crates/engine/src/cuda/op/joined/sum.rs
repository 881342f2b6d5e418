//! Products that are added to one result. The second half of an adapter adds to
//! what the layer's own product wrote, and its gradient to that of the layer's input: as a term of
//! the same sum the result is written once and never read. What is pointwise and follows the sum is
//! its tail, and so is a product that is dropped in part before it adds: it is the first term then.

#[cfg(test)]
mod tests;

use super::{WINDOW, effects, in_place_of, is_copied, may_pass, short, tail, turns, whole};
use crate::cuda::command::{
    Argument, Command, DropoutAt, Joined, Kernel, LaunchShape, MatrixAt, MatrixMapAt, Product,
    Tail, TailKind,
};
use crate::cuda::lowering::Card;
use crate::cuda::op::{COPY_TO_REAL, Lowered};

/// Terms that the kernel has room for.
const MAX_TERMS: usize = 4;

/// Of the inner dimension, at once.
const TILE_DEPTH: usize = 64;
const STAGES: usize = 4;
const THREADS: u32 = 384;
/// Pairs of tiles that are gone through together, so that their part of A stays in the cache.
const TOGETHER: usize = 8;

/// What two blocks, which have neighbouring tiles of C, have in common.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shared {
    /// Each brings half of B's tile for both.
    Columns,
    /// Each brings half of A's.
    Rows,
}

/// The part of C that a block has at a time.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub rows: usize,
    pub columns: usize,
    pub shared: Shared,
}

/// Tiles, and their kernels for B by rows and by columns. Which is best depends on how the tiles
/// fill the card in whole rounds.
const TILES: [(Tile, [&str; 2]); 7] = [
    (
        Tile::new(128, 256, Shared::Columns),
        ["products_rows_128_256", "products_columns_128_256"],
    ),
    (
        Tile::new(256, 192, Shared::Rows),
        ["products_rows_256_192", "products_columns_256_192"],
    ),
    (
        Tile::new(256, 176, Shared::Rows),
        ["products_rows_256_176", "products_columns_256_176"],
    ),
    (
        Tile::new(256, 168, Shared::Rows),
        ["products_rows_256_168", "products_columns_256_168"],
    ),
    (
        Tile::new(128, 224, Shared::Columns),
        ["products_rows_128_224", "products_columns_128_224"],
    ),
    (
        Tile::new(128, 192, Shared::Columns),
        ["products_rows_128_192", "products_columns_128_192"],
    ),
    (
        Tile::new(128, 176, Shared::Columns),
        ["products_rows_128_176", "products_columns_128_176"],
    ),
];

/// Those of a first term that is dropped in part. It adds to a gradient, so B is by columns.
const DROPPED_TILES: [(Tile, &str); 2] = [
    (Tile::new(256, 192, Shared::Rows), "dropped_columns_256_192"),
    (
        Tile::new(128, 192, Shared::Columns),
        "dropped_columns_128_192",
    ),
];

/// Of the tiles, as many are tried as are likely to be best.
const TRIED: usize = 4;

impl Tile {
    pub(super) const fn new(rows: usize, columns: usize, shared: Shared) -> Self {
        Self {
            rows,
            columns,
            shared,
        }
    }

    /// Pairs of tiles of C: in its rows and in its columns.
    pub(super) fn pairs(&self, sum: &Product) -> [usize; 2] {
        let [rows, columns] = match self.shared {
            Shared::Columns => [2 * self.rows, self.columns],
            Shared::Rows => [self.rows, 2 * self.columns],
        };
        [sum.m.div_ceil(rows), sum.n.div_ceil(columns)]
    }

    /// Blocks of a launch on a card: they stay, and take pair after pair.
    pub(super) fn blocks(&self, sum: &Product, card: Card) -> usize {
        let [rows, columns] = self.pairs(sum);
        2 * (rows * columns).min(card.multiprocessors / 2).max(1)
    }

    /// What the slowest block has to do: rounds of tiles, in elements of C.
    fn work(&self, sum: &Product, card: Card) -> usize {
        let [rows, columns] = self.pairs(sum);
        let rounds = (2 * rows * columns).div_ceil(self.blocks(sum, card));
        rounds * self.rows * self.columns
    }
}

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
        if first.scale != 1.0 {
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
                && !tails.iter().any(|tail| tail::is_last(&tail.kind))
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
                let is_end = tail::is_end(&tail.kind);
                tails.push(tail);
                followers.push(later);
                if is_end {
                    break;
                }
            } else {
                passed.extend(effects);
            }
        }
        drop(passed);
        let is_taken = |tails: &[Tail]| {
            short::takes(&sum, tails)
                || turns::takes(&sum, tails)
                || whole::takes(&sum, tails)
                || takes_dropped(&sum, tails)
        };
        while !tails.is_empty() && !is_taken(&tails) {
            tails.pop();
            followers.pop();
        }
        // Others write what they have, and add to nothing.
        let may_add = whole::takes(&sum, &tails) || takes_dropped(&sum, &tails);
        if sum[0].accumulate && !may_add {
            continue;
        }
        for term in terms {
            lowered[term].commands.clear();
        }
        for follower in followers {
            let memory = tail::memory(&lowered[follower]);
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

/// Whether the kernels for such sums take it.
pub(super) fn fits(sum: &[Product]) -> bool {
    sum.first().is_some_and(|first| !first.accumulate) && all_fit(sum)
}

fn all_fit(sum: &[Product]) -> bool {
    let Some(first) = sum.first() else {
        return false;
    };
    let fits = |product: &Product| {
        let sides = [product.m, product.n, product.k, product.c.row_stride];
        is_copied(&product.a)
            && is_copied(&product.b)
            && is_copied(&product.c)
            && !product.a.transposed
            && product.b.transposed == first.b.transposed
            && product.n.is_multiple_of(8)
            && sides.iter().all(|&side| i32::try_from(side).is_ok())
    };
    sum.len() <= MAX_TERMS && sum.iter().all(fits)
}

/// The launches that compute a sum, one for each tile that is likely to be best, the likeliest first;
/// none where the kernel does not take it.
pub(super) fn launches(sum: &[Product], card: Card) -> Vec<Command> {
    if !card.is_hopper || !fits(sum) {
        return Vec::new();
    }
    let by_columns = usize::from(!sum[0].b.transposed);
    likeliest(TILES, &sum[0], card)
        .map(|(tile, kernels)| launch(sum, None, (tile, kernels[by_columns]), card))
        .collect()
}

/// As [`launches`], with a tail that is dropped in part; none where it is something else.
pub(super) fn dropped_launches(sum: &[Product], tail: &Tail, card: Card) -> Vec<Command> {
    let Some((sum, dropout)) = with_dropped(sum, tail).filter(|_| card.is_hopper) else {
        return Vec::new();
    };
    likeliest(DROPPED_TILES, &sum[0], card)
        .map(|kernel| launch(&sum, Some(dropout), kernel, card))
        .collect()
}

/// Whether the kernels take a sum with one tail, which is dropped in part.
fn takes_dropped(sum: &[Product], tails: &[Tail]) -> bool {
    matches!(tails, [tail] if with_dropped(sum, tail).is_some())
}

/// The sum with a product that is dropped in part as its first term, where the kernels take it.
fn with_dropped(sum: &[Product], tail: &Tail) -> Option<(Vec<Product>, DropoutAt)> {
    let TailKind::Dropped { product, dropout } = tail.kind else {
        return None;
    };
    let mut sum = sum.to_vec();
    // Behind the long one, which comes last.
    sum.insert(1, product);
    (!product.b.transposed && all_fit(&sum)).then_some((sum, dropout))
}

/// Tiles and their kernels, those first that leave the busiest multiprocessor the least.
fn likeliest<K, const N: usize>(
    mut tiles: [(Tile, K); N],
    sum: &Product,
    card: Card,
) -> impl Iterator<Item = (Tile, K)> {
    tiles.sort_by_key(|(tile, _)| tile.work(sum, card));
    tiles.into_iter().take(TRIED)
}

/// What adds comes first: it is scaled once, before the long term.
fn in_order(sum: &[Product]) -> impl Iterator<Item = &Product> {
    let (first, more) = sum.split_at(1);
    more.iter().chain(first)
}

/// What kernels read of a sum's sizes.
pub(super) fn table(sum: &[Product], tile: Tile) -> Vec<u32> {
    let first = &sum[0];
    let [row_pairs, column_pairs] = tile.pairs(first);
    let sizes = [
        first.m,
        first.n,
        first.c.row_stride,
        row_pairs,
        column_pairs,
        row_pairs.min(TOGETHER),
        sum.len(),
    ];
    let mut table: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
    let end = table.len() + 4 * MAX_TERMS;
    for term in in_order(sum) {
        let column = column_in(first, term).unwrap_or(0);
        let steps = term.k.div_ceil(TILE_DEPTH);
        table.extend([column, term.n, steps].map(|size| size as u32));
        table.push(term.scale.to_bits());
    }
    table.resize(end, 0);
    table
}

/// What kernels are given of a sum's operands: all of A, then all of B.
pub(super) fn operands(sum: &[Product], tile: Tile) -> Vec<Argument> {
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
    // Of what two blocks share, each brings half.
    let [of_a, of_b] = match tile.shared {
        Shared::Columns => [1, 2],
        Shared::Rows => [2, 1],
    };
    let a = |term: &Product| side(&term.a, term.m, term.k, tile.rows / of_a);
    let b = |term: &Product| match term.b.transposed {
        false => side(&term.b, term.k, term.n, TILE_DEPTH / of_b),
        true => side(&term.b, term.n, term.k, tile.columns / of_b),
    };
    // Where there are fewer, the last stand for the rest, which nobody reads.
    let padded = |map: &dyn Fn(&Product) -> Argument| -> Vec<Argument> {
        let last = std::iter::repeat(&sum[0]);
        in_order(sum).chain(last).take(MAX_TERMS).map(map).collect()
    };
    [padded(&a), padded(&b)].concat()
}

/// Bytes of shared memory: tiles begin at multiples of 1024 bytes; barriers follow them.
pub(super) fn shared_bytes(sum: &[Product], tile: Tile, stages: usize, barriers: usize) -> u32 {
    // By columns B has whole panels.
    let columns = match sum[0].b.transposed {
        true => tile.columns,
        false => tile.columns.next_multiple_of(64),
    };
    (stages * (tile.rows + columns) * TILE_DEPTH * 2 + 1024 + 8 * barriers) as u32
}

/// A bias as kernels are given it.
pub(super) fn bias(product: &Product) -> Argument {
    let kept = product.bias.map(|bias| Argument::Address(bias.kept));
    kept.unwrap_or(Argument::Null)
}

fn launch(
    sum: &[Product],
    dropout: Option<DropoutAt>,
    (tile, function): (Tile, &'static str),
    card: Card,
) -> Command {
    let first = &sum[0];
    let mut arguments = operands(sum, tile);
    arguments.extend([Argument::Address(first.c.address), bias(first)]);
    arguments.extend(dropout.map(|dropout| Argument::Address(dropout.random)));
    let mut table = table(sum, tile);
    table.push(dropout.map_or(0, |dropout| dropout.stream));
    table.push(dropout.map_or(0, |dropout| dropout.threshold));
    table.push(u32::from(first.accumulate));
    Command::LaunchTable {
        kernel: Kernel {
            file: "product_hopper",
            function,
        },
        shape: LaunchShape {
            grid: [tile.blocks(first, card) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: shared_bytes(sum, tile, STAGES, 2 * STAGES),
        },
        table: table.into(),
        arguments,
    }
}
