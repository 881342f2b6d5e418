//! Sums of products with a short inner dimension, and their tails, by a kernel that keeps its columns
//! of B in shared memory and writes what the tail makes of C.

#[cfg(test)]
mod tests;

use cinch_graph::op::ActivationKind;

use super::{is_copied, sum};
use crate::cuda::command::{
    Argument, Command, DropoutAt, Kernel, LaunchShape, MatrixAt, MatrixMapAt, Product, Tail,
    TailKind,
};
use crate::cuda::lowering::Card;

/// Rows and columns of a tile of C; the two blocks of a cluster have neighbouring columns.
const TILE_ROWS: usize = 64;
const TILE_COLUMNS: usize = 192;
const PAIR_COLUMNS: usize = 2 * TILE_COLUMNS;
/// Of the inner dimension, at once, and how many of them there is room for.
const TILE_DEPTH: usize = 64;
const MAX_STEPS: usize = 6;
const STAGES: usize = 5;
/// Warpgroups that multiply; one more feeds them.
const GROUPS: usize = 3;
const THREADS: u32 = 128 * (GROUPS as u32 + 1);
/// Products that add to C, of which a pair of tiles has one at the most, and their inner dimension:
/// what the matrix units multiply at once.
const MAX_ADAPTERS: usize = 3;
const MAX_RANK: usize = 16;
/// Rows of C that a warp has and writes at once, 64 columns wide.
const WARP_ROWS: usize = 16;
/// Columns of a narrow product after the sum's function.
const NARROW_COLUMNS: usize = 8;

/// Steps of B, stages of A and what a warpgroup writes; what adapters multiply, and read for each
/// warpgroup; the narrow product's matrix, the bias and barriers. Tiles begin at multiples of 1024
/// bytes.
const SHARED_BYTES: usize = {
    let tiles = MAX_STEPS * TILE_COLUMNS + STAGES * TILE_ROWS + GROUPS * 4 * WARP_ROWS;
    let adapters = TILE_COLUMNS + GROUPS * TILE_ROWS;
    let ends = TILE_COLUMNS * (2 * NARROW_COLUMNS + size_of::<f32>());
    let barriers = 2 * STAGES + 3 * GROUPS + MAX_STEPS + 1 + 4 * GROUPS;
    2 * TILE_DEPTH * tiles + 2 * MAX_RANK * adapters + ends + 8 * barriers + 1024
};

/// A sum and its tails, as the kernel sees them.
struct Short<'a> {
    main: &'a Product,
    adapters: Vec<&'a Product>,
    /// Of what adapters add, or of what the narrow product reads.
    dropout: Option<DropoutAt>,
    kind: Kind,
    narrow: Option<Narrow>,
}

/// A narrow product of what GELU made of C.
#[derive(Clone, Copy)]
struct Narrow {
    weight: u64,
    to: u64,
    /// Scratch memory: a part for each tile of columns.
    parts: (u64, u64),
}

/// What becomes of C.
#[derive(Clone, Copy)]
enum Kind {
    /// It is written.
    Plain,
    /// GELU of it is written here, and C too unless this is its place.
    Gelu { to: u64 },
    /// It is multiplied by the derivative at these and written here, and so may GELU of them be.
    GeluBackward { x: u64, to: u64, value: Option<u64> },
}

impl<'a> Short<'a> {
    /// None where the kernel does not take it.
    fn new(products: &'a [Product], tails: &'a [Tail]) -> Option<Self> {
        let (main, adds) = products.split_first()?;
        let mut short = Self {
            main,
            adapters: adds.iter().collect(),
            dropout: None,
            kind: Kind::Plain,
            narrow: None,
        };
        for tail in tails {
            match &tail.kind {
                TailKind::Dropped { product, dropout } => {
                    short.adapters.push(product);
                    short.dropout = Some(*dropout);
                }
                TailKind::Activation {
                    function: ActivationKind::Gelu,
                    to,
                    ..
                } => short.kind = Kind::Gelu { to: *to },
                TailKind::Derivative {
                    function: ActivationKind::Gelu,
                    x,
                    to,
                    value,
                    ..
                } => {
                    short.kind = Kind::GeluBackward {
                        x: *x,
                        to: *to,
                        value: *value,
                    };
                }
                &TailKind::Narrow {
                    from,
                    weight,
                    columns: NARROW_COLUMNS,
                    to,
                    dropout,
                    parts,
                    ..
                } if short.makes(from) && short.dropout.is_none() => {
                    short.narrow = Some(Narrow { weight, to, parts });
                    short.dropout = Some(dropout);
                }
                _ => return None,
            }
        }
        short.fits().then_some(short)
    }

