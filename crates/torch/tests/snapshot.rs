//! Recorded runs: read from both formats, rewound, explained, and never a panic on what is
//! damaged.

mod scene;

use std::io::Cursor;
use std::path::Path;

use cinch_torch::TorchError;
use cinch_torch::allocator::AllocatorConfig;
use cinch_torch::snapshot::{Batches, CannotTell, RecordedCategory, Snapshot, explain};
use cinch_torch::trace::compare;
use proptest::prelude::*;
use scene::{BACKWARD, FORWARD, LOOP, MIB, OPTIMIZER, Scene, training};

fn read_lines(text: &str) -> Snapshot {
    Snapshot::read_from(Cursor::new(text), false, Path::new("run.jsonl")).unwrap()
}

fn read_pickle(bytes: &[u8]) -> Result<Snapshot, TorchError> {
    Snapshot::read_from(Cursor::new(bytes), true, Path::new("run.pickle"))
}

const LINES: &str = include_str!("fixtures/snapshot.jsonl");
const PICKLES: [&[u8]; 4] = [
    include_bytes!("fixtures/snapshot-2.pickle"),
    include_bytes!("fixtures/snapshot-3.pickle"),
    include_bytes!("fixtures/snapshot-4.pickle"),
    include_bytes!("fixtures/snapshot-5.pickle"),
];

/// As PyTorch itself wrote it.
const RECORDED: &[u8] = include_bytes!("fixtures/recorded.pickle");

/// The fixture is the scene of this folder, so that a change of either is seen.
#[test]
fn the_fixture_is_the_scene() {
    assert_eq!(training("", &[2, 4]).finish(), LINES);
}

#[test]
fn explains_a_run_block_for_block() {
    let scene = training("", &[2, 4]);
    let statistics = *scene.allocator.statistics();
    let explanation = explain(&read_lines(&scene.finish())).unwrap();
    let fidelity = explanation.fidelity.unwrap();
    assert!(fidelity.exact, "{fidelity:?}");
    assert_eq!(explanation.peak_allocated, statistics.allocated.peak);
    assert_eq!(explanation.peak_reserved, statistics.reserved.peak);
    // The peak is in the second step: three activations, and the gradient that flows.
    let bytes = |category| {
        explanation
            .categories
            .iter()
            .find(|sum| sum.category == category)
            .map_or(0, |sum| sum.bytes)
    };
    assert_eq!(bytes(RecordedCategory::Activations), 3 * 8 * MIB + 60_000);
    assert_eq!(
        bytes(RecordedCategory::OptimizerStates),
        2 * (6 * MIB + 300_000)
    );
    assert_eq!(bytes(RecordedCategory::Parameters), 6 * MIB + 300_000);
    assert_eq!(bytes(RecordedCategory::Workspaces), 8 * MIB);
    assert_eq!(bytes(RecordedCategory::Loop), 4 * 4096);
    assert_eq!(bytes(RecordedCategory::Gradients), 0);
    assert_eq!(bytes(RecordedCategory::Temporaries), 4 * MIB);
    assert_eq!(explanation.largest[0].bytes, 8 * MIB + 30_000);
    assert!(explanation.largest[0].frames[0].ends_with("functional.py:2567:linear"));
    let fragmentation = explanation.fragmentation;
    assert_eq!(
        fragmentation.reserved,
        fragmentation.requested
            + fragmentation.inside_blocks
            + fragmentation.small_pool
            + fragmentation.free_segments
            + fragmentation.holes
    );
    let highest = explanation
        .timeline
        .iter()
        .map(|point| point.allocated)
        .max();
    assert_eq!(highest, Some(statistics.allocated.peak));
    // The first line of what-if is the recorded setting.
    assert_eq!(explanation.what_if[0].settings, "");
    assert_eq!(
        explanation.what_if[0].peak_allocated,
        statistics.allocated.peak
    );
}

