//! Products that a kernel of ours may compute instead of the library: those that add to one result,
//! with what follows them, and gradients of narrow weights, several at once; narrow ones with a long
//! sum, and such a one with gradients. Which is faster is measured before the first step.

mod back;
mod gradients;
mod narrow;
mod short;
mod split;
mod sum;
mod tail;
#[cfg(test)]
mod tests;
mod turns;
mod whole;

pub(super) use tail::tail;

use super::{Bytes, Lowered, Memory};
use crate::cuda::command::{Command, Joined, MatrixAt, Product, Tail};
use crate::cuda::lowering::Card;

/// Joins what can be joined. A product only moves past others that touch nothing of its own.
pub(super) fn join(lowered: &mut [Lowered]) {
    sum::join(lowered);
    back::join(lowered);
    gradients::join(lowered);
    narrow::mark(lowered);
}

/// Ways to compute joined products and what follows them, of which one is enough; none where no
/// kernel takes them.
pub fn ways(joined: Joined, products: &[Product], tails: &[Tail], card: Card) -> Vec<Vec<Command>> {
    let launches = match joined {
        Joined::Sum => sum::launches(products, card),
        Joined::Gradients => gradients::launches(products, card),
        Joined::Narrow => narrow::launches(products, card),
        Joined::Back => return back::ways(products, tails, card),
    };
    let followed = |launches: Vec<Command>, tails: &[Tail]| -> Vec<Command> {
        let after = tails.iter().map(|tail| tail.command.clone());
        launches.into_iter().chain(after).collect()
    };
    // With as many of the tails as there are, or with fewer.
    let most = (joined == Joined::Sum).then_some(tails.len());
    let inside = most.into_iter().flat_map(|most| (0..=most).rev());
    let short = inside.filter_map(|count| {
        let (with, after) = tails.split_at(count);
        let launches = short::launches(products, with, card)?;
        Some(followed(launches, after))
    });
    let inside = most.into_iter().flat_map(|most| (0..=most).rev());
    let whole = inside.flat_map(|count| {
        let (with, after) = tails.split_at(count);
        let launches = whole::launches(products, with, card).into_iter();
        launches.map(move |launch| followed(vec![launch], after))
    });
    let turns = |with: &[Tail], after: &[Tail]| {
        let launch = turns::launch(products, with, card).filter(|_| joined == Joined::Sum)?;
        Some(followed(vec![launch], after))
    };
    let mut counts = (1..=tails.len()).rev();
    let with = counts.find_map(|count| turns(&tails[..count], &tails[count..]));
    let dropped: Vec<Vec<Command>> = match tails.split_first() {
        Some((first, after)) if joined == Joined::Sum => {
            let launches = sum::dropped_launches(products, first, card);
            let followed = launches
                .into_iter()
                .map(|launch| followed(vec![launch], after));
            followed.collect()
        }
        _ => Vec::new(),
    };
    let alone = launches.into_iter();
    short
        .chain(whole)
        .chain(with)
        .chain(dropped)
        .chain(alone.map(|launch| followed(vec![launch], tails)))
        .chain(turns(&[], tails))
        .collect()
}

/// How far products are looked for that belong to one: the nodes between a gradient and what it is
/// made of are few.
const WINDOW: usize = 24;

/// What a product that moves must not disturb.
#[derive(Clone, Copy)]
enum Effect<'a> {
    Product(&'a Product),
    Clear(Bytes),
    /// Of a node, besides its products.
    Node(&'a Memory),
}

/// All that a node does; nothing where a product must not pass it.
fn effects(lowered: &Lowered) -> Option<Vec<Effect<'_>>> {
    let mut effects = Vec::new();
    for command in &lowered.commands {
        match command {
            Command::Product(product) => effects.push(Effect::Product(product)),
            Command::Products {
                heads,
                products,
                tails,
                ..
            } => {
                effects.extend(products.iter().map(Effect::Product));
                if !heads.is_empty() || !tails.is_empty() {
                    effects.push(Effect::Node(&lowered.memory));
                }
            }
            &Command::Clear { address, bytes } => {
                effects.push(Effect::Clear((address, address + bytes)));
            }
            Command::Fetch(_)
            | Command::Store(_)
            | Command::Exchange(_)
            | Command::Beside { .. }
            | Command::Await { .. } => return None,
            Command::Ways(_)
            | Command::Launch { .. }
            | Command::LaunchGenerated { .. }
            | Command::LaunchTable { .. }
            | Command::Copy { .. } => effects.push(Effect::Node(&lowered.memory)),
        }
    }
    Some(effects)
}

/// Bytes of the arena that a matrix lies in.
fn bytes(matrix: &MatrixAt, rows: usize, columns: usize) -> Bytes {
    let (rows, columns) = match matrix.transposed {
        true => (columns, rows),
        false => (rows, columns),
    };
    let elements = (rows.saturating_sub(1) * matrix.row_stride + columns) as u64;
    (
        matrix.address,
        matrix.address + elements * matrix.dtype.size(),
    )
}

/// What a product reads, but for its bias.
pub fn operands(product: &Product) -> [Bytes; 2] {
    [
        bytes(&product.a, product.m, product.k),
        bytes(&product.b, product.k, product.n),
    ]
}

fn overlap(a: Bytes, b: Bytes) -> bool {
    a.0 < b.1 && b.0 < a.1
}

fn result(product: &Product) -> Bytes {
    bytes(&product.c, product.m, product.n)
}

fn reads(product: &Product, range: Bytes) -> bool {
    let bias = product.bias.map(|bias| {
        let size = product.n as u64 * product.c.dtype.size();
        (bias.copied, bias.copied + size)
    });
    reads_matrices(product, range) || bias.is_some_and(|bias| overlap(bias, range))
}

fn reads_matrices(product: &Product, range: Bytes) -> bool {
    operands(product)
        .into_iter()
        .any(|side| overlap(side, range))
}

fn scratch(product: &Product) -> Bytes {
    (
        product.workspace,
        product.workspace + product.workspace_bytes,
    )
}

/// Whether a product may move past something. It takes its scratch memory from where it goes.
fn may_pass(moved: &Product, other: Effect<'_>) -> bool {
    let untouched = |range| !reads(moved, range) && !overlap(result(moved), range);
    match other {
        Effect::Clear(range) => untouched(range),
        Effect::Node(memory) => {
            let result = result(moved);
            memory.writes.iter().all(|&range| untouched(range))
                && !memory.reads.iter().any(|&range| overlap(range, result))
        }
        Effect::Product(other) => {
            untouched(result(other)) && untouched(scratch(other)) && !reads(other, result(moved))
        }
    }
}

/// The product with another's scratch memory, in whose place it runs.
fn in_place_of(other: &Product, moved: Product) -> Product {
    Product {
        workspace: other.workspace,
        workspace_bytes: other.workspace_bytes,
        ..moved
    }
}

/// Matrices of 16-bit elements that the copy engine can take.
fn is_copied(matrix: &MatrixAt) -> bool {
    matrix.dtype.size() == 2
        && matrix.address.is_multiple_of(16)
        && matrix.row_stride.is_multiple_of(8)
}
