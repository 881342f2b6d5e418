//! Gradients of narrow weights: those that are near each other in one launch, and their sums cut
//! among the blocks of a cluster. A narrow gradient has few tiles, and each sums over all tokens: one
//! by one and in one go, most of the card waits.

#[cfg(test)]
mod tests;

use cinch_graph::DType;

use super::{
    Effect, WINDOW, effects, in_place_of, is_copied, may_pass, overlap, reads, result, scratch,
};
use crate::cuda::command::{
    Argument, Command, Joined, Kernel, LaunchShape, MatrixAt, MatrixMapAt, Product,
};
use crate::cuda::lowering::Card;
use crate::cuda::op::Lowered;

/// Products that the kernel has room for.
const MAX_PRODUCTS: usize = 6;

/// Rows and columns of a tile of C.
const TILE: usize = 128;
/// Of the inner dimension, at once.
const TILE_DEPTH: usize = 64;
const STAGES: usize = 3;
const THREADS: u32 = 288;

/// Kernels by the parts that they cut the sum into.
const KERNELS: [(usize, &str); 4] = [
    (1, "gradients"),
    (2, "gradients_2"),
    (4, "gradients_4"),
    (8, "gradients_8"),
];
/// Tiles of the inner dimension that a part has at least.
const LEAST_STEPS: usize = 4;
/// Blocks that a multiprocessor holds at once.
const BLOCKS_AT_ONCE: usize = 2;

/// Gradients narrower than this are joined: wider ones fill a card by themselves.
const NARROW: usize = 1024;

/// The gradient of a narrow weight, where a node computes nothing else.
fn gradient(lowered: &Lowered) -> Option<Product> {
    let [Command::Product(product)] = lowered.commands[..] else {
        return None;
    };
    let sums_over_rows = product.a.transposed && !product.b.transposed;
    let is_narrow = product.m.min(product.n) <= NARROW;
    (sums_over_rows && is_narrow && product.bias.is_none()).then_some(product)
}

/// Gradients that are computed together, right after the node at `place`.
struct Group {
    members: Vec<(usize, Product)>,
    place: usize,
}

impl Group {
    /// Takes in the gradient of a later node, at the first place where all of them can be.
    fn take(&mut self, lowered: &[Lowered], later: usize, product: Product) {
        let apart = |(_, member): &(usize, Product)| {
            let (a, b) = (result(member), result(&product));
            !reads(member, b) && !reads(&product, a) && !overlap(a, b)
        };
        if self.members.len() == MAX_PRODUCTS || !self.members.iter().all(apart) {
            return;
        }
        // What is between two nodes, besides the group's own.
        let between = |after: usize, until: usize| {
            let others = (after + 1..until)
                .filter(|index| self.members.iter().all(|(member, _)| member != index));
            others.flat_map(|index| effects(&lowered[index]).unwrap_or_default())
        };
        let members = || self.members.iter().map(|(_, member)| member);
        let fits = |place: usize| {
            let Some(host) = host(lowered, place) else {
                return false;
            };
            let spared = |moved: &Product| {
                !reads(moved, scratch(host)) && !overlap(result(moved), scratch(host))
            };
            let sinks =
                |member| between(self.place, place + 1).all(|other| may_pass(member, other));
            between(place, later).all(|other| may_pass(&product, other))
                && members().all(sinks)
                && members().chain([&product]).all(spared)
        };
        if let Some(place) = (self.place..=later).find(|&place| fits(place)) {
            self.place = place;
            self.members.push((later, product));
        }
    }
}

/// The product at a place, whose scratch memory the others take.
fn host(lowered: &[Lowered], place: usize) -> Option<&Product> {
    let products = effects(&lowered[place])?.into_iter();
    let mut products = products.filter_map(|effect| match effect {
        Effect::Product(product) => Some(product),
        Effect::Clear(_) | Effect::Node(_) => None,
    });
    products.next()
}

