//! A loss of several terms in a session: what each comes to, what their weights do to gradients,
//! and that weights change between steps; and parameters with learning rates of their own.

mod tiny;

use cinch_config::Config;
use cinch_engine::EngineOptions;
use cinch_graph::op::{GradientFormat, IGNORE_INDEX, MomentFormat};
use cinch_graph::{Count, DType, Graph, Init, Optimizer, Target, TrainingGraph, differentiate};
use cinch_model::TrainingPhase;
use cinch_step::{StepError, StepPlan, VariantGraphs, options};
use cinch_train::{Batch, Session, TrainError};

const VOCABULARY: usize = 61;
const WIDTH: usize = 12;
const FAST: f64 = 7.0;
const INIT: Init = Init::Normal { std: 0.3 };

fn config(own: &[(&str, &str)]) -> Config {
    let shared = [
        ("training.max_grad_norm", "0"),
        ("training.warmup_steps", "0"),
    ];
    tiny::config(tiny::GPT2, &[&shared[..], own].concat())
}

/// Two heads over one layer, the second with targets and a learning rate of its own.
fn forward(config: &Config) -> Graph {
    let mut g = Graph::new(DType::F32);
    let shape = [config.batch.batch_size, config.batch.seq_len];
    let tokens = g.batch("tokens", shape, DType::I32);
    let table = g.weight("table", [VOCABULARY, WIDTH], INIT);
    let h = g.embedding("embedding", tokens, table, None, None).unwrap();
    for name in ["targets", "others"] {
        let head = g.weight(&format!("{name}.head"), [VOCABULARY, WIDTH], INIT);
        if name == "others" {
            g.scale_learning_rate(FAST);
        }
        let targets = g.batch(name, shape, DType::I32);
        let loss = format!("{name}.loss");
        g.cross_entropy(&loss, h, head, targets, 0.0, None).unwrap();
    }
    g
}

fn optimizer(config: &Config) -> Optimizer {
    Optimizer {
        beta1: config.training.adam_beta1,
        beta2: config.training.adam_beta2,
        epsilon: config.training.adam_epsilon,
        weight_decay: config.training.weight_decay,
        max_norm: None,
        moments: MomentFormat::Full,
        gradients: GradientFormat::Full,
    }
}

fn planned(config: &Config, training: TrainingGraph) -> Result<StepPlan, StepError> {
    let graphs = VariantGraphs {
        phase: TrainingPhase::WHOLE,
        seq_len: config.batch.seq_len,
        training,
        evaluation: forward(config),
    };
    StepPlan::of_graphs(config, vec![graphs], options(config, Target::Cpu.into()))
}

fn session(config: &Config) -> Session {
    let training = differentiate(forward(config), &optimizer(config)).unwrap();
    let plan = planned(config, training).unwrap();
    let mut session = Session::new(plan, EngineOptions::default()).unwrap();
    session.initialize(3).unwrap();
    session
}

/// Tokens and targets of the tiny models; of the others, every third counts.
fn batch(session: &Session) -> Batch {
    let config = &session.plan().config;
    let from = tiny::batch(config, 5);
    let mut batch = Batch::of(
        &session.plan().training,
        config.batch.batch_size,
        config.batch.effective_batch(),
    );
    batch.tokens_mut().copy_from_slice(from.tokens());
    batch.targets_mut().copy_from_slice(from.targets());
    for (i, target) in batch.get_mut("others").iter_mut().enumerate() {
        *target = match i % 3 {
            0 => (i % VOCABULARY) as i32,
            _ => IGNORE_INDEX,
        };
    }
    batch
}

fn weigh(session: &mut Session, weights: [f64; 2]) {
    assert!(session.weigh_term("targets.loss", weights[0]));
    assert!(session.weigh_term("others.loss", weights[1]));
}

/// The gradients with these weights of the two terms, all in one.
fn gradients(session: &mut Session, weights: [f64; 2]) -> Vec<f64> {
    weigh(session, weights);
    let batch = batch(session);
    session.accumulate_gradients(&batch, 0).unwrap();
    let gradients = session.gradients().unwrap().into_iter();
    gradients
        .flat_map(|(_, values)| values.into_iter().map(f64::from))
        .collect()
}

#[test]
fn gradients_are_the_weighted_sum_of_those_of_the_terms() {
    let mut session = session(&config(&[]));
    let first = gradients(&mut session, [1.0, 0.0]);
    let second = gradients(&mut session, [0.0, 1.0]);
    let both = gradients(&mut session, [0.3, 2.0]);
    let largest = both.iter().fold(0.0_f64, |most, g| most.max(g.abs()));
    assert!(first.iter().chain(&second).any(|g| g.abs() > 1e-3));
    for ((a, b), c) in first.iter().zip(&second).zip(&both) {
        let expected = 0.3 * a + 2.0 * b;
        assert!((c - expected).abs() < 1e-6 * largest, "{c} for {expected}");
    }
    assert!(!session.weigh_term("no such term", 1.0));
}

