//! Which token comes next: logits, and the settings that choose among them.

use crate::initialize::mix;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// Only the likeliest so many; 0 for all.
    pub top_k: usize,
    /// Only the likeliest that together have this probability.
    pub top_p: f64,
    /// Divides the odds of tokens that occurred already; 1 for none.
    pub repetition_penalty: f64,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 50,
            top_p: 0.95,
            repetition_penalty: 1.0,
            seed: 42,
        }
    }
}

/// The token that follows `seen`; `index` tells the draws of one text apart. The logits of what
/// was seen are changed by the penalty.
pub(super) fn next_token(logits: &mut [f32], seen: &[u32], sampling: &Sampling, index: u64) -> u32 {
    penalize(logits, seen, sampling.repetition_penalty);
    let draw = mix(sampling.seed ^ mix(index)) >> 11;
    let uniform = draw as f64 / (1_u64 << 53) as f64;
    choose(logits, sampling, uniform)
}

/// Divides positive and multiplies negative logits of tokens that were seen.
fn penalize(logits: &mut [f32], seen: &[u32], penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    let mut done = std::collections::HashSet::new();
    for &token in seen {
        if let Some(logit) = logits.get_mut(token as usize)
            && done.insert(token)
        {
            let factor = if *logit > 0.0 { 1.0 / penalty } else { penalty };
            *logit = (f64::from(*logit) * factor) as f32;
        }
    }
}

/// Tokens that are put in order at first.
const FIRST_SORTED: usize = 256;

/// The token that `uniform` in [0, 1) falls on among those that the settings leave.
fn choose(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |token: u32| logits[token as usize];
    let by_likelihood = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
    let Some(likeliest) = order.iter().copied().min_by(by_likelihood) else {
        return 0;
    };
    if sampling.temperature <= 0.0 {
        return likeliest;
    }
    if sampling.top_k > 0 && sampling.top_k < order.len() {
        order.select_nth_unstable_by(sampling.top_k, by_likelihood);
        order.truncate(sampling.top_k);
    }
    // Their sum has one order, however they were selected.
    order.sort_unstable();
    let top = f64::from(logit(likeliest));
    let weight = |token: u32| ((f64::from(logit(token)) - top) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut reached = 0.0;
    let (mut kept, mut sorted) = (0, 0);
    while kept < order.len() && (kept == 0 || reached < sampling.top_p * total) {
        if kept == sorted {
            // Mostly a few tokens have all the probability: only so many are put in order.
            let rest = &mut order[sorted..];
            let more = (sorted * 3).max(FIRST_SORTED).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable_by(more, by_likelihood);
            }
            rest[..more].sort_unstable_by(by_likelihood);
            sorted += more;
        }
        reached += weight(order[kept]);
        kept += 1;
    }
    let mut target = uniform * reached;
    for &token in &order[..kept] {
        target -= weight(token);
        if target < 0.0 {
            return token;
        }
    }
    order[kept - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: usize, top_p: f64) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            ..Sampling::default()
        }
    }

    #[test]
    fn the_settings_leave_what_they_should() {
        let logits = [1.0, 3.0, 2.0, -1.0];
        let drawn = |s: &Sampling| -> Vec<u32> {
            let draws = (0..1000).map(|i| choose(&logits, s, f64::from(i) / 1000.0));
            let mut drawn: Vec<u32> = draws.collect();
            drawn.sort_unstable();
            drawn.dedup();
            drawn
        };
        assert_eq!(drawn(&sampling(0.0, 0, 1.0)), [1]);
        assert_eq!(drawn(&sampling(1.0, 2, 1.0)), [1, 2]);
        assert_eq!(drawn(&sampling(1.0, 0, 1.0)), [0, 1, 2, 3]);
        assert_eq!(drawn(&sampling(1.0, 0, 0.8)), [1, 2]);
        assert_eq!(drawn(&sampling(1.0, 0, 0.0)), [1]);
    }

    /// A vocabulary in which many tokens are as likely as others: they are put in order piece by
    /// piece.
    #[test]
    fn a_flat_distribution_reaches_every_token() {
        let logits = vec![0.5; 3000];
        let drawn: std::collections::HashSet<u32> = (0..3000)
            .map(|i| {
                choose(
                    &logits,
                    &sampling(1.0, 0, 1.0),
                    (f64::from(i) + 0.5) / 3000.0,
                )
            })
            .collect();
        assert_eq!(drawn.len(), 3000);
        let half = |uniform| choose(&logits, &sampling(1.0, 0, 0.5), uniform);
        assert_eq!((half(0.0), half(0.9999)), (0, 1499));
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, (2.0_f32).ln()];
        let draws =
            (0..3000).map(|i| choose(&logits, &sampling(1.0, 0, 1.0), f64::from(i) / 3000.0));
        let ones: u32 = draws.sum();
        assert!((ones as i32 - 2000).abs() <= 1, "{ones}");
    }

    #[test]
    fn a_penalty_lowers_what_was_seen() {
        let mut logits = [2.0, -2.0, 1.0];
        penalize(&mut logits, &[0, 1, 0], 2.0);
        assert_eq!(logits, [1.0, -4.0, 1.0]);
    }
}
