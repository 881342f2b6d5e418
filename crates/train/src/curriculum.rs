//! The stages of a run: which pairs each draws, and when each begins.
//!
//! A stage is as long as its own pairs make it. One that stops early lets the next begin at once,
//! so the first steps of stages are part of what a checkpoint holds.

use cinch_config::{Config, Stage};
use cinch_data::taxonomy::{Near, PairRules, Relation};

use crate::error::TrainError;

/// What each stage of a configuration draws; one of all pairs where it has no stages.
pub(crate) fn rules(config: &Config, negatives: u64) -> Result<Vec<PairRules>, TrainError> {
    let positives = config.data.positives;
    let stages = &config.data.curriculum;
    if stages.is_empty() {
        return Ok(vec![PairRules::plain(positives, negatives as usize)]);
    }
    let rules = |stage: &Stage| {
        let near = |of: &str| -> Result<Near, TrainError> {
            Ok(Near {
                levels: numbers(stage, &format!("{of}_level"))?,
                relations: numbers(stage, &format!("{of}_relation"))?,
                distances: numbers(stage, &format!("{of}_distance"))?,
            })
        };
        Ok(PairRules {
            name: stage.name.clone(),
            positives: stage.n_positives.map_or(positives, |count| count as usize),
            negatives: stage.n_negatives.unwrap_or(negatives) as usize,
            anchor_levels: numbers(stage, "anchor_level")?,
            positive: near("positive")?,
            negative: near("negative")?,
            relation_margins: numbers(stage, "relation_margin")?,
            distance_margins: numbers(stage, "distance_margin")?,
        })
    };
    stages.iter().map(rules).collect()
}

/// A stage's list of that name. Relations may be given by name.
fn numbers(stage: &Stage, key: &str) -> Result<Option<Vec<u64>>, TrainError> {
    let Some(words) = stage.limits.get(key) else {
        return Ok(None);
    };
    if let ([word], true) = (words.as_slice(), key.ends_with("_margin"))
        && let Some(least) = least(word)
    {
        return Ok(Some((least..=FARTHEST).collect()));
    }
    let relation = |word: &String| Relation::number_of(word).filter(|_| key.contains("relation"));
    let number = |word: &String| {
        let number = word.parse().ok().or_else(|| relation(word));
        number.ok_or_else(|| TrainError::StageLimit {
            stage: stage.name.clone(),
            key: key.to_owned(),
            value: word.clone(),
        })
    };
    words.iter().map(number).collect::<Result<_, _>>().map(Some)
}

/// The largest number that a relation or a distance has.
const FARTHEST: u64 = 99;

/// One margin between whole numbers, such as 0.5, is none that two codes have: it is the least.
fn least(word: &str) -> Option<u64> {
    let margin: f64 = word.parse().ok()?;
    let is_between = margin.fract() != 0.0 && (0.0..FARTHEST as f64).contains(&margin);
    is_between.then(|| margin.ceil() as u64)
}

/// When the stages of a run begin, and how long they are unless they stop early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Course {
    /// The first step of each.
    starts: Vec<u64>,
    steps: Vec<u64>,
}

impl Course {
    pub fn new(steps: Vec<u64>) -> Self {
        let mut next = 0;
        let starts = steps.iter().map(|&steps| {
            let start = next;
            next += steps;
            start
        });
        Self {
            starts: starts.collect(),
            steps,
        }
    }

    /// As it was when a checkpoint was saved in `stage`. Later stages follow as long as they are now.
    pub fn begun_at(mut self, starts: &[u64], stage: usize) -> Self {
        if starts.len() == self.starts.len() {
            self.starts = starts.to_vec();
            let stage = stage.min(starts.len() - 1);
            for later in stage + 1..starts.len() {
                self.starts[later] = self.starts[later - 1] + self.steps[later - 1];
            }
        }
        self
    }

    pub fn starts(&self) -> &[u64] {
        &self.starts
    }

    pub fn num_stages(&self) -> usize {
        self.starts.len()
    }

    /// The first step of a stage, and the one after its last.
    pub fn span(&self, stage: usize) -> (u64, u64) {
        let start = self.starts.get(stage).copied().unwrap_or(0);
        let steps = self.steps.get(stage).copied().unwrap_or(0);
        let next = self.starts.get(stage + 1).copied();
        (start, next.unwrap_or(start.saturating_add(steps)))
    }

    /// Steps of the whole run.
    pub fn max_steps(&self) -> u64 {
        self.span(self.num_stages().saturating_sub(1)).1
    }

    /// Has the stage after `stage` begin at `step`, and later ones follow as they were.
    pub fn end_stage(&mut self, stage: usize, step: u64) {
        let mut next = step;
        for later in stage + 1..self.starts.len() {
            self.starts[later] = next;
            next += self.steps[later];
        }
        if stage + 1 == self.starts.len() {
            self.steps[stage] = step.saturating_sub(self.starts[stage]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_stops_early_lets_the_next_begin() {
        let mut course = Course::new(vec![10, 5, 4]);
        assert_eq!(course.starts(), [0, 10, 15]);
        assert_eq!(course.max_steps(), 19);
        course.end_stage(0, 7);
        assert_eq!(course.starts(), [0, 7, 12]);
        assert_eq!((course.span(1), course.max_steps()), ((7, 12), 16));
        let again = Course::new(vec![10, 5, 4]).begun_at(course.starts(), 1);
        assert_eq!(again, course);
        // With more steps, the stage that is trained and those after it are longer.
        let longer = Course::new(vec![20, 10, 8]).begun_at(course.starts(), 1);
        assert_eq!((longer.starts(), longer.max_steps()), (&[0, 7, 17][..], 25));
        course.end_stage(2, 13);
        assert_eq!(course.max_steps(), 13);
    }

    #[test]
    fn limits_are_numbers_and_relations_may_be_named() {
        let mut stage = Stage {
            name: "01".to_owned(),
            ..Stage::default()
        };
        let words = ["2", "cousin"].map(str::to_owned).to_vec();
        stage.limits.insert("positive_relation".to_owned(), words);
        let read = |stage: &Stage, key: &str| numbers(stage, key).map_err(|e| e.to_string());
        assert_eq!(read(&stage, "positive_relation"), Ok(Some(vec![2, 7])));
        assert_eq!(read(&stage, "negative_level"), Ok(None));
        let words = vec!["sector".to_owned()];
        stage.limits.insert("anchor_level".to_owned(), words);
        let problem = read(&stage, "anchor_level").unwrap_err();
        assert!(
            problem.contains("anchor_level") && problem.contains("`sector`"),
            "{problem}"
        );
        // A margin that no two codes have is the least one.
        let mut margin = |words: &[&str]| {
            let words = words.iter().map(|word| (*word).to_owned()).collect();
            stage.limits.insert("distance_margin".to_owned(), words);
            read(&stage, "distance_margin")
        };
        assert_eq!(margin(&["2"]), Ok(Some(vec![2])));
        let least = margin(&["2.5"]).unwrap().unwrap();
        assert_eq!((least[0], least.last()), (3, Some(&FARTHEST)));
        assert!(margin(&["0.5", "1"]).is_err() && margin(&["-0.5"]).is_err());
    }
}
