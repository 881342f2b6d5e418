//! A wall around code of others that may panic on what a file holds.
//!
//! The panic becomes a message, and the hook that would print it stays silent for the thread that
//! is inside the wall. Only an abort gets through: what could end in one (memory without bound, a
//! stack that overflows) is refused before, see `rules` and `bounded`.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`; a panic in it is an error with its message.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    silence_the_hook();
    let outer = IS_INSIDE.replace(true);
    // What a panic leaves half done is dropped with `work`, or, in a tokenizer, is a cache of
    // words that is written only with finished ones.
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    IS_INSIDE.set(outer);
    result.map_err(|payload| format!("its rules fail ({})", message(&*payload)))
}

fn silence_the_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |information| {
            if !IS_INSIDE.get() {
                before(information);
            }
        }));
    });
}

fn message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_message_and_what_follows_runs() {
        let empty: Vec<u8> = Vec::new();
        let error = guarded(|| empty[3]).unwrap_err();
        assert!(error.contains("index out of bounds"), "{error}");
        assert!(guarded(|| -> u8 { panic!("a {}", "reason") }).is_err());
        assert_eq!(guarded(|| 4), Ok(4));
        assert!(!IS_INSIDE.get());
    }
}