/// Each value is the average over its own targets, whatever its weight and however the batch is
/// cut; the loss is their weighted sum.
#[test]
fn a_step_reports_every_term() {
    let whole = [
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "1"),
    ];
    let mut found = Vec::new();
    for (own, weights) in [
        (&[][..], [1.0, 1.0]),
        (&[], [0.5, 3.0]),
        (&whole, [1.0, 0.25]),
    ] {
        let mut session = session(&config(own));
        weigh(&mut session, weights);
        let batch = batch(&session);
        let result = session.train_step(&batch, 0).unwrap();
        let names: Vec<&str> = result.terms.iter().map(|t| &*t.name).collect();
        assert_eq!(names, ["targets.loss", "others.loss"]);
        let values = [result.terms[0].value, result.terms[1].value];
        let expected = weights[0] * values[0] + weights[1] * values[1];
        assert!((result.loss - expected).abs() < 1e-12);
        found.push(values);
    }
    for values in &found {
        // About the entropy of a vocabulary that nothing is known of.
        let uniform = (VOCABULARY as f64).ln();
        for (value, first) in values.iter().zip(found[0]) {
            assert!((value - uniform).abs() < 1.0, "{value} for {uniform}");
            assert!((value - first).abs() < 1e-5, "{value} for {first}");
        }
    }
}

/// A term of the whole batch: one micro batch is planned, two are refused with the reason.
#[test]
fn a_step_that_needs_the_whole_batch_is_not_cut() {
    let plan = |config: &Config| {
        let mut graph = forward(config);
        graph.terms[1].count = Count::Batch;
        let training = differentiate(graph, &optimizer(config)).unwrap();
        planned(config, training)
    };
    let whole = config(&[
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "1"),
    ]);
    let mut session = Session::new(plan(&whole).unwrap(), EngineOptions::default()).unwrap();
    session.initialize(3).unwrap();
    let batch = batch(&session);
    let result = session.train_step(&batch, 0).unwrap();
    // The sum, because the batch counts as one.
    let others = batch.num_targets_in("others") as f64;
    let uniform = (VOCABULARY as f64).ln();
    let mean = result.terms[1].value / others;
    assert!((mean - uniform).abs() < 1.0, "{mean} for {uniform}");

    let message = plan(&config(&[])).unwrap_err().to_string();
    for part in ["2 micro batches", "`others.loss`", "--batch-size", "4"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn evaluations_add_up_each_term_over_its_own_targets() {
    let mut session = session(&config(&[("vram.gradient_accumulation_steps", "1")]));
    weigh(&mut session, [1.0, 0.5]);
    let batch = batch(&session);
    let mut evaluation = session.evaluate(&batch).unwrap();
    let others = batch.num_targets_in("others");
    assert!(others > 0 && others != batch.num_targets());
    assert_eq!(evaluation.terms[1].count, others);
    let loss = evaluation.loss();
    evaluation.add(session.evaluate(&batch).unwrap());
    assert_eq!(evaluation.terms[1].count, 2 * others);
    assert!((evaluation.loss() - loss).abs() < 1e-9);
    // The same batch in training, before anything was updated.
    let trained = session.train_step(&batch, 0).unwrap();
    assert!(
        (trained.loss - loss).abs() < 1e-5,
        "{} {loss}",
        trained.loss
    );
}

#[test]
fn a_term_that_nothing_counts_for_is_zero_and_none_at_all_is_an_error() {
    let mut session = session(&config(&[]));
    let mut batch = batch(&session);
    batch.get_mut("others").fill(IGNORE_INDEX);
    let result = session.train_step(&batch, 0).unwrap();
    assert!(result.terms[0].value > 1.0 && result.terms[1].value == 0.0);
    batch.targets_mut().fill(IGNORE_INDEX);
    let nothing = session.train_step(&batch, 1);
    assert!(matches!(nothing, Err(TrainError::NoTargets { step: 1 })));
}

fn floats(session: &Session, name: &str) -> Vec<f64> {
    let weights = session.weights();
    let views = weights.views();
    let view = views.iter().find(|view| view.name == name).unwrap();
    let bytes = view.bytes.to_vec().unwrap();
    let words = bytes.as_chunks::<4>().0.iter();
    words
        .map(|&word| f64::from(f32::from_ne_bytes(word)))
        .collect()
}

/// The first step of AdamW by hand: m̂ is the gradient and √v̂ its magnitude.
#[test]
fn a_learning_rate_is_scaled_with_its_decay() {
    let mut session = session(&config(&[]));
    let batch = batch(&session);
    let rate = session.accumulate_gradients(&batch, 0).unwrap();
    let gradients: Vec<(String, Vec<f32>)> = session
        .gradients()
        .unwrap()
        .into_iter()
        .map(|(name, values)| (name.to_owned(), values))
        .collect();
    let before: Vec<Vec<f64>> = gradients
        .iter()
        .map(|(name, _)| floats(&session, name))
        .collect();
    session.train_step(&batch, 0).unwrap();
    let training = session.plan().config.training.clone();
    let (decay, epsilon) = (training.weight_decay, training.adam_epsilon);
    assert!(decay > 0.0 && rate > 0.0);
    for ((name, gradient), before) in gradients.iter().zip(before) {
        let rate = match name.as_str() {
            "others.head" => rate * FAST,
            _ => rate,
        };
        let after = floats(&session, name);
        for ((&g, p), after) in gradient.iter().zip(before).zip(after) {
            let g = f64::from(g);
            let expected = p * (1.0 - rate * decay) - rate * g / (g.abs() + epsilon);
            assert!(
                (after - expected).abs() < 1e-6,
                "{name}: {after} for {expected}"
            );
        }
    }
}
