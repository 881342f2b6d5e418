//! Saving memory never changes the result: recomputation, the scan's chunks, the number of
//! threads and evaluation in between leave every bit as it was; cutting the batch or the
//! logits otherwise leaves the gradient the same up to rounding.

mod account;
mod tiny;

use account::Account;
use cinch_architecture::Architecture;
use cinch_config::Config;
use cinch_graph::op::IGNORE_INDEX;
use cinch_train::{Batch, Session};

/// How a run is carried out; none of it may show in the result.
#[derive(Clone, Copy, Debug)]
struct Manner {
    recomputed_blocks: usize,
    threads: usize,
    /// Everything dead is overwritten with NaN after each node.
    poisoned: bool,
    evaluates: bool,
}

const PLAIN: Manner = Manner {
    recomputed_blocks: 0,
    threads: 2,
    poisoned: false,
    evaluates: false,
};

/// What came out, in bits.
#[derive(PartialEq)]
struct Trace {
    losses: Vec<u64>,
    norms: Vec<u64>,
    weights: Vec<(String, Vec<u8>)>,
}

fn run(config: &Config, steps: u64, manner: Manner) -> Trace {
    let mut session = tiny::session(config, manner.recomputed_blocks, manner.threads);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let batch = tiny::batch(config, step);
        let result = if manner.poisoned {
            let mut account = Account::new(&session);
            let mut after = |arena: &mut _, node| account.after(arena, node);
            let result = session.train_step_observed(&batch, step, &mut after);
            account.close();
            result
        } else {
            session.train_step(&batch, step)
        };
        let result = result.unwrap();
        assert!(result.loss.is_finite());
        losses.push(result.loss.to_bits());
        norms.push(result.gradient_norm.to_bits());
        if manner.evaluates && step % 3 == 0 {
            let mut held_out = tiny::batch(config, 1000 + step);
            held_out.truncate(config.batch.batch_size);
            session.evaluate(&held_out).unwrap();
        }
    }
    Trace {
        losses,
        norms,
        weights: tiny::weights(&session),
    }
}

fn assert_identical(expected: &Trace, trace: &Trace, what: &str) {
    let different = expected.losses.iter().zip(&trace.losses);
    let step = different.enumerate().find(|(_, (a, b))| a != b);
    assert!(step.is_none(), "{what}: the loss differs at {step:?}");
    assert!(expected.norms == trace.norms, "{what}: gradient norms");
    for ((name, ours), (_, theirs)) in trace.weights.iter().zip(&expected.weights) {
        assert!(ours == theirs, "{what}: {name} differs after the run");
    }
    assert!(expected == trace, "{what}");
}

#[test]
fn recomputation_changes_no_bit() {
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let blocks = config.model.num_blocks();
        let expected = run(&config, 20, PLAIN);
        // A run that learns nothing would prove nothing.
        assert_ne!(expected.losses.first(), expected.losses.last());
        for recomputed_blocks in [blocks / 2, blocks] {
            let manner = Manner {
                recomputed_blocks,
                ..PLAIN
            };
            let what = format!("{model:?}, {manner:?}");
            assert_identical(&expected, &run(&config, 20, manner), &what);
        }
    }
}

/// Weights and optimizer states, in bits.
fn all_saved(session: &Session) -> Vec<(String, Vec<u8>)> {
    let (weights, states) = (session.weights(), session.states());
    let views = weights.views().into_iter().chain(states.views());
    views
        .map(|view| (view.name.to_owned(), view.bytes.to_vec().unwrap()))
        .collect()
}

#[test]
fn a_step_that_is_cut_off_changes_no_bit() {
    const STEPS: u64 = 4;
    const CUT: u64 = 2;
    for (model, variant) in tiny::MODELS
        .into_iter()
        .flat_map(|model| tiny::VARIANTS.map(|variant| (model, variant)))
    {
        // Three micro batches where the variant takes more than one.
        let mut config = tiny::config(model, variant);
        if config.batch.accumulation > 1 {
            config.batch.accumulation = 3;
        }
        let mut whole = tiny::session(&config, 0, 2);
        let mut cut = tiny::session(&config, 0, 2);
        for step in 0..STEPS {
            let batch = tiny::batch(&config, step);
            let expected = whole.train_step(&batch, step).unwrap();
            if step == CUT {
                let before = all_saved(&cut);
                for allowed in 0..config.batch.accumulation {
                    let mut asked = 0;
                    let result = cut.train_step_unless(&batch, step, &mut || {
                        asked += 1;
                        asked > allowed
                    });
                    assert_eq!(result.unwrap(), None);
                    assert!(
                        all_saved(&cut) == before,
                        "{model:?} {variant:?}: {allowed}"
                    );
                }
            }
            let result = cut.train_step_unless(&batch, step, &mut || false);
            assert_eq!(result.unwrap(), Some(expected), "{model:?} {variant:?}");
        }
        assert!(
            all_saved(&cut) == all_saved(&whole),
            "{model:?} {variant:?}"
        );
    }
}

