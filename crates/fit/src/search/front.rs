//! The ladder of guide 001 and the front of memory against speed.

use super::answer::{FitOutcome, Rung};
use super::explore::{Candidate, Explored, Halt, SAME_SPEED};

/// How much of a card each rung takes at the most: what the guide calls 60–70 %, 70–80 %,
/// 80–90 %, and all that the budget leaves.
const RUNGS: [(&str, f64); 4] = [
    ("safe", 0.7),
    ("balanced", 0.8),
    ("aggressive", 0.9),
    ("maximum", 1.0),
];

/// Points of a front that are shown.
const FRONT: usize = 8;

pub(crate) fn ladder(explored: &mut Explored<'_>) -> Result<Vec<Rung>, Halt> {
    let request = explored.request;
    let rung = |(name, share): (&'static str, f64)| {
        let budget_bytes = ((request.memory_bytes as f64 * share) as u64).min(request.budget_bytes);
        let best = explored.best_within(budget_bytes)?;
        Ok(Rung {
            name,
            share,
            budget_bytes,
            outcome: best.map(|(_, plan)| FitOutcome::new(&plan, request)),
        })
    };
    RUNGS.into_iter().map(rung).collect()
}

/// Points that nothing beats in both memory and speed, from the smallest to the fastest.
pub(crate) fn front(explored: &mut Explored<'_>) -> Result<Vec<FitOutcome>, Halt> {
    let request = explored.request;
    let limit = request.memory_bytes.max(request.budget_bytes);
    let chosen = thinned(undominated(&explored.candidates, limit), FRONT);
    explored.plan_all(&chosen)?;
    let mut front: Vec<FitOutcome> = Vec::with_capacity(chosen.len());
    for candidate in chosen {
        let outcome = FitOutcome::new(&*explored.plan(candidate)?, request);
        // A plan may take more than its sketch said.
        let goes_on = front.last().is_none_or(|last| {
            last.total_bytes < outcome.total_bytes
                && last.tokens_per_second < outcome.tokens_per_second
        });
        if goes_on && outcome.total_bytes <= limit {
            front.push(outcome);
        }
    }
    Ok(front)
}

/// By rising memory, each faster than the one before by more than a prediction can tell apart.
fn undominated(candidates: &[Candidate], limit: u64) -> Vec<Candidate> {
    let within = candidates.iter().copied().filter(|c| c.bytes <= limit);
    let mut within: Vec<Candidate> = within.collect();
    within.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.pace.total_cmp(&b.pace)));
    let mut front: Vec<Candidate> = Vec::new();
    for candidate in within {
        let bar = front.last().map_or(f64::INFINITY, |last| last.pace);
        if candidate.pace * (1.0 + SAME_SPEED) < bar {
            front.push(candidate);
        }
    }
    front
}

/// So many of them, spread evenly, the first and the last among them.
fn thinned(points: Vec<Candidate>, most: usize) -> Vec<Candidate> {
    if points.len() <= most {
        return points;
    }
    let last = points.len() - 1;
    (0..most).map(|i| points[i * last / (most - 1)]).collect()
}
