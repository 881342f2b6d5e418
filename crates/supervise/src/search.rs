//! Which batch to try next: divisors of the effective batch, so that accumulation makes up for
//! the rest exactly.
//!
//! A trial that runs out of memory excludes its batch and all larger ones; one that works, where
//! larger ones are still to be tried, excludes all smaller ones. Without probing, a trial that
//! works is the end. Then the next smaller divisors are tried one by one where they are few (of a
//! power of two there are as many as halvings), and by halves where they are many. With probing,
//! the interval between works and fails is halved, and its end is the largest batch that works.

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Result {
    OutOfMemory,
    Works,
}

/// The divisors that are still possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    effective: usize,
    /// Ascending.
    divisors: Vec<usize>,
    /// Of `divisors`, those below work.
    works: usize,
    /// Of `divisors`, this one and those above do not.
    fails: usize,
    probes: bool,
    first: usize,
}

impl Search {
    /// A search from `first` downwards; `first` must divide `effective`, or `None` is returned.
    pub fn new(effective: usize, first: usize, probes: bool) -> Option<Self> {
        if first == 0 || effective == 0 || !effective.is_multiple_of(first) {
            return None;
        }
        let divisors: Vec<usize> = (1..=first)
            .filter(|one| effective.is_multiple_of(*one))
            .collect();
        Some(Self {
            effective,
            works: 0,
            fails: divisors.len(),
            divisors,
            probes,
            first,
        })
    }

    pub fn effective(&self) -> usize {
        self.effective
    }

    /// Trials that it takes at most, the first one included: the logarithm of what is possible.
    pub fn most_trials(&self) -> u32 {
        1 + self.first.ilog2().max((self.divisors.len() as u32).ilog2())
    }

    /// The batch to try, with its accumulation; `None` where nothing is left.
    pub fn next(&self) -> Option<(usize, usize)> {
        let place = self.place()?;
        let batch = self.divisors[place];
        Some((batch, self.effective / batch))
    }

    fn place(&self) -> Option<usize> {
        let last = self.divisors.len() - 1;
        if self.works >= self.fails {
            return None;
        }
        // What the user asked for comes first.
        if self.fails > last && self.works == 0 {
            return Some(last);
        }
        let halvings = self.first.ilog2() as usize;
        if !self.probes && self.divisors.len() <= halvings + 1 {
            return Some(self.fails - 1);
        }
        if !self.probes {
            // The largest that is at most half of the one that failed.
            let half = self.divisors[self.fails] / 2;
            let below = self.divisors[..self.fails]
                .iter()
                .rposition(|one| *one <= half);
            return below.or(Some(self.fails - 1));
        }
        Some(self.works + (self.fails - self.works) / 2)
    }

    /// Whether larger ones are left to try after this one works.
    pub fn goes_on_after(&self, batch: usize) -> bool {
        let place = self.divisors.iter().position(|one| *one == batch);
        self.probes && place.is_some_and(|place| place + 1 < self.fails)
    }

    pub fn tried(&mut self, batch: usize, result: Result) {
        let Some(place) = self.divisors.iter().position(|one| *one == batch) else {
            return;
        };
        match result {
            Result::OutOfMemory => self.fails = self.fails.min(place),
            Result::Works => self.works = self.works.max(place + 1),
        }
        if !self.probes && result == Result::Works {
            self.fails = self.works;
        }
    }

    /// The largest that works, as far as is known.
    pub fn largest(&self) -> Option<usize> {
        let place = self.works.checked_sub(1)?;
        self.divisors.get(place).copied()
    }

    /// Whether no larger one can work.
    pub fn is_settled(&self) -> bool {
        self.works >= self.fails
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(effective: usize, first: usize, probes: bool, threshold: usize) -> (Search, u32) {
        let mut search = Search::new(effective, first, probes).unwrap();
        let mut trials = 0;
        while let Some((batch, accumulation)) = search.next() {
            assert_eq!(batch * accumulation, effective);
            trials += 1;
            let result = match batch <= threshold {
                true => Result::Works,
                false => Result::OutOfMemory,
            };
            search.tried(batch, result);
        }
        (search, trials)
    }

    #[test]
    fn the_largest_is_found_in_a_logarithm_of_trials() {
        for effective in [1, 7, 32, 60, 64, 256, 720, 1024, 5040] {
            for threshold in [0, 1, 2, 3, 5, 16, 17, 100, 255, 720, 10_000] {
                let (probed, trials) = search(effective, effective, true, threshold);
                let expected = (1..=effective)
                    .filter(|one| effective % one == 0 && *one <= threshold)
                    .max();
                assert_eq!(probed.largest(), expected, "{effective} {threshold}");
                assert!(
                    trials <= probed.most_trials() + 1,
                    "{effective} {threshold}: {trials}"
                );
                let (plain, trials) = search(effective, effective, false, threshold);
                assert!(
                    trials <= plain.most_trials() + 1,
                    "{effective} {threshold}: {trials}"
                );
                match (expected, plain.largest()) {
                    (None, found) => assert_eq!(found, None),
                    (Some(best), Some(found)) => {
                        assert!(
                            found <= best && 4 * found > best,
                            "{effective} {threshold}: {found}"
                        );
                    }
                    (Some(_), None) => panic!("{effective} {threshold}"),
                }
            }
        }
    }

    /// Of a power of two, stepping down finds the largest without probing.
    #[test]
    fn powers_of_two_need_no_probes() {
        for threshold in 1..=64 {
            let (found, trials) = search(64, 64, false, threshold);
            assert_eq!(found.largest(), Some(1 << threshold.ilog2()));
            assert!(trials <= 7);
        }
    }

    #[test]
    fn only_divisors_can_begin() {
        assert_eq!(Search::new(64, 48, false), None);
        assert_eq!(Search::new(64, 0, false), None);
        assert_eq!(Search::new(0, 1, false), None);
    }
}
