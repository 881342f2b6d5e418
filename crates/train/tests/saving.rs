//! Saving and loading pass tensors through pieces of a stated size: no tensor has to be in host
//! memory as a whole.

mod tiny;

use std::cell::RefCell;
use std::fmt;

use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::Session;
use cinch_train::checkpoint::{CheckpointError, Store, TakePiece, TensorBytes, TensorView, load};
use cinch_weights::PIECE_BYTES;
use serde_json::json;

/// Wide enough for an embedding of two pieces and a rest.
const LARGE: [(&str, &str); 4] = [
    ("model.n_heads", "4"),
    ("model.vocab_size", "70000"),
    ("model.d_model", "128"),
    ("vram.max_seq_len", "16"),
];

/// A tensor that counts the pieces in which it was given.
struct Counted<'a> {
    inner: &'a dyn TensorBytes,
    pieces: &'a RefCell<Vec<usize>>,
}

impl fmt::Debug for Counted<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(formatter)
    }
}

impl TensorBytes for Counted<'_> {
    fn num_bytes(&self) -> u64 {
        self.inner.num_bytes()
    }

    fn give(&self, take: &mut TakePiece<'_>) -> Result<(), CheckpointError> {
        self.inner.give(&mut |piece| {
            self.pieces.borrow_mut().push(piece.len());
            take(piece)
        })
    }
}

#[test]
fn no_more_than_a_piece_is_handed_over_at_once() {
    let config = tiny::config(tiny::GPT2, &LARGE);
    let session = tiny::session(&config, 0, 2);
    let (weights, states) = (session.weights(), session.states());
    let pieces = RefCell::new(Vec::new());
    let views = [weights.views(), states.views()];
    let counted = views.each_ref().map(|views| {
        let inner = views.iter().map(|view| view.bytes);
        let counted = inner.map(|inner| Counted {
            inner,
            pieces: &pieces,
        });
        counted.collect::<Vec<_>>()
    });
    let saved: Vec<Vec<TensorView<'_>>> = views
        .iter()
        .zip(&counted)
        .map(|(views, counted)| {
            let both = views.iter().zip(counted);
            both.map(|(view, counted)| TensorView {
                bytes: counted,
                ..*view
            })
            .collect()
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    store.save(1, &saved[0], &saved[1], &json!({})).unwrap();
    let pieces = pieces.borrow();
    let sizes = views.iter().flatten().map(|view| view.bytes.num_bytes());
    assert_eq!(
        pieces.iter().sum::<usize>() as u64,
        sizes.clone().sum::<u64>()
    );
    // One tensor is larger than that, so that it was cut.
    assert!(sizes.max().unwrap() > PIECE_BYTES as u64);
    assert_eq!(pieces.iter().max(), Some(&PIECE_BYTES));
    assert!(pieces.len() > counted.iter().map(Vec::len).sum());

    // What was cut is whole again.
    let files = load(&store.path_of(1)).unwrap();
    let mut other = tiny::session(&config, 0, 2);
    other.initialize(config.training.seed + 1).unwrap();
    other.load(&files.model, &files.optimizer).unwrap();
    assert!(tiny::weights(&other) == tiny::weights(&session));
}

#[test]
fn the_plan_states_what_files_take() {
    let config = tiny::config(tiny::GPT2, &LARGE);
    let files = |target| {
        let step = StepPlan::new(&config, target, 0).unwrap();
        let host = step.host_memory();
        assert!(host.total() >= host.arena + host.files.of_run());
        host.files
    };
    let (here, card) = (files(Target::Cpu), files(Target::Cuda));
    assert_eq!(
        (here.saving, here.loading),
        (cinch_weights::WRITE_BUFFER as u64, 0)
    );
    assert_eq!(card.loading, PIECE_BYTES as u64);
    assert_eq!(card.saving, card.loading + here.saving);
    assert_eq!((here.merging, card.merging), (0, 0));
}

/// Saving and loading touch nothing but what they save: the arena is as large afterwards, and the
/// rest of it holds what it held.
#[test]
fn saving_adds_nothing_to_the_arena() {
    let config = tiny::config(tiny::GPT2, &[]);
    let mut session = tiny::session(&config, 0, 1);
    session.train_step(&tiny::batch(&config, 0), 0).unwrap();
    let arena = |session: &Session| {
        let arena = session.arena().unwrap();
        let whole = cinch_plan::Placement::in_arena(0, arena.len() as u64);
        arena.read::<u8>(whole).to_vec()
    };
    let before = arena(&session);
    assert_eq!(before.len() as u64, session.plan().arena_bytes());
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let (weights, states) = (session.weights(), session.states());
    store
        .save(1, &weights.views(), &states.views(), &json!({}))
        .unwrap();
    assert!(arena(&session) == before);
    let files = load(&store.path_of(1)).unwrap();
    session.load(&files.model, &files.optimizer).unwrap();
    assert!(arena(&session) == before);
}
