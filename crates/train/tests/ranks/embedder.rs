//! The text embedder on ranks: pairs are dealt, masks follow from places in the effective batch,
//! experts are kept in use over what all ranks run at a time, and all of them leave out the same
//! negatives. So several ranks equal one whose micro batch has the rows of all of theirs.

use std::fs;
use std::path::Path;

use cinch_config::{Config, Settings, Source};
use cinch_data::synth::{self, TaxonomyShape};
use cinch_train::checkpoint::{self, Store};
use cinch_train::{Ending, Resume};

use crate::{LEVELS, each, recorded, run_of};

/// Rows of a step, which run at a time on however many ranks there are.
const ROWS: usize = 8;

/// Steps that reach the epoch from which on clusters are found.
const STEPS: &str = "12";

fn config(folder: &Path, name: &str, ranks: usize, level: &str, own: &[(&str, &str)]) -> Config {
    let codes = folder.join("codes.jsonl");
    if !codes.exists() {
        let shape = TaxonomyShape {
            sectors: 5,
            children: 2,
            digits: 3,
        };
        fs::write(&codes, synth::taxonomy(shape, 3)).unwrap();
    }
    let (rows, ranks) = ((ROWS / ranks).to_string(), ranks.to_string());
    let shared = [
        ("model.type", "naics"),
        ("model.vocab_size", "257"),
        ("model.max_seq_len", "16"),
        ("model.d_model", "16"),
        ("model.d_ffn", "24"),
        ("model.n_layers", "1"),
        ("model.n_heads", "2"),
        ("model.adapter_rank", "2"),
        ("model.d_expert", "16"),
        ("model.title_length", "12"),
        ("model.negatives", "3"),
        // Texts are encoded in chunks, the last of which is shorter.
        ("model.text_chunk", "2"),
        ("model.balance_weight", "0.5"),
        ("vram.batch_size", &rows),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "16"),
        ("world.ranks", &ranks),
        ("world.shard", level),
        ("training.learning_rate", "3e-3"),
        ("training.warmup_steps", "2"),
        ("training.logging_steps", "1"),
        ("training.eval_interval", "0"),
        ("training.save_interval", "4"),
        ("training.save_total_limit", "0"),
        ("training.max_steps", STEPS),
        ("data.val_split", "0.2"),
        ("data.positives", "1"),
        ("data.cluster_epoch", "1"),
        ("data.clusters", "4"),
    ];
    let mut settings = Settings::new();
    let source = || Source::Flag("test".to_owned());
    for (key, value) in shared.iter().chain(own) {
        settings.set(key, value, source()).unwrap();
    }
    settings.set_path("data.source", &codes, source()).unwrap();
    let run = folder.join(name);
    settings
        .set_path("output.output_dir", &run, source())
        .unwrap();
    settings.resolve().unwrap()
}

/// Trains on as many ranks as the settings say.
fn trained(config: &Config, resume: &Resume) {
    let ended = match config.batch.world.ranks {
        1 => vec![run_of(config, resume, None).unwrap()],
        ranks => each(ranks, |_, world| {
            run_of(config, resume, Some(world)).unwrap()
        }),
    };
    let steps = config.training.max_steps;
    assert!(
        ended
            .iter()
            .all(|ended| *ended == (steps, Ending::Finished))
    );
}

/// The weights of a checkpoint, by name.
fn saved(config: &Config, step: u64) -> Vec<(String, Vec<f32>)> {
    let path = Store::open(&config.output.output_dir)
        .unwrap()
        .path_of(step);
    let files = checkpoint::load(&path).unwrap().model;
    let read = |tensor: &cinch_weights::Tensor| {
        let mut values = vec![0.0; tensor.num_elements()];
        let rows = 0..tensor.rows();
        files.read_f32(&tensor.name, rows, &mut values).unwrap();
        (tensor.name.clone(), values)
    };
    let mut weights: Vec<_> = files.tensors().iter().map(read).collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    weights
}

/// Losses to 3e-5, as ranks add in another order; weights to a share of what the steps may move
/// them, as Adam moves one whose gradient is next to nothing by as much as any other.
fn assert_alike(found: &Config, wanted: &Config, what: &str) {
    let [losses, expected] = [found, wanted].map(|config| recorded(&config.output.output_dir));
    assert_eq!(losses.len(), expected.len(), "{what}");
    for (a, b) in losses.iter().zip(&expected) {
        assert!(
            (a - b).abs() < 3e-5 * b.abs(),
            "{what}: {losses:?}\n{expected:?}"
        );
    }
    let steps = wanted.training.max_steps;
    let (weights, expected) = (saved(found, steps), saved(wanted, steps));
    assert_eq!(weights.len(), expected.len(), "{what}");
    for ((name, a), (_, b)) in weights.iter().zip(&expected) {
        let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        let apart = apart.fold(0.0_f32, f32::max);
        assert!(apart < 2e-3, "{what}: {name} is off by {apart}");
    }
}

#[test]
fn two_and_four_ranks_are_one_big_batch_at_every_level() {
    let folder = tempfile::tempdir().unwrap();
    let alone = config(folder.path(), "alone", 1, "none", &[]);
    trained(&alone, &Resume::Fresh);
    for ranks in [2, 4] {
        for level in LEVELS {
            let name = format!("{ranks}-{level}");
            let together = config(folder.path(), &name, ranks, level, &[]);
            trained(&together, &Resume::Fresh);
            assert_alike(&together, &alone, &name);
        }
    }
}

/// The balance of experts is what rows of different ranks meet in, and it is felt.
#[test]
fn cut_by_accumulation_experts_are_balanced_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let alone = config(folder.path(), "alone", 1, "none", &[]);
    trained(&alone, &Resume::Fresh);
    let cut = [
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "2"),
    ];
    let cut = config(folder.path(), "cut", 1, "none", &cut);
    trained(&cut, &Resume::Fresh);
    let [one, other] = [&alone, &cut].map(|config| recorded(&config.output.output_dir));
    let apart = |step: usize| (one[step] - other[step]).abs() / one[step];
    // The weight of the term is half. The contrast of the first step is the same, also where there
    // are as many anchors at a time as each is compared with texts, here four.
    assert!((1e-5..2e-2).contains(&apart(0)), "{one:?}\n{other:?}");
}

#[test]
fn a_run_goes_on_at_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let alone = config(folder.path(), "alone", 1, "none", &[]);
    trained(&alone, &Resume::Fresh);
    let mut resume = Resume::Fresh;
    for (ranks, level, steps) in [(2, "zero2", "4"), (4, "zero3", "8"), (1, "none", "12")] {
        let own = [
            ("training.max_steps", steps),
            ("training.schedule", "constant"),
        ];
        let config = config(folder.path(), "several", ranks, level, &own);
        trained(&config, &resume);
        let store = Store::open(&config.output.output_dir).unwrap();
        resume = Resume::From(store.path_of(config.training.max_steps));
    }
    let constant = [("training.schedule", "constant")];
    let straight = config(folder.path(), "straight", 1, "none", &constant);
    trained(&straight, &Resume::Fresh);
    let several = config(folder.path(), "several", 1, "none", &constant);
    assert_alike(&several, &straight, "2, 4 and 1 ranks");
}
