//! What a node becomes on a GPU: launches, matrix products, fills and copies, with every address
//! as an offset into the arena. Pure data, so that lowering is tested without a card.

use std::sync::Arc;

use cinch_graph::DType;
use cinch_graph::op::ActivationKind;

/// A function of one of the sources in `kernels/`, compiled for the graph's element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    /// The source's name without its ending.
    pub file: &'static str,
    pub function: &'static str,
}

/// A function of a source that was made for one op.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Generated {
    pub source: Arc<str>,
    pub function: &'static str,
}

/// One argument of a kernel, in the order of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// An offset in the arena; the kernel sees a pointer.
    Address(u64),
    /// An offset in the host memory beside it, which the device sees too.
    Host(u64),
    /// A null pointer, for something optional that is absent.
    Null,
    /// A tensor in the arena, for the copy engine of Hopper cards; passed by value.
    TensorMap(TensorMapAt),
    /// A matrix in the arena, likewise.
    MatrixMap(MatrixMapAt),
    I32(i32),
    U32(u32),
    /// A `U32` that names a stream of random numbers, which says nothing of how much there is to do.
    Stream(u32),
    U64(u64),
    F32(f32),
}

/// The rows of all heads of [batch, rows, heads, columns], 16 bits an element, as columns of a wider
/// tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapAt {
    pub address: u64,
    /// Of one head; 32, or a multiple of 64.
    pub columns: usize,
    pub heads: usize,
    pub rows: usize,
    pub batch: usize,
    /// Elements from one row to the next; a multiple of 8.
    pub row_stride: usize,
}

/// A matrix of 16-bit elements; what lies beyond its rows and columns comes as zeroes, and is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixMapAt {
    pub address: u64,
    pub rows: usize,
    pub columns: usize,
    /// Elements from one row to the next; a multiple of 8.
    pub row_stride: usize,
    /// Rows and columns that one copy brings or takes: 64 columns, or 16.
    pub box_rows: usize,
    pub box_columns: usize,
}

/// Grid, block and dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// A one-dimensional launch without dynamic shared memory.
    pub fn linear(blocks: usize, threads: u32) -> Self {
        Self {
            grid: [blocks.max(1) as u32, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// A row-major matrix in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixAt {
    pub address: u64,
    /// Elements from one row to the next.
    pub row_stride: usize,
    pub dtype: DType,
    /// Whether the product reads it transposed.
    pub transposed: bool,
}

/// `C[m,n] (+)= scale·A[m,k]·B[k,n] (+ bias[n])`, accumulated in single precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: MatrixAt,
    pub b: MatrixAt,
    pub c: MatrixAt,
    pub scale: f32,
    pub accumulate: bool,
    pub bias: Option<BiasAt>,
    /// Scratch memory of the library.
    pub workspace: u64,
    pub workspace_bytes: u64,
}

/// A number for each column of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasAt {
    /// As it is kept, in single precision where C has 16 bits: what kernels of ours add.
    pub kept: u64,
    /// In C's type, as the library wants it.
    pub copied: u64,
}

/// How products belong together that a kernel of ours may compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Joined {
    /// The first, and others that add to its result.
    Sum,
    /// Gradients of weights, each by itself.
    Gradients,
    /// One whose result is a few columns wide.
    Narrow,
    /// One like it, and the gradient of the matrix that it multiplies with.
    Back,
}

/// What follows products, and a kernel of ours may compute with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tail {
    pub kind: TailKind,
    /// The same by itself.
    pub command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TailKind {
    /// The product is dropped in part before it adds to C.
    Dropped {
        product: Product,
        dropout: DropoutAt,
    },
    /// `to = f(from)`, `from` being C. Nobody else reads C where `to` is in its place.
    Activation {
        function: ActivationKind,
        from: u64,
        to: u64,
        elements: usize,
    },
    /// `to` is C, whose place is `gradient`, times `f′(x)`, and `value` is `f(x)`. Nobody else reads C.
    Derivative {
        function: ActivationKind,
        gradient: u64,
        x: u64,
        to: u64,
        value: Option<u64>,
        elements: usize,
    },
    /// `to = f(gate)·up`, `up` being C. Nobody else reads C where `to` is in its place.
    Gate {
        function: ActivationKind,
        gate: u64,
        up: u64,
        to: u64,
        elements: usize,
    },
    /// What C, whose place is `gradient`, makes of the gradients of gate and up, and `value` is
    /// `f(gate)·up`. Nobody else reads C.
    GateGradients {
        function: ActivationKind,
        gradient: u64,
        gate: u64,
        up: u64,
        to_gate: u64,
        to_up: u64,
        value: Option<u64>,
        elements: usize,
    },
    /// `to = drop(from)·Wᵀ`, `from` being what a function made of C: narrow, of as many columns as W
    /// has rows.
    Narrow {
        from: u64,
        /// Rows of `from` and columns of it, all of which W has.
        rows: usize,
        inner: usize,
        weight: u64,
        columns: usize,
        to: u64,
        dropout: DropoutAt,
        /// Scratch memory, from the first byte to before the second.
        parts: (u64, u64),
    },
    Norm(NormAt),
    /// Of what an adapter's second matrix read, whose gradient C is, the first matrix's own.
    FirstGradient(FirstGradient),
}

