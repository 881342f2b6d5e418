//! `cinch plan`: what a configuration needs.

use cinch_config::Bytes;
use cinch_fit::{FitError, StepPlan};
use cinch_graph::Target;
use serde_json::json;

use super::{print, print_json};
use crate::args::{Engine, PlanArguments};
use crate::{device, overhead, picture, pytorch, table};

pub fn run(arguments: &PlanArguments) -> anyhow::Result<()> {
    if let Some(path) = &arguments.questions.snapshot {
        let showing = pytorch::snapshot::Showing {
            batch: arguments.settings.batch_size.as_deref(),
            timeline: arguments.timeline,
            pictures: &arguments.picture,
            json: arguments.json,
        };
        return pytorch::snapshot::explain_file(path, &showing);
    }
    if arguments.engine == Engine::Pytorch {
        return pytorch::plan::run(arguments);
    }
    pytorch::refuse_flags_of_pytorch(&arguments.torch.given())?;
    pytorch::refuse_flags_of_pytorch(&arguments.questions.given())?;
    let settings = arguments.settings.settings()?;
    let mut config = settings.resolve()?;
    let target = device::plan_target(arguments.device, &config);
    let mut notes = settings.notes();
    if target == Target::Cpu {
        notes.extend(device::adapt_to_cpu(&mut config));
    }
    let step = match cinch_fit::plan(&config, overhead::machine(target)) {
        Err(FitError::DoesNotFit(answer)) if arguments.json => {
            print_json(&json!({
                "model": config.model.name(),
                "fits": false,
                "budget_bytes": answer.budget_bytes,
                "needed_bytes": answer.needed_bytes,
                "breakdown": answer.breakdown,
                "consumers": answer.consumers,
                "changes": answer.changes,
            }))?;
            return Err(FitError::DoesNotFit(answer).into());
        }
        other => other?,
    };
    for path in &arguments.picture {
        picture::write(&picture::of_step(&step, None), path)?;
    }
    let report = step.report(target, arguments.timeline);
    if arguments.json {
        return print_json(&report);
    }
    print(&table::plan(&report, "budget"))?;
    for note in notes {
        print(&format!("note: {note}"))?;
    }
    if arguments.explain {
        let explained = settings.explain();
        let table = table::explain(&explained, table::terminal_width());
        print(&format!("\n{table}"))?;
    }
    if arguments.timeline {
        print(&timeline(&step))?;
    }
    if arguments.graph {
        print(&format!("\n{}", &*step.training))?;
    }
    Ok(())
}

/// Live memory over the step, a bar a node.
fn timeline(step: &StepPlan) -> String {
    const WIDTH: u64 = 50;
    let mut text = String::from("\n");
    let peak = step.plan.peak_bytes.max(1);
    for moment in step.plan.moments(&step.training) {
        let bar = "█".repeat((moment.bytes * WIDTH / peak) as usize);
        text += &format!(
            "{:>10}  {bar:<50}  {:<9} {}\n",
            Bytes::new(moment.bytes).to_string(),
            moment.phase,
            moment.node
        );
    }
    text
}
