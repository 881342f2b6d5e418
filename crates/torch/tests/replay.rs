//! The allocator against four recorded runs: fed with the recorded sizes in their order, it must
//! ask the driver for the same segments at the same events and give every tensor the same block.
//! The fixtures and their form are described in `fixtures/make_traces.py`.

use cinch_torch::allocator::{Allocator, AllocatorConfig, SegmentEvent};
use cinch_torch::trace::{Program, compare, replay, what_if};

struct Recording {
    program: Program,
    reserved: u64,
    allocated: u64,
}

fn read(text: &str) -> Recording {
    let mut program = Program::default();
    let (mut reserved, mut allocated) = (0, 0);
    for line in text.lines() {
        let mut words = line.split(' ');
        let kind = words.next().unwrap();
        let number = words.next().map_or(0, |word| word.parse().unwrap());
        let address = words
            .next()
            .map(|word| 512 * u64::from_str_radix(word, 16).unwrap());
        match kind {
            "p" | "a" => {
                program.allocate(number, 0, address);
            }
            "q" | "f" => program.free(number as u32),
            "-" => program.end_prelude(),
            "s" => program.recorded(SegmentEvent::Alloc {
                address: address.unwrap(),
                bytes: number,
            }),
            "reserved" => reserved = number,
            "allocated" => allocated = number,
            _ => panic!("{line}"),
        }
    }
    Recording {
        program,
        reserved,
        allocated,
    }
}

fn recordings() -> [(&'static str, Recording); 4] {
    [
        (
            "gpt2 fp32",
            read(include_str!("fixtures/gpt2-b4-t512-fp32.trace")),
        ),
        (
            "gpt2 amp",
            read(include_str!("fixtures/gpt2-b4-t512-amp_bf16.trace")),
        ),
        (
            "qwen2.5",
            read(include_str!(
                "fixtures/qwen2.5-0.5b-2layer-b2-t512-bf16.trace"
            )),
        ),
        (
            "qwen2.5 checkpointed",
            read(include_str!(
                "fixtures/qwen2.5-0.5b-2layer-b2-t512-bf16-ckpt.trace"
            )),
        ),
    ]
}

#[test]
fn recorded_runs_are_reproduced_block_for_block() {
    for (name, recording) in recordings() {
        let comparison = compare(&recording.program, &AllocatorConfig::default());
        assert!(
            comparison.is_exact(),
            "{name}: {} of {} segment events, {} of {} places: {:#?}",
            comparison.num_matched_segment_events,
            comparison.num_segment_events,
            comparison.num_matched_places,
            comparison.num_places,
            comparison.differences,
        );
        assert_eq!(comparison.reserved_replayed, recording.reserved, "{name}");
        assert_eq!(comparison.reserved_recorded, recording.reserved, "{name}");
        let peak = comparison.statistics.allocated.peak;
        assert_eq!(peak, recording.allocated, "{name}");
    }
}

/// Without recorded addresses, the modelled ones lead to the same reserved bytes.
#[test]
fn modelled_addresses_give_the_recorded_reserved_bytes() {
    for (name, recording) in recordings() {
        let outcome = replay(&recording.program, &AllocatorConfig::default(), None);
        assert_eq!(
            outcome.statistics.reserved.current, recording.reserved,
            "{name}"
        );
    }
}

/// Other settings on the same requests: what the guides promise of them, in order.
#[test]
fn other_settings_are_tried_on_the_recorded_requests() {
    let settings: Vec<_> = [
        "",
        "expandable_segments:True",
        "roundup_power2_divisions:2",
        "max_split_size_mb:20",
    ]
    .into_iter()
    .map(|text| (text.to_owned(), AllocatorConfig::parse(text).unwrap()))
    .collect();
    for (name, recording) in recordings() {
        let answers = what_if(&recording.program, &settings, None);
        let [plain, expandable, rounded, unsplit] = &answers[..] else {
            panic!("one answer for each setting");
        };
        assert_eq!(plain.peak_reserved, recording.reserved, "{name}");
        assert_eq!(plain.peak_allocated, recording.allocated, "{name}");
        for answer in &answers {
            assert!(answer.peak_reserved >= answer.peak_allocated, "{name}");
            assert_eq!(answer.num_alloc_retries, 0, "{name}");
        }
        // Blocks are cut to the byte, so that no rest counts as allocated.
        assert!(expandable.peak_allocated <= plain.peak_allocated, "{name}");
        assert!(rounded.peak_allocated > plain.peak_allocated, "{name}");
        assert!(unsplit.num_device_alloc >= plain.num_device_alloc, "{name}");
    }
}

/// A device that holds the peak of allocated bytes but not what was reserved: the allocator
/// gives segments back and goes on, or says at which request it could not.
#[test]
fn a_smaller_device_means_retries() {
    for (name, recording) in recordings() {
        let config = AllocatorConfig::default();
        let outcome = replay(&recording.program, &config, Some(recording.reserved));
        assert_eq!(outcome.statistics.num_alloc_retries, 0, "{name}");
        let outcome = replay(&recording.program, &config, Some(recording.reserved - 1));
        assert!(outcome.statistics.num_alloc_retries > 0, "{name}");
        let outcome = replay(&recording.program, &config, Some(recording.allocated - 1));
        assert!(outcome.out_of_memory.is_some(), "{name}");
    }
}

/// GPT-2 built with expandable segments, as measured: 497,759,744 bytes allocated and
/// 673,185,792 reserved.
#[test]
fn expandable_segments_reserve_what_was_measured() {
    let recording = read(include_str!("fixtures/gpt2-b4-t512-fp32.trace"));
    let config = AllocatorConfig::parse("expandable_segments:True").unwrap();
    let mut allocator = Allocator::new(config, Some(150_109_880_320));
    let mut blocks = Vec::new();
    let prelude = recording.program.num_prelude();
    for operation in &recording.program.operations()[..prelude] {
        operation.run(&mut allocator, &mut blocks).unwrap();
    }
    assert_eq!(allocator.statistics().allocated.current, 497_759_744);
    assert_eq!(allocator.statistics().reserved.current, 673_185_792);
}
