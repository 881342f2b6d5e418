//! What each rank of a run takes, brought to the first one now and then and written down there.
//!
//! Every rank counts its own steps. Where a line is logged the counts travel to rank 0 in one
//! message each, which nobody waits for an answer to. With very many ranks not every line has them:
//! what is written stays as short as the metrics beside it.

use cinch_ranks::pace::{RankFacts, RanksBegin, RanksLine, RanksTable};

use crate::error::TrainError;
use crate::ranks::Ranks;
use crate::record::RunRecord;

/// Ranks for which a line is written at every log line.
const RANKS_OF_A_LINE: usize = 64;

/// What is said of an unknown size.
const UNKNOWN: f64 = -1.0;

/// This rank's times since the last line, and on the first rank those of all.
#[derive(Default)]
pub(crate) struct RankTimes {
    steps: u64,
    seconds: f64,
    waited_seconds: f64,
    log_lines: u64,
    resident_bytes: Option<u64>,
    device_used_bytes: Option<u64>,
    table: RanksTable,
}

impl RankTimes {
    /// Has the first rank write down who trains.
    pub fn begin(
        ranks: &Ranks,
        device: &str,
        planned_bytes: u64,
        step: u64,
        record: Option<&mut RunRecord>,
    ) -> Result<Self, TrainError> {
        let mut times = Self::default();
        let members = match ranks.world() {
            None => Vec::new(),
            Some(world) => {
                let mut world = world.lock();
                let devices = world.collect(device)?;
                let members = world.members().iter().zip(devices);
                let member = |(member, device): (&cinch_ranks::Member, String)| RankFacts {
                    host: member.host.clone(),
                    process: member.pid,
                    device,
                };
                members.map(member).collect()
            }
        };
        let begin = RanksBegin {
            members,
            planned_bytes,
        };
        if let Some(record) = record {
            record.begin_ranks(step, &begin)?;
        }
        times.table.begin(step, begin);
        Ok(times)
    }

    /// Counts a step.
    pub fn step(&mut self, seconds: f64, waited_seconds: f64, resident_bytes: Option<u64>) {
        self.steps += 1;
        self.seconds += seconds;
        self.waited_seconds += waited_seconds;
        self.resident_bytes = resident_bytes;
    }

    /// Where a step is logged; all ranks are here together.
    pub fn logged(
        &mut self,
        ranks: &Ranks,
        step: u64,
        device_used_bytes: Option<u64>,
        record: Option<&mut RunRecord>,
    ) -> Result<(), TrainError> {
        self.device_used_bytes = device_used_bytes;
        let every = ranks.share().ranks.div_ceil(RANKS_OF_A_LINE) as u64;
        let is_due = self.log_lines.is_multiple_of(every);
        self.log_lines += 1;
        match is_due {
            true => self.collect(ranks, step, record),
            false => Ok(()),
        }
    }

    /// Brings what was counted to the first rank; nothing where nothing was.
    pub fn collect(
        &mut self,
        ranks: &Ranks,
        step: u64,
        record: Option<&mut RunRecord>,
    ) -> Result<(), TrainError> {
        let Some(world) = ranks.world().filter(|_| self.steps > 0) else {
            return Ok(());
        };
        let size = |bytes: Option<u64>| bytes.map_or(UNKNOWN, |bytes| bytes as f64);
        let own = [
            self.seconds,
            self.waited_seconds,
            size(self.resident_bytes),
            size(self.device_used_bytes),
        ];
        let all = world.lock().collect_numbers(&own)?;
        let column = |place: usize| all.iter().copied().skip(place).step_by(own.len());
        let sizes = |place: usize| -> Vec<Option<u64>> {
            let known = |size: f64| (size >= 0.0).then_some(size as u64);
            column(place).map(known).collect()
        };
        let mut line = RanksLine {
            steps: self.steps,
            seconds: column(0).collect(),
            waited_seconds: column(1).collect(),
            resident_bytes: sizes(2),
            device_used_bytes: sizes(3),
        };
        if line.device_used_bytes.iter().all(Option::is_none) {
            line.device_used_bytes.clear();
        }
        (self.steps, self.seconds, self.waited_seconds) = (0, 0.0, 0.0);
        if let Some(record) = record {
            record.ranks(step, &line)?;
        }
        self.table.add(step, &line);
        Ok(())
    }

    /// All ranks, on the first; none where there are not several.
    pub fn table(&self) -> Option<RanksTable> {
        let is_of_all = self.table.is_of_several() && self.table.steps > 0;
        is_of_all.then(|| self.table.clone())
    }
}
