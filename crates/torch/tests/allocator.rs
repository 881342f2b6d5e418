//! Random requests through the allocator and through a slow model of it: every address, every
//! call of the driver and every sum must be the same, and the books must be in order.

mod naive;

use cinch_torch::allocator::{Allocator, AllocatorConfig, SegmentEvent};
use naive::{Call, MIB, Naive, Rules, Sums, TOTAL};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Allocate { bytes: u64, stream: u64 },
    Free { which: usize },
    RequestFree { which: usize },
    CompleteFree { which: usize },
    ReleaseCached,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        4 => 0u64..5000,
        3 => (1u64..2048).prop_map(|blocks| 512 * blocks),
        3 => MIB..12 * MIB,
        2 => (1u64..40).prop_map(|count| count * MIB),
        1 => 20 * MIB..200 * MIB,
    ];
    let allocate = (bytes, prop_oneof![4 => Just(0u64), 1 => Just(7u64)])
        .prop_map(|(bytes, stream)| Step::Allocate { bytes, stream });
    prop_oneof![
        12 => allocate,
        9 => any::<usize>().prop_map(|which| Step::Free { which }),
        1 => any::<usize>().prop_map(|which| Step::RequestFree { which }),
        1 => any::<usize>().prop_map(|which| Step::CompleteFree { which }),
        1 => Just(Step::ReleaseCached),
    ]
}

fn rules() -> impl Strategy<Value = Rules> {
    (
        any::<bool>(),
        prop_oneof![3 => Just(None), 1 => Just(Some(20 * MIB)), 1 => Just(Some(64 * MIB))],
        prop_oneof![3 => Just(0u64), 1 => Just(2u64), 1 => Just(8u64)],
        prop_oneof![2 => Just(None), 2 => (40u64..900).prop_map(|mib| Some(mib * MIB))],
        prop_oneof![2 => Just(None), 1 => (40u64..900).prop_map(|mib| Some((mib * MIB) as f64 / TOTAL as f64))],
    )
        .prop_map(
            |(expandable, max_split, divisions, device, fraction)| Rules {
                expandable,
                max_split,
                divisions,
                device,
                fraction,
            },
        )
}

fn settings(rules: &Rules) -> String {
    let mut settings = vec![format!(
        "expandable_segments:{}",
        if rules.expandable { "True" } else { "False" }
    )];
    if let Some(bytes) = rules.max_split {
        settings.push(format!("max_split_size_mb:{}", bytes / MIB));
    }
    if rules.divisions > 0 {
        settings.push(format!("roundup_power2_divisions:{}", rules.divisions));
    }
    if let Some(fraction) = rules.fraction {
        settings.push(format!("per_process_memory_fraction:{fraction}"));
    }
    settings.join(",")
}

fn calls(events: &[SegmentEvent]) -> Vec<Call> {
    let mut calls: Vec<Call> = events
        .iter()
        .map(|event| match *event {
            SegmentEvent::Alloc { bytes, .. } | SegmentEvent::Map { bytes, .. } => Call::Get(bytes),
            SegmentEvent::Free { bytes, .. } | SegmentEvent::Unmap { bytes, .. } => {
                Call::Return(bytes)
            }
        })
        .collect();
    calls.sort();
    calls
}

fn sums(allocator: &Allocator) -> Sums {
    let statistics = allocator.statistics();
    Sums {
        allocated: statistics.allocated.current,
        active: statistics.active.current,
        requested: statistics.requested.current,
        reserved: statistics.reserved.current,
        inactive_split: statistics.inactive_split.current,
    }
}

