//! What an op costs on a GPU, told without a card: its kernels in order, each with its bytes and
//! its arithmetic. The rates of a card make seconds of it.
//!
//! Shares and times of a step are those that the kernels were measured at, so they stand with
//! the op whose kernels they are.

use crate::types::DType;

/// The kernels of one op.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// Each runs once.
    pub kernels: Vec<KernelCost>,
    /// What runs chunk by chunk after them.
    pub chunks: Option<ChunkedCost>,
}

/// Kernels that run for some rows at a time, until all rows are done.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkedCost {
    /// Of a whole chunk.
    pub kernels: Vec<KernelCost>,
    pub rows: usize,
    pub chunk_rows: usize,
}

/// A kernel, or a few that belong together: it takes the longer of its bytes and its arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelCost {
    pub launches: u32,
    /// Whether neighbouring nodes of this op share their launches.
    pub merges: bool,
    /// Read and written.
    pub bytes: u64,
    /// Bytes of optimizer states, which are both read and written, and may lie in host memory.
    pub state_bytes: u64,
    /// The share of the copy bandwidth that the kernel reaches; `None` for one that reads and
    /// writes every element once and waits for nothing.
    pub bandwidth_share: Option<f64>,
    pub arithmetic: Arithmetic,
}

/// What a kernel computes, by how it fills a card.
#[derive(Clone, Debug, PartialEq)]
pub enum Arithmetic {
    /// Nothing that takes longer than its bytes.
    Hidden,
    /// A matrix product [m, k]·[k, n] of a library, stored as `stored`.
    Product {
        m: usize,
        n: usize,
        k: usize,
        stored: DType,
    },
    /// Products inside a kernel of blocks of unequal length.
    Blocks {
        flops: u64,
        any: BlockWork,
        /// On a Hopper card, where it has a kernel of its own.
        hopper: Option<BlockWork>,
    },
    /// Steps of time, each of which waits for the one before it.
    Recurrence {
        blocks: usize,
        /// Of one block.
        steps: usize,
        /// Seconds of a block's step on a multiprocessor that it shares with others.
        step: f64,
        /// Seconds that a step takes at the least.
        latency: f64,
        /// How often all steps run.
        passes: f64,
    },
}

/// How blocks of unequal length fill a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockWork {
    /// Of the matrix rate.
    pub share: f64,
    pub blocks: usize,
    /// Blocks that a multiprocessor holds at once.
    pub resident: usize,
}

/// What an op is to a product before it, in whose kernel a Hopper card may compute it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joins {
    /// Which of the op's inputs the product has made.
    pub input: usize,
    /// Read and written besides what the product has made.
    pub bytes: u64,
    pub kind: JoinKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinKind {
    /// Another product, added to the first one's: so many columns of it, over so long a sum.
    Term {
        columns: usize,
        inner: usize,
        /// Whether it is dropped in part before it adds.
        dropped: bool,
    },
    /// What follows element by element, and whether the product's own result is left unwritten then.
    Tail { over: bool },
}

/// What an op sends to other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// That each rank sends, and as many that it receives meanwhile.
    pub bytes: u64,
    /// Messages that wait for each other: each costs the latency of a link.
    pub rounds: u64,
}

impl Cost {
    pub fn of(kernels: impl IntoIterator<Item = KernelCost>) -> Self {
        Self {
            kernels: kernels.into_iter().collect(),
            chunks: None,
        }
    }

    /// Launches of the op; where it has neighbours of its kind, without those that they share.
    pub fn launches(&self, has_neighbours: bool) -> u64 {
        let of = |kernels: &[KernelCost]| -> u64 {
            let own = kernels.iter();
            let own = own.filter(|kernel| !(kernel.merges && has_neighbours));
            own.map(|kernel| u64::from(kernel.launches)).sum()
        };
        let chunks = self.chunks.as_ref().map_or(0, |chunks| {
            let times = chunks.rows.div_ceil(chunks.chunk_rows.max(1)) as u64;
            of(&chunks.kernels).saturating_mul(times)
        });
        of(&self.kernels).saturating_add(chunks)
    }
}

impl KernelCost {
    /// Reads and writes so many bytes, in so many launches.
    pub fn streamed(launches: u32, bytes: u64) -> Self {
        Self {
            launches,
            merges: false,
            bytes,
            state_bytes: 0,
            bandwidth_share: None,
            arithmetic: Arithmetic::Hidden,
        }
    }

    /// A library's product [m, n, k], with the bytes of its operands.
    /// One with so short a sum or so few columns that it waits for memory has its tiles in
    /// shared memory on the way, and reaches less of the bandwidth than a copy.
    pub fn product([m, n, k]: [usize; 3], stored: DType, bytes: u64) -> Self {
        const BANDWIDTH_SHARE: f64 = 0.75;
        Self {
            arithmetic: Arithmetic::Product { m, n, k, stored },
            ..Self::waiting(1, bytes, BANDWIDTH_SHARE)
        }
    }

    pub fn computing(launches: u32, bytes: u64, arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            ..Self::streamed(launches, bytes)
        }
    }

    /// As [`Self::streamed`], at a share of the copy bandwidth.
    pub fn waiting(launches: u32, bytes: u64, bandwidth_share: f64) -> Self {
        Self {
            bandwidth_share: Some(bandwidth_share),
            ..Self::streamed(launches, bytes)
        }
    }
}
