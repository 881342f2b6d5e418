//! Advice that goes round, with the reason why it does nothing here.

use cinch_config::remedy::{Effect, RemedyKind};

use super::{Case, is_worthwhile, shown};
use crate::failure::Cause;
use crate::frame::Phase;
use crate::message::{Event, Framework};

pub fn will_not_help(case: &Case<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    let numbers = case.numbers;
    match case.cause {
        Cause::Host => {
            lines.push("anything about the GPU (batch size, precision, checkpointing of activations): it is host memory that ran out".to_owned());
            return lines;
        }
        Cause::NotOom => {
            lines.push("a smaller batch or a larger card: memory did not run out".to_owned());
            return lines;
        }
        _ => {}
    }
    let is_torch = matches!(
        case.incident.message.framework,
        Framework::PyTorch | Framework::BitsAndBytes | Framework::Nccl
    );
    if !is_torch {
        return lines;
    }
    if case.incident.message.event == Event::Unified {
        lines.push("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0: it takes the limit away and gives no memory, so that the whole system runs short instead".to_owned());
        return lines;
    }
    if case.server().is_some() {
        lines.push("gradient checkpointing or accumulation: nothing is trained here".to_owned());
    } else if case.is_loading() {
        lines.push("a smaller batch or gradient checkpointing: weights are loaded before there is any batch".to_owned());
    }
    let idle = numbers.reserved_unallocated;
    if case.told.expandable_segments {
        lines.push("expandable_segments:True: the log shows that they are on".to_owned());
    } else if case.cause != Cause::Fragmentation
        && let Some(idle) = idle
    {
        lines.push(format!(
            "expandable_segments:True: only {} is reserved and idle",
            shown(idle)
        ));
    }
    lines.push(match idle {
        Some(idle) => format!(
            "torch.cuda.empty_cache(): the allocator did that itself before it gave up; {} was idle, and called in another process it frees nothing here",
            shown(idle)
        ),
        None => "torch.cuda.empty_cache(): the allocator did that itself before it gave up; called in another process it frees nothing here".to_owned(),
    });
    match case.cause {
        Cause::Leak => lines
            .push("a smaller batch or a larger card: the run fails later, not never".to_owned()),
        Cause::OtherProcess => {
            lines.push("settings of the allocator: the memory is not this process's".to_owned())
        }
        Cause::Capacity if numbers.other.is_none() && numbers.total.is_some() => {
            lines.push(
                "ending other processes or a restart: no other one is seen to hold this card"
                    .to_owned(),
            );
        }
        Cause::Spike
            if matches!(
                case.incident.phase,
                Some(
                    Phase::Evaluation
                        | Phase::EvaluationOutputs
                        | Phase::Saving
                        | Phase::Resuming
                        | Phase::Merging
                )
            ) =>
        {
            lines.push("gradient checkpointing or a smaller training batch: neither is at work at that moment".to_owned());
        }
        _ => {}
    }
    let is_in_step = !case.is_loading()
        && case.server().is_none()
        && !case.incident.phase.is_some_and(Phase::is_beside_the_step);
    if matches!(case.cause, Cause::Capacity | Cause::Spike) && is_in_step {
        lines.push("`del` of names in forward: what autograd saved for backward lives until backward has used it".to_owned());
    }
    if let Some(run) = case.run {
        let total = run.predicted;
        for priced in &run.priced {
            let is_said = matches!(
                priced.kind,
                RemedyKind::ExpandableSegments
                    | RemedyKind::SplitLimit
                    | RemedyKind::EmptyCache
                    | RemedyKind::DeleteNames
            );
            if is_said || is_worthwhile(priced, run) || priced.kind.effect() == Effect::ChangesModel
            {
                continue;
            }
            let name = priced.kind.declaration().name;
            lines.push(match priced.saves {
                saves if saves > 0 => format!(
                    "{name}: saves {} of {} here",
                    shown(saves.unsigned_abs()),
                    shown(total)
                ),
                0 => format!("{name}: saves nothing here"),
                saves => format!("{name}: takes {} more here", shown(saves.unsigned_abs())),
            });
        }
    }
    lines
}
