//! `cinch plan`: what a configuration needs.

use cinch_fit::FitError;
use cinch_graph::Target;
use serde_json::json;

use super::{print, print_all, print_json, print_raw};
use crate::args::{Engine, PlanArguments};
use crate::progress::DataBar;
use crate::rows::Rows;
use crate::settings::{Asked, for_the_engine};
use crate::unfollowed::before_figures;
use crate::{budget, device, memory, picture, pytorch, table, voice, world};

pub fn run(arguments: &PlanArguments) -> anyhow::Result<()> {
    if let Some(path) = &arguments.questions.snapshot {
        let showing = pytorch::snapshot::Showing {
            batch: arguments.settings.value("vram.batch_size"),
            timeline: arguments.timeline,
            pictures: &arguments.picture,
            json: arguments.json,
        };
        return pytorch::snapshot::explain_file(path, &showing);
    }
    if let Some(answer) = pytorch::plan::questions(arguments) {
        return answer;
    }
    let subject = arguments.subject.as_deref();
    let asked = Asked::read(&arguments.settings, subject, arguments.engine)?;
    if asked.engine == Engine::Pytorch {
        return pytorch::plan::run(arguments, &asked);
    }
    for_the_engine(&arguments.settings, &asked.settings, &asked.config)?;
    pytorch::refuse_flags_of_pytorch(arguments.questions.given().first().copied())?;
    let Asked {
        mut settings,
        mut config,
        ..
    } = asked;
    let rows = Rows::settle(&mut settings, &mut config, &DataBar::default())?;
    let target = device::plan_target(
        arguments.device,
        &config,
        arguments.settings.plain.memory.names_a_gpu(),
    );
    let mut notes = settings.notes();
    if target == Target::Cpu {
        notes.extend(device::adapt_to_cpu(&mut config));
    }
    let memory_arguments = &arguments.settings.plain.memory;
    if let Some(most) = arguments.scaling {
        if !arguments.json {
            print_all(&voice::notes(&before_figures(&settings, &config)))?;
        }
        return world::scaling(&config, memory_arguments, target, most, arguments.json);
    }
    let step = match budget::plan(&settings, &config, memory_arguments, target)? {
        Err(FitError::DoesNotFit(answer)) => {
            let unfollowed = before_figures(&settings, &config);
            if !arguments.json {
                print_all(&voice::notes(&unfollowed))?;
                return Err(memory::refused(answer, &arguments.settings.plain.memory));
            }
            print_json(&json!({
                "model": config.model.name(),
                "fits": false,
                "budget_bytes": answer.budget_bytes,
                "needed_bytes": answer.needed_bytes,
                "breakdown": answer.breakdown,
                "consumers": answer.consumers,
                "changes": answer.changes,
                "notes": unfollowed,
            }))?;
            return Err(memory::refused(answer, &arguments.settings.plain.memory));
        }
        other => other?,
    };
    let unfollowed = before_figures(&settings, &step.config);
    for path in &arguments.picture {
        picture::write(&picture::of_step(&step, None), path)?;
    }
    let batch = &step.config.batch;
    let report = rows.report(step.report(target, arguments.timeline), batch);
    let world = world::report(&step, &settings, memory_arguments, target)?;
    notes.extend(device::stored_note(&step));
    notes.extend(rows.lines(batch));
    if arguments.json {
        notes.splice(0..0, unfollowed);
        return print_json(&world::Planned {
            report,
            world,
            notes,
        });
    }
    print_all(&voice::notes(&unfollowed))?;
    print(&table::plan(&report.plan, "budget"))?;
    if let Some(world) = &world {
        print(&world::text(world))?;
    }
    print_all(&voice::notes(&notes))?;
    if arguments.explain {
        let explained = settings.explain();
        let table = table::explain(&explained);
        print(&format!("\n{table}"))?;
    }
    if arguments.timeline {
        print(&picture::chart_of_step(&step))?;
    }
    if arguments.graph {
        print_raw(format!("\n{}", &*step.training).as_bytes())?;
    }
    Ok(())
}
