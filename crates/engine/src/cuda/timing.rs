//! Device time: of a piece of work, and which of several ways to do the same is fastest.

use std::collections::HashMap;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::driver::{Event, Replay, Stream, failed};
use crate::error::EngineError;

/// Two events of the driver around some work.
pub(crate) struct Stopwatch {
    start: Event,
    end: Event,
}

impl Stopwatch {
    /// The stream's context must be current.
    pub fn new(stream: &Stream) -> Result<Self, EngineError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let create = || Event::new(&stream.context, flags);
        Ok(Self {
            start: create()?,
            end: create()?,
        })
    }

    /// How long the device takes for what `work` puts on the stream; waits for it.
    pub fn time(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<Duration, EngineError> {
        // SAFETY: events and stream are live.
        unsafe { result::event::record(self.start.handle, stream.handle) }
            .map_err(failed("record an event"))?;
        work()?;
        // SAFETY: as above.
        unsafe { result::event::record(self.end.handle, stream.handle) }
            .map_err(failed("record an event"))?;
        stream.synchronize()?;
        // SAFETY: both events were recorded and have completed.
        let milliseconds = unsafe { result::event::elapsed(self.start.handle, self.end.handle) }
            .map_err(failed("read an event"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}

/// Trials of several ways. What runs more than once is recorded and replayed, as a step is: there the
/// clearing of a counter that some of the library's kernels need is several microseconds, which a
/// stream that is ahead of the card hides.
pub(crate) struct Trials<'a> {
    stream: &'a Stream,
    stopwatch: Stopwatch,
    /// By way: how often it runs, and the recording.
    recorded: HashMap<usize, (u32, Replay)>,
}

impl<'a> Trials<'a> {
    pub fn new(stream: &'a Stream) -> Result<Self, EngineError> {
        Ok(Self {
            stream,
            stopwatch: Stopwatch::new(stream)?,
            recorded: HashMap::new(),
        })
    }

    /// How long so many runs of a way take, of which `issue` puts one on the stream. The first of
    /// all is not recorded, because it may load what it needs.
    pub fn time(
        &mut self,
        way: usize,
        runs: u32,
        issue: impl Fn() -> Result<(), EngineError>,
    ) -> Result<Duration, EngineError> {
        if runs == 1 {
            return self.stopwatch.time(self.stream, issue);
        }
        let is_recorded = |(times, _): &(u32, Replay)| *times == runs;
        if !self.recorded.get(&way).is_some_and(is_recorded) {
            let replay = Replay::capture(self.stream, || (0..runs).try_for_each(|_| issue()))?;
            // Once to bring it to the card.
            replay.launch(self.stream)?;
            self.recorded.insert(way, (runs, replay));
        }
        let (_, replay) = &self.recorded[&way];
        self.stopwatch
            .time(self.stream, || replay.launch(self.stream))
    }
}

/// Short work is repeated until it takes about this long, so that starting it does not count.
const BURST: Duration = Duration::from_micros(400);
const LONGEST_BURST: u32 = 16;
const ROUNDS: usize = 3;
/// Slower than the fastest by this much in one trial, and a candidate is not tried again.
const HOPELESS: f64 = 1.5;
/// What a later candidate has to gain over the first, which noise must not replace.
const GAIN: f64 = 0.98;

/// The fastest of `count` ways, by number; `time` runs one of them so many times in a row. Those
/// that fail are left out; the first error comes back where all do.
pub(crate) fn fastest(
    count: usize,
    mut time: impl FnMut(usize, u32) -> Result<Duration, EngineError>,
) -> Result<usize, EngineError> {
    let mut best: Vec<(usize, f64)> = Vec::with_capacity(count);
    let mut problem = None;
    for candidate in 0..count {
        // Once to load it, once to time it.
        match time(candidate, 1).and_then(|_| time(candidate, 1)) {
            Ok(duration) => best.push((candidate, duration.as_secs_f64())),
            Err(error) => problem = problem.or(Some(error)),
        }
    }
    let least = best.iter().map(|&(_, time)| time).fold(f64::MAX, f64::min);
    best.retain(|&(_, time)| time <= HOPELESS * least);
    let burst = (BURST.as_secs_f64() / least.max(1e-9)) as u32;
    let burst = burst.clamp(1, LONGEST_BURST);
    for _ in 0..ROUNDS {
        best.retain_mut(|(candidate, best)| match time(*candidate, burst) {
            Ok(duration) => {
                *best = best.min(duration.as_secs_f64() / f64::from(burst));
                true
            }
            Err(error) => {
                problem.get_or_insert(error);
                false
            }
        });
    }
    let mut chosen: Option<(usize, f64)> = None;
    for &(candidate, time) in &best {
        if chosen.is_none_or(|(_, least)| time < GAIN * least) {
            chosen = Some((candidate, time));
        }
    }
    match (chosen, problem) {
        (Some((candidate, _)), _) => Ok(candidate),
        (None, Some(error)) => Err(error),
        (None, None) => Err(EngineError::Cuda {
            action: "choose an algorithm".to_owned(),
            problem: "there is none".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(times: &[Option<f64>]) -> Result<usize, EngineError> {
        fastest(times.len(), |candidate, runs| match times[candidate] {
            Some(time) => Ok(Duration::from_secs_f64(time * f64::from(runs))),
            None => Err(EngineError::Cuda {
                action: format!("run {candidate}"),
                problem: "not supported".to_owned(),
            }),
        })
    }

    #[test]
    fn the_fastest_wins_unless_it_is_as_fast_as_the_first() {
        assert_eq!(choose(&[Some(1e-3)]).unwrap(), 0);
        assert_eq!(choose(&[Some(1e-3), Some(8e-4), Some(9e-4)]).unwrap(), 1);
        assert_eq!(choose(&[Some(1e-3), Some(0.99e-3)]).unwrap(), 0);
        assert_eq!(choose(&[Some(1e-3), Some(1e-5), Some(2e-5)]).unwrap(), 1);
    }

    #[test]
    fn what_fails_is_left_out() {
        assert_eq!(choose(&[None, Some(1e-3), None]).unwrap(), 1);
        let message = choose(&[None, None]).unwrap_err().to_string();
        assert!(message.contains("run 0"), "{message}");
        assert!(choose(&[]).is_err());
        // One that cannot be repeated.
        let chosen = fastest(2, |candidate, runs| match (candidate, runs) {
            (0, 1) => Ok(Duration::from_micros(1)),
            (0, _) => choose(&[]).map(|_| Duration::ZERO),
            _ => Ok(Duration::from_micros(1) * runs),
        });
        assert_eq!(chosen.unwrap(), 1);
    }

    /// What failed in one round is not tried in the next, however fast it would be there.
    #[test]
    fn what_failed_once_stays_out() {
        let mut calls = 0;
        let chosen = fastest(2, |candidate, runs| {
            calls += usize::from(candidate == 0);
            match (candidate, calls) {
                (0, 3) => choose(&[]).map(|_| Duration::ZERO),
                (0, _) => Ok(Duration::from_micros(1) * runs),
                _ => Ok(Duration::from_millis(1) * runs / 999),
            }
        });
        assert_eq!((chosen.unwrap(), calls), (1, 3));
    }

    /// A first timing that was disturbed is put right by the later ones.
    #[test]
    fn the_best_of_several_rounds_counts() {
        let mut calls = [0; 2];
        let chosen = fastest(2, |candidate, runs| {
            calls[candidate] += 1;
            let disturbed = candidate == 1 && calls[1] <= 2;
            let time = [1e-3, if disturbed { 1.4e-3 } else { 8e-4 }][candidate];
            Ok(Duration::from_secs_f64(time * f64::from(runs)))
        });
        assert_eq!(chosen.unwrap(), 1);
    }
}
