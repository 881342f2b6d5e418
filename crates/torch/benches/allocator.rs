//! How many requests a second the allocator serves, as the best of several runs:
//! `cargo bench -p cinch-torch --bench allocator`.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::Instant;

use cinch_torch::allocator::{Allocator, AllocatorConfig, BlockId};

const RUNS: usize = 10;
const NUM_REQUESTS: usize = 1_000_000;
const MIB: u64 = 1 << 20;

/// A request to allocate, or the number of the allocation to free.
enum Request {
    Allocate(u64),
    Free(usize),
}

/// Requests like those of a recurrent model: many small tensors, some of megabytes, and about
/// `living` of them alive at once.
fn requests(living: usize) -> Vec<Request> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let sizes = [512, 4096, 16384, 98304, 393_216, 3 * MIB, 12 * MIB];
    let mut alive = Vec::new();
    let mut count = 0;
    (0..NUM_REQUESTS)
        .map(|_| {
            if alive.len() > (random() % (2 * living as u64)) as usize {
                let which = (random() % alive.len() as u64) as usize;
                Request::Free(alive.swap_remove(which))
            } else {
                alive.push(count);
                count += 1;
                Request::Allocate(sizes[(random() % sizes.len() as u64) as usize])
            }
        })
        .collect()
}

fn main() {
    for settings in ["", "expandable_segments:True"] {
        for living in [100, 1_000, 20_000] {
            let config = AllocatorConfig::parse(settings).expect("known settings");
            let requests = requests(living);
            let mut best = f64::INFINITY;
            for _ in 0..RUNS {
                let mut allocator = Allocator::new(config.clone(), None);
                let mut blocks: Vec<Option<BlockId>> = Vec::with_capacity(NUM_REQUESTS);
                let start = Instant::now();
                for request in &requests {
                    match *request {
                        Request::Allocate(bytes) => {
                            blocks.push(allocator.allocate(bytes, 0).ok());
                        }
                        Request::Free(allocation) => {
                            if let Some(block) = blocks[allocation].take() {
                                allocator.free(block);
                            }
                        }
                    }
                }
                best = best.min(start.elapsed().as_secs_f64());
            }
            println!(
                "{settings:<25} {living:>6} alive: {:.1} million requests/s",
                NUM_REQUESTS as f64 / best / 1e6
            );
        }
    }
}
