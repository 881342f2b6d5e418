//! A real recording: PyTorch 2.11 on an H200, three steps of batches 8, 8 and 16. Its figures
//! were measured by PyTorch itself; `fixtures/make_recorded.py` says how it was made.

use std::collections::HashMap;
use std::io::Cursor;
use std::path::Path;

use cinch_torch::allocator::AllocatorConfig;
use cinch_torch::snapshot::{
    Batches, CannotTell, Explanation, RecordedCategory, RecordedPhase, Snapshot, explain,
};
use cinch_torch::trace::compare;

const LINES: &str = include_str!("fixtures/recorded.jsonl");
const PICKLE: &[u8] = include_bytes!("fixtures/recorded.pickle");
const OUT_OF_MEMORY: &str = include_str!("fixtures/recorded_oom.jsonl");

/// What torch.cuda.memory_stats() said at the end of the run.
const PEAK_ALLOCATED: u64 = 231_313_920;
const PEAK_RESERVED: u64 = 375_390_208;
const ALLOCATED_AT_END: u64 = 106_251_776;
const RESERVED_AT_END: u64 = 375_390_208;

fn lines(text: &str) -> Snapshot {
    Snapshot::read_from(Cursor::new(text), false, Path::new("recorded.jsonl")).unwrap()
}

fn pickle() -> Snapshot {
    Snapshot::read_from(Cursor::new(PICKLE), true, Path::new("recorded.pickle")).unwrap()
}

fn bytes_of(explanation: &Explanation, category: RecordedCategory) -> u64 {
    let found = explanation
        .categories
        .iter()
        .find(|one| one.category == category);
    found.map_or(0, |one| one.bytes)
}

#[test]
fn figures_are_those_that_were_measured() {
    for snapshot in [lines(LINES), pickle()] {
        let explanation = explain(&snapshot).unwrap();
        assert_eq!(explanation.peak_allocated, PEAK_ALLOCATED);
        assert_eq!(explanation.peak_reserved, PEAK_RESERVED);
        assert_eq!(explanation.peak_phase, RecordedPhase::Backward);
        assert!(explanation.fidelity.unwrap().exact);
        let program = snapshot.program(0).unwrap();
        let comparison = compare(&program, &AllocatorConfig::default());
        assert!(comparison.is_exact(), "{:#?}", comparison.differences);
        assert_eq!(comparison.statistics.allocated.current, ALLOCATED_AT_END);
        assert_eq!(comparison.reserved_replayed, RESERVED_AT_END);
    }
}

#[test]
fn both_files_are_explained_alike() {
    let (ours, theirs) = (explain(&lines(LINES)).unwrap(), explain(&pickle()).unwrap());
    assert_eq!(ours.num_events, theirs.num_events);
    assert_eq!(ours.settings, theirs.settings);
    assert_eq!(ours.categories, theirs.categories);
    assert_eq!(ours.largest, theirs.largest);
    assert_eq!(ours.lines, theirs.lines);
    assert_eq!(ours.timeline, theirs.timeline);
    assert_eq!(ours.fragmentation, theirs.fragmentation);
    assert_eq!(ours.notes, theirs.notes);
    // The marks are the recorder's alone.
    let step = ours.peak_step.unwrap();
    assert_eq!((step.number, step.batch), (3, Some(16)));
    assert_eq!(theirs.peak_step, None);
    let unknown = Batches::new(&pickle(), 0).unwrap().err();
    assert_eq!(unknown, Some(CannotTell::NoSteps));
}

/// What the model's shapes say: three matrices and their vectors in fp32, two states of each.
#[test]
fn categories_are_those_of_the_model() {
    let explanation = explain(&lines(LINES)).unwrap();
    let (vocabulary, width, inner) = (5000, 256, 1024);
    let parameters = vocabulary * width
        + (width * inner + inner)
        + (inner * width + width)
        + 2 * width
        + (width * vocabulary + vocabulary);
    assert_eq!(
        bytes_of(&explanation, RecordedCategory::Parameters),
        4 * parameters
    );
    assert_eq!(
        bytes_of(&explanation, RecordedCategory::OptimizerStates),
        8 * parameters
    );
    // The batch is 16 × 128 numbers of eight bytes; four bytes more are the last loss.
    assert_eq!(
        bytes_of(&explanation, RecordedCategory::Loop),
        16 * 128 * 8 + 4
    );
    let sum: u64 = explanation.categories.iter().map(|one| one.bytes).sum();
    let highest = explanation.timeline.iter().max_by_key(|one| one.allocated);
    assert_eq!(highest.unwrap().categories.values().sum::<u64>(), sum);
}

