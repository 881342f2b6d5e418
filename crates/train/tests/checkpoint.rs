//! A session that is saved, loaded elsewhere and continued is the one that never stopped.

mod tiny;

use cinch_train::checkpoint::{Store, load};
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
