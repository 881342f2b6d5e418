//! Several training graphs over the same weights in one arena: rows of several lengths, and a
//! model that changes during a run.

mod tiny;

use cinch_config::Config;
use cinch_engine::EngineOptions;
use cinch_graph::op::IGNORE_INDEX;
use cinch_graph::{Recompute, Target};
use cinch_model::TrainingPhase;
use cinch_step::{
    StepError, StepPlan, VariantGraphs, differentiated, evaluation_graph, options, variant_forms,
};
use cinch_train::{Batch, Session};

/// Without dropout: which elements are dropped depends on their place in the micro batch.
const EXACT: &[(&str, &str)] = &[
    ("model.dropout", "0"),
    ("vram.gradient_accumulation_steps", "3"),
];

/// The batch of a step whose rows end early, in tokens.
fn ending(config: &Config, step: u64, row_lens: &[usize]) -> Batch {
    let mut batch = tiny::batch(config, step);
    let seq_len = config.batch.seq_len;
    for (row, &row_len) in row_lens.iter().enumerate() {
        let rest = row * seq_len + row_len..(row + 1) * seq_len;
        batch.targets_mut()[rest.clone()].fill(IGNORE_INDEX);
        batch.tokens_mut()[rest].fill(0);
        batch.set_row_len(row, row_len);
    }
    batch
}

/// Rows of the three micro batches of a step: short, long, between; each step another order.
fn row_lens(step: u64) -> [usize; 6] {
    let mut row_lens = [9, 3, 37, 12, 17, 20];
    row_lens.rotate_left(2 * step as usize % 6);
    row_lens
}

/// Losses and norms of the gradients of some steps, and the weights after them.
fn run(session: &mut Session, config: &Config, steps: u64) -> Vec<(f64, f64)> {
    let step = |step| {
        let batch = ending(config, step, &row_lens(step));
        let result = session.train_step(&batch, step).unwrap();
        (result.loss, result.gradient_norm)
    };
    (0..steps).map(step).collect()
}

fn close(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-5 * one.abs().max(other.abs())
}

#[test]
fn rows_of_several_lengths_train_as_rows_of_one() {
    for model in tiny::MODELS {
        let config = tiny::config(model, EXACT);
        let mut bucketed = config.clone();
        bucketed.batch.buckets = vec![10, 20];
        for blocks in [0, 2] {
            let mut one = tiny::session(&config, blocks, 2);
            let mut several = tiny::session(&bucketed, blocks, 2);
            assert_eq!(several.plan().variants().len(), 3);
            // The shorter ones take no room of their own.
            assert_eq!(several.plan().arena_bytes(), one.plan().arena_bytes());
            let arena = several.arena().expect("a session on the CPU");
            assert_eq!(arena.len() as u64, several.plan().arena_bytes());

            let batch = ending(&bucketed, 0, &row_lens(0));
            assert_eq!(one.num_tokens(&batch, 0), 6 * 37);
            assert_eq!(several.num_tokens(&batch, 0), 2 * (10 + 37 + 20));
            let (plain, mixed) = (run(&mut one, &config, 6), run(&mut several, &bucketed, 6));
            for (plain, mixed) in plain.iter().zip(&mixed) {
                assert!(close(plain.0, mixed.0), "{model:?}: {plain:?} {mixed:?}");
                assert!(close(plain.1, mixed.1), "{model:?}: {plain:?} {mixed:?}");
            }

            // One micro batch at a time, as in evaluation.
            for row_len in [2, 10, 11, 37] {
                let mut held_out = ending(&config, 50, &[row_len; 6]);
                held_out.truncate(config.batch.batch_size);
                let there = several.evaluate(&held_out).unwrap();
                let here = one.evaluate(&held_out).unwrap();
                let (ours, theirs) = (here.loss(), there.loss());
                assert!(close(ours, theirs), "{row_len}: {here:?} {there:?}");
                assert_eq!(here.terms[0].count, there.terms[0].count);
            }
        }
    }
}

