//! How long-running work tells its caller how far it is, without printing anything itself.

/// Receives progress in bytes. Calls may come from several threads at once.
pub trait Progress: Sync {
    /// A phase starts: `what` is a short present participle such as "tokenizing".
    fn begin(&self, what: &str, total_bytes: u64);
    /// `bytes` more of the current phase are done.
    fn advance(&self, bytes: u64);
    /// The current phase is over.
    fn end(&self);
    /// Whether the work should end early, with [`DataError::Interrupted`](crate::DataError). Asked
    /// at least every 50 ms while text is tokenised, and after every few megabytes elsewhere.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// Ignores all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _what: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn end(&self) {}
}