#[test]
fn lines_are_the_users() {
    let explanation = explain(&lines(LINES)).unwrap();
    let found: Vec<(Option<&str>, Option<String>, RecordedCategory)> = explanation
        .lines
        .iter()
        .map(|line| {
            let own = line.origin.line.as_deref();
            (own, line.origin.library(), line.category)
        })
        .collect();
    let own = |number: u32| format!("…/project/src/record.py:{number}");
    for (number, op, category) in [
        (3, Some("module.py:1097 cuda"), RecordedCategory::Parameters),
        (7, None, RecordedCategory::Loop),
        (
            9,
            Some("linear.py:134 forward"),
            RecordedCategory::Activations,
        ),
        (
            9,
            Some("functional.py:2935 layer_norm"),
            RecordedCategory::Activations,
        ),
        (
            10,
            Some("adam.py:178 _init_group"),
            RecordedCategory::OptimizerStates,
        ),
    ] {
        let own = own(number);
        let wanted = (Some(own.as_str()), op.map(str::to_owned), category);
        assert!(found.contains(&wanted), "{wanted:?} is not in {found:#?}");
    }
    // Autograd's thread has no Python: such blocks are the backward's, and of no line.
    let first = &explanation.lines[0];
    assert_eq!((&first.origin.line, &first.origin.op), (&None, &None));
    assert_eq!(first.phase, RecordedPhase::Backward);
    for line in &explanation.lines {
        if line.origin.line.is_none() {
            assert_eq!(line.phase, RecordedPhase::Backward, "{line:?}");
        }
    }
}

