//! What is in the operands of products while they are timed. Zeros change no wires: a card hardly
//! needs power to multiply them and keeps its highest clock, where other ways are fastest than in
//! a step, which takes all the power that there is.

use super::command::{Argument, Command, Kernel, LaunchShape, Product};
use super::op::joined;

const THREADS: u32 = 256;
/// Enough for every card; threads take several elements each.
const BLOCKS: usize = 1024;

/// Fills what products read with numbers.
pub(super) fn fill(products: &[Product]) -> Vec<Command> {
    let fill = |(begin, end): (u64, u64)| Command::Launch {
        kernel: Kernel {
            file: "noise",
            function: "noise",
        },
        shape: LaunchShape::linear(BLOCKS, THREADS),
        arguments: vec![Argument::Address(begin), Argument::U64((end - begin) / 2)],
    };
    products.iter().flat_map(joined::operands).map(fill).collect()
}

/// Leaves zeros there, as memory has them before anything is written.
pub(super) fn clear(products: &[Product]) -> Vec<Command> {
    let clear = |(begin, end): (u64, u64)| Command::Clear {
        address: begin,
        bytes: end - begin,
    };
    products.iter().flat_map(joined::operands).map(clear).collect()
}
