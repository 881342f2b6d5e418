//! What an opcode means.

use crate::program::{
    Comparison, Function, Half, Kind, Mma, Op, Reduction, Register, Rounding, Shuffle, Source,
    Space, Special, Type, Wgmma,
};

/// As it stands in the text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    Value(u64),
    Special(Special),
    Label(String),
    List(Vec<Operand>),
    Pair(Register, Register),
    Memory {
        base: Box<Operand>,
        offset: i64,
        coordinates: Vec<Operand>,
    },
}

type Decoded = (Op, Box<[Register]>, Box<[Source]>);

impl Operand {
    fn source(&self) -> Option<Source> {
        match self {
            Self::Register(register) => Some(Source::Register(*register)),
            Self::Value(value) => Some(Source::Value(*value)),
            Self::Special(special) => Some(Source::Special(*special)),
            _ => None,
        }
    }

    /// One, all of a list, or the base and the coordinates of an address.
    fn sources(&self) -> Option<Vec<Source>> {
        match self {
            Self::List(list) => list.iter().map(Self::source).collect(),
            Self::Memory {
                base, coordinates, ..
            } => {
                let all = std::iter::once(base.as_ref()).chain(coordinates);
                all.map(Self::source).collect()
            }
            one => Some(vec![one.source()?]),
        }
    }

    fn registers(&self) -> Option<Vec<Register>> {
        match self {
            Self::List(list) => {
                let each = list.iter().map(Self::registers);
                Some(each.collect::<Option<Vec<_>>>()?.concat())
            }
            Self::Register(register) => Some(vec![*register]),
            Self::Pair(a, b) => Some(vec![*a, *b]),
            _ => None,
        }
    }

    fn offset(&self) -> i64 {
        match self {
            Self::Memory { offset, .. } => *offset,
            _ => 0,
        }
    }
}

fn ty(name: &str) -> Option<Type> {
    let kind = match name.as_bytes().first()? {
        b'p' if name == "pred" => {
            return Some(Type {
                kind: Kind::Bits,
                bytes: 1,
            });
        }
        b'b' => Kind::Bits,
        b'u' => Kind::Unsigned,
        b's' => Kind::Signed,
        b'f' => Kind::Float,
        _ => return None,
    };
    let bytes = match &name[1..] {
        "8" => 1,
        "16" => 2,
        "32" => 4,
        "64" => 8,
        _ => return None,
    };
    Some(Type { kind, bytes })
}

fn half(name: &str) -> Option<Half> {
    match name {
        "bf16" | "bf16x2" => Some(Half::Bf16),
        "f16" | "f16x2" => Some(Half::F16),
        _ => None,
    }
}

/// The first is what is written, the others are what is read.
fn simple(op: Op, operands: &[Operand]) -> Option<Decoded> {
    let (to, from) = operands.split_first()?;
    Some((op, to.registers()?.into(), sources(from)?.into()))
}

/// All are read.
fn effect(op: Op, operands: &[Operand]) -> Option<Decoded> {
    Some((op, [].into(), sources(operands)?.into()))
}

fn sources(operands: &[Operand]) -> Option<Vec<Source>> {
    let each = operands.iter().map(Operand::sources);
    Some(each.collect::<Option<Vec<_>>>()?.concat())
}

