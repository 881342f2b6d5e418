//! What each of several ranks holds: ZeRO stages and FSDP.

use std::num::NonZeroU64;

use cinch_config::{Bytes, Sharding, TorchConfig};
use cinch_torch::model::Workload;
use cinch_torch::sharding::{Division, Scheme, Shares};
use comfy_table::Cell;
use serde_json::{Value, json};

use crate::table::{self, right, thousands};

/// How several GPUs divide a run, where there are several.
pub fn division(torch: &TorchConfig) -> Option<Division> {
    let scheme = match torch.sharding {
        Sharding::None | Sharding::Replicated => Scheme::Replicated,
        Sharding::Zero1 => Scheme::Zero1,
        Sharding::Zero2 => Scheme::Zero2,
        Sharding::Zero3 => Scheme::Zero3,
        Sharding::FullShard => Scheme::FullShard,
    };
    let divides = !matches!(torch.sharding, Sharding::None | Sharding::Replicated);
    let ranks = match torch.ranks.and_then(NonZeroU64::new) {
        Some(ranks) if ranks.get() > 1 || divides => ranks,
        // DeepSpeed and FSDP keep copies of their own on one GPU too.
        None if divides => NonZeroU64::MIN,
        _ => return None,
    };
    Some(Division { scheme, ranks })
}

/// The sizes on each of them.
pub fn shares_of(torch: &TorchConfig, workload: &Workload) -> anyhow::Result<Option<Shares>> {
    let shares = division(torch).map(|division| division.shares(workload));
    Ok(shares.transpose()?)
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
        "\n{} on {}, computed and not measured; without fragmentation and context:\n{table}\n",
        shares.scheme.name(),
        match shares.ranks.get() {
            1 => "one rank".to_owned(),
            many => format!("{many} ranks"),
        }
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
