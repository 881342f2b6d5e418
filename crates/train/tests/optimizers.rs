//! The ways to spend less memory on the optimizer: updates inside the backward and states in host
//! memory change no bit of the result, states in eight bits follow the same curve, and each saves
//! what its plan says.

mod tiny;

use cinch_config::{Config, Settings, Source};
use cinch_graph::op::MomentFormat;
use cinch_graph::{Role, Target};
use cinch_step::{StepError, StepPlan};
use cinch_train::checkpoint::{Store, load};
use cinch_train::{Batch, Session, TrainError};
use serde_json::json;

const INSIDE: (&str, &str) = ("vram.update_in_backward", "true");
const AWAY: (&str, &str) = ("vram.use_cpu_offload", "true");
const EIGHT_BIT: (&str, &str) = ("vram.optimizer_states", "8bit");
const ONE_MICRO_BATCH: (&str, &str) = ("vram.gradient_accumulation_steps", "1");
const UNCLIPPED: (&str, &str) = ("training.max_grad_norm", "0");
/// Wide enough that most weights are kept in eight bits.
const WIDE: [(&str, &str); 3] = [
    ("model.d_model", "64"),
    ("model.vocab_size", "97"),
    ("model.n_layers", "2"),
];
/// As [`WIDE`], with as many heads as that can be cut into.
const WIDE_GPT2: [(&str, &str); 4] = [WIDE[0], WIDE[1], WIDE[2], ("model.n_heads", "4")];

/// All tensors of a snapshot, in bits.
type Tensors = Vec<(String, Vec<u8>)>;

fn states(session: &Session) -> Tensors {
    let states = session.states();
    let views = states.views().into_iter();
    views
        .map(|state| (state.name.to_owned(), state.bytes.to_vec().unwrap()))
        .collect()
}

/// What came out, in bits.
#[derive(PartialEq)]
struct Trace {
    losses: Vec<u64>,
    norms: Vec<u64>,
    weights: Tensors,
    states: Tensors,
}

fn run(config: &Config, blocks: usize, steps: u64) -> Trace {
    let mut session = tiny::session(config, blocks, 2);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let result = session.train_step(&tiny::batch(config, step), step);
        let result = result.unwrap();
        losses.push(result.loss.to_bits());
        norms.push(result.gradient_norm.to_bits());
    }
    Trace {
        losses,
        norms,
        weights: tiny::weights(&session),
        states: states(&session),
    }
}

fn assert_identical(expected: &Trace, trace: &Trace, what: &str) {
    assert!(expected.losses == trace.losses, "{what}: losses");
    assert!(expected.norms == trace.norms, "{what}: gradient norms");
    for ((name, ours), (_, theirs)) in trace.weights.iter().zip(&expected.weights) {
        assert!(ours == theirs, "{what}: {name} differs after the run");
    }
    assert!(expected.states == trace.states, "{what}: states");
    assert!(expected.weights == trace.weights, "{what}: weights");
}

#[test]
fn updates_inside_the_backward_change_no_bit() {
    for model in tiny::MODELS {
        for own in [&[ONE_MICRO_BATCH][..], &[ONE_MICRO_BATCH, UNCLIPPED]] {
            let config = tiny::config(model, own);
            let clipped = config.training.max_grad_norm > 0.0;
            let expected = run(&config, 0, 12);
            let norms = expected.norms.iter().map(|&bits| f64::from_bits(bits));
            let limit = config.training.max_grad_norm;
            // A clip that never clips would prove nothing.
            assert!(norms.clone().all(|norm| norm > 0.0));
            assert!(!clipped || norms.clone().any(|norm| norm > limit));
            let inside = tiny::config(model, &[own, &[INSIDE]].concat());
            for blocks in [0, 1, config.model.num_blocks()] {
                let trace = run(&inside, blocks, 12);
                let what = format!("{model:?}, clipped {clipped}, {blocks} blocks");
                assert_identical(&expected, &trace, &what);
            }
            let plan = StepPlan::new(&inside, Target::Cpu, 0).unwrap();
            let passes = Some(1 + usize::from(clipped));
            assert_eq!(plan.training.backward_passes, passes);
        }
    }
}

