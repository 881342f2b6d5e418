//! Products that one kernel computes: those that add to one result, and gradients of weights that
//! are too narrow to fill a card one by one. Which is faster, the kernel or the products as they
//! were, is measured before the first step.

mod gradients;
mod sum;

use super::Lowered;
use crate::cuda::command::{Command, Joined, MatrixAt, Product};
use crate::cuda::lowering::Card;

/// Joins what can be joined. A product only moves past others that touch nothing of its own.
pub(super) fn join(lowered: &mut [Lowered]) {
    sum::join(lowered);
    gradients::join(lowered);
}

/// The launches that compute joined products, of which one is enough; none where no kernel takes
/// them.
pub fn launches(joined: Joined, products: &[Product], card: Card) -> Vec<Command> {
    match joined {
        Joined::Sum => sum::launches(products, card),
        Joined::Gradients => gradients::launches(products, card),
    }
}

/// The products of a node that has nothing else to do.
fn products(lowered: &Lowered) -> Option<&[Product]> {
    match &lowered.commands[..] {
        [] => Some(&[]),
        [Command::Product(product)] => Some(std::slice::from_ref(product)),
        [Command::Products { products, .. }] => Some(products),
        _ => None,
    }
}

type Bytes = (u64, u64);

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

fn overlap(a: Bytes, b: Bytes) -> bool {
    a.0 < b.1 && b.0 < a.1
}

fn result(product: &Product) -> Bytes {
    bytes(&product.c, product.m, product.n)
}

fn reads(product: &Product, range: Bytes) -> bool {
    let bias = product.bias.map(|bias| {
        let size = product.n as u64 * product.c.dtype.size();
        (bias, bias + size)
    });
    let sides = [
        bytes(&product.a, product.m, product.k),
        bytes(&product.b, product.k, product.n),
    ];
    sides
        .into_iter()
        .chain(bias)
        .any(|side| overlap(side, range))
}

/// Whether two products may run in either order, each with its scratch memory.
fn independent(a: &Product, b: &Product) -> bool {
    let scratch = |x: &Product| (x.workspace, x.workspace + x.workspace_bytes);
    let spares = |a: &Product, b: &Product| {
        !reads(b, result(a)) && !reads(b, scratch(a)) && !overlap(scratch(b), result(a))
    };
    spares(a, b) && spares(b, a) && !overlap(result(a), result(b))
}

/// Matrices of 16-bit elements that the copy engine can take.
fn is_copied(matrix: &MatrixAt) -> bool {
    matrix.dtype.size() == 2
        && matrix.address.is_multiple_of(16)
        && matrix.row_stride.is_multiple_of(8)
}
