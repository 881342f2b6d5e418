//! A kernel as it runs: instructions with numbered registers.

use std::collections::HashMap;

/// The kernels of one source.
#[derive(Debug)]
pub struct Module {
    pub(crate) kernels: HashMap<String, Kernel>,
    /// What constants of the source are, which kernels may read.
    pub(crate) constants: Vec<u8>,
}

impl Module {
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }
}

#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    /// Where each parameter begins among all of them, and its bytes.
    pub(crate) parameters: Vec<(usize, usize)>,
    /// Of 32 bits for each lane.
    pub(crate) num_rows: usize,
    /// What is there without being asked for at the launch.
    pub(crate) shared_bytes: usize,
    pub(crate) local_bytes: usize,
    /// The most that a block may have.
    pub(crate) max_threads: usize,
    /// Blocks of a cluster.
    pub(crate) cluster: usize,
    pub(crate) code: Vec<Instruction>,
}

impl Kernel {
    pub(crate) fn parameter_bytes(&self) -> usize {
        let last = self.parameters.last();
        last.map_or(0, |&(offset, bytes)| offset + bytes)
    }

    pub(crate) fn has(&self, is_it: impl Fn(&Op) -> bool) -> bool {
        self.code.iter().any(|instruction| is_it(&instruction.op))
    }
}

#[derive(Debug)]
pub(crate) struct Instruction {
    /// The predicate, and what it has to be.
    pub guard: Option<(Register, bool)>,
    pub op: Op,
    pub to: Box<[Register]>,
    pub from: Box<[Source]>,
    pub line: u32,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Register {
    /// A number while a kernel is read, then the row of a warp's registers.
    pub at: u32,
    /// Whether it has 64 bits, of which the upper half is in the next row.
    pub is_wide: bool,
}

impl Register {
    /// What nobody reads is written here.
    pub const SINK: Self = Self {
        at: 0,
        is_wide: false,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Register(Register),
    Value(u64),
    Special(Special),
}

/// By dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    ClusterRank,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bits,
    Unsigned,
    Signed,
    Float,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Type {
    pub kind: Kind,
    /// One for a predicate.
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Bf16,
    F16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    /// Of any block of the cluster.
    ClusterShared,
    Local,
    Parameter,
    Generic,
}

/// From up to three numbers of a lane to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Add,
    AddTowardZero,
    Sub,
    Mul,
    MulHigh,
    MulWide,
    MulAdd,
    MulAddDown,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Not,
    Neg,
    Abs,
    ShiftLeft,
    ShiftRight,
    SquareRoot,
    ReciprocalRoot,
    Reciprocal,
    Exp2,
    Log2,
    CopySign,
    Select,
    InsertBits,
    Permute,
    LeadingZeros,
    Ones,
    Reverse,
    /// How far left the highest one would have to move.
    ShiftOfHighest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    TowardZero,
    NearestInteger,
    IntegerTowardZero,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Xor,
    Down,
    Up,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    AddSigned,
    MaxUnsigned,
    MinUnsigned,
}

/// Which products the matrix units compute for a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mma {
    Halves { half: Half, inner: usize },
    Tf32,
}

/// The matrix units' product for four warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wgmma {
    pub half: Half,
    pub columns: usize,
    pub left_in_registers: bool,
    pub left_by_column: bool,
    pub right_by_column: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    Nothing,
    /// So many registers for each thread of the warp from here on.
    AskRegisters(usize),
    Branch(usize),
    Return,
    /// Of so many bytes.
    Move(usize),
    /// Pieces of so many bytes into one register, and back.
    Pack(usize),
    Unpack(usize),
    Lane(Function, Type),
    Compare(Comparison, Type, Unordered),
    /// Ones in each half for which it is so.
    CompareHalves(Half, Comparison),
    /// The lower half's answer, and the upper one's.
    CompareHalvesApart(Half, Comparison),
    Convert {
        to: Type,
        from: Type,
        rounding: Rounding,
        saturates: bool,
        half: Option<Half>,
    },
    ConvertPair(Half),
    Load {
        space: Space,
        ty: Type,
        offset: i64,
        acquires: bool,
    },
    Store {
        space: Space,
        ty: Type,
        offset: i64,
        releases: bool,
    },
    AtomicAdd {
        space: Space,
        offset: i64,
    },
    ToGeneric(Space),
    Barrier,
    BarrierArrive,
    /// Whether something holds for all that meet.
    BarrierAll,
    WarpBarrier,
    ClusterArrive,
    ClusterWait,
    ClusterAddress,
    Shuffle(Shuffle),
    AnyVote,
    Ballot,
    Reduce(Reduction),
    Mma(Mma),
    LoadMatrix {
        transposed: bool,
        offset: i64,
    },
    StoreMatrix {
        offset: i64,
    },
    TransposeMatrix,
    Wgmma(Wgmma),
    WgmmaCommit,
    WgmmaWait(u32),
    BarrierInit,
    ArriveShared,
    ArriveCluster,
    /// Whether it arrives as well.
    ExpectBytes(bool),
    TryWait,
    TensorLoad {
        rank: usize,
        to_many: bool,
    },
    TensorStore {
        rank: usize,
    },
    BulkLoad,
    BulkStore {
        adds: bool,
    },
    BulkCommit,
    BulkWait(u32),
    AsyncCopy {
        offset: i64,
    },
    AsyncCommit,
    /// For all but so many groups, or for everything.
    AsyncWait(Option<u32>),
    ProxyFence,
}

/// Whether a comparison holds where one side is no number.
pub(crate) type Unordered = bool;
