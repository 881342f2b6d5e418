//! The last stage of a sum over rows that blocks have made in parts.

use crate::cuda::command::{Argument, Command, Kernel, LaunchShape};

/// Results that one launch adds up at the most.
pub const MOST: usize = 3;

/// Parts [parts, width] of each of some results, one after the other.
pub struct Parts {
    pub address: u64,
    pub parts: usize,
    /// A multiple of four.
    pub width: usize,
    /// Whether they are added to what is there.
    pub adds: bool,
}

impl Parts {
    /// Columns of a block.
    const COLUMNS: usize = 32;
    /// From so many columns on blocks of few threads, which have four columns each, fill a card.
    const WIDE: usize = 8192;

    /// The launch that adds them up; what is missing of the results is null.
    pub fn sum(&self, results: [Argument; MOST]) -> (Kernel, LaunchShape, Vec<Argument>) {
        let count = results
            .iter()
            .take_while(|&&to| to != Argument::Null)
            .count();
        let is_single = count == 1 && self.width < Self::WIDE;
        let kernel = |function| Kernel {
            file: "column_sum",
            function,
        };
        let kernel = kernel(if is_single {
            "sum_partials"
        } else {
            "sum_many_partials"
        });
        let shape = LaunchShape {
            grid: [self.width.div_ceil(Self::COLUMNS) as u32, count as u32, 1],
            block: if is_single { [32, 32, 1] } else { [256, 1, 1] },
            shared_bytes: 0,
        };
        let size = |size: usize| Argument::U32(size as u32);
        let [first, second, third] = results;
        let sizes = [size(self.parts), size(self.width)];
        let adds = Argument::U32(u32::from(self.adds));
        let mut arguments = vec![Argument::Address(self.address), first, second];
        if is_single {
            arguments.extend(sizes);
            arguments.extend([adds, Argument::U32(0)]);
        } else {
            arguments.push(third);
            arguments.extend(sizes);
            arguments.push(adds);
        }
        (kernel, shape, arguments)
    }
}

/// Parts of some results that lie beside each other, of one width each, and of a last one of another.
/// Widths are multiples of 32.
pub struct PartsBeside {
    pub address: u64,
    pub parts: usize,
    /// What is missing of the results is null.
    pub results: [Argument; MOST],
    pub width: usize,
    pub adds: bool,
    pub last: Argument,
    pub last_width: usize,
    pub last_adds: bool,
}

impl PartsBeside {
    /// Columns of all results but the last.
    fn last_column(&self) -> usize {
        let there = |&&to: &&Argument| to != Argument::Null;
        self.results.iter().filter(there).count() * self.width
    }

    /// The launch that adds them up.
    pub fn sum(&self) -> Command {
        let columns = self.last_column() + self.last_width;
        let size = |size: usize| Argument::U32(size as u32);
        let [first, second, third] = self.results;
        Command::Launch {
            kernel: Kernel {
                file: "column_sum",
                function: "sum_partials_beside",
            },
            shape: LaunchShape::linear(columns.div_ceil(Parts::COLUMNS), 256),
            arguments: vec![
                Argument::Address(self.address),
                first,
                second,
                third,
                self.last,
                size(self.parts),
                size(columns),
                size(self.width),
                size(self.last_column()),
                Argument::U32(u32::from(self.adds)),
                Argument::U32(u32::from(self.last_adds)),
            ],
        }
    }
}
