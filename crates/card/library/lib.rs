//! A card that is not there: the public functions of the CUDA runtime and driver, cuBLAS, cuDNN, cuFFT and NCCL, as a
//! process meets them that was started with this library before all others.
//!
//! Memory is handed out as addresses and counted against the card's size; kernels do nothing; small copies are really
//! made, so that what a script brings to the card it can read back. The library does nothing until one of its functions
//! is called: every program that the script starts has it loaded too.
//!
//! It is compiled twice: by the build script as a shared object that exports the names below, and as a module of this
//! crate, where the names are Rust's and the tests call them.

// The driver's addresses, as the replay of PyTorch's allocator has them: one model for both.
#[path = "../../torch/src/allocator/address.rs"]
#[allow(dead_code)]
mod address;
pub mod blas;
pub mod card;
pub mod dispatch;
pub mod dnn;
pub mod dnn_backend;
pub mod dnn_recurrent;
pub mod driver;
pub mod fft;
mod host;
pub mod launch;
pub mod ledger;
pub mod memory;
pub mod nccl;
pub mod pool;
pub mod properties;
pub mod runtime;
pub mod stream;
pub mod virtual_memory;

#[cfg(test)]
mod tests;
