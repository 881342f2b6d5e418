//! Plans by property: over random buffers and over random models, nothing that lives together
//! overlaps, and every figure of a plan is what its placements say.

mod absurd_sizes;
mod category;
mod check;
mod graphs;
mod placement;
#[path = "../../../graph/tests/graph/random_model.rs"]
mod random_model;
mod sharing;
