//! Texts that a run writes while it trains: the first rank writes them, whatever part of the
//! weights it keeps.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use cinch_config::Config;
use cinch_data::NoProgress;
use cinch_graph::Target;
use cinch_ranks::SharedWorld;
use cinch_step::StepPlan;
use cinch_train::{Event, Resume, Run, train};

use crate::{LEVELS, OPTIONS, cut, each, tiny};

fn config(folder: &Path, ranks: usize, level: &str) -> Config {
    let output = folder.join(format!("{ranks}-{level}"));
    let own = [
        ("model.vocab_size", "257"),
        ("data.tokenizer", "bytes"),
        ("output.output_dir", output.to_str().unwrap()),
        ("training.max_steps", "2"),
        ("training.eval_interval", "0"),
        ("training.save_interval", "0"),
        ("training.sample_tokens", "9"),
        ("training.sample_prompt", "the"),
    ];
    cut(tiny::GPT2, ranks, level, &own)
}

/// Texts, and what was said.
fn written(config: &Config, world: Option<SharedWorld>) -> (Vec<String>, Vec<String>) {
    let run = Run {
        plan: StepPlan::new(config, Target::Cpu, 0).unwrap(),
        settings: BTreeMap::new(),
        resume: Resume::Fresh,
        options: OPTIONS,
        stop: &AtomicBool::new(false),
        progress: &NoProgress,
        world,
    };
    let (mut texts, mut notes) = (Vec::new(), Vec::new());
    let observer = &mut |event: Event<'_>| match event {
        Event::Sample { text, .. } => texts.push(text.to_owned()),
        Event::Note(note) => notes.push(note.to_owned()),
        _ => {}
    };
    train(run, observer).unwrap();
    (texts, notes)
}

#[test]
fn a_text_is_written_from_the_parts_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (expected, _) = written(&config(folder.path(), 1, "none"), None);
    assert_eq!(expected.len(), 1);
    assert!(expected[0].starts_with("the") && expected[0].len() > 3);
    for level in LEVELS {
        let config = config(folder.path(), 2, level);
        let found = each(2, |_, world| written(&config, Some(world)));
        assert_eq!(found[0].0, expected, "{level}: {:?}", found[0].1);
        assert!(found[1].0.is_empty());
    }
}
