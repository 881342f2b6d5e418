//! Commands on their way to a stream: launches with their arguments, products, copies, exchanges.

use std::ffi::c_void;

use cinch_graph::DType;
use cudarc::driver::{result, sys};

use super::CudaExecutor;
use super::choosing::{joined_key, ways_key};
use crate::cuda::beside;
use crate::cuda::command::{Argument, Command, LaunchShape};
use crate::cuda::driver::{HostMemory, Stream, failed};
use crate::cuda::op::joined;
use crate::cuda::tensor_map;
use crate::error::EngineError;

/// What a kernel gets for an argument; the driver reads as many bytes as the parameter has.
enum ArgumentValue {
    Word(u64),
    Map(Box<sys::CUtensorMap>),
}

impl ArgumentValue {
    fn pointer(&mut self) -> *mut c_void {
        match self {
            Self::Word(word) => std::ptr::from_mut(word).cast(),
            Self::Map(map) => std::ptr::from_mut(map.as_mut()).cast(),
        }
    }
}

impl CudaExecutor {
    /// Puts a command on a stream.
    pub(super) fn issue(
        &self,
        command: &Command,
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        let base = self.arena.address;
        if !command.is_kernels() {
            stream.set_ends_with_kernel(false);
        }
        match command {
            Command::Launch {
                kernel,
                shape,
                arguments,
            } => {
                let function = self.functions.get(&(*kernel, dtype));
                let loaded = (kernel.function, function);
                self.launch(loaded, dtype, shape, None, arguments, stream)
            }
            Command::LaunchGenerated {
                kernel,
                shape,
                arguments,
            } => {
                let function = self.generated_functions.get(&(kernel.clone(), dtype));
                let loaded = (kernel.function, function);
                self.launch(loaded, dtype, shape, None, arguments, stream)
            }
            Command::LaunchTable {
                kernel,
                shape,
                table,
                arguments,
            } => {
                let function = self.functions.get(&(*kernel, dtype));
                let loaded = (kernel.function, function);
                self.launch(loaded, dtype, shape, Some(table), arguments, stream)
            }
            Command::Product(product) => self.blas.run(product, base, stream),
            Command::Products {
                joined,
                heads,
                products,
                tails,
            } => {
                let chosen = self.joined.get(&joined_key(*joined, products, tails));
                let ways = joined::ways(*joined, products, tails, self.context.info.card());
                match chosen.copied().flatten().and_then(|way| ways.get(way)) {
                    Some(way) => self.issue_all(way, dtype, stream),
                    None => self.issue_apart((heads, products, tails), dtype, stream),
                }
            }
            Command::Ways(ways) => {
                let chosen = self.ways.get(&ways_key(ways)).copied();
                let way = chosen.and_then(|way| ways.get(way));
                self.issue_all(way.map_or(&[], Vec::as_slice), dtype, stream)
            }
            Command::Clear { address, bytes } => {
                let (at, bytes) = (base + address, *bytes as usize);
                // SAFETY: inside the arena by the plan, which `check` holds against it.
                unsafe { result::memset_d8_async(at, 0, bytes, stream.handle) }
                    .map_err(failed("clear memory"))
            }
            Command::Copy { from, to, bytes } => {
                let (from, to) = (base + from, base + to);
                // SAFETY: both ranges are inside the arena by the plan, which `check` holds
                // against it.
                unsafe { result::memcpy_dtod_async(to, from, *bytes as usize, stream.handle) }
                    .map_err(failed("copy memory"))
            }
            Command::Fetch(copies) => {
                let host = self.host.as_ref().ok_or_else(no_host)?;
                beside::fetch(copies, host, base, stream)
            }
            Command::Store(copies) => {
                let host = self.host.as_ref().ok_or_else(no_host)?;
                beside::store(copies, host, base, stream)
            }
            Command::Exchange(exchanges) => {
                let nccl = self.nccl.as_ref().ok_or_else(no_ranks)?;
                nccl.exchange(exchanges, base, stream)
            }
            Command::Beside {
                lane,
                number,
                commands,
            } => self.lane(*lane).run(*number, stream, |beside| {
                self.issue_all(commands, dtype, beside)
            }),
            Command::Await { lane, number } => self.lane(*lane).wait(*number, stream),
        }
    }

