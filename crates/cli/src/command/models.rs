//! `cinch models`: what can be trained.

use cinch_config::{Bytes, SIZES};
use cinch_graph::DType;
use cinch_model::{Build, Purpose, build};
use serde_json::json;

use super::{print, print_json};
use crate::args::ListArguments;
use crate::table;

pub fn run(arguments: &ListArguments) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for size in SIZES {
        let options = Build {
            batch: 1,
            seq_len: 1,
            compute: DType::F32,
            purpose: Purpose::Evaluate { loss_chunk: None },
        };
        let parameters = build(&size.config()?, options)?.num_parameters();
        rows.push((size, parameters));
    }
    if arguments.json {
        let list: Vec<serde_json::Value> = rows
            .iter()
            .map(|(size, parameters)| {
                json!({
                    "model": size.model.name(),
                    "size": size.name,
                    "aliases": size.aliases,
                    "parameters": parameters,
                    "d_model": size.d_model,
                    "n_layers": size.n_layers,
                    "n_heads": size.n_heads,
                    "max_seq_len": size.max_seq_len,
                    "vocab_size": size.vocab_size,
                })
            })
            .collect();
        return print_json(&list);
    }
    let mut table = table::new(&[
        "model",
        "size",
        "parameters",
        "fp32",
        "width",
        "layers",
        "heads",
        "positions",
    ]);
    for (size, parameters) in rows {
        table.add_row([
            size.model.name().into(),
            size.name.into(),
            table::right(table::thousands(parameters)),
            table::right(Bytes::new(parameters * DType::F32.size())),
            table::right(size.d_model),
            table::right(size.n_layers),
            table::right(size.n_heads.map_or_else(String::new, |n| n.to_string())),
            table::right(size.max_seq_len),
        ]);
    }
    print(&format!(
        "{table}\nplan one: cinch plan --model mamba --model-size small"
    ))
}
