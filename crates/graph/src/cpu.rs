//! What an op costs on a CPU, told without one: its matrix products, what it does besides by vector
//! code, and its bytes. The rates of a processor make seconds of it.

/// The kernels of one op.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuCost {
    pub products: Vec<CpuProducts>,
    /// Operations of products inside other kernels, at the rate of large ones.
    pub operations: f64,
    /// What vector code does, in sigmoids: how many of those take as long.
    pub sigmoids: f64,
    /// Tasks of equal size that operations and sigmoids are dealt out in.
    pub tasks: usize,
    /// Read and written.
    pub bytes: u64,
}

/// Matrix products [m, k]·[k, n].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuProducts {
    pub shape: [usize; 3],
    /// How many there are, one after the other.
    pub times: f64,
}

impl CpuCost {
    /// Elements of a task where nothing says otherwise.
    pub const TASK: usize = 16 * 1024;

    /// Vector code over so many elements.
    pub fn vector(sigmoids: f64, elements: usize, bytes: u64) -> Self {
        Self {
            sigmoids,
            tasks: elements.div_ceil(Self::TASK),
            bytes,
            ..Self::default()
        }
    }

    /// One product.
    pub fn product(shape: [usize; 3], bytes: u64) -> Self {
        Self {
            products: vec![CpuProducts { shape, times: 1.0 }],
            bytes,
            ..Self::default()
        }
    }

    /// With a random number for each of so many elements, drawn while they are packed.
    #[must_use]
    pub fn dropping(self, elements: usize) -> Self {
        const SIGMOIDS: f64 = 1.06;
        Self {
            sigmoids: self.sigmoids + SIGMOIDS * elements as f64,
            tasks: elements.div_ceil(Self::TASK),
            ..self
        }
    }
}

/// How a product is cut into tasks: tiles of C, for which their rows of A and columns of B are
/// brought into order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTiles {
    /// Sides of a tile.
    pub rows: usize,
    pub columns: usize,
    /// Tiles below and beside each other.
    pub down: usize,
    pub across: usize,
}

impl CpuTiles {
    /// The longest part of the sums of a tile that is made at a time. A panel of B (32 columns)
    /// then takes 32 KiB.
    pub const DEPTH: usize = 256;
    /// The largest tile: what it has in order of A takes 512 KiB, half of a common L2 cache.
    pub const MOST_ROWS: usize = 512;
    pub const MOST_COLUMNS: usize = 1024;
    /// Multiply-adds below which waking another core costs more than it brings.
    pub const SERIAL_WORK: usize = 1 << 19;
    /// Below these sides a tile spends more on bringing into order than another core would save.
    const LEAST_ROWS: usize = 48;
    const LEAST_COLUMNS: usize = 64;
    /// Tiles per thread, so that a core that falls behind costs a part of its share only.
    const PER_THREAD: usize = 4;

    /// As large as the caches like, halved along the longer side until every thread has several.
    /// Sides are multiples of `unit`.
    pub fn new([m, n]: [usize; 2], threads: usize, unit: [usize; 2]) -> Self {
        let even =
            |side: usize, parts: usize, unit: usize| side.div_ceil(parts).next_multiple_of(unit);
        let mut parts = [m.div_ceil(Self::MOST_ROWS), n.div_ceil(Self::MOST_COLUMNS)];
        loop {
            let rows = even(m, parts[0], unit[0]);
            let columns = even(n, parts[1], unit[1]);
            let tiles = Self {
                rows,
                columns,
                down: m.div_ceil(rows),
                across: n.div_ceil(columns),
            };
            // Once every thread has a tile, evening out the load justifies less packing.
            let sides = if tiles.count() < threads { 2 } else { 4 };
            let wide = columns >= sides * Self::LEAST_COLUMNS;
            let tall = rows >= sides * Self::LEAST_ROWS;
            if tiles.count() >= Self::PER_THREAD * threads || !(wide || tall) {
                return tiles;
            }
            let side = usize::from(wide && (columns >= rows || !tall));
            parts[side] *= 2;
        }
    }

    pub fn count(&self) -> usize {
        self.down * self.across
    }
}
