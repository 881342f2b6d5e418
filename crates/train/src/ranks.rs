//! What the loop does together with the other ranks of a run, where there are some: it agrees on
//! going on, adds up counts, and waits.

use std::time::Duration;

use cinch_ranks::{RanksError, SharedWorld};

use crate::share::Share;

/// The other ranks, or none.
#[derive(Clone, Default)]
pub(crate) struct Ranks(Option<SharedWorld>);

impl Ranks {
    pub fn new(world: Option<SharedWorld>) -> Self {
        Self(world)
    }

    pub fn world(&self) -> Option<&SharedWorld> {
        self.0.as_ref()
    }

    pub fn share(&self) -> Share {
        match &self.0 {
            None => Share::WHOLE,
            Some(world) => {
                let world = world.lock();
                Share {
                    rank: world.rank(),
                    ranks: world.num_ranks(),
                }
            }
        }
    }

    /// Whether there are others.
    pub fn are_several(&self) -> bool {
        self.0.is_some()
    }

    /// The one that writes what there is one of.
    pub fn is_first(&self) -> bool {
        self.share().rank == 0
    }

    /// The sums of all ranks' numbers.
    pub fn sum(&self, numbers: &mut [f64]) -> Result<(), RanksError> {
        match &self.0 {
            None => Ok(()),
            Some(world) => world.lock().sum(numbers),
        }
    }

    /// How long this rank has stood in exchanges so far.
    pub fn waited(&self) -> Duration {
        match &self.0 {
            None => Duration::ZERO,
            Some(world) => world.lock().waited(),
        }
    }

    pub fn barrier(&self) -> Result<(), RanksError> {
        self.sum(&mut [0.0])
    }

    /// Waits as long as it takes for something that the first rank does before the others, such
    /// as to read a text.
    pub fn barrier_without_limit(&self) -> Result<(), RanksError> {
        match &self.0 {
            None => Ok(()),
            Some(world) => world.lock().barrier_without_limit(),
        }
    }

    /// An error on all ranks where they do not have the same value.
    pub fn require_same(&self, what: &str, value: &str) -> Result<(), RanksError> {
        match &self.0 {
            None => Ok(()),
            Some(world) => world.lock().require_same(what, value),
        }
    }

    /// Tells the others that this rank ends with an error, unless it ends because of theirs.
    pub fn fail(&self, problem: &str) {
        if let Some(world) = &self.0 {
            world.lock().fail(problem);
        }
    }

    /// Ends together with the others.
    pub fn leave(&self) -> Result<(), RanksError> {
        match &self.0 {
            None => Ok(()),
            Some(world) => world.lock().leave(),
        }
    }
}