#[test]
fn states_in_host_memory_change_no_bit() {
    for (model, wide) in [(tiny::MAMBA, &WIDE[..]), (tiny::GPT2, &WIDE_GPT2)] {
        for own in [&[][..], &[EIGHT_BIT], &[INSIDE, ONE_MICRO_BATCH]] {
            let here = tiny::config(model, &[wide, own].concat());
            let away = tiny::config(model, &[wide, own, &[AWAY]].concat());
            let (expected, trace) = (run(&here, 1, 8), run(&away, 1, 8));
            assert_identical(&expected, &trace, &format!("{model:?} {own:?}"));
        }
    }
}

#[test]
fn eight_bit_states_are_the_same_wherever_the_update_is() {
    let own = [&WIDE[..], &[EIGHT_BIT, ONE_MICRO_BATCH]].concat();
    let config = tiny::config(tiny::MAMBA, &own);
    let inside = tiny::config(tiny::MAMBA, &[&own[..], &[INSIDE]].concat());
    assert_identical(&run(&config, 0, 8), &run(&inside, 1, 8), "8-bit");
}

/// Sequences that can be learned: each token follows from the one before, with a jump now and
/// then.
fn learnable(config: &Config, step: u64) -> Batch {
    let vocabulary = config.model.vocab_size() as i32;
    let mut batch = tiny::batch(config, step);
    for tokens in batch.tokens_mut().chunks_exact_mut(config.batch.seq_len) {
        let mut last = tokens[0];
        for (place, token) in tokens.iter_mut().enumerate() {
            if place % 11 != 0 {
                *token = (5 * last + 3) % vocabulary;
            }
            last = *token;
        }
    }
    let [tokens, targets] = batch.get_disjoint_mut(["tokens", "targets"]);
    for (index, target) in targets.iter_mut().enumerate() {
        if let Some(&next) = tokens.get(index + 1) {
            *target = next;
        }
    }
    batch
}

fn curve(config: &Config, steps: u64) -> Vec<f64> {
    let mut session = tiny::session(config, 0, 2);
    (0..steps)
        .map(|step| {
            let batch = learnable(config, step);
            session.train_step(&batch, step).unwrap().loss
        })
        .collect()
}

/// How far the curve with eight bits may be from the one with fp32 states: relative, over a mean
/// of ten steps.
const TOLERANCE: f64 = 0.01;

#[test]
fn eight_bit_states_follow_the_curve_of_fp32() {
    for (model, wide) in [(tiny::MAMBA, &WIDE[..]), (tiny::GPT2, &WIDE_GPT2)] {
        let own = [("model.dropout", "0"), ("training.learning_rate", "1e-2")];
        let full = tiny::config(model, &[wide, &own].concat());
        let small = tiny::config(model, &[wide, &own, &[EIGHT_BIT]].concat());
        let (full, small) = (curve(&full, 100), curve(&small, 100));
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let mut worst = 0.0_f64;
        for (full, small) in full.chunks(10).zip(small.chunks(10)) {
            worst = worst.max((mean(small) / mean(full) - 1.0).abs());
        }
        // The curve has to fall, or it could not be missed.
        let fall = mean(&full[90..]) / mean(&full[..10]);
        assert!(fall < 0.8, "{model:?}: {fall}");
        assert!(worst <= TOLERANCE, "{model:?}: off by {worst}");
        assert_ne!(full, small, "eight bits are not in use");
    }
}

/// Bytes as they lie in memory.
fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(256)
}

