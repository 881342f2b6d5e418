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
    products
        .iter()
        .flat_map(joined::operands)
        .map(fill)
        .collect()
}

/// Leaves zeros there, as memory has them before anything is written.
pub(super) fn clear(products: &[Product]) -> Vec<Command> {
    let clear = |(begin, end): (u64, u64)| Command::Clear {
        address: begin,
        bytes: end - begin,
    };
    products
        .iter()
        .flat_map(joined::operands)
        .map(clear)
        .collect()
}

#[cfg(test)]
mod tests {
    use cinch_graph::DType;

    use super::*;
    use crate::cuda::command::MatrixAt;

    /// All that is read is filled, C is not, and all that was filled is cleared again.
    #[test]
    fn operands_are_filled_and_cleared() {
        let matrix = |address, row_stride, transposed| MatrixAt {
            address,
            row_stride,
            dtype: DType::Bf16,
            transposed,
        };
        // A is eight columns of twelve, B lies by rows.
        let product = Product {
            m: 3,
            n: 5,
            k: 8,
            a: matrix(256, 12, false),
            b: matrix(1024, 8, true),
            c: matrix(2048, 5, false),
            scale: 1.0,
            accumulate: false,
            bias: None,
            workspace: 0,
            workspace_bytes: 0,
        };
        let (a, b) = (2 * 12 + 8, 4 * 8 + 8);
        let filled: Vec<Vec<Argument>> = fill(&[product])
            .into_iter()
            .map(|command| match command {
                Command::Launch { arguments, .. } => arguments,
                other => panic!("{other:?}"),
            })
            .collect();
        let at = |address, words| vec![Argument::Address(address), Argument::U64(words)];
        assert_eq!(filled, [at(256, a), at(1024, b)]);
        let zeros = |address, words: u64| Command::Clear {
            address,
            bytes: 2 * words,
        };
        assert_eq!(clear(&[product]), [zeros(256, a), zeros(1024, b)]);
    }
}
