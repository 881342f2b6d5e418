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
const THREADS: u32 = 384;
/// Products that add to C, of which a pair of tiles has one at the most.
const MAX_ADAPTERS: usize = 3;
/// What the matrix units multiply at once of the inner dimension.
const PART: usize = 16;

/// A sum and its tails, as the kernel sees them.
struct Short<'a> {
    main: &'a Product,
    adapters: Vec<&'a Product>,
    dropout: Option<DropoutAt>,
    kind: Kind,
}

/// What becomes of C.
#[derive(Clone, Copy)]
enum Kind {
    /// It is written.
    Plain,
    /// GELU of it is written here, and C too unless this is its place.
    Gelu { to: u64 },
    /// It is multiplied by the derivative at these.
    GeluBackward { x: u64 },
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
                    gradient,
                    x,
                    to,
                    value: None,
                    ..
                } if gradient == to => short.kind = Kind::GeluBackward { x: *x },
                _ => return None,
            }
        }
        short.fits().then_some(short)
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
            Kind::GeluBackward { x } => by_column && x.is_multiple_of(16),
        };
        // What is dropped is all that adds: the mask is of the sum of what adds.
        let most = match self.dropout {
            Some(_) => 1,
            None => MAX_ADAPTERS,
        };
        kind_fits
            && !self.main.accumulate
            && self.main.k <= MAX_STEPS * TILE_DEPTH
            && self.adapters.len() <= most
            && self.adapters.iter().all(|adapter| adapter.k <= TILE_DEPTH)
            && self.adapters.iter().chain([&self.main]).all(fits)
            && (0..self.pairs()).all(|pair| self.adapters_of(pair) <= 1)
    }

    fn pairs(&self) -> usize {
        self.main.n.div_ceil(PAIR_COLUMNS)
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
            self.adapters.len(),
        ];
        let mut table: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
        let adapters_end = table.len() + 4 * MAX_ADAPTERS;
        for adapter in &self.adapters {
            let column = sum::column_in(main, adapter).unwrap_or(0);
            let sizes = [column, adapter.n, adapter.k.div_ceil(PART)];
            table.extend(sizes.map(|size| size as u32));
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
        let side = |matrix: &MatrixAt, rows: usize, columns: usize, box_rows: usize| {
            Argument::MatrixMap(MatrixMapAt {
                address: matrix.address,
                rows,
                columns,
                row_stride: matrix.row_stride,
                box_rows,
            })
        };
        // Each of the two blocks brings half a tile of A, for both.
        let left = |product: &Product| side(&product.a, product.m, product.k, TILE_ROWS / 2);
        let right = |product: &Product| match by_column {
            true => side(&product.b, product.k, product.n, TILE_DEPTH),
            false => side(&product.b, product.n, product.k, TILE_COLUMNS),
        };
        // Where there are fewer, the last stand for the rest, which nobody reads.
        let adapter = |index: usize| {
            let adapter = self.adapters.get(index).or(self.adapters.last());
            adapter.copied().unwrap_or(self.main)
        };
        let mut arguments = vec![left(self.main), right(self.main)];
        arguments.extend((0..MAX_ADAPTERS).map(|index| left(adapter(index))));
        arguments.extend((0..MAX_ADAPTERS).map(|index| right(adapter(index))));
        let c = Argument::Address(self.main.c.address);
        let (c, y, x) = match self.kind {
            Kind::Plain => (c, Argument::Null, Argument::Null),
            Kind::Gelu { to } if to == self.main.c.address => (Argument::Null, c, Argument::Null),
            Kind::Gelu { to } => (c, Argument::Address(to), Argument::Null),
            Kind::GeluBackward { x } => (c, Argument::Null, Argument::Address(x)),
        };
        arguments.extend([c, y, x]);
        let optional = |address: Option<u64>| address.map_or(Argument::Null, Argument::Address);
        arguments.push(optional(self.main.bias.map(|bias| bias.kept)));
        arguments.push(optional(self.dropout.map(|dropout| dropout.random)));
        arguments
    }
}

/// Whether the kernel takes a sum and its tails.
pub(super) fn takes(products: &[Product], tails: &[Tail]) -> bool {
    Short::new(products, tails).is_some()
}

/// The launch that computes all of it, where the kernel takes it.
pub(super) fn launch(products: &[Product], tails: &[Tail], card: Card) -> Option<Command> {
    let short = Short::new(products, tails)?;
    let (row_tiles, pairs) = (short.main.m.div_ceil(TILE_ROWS), short.pairs());
    let clusters = (card.multiprocessors / 2).min(row_tiles * pairs);
    if !card.is_hopper || clusters < pairs {
        return None;
    }
    let function = match (short.kind, short.is_by_column()) {
        (Kind::Plain, false) => "short_rows",
        (Kind::Plain, true) => "short_columns",
        (Kind::Gelu { .. }, _) => "short_rows_gelu",
        (Kind::GeluBackward { .. }, _) => "short_columns_gelu_backward",
    };
    // Steps of B, the adapter's one, stages of A and what adapters read for each warpgroup; tiles
    // begin at multiples of 1024 bytes, and barriers follow them.
    let tiles = (MAX_STEPS + 1) * TILE_COLUMNS + (STAGES + 2) * TILE_ROWS;
    let barriers = 2 * STAGES + 6 + MAX_STEPS + 1;
    Some(Command::LaunchTable {
        kernel: Kernel {
            file: "product_short_hopper",
            function,
        },
        shape: LaunchShape {
            grid: [2 * clusters as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: (tiles * TILE_DEPTH * 2 + 1024 + 8 * barriers) as u32,
        },
        table: short.table(row_tiles),
        arguments: short.arguments(),
    })
}