/// What the tensors of a role take, each of them by `size` of its elements.
fn bytes_of(plan: &StepPlan, role: Role, size: impl Fn(usize) -> u64) -> u64 {
    let tensors = plan.training.tensors.iter();
    let tensors = tensors.filter(|tensor| tensor.role == role);
    tensors.map(|t| size(t.ty.shape.elements())).sum()
}

/// Arena and host memory as allocated.
fn allocated(session: &Session) -> (u64, u64) {
    let executor = session.engine().cpu().expect("a session on the CPU");
    (executor.arena().len() as u64, executor.host().len() as u64)
}

#[test]
fn what_is_saved_is_what_was_planned() {
    for (model, wide) in [(tiny::MAMBA, &WIDE[..]), (tiny::GPT2, &WIDE_GPT2)] {
        let config =
            |own: &[(&str, &str)]| tiny::config(model, &[wide, &[ONE_MICRO_BATCH], own].concat());
        let plain = tiny::session(&config(&[]), 0, 1);
        let (arena, _) = allocated(&plain);
        assert_eq!(arena, plain.plan().arena_bytes());
        let measured = |own: &[(&str, &str)]| {
            let session = tiny::session(&config(own), 0, 1);
            let (plan, held) = (session.plan().clone(), allocated(&session));
            assert_eq!(held.0, plan.arena_bytes());
            assert_eq!(held.1, plan.plan.host_bytes.max(1));
            (arena - held.0, plan)
        };
        let full = bytes_of(plain.plan(), Role::State, |n| aligned(4 * n as u64));

        let (saved, away) = measured(&[AWAY]);
        assert_eq!((saved, away.plan.host_bytes), (full, full));
        assert_eq!(away.breakdown().optimizer, 0);
        // On the CPU it is the same memory, and the total says so.
        assert_eq!(away.total_bytes(), plain.plan().total_bytes());

        let small = |plan: &StepPlan| -> u64 {
            let parameters = plan.training.parameters.iter();
            let elements = parameters.map(|p| plan.training.ty(p.master).shape.elements());
            let each = |n: usize| match n {
                n if n < MomentFormat::SMALLEST => 2 * aligned(4 * n as u64),
                n => 2 * (aligned(n as u64) + aligned(4 * n.div_ceil(256) as u64)),
            };
            elements.map(each).sum()
        };
        let (saved, eight) = measured(&[EIGHT_BIT]);
        assert_eq!(saved, full - small(&eight));
        assert_eq!(eight.breakdown().optimizer, small(&eight));
        let (saved, both) = measured(&[EIGHT_BIT, AWAY]);
        assert_eq!((saved, both.plan.host_bytes), (full, small(&both)));

        // Gradients that are gone, less the sums of their squares.
        let (_, inside) = measured(&[INSIDE]);
        let kept = bytes_of(&inside, Role::Gradient, |n| aligned(4 * n as u64));
        let all = bytes_of(plain.plan(), Role::Gradient, |n| aligned(4 * n as u64));
        let squares = inside.training.find("gradient_squares").unwrap();
        let squares = aligned(inside.training.ty(squares).bytes());
        let persistent = plain.plan().plan.persistent_bytes;
        assert_eq!(
            inside.plan.persistent_bytes,
            persistent - (all - kept) + squares
        );
        assert_eq!(inside.breakdown().gradients, kept);
    }
}