fn run(rules: Rules, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let config = AllocatorConfig::parse(&settings(&rules)).unwrap();
    let mut allocator = Allocator::new(config, Some(TOTAL));
    allocator.set_outside_bytes(TOTAL - rules.device.unwrap_or(TOTAL));
    let mut naive = Naive::new(rules);
    let mut living = Vec::new();
    let mut pending = Vec::new();
    for step in steps {
        match step {
            Step::Allocate { bytes, stream } => {
                let result = allocator.allocate(bytes, stream);
                let events = allocator.take_segment_events();
                let mut addresses = events.iter().filter_map(|event| match *event {
                    SegmentEvent::Alloc { address, .. } | SegmentEvent::Map { address, .. } => {
                        Some(address)
                    }
                    _ => None,
                });
                // A new segment is the last thing asked for: pages that were mapped before it
                // did not suffice. An address that nobody gave shows as a missing call.
                let address = addresses.next_back().unwrap_or(1 << 40);
                let expected = naive.allocate(bytes, stream, || address);
                match (result, expected) {
                    (Ok(id), Some(address)) => {
                        prop_assert_eq!(allocator.address(id), address);
                        living.push(id);
                    }
                    (Err(error), None) => prop_assert_eq!(error.requested, bytes),
                    (result, expected) => {
                        prop_assert!(false, "{result:?}, expected {expected:?}")
                    }
                }
                naive.calls.sort();
                prop_assert_eq!(calls(&events), std::mem::take(&mut naive.calls));
            }
            Step::Free { which } if !living.is_empty() => {
                let id = living.swap_remove(which % living.len());
                naive.request_free(allocator.address(id));
                naive.complete_free(allocator.address(id));
                allocator.free(id);
            }
            Step::RequestFree { which } if !living.is_empty() => {
                let id = living.swap_remove(which % living.len());
                naive.request_free(allocator.address(id));
                allocator.request_free(id);
                pending.push(id);
            }
            Step::CompleteFree { which } if !pending.is_empty() => {
                let id = pending.swap_remove(which % pending.len());
                naive.complete_free(allocator.address(id));
                allocator.complete_free(id);
            }
            Step::ReleaseCached => {
                allocator.release_cached();
                naive.give_back();
                naive.calls.sort();
                let events = allocator.take_segment_events();
                prop_assert_eq!(calls(&events), std::mem::take(&mut naive.calls));
            }
            _ => {}
        }
        prop_assert_eq!(sums(&allocator), naive.sums());
        prop_assert_eq!(allocator.statistics().num_alloc_retries, naive.retries);
        if let Err(problem) = allocator.verify() {
            prop_assert!(false, "{problem}");
        }
    }
    // No two blocks share a byte.
    let mut end = 0;
    for segment in allocator.segments() {
        for block in segment.blocks {
            prop_assert!(block.address >= end);
            end = block.address + block.size;
        }
    }
    // Everything freed and released: nothing is left.
    for id in living {
        allocator.free(id);
    }
    for id in pending {
        allocator.complete_free(id);
    }
    allocator.release_cached();
    prop_assert_eq!(
        sums(&allocator),
        Sums {
            allocated: 0,
            active: 0,
            requested: 0,
            reserved: 0,
            inactive_split: 0
        }
    );
    // Addresses may remain, of ranges for which there never was a page.
    prop_assert!(
        allocator
            .segments()
            .iter()
            .all(|segment| segment.blocks.is_empty())
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn agrees_with_the_naive_model(rules in rules(), steps in prop::collection::vec(step(), 1..160)) {
        run(rules, steps)?;
    }
}

/// `max_split_size_mb` keeps large blocks whole; a request may only be rounded up so far.
#[test]
fn oversize_blocks_are_kept_for_oversize_requests() {
    let config = AllocatorConfig::parse("max_split_size_mb:64").unwrap();
    let mut allocator = Allocator::new(config, None);
    let large = allocator.allocate(100 * MIB, 0).unwrap();
    allocator.free(large);
    allocator.allocate(30 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 130 * MIB);
    // 81 MiB may take the block of 100 MiB, 79 MiB may not.
    allocator.allocate(79 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 210 * MIB);
    let taken = allocator.allocate(81 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 210 * MIB);
    assert_eq!(allocator.block_size(taken), 100 * MIB);
}

/// Above the threshold, segments older than the average go back and younger ones stay.
#[test]
fn garbage_collection_releases_the_oldest_segments() {
    let config =
        AllocatorConfig::parse("garbage_collection_threshold:0.5,per_process_memory_fraction:1.0")
            .unwrap();
    let mut allocator = Allocator::new(config, Some(400 * MIB));
    let old = allocator.allocate(60 * MIB, 0).unwrap();
    let young = allocator.allocate(80 * MIB, 0).unwrap();
    allocator.free(old);
    // Searches that pass over the old block.
    for _ in 0..3 {
        let kept = allocator.allocate(70 * MIB, 0).unwrap();
        allocator.free(kept);
    }
    allocator.free(young);
    // 60, 80 and 70 MiB are reserved, 200 are the threshold.
    assert_eq!(allocator.statistics().reserved.current, 210 * MIB);
    allocator.take_segment_events();
    allocator.allocate(100 * MIB, 0).unwrap();
    let released: Vec<u64> = allocator
        .take_segment_events()
        .iter()
        .filter_map(|event| match event {
            SegmentEvent::Free { bytes, .. } => Some(*bytes),
            _ => None,
        })
        .collect();
    assert_eq!(released, [60 * MIB]);
    allocator.verify().unwrap();
}

/// A private pool neither gives to nor takes from the common one, and is released only after
/// its graphs are gone.
#[test]
fn private_pools_are_apart() {
    let mut allocator = Allocator::new(AllocatorConfig::default(), None);
    let captured = allocator.allocate_in(30 * MIB, 0, 5).unwrap();
    allocator.free(captured);
    allocator.allocate(30 * MIB, 0).unwrap();
    assert_eq!(allocator.statistics().reserved.current, 60 * MIB);
    allocator.release_cached();
    assert_eq!(allocator.statistics().reserved.current, 60 * MIB);
    allocator.end_private_pool(5);
    allocator.release_cached();
    assert_eq!(allocator.statistics().reserved.current, 30 * MIB);
    allocator.verify().unwrap();
}

#[test]
fn running_out_says_what_was_there() {
    let config = AllocatorConfig::parse("per_process_memory_fraction:0.5").unwrap();
    let mut allocator = Allocator::new(config, Some(200 * MIB));
    allocator.allocate(90 * MIB, 0).unwrap();
    let error = allocator.allocate(15 * MIB + 1, 0).unwrap_err();
    assert_eq!(error.segment, 16 * MIB);
    assert_eq!((error.reserved, error.limit), (90 * MIB, 100 * MIB));
    assert!(error.capped);
    assert!(allocator.allocate(u64::MAX, 0).is_err());
    assert_eq!(allocator.statistics().num_ooms, 2);
    allocator.set_outside_bytes(120 * MIB);
    let error = allocator.allocate(2 * MIB, 0).unwrap_err();
    assert_eq!((error.limit, error.capped), (80 * MIB, false));
}
