//! Anchors with their positives and negatives.
//!
//! A pair is an anchor with a code near it, its parent, its child or its sibling unless a stage
//! says otherwise; negatives of a pair are farther from the anchor than its positive is. Which
//! negatives a pair has is a function of the seed and of how often pairs were drawn before, so
//! that a run's place in its data is one number.

use super::Taxonomy;
use crate::error::DataError;
use crate::permutation::Permutation;
use crate::random::{Random, mix};

/// An anchor and its positive, by their places in the taxonomy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    pub anchor: usize,
    pub positive: usize,
}

/// Which pairs and negatives a stage draws. A list that is not given allows everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairRules {
    /// The stage in messages.
    pub name: String,
    /// Positives of an anchor at most, and negatives of each pair.
    pub positives: usize,
    pub negatives: usize,
    /// Digits of anchors.
    pub anchor_levels: Option<Vec<u64>>,
    pub positive: Near,
    pub negative: Near,
    /// By how much a negative's relation to the anchor, and its distance, are larger than the
    /// positive's.
    pub relation_margins: Option<Vec<u64>>,
    pub distance_margins: Option<Vec<u64>>,
}

/// Codes by how they stand to an anchor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Near {
    /// Digits.
    pub levels: Option<Vec<u64>>,
    /// Numbers of relations.
    pub relations: Option<Vec<u64>>,
    pub distances: Option<Vec<u64>>,
}

fn allows(list: Option<&Vec<u64>>, number: u64) -> bool {
    list.is_none_or(|list| list.contains(&number))
}

impl Near {
    fn has(&self, taxonomy: &Taxonomy, anchor: usize, other: usize) -> bool {
        let relation = taxonomy.relation(anchor, other);
        allows(self.levels.as_ref(), taxonomy.level(other))
            && allows(self.relations.as_ref(), relation.number())
            && allows(self.distances.as_ref(), relation.distance() as u64)
    }
}

impl PairRules {
    /// Parents, children and siblings as positives, whatever is farther as negatives.
    pub fn plain(positives: usize, negatives: usize) -> Self {
        Self {
            positives,
            negatives,
            ..Self::default()
        }
    }

    /// Whether nothing says which codes are positives.
    fn is_open(&self) -> bool {
        self.positive.relations.is_none() && self.positive.distances.is_none()
    }

    fn is_pair(&self, taxonomy: &Taxonomy, anchor: usize, other: usize) -> bool {
        let relation = taxonomy.relation(anchor, other).number();
        anchor != other
            && allows(self.anchor_levels.as_ref(), taxonomy.level(anchor))
            && self.positive.has(taxonomy, anchor, other)
            && (!self.is_open() || NEAREST.contains(&relation))
    }

    fn is_negative(&self, taxonomy: &Taxonomy, pair: Pair, other: usize) -> bool {
        let near = taxonomy.relation(pair.anchor, pair.positive);
        let far = taxonomy.relation(pair.anchor, other);
        let relations = far.number().checked_sub(near.number());
        let distances = far.distance().checked_sub(near.distance());
        other != pair.anchor
            && far.distance() > near.distance()
            && self.negative.has(taxonomy, pair.anchor, other)
            && relations.is_some_and(|margin| allows(self.relation_margins.as_ref(), margin))
            && distances.is_some_and(|margin| allows(self.distance_margins.as_ref(), margin as u64))
    }
}

/// The numbers of the relations that are positives where nothing else is said: parent or child,
/// and sibling.
const NEAREST: [u64; 2] = [1, 2];

/// The pairs of one purpose, training or validation.
#[derive(Debug, Clone)]
pub struct Pairs {
    pairs: Vec<Pair>,
    rules: PairRules,
}

impl Taxonomy {
    /// Digits of a code.
    pub fn level(&self, entry: usize) -> u64 {
        self.entries[entry].code.len() as u64
    }

    /// Codes that may be negatives of a pair.
    fn candidates(&self, rules: &PairRules, pair: Pair) -> Vec<usize> {
        let others = 0..self.entries.len();
        let farther = others.filter(|&other| rules.is_negative(self, pair, other));
        farther.collect()
    }

