//! Replays beside one another: each is a program of its own, so that threads have nothing to share.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A long replay holds a few hundred megabytes while it runs; so many run at a time at most.
const MOST_AT_A_TIME: usize = 4;

/// The results of a job for every item, in the order of the items.
pub(crate) fn map<Item: Sync, Output: Send>(
    items: &[Item],
    job: impl Fn(&Item) -> Output + Sync,
) -> Vec<Output> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.min(MOST_AT_A_TIME).min(items.len());
    if threads < 2 {
        return items.iter().map(job).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return done;
            };
            done.push((index, job(item)));
        }
    };
    let mut done = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|&(index, _)| index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_are_in_the_order_of_the_items() {
        for count in [0, 1, 3, 100] {
            let items: Vec<u64> = (0..count).collect();
            let squares: Vec<u64> = items.iter().map(|item| item * item).collect();
            assert_eq!(super::map(&items, |item| item * item), squares);
        }
    }
}
