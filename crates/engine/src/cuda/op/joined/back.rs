//! The two products that an adapter's second matrix has in the backward, the gradient of what it read
//! and its own. Both read the gradient of what it added to, which is wide: one pass computes both, and
//! those of adapters that stand beside each other on one layer as well. Where what the first matrix read
//! was dropped in part, its gradient is part of the pass: it needs of the other only rows that a block
//! has just made.

#[cfg(test)]
mod tests;

use cinch_graph::DType;

use super::{
    WINDOW, bytes, effects, in_place_of, is_copied, may_pass, operands, overlap, result, scratch,
    tail,
};
use crate::cuda::command::{
    Argument, Command, FirstGradient, Joined, Kernel, LaunchShape, MatrixAt, Product, Tail,
    TailKind,
};
use crate::cuda::lowering::Card;
use crate::cuda::op::linear::adapter;
use crate::cuda::op::linear::parts::{self, Parts, PartsBeside};
use crate::cuda::op::{Bytes, Lowered, Memory};

/// The adapter's rank.
const RANK: usize = 8;
/// Pairs that one launch computes at the most.
const MOST: usize = parts::MOST;

/// A kernel by the columns of the matrix and the warps of a block, with the rows that a block takes at
/// once, how many times as many are on their way, and the blocks that a multiprocessor holds.
struct Variant {
    columns: usize,
    warps: usize,
    function: &'static str,
    stages: usize,
    rows: usize,
    blocks: usize,
}

const fn variant(
    (columns, warps): (usize, usize),
    function: &'static str,
    stages: usize,
    rows: usize,
    blocks: usize,
) -> Variant {
    Variant {
        columns,
        warps,
        function,
        stages,
        rows,
        blocks,
    }
}

const VARIANTS: [Variant; 8] = [
    variant((128, 8), "adapter_back_128_8", 4, 32, 2),
    variant((256, 8), "adapter_back_256_8", 4, 32, 2),
    variant((384, 12), "adapter_back_384_12", 4, 16, 2),
    variant((384, 4), "adapter_back_384_4", 3, 16, 4),
    variant((512, 8), "adapter_back_512_8", 3, 32, 1),
    variant((768, 8), "adapter_back_768_8", 3, 32, 1),
    variant((1024, 8), "adapter_back_1024_8", 2, 32, 1),
    variant((1536, 8), "adapter_back_1536_8", 3, 16, 1),
];

impl Variant {
    fn of(columns: usize) -> impl DoubleEndedIterator<Item = &'static Self> {
        let variants = VARIANTS.iter();
        variants.filter(move |variant| variant.columns == columns)
    }

    /// Bytes of the sums of a part.
    fn sums(columns: usize) -> u64 {
        (columns * RANK * size_of::<f32>()) as u64
    }

    fn shared_bytes(&self) -> usize {
        let row = (self.columns / self.warps + 8 + RANK) * 2;
        let sums = 2 * self.warps * self.rows * RANK * size_of::<f32>();
        sums + self.warps * self.stages * self.rows * row
    }
}

/// The rows are cut into so many parts, of so many rows each, for each of some pairs.
fn parts(variant: &Variant, inner: &Product, pairs: usize, card: Card) -> (usize, usize) {
    let room = (inner.workspace_bytes / Variant::sums(inner.k)) as usize;
    cut(
        inner.m,
        (card.multiprocessors * variant.blocks).min(room) / pairs,
        variant.rows,
    )
}

/// So many rows in parts of whole steps, as many as `most`.
fn cut(rows: usize, most: usize, step: usize) -> (usize, usize) {
    let of_part = rows.div_ceil(most.max(1)).next_multiple_of(step);
    (rows.div_ceil(of_part).max(1), of_part)
}

/// A kernel that computes the gradients of both matrices, by adapters, the columns of the second
/// matrix of each, those of the first, and warps; with its stages, and the blocks that a multiprocessor
/// holds.
struct WithFirst {
    pairs: usize,
    columns: usize,
    inputs: usize,
    warps: usize,
    function: &'static str,
    stages: usize,
    blocks: usize,
}

const fn with_first(
    [pairs, columns, inputs, warps]: [usize; 4],
    function: &'static str,
    stages: usize,
    blocks: usize,
) -> WithFirst {
    WithFirst {
        pairs,
        columns,
        inputs,
        warps,
        function,
        stages,
        blocks,
    }
}

const WITH_FIRST: [WithFirst; 6] = [
    with_first([3, 384, 384, 6], "adapter_back_3_384_384_6", 2, 2),
    with_first([3, 384, 384, 12], "adapter_back_3_384_384_12", 4, 1),
    with_first([1, 384, 384, 6], "adapter_back_1_384_384_6", 4, 2),
    with_first([1, 384, 384, 12], "adapter_back_1_384_384_12", 8, 1),
    with_first([1, 1536, 384, 12], "adapter_back_1_1536_384_12", 3, 1),
    with_first([1, 384, 1536, 12], "adapter_back_1_384_1536_12", 3, 1),
];

