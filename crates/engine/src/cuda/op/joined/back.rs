//! The two products that an adapter's second matrix has in the backward, the gradient of what it read
//! and its own. Both read the gradient of what it added to, which is wide: one pass computes both.

#[cfg(test)]
mod tests;

use cinch_graph::DType;

use super::{WINDOW, effects, in_place_of, is_copied, may_pass, overlap, result, scratch};
use crate::cuda::command::{Argument, Command, Joined, Kernel, LaunchShape, Product};
use crate::cuda::lowering::Card;
use crate::cuda::op::Lowered;

/// The adapter's rank.
const RANK: usize = 8;
const WARPS: usize = 8;
/// Rows that a block takes at once.
const ROWS: usize = 32;
/// Columns for each of the tiles that a kernel's warps have.
const TILE_COLUMNS: usize = 16 * WARPS;

/// A kernel by the tiles of a warp, with the rows that are on their way at once, in tiles, and the
/// blocks that a multiprocessor holds.
struct Variant {
    tiles: usize,
    function: &'static str,
    stages: usize,
    blocks: usize,
}

const fn variant(tiles: usize, function: &'static str, stages: usize, blocks: usize) -> Variant {
    Variant {
        tiles,
        function,
        stages,
        blocks,
    }
}

const VARIANTS: [Variant; 7] = [
    variant(1, "adapter_back_1", 4, 2),
    variant(2, "adapter_back_2", 4, 2),
    variant(3, "adapter_back_3", 3, 2),
    variant(4, "adapter_back_4", 3, 1),
    variant(6, "adapter_back_6", 3, 1),
    variant(8, "adapter_back_8", 2, 1),
    variant(12, "adapter_back_12", 2, 1),
];

impl Variant {
    fn of(columns: usize) -> Option<&'static Self> {
        let mut variants = VARIANTS.iter();
        variants.find(|variant| variant.tiles * TILE_COLUMNS == columns)
    }

    fn shared_bytes(&self) -> usize {
        let row = (16 * self.tiles + 8 + RANK) * 2;
        let sums = 2 * WARPS * ROWS * RANK * size_of::<f32>();
        sums + WARPS * self.stages * ROWS * row
    }
}

/// The rows are cut into so many parts, of so many rows each.
fn parts(variant: &Variant, inner: &Product, card: Card) -> (usize, usize) {
    let sums = (variant.tiles * TILE_COLUMNS * RANK * size_of::<f32>()) as u64;
    let room = (inner.workspace_bytes / sums) as usize;
    let most = (card.multiprocessors * variant.blocks).min(room).max(1);
    let rows = inner.m.div_ceil(most).next_multiple_of(ROWS);
    (inner.m.div_ceil(rows).max(1), rows)
}

/// Whether the kernel computes the gradient of what an adapter's second matrix read.
fn is_inner(product: &Product) -> bool {
    let sides = [product.m, product.n, product.k, product.c.row_stride];
    product.n == RANK
        && Variant::of(product.k).is_some_and(|variant| {
            product.workspace_bytes >= (variant.tiles * TILE_COLUMNS * RANK * 4) as u64
        })
        && !product.a.transposed
        && !product.b.transposed
        && product.b.row_stride == RANK
        && product.bias.is_none()
        && is_copied(&product.a)
        && is_copied(&product.b)
        && product.c.dtype == product.a.dtype
        && sides.iter().all(|&side| u32::try_from(side).is_ok())
}

/// Whether a gradient is that of the same matrix.
fn belongs(inner: &Product, gradient: &Product) -> bool {
    let wide = &gradient.a;
    wide.transposed
        && !gradient.b.transposed
        && (wide.address, wide.row_stride) == (inner.a.address, inner.a.row_stride)
        && wide.dtype == inner.a.dtype
        && (gradient.m, gradient.n, gradient.k) == (inner.k, inner.n, inner.m)
        && gradient.bias.is_none()
        && is_copied(&gradient.b)
        && gradient.c.dtype == DType::F32
        && gradient.c.row_stride == RANK
        && gradient.c.address.is_multiple_of(16)
}

/// The node whose only command is the gradient that belongs to a product, and may be computed with it.
fn partner(lowered: &[Lowered], at: usize, inner: &Product) -> Option<(usize, Product)> {
    let mut between = Vec::new();
    for (later, node) in lowered.iter().enumerate().skip(at + 1).take(WINDOW) {
        if let [Command::Product(gradient)] = node.commands[..]
            && belongs(inner, &gradient)
        {
            let clear = |range| !overlap(result(&gradient), range);
            let apart = clear(result(inner)) && clear(scratch(inner));
            let passes = between.iter().all(|&other| may_pass(&gradient, other));
            return (apart && passes).then_some((later, gradient));
        }
        between.extend(effects(node)?);
    }
    None
}

/// Joins what an adapter's second matrix has in the backward.
pub(super) fn join(lowered: &mut [Lowered]) {
    for at in 0..lowered.len() {
        let Some(Command::Product(inner)) = lowered[at].commands.last().cloned() else {
            continue;
        };
        if !is_inner(&inner) {
            continue;
        }
        if let Some((later, gradient)) = partner(lowered, at, &inner) {
            lowered[later].commands.clear();
            lowered[at].commands.pop();
            lowered[at].commands.push(Command::Products {
                joined: Joined::Back,
                heads: Vec::new(),
                products: vec![inner, in_place_of(&inner, gradient)],
                tails: Vec::new(),
            });
        }
    }
}

/// The launches that compute both; none where the kernel does not take them.
pub(super) fn launches(products: &[Product], card: Card) -> Option<Vec<Command>> {
    let [inner, gradient] = products else {
        return None;
    };
    let variant = Variant::of(inner.k).filter(|_| card.is_hopper)?;
    let (parts, rows_of_part) = parts(variant, inner, card);
    let size = |size: usize| Argument::U32(size as u32);
    let workspace = Argument::Address(inner.workspace);
    let both = Command::Launch {
        kernel: Kernel {
            file: "adapter_back_tensor",
            function: variant.function,
        },
        shape: LaunchShape {
            grid: [parts as u32, 1, 1],
            block: [(32 * WARPS) as u32, 1, 1],
            shared_bytes: variant.shared_bytes() as u32,
        },
        arguments: vec![
            Argument::Address(inner.a.address),
            Argument::Address(gradient.b.address),
            Argument::Address(inner.b.address),
            Argument::Address(inner.c.address),
            workspace,
            size(inner.m),
            size(inner.a.row_stride),
            size(gradient.b.row_stride),
            size(inner.c.row_stride),
            size(rows_of_part),
            Argument::U32(u32::from(inner.accumulate)),
            Argument::F32(inner.scale),
            Argument::F32(gradient.scale),
        ],
    };
    let sums = inner.k * RANK;
    let sum = Command::Launch {
        kernel: Kernel {
            file: "column_sum",
            function: "sum_partials",
        },
        shape: LaunchShape {
            grid: [sums.div_ceil(32) as u32, 1, 1],
            block: [32, 32, 1],
            shared_bytes: 0,
        },
        arguments: vec![
            workspace,
            Argument::Address(gradient.c.address),
            Argument::Null,
            size(parts),
            size(sums),
            Argument::U32(u32::from(gradient.accumulate)),
            Argument::U32(0),
        ],
    };
    Some(vec![both, sum])
}