/// With dropout, updates inside the backward and states elsewhere: the same every time.
#[test]
fn rows_of_several_lengths_are_reproducible() {
    for own in tiny::VARIANTS {
        let mut config = tiny::config(tiny::GPT2, own);
        config.batch.buckets = vec![10, 20];
        let steps = |threads| {
            let mut session = tiny::session(&config, 1, threads);
            let losses = (0..4).map(|step| {
                let rows = config.batch.effective_batch();
                let batch = ending(&config, step, &row_lens(step)[..rows]);
                session.train_step(&batch, step).unwrap().loss.to_bits()
            });
            let losses: Vec<u64> = losses.collect();
            (losses, tiny::weights(&session))
        };
        assert!(steps(1) == steps(2), "{own:?}");
    }
}

#[test]
fn a_batch_runs_in_the_shortest_graph_that_holds_it() {
    let mut config = tiny::config(tiny::GPT2, &[]);
    config.batch.buckets = vec![20, 10, 20, 50];
    let step = StepPlan::new(&config, Target::Cuda, 0).unwrap();
    let seq_len = |row_len| step.variants()[step.variant_of(0, row_len)].seq_len;
    assert_eq!(
        [0, 10, 11, 20, 21, 37].map(seq_len),
        [10, 10, 20, 20, 37, 37]
    );
    // A row that nobody measured fills its place.
    assert_eq!(seq_len(usize::MAX), 37);
    let report = step.report(Target::Cuda, false);
    let peaks = report.variants.iter().filter(|variant| variant.is_peak);
    let peaks: Vec<&str> = peaks.map(|variant| variant.name.as_str()).collect();
    assert_eq!(peaks, ["training, 37 tokens"]);
    assert_eq!(report.variants.len(), 3);
}

/// A run whose first steps are trained by the graph of one configuration and the later ones by
/// that of another.
fn changing(from: &Config, to: &Config, change: u64) -> Result<StepPlan, StepError> {
    let phases = [("first", 0, from), ("second", change, to)];
    let graphs = phases.map(|(name, first_step, config)| {
        let form = variant_forms(config)[0];
        let step = differentiated(config, form, Target::Cpu).unwrap();
        VariantGraphs {
            phase: TrainingPhase {
                name: name.into(),
                first_step,
            },
            seq_len: form.seq_len,
            training: step.recompute(Recompute::None).unwrap(),
            evaluation: evaluation_graph(config, form, Target::Cpu).unwrap(),
        }
    });
    let options = options(to, Target::Cpu.into());
    StepPlan::of_graphs(to, graphs.into(), options)
}

fn losses(plan: StepPlan) -> Vec<u64> {
    let config = plan.config.clone();
    let mut session = Session::new(plan, EngineOptions::default()).unwrap();
    session.initialize(config.training.seed).unwrap();
    let mut losses = Vec::new();
    for step in 0..6 {
        let batch = tiny::batch(&config, step);
        losses.push(session.train_step(&batch, step).unwrap().loss.to_bits());
    }
    losses
}

#[test]
fn a_model_that_changes_goes_on_with_its_weights_and_states() {
    const CHANGE: usize = 3;
    for model in tiny::MODELS {
        let dropped = tiny::config(model, &[]);
        let whole = tiny::config(model, &[("model.dropout", "0")]);
        let unchanged = losses(StepPlan::new(&dropped, Target::Cpu, 0).unwrap());
        let same = losses(changing(&dropped, &dropped, CHANGE as u64).unwrap());
        assert_eq!(unchanged, same, "{model:?}");
        let changed = losses(changing(&dropped, &whole, CHANGE as u64).unwrap());
        assert_eq!(unchanged[..CHANGE], changed[..CHANGE], "{model:?}");
        assert_ne!(unchanged[CHANGE], changed[CHANGE], "{model:?}");
    }
}

#[test]
fn phases_that_train_other_parameters_are_refused() {
    let three = tiny::config(tiny::GPT2, &[]);
    let two = tiny::config(tiny::GPT2, &[("model.n_layers", "2")]);
    let message = changing(&three, &two, 3).unwrap_err().to_string();
    assert!(message.contains("`first` and `second`"), "{message}");
}
