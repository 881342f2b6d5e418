//! Offsets for buffers with random lifetimes and sizes.

use cinch_graph::ALIGNMENT;
use cinch_plan::{Buffer, place};
use proptest::prelude::*;

use crate::random_model::cases;

fn buffers() -> impl Strategy<Value = Vec<Buffer>> {
    let bytes = prop_oneof![
        4 => 1..5_000_u64,
        2 => prop::sample::select(vec![1, 255, 256, 257, 512, 1 << 20]),
        1 => Just(0),
        1 => 1..(1_u64 << 40),
    ];
    let buffer = (bytes, 0..40_usize, 0..40_usize).prop_map(|(bytes, start, length)| Buffer {
        bytes,
        start,
        end: start + length * length / 40,
        owners: Vec::new(),
    });
    prop::collection::vec(buffer, 0..60)
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// The most that lives at once.
fn largest_live_sum(buffers: &[Buffer]) -> u64 {
    let at = |node: usize| {
        let live = buffers.iter().filter(|b| b.start <= node && node <= b.end);
        live.map(|b| aligned(b.bytes)).sum()
    };
    (0..100).map(at).max().unwrap_or(0)
}

fn extent(buffers: &[Buffer], offsets: &[u64]) -> u64 {
    let ends = buffers
        .iter()
        .zip(offsets)
        .map(|(b, o)| o + aligned(b.bytes));
    ends.max().unwrap_or(0)
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn what_lives_together_lies_apart(buffers in buffers()) {
        let offsets = place(&buffers);
        prop_assert_eq!(offsets.len(), buffers.len());
        for (i, a) in buffers.iter().enumerate() {
            prop_assert_eq!(offsets[i] % ALIGNMENT, 0);
            for (j, b) in buffers.iter().enumerate().skip(i + 1) {
                let together = a.start.max(b.start) <= a.end.min(b.end);
                prop_assert_eq!(a.overlaps(b), together);
                let end = |k: usize| offsets[k] + buffers[k].bytes;
                let apart = end(i) <= offsets[j] || end(j) <= offsets[i];
                // Nothing takes no room, wherever it is.
                let empty = a.bytes == 0 || b.bytes == 0;
                prop_assert!(apart || !together || empty, "{i} and {j}");
            }
        }
    }

    #[test]
    fn the_extent_is_at_least_what_lives_and_at_most_everything(buffers in buffers()) {
        let extent = extent(&buffers, &place(&buffers));
        prop_assert!(extent >= largest_live_sum(&buffers));
        prop_assert!(extent <= buffers.iter().map(|b| aligned(b.bytes)).sum());
    }

    #[test]
    fn equal_buffers_get_equal_places(buffers in buffers()) {
        prop_assert_eq!(place(&buffers), place(&buffers.clone()));
    }

    /// A step is a stack: what starts first ends last. Such buffers leave no gaps.
    #[test]
    fn stacks_reach_the_lower_bound(sizes in prop::collection::vec(1..10_000_u64, 1..40)) {
        let last = 2 * sizes.len();
        let stack: Vec<Buffer> = sizes
            .iter()
            .enumerate()
            .map(|(depth, &bytes)| Buffer {
                bytes,
                start: depth,
                end: last - depth,
                owners: Vec::new(),
            })
            .collect();
        prop_assert_eq!(extent(&stack, &place(&stack)), largest_live_sum(&stack));
    }
}