/// The recording cut where the batch changes is a run of batch 8 alone, which the whole
/// recording must predict to the byte.
#[test]
fn a_smaller_batch_is_what_its_steps_took() {
    let mark = LINES
        .lines()
        .find(|line| line.contains("\"mark\"") && line.contains("\"batch\":16"))
        .unwrap();
    let time_of = |line: &str| -> u64 {
        let (_, rest) = line.split_once("\"time_us\":").unwrap();
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap();
        rest[..end].parse().unwrap()
    };
    let end = time_of(mark);
    let cut: String = LINES
        .lines()
        .filter(|line| match line.contains("\"action\"") {
            true => time_of(line) < end,
            false => line.contains("\"stack\":") && line.contains("\"frames\":"),
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let of_cut = explain(&lines(&cut)).unwrap();
    let batches = Batches::new(&lines(LINES), 0).unwrap().unwrap();
    let effect = batches.effect(&AllocatorConfig::default(), 8);
    assert!(of_cut.peak_allocated < PEAK_ALLOCATED);
    assert_eq!(effect.peak_allocated, of_cut.peak_allocated);
    assert_eq!(effect.peak_reserved, of_cut.peak_reserved);
    assert_eq!(effect.fits, Some(true));
}

/// The second step again with the sizes of those requests doubled that grow with the batch, live
/// bytes summed by hand: the peak of batch 16 from a step of batch 8. It is the recorded one,
/// and the one that is predicted.
#[test]
fn batch_16_is_predicted_from_a_step_of_batch_8() {
    let events: Vec<serde_json::Value> = LINES
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let marks: Vec<u64> = events
        .iter()
        .filter(|line| line.get("mark").is_some())
        .map(|line| line["time_us"].as_u64().unwrap())
        .collect();
    let step = |event: &serde_json::Value| {
        let time = event["time_us"].as_u64().unwrap();
        marks.iter().filter(|&&mark| mark <= time).count()
    };
    let of_steps = |wanted: &dyn Fn(usize) -> bool| -> Vec<(bool, u64, u64)> {
        let requests = events.iter().filter(|event| {
            matches!(event["action"].as_str(), Some("alloc" | "free_requested"))
                && wanted(step(event))
        });
        requests
            .map(|event| {
                (
                    event["action"] == "alloc",
                    event["addr"].as_u64().unwrap(),
                    event["size"].as_u64().unwrap(),
                )
            })
            .collect()
    };
    let mut live: HashMap<u64, u64> = HashMap::new();
    let run = |live: &mut HashMap<u64, u64>, requests: &[(bool, u64, u64)]| -> u64 {
        let mut sum: u64 = live.values().sum();
        let mut peak = sum;
        for &(is_allocation, address, size) in requests {
            match is_allocation {
                true => {
                    live.insert(address, size);
                    sum += size;
                }
                false => sum -= live.remove(&address).unwrap(),
            }
            peak = peak.max(sum);
        }
        peak
    };
    run(&mut live, &of_steps(&|step| step < 2));
    let mut of_16 = of_steps(&|step| step == 2);
    let recorded = of_steps(&|step| step == 3);
    let mut num_doubled = 0;
    let sizes = recorded.iter().filter(|request| request.0);
    for (mine, theirs) in of_16.iter_mut().filter(|request| request.0).zip(sizes) {
        if mine.2 != theirs.2 {
            mine.2 *= 2;
            num_doubled += 1;
        }
        assert_eq!(mine.2, theirs.2);
    }
    let mut after_8 = live.clone();
    let predicted = run(&mut after_8, &of_16);

    let batches = Batches::new(&lines(LINES), 0).unwrap().unwrap();
    assert_eq!(batches.num_scaling(), num_doubled);
    let effect = batches.effect(&AllocatorConfig::default(), 16);
    assert_eq!(effect.peak_requested, predicted);
    let explanation = explain(&lines(LINES)).unwrap();
    let alive: u64 = explanation.categories.iter().map(|one| one.bytes).sum();
    assert_eq!(alive, predicted);
    // What blocks have beyond it depends on the steps before, which were of batch 8 here.
    let off = PEAK_ALLOCATED.abs_diff(effect.peak_allocated);
    assert!(off * 50 < PEAK_ALLOCATED, "{off}");
    assert!(effect.peak_reserved < PEAK_RESERVED);
}

/// Autocast drops its casts in an order that is another one in each step; the steps made the same
/// requests all the same.
#[test]
fn the_order_of_frees_in_a_row_does_not_matter() {
    let mut moved: Vec<&str> = LINES.lines().collect();
    let exit = moved
        .iter()
        .rposition(|line| line.contains("free_completed") && line.contains("\"stack\":11}"))
        .unwrap();
    assert!(moved[exit - 3].contains("free_requested") && moved[exit - 3].ends_with(":11}"));
    moved.swap(exit, exit - 2);
    moved.swap(exit - 1, exit - 3);
    let batches = |text: &str| Batches::new(&lines(text), 0).unwrap().unwrap();
    let (one, two) = (batches(LINES), batches(&moved.join("\n")));
    assert_eq!(one.num_scaling(), two.num_scaling());
    let config = AllocatorConfig::default();
    let peaks = |batches: &Batches| batches.effect(&config, 32).peak_requested;
    assert_eq!(peaks(&one), peaks(&two));
}

/// PyTorch says of memory that ran out what was asked for and what was free.
#[test]
fn where_memory_ran_out_is_told() {
    let oom = "{\"action\":\"oom\",\"size\":163840000,\"device_free\":1048576,\"time_us\":1794736723199700,\"stack\":4}\n";
    let explanation = explain(&lines(&format!("{LINES}{oom}"))).unwrap();
    let ran_out = explanation.ran_out.unwrap();
    assert_eq!(ran_out.bytes, 163_840_000);
    assert_eq!(ran_out.device_free, 1 << 20);
    assert_eq!(
        ran_out.origin.line.as_deref(),
        Some("…/project/src/record.py:9")
    );
    assert_eq!(
        ran_out.origin.op.as_deref(),
        Some("functional.py:3504 cross_entropy")
    );
    assert_eq!(explanation.peak_allocated, PEAK_ALLOCATED);
}

/// The same program was run with batches of 16 alone, and of 32; PyTorch's peaks then. Above 3072 indices an embedding's
/// gradient is made in another way, which no step of the recording has.
#[test]
fn other_batches_take_what_was_measured() {
    let snapshot = lines(LINES);
    let batches = Batches::new(&snapshot, 0).unwrap().unwrap();
    let effect = |batch| batches.effect(&AllocatorConfig::default(), batch);
    let of_16 = effect(16);
    assert_eq!(
        (of_16.peak_allocated, of_16.peak_reserved),
        (228_913_664, 297_795_584)
    );
    let of_32 = effect(32);
    let near = |predicted: u64, measured: f64| (predicted as f64 / measured - 1.0).abs();
    assert!(near(of_32.peak_allocated, 339_384_832.0) < 0.02);
    assert!(near(of_32.peak_reserved, 497_025_024.0) < 0.07);
}

/// A run under a cap of 400 MiB that ended in the backward of its third step.
#[test]
fn a_run_that_ran_out_keeps_its_activations() {
    let explanation = explain(&lines(OUT_OF_MEMORY)).unwrap();
    let ran_out = explanation.ran_out.as_ref().unwrap();
    // PyTorch said: tried to allocate 130.00 MiB, of which the tensor is 32 × 128 × 5000 numbers less rounding.
    assert!(ran_out.bytes <= 130 << 20 && ran_out.bytes > 129 << 20);
    assert_eq!(ran_out.phase, RecordedPhase::Backward);
    // The scores, their logarithms and the layers' results are 32 × 128 rows; workspaces are what BLAS keeps.
    let activations = bytes_of(&explanation, RecordedCategory::Activations);
    assert!(
        activations > 32 * 128 * (5000 + 2 * 1024 + 3 * 256) * 4,
        "{activations}"
    );
    assert_eq!(
        bytes_of(&explanation, RecordedCategory::Workspaces),
        65 << 20
    );
}
