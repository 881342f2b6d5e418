//! How well an embedder finds the pairs that its run held out.

use std::collections::{BTreeMap, BTreeSet};

use cinch_config::Config;
use cinch_data::NoProgress;
use cinch_data::taxonomy::{PairRules, Taxonomy};

use crate::data::{load_tokenizer, read_taxonomy};
use crate::embed::{Embedder, shape_of};
use crate::error::TrainError;

/// How well held-out positives are found among all codes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Retrieval {
    /// Held-out pairs.
    pub pairs: usize,
    /// Codes that are looked through for each.
    pub codes: usize,
    /// The share of pairs whose positive is among the first k, by k.
    pub recall: BTreeMap<usize, f64>,
    /// The mean of 1 over the place at which a positive is found.
    pub mean_reciprocal_rank: f64,
}

/// Embeds a taxonomy and looks for the positives of the pairs that a run holds out. Positives of
/// other pairs of an anchor are left out: they are no mistakes.
pub fn evaluate_retrieval(
    config: &Config,
    embedder: &mut Embedder,
    first: &[usize],
) -> Result<Retrieval, TrainError> {
    let shape = shape_of(config)?;
    let tokenizer = load_tokenizer(config, &NoProgress)?.tokenizer;
    let taxonomy = read_taxonomy(shape, config, &tokenizer)?;
    let texts = taxonomy.entries().iter().map(|entry| &entry.channels[..]);
    let points = embedder.embed(texts, &mut |_| {})?;
    retrieval(config, &taxonomy, &points, embedder.width(), first)
}

fn retrieval(
    config: &Config,
    taxonomy: &Taxonomy,
    points: &[f32],
    width: usize,
    first: &[usize],
) -> Result<Retrieval, TrainError> {
    let rules = PairRules::plain(config.data.positives, 0);
    let (held_out, seed) = (config.data.val_split, config.training.seed);
    let (training, validation) = taxonomy.pairs(&rules, held_out, seed)?;
    if validation.is_empty() {
        return Err(TrainError::NothingHeldOut);
    }
    let all = training.pairs().iter().chain(validation.pairs());
    let known: BTreeSet<(usize, usize)> = all.map(|pair| (pair.anchor, pair.positive)).collect();
    let point = |index: usize| &points[index * width..(index + 1) * width];
    // The larger −⟨a, b⟩ = t_a·t_b − a·b, the farther.
    let product = |a: usize, b: usize| {
        let (a, b) = (point(a), point(b));
        let inner: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum();
        2.0 * f64::from(a[0]) * f64::from(b[0]) - inner
    };
    let codes = taxonomy.entries().len();
    let ranks: Vec<usize> = validation
        .pairs()
        .iter()
        .map(|pair| {
            let own = product(pair.anchor, pair.positive);
            let others = (0..codes).filter(|&other| {
                other != pair.anchor
                    && other != pair.positive
                    && !known.contains(&(pair.anchor, other))
            });
            1 + others
                .filter(|&other| product(pair.anchor, other) <= own)
                .count()
        })
        .collect();
    let count = ranks.len() as f64;
    let share = |k: usize| ranks.iter().filter(|&&rank| rank <= k).count() as f64 / count;
    Ok(Retrieval {
        pairs: ranks.len(),
        codes,
        recall: first.iter().map(|&k| (k, share(k))).collect(),
        mean_reciprocal_rank: ranks.iter().map(|&rank| 1.0 / rank as f64).sum::<f64>() / count,
    })
}