    /// Training and validation pairs: of each anchor at most so many positives, of which a share
    /// is held out. Every pair has at least as many possible negatives as are asked for. Whether a
    /// pair is held out depends on its codes and the seed alone, so that no stage trains on what
    /// another one holds out.
    pub fn pairs(
        &self,
        rules: &PairRules,
        held_out: f64,
        seed: u64,
    ) -> Result<(Pairs, Pairs), DataError> {
        let mut pairs = Vec::new();
        for anchor in 0..self.entries.len() {
            let others = 0..self.entries.len();
            let related = others.filter(|&other| rules.is_pair(self, anchor, other));
            let related: Vec<usize> = related.collect();
            let order = Permutation::new(related.len() as u64, mix(seed) ^ anchor as u64);
            let count = related.len().min(rules.positives) as u64;
            pairs.extend((0..count).map(|place| Pair {
                anchor,
                positive: related[order.apply(place) as usize],
            }));
        }
        for &pair in &pairs {
            let found = self.candidates(rules, pair).len();
            if found < rules.negatives {
                return Err(DataError::TooFewNegatives {
                    path: self.path.clone(),
                    stage: rules.name.clone(),
                    code: self.entries[pair.anchor].code.clone(),
                    asked: rules.negatives,
                    found,
                });
            }
        }
        if pairs.is_empty() {
            return Err(DataError::NoPairs {
                path: self.path.clone(),
                stage: rules.name.clone(),
            });
        }
        let (training, validation) = self.split(pairs, held_out, seed);
        let of = |pairs| Pairs {
            pairs,
            rules: rules.clone(),
        };
        Ok((of(training), of(validation)))
    }

    /// Pairs whose hash is below the share are held out; at least one is on either side.
    fn split(&self, pairs: Vec<Pair>, held_out: f64, seed: u64) -> (Vec<Pair>, Vec<Pair>) {
        if held_out <= 0.0 || pairs.len() < 2 {
            return (pairs, Vec::new());
        }
        // Both directions of a pair are on the same side.
        let hash = |pair: &Pair| {
            let low = pair.anchor.min(pair.positive) as u64;
            let high = pair.anchor.max(pair.positive) as u64;
            mix(seed ^ mix(low) ^ mix(mix(high)))
        };
        let limit = (held_out * u64::MAX as f64) as u64;
        let (mut validation, mut training): (Vec<Pair>, Vec<Pair>) =
            pairs.into_iter().partition(|pair| hash(pair) < limit);
        if validation.is_empty() {
            validation.extend(training.pop());
        }
        if training.is_empty() {
            training.extend(validation.pop());
        }
        (training, validation)
    }
}

impl Pairs {
    pub fn len(&self) -> u64 {
        self.pairs.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// How often all pairs were drawn before what is drawn `sample`-th.
    pub fn epoch_of(&self, sample: u64) -> u64 {
        sample / self.len().max(1)
    }

    /// The texts of what is drawn `sample`-th: anchor, positive, negatives. With a seed, each epoch
    /// has every pair once in an order of its own, and other negatives; without, all stays as it
    /// is, and what is beyond the end begins anew.
    pub fn draw(&self, taxonomy: &Taxonomy, sample: u64, seed: Option<u64>) -> Vec<usize> {
        let len = self.len().max(1);
        let (place, stream) = match seed {
            Some(seed) => {
                let (epoch, place) = (sample / len, sample % len);
                let order = Permutation::new(len, mix(seed) ^ epoch);
                (order.apply(place), mix(seed ^ mix(sample)))
            }
            None => (sample % len, sample % len),
        };
        let Some(&pair) = self.pairs.get(place as usize) else {
            return Vec::new();
        };
        let mut candidates = taxonomy.candidates(&self.rules, pair);
        let mut random = Random::new(stream, place);
        let mut texts = vec![pair.anchor, pair.positive];
        for _ in 0..self.rules.negatives.min(candidates.len()) {
            let chosen = random.below(candidates.len());
            texts.push(candidates.swap_remove(chosen));
        }
        texts
    }
}