impl WithFirst {
    /// Rows that a block takes at once.
    const ROWS: usize = 16;

    fn of(products: &[Product], first: &FirstGradient) -> impl Iterator<Item = &'static Self> {
        let sides = products
            .first()
            .map(|inner| (products.len() / 2, inner.k, first.inputs));
        let is_it = move |one: &&Self| Some((one.pairs, one.columns, one.inputs)) == sides;
        WITH_FIRST.iter().filter(is_it)
    }

    /// Numbers of the sums of a part.
    fn width(&self) -> usize {
        self.pairs * RANK * (self.columns + self.inputs)
    }

    fn shared_bytes(&self) -> usize {
        let low = self.pairs * RANK * 2;
        let row = (self.pairs * self.columns + 8 + self.inputs + 8) * 2;
        let stages = self.stages * (Self::ROWS * row + size_of::<u64>());
        let sums = self.warps * Self::ROWS * RANK * size_of::<f32>();
        let bases = Self::ROWS * size_of::<u32>();
        (stages + sums + Self::ROWS * low + bases).next_multiple_of(16)
    }
}

/// Whether the kernel computes the gradient of what an adapter's second matrix read.
fn is_inner(product: &Product) -> bool {
    let sides = [product.m, product.n, product.k, product.c.row_stride];
    product.n == RANK
        && Variant::of(product.k).next().is_some()
        && product.workspace_bytes >= MOST as u64 * Variant::sums(product.k)
        && !product.a.transposed
        && !product.b.transposed
        && product.b.row_stride == RANK
        && product.bias.is_none()
        && is_copied(&product.a)
        && is_copied(&product.b)
        // Written two columns at a time.
        && is_copied(&product.c)
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

/// Joins what an adapter's second matrix has in the backward, then neighbours, then the gradient of
/// the first matrix.
pub(super) fn join(lowered: &mut [Lowered]) {
    join_pairs(lowered);
    join_neighbours(lowered);
    join_first(lowered);
}

fn join_pairs(lowered: &mut [Lowered]) {
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

/// Joins pairs that follow each other into what one launch computes.
fn join_neighbours(lowered: &mut [Lowered]) {
    for at in 0..lowered.len() {
        let Some(Command::Products {
            joined: Joined::Back,
            products: first,
            ..
        }) = lowered[at].commands.last()
        else {
            continue;
        };
        let mut products = first.clone();
        let mut members = Vec::new();
        for (later, node) in lowered.iter().enumerate().skip(at + 1).take(WINDOW) {
            match &node.commands[..] {
                [] => {}
                [
                    Command::Products {
                        joined: Joined::Back,
                        products: pair,
                        ..
                    },
                ] if products.len() < 2 * MOST => {
                    let pair: Vec<_> = pair
                        .iter()
                        .map(|next| in_place_of(&first[0], *next))
                        .collect();
                    // The backward comes to the last columns first.
                    let Some(all) = [
                        [&pair[..], &products].concat(),
                        [&products[..], &pair].concat(),
                    ]
                    .into_iter()
                    .find(|all| are_neighbours(all)) else {
                        break;
                    };
                    products = all;
                    members.push(later);
                }
                _ => break,
            }
        }
        if members.is_empty() {
            continue;
        }
        let Some(heads) = cleared(&lowered[at].commands, &products) else {
            continue;
        };
        for member in members {
            lowered[member].commands.clear();
        }
        let commands = &mut lowered[at].commands;
        commands.truncate(commands.len() - 1 - heads.len());
        commands.push(Command::Products {
            joined: Joined::Back,
            heads,
            products,
            tails: Vec::new(),
        });
    }
}

/// Whether pairs are of one shape, each in the columns that follow those of the one before, and what
/// they write is apart from what any of them reads.
fn are_neighbours(products: &[Product]) -> bool {
    let is_alike = |a: &Product, b: &Product| {
        let sizes = |product: &Product| (product.m, product.n, product.k, product.scale.to_bits());
        let strides = |product: &Product| {
            [product.a, product.b, product.c].map(|matrix| (matrix.row_stride, matrix.dtype))
        };
        sizes(a) == sizes(b) && strides(a) == strides(b)
    };
    let follows = |from: &MatrixAt, to: &MatrixAt, columns: usize| {
        to.address.checked_sub(from.address) == Some(columns as u64 * from.dtype.size())
    };
    let mut pairs = products.windows(4).step_by(2);
    let beside = pairs.all(|pair| {
        let [inner, gradient, next_inner, next_gradient] = pair else {
            return false;
        };
        is_alike(inner, next_inner)
            && is_alike(gradient, next_gradient)
            && gradient.accumulate == next_gradient.accumulate
            && follows(&inner.a, &next_inner.a, inner.k)
            && follows(&inner.c, &next_inner.c, RANK)
            && follows(&gradient.b, &next_gradient.b, RANK)
    });
    // The gradients of what was read lie between each other.
    let gradients = || products.iter().skip(1).step_by(2).map(result);
    let apart = |written: Bytes| {
        let mut read = products.iter().flat_map(operands);
        !overlap(written, scratch(&products[0])) && read.all(|read| !overlap(written, read))
    };
    let spared = |read: Bytes| !overlap(read, scratch(&products[0]));
    beside
        && products.iter().map(result).all(apart)
        && products.iter().flat_map(operands).all(spared)
        && gradients()
            .enumerate()
            .all(|(at, one)| gradients().skip(at + 1).all(|other| !overlap(one, other)))
}

/// What the library needs before these products, where all of them either add to what is there or
/// replace it; none where some do this and some that. What is cleared for those that add is written
/// by the launch, which replaces all of it.
fn cleared(commands: &[Command], products: &[Product]) -> Option<Vec<Command>> {
    let inner = || products.iter().step_by(2);
    let first = inner().next()?;
    if inner().all(|next| next.accumulate == first.accumulate) {
        return Some(Vec::new());
    }
    let rows = first.c.row_stride as u64 * first.c.dtype.size();
    match commands {
        [.., clear @ Command::Clear { address, bytes }, _]
            if first.c.row_stride == inner().count() * RANK
                && (*address, *bytes) == (first.c.address, first.m as u64 * rows) =>
        {
            Some(vec![clear.clone()])
        }
        _ => None,
    }
}

fn join_first(lowered: &mut [Lowered]) {
    for at in 0..lowered.len() {
        let Some(Command::Products {
            joined: Joined::Back,
            products,
            ..
        }) = lowered[at].commands.last()
        else {
            continue;
        };
        let Some((later, first, memory)) = first_gradient(lowered, at, products) else {
            continue;
        };
        let alone = adapter::gradient_launches(&first, products[0].workspace).into();
        lowered[later].commands.clear();
        lowered[at].memory.extend(memory);
        if let Some(Command::Products { tails, .. }) = lowered[at].commands.last_mut() {
            tails.push(Tail {
                kind: TailKind::FirstGradient(first),
                command: Command::Ways(vec![alone]),
            });
        }
    }
}

/// The node that computes the gradient of the first matrix, and may be part of the pass, with what it
/// reads and writes there.
fn first_gradient(
    lowered: &[Lowered],
    at: usize,
    products: &[Product],
) -> Option<(usize, FirstGradient, Memory)> {
    let mut between = Vec::new();
    for (later, node) in lowered.iter().enumerate().skip(at + 1).take(WINDOW) {
        if let Some(kind @ TailKind::FirstGradient(first)) = node.tail
            && !node.commands.is_empty()
            && is_first(products, &first)
        {
            let memory = tail::memory(node);
            let wide = bytes(&first.wide, first.rows, first.inputs);
            let written = products.iter().map(result);
            let mut written = written.chain([scratch(&products[0])]);
            let mut read = products.iter().flat_map(operands).chain([wide]);
            let clear = |range| memory.writes.iter().all(|&to| !overlap(range, to));
            let apart =
                written.all(|range| !overlap(range, wide) && clear(range)) && read.all(clear);
            let passes = || {
                let mut between = between.iter();
                between.all(|&other| tail::may_pass(&kind, &memory, other))
            };
            return (apart && passes()).then_some((later, first, memory));
        }
        between.extend(effects(node)?);
    }
    None
}

/// Whether it is the gradient of the matrix that made what these second matrices read, and a kernel
/// takes all of them.
fn is_first(products: &[Product], first: &FirstGradient) -> bool {
    let mut inner = products.iter().step_by(2);
    let (c, narrow) = (&products[0].c, &first.narrow);
    let same =
        (c.address, c.row_stride, c.dtype) == (narrow.address, narrow.row_stride, narrow.dtype);
    same && (first.rows, first.outputs) == (products[0].m, products.len() / 2 * RANK)
        // What is added to nothing is what the gradient reads.
        && !inner.all(|inner| inner.accumulate)
        && is_copied(&first.wide)
        && u32::try_from(first.wide.row_stride).is_ok()
        && adapter::gradient_bytes(first) <= products[0].workspace_bytes
        && WithFirst::of(products, first).next().is_some()
}

/// Ways to compute all of them, of which one is enough; none where no kernel takes them.
pub(super) fn ways(products: &[Product], tails: &[Tail], card: Card) -> Vec<Vec<Command>> {
    let [inner, gradient, ..] = products else {
        return Vec::new();
    };
    if !card.is_hopper {
        return Vec::new();
    }
    let first = tails.iter().find_map(|tail| match &tail.kind {
        TailKind::FirstGradient(first) => Some(first),
        _ => None,
    });
    let with_first = first.into_iter().flat_map(|first| {
        let variants = WithFirst::of(products, first);
        variants.map(|variant| launches_with_first(variant, products, first, card))
    });
    let launches = |variant| {
        let mut commands = launches(variant, products, inner, gradient, card);
        commands.extend(tails.iter().map(|tail| tail.command.clone()));
        commands
    };
    let variants = Variant::of(inner.k);
    // Many blocks of few warps are first where there is much to read.
    match products.len() > 2 {
        true => with_first.chain(variants.rev().map(launches)).collect(),
        false => with_first.chain(variants.map(launches)).collect(),
    }
}

/// The addresses of each pair, null where there is none.
fn addresses(products: &[Product], of: fn(&[Product]) -> u64) -> [Argument; MOST] {
    let mut pairs = products.chunks_exact(2);
    [(); MOST].map(|()| {
        let pair = pairs.next();
        pair.map_or(Argument::Null, |pair| Argument::Address(of(pair)))
    })
}

fn launches_with_first(
    variant: &WithFirst,
    products: &[Product],
    first: &FirstGradient,
    card: Card,
) -> Vec<Command> {
    let [inner, gradient] = [&products[0], &products[1]];
    let room = inner.workspace_bytes as usize / (variant.width() * size_of::<f32>());
    let most = (card.multiprocessors * variant.blocks).min(room);
    let (parts, rows_of_part) = cut(inner.m, most, WithFirst::ROWS);
    let at = |matrix: &MatrixAt| Argument::Address(matrix.address);
    let size = |size: usize| Argument::U32(size as u32);
    let mut arguments = vec![at(&inner.a), at(&gradient.b)];
    arguments.extend(addresses(products, |pair| pair[0].b.address));
    arguments.extend([
        at(&first.wide),
        at(&inner.c),
        Argument::Address(inner.workspace),
        size(inner.m),
        size(inner.a.row_stride),
        size(gradient.b.row_stride),
        size(inner.c.row_stride),
        size(first.wide.row_stride),
        size(rows_of_part),
        Argument::F32(inner.scale),
        Argument::F32(gradient.scale),
        Argument::F32(first.scale),
    ]);
    arguments.extend(adapter::dropout_arguments(first.dropout));
    let all = Command::Launch {
        kernel: Kernel {
            file: "adapter_back_hopper",
            function: variant.function,
        },
        shape: LaunchShape {
            grid: [parts as u32, 1, 1],
            block: [(32 * variant.warps) as u32, 1, 1],
            shared_bytes: variant.shared_bytes() as u32,
        },
        arguments,
    };
    let sums = PartsBeside {
        address: inner.workspace,
        parts,
        results: addresses(products, |pair| pair[1].c.address),
        width: inner.k * RANK,
        adds: gradient.accumulate,
        last: first.to,
        last_width: first.outputs * first.inputs,
        last_adds: first.adds,
    };
    vec![all, sums.sum()]
}

fn launches(
    variant: &Variant,
    products: &[Product],
    inner: &Product,
    gradient: &Product,
    card: Card,
) -> Vec<Command> {
    let pairs = products.len() / 2;
    let (parts, rows_of_part) = parts(variant, inner, pairs, card);
    let size = |size: usize| Argument::U32(size as u32);
    // What is cleared for some of them is replaced.
    let is_added = products.iter().step_by(2).all(|inner| inner.accumulate);
    let [first, second, third] = addresses(products, |pair| pair[0].b.address);
    let all = Command::Launch {
        kernel: Kernel {
            file: "adapter_back_tensor",
            function: variant.function,
        },
        shape: LaunchShape {
            grid: [parts as u32, pairs as u32, 1],
            block: [(32 * variant.warps) as u32, 1, 1],
            shared_bytes: variant.shared_bytes() as u32,
        },
        arguments: vec![
            Argument::Address(inner.a.address),
            Argument::Address(gradient.b.address),
            first,
            second,
            third,
            Argument::Address(inner.c.address),
            Argument::Address(inner.workspace),
            size(inner.m),
            size(inner.a.row_stride),
            size(gradient.b.row_stride),
            size(inner.c.row_stride),
            size(rows_of_part),
            Argument::U32(u32::from(is_added)),
            Argument::F32(inner.scale),
            Argument::F32(gradient.scale),
        ],
    };
    let sums = Parts {
        address: inner.workspace,
        parts,
        width: inner.k * RANK,
        adds: gradient.accumulate,
    };
    let (kernel, shape, arguments) = sums.sum(addresses(products, |pair| pair[1].c.address));
    let sum = Command::Launch {
        kernel,
        shape,
        arguments,
    };
    vec![all, sum]
}
