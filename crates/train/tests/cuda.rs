//! Training on a GPU beside training on the CPU: the same losses, reproducible bits, checkpoints
//! that move between the two, and memory saved without a change of the result. The tests need a
//! GPU and are ignored by default: `-- --include-ignored` runs them.

mod tiny;

use std::sync::{Mutex, MutexGuard, PoisonError};

use cinch_config::{Config, Precision, Settings, Source};
use cinch_engine::{EngineOptions, cuda};
use cinch_graph::Target;
use cinch_graph::op::IGNORE_INDEX;
use cinch_train::checkpoint::{Loaded, Store, load};
use cinch_train::{Batch, Session, StepResult};
use serde_json::json;

const STEPS: u64 = 100;

/// Batches that come round again and again, so that there is something to learn.
const NUM_BATCHES: u64 = 4;

/// The steps that two runs in single precision have to agree on closely: later ones add up what
/// the order of additions makes of each.
const EARLY: usize = 20;

/// The same algorithms in every session, whichever is fastest today.
const DETERMINISTIC: EngineOptions = EngineOptions {
    device: 0,
    other_ranks: 0,
    threads: None,
    tf32: false,
    deterministic: true,
};

/// The card, one test at a time: algorithms are timed while a session is prepared, and another
/// test's work would be timed with them.
///
/// # Panics
/// Where there is no card.
fn card() -> MutexGuard<'static, ()> {
    static CARD: Mutex<()> = Mutex::new(());
    assert!(cuda::is_available(), "this test needs a GPU");
    // A test that failed leaves nothing on the card.
    CARD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpu(config: &Config, recomputed_blocks: usize) -> Session {
    tiny::session_on(Target::Cuda, config, recomputed_blocks, DETERMINISTIC)
}

fn with_precision(config: &Config, precision: Precision) -> Config {
    let mut config = config.clone();
    config.batch.precision = precision;
    config
}

fn batch(config: &Config, step: u64) -> Batch {
    tiny::batch(config, step % NUM_BATCHES)
}

fn run(session: &mut Session, steps: u64) -> Vec<StepResult> {
    let config = session.plan().config.clone();
    let step = |step| session.train_step(&batch(&config, step), step).unwrap();
    (0..steps).map(step).collect()
}

/// How far `ours` is off, relative to what is expected.
fn relative(ours: f64, expected: f64) -> f64 {
    ((ours - expected) / expected).abs()
}

#[test]
#[ignore = "needs a GPU"]
fn losses_track_those_of_the_cpu() {
    let _card = card();
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let expected = run(&mut tiny::session(&config, 0, 2), STEPS);
        let (first, last) = (expected[0].loss, expected[STEPS as usize - 1].loss);
        assert!(last < 0.8 * first, "{first} to {last}: nothing was learned");
        for (precision, early, late) in [
            (Precision::Fp32, 1e-3, 2e-2),
            (Precision::Bf16, 3e-2, 3e-2),
            (Precision::Fp16, 3e-2, 3e-2),
        ] {
            let config = with_precision(&config, precision);
            let results = run(&mut gpu(&config, 1), STEPS);
            for (step, (ours, expected)) in results.iter().zip(&expected).enumerate() {
                let tolerance = if step < EARLY { early } else { late };
                let error = relative(ours.loss, expected.loss);
                assert!(
                    error <= tolerance,
                    "{model:?} in {precision:?}, step {step}: loss {} for {}",
                    ours.loss,
                    expected.loss
                );
            }
            // The first step has the same weights on both.
            let (ours, expected) = (results[0].gradient_norm, expected[0].gradient_norm);
            let error = relative(ours, expected);
            let what = format!("{model:?} in {precision:?}: gradient norm {ours} for {expected}");
            assert!(error <= early, "{what}");
        }
    }
}

