//! `cinch plan --engine pytorch --guides`: what five guides say beside what is computed.

use cinch_torch::claim::{GuideClaim, claims};
use serde_json::{Value, json};

use crate::command::{print, print_json};
use crate::table;

pub fn run(as_json: bool) -> anyhow::Result<()> {
    let claims = claims()?;
    match as_json {
        true => print_json(&claims.iter().map(json_of).collect::<Vec<_>>()),
        false => print(&text(&claims)),
    }
}

fn json_of(claim: &GuideClaim) -> Value {
    json!({
        "guide": claim.guide,
        "about": claim.quote,
        "claimed": claim.claimed,
        "computed": claim.computed,
        "computed_bytes": claim.computed_bytes,
        "verdict": claim.verdict,
    })
}

fn text(claims: &[GuideClaim]) -> String {
    let mut table = table::new(&["guide", "about", "it says", "computed", "which makes it"]);
    for claim in claims {
        table.add_row([
            &claim.guide,
            &claim.quote,
            &claim.claimed,
            &claim.computed,
            &claim.verdict,
        ]);
    }
    table.to_string()
}
