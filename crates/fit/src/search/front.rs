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

/// Points that nothing beats in both memory and speed, from the smallest to the fastest, the
/// recommended one among them; those that only the card holds are above the budget.
pub(crate) fn front(
    explored: &mut Explored<'_>,
    recommended: &FitOutcome,
) -> Result<Vec<FitOutcome>, Halt> {
    let request = explored.request;
    let limit = request.memory_bytes.max(request.budget_bytes);
    let chosen = thinned(undominated(&explored.candidates, limit), FRONT - 1);
    explored.plan_all(&chosen)?;
    let mut front = vec![recommended.clone()];
    for candidate in chosen {
        let outcome = FitOutcome::new(&*explored.plan(candidate)?, request);
        // A plan may take more than its sketch said, and speeds that are the same to the search
        // may still differ, so a point is shown only where it is a step from each of the others.
        let is_step = |other: &FitOutcome| {
            let by_memory = outcome.total_bytes.cmp(&other.total_bytes);
            let by_speed = outcome
                .tokens_per_second
                .total_cmp(&other.tokens_per_second);
            by_memory.is_ne() && by_memory == by_speed
        };
        if outcome.total_bytes <= limit && front.iter().all(is_step) {
            front.push(outcome);
        }
    }
    front.sort_by_key(|outcome| outcome.total_bytes);
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
