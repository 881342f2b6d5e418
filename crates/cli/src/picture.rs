//! Pictures of a plan, written to files whose ending says how.

use std::path::Path;

use cinch_config::Bytes;
use cinch_fit::search::FitReport;
use cinch_report::{
    FrontPicture, FrontPoint, Scene, StepPicture, TextChart, front, text_chart, timeline,
};
use cinch_step::StepPlan;

use crate::failure::usage;
use crate::{files, table};

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

/// The size of a chart in a terminal: with the lines around it, a screen of 24.
pub fn terminal_chart() -> TextChart {
    TextChart {
        width: usize::from(table::line_width()),
        height: 16,
        categories: true,
    }
}

/// Live memory over a step, in lines of text.
pub fn chart_of_step(step: &StepPlan) -> String {
    let picture = StepPicture {
        budget_bytes: step.config.batch.budget.map(Bytes::get),
        ..StepPicture::of_plan(&step.training, &step.plan)
    };
    let micro_batches = match step.config.batch.accumulation {
        1 => String::new(),
        times => format!("; forward and backward run {times} times, then the update"),
    };
    format!(
        "\nlive memory over {} nodes{micro_batches} (--json has each):\n{}\n",
        picture.moments.len(),
        text_chart(&picture, terminal_chart())
    )
}

/// Live memory over a step.
pub fn of_step(step: &StepPlan, capacity_bytes: Option<u64>) -> Scene {
    let config = &step.config;
    let report = step.report(step.plan.options.target, false);
    let mut picture = StepPicture::of_plan(&step.training, &step.plan);
    picture.title = format!(
        "{}: one step in {}",
        table::model_name(&report.model, report.size.as_deref()),
        Bytes::new(step.total_bytes())
    );
    picture.subtitle = table::settings_line(&report);
    picture.budget_bytes = config.batch.budget.map(Bytes::get);
    picture.capacity_bytes = capacity_bytes;
    picture.micro_batches = config.batch.accumulation as u64;
    timeline(&picture)
}

/// Memory against speed on a card, by the name that it has; `rates` names the card whose speed it
/// is, where that is another one.
pub fn of_front(report: &FitReport, card: &str, rates: Option<&str>) -> Scene {
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
        label: "recommended".to_owned(),
        bytes: recommended.total_bytes,
        rate: recommended.tokens_per_second,
        recommended: true,
    });
    front(&FrontPicture {
        title: format!(
            "{} on {card}: memory against speed",
            table::model_name(&report.model, report.size.as_deref()),
        ),
        subtitle: format!(
            "recommended: {}{}",
            recommended.settings.text(),
            rates.map_or_else(String::new, |name| format!("; rates of {name}"))
        ),
        unit: "tokens/s".to_owned(),
        budget_bytes: Some(report.budget_bytes),
        capacity_bytes: Some(report.memory_bytes),
        points,
    })
}