/// A layer norm of `x + drop(branch)`, `branch` being C, which nobody else reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormAt {
    pub branch: u64,
    pub x: u64,
    pub gamma: u64,
    pub beta: u64,
    pub dropout: Option<DropoutAt>,
    pub epsilon: f32,
    /// Where the norm is written, and the sum and its statistics if somebody reads them.
    pub to: u64,
    pub sum: Option<u64>,
    pub mean: Option<u64>,
    pub rstd: Option<u64>,
    pub rows: usize,
    pub width: usize,
}

/// `to[outputs, inputs] (+)= scale·narrowᵀ·drop(wide)`: the gradient of an adapter's first matrix, in
/// single precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstGradient {
    /// The gradient of what the matrix gave, of which it has as many columns as the matrix has rows.
    pub narrow: MatrixAt,
    /// What the matrix multiplied.
    pub wide: MatrixAt,
    pub rows: usize,
    pub outputs: usize,
    pub inputs: usize,
    pub scale: f32,
    pub dropout: DropoutAt,
    pub to: Argument,
    pub adds: bool,
    /// Rows of a block, where it is computed by itself.
    pub rows_of_part: usize,
}

/// Which elements are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutAt {
    /// The graph's random state.
    pub random: u64,
    pub stream: u32,
    /// Below it, a random word drops its element.
    pub threshold: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    Launch {
        kernel: Kernel,
        shape: LaunchShape,
        arguments: Vec<Argument>,
    },
    /// As `Launch`, of a source that was made for the op.
    LaunchGenerated {
        kernel: Generated,
        shape: LaunchShape,
        arguments: Vec<Argument>,
    },
    /// As `Launch`; the kernel's first argument is a structure of 32-bit words, passed by value.
    LaunchTable {
        kernel: Kernel,
        shape: LaunchShape,
        table: Box<[u32]>,
        arguments: Vec<Argument>,
    },
    Product(Product),
    /// In this order, or all at once, and then what follows them.
    Products {
        joined: Joined,
        /// What comes before, where the library computes them or some of them.
        heads: Vec<Command>,
        products: Vec<Product>,
        tails: Vec<Tail>,
    },
    /// Ways to the same, of which one is taken: the fastest, or the second where nothing is timed.
    Ways(Vec<Vec<Command>>),
    /// Zeroes.
    Clear {
        address: u64,
        bytes: u64,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: u64,
    },
    /// Copies from host memory.
    Fetch(Vec<HostCopy>),
    /// Copies to host memory.
    Store(Vec<HostCopy>),
    /// With the other ranks, all at once.
    Exchange(Vec<Exchange>),
    /// Run beside what follows, until [`Command::Await`] of the same number.
    Beside {
        lane: Lane,
        number: usize,
        commands: Vec<Command>,
    },
    /// What follows uses what ran beside.
    Await {
        lane: Lane,
        number: usize,
    },
}

impl Command {
    /// Whether nothing but kernels of the step is launched, ours or the library's.
    pub(crate) fn is_kernels(&self) -> bool {
        match self {
            Self::Launch { .. }
            | Self::LaunchGenerated { .. }
            | Self::LaunchTable { .. }
            | Self::Product(_)
            | Self::Products { .. }
            | Self::Ways(_) => true,
            Self::Clear { .. }
            | Self::Copy { .. }
            | Self::Fetch(_)
            | Self::Store(_)
            | Self::Exchange(_)
            | Self::Beside { .. }
            | Self::Await { .. } => false,
        }
    }
}

/// Of what runs beside the step, each kind has a queue: one waits for the host's bus, another for
/// the bus in the other direction, the last for the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    Fetches,
    Stores,
    Exchanges,
}

impl Lane {
    pub const ALL: [Self; 3] = [Self::Fetches, Self::Stores, Self::Exchanges];
}

/// What ranks do with elements of a tensor, each on its own card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// All get the sum.
    Sum,
    /// This rank gets it.
    SumAt(usize),
    /// All get what this rank has.
    From(usize),
}

/// Something that every rank does at the same time, with the same offsets in its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub kind: ExchangeKind,
    pub from: u64,
    /// Written where the kind says so.
    pub to: u64,
    pub elements: usize,
    pub dtype: DType,
}

/// From an offset in host memory to one in the arena, or the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}
