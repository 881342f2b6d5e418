//! When the weights themselves do not go onto the card: no batch and no activation is there yet.

use cinch_config::remedy::RemedyKind;

use super::{Case, alone};
use crate::failure::Fix;
use crate::words::Known;

pub fn fixes(case: &Case<'_>) -> Vec<Fix> {
    let is_told =
        |known| matches!(case.told.settings.get(&known), Some((value, _)) if value == "true");
    let is_of_weights = |kind: RemedyKind| {
        matches!(
            kind,
            RemedyKind::Bf16Weights | RemedyKind::Offload | RemedyKind::OffloadFrozen
        )
    };
    let mut fixes = match case.run {
        Some(run) => alone(case, run, is_of_weights),
        None => Vec::new(),
    };
    if fixes.is_empty() {
        fixes.push(Fix::new(
            "weights in two bytes each: without a type they may be loaded in four",
            "from_pretrained(…, dtype=torch.bfloat16)",
        ));
    }
    if !is_told(Known::FourBit) {
        fixes.push(Fix::new(
            "a frozen base in four bits, with adapters that are trained",
            "from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
        ));
    }
    fixes.push(Fix::new(
        "layers over all cards and host memory: enough to run a model, slow to train",
        "from_pretrained(…, device_map=\"auto\")",
    ));
    fixes.push(Fix::new(
        "with several ranks: each its own shard, and weights read by one of them",
        "fsdp_cpu_ram_efficient_loading: true",
    ));
    fixes
}
