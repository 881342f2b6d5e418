//! The arithmetic of each op on plain slices. Kernels know nothing of graphs, plans or
//! arenas; the executor resolves tensors to slices and calls them. They are generic over
//! [`Real`](super::real::Real): `f32` trains, `f64` checks gradients.
//!
//! Results never depend on the number of threads: work is cut by the size of the problem,
//! and every sum has one fixed order.

pub mod activation;
pub mod attention;
#[cfg(test)]
mod check;
pub mod columns;
pub mod convolution;
pub mod cross_entropy;
pub mod dequantise;
pub mod eight_bit;
pub mod embedding;
pub mod expression;
pub mod gated;
pub mod gemm;
pub mod indexer;
pub mod lanes;
pub mod linear;
pub mod matvec;
pub mod norm;
pub mod optimizer;
pub mod rotary;
pub mod scan;
pub(super) mod scratch;