    /// Whether this is where GELU of C is written.
    fn makes(&self, address: u64) -> bool {
        matches!(self.kind, Kind::Gelu { to } if to == address)
    }

    fn is_by_column(&self) -> bool {
        !self.main.b.transposed
    }

    fn fits(&self) -> bool {
        let by_column = self.is_by_column();
        let fits = |product: &&Product| {
            let sides = [product.m, product.n, product.k, product.c.row_stride];
            is_copied(&product.a)
                && is_copied(&product.b)
                && is_copied(&product.c)
                && !product.a.transposed
                && product.b.transposed != by_column
                && product.n.is_multiple_of(8)
                && sides.iter().all(|&side| i32::try_from(side).is_ok())
        };
        let kind_fits = match self.kind {
            Kind::Plain => true,
            Kind::Gelu { to } => !by_column && to.is_multiple_of(16),
            Kind::GeluBackward { x, to, value } => {
                let mut addresses = [Some(x), Some(to), value].into_iter().flatten();
                by_column && addresses.all(|address| address.is_multiple_of(16))
            }
        };
        let narrow_fits = self.narrow.is_none_or(|narrow| {
            let (start, end) = narrow.parts;
            let mut addresses = [start, narrow.weight, narrow.to].into_iter();
            parts_bytes(self.main, NARROW_COLUMNS) <= end - start
                && addresses.all(|address| address.is_multiple_of(16))
        });
        // What is dropped is all that adds: the mask is of the sum of what adds.
        let most = match self.dropout.filter(|_| self.narrow.is_none()) {
            Some(_) => 1,
            None => MAX_ADAPTERS,
        };
        kind_fits
            && !self.main.accumulate
            && narrow_fits
            && self.main.k <= MAX_STEPS * TILE_DEPTH
            && self.adapters.len() <= most
            && self.adapters.iter().all(|adapter| adapter.k <= MAX_RANK)
            && self.adapters.iter().chain([&self.main]).all(fits)
            && (0..self.pairs()).all(|pair| self.adapters_of(pair) <= 1)
    }

    fn pairs(&self) -> usize {
        pairs(self.main)
    }

    /// How many adapters add to columns of a pair of tiles.
    fn adapters_of(&self, pair: usize) -> usize {
        let begin = pair * PAIR_COLUMNS;
        let meets = |adapter: &&&Product| {
            let first = sum::column_in(self.main, adapter).unwrap_or(0);
            begin < first + adapter.n && begin + PAIR_COLUMNS > first
        };
        self.adapters.iter().filter(meets).count()
    }

    fn table(&self, row_tiles: usize) -> Box<[u32]> {
        let main = self.main;
        let sizes = [
            main.m,
            main.n,
            main.c.row_stride,
            row_tiles,
            self.pairs(),
            main.k.div_ceil(TILE_DEPTH),
            usize::from(!self.makes(main.c.address)),
            self.adapters.len(),
        ];
        let mut table: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
        let adapters_end = table.len() + 3 * MAX_ADAPTERS;
        for adapter in &self.adapters {
            let column = sum::column_in(main, adapter).unwrap_or(0);
            table.extend([column, adapter.n].map(|size| size as u32));
            table.push(adapter.scale.to_bits());
        }
        table.resize(adapters_end, 0);
        let dropout = self.dropout;
        table.push(dropout.map_or(0, |dropout| dropout.stream));
        table.push(dropout.map_or(0, |dropout| dropout.threshold));
        table.into()
    }