fn named(model: &str, size: &str, own: &[(&str, &str)]) -> Config {
    let shared = [
        ("model.type", model),
        ("model.size", size),
        ("vram.batch_size", "1"),
        ("vram.max_seq_len", "512"),
        ONE_MICRO_BATCH,
    ];
    let mut settings = Settings::new();
    for (key, value) in shared.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// One sequence of 512 tokens in fp32, in bytes: what the whole arena takes, and how much less
/// with states in eight bits, updates inside the backward (with clipping and without), and states
/// in host memory. The head's gradient, made with the loss, stays whole; it is more than half of
/// the small Mamba's.
#[test]
fn savings_of_the_smallest_sizes() {
    for (model, size, expected) in [
        (
            "mamba",
            "small",
            [
                795_246_848,
                240_424_448,
                56_195_840,
                56_195_840,
                322_449_408,
            ],
        ),
        (
            "gpt2",
            "gpt2",
            [
                2_250_273_024,
                742_025_728,
                340_207_872,
                340_207_872,
                995_518_464,
            ],
        ),
    ] {
        let plan = |own: &[(&str, &str)]| {
            let config = named(model, size, own);
            StepPlan::new(&config, Target::Cpu, 0).unwrap()
        };
        let arena = |own: &[(&str, &str)]| plan(own).arena_bytes();
        let all = arena(&[]);
        let saved = [
            all,
            all - arena(&[EIGHT_BIT]),
            all - arena(&[INSIDE]),
            all - arena(&[INSIDE, UNCLIPPED]),
            all - arena(&[AWAY]),
        ];
        assert_eq!(saved, expected, "{model} {size}");
        // The peak is at the loss, before the first gradient of a block: all of those are saved,
        // less the sums of their squares.
        let gradients = |own| bytes_of(&plan(own), Role::Gradient, |n| aligned(4 * n as u64));
        let gone = gradients(&[]) - gradients(&[INSIDE]);
        assert!(gone - saved[2] < 20_000, "{gone} {saved:?}");
    }
}

#[test]
fn updates_inside_the_backward_take_one_micro_batch() {
    let config = tiny::config(tiny::MAMBA, &[INSIDE]);
    let refused = StepPlan::new(&config, Target::Cpu, 0);
    let Err(error @ StepError::UpdateInBackward { accumulation: 2 }) = refused else {
        panic!("accepted");
    };
    let message = error.to_string();
    for part in [
        "vram.update_in_backward",
        "vram.gradient_accumulation_steps",
        "hint:",
        "--grad-accum 1",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let own = [INSIDE, ONE_MICRO_BATCH];
    let mut session = tiny::session(&tiny::config(tiny::MAMBA, &own), 0, 1);
    let batch = tiny::batch(&session.plan().config, 0);
    let gone = session.accumulate_gradients(&batch, 0);
    assert!(matches!(gone, Err(TrainError::NoGradients)));
}

/// Saves a session where it stands.
fn save(session: &Session, store: &Store, step: u64) {
    let (weights, states) = (session.weights(), session.states());
    let state = json!({ "step": step });
    store
        .save(step, &weights.views(), &states.views(), &state)
        .unwrap();
}

/// A session of `config` that goes on from a checkpoint, and what is said of it.
fn resumed(config: &Config, store: &Store, step: u64) -> (Session, Option<String>) {
    let saved = load(&store.path_of(step)).unwrap();
    let mut session = tiny::session(config, 0, 1);
    session.initialize(99).unwrap();
    session.train_step(&tiny::batch(config, 77), 77).unwrap();
    let note = session.load(&saved.model, &saved.optimizer).unwrap();
    (session, note)
}

fn go_on(session: &mut Session, config: &Config, steps: std::ops::Range<u64>) {
    for step in steps {
        session
            .train_step(&tiny::batch(config, step), step)
            .unwrap();
    }
}

#[test]
fn every_variant_resumes_bit_by_bit_and_saves_the_same_files() {
    for (model, wide) in [(tiny::MAMBA, &WIDE[..]), (tiny::GPT2, &WIDE_GPT2)] {
        for format in [&[][..], &[EIGHT_BIT]] {
            let base = [wide, &[ONE_MICRO_BATCH], format].concat();
            let mut files: Option<Vec<u8>> = None;
            for own in [&[][..], &[AWAY], &[INSIDE], &[AWAY, INSIDE]] {
                let config = tiny::config(model, &[&base[..], own].concat());
                let folder = tempfile::tempdir().unwrap();
                let store = Store::open(folder.path()).unwrap();
                let mut whole = tiny::session(&config, 1, 2);
                go_on(&mut whole, &config, 0..4);
                save(&whole, &store, 4);
                let (mut second, note) = resumed(&config, &store, 4);
                assert_eq!(note, None);
                go_on(&mut whole, &config, 4..8);
                go_on(&mut second, &config, 4..8);
                assert!(tiny::weights(&whole) == tiny::weights(&second), "{own:?}");
                assert!(states(&whole) == states(&second), "{own:?}");

                let path = store.path_of(4).join("optimizer.safetensors");
                let file = std::fs::read(path).unwrap();
                let expected = files.get_or_insert_with(|| file.clone());
                assert!(*expected == file, "{own:?} saves other bytes");
            }
        }
    }
}

/// From fp32 to eight bits and back: a run goes on in either format, and says so.
#[test]
fn a_run_may_go_on_in_the_other_format() {
    let full = tiny::config(tiny::MAMBA, &WIDE);
    let small = tiny::config(tiny::MAMBA, &[&WIDE[..], &[EIGHT_BIT, AWAY]].concat());
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let mut first = tiny::session(&full, 0, 2);
    go_on(&mut first, &full, 0..4);
    save(&first, &store, 4);

    let (encoded, note) = resumed(&small, &store, 4);
    assert!(note.unwrap().contains("8 bits"));
    assert!(tiny::weights(&encoded) == tiny::weights(&first));
    save(&encoded, &store, 5);
    let (decoded, note) = resumed(&full, &store, 5);
    assert!(note.unwrap().contains("fp32"));

    // Once through eight bits: second moments within a sixteenth, small tensors untouched.
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|&word| f32::from_le_bytes(word)).collect()
    };
    let mut converted = 0;
    for ((name, before), (_, after)) in states(&first).iter().zip(&states(&decoded)) {
        let (before, after) = (floats(before), floats(after));
        if before.len() < MomentFormat::SMALLEST {
            assert_eq!(before, after, "{name}");
            continue;
        }
        converted += 1;
        assert_ne!(before, after, "{name}");
        for (block, again) in before.chunks(256).zip(after.chunks(256)) {
            let largest = block.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
            for (x, y) in block.iter().zip(again) {
                let error = (x - y).abs();
                let bound = if name.ends_with(".v") {
                    x / 15.9 + 3e-10 * largest
                } else {
                    (x.abs() * largest).sqrt() / 126.0 + largest / 64_000.0
                };
                assert!(error <= bound, "{name}: {x} became {y}");
            }
        }
    }
    assert!(converted > 4);
    // A second trip changes nothing more.
    save(&decoded, &store, 6);
    let (again, _) = resumed(&small, &store, 6);
    assert!(
        states(&again)
            .iter()
            .zip(&states(&encoded))
            .all(|(a, b)| { !a.0.ends_with('m') && !a.0.ends_with('v') || a.1 == b.1 })
    );
}

/// States in eight bits whose scales are missing are an error, not zeros.
#[test]
fn codes_without_scales_are_refused() {
    let small = tiny::config(tiny::MAMBA, &[&WIDE[..], &[EIGHT_BIT]].concat());
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let session = tiny::session(&small, 0, 1);
    let (weights, states) = (session.weights(), session.states());
    let states: Vec<_> = states
        .views()
        .into_iter()
        .filter(|state| !state.name.ends_with(".v.scales"))
        .collect();
    store
        .save(1, &weights.views(), &states, &json!({}))
        .unwrap();
    let saved = load(&store.path_of(1)).unwrap();
    for own in [&[][..], &[EIGHT_BIT]] {
        let config = tiny::config(tiny::MAMBA, &[&WIDE[..], own].concat());
        let mut session = tiny::session(&config, 0, 1);
        let problem = session.load(&saved.model, &saved.optimizer).unwrap_err();
        assert!(problem.contains(".v.scales`"), "{problem}");
    }
}
