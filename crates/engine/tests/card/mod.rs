//! The GPU, for one test at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cinch_engine::cuda;

/// Holds the card until it is dropped. Tests that call it are ignored by default, so that those
/// that were not run are not counted as passed.
///
/// Tests run in threads of one process, which share the card's one context. When several prepare
/// products at once, cuBLASLt fails in one of them now and then
/// (`CUBLAS_STATUS_EXECUTION_FAILED`), and each times its candidates beside the others' work.
/// A training run has one executor, so neither happens there.
///
/// # Panics
/// Where there is no card.
pub fn card() -> MutexGuard<'static, ()> {
    static CARD: Mutex<()> = Mutex::new(());
    assert!(cuda::is_available(), "this test needs a GPU");
    // A test that failed leaves nothing on the card.
    CARD.lock().unwrap_or_else(PoisonError::into_inner)
}
