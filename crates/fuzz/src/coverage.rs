//! Which edges of the program an input has reached.
//!
//! LLVM's coverage pass, which stable Rust offers as `-Cpasses=sancov-module`, gives every edge
//! a byte that counts. It calls the function below before `main` with where those bytes are. A
//! build without the pass never calls it: there is no counter, and inputs are kept by nobody.

use std::slice;
use std::sync::Mutex;

/// Counters of one part of the program, by address and number.
static PARTS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

#[expect(
    unsafe_code,
    reason = "the name is LLVM's, and a binary has only one function of it"
)]
// SAFETY: nothing else has this name: no sanitizer is linked.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, end: *mut u8) {
    let part = (start.addr(), end.addr().saturating_sub(start.addr()));
    start.expose_provenance();
    if let Ok(mut parts) = PARTS.lock()
        && part.1 > 0
        && !parts.contains(&part)
    {
        parts.push(part);
    }
}

/// What all inputs so far have reached.
pub struct Coverage {
    counters: Vec<&'static mut [u8]>,
    /// By edge: the magnitudes of counts that were seen, one bit each.
    seen: Vec<u8>,
    num_edges: usize,
}

impl Coverage {
    /// Takes the counters. To be called once: the second caller gets none.
    pub fn new() -> Coverage {
        let parts = PARTS.lock().map(|mut parts| std::mem::take(&mut *parts));
        let counters: Vec<&'static mut [u8]> =
            parts.unwrap_or_default().into_iter().map(part).collect();
        let seen = vec![0; counters.iter().map(|part| part.len()).sum()];
        Coverage {
            counters,
            seen,
            num_edges: 0,
        }
    }

    /// Edges that were reached so far.
    pub fn num_edges(&self) -> usize {
        self.num_edges
    }

    /// Forgets what was counted since the last input.
    pub fn clear(&mut self) {
        for part in &mut self.counters {
            part.fill(0);
        }
    }

    /// Whether an edge was reached for the first time, or a new number of times by magnitude.
    pub fn has_grown(&mut self) -> bool {
        let mut grown = false;
        let mut base = 0;
        for part in &self.counters {
            for (index, block) in part.chunks(BLOCK).enumerate() {
                // Nearly all are zero, and the system's comparison is not counted itself.
                if *block == ZEROS[..block.len()] {
                    continue;
                }
                for (offset, &count) in block.iter().enumerate() {
                    let seen = &mut self.seen[base + index * BLOCK + offset];
                    let magnitude = magnitude(count);
                    if *seen & magnitude != magnitude {
                        self.num_edges += usize::from(*seen == 0);
                        *seen |= magnitude;
                        grown = true;
                    }
                }
            }
            base += part.len();
        }
        grown
    }
}

/// Counters that are looked at together.
const BLOCK: usize = 256;
const ZEROS: [u8; BLOCK] = [0; BLOCK];

#[expect(unsafe_code, reason = "the counters are LLVM's statics")]
fn part((address, length): (usize, usize)) -> &'static mut [u8] {
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: LLVM gave the bounds of a static array, which only its own increments and the one
    // `Coverage` touch; a byte that is torn between the two is a wrong count and nothing worse.
    unsafe { slice::from_raw_parts_mut(start, length) }
}

/// 1, 2, 3, 4–7, 8–15, 16–31, 32–127 and more, a bit for each.
fn magnitude(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..=7 => 8,
        8..=15 => 16,
        16..=31 => 32,
        32..=127 => 64,
        128.. => 128,
    }
}