/// Dense steps, then sparse ones, in which every query head has its own blocks of keys.
const SPARSE: &[(&str, &str)] = &[
    ("model.type", "gsa"),
    ("model.d_model", "128"),
    ("model.n_heads", "4"),
    ("model.n_kv_heads", "2"),
    ("model.d_ffn", "48"),
    ("model.d_indexer", "8"),
    ("model.n_indexer_heads", "3"),
    ("model.k_base", "10"),
    ("model.k_min", "4"),
    ("model.k_max", "14"),
    ("model.indexer_warmup_steps", "5"),
    ("model.n_layers", "2"),
    ("model.vocab_size", "61"),
    ("vram.batch_size", "2"),
    ("vram.gradient_accumulation_steps", "2"),
    ("vram.max_seq_len", "37"),
    ("training.learning_rate", "3e-3"),
    ("training.schedule", "constant"),
    ("training.warmup_steps", "2"),
];

fn sparse() -> Config {
    let mut settings = Settings::new();
    for (key, value) in SPARSE {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// The settings are those of the model, card or no card.
#[test]
fn the_sparse_model_is_planned() {
    let config = sparse();
    assert_eq!(config.model.name(), "gsa");
    let results = run(&mut tiny::session(&config, 0, 2), 7);
    // The same batch again, before attention changes.
    assert!(results[4].loss < results[0].loss);
}

#[test]
#[ignore = "needs a GPU"]
fn sparse_attention_tracks_the_cpu_and_gives_the_same_bits() {
    let _card = card();
    let config = sparse();
    let expected = run(&mut tiny::session(&config, 0, 2), 30);
    // A score that is rounded differently selects another key, and from then on two runs part:
    // single losses by some percent, but not what they are on average.
    const TOGETHER: usize = 15;
    let mean = |results: &[StepResult]| {
        let losses = results[TOGETHER..].iter().map(|result| result.loss);
        losses.sum::<f64>() / (results.len() - TOGETHER) as f64
    };
    for (precision, tolerance, later) in [
        (Precision::Fp32, 2e-3, 1e-2),
        (Precision::Bf16, 3e-2, 3e-2),
        (Precision::Fp16, 3e-2, 3e-2),
    ] {
        let config = with_precision(&config, precision);
        let trained = || {
            let mut session = gpu(&config, 1);
            let results = run(&mut session, 30);
            (results, tiny::weights(&session))
        };
        let ((results, weights), (again, weights_again)) = (trained(), trained());
        assert_eq!(results, again, "{precision:?}");
        assert!(weights == weights_again, "{precision:?}");
        let first = results.iter().zip(&expected).take(TOGETHER);
        for (step, (ours, expected)) in first.enumerate() {
            let (ours, expected) = (ours.loss, expected.loss);
            let what = format!("{precision:?}, step {step}: {ours} for {expected}");
            assert!(relative(ours, expected) <= tolerance, "{what}");
        }
        let (ours, expected) = (mean(&results), mean(&expected));
        let what = format!("{precision:?}, later steps: {ours} for {expected}");
        assert!(relative(ours, expected) <= later, "{what}");
    }
}

/// Each way to spend less on the optimizer: the CPU's losses in fp32, and where it only moves
/// memory, the bits of the plain step on the card.
#[test]
#[ignore = "needs a GPU"]
fn the_optimizers_variants_track_the_cpu() {
    let _card = card();
    for model in tiny::MODELS {
        for own in tiny::VARIANTS {
            let config = tiny::config(model, own);
            let expected = run(&mut tiny::session(&config, 0, 2), EARLY as u64);
            let mut session = gpu(&config, 1);
            let results = run(&mut session, EARLY as u64);
            for (step, (ours, expected)) in results.iter().zip(&expected).enumerate() {
                let error = relative(ours.loss, expected.loss);
                // A code that falls on the other side of a half moves a moment by a step.
                let tolerance = if own.is_empty() { 1e-3 } else { 5e-3 };
                assert!(
                    error <= tolerance,
                    "{model:?} {own:?}, step {step}: {error}"
                );
            }
            let mut here = config.clone();
            here.batch.offload = false;
            let mut plain = gpu(&here, 1);
            assert_eq!(run(&mut plain, EARLY as u64), results, "{model:?} {own:?}");
            assert!(
                tiny::weights(&plain) == tiny::weights(&session),
                "{model:?} {own:?}"
            );
            assert_same("states", &plain, &session);
        }
    }
}

/// Micro batches of several lengths in one step: the CPU's losses, and those of one length.
#[test]
#[ignore = "needs a GPU"]
fn rows_of_several_lengths_track_the_cpu() {
    let _card = card();
    for model in tiny::MODELS {
        let own = [
            ("model.dropout", "0"),
            ("vram.gradient_accumulation_steps", "3"),
        ];
        let one = tiny::config(model, &own);
        let mut several = one.clone();
        several.batch.buckets = vec![10, 20];
        let batch = |step: u64| {
            let mut batch = tiny::batch(&one, step);
            // Short, long and between; each step in another order.
            let mut row_lens = [9, 3, 37, 12, 17, 20];
            row_lens.rotate_left(2 * step as usize % 6);
            for (row, row_len) in row_lens.into_iter().enumerate() {
                batch.targets_mut()[37 * row + row_len..37 * (row + 1)].fill(IGNORE_INDEX);
                batch.set_row_len(row, row_len);
            }
            batch
        };
        let run = |mut session: Session| -> Vec<f64> {
            let step = |step| session.train_step(&batch(step), step).unwrap().loss;
            (0..EARLY as u64).map(step).collect()
        };
        let expected = run(tiny::session(&several, 0, 2));
        for config in [&one, &several] {
            let ours = run(gpu(config, 1));
            for (step, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
                let error = relative(*ours, *expected);
                assert!(error <= 1e-3, "{model:?}, step {step}: {error}");
            }
        }
        // Recorded again, the same bits.
        assert_eq!(run(gpu(&several, 1)), run(gpu(&several, 1)), "{model:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_same_seed_gives_the_same_bits() {
    let _card = card();
    for model in tiny::MODELS {
        for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
            let config = with_precision(&tiny::config(model, &[]), precision);
            let trained = || {
                let mut session = gpu(&config, 1);
                let results = run(&mut session, 30);
                (results, tiny::weights(&session))
            };
            let ((results, weights), (again, weights_again)) = (trained(), trained());
            assert_eq!(results, again, "{model:?} in {precision:?}");
            assert!(weights == weights_again, "{model:?} in {precision:?}");
        }
    }
}

/// Everything that is saved of a session, through files.
fn saved(session: &Session) -> Loaded {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let (weights, states) = (session.weights(), session.states());
    let state = json!({ "step": 0 });
    store
        .save(0, &weights.views(), &states.views(), &state)
        .unwrap();
    // Files that are open or mapped outlive their folder.
    load(&store.path_of(0)).unwrap()
}

/// The moments of both are the same, bit by bit; what else is saved differs by precision.
fn assert_same(what: &str, a: &Session, b: &Session) {
    assert!(tiny::weights(a) == tiny::weights(b), "{what}: weights");
    let moments = |session: &Session| -> Vec<(String, Vec<u8>)> {
        let states = session.states();
        let views = states.views().into_iter();
        views
            .filter(|state| state.name != "loss_scale")
            .map(|state| (state.name.to_owned(), state.bytes.to_vec().unwrap()))
            .collect()
    };
    assert!(moments(a) == moments(b), "{what}: moments");
}

#[test]
#[ignore = "needs a GPU"]
fn a_checkpoint_moves_to_the_cpu_and_back() {
    let _card = card();
    for model in tiny::MODELS {
        for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
            let what = format!("{model:?} in {precision:?}");
            let config = tiny::config(model, &[]);
            let mut there = gpu(&with_precision(&config, precision), 1);
            run(&mut there, 5);
            let checkpoint = saved(&there);
            let mut here = tiny::session(&config, 0, 2);
            here.load(&checkpoint.model, &checkpoint.optimizer).unwrap();
            assert_same(&what, &here, &there);

            here.train_step(&batch(&config, 5), 5).unwrap();
            let checkpoint = saved(&here);
            there
                .load(&checkpoint.model, &checkpoint.optimizer)
                .unwrap();
            assert_same(&what, &here, &there);
            // The copies that products read are those of the new weights.
            let (ours, expected) = (evaluate(&mut there), evaluate(&mut here));
            let tolerance = match precision {
                Precision::Fp32 => 1e-4,
                Precision::Bf16 | Precision::Fp16 => 1e-2,
            };
            let error = relative(ours, expected);
            assert!(error <= tolerance, "{what}: loss {ours} for {expected}");
        }
    }
}

/// The loss of a micro batch that was not trained on.
fn evaluate(session: &mut Session) -> f64 {
    let config = session.plan().config.clone();
    let mut held_out = tiny::batch(&config, 1000);
    held_out.truncate(config.batch.batch_size);
    session.evaluate(&held_out).unwrap().loss()
}

#[test]
#[ignore = "needs a GPU"]
fn evaluation_gives_what_the_cpu_gives() {
    let _card = card();
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let (mut here, mut there) = (tiny::session(&config, 0, 2), gpu(&config, 0));
        let error = relative(evaluate(&mut there), evaluate(&mut here));
        assert!(error <= 1e-4, "{model:?}: off by {error:e}");
        // Nor does it change what comes after it.
        let after = there.train_step(&batch(&config, 0), 0).unwrap();
        assert_eq!(after, run(&mut gpu(&config, 0), 1)[0], "{model:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_cut_into_micro_batches_does_not_change_the_gradient() {
    let _card = card();
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        let [whole, cut] = [(4, 1), (1, 4)].map(|(micro, accumulation)| {
            (config.batch.batch_size, config.batch.accumulation) = (micro, accumulation);
            let mut session = gpu(&config, 1);
            // What a step leaves must not be added to.
            session.train_step(&batch(&config, 1), 0).unwrap();
            session.initialize(config.training.seed).unwrap();
            session.accumulate_gradients(&batch(&config, 0), 3).unwrap();
            let gradients = session.gradients().unwrap().into_iter();
            let gradients: Vec<(String, Vec<f32>)> = gradients
                .map(|(name, gradient)| (name.to_owned(), gradient))
                .collect();
            gradients
        });
        assert_eq!(whole.len(), cut.len());
        for ((name, expected), (_, ours)) in whole.iter().zip(&cut) {
            let error = distance(ours, expected);
            assert!(error <= 1e-4, "{model:?}: {name} off by {error:e}");
        }
    }
}

/// The norm of the difference over the norm of what is expected.
fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&b| square(b)).sum();
    assert!(norm > 0.0);
    (difference / norm).sqrt()
}