pub(crate) fn decode(word: &str, operands: &[Operand]) -> Option<Decoded> {
    let parts: Vec<&str> = word.split('.').collect();
    let last = *parts.last()?;
    let has = |part: &str| parts.contains(&part);
    if word.starts_with("cp.") {
        return copy(word, &parts, operands);
    }
    if let Some(what) = word.strip_prefix("mbarrier.") {
        let op = match what {
            "init.shared::cta.b64" => Op::BarrierInit,
            "arrive.shared::cta.b64" => Op::ArriveShared,
            "arrive.shared::cluster.b64" => Op::ArriveCluster,
            "arrive.expect_tx.shared::cta.b64" => Op::ExpectBytes(true),
            "expect_tx.relaxed.cta.shared::cta.b64" => Op::ExpectBytes(false),
            "try_wait.parity.shared::cta.b64" => return simple(Op::TryWait, operands),
            _ => return None,
        };
        let is_sunk = operands.first() == Some(&Operand::Register(Register::SINK));
        return effect(op, &operands[usize::from(is_sunk)..]);
    }
    if parts[0] == "wgmma" {
        return match parts[1] {
            "fence" => effect(Op::Nothing, &[]),
            "commit_group" => effect(Op::WgmmaCommit, &[]),
            "wait_group" => effect(Op::WgmmaWait(count(operands.first()?)?), &[]),
            "mma_async" => wgmma(&parts, operands),
            _ => None,
        };
    }
    match parts[0] {
        "bra" => effect(Op::Branch(usize::MAX), &[]),
        "ret" | "exit" => effect(Op::Return, &[]),
        // Kernels run one after the other.
        "griddepcontrol" => effect(Op::Nothing, &[]),
        "setmaxnreg" => {
            let count = count(operands.first()?)?;
            effect(Op::AskRegisters(count as usize), &[])
        }
        "fence" | "membar" => match has("proxy") {
            true => effect(Op::ProxyFence, &[]),
            false => effect(Op::Nothing, &[]),
        },
        "mov" => mov(last, operands),
        "ld" | "st" => access(&parts, operands),
        "atom" if has("add") && last == "u32" => {
            let op = Op::AtomicAdd {
                space: space(&parts)?,
                offset: operands.get(1)?.offset(),
            };
            simple(op, operands)
        }
        "cvta" => match parts[1] {
            "to" => simple(Op::Move(8), operands),
            "param" => simple(Op::ToGeneric(Space::Parameter), operands),
            "shared" => simple(Op::ToGeneric(Space::Shared), operands),
            _ => None,
        },
        "cvt" => convert(&parts, operands),
        "setp" => {
            let (comparison, unordered) = comparison(parts.get(1)?)?;
            if parts.len() != 3 {
                return None;
            }
            if let Some(half) = half(last) {
                return simple(Op::CompareHalvesApart(half, comparison), operands);
            }
            simple(Op::Compare(comparison, ty(last)?, unordered), operands)
        }
        "set" if last == "f16x2" && parts[2] == "u32" => {
            let (comparison, _) = comparison(parts[1])?;
            simple(Op::CompareHalves(half(last)?, comparison), operands)
        }
        "bar" => match parts[1] {
            "sync" => effect(Op::Barrier, operands),
            "arrive" => effect(Op::BarrierArrive, operands),
            "warp" => effect(Op::WarpBarrier, operands),
            _ => None,
        },
        "barrier" if word == "barrier.cta.red.and.pred" => simple(Op::BarrierAll, operands),
        "barrier" if parts[1] == "cluster" => match parts[2] {
            "arrive" => effect(Op::ClusterArrive, &[]),
            "wait" => effect(Op::ClusterWait, &[]),
            _ => None,
        },
        "mapa" => simple(Op::ClusterAddress, operands),
        "shfl" => {
            let kind = match parts[2] {
                "bfly" => Shuffle::Xor,
                "down" => Shuffle::Down,
                "up" => Shuffle::Up,
                "idx" => Shuffle::Index,
                _ => return None,
            };
            simple(Op::Shuffle(kind), operands)
        }
        "vote" => match parts[2] {
            "any" => simple(Op::AnyVote, operands),
            "ballot" => simple(Op::Ballot, operands),
            _ => None,
        },
        "redux" => {
            let reduction = match (parts[2], last) {
                ("add", "s32") => Reduction::AddSigned,
                ("max", "u32") => Reduction::MaxUnsigned,
                ("min", "u32") => Reduction::MinUnsigned,
                _ => return None,
            };
            simple(Op::Reduce(reduction), operands)
        }
        "mma" => simple(Op::Mma(mma(&parts)?), operands),
        "ldmatrix" if has("x4") => {
            let op = Op::LoadMatrix {
                transposed: has("trans"),
                offset: operands.get(1)?.offset(),
            };
            simple(op, operands)
        }
        "stmatrix" if has("x4") => {
            let offset = operands.first()?.offset();
            effect(Op::StoreMatrix { offset }, operands)
        }
        "movmatrix" => simple(Op::TransposeMatrix, operands),
        _ => {
            let (function, ty) = lane(&parts)?;
            simple(Op::Lane(function, ty), operands)
        }
    }
}

fn count(operand: &Operand) -> Option<u32> {
    match operand {
        Operand::Value(count) => u32::try_from(*count).ok(),
        _ => None,
    }
}