#[test]
fn both_formats_say_the_same() {
    let lines = read_lines(LINES);
    for pickle in PICKLES {
        let pickle = read_pickle(pickle).unwrap();
        assert_eq!(pickle.devices.len(), 1);
        let (ours, theirs) = (&pickle.devices[0], &lines.devices[0]);
        assert_eq!(ours.trace.events.len(), theirs.trace.events.len());
        let frames = |snapshot: &Snapshot, stack| -> Vec<String> {
            snapshot
                .frames
                .get(stack)
                .map(|frame| format!("{}:{}:{}", frame.file, frame.line, frame.function))
                .collect()
        };
        for (one, two) in ours.trace.events.iter().zip(&theirs.trace.events) {
            assert_eq!(
                (one.action, one.size, one.address, one.time),
                (two.action, two.size, two.address, two.time)
            );
            assert_eq!(frames(&pickle, one.stack), frames(&lines, two.stack));
        }
        let segments = |snapshot: &Snapshot| {
            let mut segments = snapshot.devices[0].segments.clone().unwrap();
            for block in segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
                block.stack = cinch_torch::trace::StackId::EMPTY;
            }
            segments
        };
        assert_eq!(segments(&pickle), segments(&lines));
        assert_eq!(pickle.settings.as_deref(), Some(""));
        let (ours, theirs) = (explain(&pickle).unwrap(), explain(&lines).unwrap());
        assert_eq!(ours.categories, theirs.categories);
        assert_eq!(ours.largest, theirs.largest);
        assert!(ours.fidelity.unwrap().exact);
    }
}

/// The batch that nobody ran is predicted as the allocator really serves it, in every step: the
/// first one makes more requests than those that the sizes are told from.
#[test]
fn another_batch_size_is_told_from_two() {
    let snapshot = read_lines(&training("", &[2, 2, 4]).finish());
    let batches = Batches::new(&snapshot, 0).unwrap().unwrap();
    assert_eq!(batches.recorded(), [2, 4]);
    // Input, and by layer the temporary, the kept and the flowing tensor.
    assert_eq!(batches.num_scaling(), 10);
    for batch in [1, 2, 4, 16, 61] {
        let effect = batches.effect(&AllocatorConfig::default(), batch);
        let scene = training("", &[batch; 3]);
        let statistics = scene.allocator.statistics();
        assert_eq!(effect.peak_requested, statistics.requested.peak, "{batch}");
        assert_eq!(effect.peak_allocated, statistics.allocated.peak, "{batch}");
        assert_eq!(effect.peak_reserved, statistics.reserved.peak, "{batch}");
        assert_eq!(effect.fits, None, "the card's use is not recorded");
    }
}

/// Of the card 30 MiB are in use outside of the allocator; what is left decides.
#[test]
fn the_largest_batch_that_fits_is_found() {
    let scene = training("", &[2, 2, 4]);
    let reserved = scene.allocator.statistics().reserved.current;
    let card = 1024 * MIB;
    let text = scene.finish().replacen(
        "\"device_total\":150109880320",
        &format!(
            "\"device_total\":{card},\"device_used\":{}",
            reserved + 30 * MIB
        ),
        1,
    );
    let batches = Batches::new(&read_lines(&text), 0).unwrap().unwrap();
    assert_eq!(batches.capacity(), Some(card - 30 * MIB));
    let config = AllocatorConfig::default();
    let largest = batches.largest_that_fits(&config, 1 << 20).unwrap();
    let fits = |batch| batches.effect(&config, batch).fits;
    assert_eq!(fits(largest.batch), Some(true));
    assert_eq!(fits(largest.batch + 1), Some(false));
    assert!(largest.peak_reserved <= card - 30 * MIB);
    let few = batches.largest_that_fits(&config, largest.batch - 1);
    assert_eq!(few.unwrap().batch, largest.batch - 1);
}

