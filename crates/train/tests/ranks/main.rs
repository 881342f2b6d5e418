//! Several ranks train as one does: the same losses and weights, whatever is cut, and checkpoints
//! that load on any number of them. Ranks are threads here, which are connected as processes are.
//!
//! With one micro batch a rank, sums of gradients have the order that they have on one rank, but
//! for kernels that add to a gradient row by row (embeddings, biases): results agree to rounding.
//! What is cut changes nothing but who adds: without clipping, whose norm is summed in another
//! order, every level is the same to the bit.

mod embedder;
mod sample;
#[path = "../tiny/mod.rs"]
mod tiny;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cinch_config::Config;
use cinch_data::NoProgress;
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_ranks::{Greeting, Limits, SharedWorld, Topology, World};
use cinch_step::StepPlan;
use cinch_train::checkpoint::{self, Store};
use cinch_train::{Batch, Ending, Event, Resume, Run, Session, TrainError, train};
use serde_json::json;

const LEVELS: [&str; 4] = ["ddp", "zero1", "zero2", "zero3"];

/// Losses and norms by step, and the weights.
type Results = (Vec<[f64; 2]>, Vec<(String, Vec<f32>)>);

const OPTIONS: EngineOptions = EngineOptions {
    device: 0,
    other_ranks: 0,
    threads: Some(1),
    tf32: false,
    deterministic: false,
};

fn worlds(ranks: usize) -> Vec<SharedWorld> {
    let limits = Limits::default();
    let worlds = World::loopback(ranks, &Greeting::default(), limits, Topology::Mesh);
    worlds.unwrap().into_iter().map(SharedWorld::new).collect()
}

/// What each rank comes to, by rank.
fn each<R: Send>(ranks: usize, act: impl Fn(usize, SharedWorld) -> R + Sync) -> Vec<R> {
    let act = &act;
    thread::scope(|scope| {
        let running = worlds(ranks).into_iter().enumerate();
        let running = running.map(|(rank, world)| scope.spawn(move || act(rank, world)));
        let running: Vec<_> = running.collect();
        running
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .collect()
    })
}

/// The same effective batch of eight rows, cut over ranks.
fn cut(model: &[(&str, &str)], ranks: usize, level: &str, own: &[(&str, &str)]) -> Config {
    let number = ranks.to_string();
    let accumulation = (4 / ranks).to_string();
    let mut all = vec![("vram.gradient_accumulation_steps", accumulation.as_str())];
    if ranks > 1 {
        all.extend([("world.ranks", number.as_str()), ("world.shard", level)]);
    }
    all.extend(own);
    tiny::config(model, &all)
}

/// A rank's rows of an effective batch: micro batches are dealt in turn.
fn share(whole: &Batch, config: &Config, rank: usize) -> Batch {
    let (micro, width) = (config.batch.batch_size, config.batch.seq_len);
    let ranks = config.batch.world.ranks;
    let mut own = Batch::new(config.batch.rank_batch(), width);
    for row in 0..config.batch.rank_batch() {
        let place = ((row / micro) * ranks + rank) * micro + row % micro;
        for name in ["tokens", "targets"] {
            let from = &whole.get(name)[place * width..(place + 1) * width];
            own.row_mut(name, row).copy_from_slice(from);
        }
    }
    own
}

/// Losses, gradient norms and weights of some steps on one rank.
fn steps_alone(config: &Config, steps: u64) -> Results {
    let mut session = tiny::session(config, 0, 1);
    let step = |step| {
        let result = session
            .train_step(&tiny::batch(config, step), step)
            .unwrap();
        [result.loss, result.gradient_norm]
    };
    let results = (0..steps).map(step).collect();
    (results, floats(tiny::weights(&session)))
}

/// The same on several, which all must have the same results; weights as a checkpoint has them.
fn steps_together(config: &Config, steps: u64) -> Results {
    let folder = tempfile::tempdir().unwrap();
    let mut results = each(config.batch.world.ranks, |rank, world| {
        let plan = StepPlan::new(config, Target::Cpu, 0).unwrap();
        let mut session = Session::connected(plan, OPTIONS, world.clone()).unwrap();
        session.initialize(config.training.seed).unwrap();
        let step = |step| {
            let batch = share(&tiny::batch(config, step), config, rank);
            let result = session.train_step(&batch, step).unwrap();
            [result.loss, result.gradient_norm]
        };
        let results: Vec<[f64; 2]> = (0..steps).map(step).collect();
        let store = Store::look(folder.path()).unwrap();
        let (weights, states) = (session.weights(), session.states());
        let ranks = config.batch.world.ranks;
        let (weights, states) = (weights.parts(rank, ranks), states.parts(rank, ranks));
        let mut world = world.lock();
        store
            .save_shared(steps, &weights, &states, &json!({}), &mut world)
            .unwrap();
        world.leave().unwrap();
        results
    });
    assert!(results.iter().all(|other| *other == results[0]));
    let path = Store::open(folder.path()).unwrap().path_of(steps);
    let files = checkpoint::load(&path).unwrap().model;
    let read = |tensor: &cinch_weights::Tensor| {
        let mut values = vec![0.0; tensor.num_elements()];
        files
            .read_f32(&tensor.name, 0..tensor.rows(), &mut values)
            .unwrap();
        (tensor.name.clone(), values)
    };
    let mut weights: Vec<_> = files.tensors().iter().map(read).collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    (results.swap_remove(0), weights)
}