#[test]
#[ignore = "needs a GPU"]
fn recomputation_does_not_change_the_losses() {
    let _card = card();
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let blocks = config.model.num_blocks();
        let expected = run(&mut gpu(&config, 0), 5);
        let results = run(&mut gpu(&config, blocks), 5);
        for (step, (ours, expected)) in results.iter().zip(&expected).enumerate() {
            let error = relative(ours.loss, expected.loss);
            assert!(error <= 1e-6, "{model:?}, step {step}: off by {error:e}");
        }
    }
}

/// Weights kept in bf16 alone learn what those with masters learn, whatever their moments are
/// kept in, and a checkpoint of them goes on bit by bit.
#[test]
#[ignore = "needs a GPU"]
fn weights_without_masters_learn_and_resume() {
    let _card = card();
    for model in tiny::MODELS {
        let expected = run(&mut tiny::session(&tiny::config(model, &[]), 0, 2), STEPS);
        let (first, last) = (expected[0].loss, expected[STEPS as usize - 1].loss);
        for states in ["fp32", "weights", "8bit"] {
            let own = [
                ("vram.precision", "bf16"),
                ("training.master_weights", "false"),
                ("vram.optimizer_states", states),
            ];
            let config = tiny::config(model, &own);
            let mut session = gpu(&config, 1);
            let results = run(&mut session, STEPS);
            let ours = results[STEPS as usize - 1].loss;
            // A tenth of what was learned: the last digits of a weight are eight bits away.
            let error = (ours - last).abs();
            assert!(
                error <= 0.1 * (first - last),
                "{model:?}, {states} moments: loss {ours} for {last}"
            );
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path()).unwrap();
            let (weights, moments) = (session.weights(), session.states());
            let state = json!({ "step": STEPS });
            store
                .save(STEPS, &weights.views(), &moments.views(), &state)
                .unwrap();
            let saved: Loaded = load(&store.path_of(STEPS)).unwrap();
            let mut resumed = gpu(&config, 1);
            let note = resumed.load(&saved.model, &saved.optimizer).unwrap();
            assert_eq!(note, None);
            let next = batch(&config, STEPS);
            let ours = resumed.train_step(&next, STEPS).unwrap();
            assert_eq!(ours, session.train_step(&next, STEPS).unwrap());
        }
    }
}
