//! Several processes that train as one: who they are, how they find each other, what they
//! exchange, and how each learns that another is gone.
//!
//! 1. [`Identity`] says which rank a process is, by what torchrun, mpirun, Slurm or
//!    `cinch launch` put into its environment;
//! 2. [`World::join`] meets the others, compares versions and settings, and connects;
//! 3. [`World`] exchanges numbers: sums have one order of additions, whoever comes first;
//! 4. the watch behind it beats, and ends the wait for a rank that is dead, silent or slow;
//! 5. [`launch`] starts ranks on one machine, and leaves none behind.
//!
//! Everything is TCP. On the CPU all numbers go this way, which is for tests and for small
//! machines; on GPUs only what the loop agrees on does. docs/design/0018 has the reasons.
//!
//! ```
//! use cinch_ranks::{Greeting, Limits, Topology, World};
//!
//! let worlds = World::loopback(2, &Greeting::default(), Limits::default(), Topology::Mesh)?;
//! let sums = std::thread::scope(|scope| {
//!     let ranks = worlds.into_iter().map(|mut world| scope.spawn(move || {
//!         let mut values = [1.0_f32, world.rank() as f32];
//!         world.all_reduce(&mut values).map(|()| values)
//!     }));
//!     let ranks: Vec<_> = ranks.collect();
//!     ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
//! })?;
//! assert_eq!(sums, [[2.0, 1.0]; 2]);
//! # Ok::<(), cinch_ranks::RanksError>(())
//! ```

mod error;
mod exchange;
mod greeting;
mod identity;
pub mod launch;
mod limits;
mod link;
mod meeting;
mod number;
pub mod pace;
mod slurm;
mod watch;
mod world;

pub use error::{Cause, Loss, RanksError, Refusal};
pub use exchange::BUFFER_BYTES;
pub use greeting::{Greeting, Member};
pub use identity::{INHERITED_VARIABLE, Identity, Meeting, Variable};
pub use limits::Limits;
pub use meeting::Topology;
pub use number::{Element, Number};
pub use world::{SharedWorld, World};