fn floats(weights: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<f32>)> {
    let read = |(name, bytes): (String, Vec<u8>)| {
        let words = bytes.as_chunks::<4>().0.iter();
        (name, words.map(|&word| f32::from_le_bytes(word)).collect())
    };
    let mut weights: Vec<_> = weights.into_iter().map(read).collect();
    weights.sort_by(|a: &(String, Vec<f32>), b| a.0.cmp(&b.0));
    weights
}

/// The largest difference, in units of the learning rate of the steps that led there: Adam moves a
/// weight whose gradient is next to nothing by as much as any other.
fn assert_near(found: &Results, wanted: &Results, what: &str) {
    for (step, (found, wanted)) in found.0.iter().zip(&wanted.0).enumerate() {
        for (found, wanted) in found.iter().zip(wanted) {
            let off = (found - wanted).abs() / wanted.abs();
            assert!(off < 1e-5, "{what}, step {step}: {found} and {wanted}");
        }
    }
    assert_eq!(found.1.len(), wanted.1.len(), "{what}");
    for ((name, found), (_, wanted)) in found.1.iter().zip(&wanted.1) {
        assert_eq!(found.len(), wanted.len(), "{what}: {name}");
        let apart = found.iter().zip(wanted).map(|(a, b)| (a - b).abs());
        let apart = apart.fold(0.0_f32, f32::max);
        assert!(apart < 2e-3, "{what}: {name} is off by {apart}");
    }
}

#[test]
fn two_and_four_ranks_equal_one_at_every_level() {
    for model in [tiny::MAMBA_WITH_CONVOLUTION, tiny::GPT2] {
        let alone = steps_alone(&cut(model, 1, "none", &[]), 4);
        for ranks in [2, 4] {
            let replicas = steps_together(&cut(model, ranks, "ddp", &[]), 4);
            assert_near(&replicas, &alone, &format!("{ranks} ranks"));
            for level in &LEVELS[1..] {
                let found = steps_together(&cut(model, ranks, level, &[]), 4);
                assert_near(&found, &alone, &format!("{ranks} ranks, {level}"));
            }
        }
    }
}

#[test]
fn every_level_has_the_same_weights_to_the_bit() {
    let own = [("training.max_grad_norm", "0")];
    let replicas = steps_together(&cut(tiny::GPT2, 4, "ddp", &own), 3);
    for level in &LEVELS[1..] {
        let found = steps_together(&cut(tiny::GPT2, 4, level, &own), 3);
        assert!(found.1 == replicas.1, "{level}: the weights differ");
    }
}

#[test]
fn states_of_eight_bits_are_cut_between_blocks() {
    let own = [
        ("vram.optimizer_states", "8bit"),
        ("model.vocab_size", "311"),
    ];
    let alone = steps_alone(&cut(tiny::GPT2, 1, "none", &own), 3);
    for level in LEVELS {
        let found = steps_together(&cut(tiny::GPT2, 2, level, &own), 3);
        assert_near(&found, &alone, level);
    }
}

/// A model that reads bytes of the built-in text.
fn config(folder: &Path, name: &str, ranks: usize, level: &str, steps: &str) -> Config {
    let output = folder.join(name);
    let cache = folder.join("cache");
    let own = [
        ("model.vocab_size", "257"),
        ("data.tokenizer", "bytes"),
        ("data.cache_dir", cache.to_str().unwrap()),
        ("output.output_dir", output.to_str().unwrap()),
        ("training.max_steps", steps),
        ("training.eval_interval", "4"),
        ("training.eval_batches", "3"),
        ("training.save_interval", "2"),
        ("training.save_total_limit", "0"),
        ("training.logging_steps", "1"),
    ];
    cut(tiny::MAMBA, ranks, level, &own)
}

fn run_of(
    config: &Config,
    resume: &Resume,
    world: Option<SharedWorld>,
) -> Result<(u64, Ending), TrainError> {
    run_until(config, resume, world, &AtomicBool::new(false), u64::MAX)
}

