//! What each stage of a curriculum takes with the settings that were found, and what it could have
//! by itself.

use cinch_config::{Bytes, Stage};
use cinch_fit::FitError;
use cinch_fit::search::{self, Fit, Request};
use cinch_plan::Breakdown;
use cinch_step::{StepPlan, StepTarget};
use comfy_table::Cell;
use serde::Serialize;

use crate::table::{self, right};

/// A stage with the settings of the run.
#[derive(Debug, Serialize)]
pub struct StageFit {
    pub name: String,
    pub n_positives: Option<u64>,
    pub n_negatives: Option<u64>,
    pub batch_size: usize,
    pub accumulation: usize,
    pub effective_batch: usize,
    /// Arena and overhead.
    pub total_bytes: u64,
    pub share_of_card: f64,
    pub breakdown: Breakdown,
    /// The best micro batch of the stage if it were trained alone.
    pub alone: Option<Alone>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Alone {
    pub batch_size: usize,
    pub accumulation: usize,
    pub total_bytes: u64,
}

/// Plans each stage with the settings of `fit`; with `details`, searches for each alone as well.
pub fn stages(
    stages: &[Stage],
    fit: &Fit,
    request: &Request<'_>,
    details: bool,
) -> Result<Vec<StageFit>, FitError> {
    let mut found: Vec<StageFit> = Vec::with_capacity(stages.len());
    for stage in stages {
        let same = |other: &&StageFit| other.n_negatives == stage.n_negatives;
        let alone = match (details, found.iter().find(same)) {
            (false, _) => None,
            (true, Some(known)) => known.alone.clone(),
            (true, None) => alone(stage, request)?,
        };
        let step = planned(stage, fit, request.machine)?;
        let batch = &step.config.batch;
        found.push(StageFit {
            name: stage.name.clone(),
            n_positives: stage.n_positives,
            n_negatives: stage.n_negatives,
            batch_size: batch.batch_size,
            accumulation: batch.accumulation,
            effective_batch: batch.effective_batch(),
            total_bytes: step.total_bytes(),
            share_of_card: step.total_bytes() as f64 / request.memory_bytes as f64,
            breakdown: step.breakdown(),
            alone,
        });
    }
    Ok(found)
}

fn planned(stage: &Stage, fit: &Fit, machine: StepTarget) -> Result<StepPlan, FitError> {
    let mut config = fit.config().clone();
    let all = fit.plan.training.num_recomputed == config.model.num_blocks();
    config.model = config
        .model
        .with_stages(stage.n_negatives.into_iter().collect());
    let blocks = match all {
        true => config.model.num_blocks(),
        false => fit
            .plan
            .training
            .num_recomputed
            .min(config.model.num_blocks()),
    };
    Ok(StepPlan::new(&config, machine, blocks)?)
}

fn alone(stage: &Stage, request: &Request<'_>) -> Result<Option<Alone>, FitError> {
    let mut config = request.config.clone();
    config.model = config
        .model
        .with_stages(stage.n_negatives.into_iter().collect());
    let own = Request {
        config: &config,
        ..request.clone()
    };
    match search::best(&own) {
        Err(FitError::DoesNotFit(_)) => Ok(None),
        found => {
            let plan = found?;
            Ok(Some(Alone {
                batch_size: plan.config.batch.batch_size,
                accumulation: plan.config.batch.accumulation,
                total_bytes: plan.total_bytes(),
            }))
        }
    }
}

/// A line for each stage; where each was looked at alone, its parts as well.
pub fn text(stages: &[StageFit]) -> String {
    let Some(first) = stages.first() else {
        return String::new();
    };
    let details = stages.iter().any(|stage| stage.alone.is_some());
    let mut heads = vec![
        "stage",
        "positives",
        "negatives",
        "batch",
        "takes",
        "of the card",
    ];
    heads.extend(details.then_some("batch alone"));
    let mut table = table::new(&heads);
    for stage in stages {
        let count = |count: Option<u64>| count.map_or_else(String::new, |count| count.to_string());
        let batch = [stage.batch_size, stage.accumulation, stage.effective_batch];
        let mut row = vec![
            Cell::new(&stage.name),
            right(count(stage.n_positives)),
            right(count(stage.n_negatives)),
            right(format!("{} × {} = {}", batch[0], batch[1], batch[2])),
            right(Bytes::new(stage.total_bytes)),
            right(format!("{:.0} %", 100.0 * stage.share_of_card)),
        ];
        if details {
            let alone = stage.alone.as_ref();
            let alone = alone.map(|one| format!("{} × {}", one.batch_size, one.accumulation));
            row.push(right(alone.unwrap_or_default()));
        }
        table.add_row(row);
    }
    table::settle(&mut table, &[1]);
    let mut text = format!("\n{table}\n");
    if details {
        let mut heads = vec!["stage"];
        heads.extend(first.breakdown.parts().into_iter().map(|(name, _)| name));
        let mut parts = table::new(&heads);
        for stage in stages {
            let mut row = vec![Cell::new(&stage.name)];
            row.extend(
                stage
                    .breakdown
                    .parts()
                    .into_iter()
                    .map(|(_, bytes)| right(Bytes::new(bytes))),
            );
            parts.add_row(row);
        }
        // The smallest can be spared.
        let spare = ["batch", "workspace", "overhead"];
        let spare: Vec<usize> = spare
            .iter()
            .filter_map(|name| heads.iter().position(|head| head == name))
            .collect();
        table::settle(&mut parts, &spare);
        text += &format!("{parts}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_heading_is_broken() {
        let breakdown = Breakdown {
            weights: 257 << 20,
            gradients: 55 << 20,
            activations: 16 << 30,
            batch: 3 << 20,
            workspace: 32 << 20,
            overhead: 650 << 20,
            ..Breakdown::default()
        };
        let stage = StageFit {
            name: "01_stage".to_owned(),
            n_positives: Some(32),
            n_negatives: Some(24),
            batch_size: 9,
            accumulation: 25,
            effective_batch: 225,
            total_bytes: breakdown.total(),
            share_of_card: 0.72,
            breakdown,
            alone: Some(Alone {
                batch_size: 9,
                accumulation: 25,
                total_bytes: breakdown.total(),
            }),
        };
        let text = text(&[stage]);
        for whole in [
            "│ stage      negatives   batch          takes       of the card   batch alone │",
            "│ stage      weights     gradients   optimizer   activations   overhead  │",
        ] {
            assert!(text.contains(whole), "{text}");
        }
    }
}
