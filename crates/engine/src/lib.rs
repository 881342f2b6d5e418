//! Runs a plan. The executor makes one allocation, the arena, and every op reads
//! and writes inside it at the offsets the plan chose.
//!
//! Nearly all of cinch's unsafe code is here (the rest maps files into memory): the arena hands
//! out disjoint views of one allocation, the kernels use vector instructions chosen at run time,
//! and the CUDA driver and its libraries are called.
//!
//! ```
//! use cinch_engine::Executor;
//! use cinch_graph::{DType, Graph, Init, Target};
//! use cinch_plan::{Options, Plan};
//!
//! let mut graph = Graph::new(DType::F32);
//! let x = graph.batch("x", [1, 2], DType::F32);
//! let weight = graph.weight("weight", [1, 2], Init::Zeros);
//! let y = graph.linear("y", x, weight, None)?;
//! let plan = Plan::new(&graph, Options::new(Target::Cpu));
//!
//! let mut executor = Executor::new(plan.arena_bytes, Some(1))?;
//! let place = |tensor| plan.placement(tensor).expect("every tensor has a place");
//! executor.arena_mut().write(place(x)).copy_from_slice(&[3.0_f32, 4.0]);
//! executor.arena_mut().write(place(weight)).copy_from_slice(&[2.0_f32, 0.5]);
//! executor.run(&graph, &plan, 0..graph.nodes.len(), true)?;
//! assert_eq!(executor.arena().read::<f32>(place(y)), [8.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![expect(
    unsafe_code,
    reason = "arena views, vector instructions and CUDA; each block says why it is sound"
)]

mod arena;
pub mod copy_rate;
pub mod cpu;
pub mod cuda;
mod engine;
mod error;
pub mod gemm_rate;
pub mod sigmoid_rate;

pub use arena::{Arena, Element};
pub use cpu::executor::Executor;
pub use engine::{Engine, EngineOptions, MicroBatch, Part, Told};
pub use error::EngineError;