#[test]
fn another_batch_size_is_not_guessed() {
    let answer = |text: &str| Batches::new(&read_lines(text), 0).unwrap().err().unwrap();
    assert_eq!(answer(&training("", &[2]).finish()), CannotTell::NoSteps);
    assert_eq!(
        answer(&training("", &[2, 2]).finish()),
        CannotTell::OneBatchSize
    );
    // The first step makes the optimizer's states, the second does not.
    assert_eq!(
        answer(&training("", &[2, 4]).finish()),
        CannotTell::StepsDiffer {
            first: 1,
            second: 2
        }
    );
    let untimed = training("", &[2, 2, 4])
        .finish()
        .replace("\"action\"", "\"x\":0,\"action\"");
    let untimed: String = untimed
        .lines()
        .map(|line| match line.split_once(",\"time_us\":") {
            Some((before, after)) if line.contains("\"action\"") => {
                let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
                format!("{before}{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    assert_eq!(answer(&untimed), CannotTell::NoTimes);
}

#[test]
fn a_trace_without_segments_says_what_is_missing() {
    let lines: String = training("", &[2])
        .finish()
        .lines()
        .filter(|line| line.contains("\"action\"") && !line.contains("\"stack\""))
        .map(|line| format!("{line}\n"))
        .collect();
    let explanation = explain(&read_lines(&lines)).unwrap();
    assert!(explanation.fidelity.is_none());
    let notes = explanation.notes.join("\n");
    assert!(notes.contains("no segments"), "{notes}");
    assert!(notes.contains("No Python frames"), "{notes}");
}

/// Requests in sizes that leave no uncut rests, recorded from some moment on. Where an
/// expandable segment begins cannot be told if its first pages were unmapped before that, so
/// there is no release until then.
fn rewinding(settings: &'static str, requests: &[(u64, usize)], from: usize) {
    let mut scene = Scene::new(settings);
    let mut living = Vec::new();
    let stacks = [FORWARD, BACKWARD, OPTIMIZER, LOOP];
    for (number, &(size, which)) in requests.iter().enumerate() {
        if number == from {
            scene.record();
        }
        if size == 0 && !living.is_empty() {
            scene.free(living.swap_remove(which % living.len()), stacks[which % 4]);
        } else if which % 41 == 7 && (number >= from || settings.is_empty()) {
            scene.release_cached();
        } else {
            let bytes = if size < 8 {
                1000 * size
            } else {
                (size - 7) * 2 * MIB
            };
            living.push(scene.allocate(bytes, stacks[which % 4]));
        }
    }
    // Whatever was drawn, something is recorded.
    if from >= requests.len() {
        scene.record();
    }
    scene.allocate(MIB, FORWARD);
    let statistics = *scene.allocator.statistics();
    let snapshot = read_lines(&scene.finish());
    let config = AllocatorConfig::parse(settings).unwrap();
    let program = snapshot.program(0).unwrap();
    let comparison = compare(&program, &config);
    assert!(comparison.is_exact(), "{:#?}", comparison.differences);
    assert_eq!(comparison.reserved_replayed, statistics.reserved.current);
    assert_eq!(
        comparison.statistics.allocated.current,
        statistics.allocated.current
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    /// From the segments at the end, back to the start, and forward again: the same blocks.
    #[test]
    fn rewinds_to_the_start(
        requests in prop::collection::vec((prop_oneof![2 => Just(0u64), 3 => 1u64..20], any::<usize>()), 1..120),
        from in 0usize..60,
    ) {
        rewinding("", &requests, from);
        rewinding("expandable_segments:True", &requests, from);
    }

    /// Bytes of a pickle changed, dropped or doubled: an error or a snapshot, never a panic.
    #[test]
    fn damaged_pickles_are_survived(
        which in 0usize..=PICKLES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..8),
    ) {
        let mut bytes = PICKLES.get(which).copied().unwrap_or(RECORDED).to_vec();
        damage(&mut bytes, &changes);
        if let Ok(snapshot) = read_pickle(&bytes) {
            survive(&snapshot);
        }
    }

    #[test]
    fn damaged_lines_are_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..5), 1..8),
    ) {
        let mut bytes = LINES.as_bytes().to_vec();
        damage(&mut bytes, &changes);
        let read = Snapshot::read_from(Cursor::new(&bytes), false, Path::new("run.jsonl"));
        if let Ok(snapshot) = read {
            survive(&snapshot);
        }
    }
}

fn damage(bytes: &mut Vec<u8>, changes: &[(prop::sample::Index, u8, u8)]) {
    for (index, value, kind) in changes {
        if bytes.is_empty() {
            return;
        }
        let place = index.index(bytes.len());
        match kind {
            0 => bytes[place] = *value,
            1 => drop(bytes.remove(place)),
            2 => bytes.insert(place, *value),
            3 => bytes.truncate(place.max(bytes.len() / 2)),
            // A digit becomes another: the file stays well formed, the numbers do not.
            _ => {
                if let Some(digit) = bytes[place..].iter_mut().find(|byte| byte.is_ascii_digit()) {
                    *digit = b'0' + value % 10;
                }
            }
        }
    }
}

/// Whatever could be read can be explained, or is refused.
fn survive(snapshot: &Snapshot) {
    let _ = explain(snapshot);
    let config = AllocatorConfig::default();
    for device in 0..snapshot.devices.len() {
        if let Ok(Ok(batches)) = Batches::new(snapshot, device) {
            let _ = batches.effect(&config, 3);
        }
    }
}

#[test]
fn a_cut_pickle_is_an_error_at_every_byte() {
    let pickle = PICKLES[2];
    for length in 0..pickle.len() {
        assert!(read_pickle(&pickle[..length]).is_err(), "{length}");
    }
}

/// One empty list stands for the frames of a segment that is still being read and of its blocks;
/// a list that is remembered twice, or doubled on the stack, is one list too.
#[test]
fn what_is_shared_in_a_pickle_is_one_thing() {
    let block = b"}(\x8c\x04sizeM\x00\x02\x8c\x05state\x8c\x08inactive\x8c\x06framesh\x00u";
    for list in [&b"]\x94"[..], b"]\x94\x940]\x94\x940h\x00", b"]2\x940"] {
        let mut bytes = b"\x80\x04}(\x8c\x08segments](".to_vec();
        for (address, number) in [(b'\x02', 0), (b'\x04', 1)] {
            bytes.extend(b"}(\x8c\x07addressM\x00");
            bytes.extend([address]);
            bytes.extend(b"\x8c\x0atotal_sizeM\x00\x02\x8c\x06streamK\x00");
            bytes.extend(b"\x8c\x0csegment_type\x8c\x05small\x8c\x06frames");
            bytes.extend(if number == 0 { list } else { b"h\x00" });
            bytes.extend(b"\x8c\x06blocks](");
            bytes.extend(block);
            bytes.extend(b"eu");
        }
        bytes.extend(b"eu.");
        let snapshot = read_pickle(&bytes).unwrap();
        let segments = snapshot.devices[0].segments.as_ref().unwrap();
        let places: Vec<_> = segments
            .iter()
            .map(|segment| (segment.address, segment.blocks.len()))
            .collect();
        assert_eq!(places, [(0x200, 1), (0x400, 1)]);
    }
}

#[test]
fn pickles_cannot_run_code() {
    // What pickle.dumps(os.system, …) would write: a global and a call.
    let evil = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.";
    let error = read_pickle(evil).err().unwrap().to_string();
    assert!(error.contains("import or call Python code"), "{error}");
}

/// Lengths in the file are not believed: a few bytes cannot ask for gigabytes.
#[test]
fn lengths_are_not_believed() {
    let mut text = b"\x80\x04\x8d".to_vec();
    text.extend(u64::MAX.to_le_bytes());
    let mut memo = b"\x80\x04Nr".to_vec();
    memo.extend(u32::MAX.to_le_bytes());
    let cases: [(&[u8], &str); 7] = [
        (&text, "the file ends in a text"),
        (&memo, "is remembered before its predecessors"),
        (b"\x80\x04.", "a value is taken that was never given"),
        (b"\x80\x04]K\x01s.", "a value is used that was never given"),
        (b"\x80\x04K\x01K\x02K\x03s.", "not a dictionary"),
        (b"\x80\x04}.", "there are no `segments`"),
        (b"\x80\x09.", "protocol 9 is unknown"),
    ];
    for (bytes, message) in cases {
        let error = read_pickle(bytes).err().unwrap().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn wrong_lines_are_named() {
    let cases = [
        ("{\"action\":\"alloc\"}", "an event has no `size`"),
        ("[1]", "line 1"),
        ("{\"foo\":1}", "neither an event"),
        ("{\"action\":\"alloc\",\"size\":-1}", "invalid value"),
        (
            "{\"action\":\"alloc\",\"size\":18446744073709551615}",
            "are on no device",
        ),
        (
            "{\"action\":\"alloc\",\"size\":1,\"stack\":9}",
            "stack 9 is used before it is given",
        ),
        (
            "{\"segment\":0,\"size\":1024,\"pool\":\"small\",\"blocks\":[[512,4,\"inactive\",null]]}",
            "end at 512, the segment at 1024",
        ),
        ("{\"cinch_snapshot\":7}", "the format's version is 7"),
    ];
    for (text, message) in cases {
        let read = Snapshot::read_from(Cursor::new(text), false, Path::new("run.jsonl"));
        let error = read.err().unwrap().to_string();
        assert!(error.contains(message), "{text}: {error}");
    }
}
