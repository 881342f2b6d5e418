//! From which keys of a file the number of GPUs was taken: it multiplies the batch, and a file of
//! another program often has it only as the last factor of a product.

use crate::dialect::draft::{ReadKey, Reading};
use crate::dialect::{ACCUMULATION, BATCH, NODES, RANKS};
use crate::settings::{Assignment, Settings};
use crate::source::{Layer, Source};
use crate::value::Value;

impl Settings {
    /// Where a file's several GPUs are from; none where nobody said them, or not in a file.
    pub(crate) fn world_note(&self) -> Option<String> {
        // What was asked for, whatever number of processes runs it.
        let asked = self.effective_below(RANKS, Layer::Adjusted)?;
        let Assignment {
            value: Value::Unsigned(ranks @ 2..),
            source: Source::File { path, .. },
            ..
        } = asked
        else {
            return None;
        };
        let reading = self.readings().iter().rev().find(|one| one.path == *path)?;
        let by = key_of(reading, RANKS)?;
        let factors = [BATCH, ACCUMULATION].map(|setting| key_of(reading, setting));
        let number = |one: &ReadKey| one.value.parse::<u64>().ok();
        let said = |one: &ReadKey| format!("{} {}", one.key, one.value);
        let known: Vec<&ReadKey> = factors.into_iter().flatten().collect();
        let product = known
            .iter()
            .try_fold(*ranks, |product, one| product.checked_mul(number(one)?));
        let why = match product {
            Some(whole) if by.value != ranks.to_string() && number(by) == Some(whole) => {
                let known: Vec<String> = known.into_iter().map(said).collect();
                format!(": {} is {} × {ranks}", said(by), known.join(" × "))
            }
            _ => {
                // Some programs count the GPUs of each machine, some all of them.
                let of_each = by.value != ranks.to_string();
                let nodes = key_of(reading, NODES).filter(|_| of_each);
                let nodes = nodes.map_or_else(String::new, |nodes| format!(" and {}", said(nodes)));
                format!(", by {}{nodes}", said(by))
            }
        };
        Some(format!(
            "{ranks} GPUs{why} ({} line {})",
            cinch_files::shown(path),
            by.line
        ))
    }
}

/// The last key that a setting was read from.
fn key_of<'a>(reading: &'a Reading, setting: &str) -> Option<&'a ReadKey> {
    reading.read.iter().rev().find(|one| one.setting == setting)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn note(file: &str, text: &str, typed: Option<&str>) -> Option<String> {
        let mut settings = Settings::new();
        settings.load_text(Path::new(file), text).unwrap();
        if let Some(ranks) = typed {
            let source = Source::Flag("--world".to_owned());
            settings.set(RANKS, ranks, source).unwrap();
        }
        settings.world_note()
    }

    const DEEPSPEED: &str = r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}"#;

    #[test]
    fn a_last_factor_is_told_with_the_others() {
        assert_eq!(
            note("ds.json", DEEPSPEED, None).unwrap(),
            "4 GPUs: train_batch_size 64 is train_micro_batch_size_per_gpu 2 × \
             gradient_accumulation_steps 8 × 4 (ds.json line 1)"
        );
        // Another number was typed, or one GPU is all.
        assert_eq!(note("ds.json", DEEPSPEED, Some("2")), None);
        assert_eq!(note("ds.json", &DEEPSPEED.replace("64", "16"), None), None);
    }

    #[test]
    fn the_ranks_of_a_run_do_not_hide_it() {
        let mut settings = Settings::new();
        settings.load_text(Path::new("ds.json"), DEEPSPEED).unwrap();
        assert_eq!(settings.on_ranks(1).unwrap(), Some(4));
        assert!(settings.world_note().unwrap().starts_with("4 GPUs"));
    }

    #[test]
    fn a_key_that_says_it_is_named() {
        let accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n\
                          num_machines: 1\nnum_processes: 8\n";
        assert_eq!(
            note("accelerate.yaml", accelerate, None).unwrap(),
            "8 GPUs, by num_processes 8 (accelerate.yaml line 4)"
        );
        let lightning = "trainer:\n  devices: 4\n  num_nodes: 2\n  strategy: ddp\n  \
                         accumulate_grad_batches: 4\n  max_steps: 10\ndata:\n  batch_size: 2\n";
        assert_eq!(
            note("config.yaml", lightning, None).unwrap(),
            "8 GPUs, by trainer.devices 4 and trainer.num_nodes 2 (config.yaml line 2)"
        );
    }
}
