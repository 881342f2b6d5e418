//! The ops, a file per group. Each says what it allocates when, and why.
//!
//! Arguments are `impl Borrow<Tensor>`: a handle given by value is a Python temporary and is
//! dropped when the op has its result, the left operand first.

pub mod attention;
pub mod cast;
pub mod convolution;
pub mod creation;
pub mod dropout;
pub mod einsum;
pub mod embedding;
pub mod index;
pub mod liger;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod pointwise;
pub mod quantised;
pub mod reduce;
pub mod scan;
pub mod softmax;
pub mod view;
