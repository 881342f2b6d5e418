//! A session that is saved, loaded elsewhere and continued is the one that never stopped.

mod tiny;

use cinch_train::checkpoint::{Dtype, Store, TensorView, load};
use cinch_weights::{bf16_bits, bf16_value};
use serde_json::json;

#[test]
fn a_loaded_session_goes_on_bit_by_bit() {
    const SAVED: u64 = 4;
    const END: u64 = 9;
    for model in tiny::MODELS {
        let config = tiny::config(model, &[]);
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();

        let mut uninterrupted = tiny::session(&config, 1, 2);
        let mut losses = Vec::new();
        for step in 0..END {
            if step == SAVED {
                let (weights, states) = (uninterrupted.weights(), uninterrupted.states());
                let state = json!({ "step": SAVED });
                store
                    .save(SAVED, &weights.views(), &states.views(), &state)
                    .unwrap();
            }
            let batch = tiny::batch(&config, step);
            losses.push(uninterrupted.train_step(&batch, step).unwrap());
        }

        let saved = load(&store.path_of(SAVED)).unwrap();
        assert_eq!(saved.state["step"], SAVED);
        // Other first weights, another plan and another number of threads: all must give way
        // to what was saved.
        let mut continued = tiny::session(&config, 0, 1);
        continued.initialize(config.training.seed + 1).unwrap();
        continued.train_step(&tiny::batch(&config, 77), 77).unwrap();
        continued.load(&saved.model, &saved.optimizer).unwrap();
        for step in SAVED..END {
            let batch = tiny::batch(&config, step);
            let result = continued.train_step(&batch, step).unwrap();
            assert_eq!(result, losses[step as usize], "step {step} of {model:?}");
        }
        let (expected, weights) = (tiny::weights(&uninterrupted), tiny::weights(&continued));
        assert!(weights == expected, "{model:?}");
        let states = |session: &cinch_train::Session| -> Vec<Vec<u8>> {
            let states = session.states();
            let views = states.views().into_iter();
            views.map(|state| state.bytes.to_vec().unwrap()).collect()
        };
        assert!(states(&continued) == states(&uninterrupted), "{model:?}");
    }
}

fn rounded(bytes: &[u8]) -> Vec<u16> {
    let words = bytes.as_chunks::<4>().0.iter();
    words
        .map(|&word| bf16_bits(f32::from_ne_bytes(word)))
        .collect()
}

fn all_rounded(views: &[TensorView<'_>]) -> Vec<Vec<u8>> {
    let bytes = |view: &TensorView<'_>| {
        let bits = rounded(&view.bytes.to_vec().unwrap()).into_iter();
        bits.flat_map(u16::to_le_bytes).collect()
    };
    views.iter().map(bytes).collect()
}

fn in_bf16<'a>(views: &[TensorView<'a>], bytes: &'a [Vec<u8>]) -> Vec<TensorView<'a>> {
    let halves = views.iter().zip(bytes);
    halves
        .map(|(view, bytes)| TensorView {
            name: view.name,
            shape: view.shape,
            dtype: Dtype::BF16,
            bytes,
        })
        .collect()
}

/// Weights and states that were kept in bf16 go on in fp32, value for value, and that is said.
#[test]
fn what_was_kept_in_bf16_is_taken_up_in_fp32() {
    let config = tiny::config(tiny::GPT2, &[]);
    let mut session = tiny::session(&config, 0, 1);
    session.train_step(&tiny::batch(&config, 0), 0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let (weights, states) = (session.weights(), session.states());
    let (weights, states) = (weights.views(), states.views());
    let (bits, state_bits) = (all_rounded(&weights), all_rounded(&states));
    let (weights, states) = (in_bf16(&weights, &bits), in_bf16(&states, &state_bits));
    store
        .save(1, &weights, &states, &json!({ "step": 1 }))
        .unwrap();
    let saved = load(&store.path_of(1)).unwrap();
    let mut taken_up = tiny::session(&config, 0, 1);
    let note = taken_up.load(&saved.model, &saved.optimizer).unwrap();
    assert_eq!(
        note.as_deref(),
        Some(
            "the checkpoint's weights were bf16: they go on in fp32; the checkpoint's optimizer \
             states were bf16: they go on in fp32"
        )
    );
    for (ours, theirs) in tiny::weights(&taken_up).iter().zip(tiny::weights(&session)) {
        let expected = rounded(&theirs.1).into_iter().map(bf16_value);
        let expected: Vec<u8> = expected.flat_map(f32::to_ne_bytes).collect();
        assert!(ours.1 == expected, "{}", ours.0);
    }
}