/// Trains, asked to stop after that many steps.
fn run_until(
    config: &Config,
    resume: &Resume,
    world: Option<SharedWorld>,
    stop: &AtomicBool,
    last: u64,
) -> Result<(u64, Ending), TrainError> {
    let run = Run {
        plan: StepPlan::new(config, Target::Cpu, 0).unwrap(),
        settings: BTreeMap::new(),
        resume: resume.clone(),
        options: OPTIONS,
        stop,
        progress: &NoProgress,
        world,
    };
    let outcome = train(run, &mut |event: Event<'_>| {
        if let Event::Step { report, .. } = event
            && report.step >= last
        {
            stop.store(true, Ordering::Relaxed);
        }
    })?;
    Ok((outcome.step, outcome.ending))
}

/// Losses of training and validation, as the run recorded them.
fn recorded(folder: &Path) -> Vec<f64> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let loss = |line: serde_json::Value| {
        let loss = line.get("loss").or(line.get("validation_loss"));
        loss.and_then(serde_json::Value::as_f64).unwrap()
    };
    lines.map(loss).collect()
}

fn assert_recorded_alike(one: &Path, other: &Path) {
    let (one, other) = (recorded(one), recorded(other));
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(&other) {
        assert!((a - b).abs() < 1e-5 * a.abs(), "{one:?}\n{other:?}");
    }
}

#[test]
fn a_run_has_the_same_losses_on_any_number_of_ranks_and_is_recorded_once() {
    let folder = tempfile::tempdir().unwrap();
    let alone = config(folder.path(), "alone", 1, "none", "8");
    run_of(&alone, &Resume::Fresh, None).unwrap();
    for (ranks, level) in [(2, "ddp"), (2, "zero3"), (4, "zero1")] {
        let name = format!("{ranks}-{level}");
        let config = config(folder.path(), &name, ranks, level, "8");
        let ended = each(ranks, |_, world| {
            run_of(&config, &Resume::Fresh, Some(world)).unwrap()
        });
        assert!(ended.iter().all(|ended| *ended == (8, Ending::Finished)));
        assert_recorded_alike(&folder.path().join(&name), &folder.path().join("alone"));
        let store = Store::open(&config.output.output_dir).unwrap();
        let steps: Vec<u64> = store
            .list()
            .unwrap()
            .iter()
            .map(|entry| entry.step)
            .collect();
        assert_eq!(steps, [2, 4, 6, 8], "{name}");
    }
}

/// Saved by some ranks, gone on with by others, and by one.
#[test]
fn a_checkpoint_loads_at_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let alone = config(folder.path(), "alone", 1, "none", "6");
    run_of(&alone, &Resume::Fresh, None).unwrap();
    let first = config(folder.path(), "several", 4, "zero3", "2");
    each(4, |_, world| {
        run_of(&first, &Resume::Fresh, Some(world)).unwrap()
    });
    let mut path = Store::open(&first.output.output_dir).unwrap().path_of(2);
    for (ranks, level, steps) in [
        (2, "zero1", 3),
        (1, "none", 4),
        (2, "zero3", 5),
        (4, "ddp", 6),
    ] {
        checkpoint::verify(&path).unwrap();
        let config = config(folder.path(), "several", ranks, level, &steps.to_string());
        let resume = Resume::From(path.clone());
        match ranks {
            1 => _ = run_of(&config, &resume, None).unwrap(),
            _ => {
                _ = each(ranks, |_, world| {
                    run_of(&config, &resume, Some(world)).unwrap()
                })
            }
        }
        path = Store::open(&config.output.output_dir)
            .unwrap()
            .path_of(steps);
    }
    let losses = |name: &str| {
        let text = fs::read_to_string(folder.path().join(name).join("metrics.jsonl")).unwrap();
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses: Vec<f64> = lines
            .filter_map(|line| line.get("loss")?.as_f64())
            .collect();
        losses
    };
    let (one, other) = (losses("alone"), losses("several"));
    assert_eq!((one.len(), other.len()), (6, 6));
    for (a, b) in one.iter().zip(&other) {
        assert!((a - b).abs() < 1e-5 * a, "{one:?}\n{other:?}");
    }
}

/// Whoever is asked, all stop after the same step, and that one is saved.
#[test]
fn one_rank_that_is_asked_to_stop_stops_all_between_steps() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), "run", 2, "zero2", "50");
    let ended = each(2, |rank, world| {
        let last = if rank == 1 { 3 } else { u64::MAX };
        let stop = AtomicBool::new(false);
        run_until(&config, &Resume::Fresh, Some(world), &stop, last).unwrap()
    });
    assert_eq!(ended, [(3, Ending::Interrupted); 2]);
    let newest = Store::open(&config.output.output_dir).unwrap().newest();
    assert_eq!(newest.unwrap().unwrap().step, 3);
}

