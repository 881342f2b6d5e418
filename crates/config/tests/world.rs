//! Several ranks: what a batch means for each of them, and which numbers of them a batch has.

use std::path::Path;

use cinch_config::{Settings, Source};

fn settings(own: &[(&str, &str)]) -> Settings {
    let mut settings = Settings::new();
    for (key, value) in own {
        settings
            .set(key, value, Source::Flag("test".to_owned()))
            .unwrap();
    }
    settings
}

#[test]
fn a_stated_batch_is_that_of_each_rank() {
    let config = settings(&[
        ("world.ranks", "4"),
        ("vram.batch_size", "3"),
        ("vram.gradient_accumulation_steps", "2"),
    ]);
    let batch = config.resolve().unwrap().batch;
    assert_eq!((batch.rank_batch(), batch.effective_batch()), (6, 24));
}

#[test]
fn a_batch_that_nobody_stated_is_divided() {
    let whole = settings(&[]).resolve().unwrap().batch.effective_batch();
    for ranks in ["2", "4", "16"] {
        let batch = settings(&[("world.ranks", ranks)]).resolve().unwrap().batch;
        assert_eq!(batch.effective_batch(), whole, "{ranks} ranks");
        assert!(batch.micro_is_free);
    }
    let error = settings(&[("world.ranks", "3")]).resolve().unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("3 ranks") && error.contains("2 or 4"),
        "{error}"
    );
}

#[test]
fn another_number_of_ranks_keeps_the_global_batch() {
    let stated = [
        ("world.ranks", "4"),
        ("vram.batch_size", "2"),
        ("vram.gradient_accumulation_steps", "3"),
    ];
    // As a file states it: what is typed is taken at its word.
    let mut file = Settings::new();
    for (key, value) in stated {
        let source = Source::File {
            path: "run.yaml".into(),
            line: 1,
            column: 1,
        };
        file.set(key, value, source).unwrap();
    }
    for (ranks, accumulation) in [(1, 12), (2, 6), (3, 4), (12, 1)] {
        let mut settings = file.clone();
        assert_eq!(settings.on_ranks(ranks).unwrap(), Some(4));
        let batch = settings.resolve().unwrap().batch;
        assert_eq!(batch.world.ranks as u64, ranks);
        assert_eq!((batch.batch_size, batch.accumulation), (2, accumulation));
        assert_eq!(batch.effective_batch(), 24);
    }
    assert_eq!(file.clone().on_ranks(4).unwrap(), None);
    let error = file.clone().on_ranks(5).unwrap_err().to_string();
    assert!(error.contains("4 or 6"), "{error}");
    // 24 sequences over 24 ranks are one each, which micro batches of 2 are not.
    let error = file.clone().on_ranks(24).unwrap_err().to_string();
    assert!(error.contains("micro batch 1"), "{error}");
}

#[test]
fn words_of_other_programs_say_what_is_cut() {
    for (word, name) in [
        ("ddp", "none"),
        ("optimizer", "optimizer"),
        ("zero2", "gradients"),
        ("shard_grad_op", "gradients"),
        ("full_shard", "weights"),
        ("3", "weights"),
    ] {
        let own = [("world.ranks", "2"), ("world.shard", word)];
        let world = settings(&own).resolve().unwrap().batch.world;
        assert_eq!(world.shard.name(), name, "{word}");
    }
}

#[test]
fn machines_have_as_many_ranks_each() {
    let own = [("world.ranks", "16"), ("world.nodes", "2")];
    assert_eq!(
        settings(&own)
            .resolve()
            .unwrap()
            .batch
            .world
            .ranks_per_node(),
        8
    );
    let own = [("world.ranks", "4"), ("world.nodes", "3")];
    let error = settings(&own).resolve().unwrap_err().to_string();
    assert!(error.contains("world.nodes"), "{error}");
}

/// A launcher's numbers are those of each machine.
#[test]
fn machines_of_launchers_are_multiplied() {
    let script = "torchrun --nnodes=2 --nproc_per_node=4 train.py \\\n  \
                  --model_name_or_path Qwen/Qwen2.5-0.5B \\\n  \
                  --per_device_train_batch_size 2 --gradient_accumulation_steps 4\n";
    let lightning = "trainer:\n  devices: 4\n  num_nodes: 2\n  strategy: ddp\n  \
                     accumulate_grad_batches: 4\n  max_steps: 10\n\
                     data:\n  batch_size: 2\n";
    for (file, text) in [("train.sh", script), ("config.yaml", lightning)] {
        let mut settings = Settings::new();
        settings.load_text(Path::new(file), text).unwrap();
        let source = Source::Flag("--model".to_owned());
        settings.set("model.type", "qwen2.5-0.5b", source).unwrap();
        let batch = settings.resolve().unwrap().batch;
        assert_eq!((batch.world.ranks, batch.world.nodes), (8, 2), "{file}");
        assert_eq!(batch.effective_batch(), 64, "{file}");
    }
}
