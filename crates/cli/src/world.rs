//! Several ranks, for people and as data: what `cinch plan` says of them.

use cinch_config::{Bytes, Config, Settings};
use cinch_device::Card;
use cinch_fit::world::{ScalingRow, WorldReport, WorldSpeed, fewest_ranks};
use cinch_graph::Target;
use cinch_step::StepPlan;
use comfy_table::Cell;
use serde::Serialize;
use serde_json::json;

use crate::args::MemoryArguments;
use crate::command::{print, print_json};
use crate::failure::usage;
use crate::rows::Reported;
use crate::table::{self, counted, right};
use crate::{budget, overhead};

/// A plan, and what several ranks are to each other.
#[derive(Serialize)]
pub struct Planned {
    #[serde(flatten)]
    pub report: Reported,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<WorldReport>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The card with the links that the settings say.
pub fn joined(card: Card, config: &Config) -> anyhow::Result<Card> {
    let world = &config.batch.world;
    let fabric = card
        .fabric
        .with(world.link.as_deref(), world.network.as_deref())?;
    Ok(Card { fabric, ..card })
}

/// What there is to say of a plan for several ranks, where it is one.
pub fn report(
    step: &StepPlan,
    settings: &Settings,
    memory: &MemoryArguments,
    target: Target,
) -> anyhow::Result<Option<WorldReport>> {
    let config = &step.config;
    if config.batch.world.is_alone() {
        return Ok(None);
    }
    let budget = memory.budget()?;
    let card = match &budget {
        Some(budget) => Some(joined(budget::card(budget, target), config)?),
        None => None,
    };
    let mut report = WorldReport::new(step, card.as_ref().map(|card| (card, false)));
    if let Some(budget) = budget {
        let keeps = settings.is_explicit("world.shard");
        let machine = overhead::machine(target);
        report.fewest_ranks = fewest_ranks(config, machine, budget.bytes, keeps)?;
    }
    Ok(Some(report))
}

/// The same in sentences.
pub fn text(report: &WorldReport) -> String {
    let mut text = format!(
        "{} on {}, each with this plan\n",
        counted(report.ranks as u64, "rank"),
        counted(report.nodes as u64, "machine"),
    );
    if let Some(speed) = &report.speed {
        text += &speed_text(speed, report.nodes);
    }
    match report.fewest_ranks {
        Some(fewest) => {
            text += &format!(
                "fewest cards that do: {}{}, {} on each, one sequence at a time\n",
                fewest.ranks,
                match fewest.shard {
                    "none" => String::new(),
                    part => format!(" with {part} cut"),
                },
                Bytes::new(fewest.bytes_per_rank)
            );
        }
        // A memory was named, and no number of such cards is enough.
        None if report.speed.is_some() => {
            text += "no number of these cards holds a step, even with one sequence at a time\n";
        }
        None => {}
    }
    text
}

fn speed_text(speed: &WorldSpeed, nodes: usize) -> String {
    let links = match nodes {
        1 => speed.link.to_owned(),
        _ => format!("{} and {}", speed.link, speed.network),
    };
    format!(
        "predicted on {} by {links}: {} a step, {} tokens/s, {} on each; {} of it wait for the \
         network ({} sent by each rank){}\n",
        speed.card,
        seconds(speed.step_seconds),
        table::thousands(speed.tokens_per_second as u64),
        table::thousands(speed.tokens_per_second_per_rank as u64),
        seconds(speed.exposed_seconds),
        Bytes::new(speed.sent_bytes),
        match speed.hidden_seconds > 0.0 {
            true => format!(
                "; computing hides another {}",
                seconds(speed.hidden_seconds)
            ),
            false => String::new(),
        }
    )
}

fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1e3 * s),
    }
}

/// `cinch plan --scaling N`.
pub fn scaling(
    config: &Config,
    memory: &MemoryArguments,
    target: Target,
    most: usize,
    as_json: bool,
) -> anyhow::Result<()> {
    let Some(budget) = memory.budget()? else {
        return Err(usage(
            "--scaling predicts times, and no card is named\nhint: --gpu \"H100 SXM5\"",
        ));
    };
    let card = joined(budget::card(&budget, target), config)?;
    let machine = overhead::machine(target);
    let rows = cinch_fit::world::scaling(config, machine, &card, false, most)?;
    if as_json {
        let shard = config.batch.world.shard.name();
        return print_json(&json!({
            "card": card.name,
            "shard": shard,
            "scaling": rows,
        }));
    }
    print(&scaling_table(&rows))
}

/// "16 on 2": GPUs, and machines where there are several.
pub fn number_of_gpus(ranks: usize, nodes: usize) -> String {
    match nodes {
        0 | 1 => ranks.to_string(),
        nodes => format!("{ranks} on {nodes}"),
    }
}

fn scaling_table(rows: &[ScalingRow]) -> String {
    let mut table = table::new(&[
        "GPUs",
        "memory",
        "step",
        "tokens/s",
        "eff.",
        "waits for",
        "hidden",
    ]);
    for row in rows {
        let mark = match row.fits {
            Some(false) => "!",
            _ => "",
        };
        table.add_row([
            right(number_of_gpus(row.ranks, row.nodes)),
            right(format!("{mark}{}", Bytes::new(row.bytes_per_rank))),
            right(seconds(row.speed.step_seconds)),
            right(table::thousands(
                row.speed.tokens_per_second_per_rank as u64,
            )),
            right(format!("{:.1} %", 100.0 * row.speed.efficiency)),
            Cell::new(row.waits_for),
            right(seconds(row.speed.hidden_seconds)),
        ]);
    }
    let mut text = format!(
        "{table}\nmemory and tokens/s are of each GPU; eff. is the share of a step in which none \
         waits for others, hidden the time of messages that run beside computing\n"
    );
    if rows.iter().any(|row| row.fits == Some(false)) {
        text += "!: does not fit the card\n";
    }
    text
}
