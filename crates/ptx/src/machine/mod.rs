//! A launch: clusters of blocks, their warps, and whose turn it is.

mod access;
mod barriers;
mod boxes;
mod cluster;
mod compute;
mod copy;
mod lanes;
mod matrix;
mod meet;
mod memory;
mod multiply;
mod order;
mod shadow;
mod warp;

use std::collections::BTreeSet;

pub use memory::{Memory, Region};

use self::cluster::{Cluster, Progress};
use self::shadow::{Conflict, ConflictKind};
use crate::MAX_SHARED;
use crate::error::PtxError;
use crate::program::{Kernel, Module, Op};

/// What a kernel gets for a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    Bytes(Vec<u8>),
    Map(TensorMap),
}

/// A tensor of 16-bit elements as the copy engine takes it, the innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub address: u64,
    pub sizes: Vec<usize>,
    /// Bytes from one to the next, of all dimensions but the first.
    pub strides: Vec<usize>,
    /// Elements that one copy takes.
    pub sides: Vec<usize>,
}

pub struct Launch<'a> {
    pub module: &'a Module,
    pub kernel: &'a str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Shared memory besides what the kernel has anyway.
    pub shared_bytes: u32,
    pub arguments: &'a [Argument],
}

/// What all clusters of a launch have in common.
struct Context<'a> {
    kernel: &'a Kernel,
    constants: &'a [u8],
    parameters: Vec<u8>,
    /// By where they are among the parameters.
    maps: Vec<(usize, TensorMap)>,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: usize,
}

impl Context<'_> {
    fn threads(&self) -> usize {
        self.block.iter().product::<u32>() as usize
    }
}

/// How often all blocks may have nothing to do but look again.
const MAX_IDLE: usize = 10_000;

/// Runs a kernel to its end. What is wrong without stopping it comes back as texts: accesses to the
/// same shared memory that nothing orders.
pub fn run(launch: &Launch<'_>, memory: &mut Memory<'_>) -> Result<Vec<String>, PtxError> {
    let context = context(launch)?;
    let kernel = context.kernel;
    let per_cluster = kernel.cluster;
    let is_ordered = kernel.has(|op| matches!(op, Op::Load { acquires: true, .. }));
    memory.begin(is_ordered);
    let [x, y, z] = launch.grid.map(|side| side as usize);
    if x % per_cluster != 0 {
        return Err(PtxError::Cluster {
            kernel: kernel.name.clone(),
            grid: launch.grid,
            cluster: per_cluster,
        });
    }
    let num_clusters = x / per_cluster * y * z;
    let mut conflicts = BTreeSet::new();
    let mut resident: Vec<Cluster> = Vec::new();
    let mut next = 0;
    let mut idle = 0;
    loop {
        let mut has_moved = false;
        let mut at = 0;
        while at < resident.len() {
            match resident[at].run(&context, memory, &mut conflicts)? {
                Progress::Done => {
                    resident.remove(at);
                    has_moved = true;
                }
                Progress::Moved => {
                    has_moved = true;
                    at += 1;
                }
                Progress::Waits => at += 1,
            }
        }
        if has_moved && !resident.is_empty() {
            idle = 0;
            continue;
        }
        if next < num_clusters {
            let first = next * per_cluster;
            let blocks = (first..first + per_cluster)
                .map(|block| [block % x, block / x % y, block / (x * y)].map(|side| side as u32));
            resident.push(Cluster::new(&context, next as u32 + 1, blocks.collect()));
            next += 1;
        } else if resident.is_empty() {
            break;
        } else {
            idle += 1;
            if idle > MAX_IDLE || resident.iter().all(|cluster| !cluster.looks_again()) {
                return Err(PtxError::Waits {
                    kernel: kernel.name.clone(),
                    waits: resident[0].waits(&context),
                });
            }
        }
    }
    let told = conflicts.iter().map(|conflict| tell(kernel, conflict));
    Ok(told.collect())
}

fn context<'a>(launch: &Launch<'a>) -> Result<Context<'a>, PtxError> {
    let kernel = launch.module.kernel(launch.kernel);
    let kernel = kernel.ok_or_else(|| PtxError::NoKernel(launch.kernel.to_owned()))?;
    if kernel.parameters.len() != launch.arguments.len() {
        return Err(PtxError::Arguments {
            kernel: kernel.name.clone(),
            expected: kernel.parameters.len(),
            given: launch.arguments.len(),
        });
    }
    let threads = launch.block.iter().product::<u32>() as usize;
    let shared = kernel.shared_bytes + launch.shared_bytes as usize;
    for (what, given, most) in [
        ("threads", threads, kernel.max_threads),
        ("bytes of shared memory", shared, MAX_SHARED),
    ] {
        if given > most {
            return Err(PtxError::TooMany {
                kernel: kernel.name.clone(),
                what,
                given,
                most,
            });
        }
    }
    let mut parameters = vec![0; kernel.parameter_bytes()];
    let mut maps = Vec::new();
    let each = kernel.parameters.iter().zip(launch.arguments).enumerate();
    for (index, (&(offset, expected), argument)) in each {
        let given = match argument {
            Argument::Bytes(bytes) => {
                // The driver reads as many bytes as the parameter has.
                let count = bytes.len().min(expected);
                parameters[offset..offset + count].copy_from_slice(&bytes[..count]);
                bytes.len()
            }
            Argument::Map(map) => {
                maps.push((offset, map.clone()));
                128
            }
        };
        if given < expected {
            return Err(PtxError::Argument {
                kernel: kernel.name.clone(),
                index,
                expected,
                given,
            });
        }
    }
    Ok(Context {
        kernel,
        constants: &launch.module.constants,
        parameters,
        maps,
        grid: launch.grid,
        block: launch.block,
        shared_bytes: shared,
    })
}

fn tell(kernel: &Kernel, conflict: &Conflict) -> String {
    let instruction = |index: u32| {
        let instruction = &kernel.code[index as usize];
        format!("line {} `{}`", instruction.line, instruction.text)
    };
    let what = match conflict.kind {
        ConflictKind::WriteAfterWrite => "writes what was written, with nothing between, by",
        ConflictKind::ReadAfterWrite => "reads what was written, with nothing between, by",
        ConflictKind::WriteAfterRead => "writes what may not have been read yet by",
        ConflictKind::Unpublished => "may not see, for want of a fence, what was written by",
    };
    format!(
        "{}: {} {what} {}",
        kernel.name,
        instruction(conflict.second),
        instruction(conflict.first)
    )
}