    fn launch(
        &self,
        (name, function): (&'static str, Option<&sys::CUfunction>),
        dtype: DType,
        shape: &LaunchShape,
        table: Option<&[u32]>,
        arguments: &[Argument],
        stream: &Stream,
    ) -> Result<(), EngineError> {
        let Some(&function) = function else {
            return Err(EngineError::Cuda {
                action: format!("launch {name}"),
                problem: "it was not loaded".to_owned(),
            });
        };
        let mut values: Vec<ArgumentValue> = arguments
            .iter()
            .map(|argument| self.value(argument, dtype))
            .collect::<Result<_, _>>()?;
        // The driver copies a table and writes nothing to it.
        let table = table.map(|table| table.as_ptr().cast_mut().cast());
        let arguments = values.iter_mut().map(ArgumentValue::pointer);
        let mut pointers: Vec<*mut c_void> = table.into_iter().chain(arguments).collect();
        // SAFETY: the arguments match the kernel's parameters by the lowering's contract, which
        // tests check against the sources; addresses are inside the arena or the host memory by
        // the plan, which `check` holds against them.
        unsafe { stream.launch(function, shape, &mut pointers) }
            .map_err(failed(format!("launch {name}")))
    }

    fn value(&self, argument: &Argument, dtype: DType) -> Result<ArgumentValue, EngineError> {
        let map = match argument {
            Argument::TensorMap(at) => Some(tensor_map::encode(at, self.arena.address, dtype)?),
            Argument::MatrixMap(at) => {
                Some(tensor_map::encode_matrix(at, self.arena.address, dtype)?)
            }
            _ => None,
        };
        if let Some(map) = map {
            return Ok(ArgumentValue::Map(Box::new(map)));
        }
        let host = self.host.as_ref().map(HostMemory::address);
        word(*argument, self.arena.address, host).map(ArgumentValue::Word)
    }

    pub(super) fn issue_all(
        &self,
        commands: &[Command],
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        let mut commands = commands.iter();
        commands.try_for_each(|command| self.issue(command, dtype, stream))
    }
}

/// What the driver is given for an argument, of which it reads as many bytes as the parameter has.
fn word(argument: Argument, arena: u64, host: Option<u64>) -> Result<u64, EngineError> {
    Ok(match argument {
        Argument::Address(offset) => arena + offset,
        Argument::Host(offset) => host.ok_or_else(no_host)? + offset,
        Argument::Null => 0,
        Argument::I32(value) => u64::from(value.cast_unsigned()),
        Argument::U32(value) | Argument::Stream(value) => u64::from(value),
        Argument::U64(value) => value,
        Argument::F32(value) => u64::from(value.to_bits()),
        // A structure of its own, which the caller makes.
        Argument::TensorMap(_) | Argument::MatrixMap(_) => 0,
    })
}

fn no_ranks() -> EngineError {
    EngineError::Cuda {
        action: "exchange between ranks".to_owned(),
        problem: "none are connected".to_owned(),
    }
}

/// A tensor is in host memory, and the executor was made without any.
pub(super) fn no_host() -> EngineError {
    EngineError::Cuda {
        action: "find a tensor in host memory".to_owned(),
        problem: "the executor was made without host memory".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_host_memory_needs_host_memory() {
        let host = |memory| word(Argument::Host(8), 1 << 20, memory);
        assert_eq!(host(Some(4096)).unwrap(), 4104);
        let message = host(None).unwrap_err().to_string();
        assert!(message.contains("without host memory"), "{message}");
        assert_eq!(
            word(Argument::Address(8), 1 << 20, None).unwrap(),
            1_048_584
        );
        assert_eq!(word(Argument::I32(-1), 0, None).unwrap(), 0xffff_ffff);
    }
}
