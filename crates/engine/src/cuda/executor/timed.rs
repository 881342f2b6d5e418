//! How long commands take by themselves, for benchmarks.

use std::time::Duration;

use cinch_graph::DType;

use super::CudaExecutor;
use crate::cuda::command::Command;
use crate::cuda::driver::Replay;
use crate::cuda::timing::Stopwatch;
use crate::error::EngineError;

const WARM_UPS: usize = 3;
const RUNS: usize = 21;

impl CudaExecutor {
    /// The time of each of some lists of commands, which are recorded one after the other: the median
    /// of some replays. Where the lists have memory of their own, and enough of it, none finds what
    /// it reads in the card's cache. Addresses are those of a plan that the arena was made for.
    pub fn time_of_each(
        &mut self,
        lists: &[Vec<Command>],
        dtype: DType,
    ) -> Result<Duration, EngineError> {
        self.context.bind()?;
        for command in lists.iter().flatten() {
            self.make_ready(command, dtype)?;
        }
        let replay = Replay::capture(&self.stream, || {
            let mut lists = lists.iter();
            lists.try_for_each(|list| self.issue_all(list, dtype, &self.stream))
        })?;
        let stopwatch = Stopwatch::new(&self.stream)?;
        let mut times = Vec::with_capacity(RUNS);
        for run in 0..WARM_UPS + RUNS {
            let time = stopwatch.time(&self.stream, || replay.launch(&self.stream))?;
            if run >= WARM_UPS {
                times.push(time);
            }
        }
        times.sort_unstable();
        Ok(times[RUNS / 2] / lists.len().max(1) as u32)
    }
}