#[test]
fn the_scans_chunks_change_no_bit() {
    for model in [tiny::MAMBA, tiny::MAMBA_WITH_CONVOLUTION] {
        // 300 is no multiple of any of the chunks.
        let own = [
            ("model.max_seq_len", "300"),
            ("vram.max_seq_len", "300"),
            ("model.n_layers", "2"),
            ("vram.batch_size", "1"),
        ];
        let mut config = tiny::config(model, &own);
        let mut expected = None;
        for chunk in [16, 64, 256] {
            if let Architecture::Mamba(mamba) = &mut config.model {
                mamba.scan_chunk = chunk;
            }
            for recomputed_blocks in [0, 2] {
                let manner = Manner {
                    recomputed_blocks,
                    ..PLAIN
                };
                let trace = run(&config, 20, manner);
                match &expected {
                    None => expected = Some(trace),
                    Some(expected) => {
                        let what = format!("chunks of {chunk}, {manner:?}");
                        assert_identical(expected, &trace, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn poison_and_evaluation_change_no_bit() {
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let expected = run(&config, 20, PLAIN);
        for manner in [
            Manner {
                poisoned: true,
                recomputed_blocks: 2,
                ..PLAIN
            },
            Manner {
                evaluates: true,
                ..PLAIN
            },
        ] {
            let what = format!("{model:?}, {manner:?}");
            assert_identical(&expected, &run(&config, 20, manner), &what);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for model in tiny::MODELS {
        // Large enough that the work of every op is divided.
        let own = [
            ("model.d_model", "72"),
            ("model.max_seq_len", "120"),
            ("vram.max_seq_len", "120"),
            ("vram.batch_size", "3"),
            ("vram.gradient_accumulation_steps", "1"),
            ("model.n_layers", "2"),
        ];
        let config = tiny::config(model, &own);
        let expected = run(&config, 6, PLAIN);
        for threads in [1, 3] {
            let manner = Manner { threads, ..PLAIN };
            let what = format!("{model:?}, {manner:?}");
            assert_identical(&expected, &run(&config, 6, manner), &what);
        }
    }
    // The tiny sizes too, for all of the 20 steps.
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let manner = Manner {
            threads: 1,
            ..PLAIN
        };
        let what = format!("{model:?}, {manner:?}");
        assert_identical(&run(&config, 20, PLAIN), &run(&config, 20, manner), &what);
    }
}

#[test]
fn the_seed_decides_the_dropout() {
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        let expected = run(&config, 1, PLAIN);
        let mut other = tiny::session(&config, 0, 2);
        // The same weights, another key for the masks.
        config.training.seed += 1;
        let mut session = tiny::session(&config, 0, 2);
        session.initialize(config.training.seed - 1).unwrap();
        let batch = tiny::batch(&config, 0);
        let same = other.train_step(&batch, 0).unwrap().loss.to_bits();
        let changed = session.train_step(&batch, 0).unwrap().loss.to_bits();
        assert_eq!(same, expected.losses[0]);
        assert_ne!(changed, expected.losses[0], "{model:?}");
    }
}

/// Loss and gradients of one effective batch.
struct Gradients {
    loss: f64,
    by_name: Vec<(String, Vec<f32>)>,
}

fn gradients(config: &Config, batch: &Batch) -> Gradients {
    let mut session: Session = tiny::session(config, 1, 2);
    session.accumulate_gradients(batch, 3).unwrap();
    let by_name = session
        .gradients()
        .unwrap()
        .into_iter()
        .map(|(name, gradient)| (name.to_owned(), gradient))
        .collect();
    Gradients {
        loss: session.loss().unwrap(),
        by_name,
    }
}

/// The loss and each parameter's gradient agree: norm of the difference over norm.
fn assert_close(expected: &Gradients, gradients: &Gradients, what: &str) {
    const TOLERANCE: f64 = 1e-5;
    let error = (gradients.loss - expected.loss).abs() / expected.loss;
    assert!(error <= TOLERANCE, "{what}: loss off by {error:e}");
    assert_eq!(gradients.by_name.len(), expected.by_name.len());
    for ((name, ours), (_, theirs)) in gradients.by_name.iter().zip(&expected.by_name) {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let difference: f64 = ours.iter().zip(theirs).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = theirs.iter().map(|&b| square(b)).sum();
        assert!(norm > 0.0, "{what}: {name} has no gradient");
        let error = (difference / norm).sqrt();
        assert!(error <= TOLERANCE, "{what}: {name} off by {error:e}");
    }
}

#[test]
fn the_cut_into_micro_batches_does_not_change_the_gradient() {
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        (config.batch.batch_size, config.batch.accumulation) = (8, 1);
        let even = tiny::batch(&config, 0);
        // The first micro batches have hardly any targets, one of them none at all.
        let mut uneven = even.clone();
        let seq_len = config.batch.seq_len;
        uneven.targets_mut()[2..3 * seq_len].fill(IGNORE_INDEX);
        for batch in [even, uneven] {
            (config.batch.batch_size, config.batch.accumulation) = (8, 1);
            let expected = gradients(&config, &batch);
            for (micro, accumulation) in [(4, 2), (2, 4), (1, 8)] {
                (config.batch.batch_size, config.batch.accumulation) = (micro, accumulation);
                let what = format!("{micro}×{accumulation} of {model:?}");
                assert_close(&expected, &gradients(&config, &batch), &what);
            }
        }
    }
}

#[test]
fn the_cut_of_the_logits_does_not_change_the_gradient() {
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        let batch = tiny::batch(&config, 0);
        let rows = config.batch.batch_size * config.batch.seq_len;
        config.batch.loss_chunk = Some(rows);
        let expected = gradients(&config, &batch);
        for chunk in [1, 7] {
            config.batch.loss_chunk = Some(chunk);
            let what = format!("{chunk} rows of logits of {model:?}");
            assert_close(&expected, &gradients(&config, &batch), &what);
        }
    }
}
