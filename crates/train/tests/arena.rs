//! The arena is the memory of a step: its peak and extent are the planned ones, nothing is
//! read that is dead or written that is not an output, and nothing of a tensor's size is allocated
//! beside it. `process_size.rs` looks at the process.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is an unsafe trait"
)]

mod account;
mod tiny;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use account::Account;
use cinch_train::Session;

/// The system's allocator, counting what watched threads ask for.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static NUM_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn count(bytes: usize) {
    if WATCHED.try_with(Cell::get) == Ok(true) {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        LARGEST.fetch_max(bytes, Ordering::Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Has the executor's threads counted, or not.
fn watch(session: &Session, watched: bool) {
    let executor = session.engine().cpu().expect("a session on the CPU");
    executor.install(|| rayon::broadcast(|_| WATCHED.set(watched)));
}

/// Number and largest size of the allocations that watched threads make during `work`.
fn allocations(work: impl FnOnce()) -> (usize, usize) {
    NUM_ALLOCATIONS.store(0, Ordering::Relaxed);
    LARGEST.store(0, Ordering::Relaxed);
    WATCHED.set(true);
    work();
    WATCHED.set(false);
    (
        NUM_ALLOCATIONS.load(Ordering::Relaxed),
        LARGEST.load(Ordering::Relaxed),
    )
}

/// The queue through which work reaches the threads grows by a block of about 1.5 KiB each
/// time this many pieces have passed through it, and frees the block before.
const QUEUE_BLOCK: usize = 63;

#[test]
fn a_step_allocates_nothing() {
    const STEPS: u64 = 40;
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        config.batch.buckets = vec![12];
        let mut session = tiny::session(&config, 1, 2);
        let batch = |step| {
            let mut batch = tiny::batch(&config, step);
            // The first micro batch of every third step is short.
            for row in (0..config.batch.batch_size).filter(|_| step % 3 == 1) {
                batch.set_row_len(row, 12);
            }
            batch
        };
        let batches: Vec<_> = (0..STEPS).map(batch).collect();
        let run = |session: &mut Session, steps: std::ops::Range<u64>| {
            for step in steps {
                session.train_step(&batches[step as usize], step).unwrap();
            }
        };
        run(&mut session, 0..1);
        watch(&session, true);
        let (number, largest) = allocations(|| run(&mut session, 1..5));
        assert_eq!(number, 0, "the largest of {largest} bytes ({model:?})");

        let (number, largest) = allocations(|| run(&mut session, 5..STEPS));
        // Ending threads allocate, in a time that is no step's.
        watch(&session, false);
        // Each micro batch and the update are one piece of work.
        let pieces = (STEPS as usize - 5) * (config.batch.accumulation + 1);
        assert!(largest < 4096, "{largest} bytes ({model:?})");
        assert!(number <= pieces / QUEUE_BLOCK + 1, "{number} ({model:?})");
    }
}

#[test]
fn peak_and_extent_are_the_planned_ones_and_only_outputs_are_written() {
    for model in tiny::MODELS {
        for own in tiny::VARIANTS {
            let config = tiny::config(model, own);
            for blocks in 0..=config.model.num_blocks() {
                let mut session = tiny::session(&config, blocks, 2);
                let mut account = Account::new(&session);
                let batch = tiny::batch(&config, 0);
                let mut after = |arena: &mut _, node| account.after(arena, node);
                session.train_step_observed(&batch, 0, &mut after).unwrap();
                account.close();
                let arena = session.arena().expect("a session on the CPU");
                assert_eq!(arena.len() as u64, session.plan().arena_bytes());
            }
        }
    }
}

#[test]
fn nothing_dead_is_read() {
    let variants = tiny::VARIANTS.iter();
    for (model, own) in tiny::MODELS
        .iter()
        .flat_map(|m| variants.clone().map(move |v| (m, v)))
    {
        let config = tiny::config(model, own);
        let run = |poisoned: bool| {
            let mut session = tiny::session(&config, 1, 2);
            if poisoned {
                // Leaves all that is transient as NaN, before the run proper starts over.
                poisoned_step(&mut session, 0);
                session.initialize(config.training.seed).unwrap();
            }
            let mut losses = Vec::new();
            for step in 0..3 {
                let batch = tiny::batch(&config, step);
                losses.push(if poisoned {
                    poisoned_step(&mut session, step)
                } else {
                    session.train_step(&batch, step).unwrap().loss.to_bits()
                });
                let mut held_out = tiny::batch(&config, 100 + step);
                held_out.truncate(config.batch.batch_size);
                losses.push(session.evaluate(&held_out).unwrap().loss().to_bits());
            }
            (losses, tiny::weights(&session))
        };
        assert!(run(false) == run(true), "{model:?} {own:?}");
    }
}

/// A step with everything dead overwritten; the bits of its loss.
fn poisoned_step(session: &mut Session, step: u64) -> u64 {
    let mut account = Account::new(session);
    let batch = tiny::batch(&session.plan().config, step);
    let mut after = |arena: &mut _, node| account.after(arena, node);
    let result = session.train_step_observed(&batch, step, &mut after);
    account.close();
    let loss = result.unwrap().loss;
    assert!(loss.is_finite(), "{loss}");
    loss.to_bits()
}