/// Joins gradients that are near each other; one that has none near is a group of its own.
pub(super) fn join(lowered: &mut [Lowered]) {
    for at in 0..lowered.len() {
        let Some(first) = gradient(&lowered[at]) else {
            continue;
        };
        let mut group = Group {
            members: vec![(at, first)],
            place: at,
        };
        for later in at + 1..lowered.len().min(at + WINDOW) {
            if effects(&lowered[later]).is_none() {
                break;
            }
            if let Some(product) = gradient(&lowered[later]) {
                group.take(lowered, later, product);
            }
        }
        let Some(host) = host(lowered, group.place).copied() else {
            continue;
        };
        let products = group.members.iter();
        let products = products.map(|(_, product)| in_place_of(&host, *product));
        let command = Command::Products {
            joined: Joined::Gradients,
            heads: Vec::new(),
            products: products.collect(),
            tails: Vec::new(),
        };
        for (member, _) in group.members {
            lowered[member].commands.clear();
        }
        lowered[group.place].commands.push(command);
    }
}

/// The launches of which each computes gradients together, where the kernels take them: first the one
/// whose parts are the shortest.
pub(super) fn launches(products: &[Product], card: Card) -> Vec<Command> {
    let fits = |product: &Product| {
        let result = &product.c;
        let is_stored = match result.dtype {
            DType::F32 => result.address.is_multiple_of(8) && result.row_stride.is_multiple_of(2),
            _ => is_copied(result),
        };
        let sides = [product.m, product.n, product.k, result.row_stride];
        is_copied(&product.a)
            && is_copied(&product.b)
            && is_stored
            && product.n.is_multiple_of(2)
            && sides.iter().all(|&side| i32::try_from(side).is_ok())
    };
    if !card.is_hopper || products.len() > MAX_PRODUCTS || !products.iter().all(fits) {
        return Vec::new();
    }
    let mut table = vec![products.len() as u32];
    let mut arguments = Vec::new();
    let mut tiles = 0;
    for product in products {
        let column_tiles = product.n.div_ceil(TILE);
        let sizes = [
            product.m,
            product.n,
            product.c.row_stride,
            tiles,
            column_tiles,
            product.k.div_ceil(TILE_DEPTH),
        ];
        table.extend(sizes.map(|size| size as u32));
        table.extend([
            product.scale.to_bits(),
            u32::from(product.accumulate),
            u32::from(product.c.dtype == DType::F32),
        ]);
        tiles += product.m.div_ceil(TILE) * column_tiles;
        arguments.push(matrices(product));
    }
    let words = table.len() - 1;
    table.resize(1 + words / products.len() * MAX_PRODUCTS, 0);
    let last = arguments.last().copied().into_iter();
    let missing = MAX_PRODUCTS - arguments.len();
    arguments.extend(last.cycle().take(missing).collect::<Vec<_>>());
    let arguments = arguments.concat();
    let steps = products
        .iter()
        .map(|product| product.k.div_ceil(TILE_DEPTH));
    let steps = steps.min().unwrap_or(0);
    // More parts than fill the card with half as many only add up more.
    let helps = |parts: usize| {
        let filled = tiles * parts / 2 >= BLOCKS_AT_ONCE * card.multiprocessors;
        parts == 1 || (!filled && steps >= LEAST_STEPS * parts)
    };
    let kernels = KERNELS.into_iter().rev().filter(|(parts, _)| helps(*parts));
    let launch = |(parts, function): (usize, &'static str)| Command::LaunchTable {
        kernel: Kernel {
            file: "gradient_hopper",
            function,
        },
        shape: LaunchShape {
            grid: [(tiles * parts) as u32, 1, 1],
            block: [THREADS, 1, 1],
            // Tiles begin at multiples of 1024 bytes; barriers follow them.
            shared_bytes: (STAGES * 2 * TILE * TILE_DEPTH * 2 + 1024 + 16 * STAGES) as u32,
        },
        table: table.clone().into(),
        arguments: arguments.clone(),
    };
    kernels.map(launch).collect()
}

/// What the kernel is given of one product.
fn matrices(product: &Product) -> [Argument; 3] {
    let side = |matrix: &MatrixAt, columns: usize| {
        Argument::MatrixMap(MatrixMapAt {
            address: matrix.address,
            rows: product.k,
            columns,
            row_stride: matrix.row_stride,
            box_rows: TILE_DEPTH,
            box_columns: TILE_DEPTH,
        })
    };
    [
        side(&product.a, product.m),
        side(&product.b, product.n),
        Argument::Address(product.c.address),
    ]
}
