//! The terms of a loss in a session: where they lie, what they weigh, and what they came to.

use std::sync::Arc;

use cinch_engine::Engine;
use cinch_graph::{Count, Graph};
use cinch_plan::{Placement, Plan};
use serde::Serialize;
use smallvec::SmallVec;

use cinch_ranks::RanksError;

use crate::batch::Batch;
use crate::error::TrainError;
use crate::ranks::Ranks;
use crate::session::placement;

/// What a term of the loss came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TermValue {
    #[serde(skip)]
    pub name: Arc<str>,
    /// The average without its weight.
    pub value: f64,
    pub weight: f64,
}

/// The terms of a step, in place: reading them allocates nothing for as many as models have.
pub type TermValues = SmallVec<[TermValue; 4]>;

/// The loss that the terms make up.
pub(crate) fn loss_of(terms: &[TermValue]) -> f64 {
    terms.iter().map(|term| term.weight * term.value).sum()
}

/// What evaluations have added up of each term.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluation {
    pub terms: Vec<TermSum>,
}

/// The sum of a term, and what it is to be divided by.
#[derive(Clone, Debug, PartialEq)]
pub struct TermSum {
    pub name: Arc<str>,
    pub sum: f64,
    pub count: usize,
    pub weight: f64,
}

impl Evaluation {
    /// Adds another evaluation by the same graph.
    pub fn add(&mut self, other: Self) {
        if self.terms.is_empty() {
            self.terms = other.terms;
            return;
        }
        for (term, more) in self.terms.iter_mut().zip(other.terms) {
            term.sum += more.sum;
            term.count += more.count;
        }
    }

    /// The evaluations of all ranks, in their order, by what one of them has of the same graph;
    /// None where any was told to stop. Each rank's sums travel as they are, so that adding them
    /// up is the same as on one rank.
    pub(crate) fn of_all(
        &self,
        own: Option<&Self>,
        ranks: &Ranks,
        told_to_stop: bool,
    ) -> Result<Option<Vec<Self>>, RanksError> {
        let share = ranks.share();
        // Of each term a sum and a count, and whether there is such a part.
        let width = 2 * self.terms.len() + 1;
        let mut numbers = vec![0.0; 1 + width * share.ranks];
        numbers[0] = f64::from(told_to_stop);
        if let Some(own) = own {
            let place = &mut numbers[1 + width * share.rank..][..width];
            place[0] = 1.0;
            for (place, term) in place[1..].chunks_exact_mut(2).zip(&own.terms) {
                place.copy_from_slice(&[term.sum, term.count as f64]);
            }
        }
        ranks.sum(&mut numbers)?;
        if numbers[0] > 0.0 {
            return Ok(None);
        }
        let there = numbers[1..]
            .chunks_exact(width)
            .filter(|part| part[0] > 0.0);
        let read = |part: &[f64]| {
            let terms = self.terms.iter().zip(part[1..].chunks_exact(2));
            let terms = terms.map(|(term, numbers)| TermSum {
                sum: numbers[0],
                count: numbers[1] as usize,
                ..term.clone()
            });
            Self {
                terms: terms.collect(),
            }
        };
        Ok(Some(there.map(read).collect()))
    }

    /// The average of each term.
    pub fn means(&self) -> TermValues {
        let mean = |term: &TermSum| TermValue {
            name: term.name.clone(),
            value: term.sum / term.count.max(1) as f64,
            weight: term.weight,
        };
        self.terms.iter().map(mean).collect()
    }

    /// The weighted sum of the averages.
    pub fn loss(&self) -> f64 {
        loss_of(&self.means())
    }
}

/// The terms of one graph.
pub(crate) struct Terms(Vec<Term>);

struct Term {
    name: Arc<str>,
    value: Placement,
    inverse_count: Placement,
    factor: Placement,
    count: TermCount,
    weight: f64,
}

impl Term {
    /// Writes what its op reads.
    fn fill(&self, engine: &mut Engine, inverse_count: f32) -> Result<(), TrainError> {
        engine.write(self.inverse_count, &[inverse_count])?;
        Ok(engine.write(self.factor, &[self.weight as f32])?)
    }
}

enum TermCount {
    /// The targets of a tensor of the batch.
    Targets(String),
    /// In every micro batch.
    Each(usize),
}

impl Terms {
    pub fn of(graph: &Graph, plan: &Plan) -> Self {
        let terms = graph.terms.iter().map(|term| Term {
            name: term.name.as_str().into(),
            value: placement(plan, term.value),
            inverse_count: placement(plan, term.inputs.inverse_count),
            factor: placement(plan, term.inputs.weight),
            count: match term.count {
                Count::Targets(id) => TermCount::Targets(graph.tensor(id).name.clone()),
                Count::Rows(rows) => TermCount::Each(rows),
                Count::Batch => TermCount::Each(1),
            },
            weight: term.weight,
        });
        Self(terms.collect())
    }

    /// Sets the weight from the next step on; whether there is such a term.
    pub fn weigh(&mut self, name: &str, weight: f64) -> bool {
        let term = self.0.iter_mut().find(|term| &*term.name == name);
        term.map(|term| term.weight = weight).is_some()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// What each term is averaged over in a batch of that many micro batches.
    pub fn counts(&self, batch: &Batch, micro_batches: usize) -> impl Iterator<Item = usize> {
        self.0.iter().map(move |term| match &term.count {
            TermCount::Targets(name) => batch.num_targets_in(name),
            TermCount::Each(count) => count * micro_batches,
        })
    }

    /// Makes the values averages over a batch with these counts, of all ranks. False where there
    /// is nothing to average. A term without anything that counts is zero.
    pub fn average(&self, engine: &mut Engine, counts: &[f64]) -> Result<bool, TrainError> {
        let mut any = false;
        for (term, &count) in self.0.iter().zip(counts) {
            any |= count > 0.0;
            let inverse = if count == 0.0 {
                0.0
            } else {
                1.0 / count as f32
            };
            term.fill(engine, inverse)?;
        }
        Ok(any)
    }

    /// Makes the values sums.
    pub fn add_up(&self, engine: &mut Engine) -> Result<(), TrainError> {
        for term in &self.0 {
            term.fill(engine, 1.0)?;
        }
        Ok(())
    }

    /// What the last run left.
    pub fn values(&self, engine: &Engine) -> Result<TermValues, TrainError> {
        let value = |term: &Term| {
            Ok(TermValue {
                name: term.name.clone(),
                value: f64::from(engine.scalar(term.value)?),
                weight: term.weight,
            })
        };
        self.0.iter().map(value).collect()
    }

    /// The sums that the last run over one micro batch left.
    pub fn sums(&self, engine: &Engine, batch: &Batch) -> Result<Evaluation, TrainError> {
        let values = self.values(engine)?.into_iter();
        let terms = values
            .zip(self.counts(batch, 1))
            .map(|(term, count)| TermSum {
                name: term.name,
                sum: term.value,
                count,
                weight: term.weight,
            });
        Ok(Evaluation {
            terms: terms.collect(),
        })
    }
}
