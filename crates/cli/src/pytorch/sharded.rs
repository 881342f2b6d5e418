//! What each of several ranks holds: ZeRO stages and FSDP.

use std::num::NonZeroU64;

use cinch_config::Bytes;
use cinch_torch::model::Workload;
use cinch_torch::sharding::{Scheme, Shares, shares};
use comfy_table::Cell;
use serde_json::{Value, json};

use crate::args::TorchArguments;
use crate::failure::usage;
use crate::table::{self, right, thousands};

/// The sizes that the flags ask for, if they ask for any.
pub fn shares_of(torch: &TorchArguments, workload: &Workload) -> anyhow::Result<Option<Shares>> {
    let Some(ranks) = torch.ranks.and_then(NonZeroU64::new) else {
        return Ok(None);
    };
    let scheme = match (torch.zero, torch.fsdp) {
        (Some(1), _) => Scheme::Zero1,
        (Some(2), _) => Scheme::Zero2,
        (Some(_), _) => Scheme::Zero3,
        (None, true) => Scheme::FullShard,
        (None, false) => {
            return Err(usage(
                "--ranks says among how many GPUs states are divided, but not how\n\
                 hint: add --zero 1, --zero 2, --zero 3 or --fsdp",
            ));
        }
    };
    let all = shares(workload, ranks)?;
    Ok(all.into_iter().find(|shares| shares.scheme == scheme))
}

fn parts(shares: &Shares) -> [(&'static str, u64); 8] {
    [
        ("parameters", shares.parameters),
        ("gradients", shares.gradients),
        ("optimizer", shares.optimizer),
        ("gathered", shares.gathered),
        ("buckets", shares.buckets),
        ("activations", shares.activations),
        ("step", shares.step),
        ("total", shares.total),
    ]
}

pub fn text(shares: &Shares) -> String {
    let mut table = table::new(&["on each rank", "size", "bytes"]);
    for (name, bytes) in parts(shares) {
        let name = match name {
            "optimizer" => "optimizer states",
            "gathered" => "parameters that are whole for a while",
            "buckets" => "gradients on their way",
            "step" => "temporaries of the optimizer, once activations are gone",
            "total" => "what exists at once",
            other => other,
        };
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    }
    format!(
        "\n{} on {} ranks, computed and not measured; without fragmentation and context:\n{table}\n",
        shares.scheme.name(),
        shares.ranks
    )
}

pub fn as_json(shares: &Shares) -> Value {
    let mut sizes = serde_json::Map::new();
    sizes.insert("scheme".to_owned(), json!(shares.scheme.name()));
    sizes.insert("ranks".to_owned(), json!(shares.ranks.get()));
    sizes.insert("measured".to_owned(), json!(false));
    for (name, bytes) in parts(shares) {
        sizes.insert(format!("{name}_bytes"), json!(bytes));
    }
    Value::Object(sizes)
}
