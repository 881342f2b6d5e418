//! Encoding many pieces of text on all cores, without waiting for them longer than one wants.
//!
//! A piece takes a fraction of a second, but the rules of a tokenizer.json can take any time, and
//! no thread can be made to stop. So the threads are not waited for: who asks for an interruption
//! is answered at once, and a piece that does not end is an error. What a thread that was left
//! alone computes is dropped when it ends, or with the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::document::Piece;
use crate::error::DataError;
use crate::progress::Progress;
use crate::tokenizer::{PIECE_BYTES, Tokenizer};

/// How often an interruption is looked for.
const LOOK: Duration = Duration::from_millis(50);
/// Far longer than any piece takes on any machine, without which a hang would have no end.
const PATIENCE: Duration = Duration::from_secs(120);

/// Tells the threads that nobody waits for them any more.
struct Abandon(Arc<AtomicBool>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The ids of each piece, in order.
pub(crate) fn encode_all(
    tokenizer: &Tokenizer,
    pieces: &Arc<Vec<Piece>>,
    progress: &dyn Progress,
) -> Result<Vec<Vec<u32>>, DataError> {
    let is_abandoned = Arc::new(AtomicBool::new(false));
    let _abandon = Abandon(is_abandoned.clone());
    let next = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = mpsc::channel();
    for _ in 0..rayon::current_num_threads().min(pieces.len()) {
        let (encoder, pieces) = (tokenizer.clone(), pieces.clone());
        let (next, is_abandoned) = (next.clone(), is_abandoned.clone());
        let sender = sender.clone();
        let work = move || {
            while !is_abandoned.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(index) else {
                    return;
                };
                if sender.send((index, encoder.encode(&piece.text))).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("tokenize".to_owned())
            .spawn(work)
            .map_err(|error| failed(tokenizer, &format!("no thread could be started: {error}")))?;
    }
    drop(sender);

    let mut encoded = vec![Vec::new(); pieces.len()];
    let mut num_encoded = 0;
    let mut last = Instant::now();
    while num_encoded < pieces.len() {
        match receiver.recv_timeout(LOOK) {
            Ok((index, ids)) => {
                encoded[index] = ids?;
                num_encoded += 1;
                progress.advance(pieces[index].source_bytes);
                last = Instant::now();
            }
            Err(RecvTimeoutError::Timeout) if last.elapsed() > PATIENCE => {
                return Err(DataError::Stuck {
                    tokenizer: tokenizer.name().to_owned(),
                    piece_bytes: PIECE_BYTES,
                    seconds: PATIENCE.as_secs(),
                });
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed(tokenizer, "a thread ended before its work"));
            }
        }
        if progress.is_interrupted() {
            return Err(DataError::Interrupted);
        }
    }
    Ok(encoded)
}

fn failed(tokenizer: &Tokenizer, problem: &str) -> DataError {
    DataError::Encode {
        tokenizer: tokenizer.name().to_owned(),
        problem: problem.to_owned(),
    }
}
