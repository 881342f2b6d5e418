//! The arena's bounds: a place that is not inside it cannot be viewed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cinch_engine::{Arena, EngineError};
use cinch_plan::Placement;

const BYTES: u64 = 1024;

fn place(offset: u64, bytes: u64) -> Placement {
    Placement::in_arena(offset, bytes)
}

#[test]
fn starts_as_zeros_and_keeps_what_is_written() {
    let mut arena = Arena::new(BYTES).unwrap();
    assert_eq!(arena.len() as u64, BYTES);
    assert!(arena.read::<u8>(place(0, BYTES)).iter().all(|&b| b == 0));
    arena.write::<f32>(place(256, 16)).fill(1.5);
    assert_eq!(arena.read::<f32>(place(256, 16)), [1.5; 4]);
    // Neither neighbour has changed.
    assert_eq!(arena.read::<f32>(place(240, 16)), [0.0; 4]);
    assert_eq!(arena.read::<f32>(place(272, 16)), [0.0; 4]);
    // The last elements are inside.
    arena.write::<f64>(place(BYTES - 8, 8))[0] = 2.0;
    assert_eq!(arena.read::<f64>(place(BYTES - 8, 8)), [2.0]);
}

#[test]
fn refuses_a_place_outside() {
    let mut arena = Arena::new(BYTES).unwrap();
    for outside in [
        place(BYTES, 4),
        place(BYTES - 4, 8),
        place(0, BYTES + 4),
        place(BYTES + 4096, 0),
        place(u64::MAX - 3, 8),
        place(8, u64::MAX),
    ] {
        let read = catch_unwind(|| arena.read::<f32>(outside).len());
        assert!(read.is_err(), "read {outside:?}");
        let write = AssertUnwindSafe(|| arena.write::<f32>(outside).len());
        assert!(catch_unwind(write).is_err(), "wrote {outside:?}");
    }
}

#[test]
fn refuses_a_place_between_elements() {
    let arena = Arena::new(BYTES).unwrap();
    assert!(catch_unwind(|| arena.read::<f64>(place(4, 8)).len()).is_err());
    assert!(catch_unwind(|| arena.read::<f32>(place(4, 8)).len()).is_ok());
    assert!(catch_unwind(|| arena.read::<i32>(place(2, 4)).len()).is_err());
}

#[test]
fn says_how_much_it_could_not_get() {
    let error = Arena::new(u64::MAX).err();
    assert!(
        matches!(error, Some(EngineError::OutOfMemory { bytes: u64::MAX })),
        "{error:?}"
    );
}
