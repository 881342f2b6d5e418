//! The CUDA executor: the same plans on a GPU.
//!
//! A node is lowered to commands with addresses in the arena ([`lowering`], pure); the commands
//! of a part of the step are captured once as a CUDA graph and replayed. The context, then the
//! arena, then nothing more is allocated on the device.

mod beside;
mod blas;
pub mod command;
pub mod compile;
mod driver;
pub(crate) mod executor;
mod expression;

mod image;
pub mod lowering;
mod nccl;
mod noise;
pub mod op;
mod staging;
mod tensor_map;
mod timing;

pub use driver::{DeviceInfo, card, is_available, memory, num_cards};
pub use executor::{CudaExecutor, ProgramId, matrix_rate};
pub use nccl::SHARING_VARIABLE;