fn lane(parts: &[&str]) -> Option<(Function, Type)> {
    let has = |part: &str| parts.contains(&part);
    let function = match parts[0] {
        "add" if has("rz") => Function::AddTowardZero,
        "add" => Function::Add,
        "sub" => Function::Sub,
        "mul" if has("wide") => Function::MulWide,
        "mul" if has("hi") => Function::MulHigh,
        "mul" => Function::Mul,
        "fma" if has("rm") => Function::MulAddDown,
        "mad" | "fma" => Function::MulAdd,
        "div" => Function::Div,
        "rem" => Function::Rem,
        "min" => Function::Min,
        "max" => Function::Max,
        "and" => Function::And,
        "or" => Function::Or,
        "xor" => Function::Xor,
        "not" => Function::Not,
        "neg" => Function::Neg,
        "abs" => Function::Abs,
        "shl" => Function::ShiftLeft,
        "shr" => Function::ShiftRight,
        "sqrt" => Function::SquareRoot,
        "rsqrt" => Function::ReciprocalRoot,
        "rcp" => Function::Reciprocal,
        "ex2" => Function::Exp2,
        "lg2" => Function::Log2,
        "copysign" => Function::CopySign,
        "selp" => Function::Select,
        "bfi" => Function::InsertBits,
        "prmt" => Function::Permute,
        "clz" => Function::LeadingZeros,
        "popc" => Function::Ones,
        "brev" => Function::Reverse,
        "bfind" if has("shiftamt") => Function::ShiftOfHighest,
        _ => return None,
    };
    Some((function, ty(parts.last()?)?))
}

fn comparison(name: &str) -> Option<(Comparison, bool)> {
    Some(match name {
        "eq" => (Comparison::Eq, false),
        "ne" => (Comparison::Ne, false),
        "lt" | "lo" => (Comparison::Lt, false),
        "le" | "ls" => (Comparison::Le, false),
        "gt" | "hi" => (Comparison::Gt, false),
        "ge" | "hs" => (Comparison::Ge, false),
        "equ" => (Comparison::Eq, true),
        "neu" => (Comparison::Ne, true),
        "ltu" => (Comparison::Lt, true),
        "leu" => (Comparison::Le, true),
        "gtu" => (Comparison::Gt, true),
        "geu" => (Comparison::Ge, true),
        _ => return None,
    })
}

fn mov(last: &str, operands: &[Operand]) -> Option<Decoded> {
    let bytes = ty(last)?.bytes;
    match operands {
        [Operand::List(list), _] => simple(Op::Unpack(bytes / list.len()), operands),
        [_, Operand::List(list)] => simple(Op::Pack(bytes / list.len()), operands),
        _ if last == "pred" => {
            let to = ty("b8")?;
            simple(
                Op::Lane(Function::And, to),
                &[operands, &[Operand::Value(1)]].concat(),
            )
        }
        _ => simple(Op::Move(bytes), operands),
    }
}

fn space(parts: &[&str]) -> Option<Space> {
    let named = parts.iter().find_map(|part| {
        Some(match *part {
            "global" => Space::Global,
            "shared" | "shared::cta" => Space::Shared,
            "shared::cluster" => Space::ClusterShared,
            "local" => Space::Local,
            "param" => Space::Parameter,
            _ => return None,
        })
    });
    Some(named.unwrap_or(Space::Generic))
}

fn access(parts: &[&str], operands: &[Operand]) -> Option<Decoded> {
    let (space, ty) = (space(parts)?, ty(parts.last()?)?);
    let has = |part: &str| parts.contains(&part);
    if parts[0] == "ld" {
        let op = Op::Load {
            space,
            ty,
            offset: operands.get(1)?.offset(),
            acquires: has("acquire"),
        };
        return simple(op, operands);
    }
    let op = Op::Store {
        space,
        ty,
        offset: operands.first()?.offset(),
        releases: has("release"),
    };
    effect(op, operands)
}

