//! How long each rank of a run computes and waits, which of them the others wait for, and the lines
//! in which a run writes that down.
//!
//! Ranks go from exchange to exchange together, so a step takes as long on each as on the one that
//! took longest, and only waiting tells them apart: the slowest rank is the one that waits least.
//! What is not waiting counts as computing, also what a rank does between two steps.

use serde::{Deserialize, Serialize};

/// Where a run of several ranks keeps what each of them does.
pub const FILE_NAME: &str = "ranks.jsonl";

/// Below this share of a step a difference is noise.
const CLEAR: f64 = 0.1;

/// Lines of the curve that are kept; of more, every second is dropped, again and again.
const MOST_POINTS: usize = 512;
/// Ranks whose curves can be told apart.
const MOST_CURVES: usize = 16;

/// Seconds of a step, and those of them in which a rank waits for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    pub seconds: f64,
    pub waited_seconds: f64,
}

impl Pace {
    /// What it does by itself.
    pub fn busy_seconds(self) -> f64 {
        (self.seconds - self.waited_seconds).max(0.0)
    }
}

/// The rank that computes longest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slowest {
    pub rank: usize,
    /// What it computes in a step.
    pub busy_seconds: f64,
    /// What the others do: half of them less, half of them more.
    pub others_busy_seconds: f64,
    /// The share of a step by which it is longer.
    pub share: f64,
    /// Whether that is more than noise.
    pub is_clear: bool,
}

impl Slowest {
    /// By rank; none where there are not two.
    pub fn of(paces: &[Pace]) -> Option<Self> {
        let busy = |rank: &usize| paces[*rank].busy_seconds();
        let mut ranks: Vec<usize> = (0..paces.len()).collect();
        // The first of those that are as slow.
        ranks.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
        let (slowest, others) = ranks.split_first()?;
        let middle = others.get(others.len() / 2)?;
        let step = paces.iter().map(|pace| pace.seconds).fold(0.0, f64::max);
        let share = match step > 0.0 {
            true => (busy(slowest) - busy(middle)) / step,
            false => 0.0,
        };
        Some(Self {
            rank: *slowest,
            busy_seconds: busy(slowest),
            others_busy_seconds: busy(middle),
            share,
            is_clear: share >= CLEAR,
        })
    }
}

/// Who a rank is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankFacts {
    pub host: String,
    pub process: u32,
    pub device: String,
}

/// A line that says who trains from a step on; nobody, where a run goes on by itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RanksBegin {
    pub members: Vec<RankFacts>,
    /// Of each: they have one plan.
    pub planned_bytes: u64,
}

/// A line that says what each did in the steps since the line before, by rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RanksLine {
    pub steps: u64,
    /// Over all these steps.
    pub seconds: Vec<f64>,
    pub waited_seconds: Vec<f64>,
    /// What each process has in host memory.
    pub resident_bytes: Vec<Option<u64>>,
    /// What is used of each GPU, by other programs too; empty where there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_used_bytes: Vec<Option<u64>>,
}

/// What is known of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RankRow {
    #[serde(flatten)]
    pub facts: RankFacts,
    /// A step, over all of them.
    pub pace: Pace,
    /// A step, in the newest line.
    pub lately: Pace,
    pub resident_bytes: Option<u64>,
    pub device_used_bytes: Option<u64>,
    /// The most that was measured where the plan is: on the GPU, or in the host's memory.
    pub most_bytes: Option<u64>,
}

impl RankRow {
    /// What was measured where the plan is.
    pub fn measured(&self) -> Option<u64> {
        self.device_used_bytes.or(self.resident_bytes)
    }
}

/// The ranks of a run, from the lines that it wrote.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RanksTable {
    pub planned_bytes: u64,
    /// The newest.
    pub step: u64,
    /// So many steps are counted.
    pub steps: u64,
    pub rows: Vec<RankRow>,
    /// What each rank computes in a step, over the steps; of few ranks only.
    #[serde(skip)]
    pub curve: Vec<(u64, Vec<f64>)>,
    #[serde(skip)]
    stride: u64,
    #[serde(skip)]
    lines: u64,
}

