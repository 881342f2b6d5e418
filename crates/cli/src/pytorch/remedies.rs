//! What could be done about a run: a table of remedies, and the best in a sentence.

use cinch_config::Bytes;
use cinch_config::remedy::Effect;
use cinch_torch::remedy::Remedy;
use comfy_table::Cell;
use serde_json::{Value, json};

use super::show::signed;
use crate::table::{self, right};

/// Remedies that a sentence names.
const MOST_NAMED: usize = 3;

pub fn table(remedies: &[Remedy]) -> String {
    let mut table = table::new(&[
        "remedy",
        "set",
        "allocated",
        "reserved",
        "device",
        "safe then",
    ]);
    for remedy in remedies {
        table.add_row([
            Cell::new(remedy.name),
            Cell::new(&remedy.change),
            right(signed(remedy.allocated)),
            right(signed(remedy.reserved)),
            right(signed(remedy.device)),
            right(Bytes::new(remedy.totals.safe)),
        ]);
    }
    table::settle(&mut table, &[2, 3]);
    let mut text = format!("\nwhat each remedy alone would do:\n{table}\n");
    for remedy in remedies {
        if let Some(note) = &remedy.note {
            text += &format!("  {}: {note}\n", remedy.name);
        }
    }
    text
}

pub fn as_json(remedies: &[Remedy]) -> Value {
    let one = |remedy: &Remedy| {
        json!({
            "name": remedy.name,
            "change": remedy.change,
            "allocated_change_bytes": remedy.allocated,
            "reserved_change_bytes": remedy.reserved,
            "device_change_bytes": remedy.device,
            "safe_bytes": remedy.totals.safe,
            "note": remedy.note,
        })
    };
    remedies.iter().map(one).collect()
}

/// The remedies that bring a run into its budget, those that cost least first; where none does
/// alone, those that save most. Another model is no remedy.
fn best(remedies: &[Remedy], budget_bytes: u64) -> Vec<&Remedy> {
    let saving = remedies
        .iter()
        .filter(|remedy| remedy.device < 0 && remedy.kind.effect() != Effect::ChangesModel);
    let saving: Vec<&Remedy> = saving.collect();
    let fits = |remedy: &&&Remedy| remedy.totals.safe <= budget_bytes;
    let mut best: Vec<&Remedy> = saving.iter().filter(fits).copied().collect();
    best.sort_by_key(|remedy| remedy.kind.rank());
    if best.is_empty() {
        best = saving;
    }
    best.truncate(MOST_NAMED);
    best
}

/// As a hint of an error message.
pub fn hint(remedies: &[Remedy], budget_bytes: u64) -> String {
    let best = best(remedies, budget_bytes);
    let enough = best
        .first()
        .is_some_and(|remedy| remedy.totals.safe <= budget_bytes);
    let named: Vec<String> = best
        .iter()
        .map(|remedy| {
            format!(
                "{} ({}): saves {}, leaves {}",
                remedy.name,
                remedy.change,
                Bytes::new(remedy.device.unsigned_abs()),
                Bytes::new(remedy.totals.safe)
            )
        })
        .collect();
    match (named.is_empty(), enough) {
        (true, _) => "no single remedy makes it smaller".to_owned(),
        (false, true) => format!("each of these fits: {}", named.join("; ")),
        (false, false) => format!(
            "no single remedy is enough; these save most: {}; `cinch fit --engine pytorch` \
             combines them",
            named.join("; ")
        ),
    }
}