fn convert(parts: &[&str], operands: &[Operand]) -> Option<Decoded> {
    let [.., to, from] = parts else { return None };
    let has = |part: &str| parts.contains(&part);
    if matches!(*to, "bf16x2" | "f16x2") {
        return simple(Op::ConvertPair(half(to)?), operands);
    }
    let half = half(to).or_else(|| half(from));
    let float = |name: &str| ty(name.trim_start_matches('b')).or_else(|| ty(name));
    let to = if half.is_some() { float(to)? } else { ty(to)? };
    let from = if half.is_some() {
        float(from)?
    } else {
        ty(from)?
    };
    let op = Op::Convert {
        to,
        from,
        rounding: if has("rni") {
            Rounding::NearestInteger
        } else if has("rzi") {
            Rounding::IntegerTowardZero
        } else if has("rz") {
            Rounding::TowardZero
        } else {
            Rounding::Nearest
        },
        saturates: has("sat"),
        half,
    };
    simple(op, operands)
}

fn mma(parts: &[&str]) -> Option<Mma> {
    let shape = parts[3];
    let [.., result, left, right, sum] = parts else {
        return None;
    };
    if [*result, *sum] != ["f32", "f32"] || left != right {
        return None;
    }
    match (shape, *left) {
        ("m16n8k8", "tf32") => Some(Mma::Tf32),
        ("m16n8k8", left) => Some(Mma::Halves {
            half: half(left)?,
            inner: 8,
        }),
        ("m16n8k16", left) => Some(Mma::Halves {
            half: half(left)?,
            inner: 16,
        }),
        _ => None,
    }
}

/// `{d}, a, b, adds, 1, 1, [ta,] tb`, where a is a descriptor or four registers.
fn wgmma(parts: &[&str], operands: &[Operand]) -> Option<Decoded> {
    let columns = parts[4].strip_prefix("m64n")?.strip_suffix("k16")?;
    let columns: usize = columns.parse().ok()?;
    let [results, left, right, adds, signs @ .., right_by_column] = operands else {
        return None;
    };
    let left_in_registers = matches!(left, Operand::List(_));
    let left_by_column = match (left_in_registers, signs) {
        (true, [Operand::Value(1), Operand::Value(1)]) => false,
        (false, [Operand::Value(1), Operand::Value(1), by_column]) => count(by_column)? == 1,
        _ => return None,
    };
    let op = Op::Wgmma(Wgmma {
        half: half(parts[6])?,
        columns,
        left_in_registers,
        left_by_column,
        right_by_column: count(right_by_column)? == 1,
    });
    let results = results.registers()?;
    if results.len() * 2 != columns {
        return None;
    }
    let read = [adds, right, left].map(Operand::sources);
    let read = read.into_iter().collect::<Option<Vec<_>>>()?.concat();
    Some((op, results.into(), read.into()))
}

fn copy(word: &str, parts: &[&str], operands: &[Operand]) -> Option<Decoded> {
    let has = |part: &str| parts.contains(&part);
    let rank = || match parts.iter().find(|part| matches!(**part, "2d" | "4d"))? {
        &"2d" => Some(2),
        _ => Some(4),
    };
    if let Some(bulk) = word.strip_prefix("cp.async.bulk.") {
        return match bulk {
            "commit_group" => effect(Op::BulkCommit, &[]),
            "wait_group" | "wait_group.read" => {
                effect(Op::BulkWait(count(operands.first()?)?), &[])
            }
            _ if has("prefetch") => effect(Op::Nothing, &[]),
            _ if has("tensor") && has("bulk_group") => {
                effect(Op::TensorStore { rank: rank()? }, operands)
            }
            _ if has("tensor") => {
                let op = Op::TensorLoad {
                    rank: rank()?,
                    to_many: has("multicast::cluster"),
                };
                effect(op, operands)
            }
            _ if has("bulk_group") => effect(Op::BulkStore { adds: false }, operands),
            _ if has("mbarrier::complete_tx::bytes") => effect(Op::BulkLoad, operands),
            _ => None,
        };
    }
    if word == "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" {
        return effect(Op::BulkStore { adds: true }, operands);
    }
    match word {
        "cp.async.commit_group" => effect(Op::AsyncCommit, &[]),
        "cp.async.wait_group" => effect(Op::AsyncWait(Some(count(operands.first()?)?)), &[]),
        "cp.async.wait_all" => effect(Op::AsyncWait(None), &[]),
        "cp.async.ca.shared.global" | "cp.async.cg.shared.global" => {
            // Shared memory never has an offset there, global memory may.
            if operands.first()?.offset() != 0 {
                return None;
            }
            let offset = operands.get(1)?.offset();
            effect(Op::AsyncCopy { offset }, operands)
        }
        _ => None,
    }
}