/// A disk that one rank cannot see is told by that rank, and no half of a checkpoint is left.
#[test]
fn a_rank_that_does_not_see_the_others_disk_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let told = each(2, |rank, world| {
        let name = if rank == 1 { "elsewhere" } else { "run" };
        let config = config(folder.path(), name, 2, "zero1", "2");
        run_of(&config, &Resume::Fresh, Some(world))
            .unwrap_err()
            .to_string()
    });
    for told in &told {
        assert!(told.contains("rank 1"), "{told}");
        assert!(told.contains("on a disk that every machine sees"), "{told}");
    }
    let left = fs::read_dir(folder.path().join("run/checkpoints"))
        .unwrap()
        .count();
    assert_eq!(left, 0);
}

/// A rank that fails takes the others with it, and they say where to go on.
#[test]
fn a_lost_rank_is_named_with_the_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), "run", 2, "ddp", "1000");
    let told = each(2, |rank, world| {
        if rank == 1 {
            // It ends in the middle, as a killed process does.
            let stop = AtomicBool::new(false);
            let config = &config;
            let run = Run {
                plan: StepPlan::new(config, Target::Cpu, 0).unwrap(),
                settings: BTreeMap::new(),
                resume: Resume::Fresh,
                options: OPTIONS,
                stop: &stop,
                progress: &NoProgress,
                world: Some(world.clone()),
            };
            let ended = train(run, &mut |event: Event<'_>| {
                if let Event::Step { report, .. } = event
                    && report.step == 5
                {
                    world.lock().fail("its memory ran out");
                }
            });
            return ended.unwrap_err().to_string();
        }
        run_of(&config, &Resume::Fresh, Some(world))
            .unwrap_err()
            .to_string()
    });
    for part in [
        "rank 1 (process",
        "its memory ran out",
        "step-00000004",
        "--resume",
    ] {
        assert!(told[0].contains(part), "{}", told[0]);
    }
}

/// Every rank is in the record with its times and memory, and the one that the others wait for is
/// named; a run that goes on by itself says that nobody is left.
#[test]
fn each_rank_is_recorded_and_the_slowest_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let config_of = |ranks, steps| config(folder.path(), "run", ranks, "ddp", steps);
    let config = config_of(2, "8");
    let tables = each(2, |rank, world| {
        let stop = AtomicBool::new(false);
        let run = Run {
            plan: StepPlan::new(&config, Target::Cpu, 0).unwrap(),
            settings: BTreeMap::new(),
            resume: Resume::Fresh,
            options: OPTIONS,
            stop: &stop,
            progress: &NoProgress,
            world: Some(world),
        };
        let outcome = train(run, &mut |event: Event<'_>| {
            // A step takes a millisecond otherwise, or some tens of them on a busy machine.
            if rank == 1 && matches!(event, Event::Step { .. }) {
                thread::sleep(std::time::Duration::from_millis(400));
            }
        });
        outcome.unwrap().ranks
    });
    assert_eq!(tables[1], None);
    let table = tables[0].as_ref().unwrap();
    assert_eq!((table.steps, table.step, table.rows.len()), (8, 8, 2));
    let slowest = table.slowest().unwrap();
    assert_eq!((slowest.rank, slowest.is_clear), (1, true), "{table:?}");
    for row in &table.rows {
        assert_eq!(row.facts.process, std::process::id());
        assert_eq!(row.facts.device, "1 thread");
        assert!(row.pace.waited_seconds <= row.pace.seconds);
        assert_eq!(row.most_bytes.is_some(), cfg!(target_os = "linux"));
    }
    let path = folder.path().join("run/ranks.jsonl");
    let lines = || -> Vec<serde_json::Value> {
        let text = fs::read_to_string(&path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    assert_eq!(lines()[0]["members"].as_array().unwrap().len(), 2);
    let steps = |line: &serde_json::Value| line["steps"].as_u64().unwrap_or(0);
    assert_eq!(lines().iter().map(steps).sum::<u64>(), 8);
    assert_eq!(lines()[1]["waited_seconds"].as_array().unwrap().len(), 2);

    let newest = Store::open(folder.path().join("run")).unwrap().newest();
    let from = Resume::From(newest.unwrap().unwrap().path);
    run_of(&config_of(1, "10"), &from, None).unwrap();
    let last = lines().pop().unwrap();
    assert_eq!((&last["step"], &last["members"]), (&json!(8), &json!([])));
}