impl RanksTable {
    /// Begins anew: who trained before is gone.
    pub fn begin(&mut self, step: u64, begin: RanksBegin) {
        let row = |facts| RankRow {
            facts,
            ..RankRow::default()
        };
        *self = Self {
            planned_bytes: begin.planned_bytes,
            step,
            rows: begin.members.into_iter().map(row).collect(),
            stride: 1,
            ..Self::default()
        };
    }

    /// Takes a line up; false where it is of another number of ranks.
    pub fn add(&mut self, step: u64, line: &RanksLine) -> bool {
        let ranks = self.rows.len();
        let is_of_them = |len: usize| len == ranks;
        let fits = is_of_them(line.seconds.len())
            && is_of_them(line.waited_seconds.len())
            && is_of_them(line.resident_bytes.len())
            && (line.device_used_bytes.is_empty() || is_of_them(line.device_used_bytes.len()));
        if !fits || line.steps == 0 {
            return false;
        }
        let before = self.steps as f64;
        self.step = step;
        self.steps = self.steps.saturating_add(line.steps);
        let (steps, all) = (line.steps as f64, self.steps as f64);
        // One that begins its step late has a short one, for which the others waited.
        let seconds = line.seconds.iter().copied().fold(0.0, f64::max);
        for (rank, row) in self.rows.iter_mut().enumerate() {
            let mean = |mean: f64, sum: f64| (mean * before + sum) / all;
            let waited = line.waited_seconds[rank];
            row.pace = Pace {
                seconds: mean(row.pace.seconds, seconds),
                waited_seconds: mean(row.pace.waited_seconds, waited),
            };
            row.lately = Pace {
                seconds: seconds / steps,
                waited_seconds: waited / steps,
            };
            row.resident_bytes = line.resident_bytes[rank];
            row.device_used_bytes = line.device_used_bytes.get(rank).copied().flatten();
            row.most_bytes = row.most_bytes.max(row.measured());
        }
        if ranks <= MOST_CURVES {
            self.draw(step);
        }
        true
    }

    fn draw(&mut self, step: u64) {
        let stride = self.stride.max(1);
        if self.lines.is_multiple_of(stride) {
            let busy = self.rows.iter().map(|row| row.lately.busy_seconds());
            self.curve.push((step, busy.collect()));
        }
        self.lines += 1;
        if self.curve.len() > MOST_POINTS {
            let mut keep = false;
            self.curve.retain(|_| {
                keep = !keep;
                keep
            });
            self.stride = stride * 2;
        }
    }

    /// Whether there is anything to compare.
    pub fn is_of_several(&self) -> bool {
        self.rows.len() > 1
    }

    /// Over the whole run; none before the first line.
    pub fn slowest(&self) -> Option<Slowest> {
        self.slowest_by(|row| row.pace)
    }

    /// In the newest line.
    pub fn slowest_lately(&self) -> Option<Slowest> {
        self.slowest_by(|row| row.lately)
    }

    fn slowest_by(&self, pace: impl Fn(&RankRow) -> Pace) -> Option<Slowest> {
        let paces: Vec<Pace> = self.rows.iter().map(pace).collect();
        Slowest::of(&paces).filter(|_| self.steps > 0)
    }

    /// The same in a sentence: which rank it is, or that none is.
    pub fn told(&self, slowest: &Slowest) -> String {
        if !slowest.is_clear {
            return "no rank is clearly slower than the others".to_owned();
        }
        let facts = self.rows.get(slowest.rank).map(|row| &row.facts);
        let place = facts.map_or_else(String::new, |facts| {
            format!(" on {} (process {})", facts.host, facts.process)
        });
        format!(
            "rank {}{place} is the slowest: it computes {} a step, the others {}, and they wait \
             for it",
            slowest.rank,
            seconds(slowest.busy_seconds),
            seconds(slowest.others_busy_seconds)
        )
    }
}