    fn arguments(&self) -> Vec<Argument> {
        let by_column = self.is_by_column();
        let main = self.main;
        let side = |matrix: &MatrixAt, size: [usize; 2], sides: [usize; 2]| {
            let ([rows, columns], [box_rows, box_columns]) = (size, sides);
            Argument::MatrixMap(MatrixMapAt {
                address: matrix.address,
                rows,
                columns,
                row_stride: matrix.row_stride,
                box_rows,
                box_columns,
            })
        };
        // Each of the two blocks brings half a tile of A, for both.
        let left = |product: &Product, depth: usize| {
            side(&product.a, [product.m, product.k], [TILE_ROWS / 2, depth])
        };
        let right = |product: &Product, depth: usize| match by_column {
            true => side(&product.b, [product.k, product.n], [depth, TILE_DEPTH]),
            false => side(&product.b, [product.n, product.k], [TILE_COLUMNS, depth]),
        };
        // Where there are fewer, the last stand for the rest, which nobody reads.
        let adapter = |index: usize| {
            let adapter = self.adapters.get(index).or(self.adapters.last());
            adapter.copied().unwrap_or(main)
        };
        let mut arguments = vec![left(main, TILE_DEPTH), right(main, TILE_DEPTH)];
        arguments.extend((0..MAX_ADAPTERS).map(|index| left(adapter(index), MAX_RANK)));
        arguments.extend((0..MAX_ADAPTERS).map(|index| right(adapter(index), MAX_RANK)));
        // What a kernel does not touch stands for C again.
        let [c, y, x] = match self.kind {
            Kind::Plain => [None; 3],
            Kind::Gelu { to } => [None, Some(to), None],
            Kind::GeluBackward { x, to, value } => [Some(to), value, Some(x)],
        };
        arguments.extend([c, y, x].map(|address| {
            let c = MatrixAt {
                address: address.unwrap_or(main.c.address),
                ..main.c
            };
            side(&c, [main.m, main.n], [WARP_ROWS, TILE_DEPTH])
        }));
        let optional = |address: Option<u64>| address.map_or(Argument::Null, Argument::Address);
        let narrow = self.narrow;
        arguments.extend([
            optional(main.bias.map(|bias| bias.kept)),
            optional(self.dropout.map(|dropout| dropout.random)),
            optional(narrow.map(|narrow| narrow.weight)),
            optional(narrow.map(|narrow| narrow.parts.0)),
        ]);
        arguments
    }

    /// Adds up the parts that tiles of columns have of the narrow product.
    fn sum_of_parts(&self) -> Option<Command> {
        let (narrow, dropout) = self.narrow.zip(self.dropout)?;
        let rows = self.main.m;
        Some(Command::Launch {
            kernel: Kernel {
                file: "product_short_hopper",
                function: "short_narrow_sum",
            },
            shape: LaunchShape::linear((rows * NARROW_COLUMNS / 4).div_ceil(256), 256),
            arguments: vec![
                Argument::Address(narrow.parts.0),
                Argument::Address(narrow.to),
                Argument::U32(rows as u32),
                Argument::U32(2 * self.pairs() as u32),
                Argument::Address(dropout.random),
                Argument::Stream(dropout.stream),
                Argument::U32(dropout.threshold),
            ],
        })
    }
}

fn pairs(main: &Product) -> usize {
    main.n.div_ceil(PAIR_COLUMNS)
}

/// Bytes of the parts of a narrow product with so many columns.
pub(super) fn parts_bytes(main: &Product, columns: usize) -> u64 {
    (2 * pairs(main) * main.m * columns * size_of::<f32>()) as u64
}

/// Whether the kernel takes a sum and its tails.
pub(super) fn takes(products: &[Product], tails: &[Tail]) -> bool {
    Short::new(products, tails).is_some()
}

/// The launches that compute all of it, where the kernel takes it.
pub(super) fn launches(products: &[Product], tails: &[Tail], card: Card) -> Option<Vec<Command>> {
    let short = Short::new(products, tails)?;
    let (row_tiles, pairs) = (short.main.m.div_ceil(TILE_ROWS), short.pairs());
    let clusters = (card.multiprocessors / 2).min(row_tiles * pairs);
    if !card.is_hopper || clusters < pairs {
        return None;
    }
    let function = match (short.kind, short.is_by_column()) {
        (Kind::Plain, false) => "short_rows",
        (Kind::Plain, true) => "short_columns",
        (Kind::Gelu { .. }, _) if short.narrow.is_some() => "short_rows_gelu_narrow",
        (Kind::Gelu { .. }, _) => "short_rows_gelu",
        (Kind::GeluBackward { value: None, .. }, _) => "short_columns_gelu_backward",
        (Kind::GeluBackward { .. }, _) => "short_columns_gelu_backward_value",
    };
    let launch = Command::LaunchTable {
        kernel: Kernel {
            file: "product_short_hopper",
            function,
        },
        shape: LaunchShape {
            grid: [2 * clusters as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: SHARED_BYTES as u32,
        },
        table: short.table(row_tiles),
        arguments: short.arguments(),
    };
    Some([launch].into_iter().chain(short.sum_of_parts()).collect())
}
