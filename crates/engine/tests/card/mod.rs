//! The GPU, for one test at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cinch_engine::cuda;

/// Holds the card until it is dropped; `None`, with a word, where there is none.
///
/// Tests run in threads of one process, which share the card's one context. When several prepare
/// products at once, cuBLASLt fails in one of them now and then
/// (`CUBLAS_STATUS_EXECUTION_FAILED`), and each times its candidates beside the others' work.
/// A training run has one executor, so neither happens there.
pub fn card() -> Option<MutexGuard<'static, ()>> {
    static CARD: Mutex<()> = Mutex::new(());
    if !cuda::is_available() {
        eprintln!("skipped: no GPU");
        return None;
    }
    // A test that failed leaves nothing on the card.
    Some(CARD.lock().unwrap_or_else(PoisonError::into_inner))
}
