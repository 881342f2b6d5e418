//! The graph crate as models and planners use it: ops that refuse what they cannot do, the
//! verifier, and the passes, over a small model built by hand and over random ones.

mod absurd_sizes;
mod cost;
mod differentiate;
mod expressions;
mod infer;
mod mutations;
mod offload_activations;
mod parameters;
mod print;
mod random_model;
mod recompute;
mod shard;
mod small_model;
mod terms;
mod update_in_backward;
mod values;
mod verify;
