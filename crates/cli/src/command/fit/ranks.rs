//! `cinch fit --max-ranks N`: how many GPUs, each number with its best settings.

use cinch_config::{Bytes, Config, Settings};
use cinch_fit::search::{self, FitReport, FitSettings, RankChoices, Request, SettingValue};
use cinch_graph::Target;
use comfy_table::Cell;

use crate::args::FitArguments;
use crate::failure::usage;
use crate::table::{self, right, scaled};
use crate::world;

const RANKS: &str = "world.ranks";
const NODES: &str = "world.nodes";

/// The numbers of ranks that were asked for, each searched; and the configuration on the fastest
/// of them.
pub fn choose(
    arguments: &FitArguments,
    settings: &Settings,
    request: &Request<'_>,
) -> anyhow::Result<Option<(RankChoices, Config)>> {
    let Some(most) = arguments.max_ranks else {
        return Ok(None);
    };
    if request.machine.target == Target::Cpu {
        return Err(usage(
            "--max-ranks counts GPUs, and this is for the CPU, whose memory and cores ranks would \
             share\nhint: name a card with --gpu \"H100 SXM5\", or say --world N",
        ));
    }
    if request.fixed.contains(&RANKS) {
        let stated = settings.explain().into_iter().find(|one| one.key == RANKS);
        let stated = stated.map_or_else(|| RANKS.to_owned(), |one| one.source.to_string());
        return Err(usage(format!(
            "--max-ranks looks for a number of GPUs, and {stated} says one\n\
             hint: leave one of them out"
        )));
    }
    let choices = search::by_ranks(request, most)?;
    let ranks = choices.fastest.unwrap_or(1);
    let mut config = search::on_ranks(request.config, ranks);
    // Each rank's share, as the search cuts it: the global batch is the one that was asked for.
    config.batch.batch_size = 1;
    config.batch.accumulation = choices.effective_batch / ranks;
    Ok(Some((choices, config)))
}

/// Has the answer say the number of ranks that was chosen.
pub fn add_values(report: &mut FitReport, config: &Config) {
    let world = &config.batch.world;
    for (key, number) in [(RANKS, world.ranks), (NODES, world.nodes)] {
        report.values.push(SettingValue {
            key,
            value: Some(number.to_string()),
        });
    }
}

/// What is chosen for a number of ranks, in a few words.
fn cut(settings: &FitSettings) -> String {
    let mut text = format!("{} × {}", settings.batch_size, settings.accumulation);
    if settings.ranks > 1 {
        text += match settings.shard {
            "none" => ", replicas",
            "optimizer" => ", zero1",
            "gradients" => ", zero2",
            _ => ", zero3",
        };
    }
    let recomputed = settings.checkpointing;
    if recomputed.blocks > 0 {
        text += &format!(", {} of {} again", recomputed.blocks, recomputed.of);
    }
    if settings.offload {
        text += ", states on the host";
    }
    text
}

/// A row for each number.
pub fn text(choices: &RankChoices) -> String {
    let mut table = table::new(&[
        "GPUs",
        "each takes",
        "step",
        "tokens/s",
        "eff.",
        "micro batch",
    ]);
    for row in &choices.rows {
        let mut cells = vec![right(world::number_of_gpus(row.ranks, row.nodes))];
        match &row.outcome {
            Some(outcome) => cells.extend([
                right(Bytes::new(outcome.total_bytes)),
                right(super::show::seconds(outcome.step_seconds)),
                right(scaled(outcome.tokens_per_second).trim_end()),
                right(format!("{:.1} %", 100.0 * row.efficiency.unwrap_or(1.0))),
                Cell::new(cut(&outcome.settings)),
            ]),
            None => {
                let needed = row.needed_bytes.map(|bytes| Bytes::new(bytes).to_string());
                let needed = format!("does not fit: {}", needed.unwrap_or_default());
                cells.extend(["", "", "", ""].map(Cell::new));
                cells.push(Cell::new(needed));
            }
        }
        table.add_row(cells);
    }
    let mut text = format!(
        "\nthe best of each number of GPUs, {} a step:\n{table}\n",
        table::counted(choices.effective_batch as u64, "sequence")
    );
    text += &match (choices.fewest, choices.fastest) {
        (Some(fewest), Some(fastest)) if fewest == fastest => {
            format!("{fewest} is the fewest that fits, and the fastest\n")
        }
        (Some(fewest), Some(fastest)) => {
            format!("{fewest} is the fewest that fits, {fastest} the fastest\n")
        }
        _ => "nothing fits on any of them\n".to_owned(),
    };
    text += "eff. is the share of a step in which none waits for others; numbers that do not divide \
             the sequences of a step are left out\n";
    for refused in &choices.refused {
        text += &table::note(&format!(
            "{} is left out: {}",
            refused.ranks, refused.reason
        ));
        text.push('\n');
    }
    text
}
