//! Products whose result is a few columns wide: what an adapter reads, and what its gradient comes to.
//! Those with few rows and a long sum are cut among the blocks of a cluster ([`super::split`]); those
//! of up to 32 columns are a pass over what is wide.

#[cfg(test)]
mod tests;

use super::{is_copied, split};
use crate::cuda::command::{Argument, Command, Joined, Kernel, LaunchShape, Product};
use crate::cuda::lowering::Card;
use crate::cuda::op::Lowered;

/// Rows of a block, and its threads where rows are few and where they are many.
const ROWS: usize = 32;
const THREADS: [u32; 2] = [256, 128];
/// Of the inner dimension, at once.
const DEPTH: usize = 32;

/// By columns of the result in eights: the kernels for B by rows and by columns.
const KERNELS: [[&str; 2]; 4] = [
    ["narrow_rows_1", "narrow_columns_1"],
    ["narrow_rows_2", "narrow_columns_2"],
    ["narrow_rows_3", "narrow_columns_3"],
    ["narrow_rows_4", "narrow_columns_4"],
];

/// Whether one pass over A computes it.
fn is_one_pass(product: &Product) -> bool {
    let sides = [product.m, product.n, product.k, product.c.row_stride];
    (1..=8 * KERNELS.len()).contains(&product.n)
        && product.n.is_multiple_of(8)
        && product.k.is_multiple_of(DEPTH)
        && !product.a.transposed
        && !product.accumulate
        && product.bias.is_none()
        && is_copied(&product.a)
        && is_copied(&product.b)
        && product.c.dtype == product.a.dtype
        && sides.iter().all(|&side| u32::try_from(side).is_ok())
}

/// Marks products that a kernel of ours may compute.
pub(super) fn mark(lowered: &mut [Lowered]) {
    let commands = lowered.iter_mut().flat_map(|lowered| &mut lowered.commands);
    commands.for_each(mark_command);
}

fn mark_command(command: &mut Command) {
    match command {
        Command::Product(product) if split::is_split(product) || is_one_pass(product) => {
            *command = Command::Products {
                joined: Joined::Narrow,
                heads: Vec::new(),
                products: vec![*product],
                tails: Vec::new(),
            };
        }
        Command::Ways(ways) => ways.iter_mut().flatten().for_each(mark_command),
        _ => {}
    }
}

/// The launches that compute the product, each by itself; none where no kernel takes it.
pub(super) fn launches(products: &[Product], card: Card) -> Vec<Command> {
    let [product] = products else {
        return Vec::new();
    };
    let one_pass = is_one_pass(product).then(|| launch(product, card));
    one_pass
        .into_iter()
        .chain(split::launches(product, card))
        .collect()
}

fn launch(product: &Product, card: Card) -> Command {
    let by_column = !product.b.transposed;
    let blocks = product.m.div_ceil(ROWS).max(1);
    let size = |size: usize| Argument::U32(size as u32);
    Command::Launch {
        kernel: Kernel {
            file: "adapter_tensor",
            function: KERNELS[product.n.div_ceil(8) - 1][usize::from(by_column)],
        },
        shape: LaunchShape::linear(blocks, THREADS[usize::from(blocks >= card.multiprocessors)]),
        arguments: vec![
            Argument::Address(product.a.address),
            Argument::Address(product.b.address),
            Argument::Address(product.c.address),
            size(product.m),
            size(product.k),
            size(product.a.row_stride),
            size(product.b.row_stride),
            size(product.c.row_stride),
            Argument::F32(product.scale),
        ],
    }
}