/// "1.20 s" or "35.1 ms".
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1e3 * s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(seconds: f64, waited_seconds: f64) -> Pace {
        Pace {
            seconds,
            waited_seconds,
        }
    }

    #[test]
    fn the_slowest_is_the_one_that_waits_least() {
        let slowest = Slowest::of(&[pace(1.0, 0.8), pace(1.0, 0.7), pace(1.0, 0.0)]).unwrap();
        assert_eq!((slowest.rank, slowest.is_clear), (2, true));
        assert!((slowest.share - 0.8).abs() < 1e-9);
        // Those that wait as much are alike, whatever the network takes.
        let alike = Slowest::of(&[pace(1.0, 0.5), pace(1.0, 0.52), pace(0.99, 0.5)]).unwrap();
        assert!(!alike.is_clear);
        assert_eq!(Slowest::of(&[pace(1.0, 0.0)]), None);
        assert_eq!(Slowest::of(&[]), None);
        assert!(!Slowest::of(&[Pace::default(); 3]).unwrap().is_clear);
    }

    fn begin(ranks: usize) -> RanksBegin {
        RanksBegin {
            members: (0..ranks)
                .map(|rank| RankFacts {
                    host: format!("node-{rank}"),
                    process: 100 + rank as u32,
                    device: "1 thread".to_owned(),
                })
                .collect(),
            planned_bytes: 1 << 20,
        }
    }

    fn line(steps: u64, seconds: [f64; 2], waited: [f64; 2]) -> RanksLine {
        RanksLine {
            steps,
            seconds: seconds.into(),
            waited_seconds: waited.into(),
            resident_bytes: vec![Some(900), None],
            device_used_bytes: Vec::new(),
        }
    }

    #[test]
    fn lines_add_up_to_means_and_others_are_left_out() {
        let mut table = RanksTable::default();
        table.begin(0, begin(2));
        assert!(table.slowest().is_none());
        assert!(table.add(10, &line(10, [10.0, 10.0], [0.0, 5.0])));
        assert!(table.add(40, &line(30, [30.0, 30.0], [30.0, 0.0])));
        assert_eq!(table.rows[0].pace, pace(1.0, 0.75));
        assert_eq!(table.rows[1].pace, pace(1.0, 0.125));
        assert_eq!(table.slowest().unwrap().rank, 1);
        assert_eq!(table.slowest_lately().unwrap().rank, 1);
        assert_eq!(table.curve[0], (10, vec![1.0, 0.5]));
        let told = table.told(&table.slowest().unwrap());
        assert!(told.starts_with("rank 1 on node-1 (process 101)"), "{told}");
        let before = table.clone();
        let mut other = line(10, [1.0, 1.0], [0.0, 0.0]);
        other.waited_seconds.push(0.0);
        assert!(!table.add(50, &other) && !table.add(50, &line(0, [0.0; 2], [0.0; 2])));
        assert_eq!(table, before);
        table.begin(50, begin(0));
        assert!(!table.is_of_several() && table.curve.is_empty());
    }

    #[test]
    fn who_begins_a_step_late_is_waited_for() {
        let mut table = RanksTable::default();
        table.begin(0, begin(2));
        table.add(1, &line(1, [1.0, 0.2], [0.8, 0.0]));
        let slowest = table.slowest().unwrap();
        assert_eq!((slowest.rank, slowest.busy_seconds), (1, 1.0));
    }

    #[test]
    fn a_long_run_keeps_a_short_curve() {
        let mut table = RanksTable::default();
        table.begin(0, begin(2));
        for step in 1..=5000 {
            table.add(step, &line(1, [1.0, 1.0], [0.5, 0.0]));
        }
        assert!((200..=MOST_POINTS).contains(&table.curve.len()));
        assert!(table.curve.windows(2).all(|two| two[0].0 < two[1].0));
    }
}
