//! Pictures of a plan, written to files whose ending says how.

use std::path::Path;

use cinch_config::Bytes;
use cinch_fit::search::{FitReport, FitSettings};
use cinch_report::{FrontPicture, FrontPoint, Scene, StepPicture, front, timeline};
use cinch_step::StepPlan;

use crate::failure::usage;
use crate::files;

/// Pixels for each unit of the picture.
const SCALE: f64 = 2.0;

/// Draws a scene into a file.
pub fn write(scene: &Scene, path: &Path) -> anyhow::Result<()> {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    let bytes = match ending.as_deref().and_then(|ending| ending.to_str()) {
        Some("svg") => scene.to_svg().into_bytes(),
        Some("png") => scene.to_png(SCALE)?,
        _ => {
            return Err(usage(format!(
                "{} is no picture that can be drawn\nhint: end it in .svg or .png",
                path.display()
            )));
        }
    };
    files::replace(path, &bytes)
}

/// Live memory over a step.
pub fn of_step(step: &StepPlan, capacity_bytes: Option<u64>) -> Scene {
    let config = &step.config;
    let settings = FitSettings::new(config, step.training.num_recomputed);
    let mut picture = StepPicture::of_plan(&step.training, &step.plan);
    picture.title = format!(
        "{} {}: one step in {}",
        config.model.name(),
        config.model.size_name().unwrap_or("(custom)"),
        Bytes::new(step.total_bytes())
    );
    picture.subtitle = settings.text();
    picture.budget_bytes = config.batch.budget.map(Bytes::get);
    picture.capacity_bytes = capacity_bytes;
    picture.micro_batches = config.batch.accumulation as u64;
    timeline(&picture)
}

/// Memory against speed.
pub fn of_front(report: &FitReport) -> Scene {
    let recommended = &report.recommended;
    let mut points: Vec<FrontPoint> = report
        .front
        .iter()
        .filter(|outcome| outcome.settings != recommended.settings)
        .map(|outcome| FrontPoint {
            label: String::new(),
            bytes: outcome.total_bytes,
            rate: outcome.tokens_per_second,
            recommended: false,
        })
        .collect();
    for rung in &report.ladder {
        let Some(outcome) = &rung.outcome else {
            continue;
        };
        if outcome.settings == recommended.settings {
            continue;
        }
        let point = points
            .iter_mut()
            .find(|point| point.bytes == outcome.total_bytes && point.label.is_empty());
        if let Some(point) = point {
            point.label = rung.name.to_owned();
        }
    }
    points.push(FrontPoint {
        label: recommended.settings.text(),
        bytes: recommended.total_bytes,
        rate: recommended.tokens_per_second,
        recommended: true,
    });
    front(&FrontPicture {
        title: format!(
            "{} {} on {}: memory against speed",
            report.model,
            report.size.as_deref().unwrap_or("(custom)"),
            report.card
        ),
        subtitle: format!(
            "effective batch {}, {} tokens, {}",
            recommended.settings.effective_batch,
            recommended.settings.seq_len,
            recommended.settings.precision
        ),
        unit: "tokens/s".to_owned(),
        budget_bytes: Some(report.budget_bytes),
        capacity_bytes: Some(report.memory_bytes),
        points,
    })
}
